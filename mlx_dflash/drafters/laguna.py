"""Poolside's drafters for Laguna: z-lab's block with a norm for every tap and gated heads.

The rules follow vLLM's laguna_dflash.py: each tap is normed before `fc`, each layer's `input_layernorm` goes over the
context rows as well, and a head's output is scaled by the softplus of a gate computed from the noise row.
"""

from typing import ClassVar

import mlx.core as mx
import mlx.nn as nn

from .config import DrafterConfig
from .context import ContextKV
from .dflash import Attention, DFlashModel, Layer


class GatedAttention(Attention):
    def __init__(self, config: DrafterConfig, layer: int = 0):
        super().__init__(config, layer)
        self.g_proj = nn.Linear(config.hidden_size, config.num_attention_heads, bias=False)

    def output(self, heads: mx.array, noise: mx.array) -> mx.array:
        gate = nn.softplus(self.g_proj(noise).astype(mx.float32)).astype(heads.dtype)  # (B, w, heads)
        return super().output(heads * gate[..., None], noise)


class LagunaLayer(Layer):
    attention_class: ClassVar[type[Attention]] = GatedAttention

    def __call__(self, noise: mx.array, context: mx.array | None, kv: ContextKV, anchor: int) -> mx.array:
        return super().__call__(noise, None if context is None else self.input_layernorm(context), kv, anchor)

    def remember(self, context: mx.array, kv: ContextKV, end: int) -> None:
        super().remember(self.input_layernorm(context), kv, end)


class LagunaModel(DFlashModel):
    """Under the published tensor names, but for `qkv_proj`, which is split."""

    layer_class: ClassVar[type[Layer]] = LagunaLayer

    def __init__(self, config: DrafterConfig):
        super().__init__(config)
        self.aux_hidden_norms = [
            nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps) for _ in config.target_layer_ids
        ]

    def context(self, features: mx.array) -> mx.array:
        taps = mx.split(features, len(self.aux_hidden_norms), axis=-1)  # each (B, n, hidden)
        normed = [norm(tap) for norm, tap in zip(self.aux_hidden_norms, taps, strict=True)]
        return super().context(mx.concatenate(normed, axis=-1))
