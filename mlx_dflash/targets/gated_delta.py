"""Hybrids of Qwen3-Next's kind: the gated delta rule in most layers, full attention in every n-th.

mlx-lm's gated-delta block keeps to itself what a rewinding state must record, so it is written out here, once for all
families, over mlx-lm's modules.
"""

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.base import create_attention_mask
from mlx_lm.models.gated_delta import normalize_qk

from ..cache import DeltaRows, LayerCache, RecurrentState, TargetCache
from ..errors import UnsupportedError
from .base import Target
from .config import refuse_other_values, refuse_unread_scaling

FULL, LINEAR = "full_attention", "linear_attention"


class Projections(NamedTuple):
    """What a block makes of its n input rows, before the convolution."""

    qkv: mx.array  # (B, n, channels): queries, keys and values
    z: mx.array  # (B, n, value_heads, value_dim), gate of the output norm
    decay: mx.array  # (B, n, value_heads)
    beta: mx.array  # (B, n, value_heads)


class Hybrid(Target):
    """Families add how their block projects (`project`) and where the text model lies (`text`)."""

    @classmethod
    def prepare(cls, config: dict[str, Any]) -> dict[str, Any]:
        refuse_other_values(config, hidden_act="silu")
        refuse_unread_scaling(config)
        return super().prepare(config | {"full_attention_interval": attention_interval(config)})

    @property
    @abstractmethod
    def text(self) -> Any:
        """mlx-lm's module with `model` (embedding, layers, norm) and, unless tied, `lm_head`."""

    @abstractmethod
    def project(self, block: Any, x: mx.array) -> Projections:
        """(B, n, hidden) normalised input of a gated-delta block -> its projections."""

    def embed(self, ids: mx.array) -> mx.array:
        return self.text.model.embed_tokens(ids)

    def layers(self, ids: mx.array, cache: Sequence[LayerCache]) -> Iterator[mx.array]:
        hidden = self.embed(ids)
        attention = next((c for c in cache if not isinstance(c, RecurrentState)), None)
        mask = create_attention_mask(hidden, attention)  # recurrent layers need none, since nothing is padded
        for layer, layer_cache in zip(self.text.model.layers, cache, strict=True):
            if isinstance(layer_cache, RecurrentState):
                hidden = hidden + self.gated_delta(layer.linear_attn, layer.input_layernorm(hidden), layer_cache)
                hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
            else:
                hidden = layer(hidden, mask, layer_cache)
            yield hidden

    def gated_delta(self, block: Any, x: mx.array, cache: RecurrentState) -> mx.array:
        """(B, n, hidden) -> (B, n, hidden); appends n rows to the state."""
        qkv, z, decay, beta = self.project(block, x)
        inputs = cache.conv_inputs(qkv, block.conv_kernel_size)
        convolved = nn.silu(block.conv1d(inputs))  # (B, n, channels)
        q, k, v = mx.split(convolved, [block.key_dim, 2 * block.key_dim], axis=-1)
        q, k = (mx.unflatten(rows, -1, (block.num_k_heads, block.head_k_dim)) for rows in (q, k))
        v = mx.unflatten(v, -1, (block.num_v_heads, block.head_v_dim))
        q, k = normalize_qk(q, k, inv_scale=block.head_k_dim**-0.5, eps=1e-6)
        out = cache.append(inputs, DeltaRows(q, k, v, decay, beta, block.A_log, block.dt_bias))
        return block.out_proj(block.norm(out, z).flatten(-2))

    def norm(self, hidden: mx.array) -> mx.array:
        return self.text.model.norm(hidden)

    def head(self, hidden: mx.array) -> mx.array:
        if self.config["tie_word_embeddings"]:
            return self.text.model.embed_tokens.as_linear(hidden)
        return self.text.lm_head(hidden)

    def make_cache(self, kv_bits: int | None = None, kv_group_size: int | None = None) -> TargetCache:
        full = self.full_attention_cache(kv_bits, kv_group_size)
        kinds = layer_kinds(self.num_layers, self.config["full_attention_interval"])
        return TargetCache([full() if kind == FULL else RecurrentState() for kind in kinds])


def layer_kinds(layers: int, interval: int) -> list[str]:
    return [LINEAR if (i + 1) % interval else FULL for i in range(layers)]


def attention_interval(config: dict[str, Any]) -> int:
    """`full_attention_interval`, or the one that `layer_types`, all that transformers 5 writes, amounts to.

    Raises UnsupportedError where there is none.
    """
    kinds, stated = config.get("layer_types"), config.get("full_attention_interval")
    interval = stated or (kinds.index(FULL) + 1 if kinds and FULL in kinds else 4)
    if kinds and kinds != layer_kinds(config["num_hidden_layers"], interval):
        raise UnsupportedError(
            f"{config['model_type']} with layer_types {kinds} is not supported; of every {interval} layers "
            f"the last must be {FULL} and the others {LINEAR}"
        )
    return int(interval)
