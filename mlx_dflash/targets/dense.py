"""Llama (2 to 3.2 and its many relatives) and Qwen3: dense decoders with full attention in every layer."""

from collections.abc import Iterator, Sequence

import mlx.core as mx
from mlx_lm.models.base import create_attention_mask

from ..cache import LayerCache
from .base import Target


class Dense(Target):
    """mlx-lm's llama.py and qwen3.py share one shape: embedding, equal layers, norm, tied or own head."""

    model_types = ("llama", "qwen3")

    def embed(self, ids: mx.array) -> mx.array:
        return self.model.model.embed_tokens(ids)

    def layers(self, ids: mx.array, cache: Sequence[LayerCache]) -> Iterator[mx.array]:
        hidden = self.embed(ids)
        mask = create_attention_mask(hidden, cache[0])
        for layer, layer_cache in zip(self.model.layers, cache, strict=True):
            hidden = layer(hidden, mask, layer_cache)
            yield hidden

    def norm(self, hidden: mx.array) -> mx.array:
        return self.model.model.norm(hidden)

    def head(self, hidden: mx.array) -> mx.array:
        if self.config["tie_word_embeddings"]:
            return self.model.model.embed_tokens.as_linear(hidden)
        return self.model.lm_head(hidden)
