"""Gemma 4's GGUF files in its three shapes: dense, with experts beside the MLP, and E2B's and E4B's."""

from typing import Any, ClassVar

import numpy as np

from mlx_dflash.errors import CheckpointError

from .gguf import ATTENTION, MLP, QK_NORMS, TOP_NAMES
from .gguf_families import Family, layer_types
from .gguf_file import shortest

EXPERTS = "experts.switch_glu"  # mlx-lm's name of the experts' matrices


class Gemma4(Family):
    """Norms as they are. Keys are values too where full layers have no attn_v; rope_freqs says how much is rotated."""

    model_type = "gemma4_text"
    scales_rope = False
    top = TOP_NAMES | {
        "per_layer_token_embd": "model.embed_tokens_per_layer",
        "per_layer_model_proj": "model.per_layer_model_projection",
        "per_layer_proj_norm": "model.per_layer_projection_norm",
    }
    layers = (
        ATTENTION
        | QK_NORMS
        | MLP
        | {
            "attn_norm": "input_layernorm",
            "post_attention_norm": "post_attention_layernorm",
            "ffn_norm": "pre_feedforward_layernorm",
            "post_ffw_norm": "post_feedforward_layernorm",
            "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
            "post_ffw_norm_1": "post_feedforward_layernorm_1",
            "post_ffw_norm_2": "post_feedforward_layernorm_2",
            "ffn_gate_inp": "router.proj",
            **{f"ffn_{part}_exps": f"{EXPERTS}.{part}_proj" for part in ("gate", "up", "down")},
            "inp_gate": "per_layer_input_gate",
            "proj": "per_layer_projection",
            "post_norm": "post_per_layer_input_norm",
        }
    )
    bare: ClassVar[dict[str, str]] = {
        "layer_output_scale.weight": "layer_scalar",
        "ffn_gate_inp.scale": "router.scale",
        "ffn_down_exps.scale": "router.per_expert_scale",
    }

    def config(self, tied: bool) -> dict[str, Any]:
        need, own, config = self.file.need_own, self.file.own, super().config(tied)
        full_theta = config.pop("rope_theta")
        config.pop("rope_scaling")
        kinds = layer_types(self.file)
        shared, experts = int(own("attention.shared_kv_layers", 0)), int(own("expert_count", 0))
        heads = per_kind(config["num_key_value_heads"], kinds)
        full = [i for i, kind in enumerate(kinds) if kind == "full_attention"]
        both = not any(f"blk.{i}.attn_v.weight" in self.file.tensors for i in full)
        inner = config["intermediate_size"]
        inner = inner if isinstance(inner, list) else [inner]
        return config | {
            "intermediate_size": int(inner[0]),
            "use_double_wide_mlp": int(inner[-1]) == 2 * int(inner[0]),
            "head_dim": int(need("attention.key_length_swa")),
            "global_head_dim": int(need("attention.key_length")),
            "num_key_value_heads": heads["sliding_attention"],
            "num_global_key_value_heads": heads["full_attention"] if both else None,
            "attention_k_eq_v": both,
            "layer_types": kinds,
            "sliding_window": int(need("attention.sliding_window")),
            "num_kv_shared_layers": shared,
            "hidden_size_per_layer_input": int(own("embedding_length_per_layer_input", 0)),
            "vocab_size_per_layer_input": config["vocab_size"],
            "final_logit_softcapping": own("final_logit_softcapping") and shortest(own("final_logit_softcapping")),
            "enable_moe_block": experts > 0,
            "num_experts": experts or None,
            "top_k_experts": int(need("expert_used_count")) if experts else None,
            "moe_intermediate_size": int(need("expert_feed_forward_length")) if experts else None,
            "rope_parameters": {
                "full_attention": {
                    "rope_type": "proportional",
                    "rope_theta": full_theta,
                    "partial_rotary_factor": self.rotated(),
                },
                "sliding_attention": {"rope_type": "default", "rope_theta": shortest(need("rope.freq_base_swa"))},
            },
        }

    def rotated(self) -> float:
        """The share of a full layer's dimensions that rotate: factors of 1, where the others are beyond all bounds."""
        if (tensor := self.file.tensors.get("rope_freqs.weight")) is None:
            raise CheckpointError(f"{self.file.path} lacks rope_freqs.weight; download it again")
        factors = np.asarray(tensor.data).view(np.float32).reshape(-1)
        return float((factors == 1.0).mean())


def per_kind(heads: int | list[int], kinds: list[str]) -> dict[str, int]:
    """Heads of keys and values by kind of layer, from one number or one for each layer."""
    each = heads if isinstance(heads, list) else [heads] * len(kinds)
    return {kind: int(n) for kind, n in zip(kinds, each, strict=True)}
