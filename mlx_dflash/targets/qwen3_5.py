"""Qwen3.5, 3.6 and 3.8, dense and with experts, the text tower: Qwen3-Next's layers with projections of their own."""

from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import qwen3_5

from .config import refuse_other_values
from .experts import stack_experts
from .gated_delta import Hybrid, Projections

# What transformers' Qwen3_5TextConfig means by a missing key; mlx-lm's defaults differ.
MISSING: dict[str, Any] = {
    "intermediate_size": 12288,
    "num_key_value_heads": 4,
    "rope_theta": 10_000.0,
    "partial_rotary_factor": 0.25,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "attention_bias": False,
    "head_dim": 256,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}
# The same of Qwen3_5MoeTextConfig.
MISSING_MOE: dict[str, Any] = MISSING | {
    "num_key_value_heads": 2,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "num_experts": 256,
    "num_experts_per_tok": 8,
}


class Model(qwen3_5.Model):
    def sanitize(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
        if self.language_model.args.tie_word_embeddings:  # mlx-lm looks for the spare head under another name
            weights = {name: value for name, value in weights.items() if not name.endswith("lm_head.weight")}
        return super().sanitize(stack_experts(weights))


class Qwen35(Hybrid):
    model_types = ("qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text")

    @staticmethod
    def model_classes(config: dict[str, Any]) -> tuple[type[nn.Module], type]:
        return Model, qwen3_5.ModelArgs

    @classmethod
    def prepare(cls, config: dict[str, Any]) -> dict[str, Any]:
        refuse_other_values(config, attn_output_gate=True)
        moe = config["model_type"].startswith("qwen3_5_moe")
        # mlx-lm builds experts wherever their number isn't 0, and normalises their weights only if told to
        experts = {"norm_topk_prob": True} if moe else {"num_experts": 0}
        flat = super().prepare({**(MISSING_MOE if moe else MISSING), **config, **experts})
        return flat | {"text_config": flat}

    @property
    def text(self) -> Any:
        return self.model.language_model

    def project(self, block: Any, x: mx.array) -> Projections:
        z = mx.unflatten(block.in_proj_z(x), -1, (block.num_v_heads, block.head_v_dim))
        return Projections(block.in_proj_qkv(x), z, block.in_proj_a(x), block.in_proj_b(x))
