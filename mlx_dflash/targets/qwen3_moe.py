"""Qwen3 with experts (Qwen3-30B-A3B, Qwen3-Coder-30B-A3B): Qwen3's attention, and experts instead of MLPs."""

from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import qwen3_moe
from mlx_lm.models.rope_utils import initialize_rope

from .dense import Dense
from .experts import stack_experts

# What transformers' Qwen3MoeConfig means by a missing key.
MISSING: dict[str, Any] = {
    "rope_theta": 10_000.0,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "decoder_sparse_step": 1,
    "moe_intermediate_size": 768,
    "num_experts_per_tok": 8,
    "norm_topk_prob": False,
}


class Model(qwen3_moe.Model):
    def sanitize(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
        return super().sanitize(stack_experts(weights))


class Qwen3MoE(Dense):
    """The layer loop is the dense one. mlx-lm's attention here ignores `rope_scaling` (YaRN for long contexts)."""

    model_types = ("qwen3_moe",)

    def __init__(self, model: nn.Module, config: dict[str, Any]):
        super().__init__(model, config)
        if config["rope_scaling"] is not None:
            for layer in self.model.layers:
                layer.self_attn.rope = initialize_rope(
                    config["head_dim"],
                    config["rope_theta"],
                    traditional=False,
                    scaling_config=config["rope_scaling"],
                    max_position_embeddings=config["max_position_embeddings"],
                )

    @staticmethod
    def model_classes(config: dict[str, Any]) -> tuple[type[nn.Module], type]:
        return Model, qwen3_moe.ModelArgs

    @classmethod
    def prepare(cls, config: dict[str, Any]) -> dict[str, Any]:
        # transformers 5 writes num_local_experts, its predecessors and mlx-lm num_experts
        experts = config.get("num_experts") or config.get("num_local_experts") or 128
        flat = super().prepare({**MISSING, **config, "num_experts": experts})
        return flat | {"mlp_only_layers": flat.get("mlp_only_layers") or []}
