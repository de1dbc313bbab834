"""Poolside's Laguna: sliding and full layers, gated attention, sigmoid-routed experts beside a shared one."""

from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..errors import CheckpointError, UnsupportedError
from .config import refuse_other_values
from .gpt_oss import check_scaling, rotation
from .windowed import FULL, SLIDING, Windowed, check_layers

# What transformers' LagunaConfig means by a missing key; mlx-lm would rotate every layer by a base of 10000.
MISSING: dict[str, Any] = {
    "num_attention_heads": 48,
    "head_dim": 128,
    "rms_norm_eps": 1e-6,
    "sliding_window": 512,
    "moe_routed_scaling_factor": 1.0,
    "moe_router_logit_softcapping": 0.0,
    "tie_word_embeddings": False,
    "gating": True,
}
MISSING_ROPE: dict[str, dict[str, Any]] = {
    FULL: {"rope_type": "default", "rope_theta": 500_000.0, "partial_rotary_factor": 0.5},
    SLIDING: {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 1.0},
}


class Laguna(Windowed):
    """mlx-lm's layers, with YaRN's frequencies as transformers computes them set on each."""

    model_types = ("laguna",)

    def __init__(self, model: nn.Module, config: dict[str, Any]):
        super().__init__(model, config)
        for layer, kind in zip(self.model.layers, config["layer_types"], strict=True):
            rope = config["rope_parameters"][kind]
            if rope.get("rope_type") == "yarn":
                dims = int(config["head_dim"] * rope["partial_rotary_factor"])
                layer.self_attn.rope._freqs, layer.self_attn.rope.mscale = rotation(dims, rope["rope_theta"], rope)

    @classmethod
    def prepare(cls, config: dict[str, Any]) -> dict[str, Any]:
        """Spell out which layers slide and by what each kind rotates."""
        given = {key: value for key, value in config.items() if value is not None}
        refuse_other_values(given, hidden_act="silu", attention_bias=False, qkv_bias=False, norm_topk_prob=True)
        refuse_other_values(given, moe_router_score_func="sigmoid", moe_apply_router_weight_on_input=False)
        flat = {**MISSING, **given}
        if flat["gating"] not in (True, "per-head"):
            raise UnsupportedError(f"laguna with gating {flat['gating']!r} is not supported; 'per-head' is")
        if other := sorted(key for key in given if key.startswith("swa_") and given[key]):
            raise UnsupportedError(f"laguna with {other[0]} is not supported; rope_parameters by layer type are")
        flat.setdefault("layer_types", [FULL] * flat["num_hidden_layers"])
        check_layers(flat)
        flat["rope_parameters"] = rope_parameters(flat)
        return flat

    def head(self, hidden: mx.array) -> mx.array:
        if self.config["tie_word_embeddings"]:
            return self.model.model.embed_tokens.as_linear(hidden)
        return self.model.lm_head(hidden)


def rope_parameters(flat: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """RoPE settings of the kinds of layers that there are.

    Some files repeat a value of full layers beside the kinds, `original_max_position_embeddings`.
    """
    if any(flat.get(key) for key in ("rope_theta", "rope_scaling")):
        raise UnsupportedError("laguna with rope_theta or rope_scaling is not supported; rope_parameters by layer are")
    rope = flat.get("rope_parameters") or MISSING_ROPE
    for key, value in rope.items():
        if not isinstance(value, dict) and value != rope.get(FULL, {}).get(key):
            raise UnsupportedError(f"laguna with {key} = {value!r} for all kinds of layers is not supported")
    rope = {kind: dict(rope.get(kind) or {}) for kind in dict.fromkeys(flat["layer_types"])}
    for kind, settings in rope.items():
        if not isinstance(settings.get("rope_theta"), int | float):
            raise CheckpointError(f"laguna needs 'rope_theta' in the rope_parameters of {kind}, found {settings!r}")
        if "partial_rotary_factor" not in settings:
            if flat.get("partial_rotary_factor", 1.0) != 1.0:
                raise UnsupportedError(f"laguna with one partial_rotary_factor for all, {kind} too, is not supported")
            settings["partial_rotary_factor"] = 1.0
        if settings.get("rope_type", "default") == "yarn":
            check_scaling(settings)
        elif settings.get("rope_type", "default") != "default":
            raise UnsupportedError(f"laguna with RoPE {settings['rope_type']!r} is not supported; default and yarn are")
    return rope
