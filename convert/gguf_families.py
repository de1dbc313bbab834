"""What a GGUF architecture calls things, how it orders them, and what its fields say: one class for each.

Undone here is what llama.cpp (conversion/*.py of its repository) does to tensors: rows of q and k in another
order (Llama, Muse Glimmer), norms with 1 added, value heads in tiled order (Qwen3.5), constants as tensors.
"""

from typing import Any, ClassVar

import mlx.core as mx
import numpy as np

from mlx_dflash.errors import UnsupportedError

from .decode import Tensors
from .gguf import ATTENTION, MLP, NORMS, QK_NORMS, TOP_NAMES, unpermute
from .gguf_file import GgufFile, shortest
from .gguf_rope import rope_scaling

IN_CONFIG = "held by the config instead"
MTP = "a multi-token prediction head, which DFlash does not use"
EXPERTS = {f"ffn_{part}_exps": f"mlp.switch_mlp.{part}_proj" for part in ("gate", "up", "down")}
EXPERTS |= {"ffn_gate_inp": "mlp.gate"}
SHARED = {f"ffn_{part}_shexp": f"mlp.shared_expert.{part}_proj" for part in ("gate", "up", "down")}
SHARED |= {"ffn_gate_inp_shexp": "mlp.shared_expert_gate"}


