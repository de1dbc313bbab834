"""Targets with full and sliding-window attention side by side, as `layer_types` says."""

from collections.abc import Iterator, Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models.base import create_attention_mask

from ..cache import LayerCache, SlidingKV, TargetCache
from ..errors import CheckpointError
from .base import Target

FULL, SLIDING = "full_attention", "sliding_attention"


class Windowed(Target):
    """A stack of mlx-lm layers called as layer(hidden, mask, cache), with one mask for each kind of attention."""

    def first(self, ids: mx.array) -> mx.array:
        """(B, n) token ids -> (B, n, hidden): what the first layer gets."""
        return self.embed(ids)

    def layers(self, ids: mx.array, cache: Sequence[LayerCache]) -> Iterator[mx.array]:
        hidden = self.first(ids)
        masks: dict[str, Any] = {}  # made when a kind is first met, before its caches get the new rows
        for layer, kind, layer_cache in zip(self.model.layers, self.config["layer_types"], cache, strict=True):
            if kind not in masks:
                masks[kind] = create_attention_mask(hidden, layer_cache)
            hidden = layer(hidden, masks[kind], layer_cache)
            yield hidden

    def make_cache(self, kv_bits: int | None = None, kv_group_size: int | None = None) -> TargetCache:
        full = self.full_attention_cache(kv_bits, kv_group_size)
        window, kinds = self.config["sliding_window"], self.config["layer_types"]
        return TargetCache([SlidingKV(window) if kind == SLIDING else full() for kind in kinds])

    def embed(self, ids: mx.array) -> mx.array:
        return self.model.model.embed_tokens(ids)

    def norm(self, hidden: mx.array) -> mx.array:
        return self.model.model.norm(hidden)


def check_layers(config: dict[str, Any]) -> None:
    """Raise CheckpointError unless every layer is full or sliding, and the window of sliding ones is known."""
    name, kinds = config["model_type"], config["layer_types"]
    if len(kinds) != config["num_hidden_layers"] or not {FULL, SLIDING} >= set(kinds):
        raise CheckpointError(
            f"{name} needs {config['num_hidden_layers']} layer_types of {FULL} or {SLIDING}, found {kinds}"
        )
    window = config.get("sliding_window")
    if SLIDING in kinds and (not isinstance(window, int) or window < 1):
        raise CheckpointError(f"{name} has sliding-window layers and sliding_window {window!r}; a length is needed")
