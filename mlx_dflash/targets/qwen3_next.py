"""Qwen3-Next (80B-A3B, Coder-Next): gated-delta layers, gated full attention in every fourth, experts."""

from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import qwen3_5, qwen3_next

from .experts import stack_experts
from .gated_delta import Hybrid, Projections

# What transformers' Qwen3NextConfig means by a missing key; mlx-lm's defaults differ or are none.
MISSING: dict[str, Any] = {
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
    "decoder_sparse_step": 1,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "norm_topk_prob": True,
}


class Model(qwen3_next.Model):
    def sanitize(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
        # qwen3_next takes files without one-tensor experts for converted ones and leaves their norms unshifted;
        # qwen3_5 tells them by the layout of the convolution, with the same rules otherwise.
        return qwen3_5.TextModel.sanitize(self, stack_experts(weights))


class Qwen3Next(Hybrid):
    model_types = ("qwen3_next",)

    @staticmethod
    def model_classes(config: dict[str, Any]) -> tuple[type[nn.Module], type]:
        return Model, qwen3_next.ModelArgs

    @classmethod
    def prepare(cls, config: dict[str, Any]) -> dict[str, Any]:
        flat = super().prepare({**MISSING, **config})
        return flat | {"mlp_only_layers": flat.get("mlp_only_layers") or []}

    @property
    def text(self) -> Any:
        return self.model

    def project(self, block: Any, x: mx.array) -> Projections:
        q, k, v, z, beta, decay = block.fix_query_key_value_ordering(block.in_proj_qkvz(x), block.in_proj_ba(x))
        qkv = mx.concatenate([rows.flatten(-2) for rows in (q, k, v)], axis=-1)
        return Projections(qkv, z, decay, beta)