class Family:
    """Qwen3, and what the others have in common with it. bare: GGUF names of parameters that are no module's weight."""

    model_type: ClassVar[str] = "qwen3"
    top: ClassVar[dict[str, str]] = TOP_NAMES
    layers: ClassVar[dict[str, str]] = ATTENTION | QK_NORMS | MLP | NORMS
    bare: ClassVar[dict[str, str]] = {}

    def __init__(self, file: GgufFile):
        self.file = file
        self.count = int(file.need_own("block_count")) - int(file.own("nextn_predict_layers", 0))

    def place(self, name: str, parts: Tensors) -> Tensors | str:
        """One tensor's parts under Hugging Face's name, or why they are left out. Raises UnsupportedError."""
        pieces = name.split(".")
        if name == "rope_freqs.weight":
            return IN_CONFIG
        if pieces[0] != "blk":
            if pieces[0] not in self.top or pieces[1:] != ["weight"]:
                raise self.unknown(name)
            return spread(self.top[pieces[0]], self.top_part(pieces[0], parts))
        layer, module, leaf = f"model.layers.{pieces[1]}", pieces[2], ".".join(pieces[3:])
        if int(pieces[1]) >= self.count:
            return MTP
        if (own := ".".join(pieces[2:])) in self.bare:
            return {f"{layer}.{self.bare[own]}": self.value(own, parts["weight"])}
        if module == "ffn_gate_up_exps" and "ffn_gate_exps" in self.layers:
            both = {leaf: mx.split(value, 2, axis=-2) for leaf, value in parts.items()}  # gate, then up
            names = [f"{layer}.{self.layers[part]}" for part in ("ffn_gate_exps", "ffn_up_exps")]
            gate, up = (spread(name, {k: v[i] for k, v in both.items()}) for i, name in enumerate(names))
            return gate | up
        if module not in self.layers or leaf not in ("weight", "bias"):
            raise self.unknown(name)
        found = self.parts(module, parts)
        if found is None:
            return IN_CONFIG
        path = f"{layer}.{self.layers[module]}"
        return {f"{path}.bias": found["weight"]} if leaf == "bias" else spread(path, found)

    def parts(self, module: str, parts: Tensors) -> Tensors | None:
        """A module's parts in Hugging Face's order; None where the config holds them."""
        return parts

    def top_part(self, module: str, parts: Tensors) -> Tensors:
        return parts

    def value(self, name: str, value: mx.array) -> mx.array:
        return value

    def unknown(self, name: str) -> UnsupportedError:
        where = f"{self.file.path}: the tensor {name!r} has no place in a {self.file.architecture} model"
        return UnsupportedError(f"{where}; give the Hugging Face release")

    def config(self, tied: bool) -> dict[str, Any]:
        """config.json. tied: there is no head of its own."""
        need, own = self.file.need_own, self.file.own
        heads, width = int(need("attention.head_count")), int(need("embedding_length"))
        kv_heads = own("attention.head_count_kv", heads)
        config: dict[str, Any] = {
            "model_type": self.model_type,
            "hidden_size": width,
            "num_hidden_layers": self.count,
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads if isinstance(kv_heads, list) else int(kv_heads),
            "head_dim": int(own("attention.key_length", width // heads)),
            "rms_norm_eps": shortest(need("attention.layer_norm_rms_epsilon")),
            "rope_theta": shortest(own("rope.freq_base", 10000.0)),
            "rope_scaling": rope_scaling(self.file) if self.scales_rope else None,
            "max_position_embeddings": int(need("context_length")),
            "vocab_size": len(self.file.need("tokenizer.ggml.tokens")),
            "tie_word_embeddings": tied,
        }
        if (inner := own("feed_forward_length")) is not None:
            config["intermediate_size"] = inner if isinstance(inner, list) else int(inner)
        return config | stops(self.file)

    scales_rope: ClassVar[bool] = True

    def experts(self) -> dict[str, Any]:
        need = self.file.need_own
        return {
            "num_experts": int(need("expert_count")),
            "num_experts_per_tok": int(need("expert_used_count")),
            "moe_intermediate_size": int(need("expert_feed_forward_length")),
        }


def spread(path: str, parts: Tensors) -> Tensors:
    return {f"{path}.{leaf}": value for leaf, value in parts.items()}


def stops(file: GgufFile) -> dict[str, Any]:
    """The special tokens' ids; the end of a turn is a second end of text."""
    out: dict[str, Any] = {}
    for key, name in (("bos", "bos"), ("eos", "eos"), ("pad", "padding")):
        if (value := file.get(f"tokenizer.ggml.{name}_token_id")) is not None:
            out[f"{key}_token_id"] = int(value)
    if (turn := file.get("tokenizer.ggml.eot_token_id")) not in (None, out.get("eos_token_id")):
        out["eos_token_id"] = [i for i in (out.get("eos_token_id"), int(turn)) if i is not None]
    return out


class Llama(Family):
    model_type = "llama"

    def parts(self, module: str, parts: Tensors) -> Tensors | None:
        if module not in ("attn_q", "attn_k"):
            return parts
        heads = int(self.file.need_own("attention.head_count" + ("_kv" if module == "attn_k" else "")))
        return {leaf: unpermute(value, heads) for leaf, value in parts.items()}


class Qwen3Moe(Family):
    model_type = "qwen3_moe"
    layers = Family.layers | EXPERTS

    def config(self, tied: bool) -> dict[str, Any]:
        return super().config(tied) | self.experts() | {"norm_topk_prob": True}  # as llama.cpp computes it


class MuseGlimmer(Llama):
    """Norms have 1 added; `qk_scale_factor` is a constant norm of the queries, that of the keys is 1."""

    model_type = "muse_glimmer"
    layers = Family.layers | {
        "attn_gate": "self_attn.gate_proj",
        "attn_norm": "input_layernorm",
        "post_attention_norm": "post_attention_layernorm",
        "ffn_norm": "pre_feedforward_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    }

    def parts(self, module: str, parts: Tensors) -> Tensors | None:
        if module in ("attn_q_norm", "attn_k_norm"):
            expected = self.scale() if module == "attn_q_norm" else 1.0
            if not bool(mx.all(parts["weight"] == expected)):
                raise UnsupportedError(
                    f"{self.file.path}: {module} is not the constant {expected}, so it is another variant; give the "
                    "Hugging Face release"
                )
            return None
        if module.endswith("norm"):
            return {"weight": parts["weight"] - 1.0}
        return super().parts(module, parts)

    def scale(self) -> float:
        values = np.asarray(self.file.tensors["blk.0.attn_q_norm.weight"].data).view(np.float32)
        return shortest(values[0])

    def config(self, tied: bool) -> dict[str, Any]:
        need = self.file.need_own
        return super().config(tied) | {
            "layer_types": layer_types(self.file),
            "sliding_window": int(need("attention.sliding_window")),
            "final_logit_softcapping": shortest(need("final_logit_softcapping")),
            "output_multiplier": shortest(need("logit_scale")),
            "qk_scale_factor": self.scale(),
            "post_norm_eps": 1e-8,
        }


def layer_types(file: GgufFile) -> list[str]:
    pattern = file.need_own("attention.sliding_window_pattern")
    return ["sliding_attention" if slides else "full_attention" for slides in pattern]


class GptOss(Family):
    """OpenAI's gpt-oss. Its YaRN is not truncated to whole dimensions, which no field says."""

    model_type = "gpt_oss"
    layers = ATTENTION | {
        "attn_norm": "input_layernorm",
        "post_attention_norm": "post_attention_layernorm",
        "ffn_gate_inp": "mlp.router",
        **{f"ffn_{part}_exps": f"mlp.experts.{part}_proj" for part in ("gate", "up", "down")},
    }
    bare: ClassVar[dict[str, str]] = {"attn_sinks.weight": "self_attn.sinks"}

    def config(self, tied: bool) -> dict[str, Any]:
        need, config = self.file.need_own, super().config(tied)
        scaling = config["rope_scaling"] or {}
        return config | {
            "intermediate_size": int(need("expert_feed_forward_length")),
            "num_local_experts": int(need("expert_count")),
            "num_experts_per_tok": int(need("expert_used_count")),
            "sliding_window": int(need("attention.sliding_window")),
            "rope_scaling": scaling | {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": False},
        }


class Qwen35(Family):
    """Tensors in mlx-lm's layout: with its convolutions, norms that have 1 added already are taken as they are.

    llama.cpp has value heads in tiled order, head 0 of every key head first; Hugging Face those of a key head together.
    """

    model_type = "qwen3_5_text"
    layers = ATTENTION | QK_NORMS | MLP
    layers |= {"attn_norm": "input_layernorm", "post_attention_norm": "post_attention_layernorm"}
    layers |= {"attn_qkv": "linear_attn.in_proj_qkv", "attn_gate": "linear_attn.in_proj_z"}
    layers |= {"ssm_beta": "linear_attn.in_proj_b", "ssm_alpha": "linear_attn.in_proj_a"}
    layers |= {f"ssm_{name}": f"linear_attn.{own}" for name, own in (("norm", "norm"), ("out", "out_proj"))}
    layers |= {"ssm_conv1d": "linear_attn.conv1d"}
    bare: ClassVar[dict[str, str]] = {"ssm_a": "linear_attn.A_log", "ssm_dt.bias": "linear_attn.dt_bias"}
    scales_rope = False

    def __init__(self, file: GgufFile):
        super().__init__(file)
        self.keys, self.values = int(file.need_own("ssm.group_count")), int(file.need_own("ssm.time_step_rank"))
        self.key_dim, self.value_dim = (
            int(file.need_own("ssm.state_size")),
            int(file.need_own("ssm.inner_size")) // self.values,
        )

    def grouped(self, value: mx.array, axis: int = 0) -> mx.array:
        """Value heads along an axis, tiled -> grouped by key head. Blocks of a head's rows or columns move whole."""
        shape = value.shape
        parts = (self.values // self.keys, self.keys, shape[axis] // self.values)
        split = value.reshape(*shape[:axis], *parts, *shape[axis + 1 :])
        return split.swapaxes(axis, axis + 1).reshape(shape)

    def parts(self, module: str, parts: Tensors) -> Tensors | None:
        if module in ("attn_qkv", "ssm_conv1d"):
            first = 2 * self.keys * self.key_dim  # queries and keys stay
            parts = {k: mx.concatenate([v[:first], self.grouped(v[first:])]) for k, v in parts.items()}
        if module in ("attn_gate", "ssm_beta", "ssm_alpha"):
            return {k: self.grouped(v) for k, v in parts.items()}
        if module == "ssm_out":
            if "scales" in parts and any(v.shape[-1] % self.values for v in parts.values()):
                raise UnsupportedError(
                    f"{self.file.path}: {module} has blocks that reach over two heads; give a file of F16 or BF16"
                )
            return {k: self.grouped(v, axis=1) for k, v in parts.items()}
        if module == "ssm_conv1d":
            return {"weight": parts["weight"][..., None]}  # (channels, width, 1)
        if module == "ffn_gate_inp_shexp" and parts["weight"].ndim == 1:
            return {"weight": parts["weight"][None]}
        return parts

    def value(self, name: str, value: mx.array) -> mx.array:
        return self.grouped(mx.log(-value) if name == "ssm_a" else value)

    def config(self, tied: bool) -> dict[str, Any]:
        need, config = self.file.need_own, super().config(tied)
        theta = config.pop("rope_theta")
        config.pop("rope_scaling")
        return config | {
            "full_attention_interval": int(need("full_attention_interval")),
            "linear_conv_kernel_dim": int(need("ssm.conv_kernel")),
            "linear_key_head_dim": self.key_dim,
            "linear_num_key_heads": self.keys,
            "linear_num_value_heads": self.values,
            "linear_value_head_dim": self.value_dim,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": theta,
                "partial_rotary_factor": int(need("rope.dimension_count")) / config["head_dim"],
            },
        }


class Qwen35Moe(Qwen35):
    model_type = "qwen3_5_moe_text"
    layers = Qwen35.layers | EXPERTS | SHARED

    def config(self, tied: bool) -> dict[str, Any]:
        shared = int(self.file.need_own("expert_shared_feed_forward_length"))
        return super().config(tied) | self.experts() | {"shared_expert_intermediate_size": shared}
