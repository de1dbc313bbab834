"""Caches that can rewind. A round appends rows inside a transaction and keeps a prefix of them.

Knows lengths, keys and values; nothing of tokens, drafts or models. After any sequence of begin / commit / abort /
checkpoint / restore the cache equals one built by feeding the committed tokens once.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import mlx.core as mx
from mlx_lm.models.base import create_causal_mask

STEP = 256  # rows by which buffers grow, as in mlx-lm


class LayerCache(Protocol):
    """One layer's part of the transaction, and the protocol that mlx-lm's attention layers call.

    Implementations must define neither `__len__` nor `__bool__`: mlx-lm tests a cache for truth.
    """

    offset: int

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]: ...
    def make_mask(self, N: int, window_size: int | None = None, return_array: bool = False) -> Any: ...
    def begin(self) -> None: ...
    def commit(self, keep: int) -> None: ...
    def checkpoint(self) -> Any: ...
    def restore(self, saved: Any) -> None: ...
    def arrays(self) -> list[mx.array]: ...


class FullKV:
    """Keys and values of every position, (B, kv_heads, rows, head_dim); rewinds by forgetting its last rows."""

    def __init__(self) -> None:
        self.keys: mx.array | None = None
        self.values: mx.array | None = None
        self.offset = 0  # rows in use; the buffers may be longer
        self.start = 0  # offset at begin()

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Append rows (B, kv_heads, n, head_dim); return all rows in use."""
        end = self.offset + keys.shape[2]
        self.keys = write_rows(self.keys, keys, self.offset)
        self.values = write_rows(self.values, values, self.offset)
        self.offset = end
        return self.keys[..., :end, :], self.values[..., :end, :]

    def make_mask(self, N: int, window_size: int | None = None, return_array: bool = False) -> Any:
        if window_size is not None:
            return create_causal_mask(N, self.offset, window_size=window_size)
        if N == 1:
            return None
        return create_causal_mask(N, self.offset) if return_array else "causal"

    def begin(self) -> None:
        self.start = self.offset

    def commit(self, keep: int) -> None:
        self.offset = self.start + keep

    def checkpoint(self) -> int:
        return self.offset

    def restore(self, saved: int) -> None:
        self.offset = saved

    def arrays(self) -> list[mx.array]:
        return [] if self.keys is None or self.values is None else [self.keys, self.values]


def write_rows(buffer: mx.array | None, rows: mx.array, at: int) -> mx.array:
    """`rows` written into `buffer` from row `at` on; the buffer grows by whole steps, rows beyond `at` are dead."""
    end = at + rows.shape[2]
    if buffer is None or end > buffer.shape[2]:
        batch, heads, _, width = rows.shape
        fresh = mx.zeros((batch, heads, -(-rows.shape[2] // STEP) * STEP, width), rows.dtype)
        buffer = fresh if buffer is None else mx.concatenate([buffer[..., :at, :], fresh], axis=2)
    buffer[..., at:end, :] = rows
    return buffer


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

    def arrays(self) -> list[mx.array]:
        """Everything that must be evaluated for the cache to hold no lazy graph."""
        return [array for layer in self.layers for array in layer.arrays()]

    def _require_open(self) -> int:
        if self._begun is None:
            raise RuntimeError("commit() without begin()")
        return self._begun
