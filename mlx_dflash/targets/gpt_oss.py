"""OpenAI's gpt-oss: sliding and full layers in turn, attention sinks, experts packed as MXFP4, YaRN."""

from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import gpt_oss

from ..errors import CheckpointError, UnsupportedError
from ..rope import yarn, yarn_attention
from .config import refuse_other_values
from .windowed import FULL, SLIDING, Windowed, check_layers

FUSED = (".experts.gate_up_proj", ".experts.down_proj")  # unpacked experts, (E, in, out)


class Model(gpt_oss.Model):
    """mlx-lm's module for files with experts packed as OpenAI ships them, and for unpacked ones of fine-tunes."""

    def sanitize(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
        # mlx-lm splits gate and up along the rows of (E, out, in), which packed experts have; unpacked ones lie across
        rows = {f"{k}.weight" if k.endswith(FUSED) else k: across(k, v) for k, v in weights.items()}
        return super().sanitize(rows)


def across(name: str, value: mx.array) -> mx.array:
    return mx.contiguous(value.swapaxes(-1, -2)) if name.endswith(FUSED) else value


def check_scaling(scaling: dict[str, Any]) -> None:
    """Raise CheckpointError unless YaRN's numbers are there, as far as they are needed, and above 0."""
    needed = ("factor", "original_max_position_embeddings")
    for key in (*needed, "beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim"):
        value = scaling.get(key)
        number = isinstance(value, int | float) and value > 0
        if not number and (key in needed or value is not None):
            raise CheckpointError(f"gpt_oss needs {key!r} as a number in its rope_scaling, found {value!r}")


def rotation(head_dim: int, base: float, scaling: dict[str, Any]) -> tuple[mx.array, float]:
    """`rope_scaling` -> 1 / inverse frequencies (head_dim / 2,), fp32, and the factor on queries and keys."""
    factor, scale = float(scaling["factor"]), scaling.get("attention_factor")
    if scale is None:
        scale = yarn_attention(factor, scaling.get("mscale"), scaling.get("mscale_all_dim"))
    inverse = yarn(
        head_dim,
        base,
        factor,
        scaling["original_max_position_embeddings"],
        beta_fast=scaling.get("beta_fast") or 32,
        beta_slow=scaling.get("beta_slow") or 1,
        truncate=scaling.get("truncate", True),
    )
    return mx.array([1 / f for f in inverse], mx.float32), float(scale)


class GptOss(Windowed):
    """mlx-lm's layers, with the frequencies of YaRN as the model was trained with them set on each."""

    model_types = ("gpt_oss",)
    kv_bits_refusal = "gpt_oss has attention sinks, and MLX has no quantized attention with sinks"

    def __init__(self, model: nn.Module, config: dict[str, Any]):
        super().__init__(model, config)
        periods, scale = rotation(config["head_dim"], config["rope_theta"], config["rope_scaling"])
        for layer in self.model.layers:
            layer.self_attn.rope._freqs = periods
            layer.self_attn.rope.mscale = scale

    @staticmethod
    def model_classes(config: dict[str, Any]) -> tuple[type[nn.Module], type]:
        return Model, gpt_oss.ModelArgs

    @classmethod
    def prepare(cls, config: dict[str, Any]) -> dict[str, Any]:
        refuse_other_values(config, swiglu_alpha=1.702, swiglu_limit=7.0, tie_word_embeddings=False)
        scaling = config.get("rope_scaling") or {}
        kind = scaling.get("rope_type", scaling.get("type"))
        if kind != "yarn":
            raise UnsupportedError(f"gpt_oss with RoPE scaling {kind!r} is not supported; 'yarn' is")
        check_scaling(scaling)
        kinds = config.get("layer_types") or [FULL if i % 2 else SLIDING for i in range(config["num_hidden_layers"])]
        flat = super().prepare({"rope_theta": 150000, **config, "layer_types": kinds})
        check_layers(flat)
        return flat

    def head(self, hidden: mx.array) -> mx.array:
        return self.model.lm_head(hidden)
