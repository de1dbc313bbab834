"""Caches that can rewind. A round appends rows inside a transaction and keeps a prefix of them.

Knows lengths, keys and values; nothing of tokens, drafts or models. After any sequence of begin / commit / abort /
checkpoint / restore the cache equals one built by feeding the committed tokens once.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import mlx.core as mx

from .kv import STEP, ByLength, FullKV, QuantizedKV
from .recurrent import DeltaRows, RecurrentState
from .sliding import SlidingKV

__all__ = [
    "STEP",
    "CacheCheckpoint",
    "DeltaRows",
    "FullKV",
    "KVCache",
    "LayerCache",
    "QuantizedKV",
    "RecurrentState",
    "SlidingKV",
    "TargetCache",
]


class LayerCache(Protocol):
    """One layer's part of the transaction.

    Implementations must define neither `__len__` nor `__bool__`: mlx-lm tests a cache for truth.
    """

    @property
    def offset(self) -> int: ...
    def begin(self) -> None: ...
    def commit(self, keep: int) -> None: ...
    def checkpoint(self) -> Any: ...
    def restore(self, saved: Any) -> None: ...
    def arrays(self) -> list[mx.array]: ...


class KVCache(LayerCache, Protocol):
    """What mlx-lm's attention layers call: append keys and values, get back those that the new rows' mask is for."""

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Any, Any]: ...
    def make_mask(self, N: int, window_size: int | None = None, return_array: bool = False) -> Any: ...


@dataclass(frozen=True)
class CacheCheckpoint:
    length: int
    layers: tuple[Any, ...]
    rewinds: int  # how many restores had happened when it was taken


class TargetCache:
    """All layers of one target as one transaction.

    `layers` may be shorter than the model: layers that share another layer's keys and values have no entry.
    """

    def __init__(self, layers: Sequence[LayerCache]):
        self.layers = list(layers)
        self._begun: int | None = None
        self._rewinds: list[int] = []  # lengths that restores went back to, in order

    @property
    def length(self) -> int:
        """Rows held, those of an open transaction included."""
        return self.layers[0].offset

    def begin(self) -> None:
        """Open a transaction; forward passes now append rows that commit may drop again."""
        if self._begun is not None:
            raise RuntimeError("begin() inside an open cache transaction")
        self._begun = self.length
        for layer in self.layers:
            layer.begin()

    def commit(self, keep: int) -> None:
        """Close the transaction and leave exactly `keep` of the appended rows in every layer.

        Raises RuntimeError, with the transaction still open, if fewer rows were appended than are to be kept.
        """
        begun = self._require_open()
        for layer in self.layers:
            if not 0 <= keep <= layer.offset - begun:
                raise RuntimeError(f"can't keep {keep} of {layer.offset - begun} appended rows")
        for layer in self.layers:
            layer.commit(keep)
        self._begun = None

    def abort(self) -> None:
        """Drop what an open transaction appended; without one, do nothing."""
        if self._begun is not None:
            for layer in self.layers:
                layer.commit(0)
            self._begun = None

    def checkpoint(self) -> CacheCheckpoint:
        """A mark to come back to; taken between transactions."""
        if self._begun is not None:
            raise RuntimeError("checkpoint() inside an open cache transaction")
        return CacheCheckpoint(self.length, tuple(c.checkpoint() for c in self.layers), len(self._rewinds))

    def restore(self, saved: CacheCheckpoint) -> None:
        """Go back to a checkpoint, dropping an open transaction.

        Raises RuntimeError for a mark whose rows are gone because an earlier mark was restored since it was taken.
        """
        if any(length < saved.length for length in self._rewinds[saved.rewinds :]):
            raise RuntimeError(f"the checkpoint at {saved.length} rows was overwritten after a restore to fewer")
        self.abort()
        for layer, part in zip(self.layers, saved.layers, strict=True):
            layer.restore(part)
        self._rewinds.append(saved.length)

    @property
    def rewindable(self) -> bool:
        """Whether every layer holds all positions, so that the cache can go back to any length without a checkpoint."""
        return all(isinstance(layer, ByLength) for layer in self.layers)

    def rewind(self, length: int) -> None:
        """Forget all rows after the first `length`; only where `rewindable`, between transactions."""
        if not self.rewindable or not 0 <= length <= self.length:
            raise RuntimeError(f"can't rewind {self.length} rows to {length}")
        self.restore(CacheCheckpoint(length, (length,) * len(self.layers), len(self._rewinds)))

    def arrays(self) -> list[mx.array]:
        """Everything that must be evaluated for the cache to hold no lazy graph."""
        return [array for layer in self.layers for array in layer.arrays()]

    def _require_open(self) -> int:
        if self._begun is None:
            raise RuntimeError("commit() without begin()")
        return self._begun
