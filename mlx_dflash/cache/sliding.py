"""Keys and values of sliding-window attention, with rows that can be forgotten from the end."""

from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx_lm.models.base import create_causal_mask

from .kv import STEP, roomy


@dataclass(frozen=True)
class SavedWindow:
    """A checkpoint: the rows that the next query may see, as arrays that nothing else writes to.

    keys, values: (B, kv_heads, min(offset, window - 1), head_dim), None before the first row.
    """

    offset: int
    keys: mx.array | None
    values: mx.array | None


class SlidingKV:
    """Keys and values of the last positions, (B, kv_heads, rows, head_dim), for queries that see `window` keys.

    A query at position p sees the keys j with p - window < j <= p: itself and the window - 1 before it, as with
    mlx-lm's `window_size`. Rows stay in temporal order. The buffers hold window - 1 rows from before begin() and all
    that was appended since, so any number of appended rows can be dropped again; what is older goes when a buffer is
    full, about once in STEP rows, and never in between.
    """

    def __init__(self, window: int) -> None:
        self.window = window
        self.keys: mx.array | None = None
        self.values: mx.array | None = None
        self.offset = 0  # positions seen
        self.start = 0  # offset at begin()
        self.base = 0  # position of the buffers' first row

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Append rows (B, kv_heads, n, head_dim).

        Returns the rows that the n queries see: min(offset, window - 1) rows before them, and their own.
        """
        n = keys.shape[2]
        first, at = self.offset - self.before(self.offset), self.offset - self.base
        if self.keys is None or self.values is None:
            self.keys, self.values = roomy(keys[..., :0, :], n + STEP), roomy(values[..., :0, :], n + STEP)
        elif at + n > self.keys.shape[2]:
            oldest = self.start - self.before(self.start)
            held = slice(oldest - self.base, at)
            self.keys, self.values = (
                roomy(self.keys[..., held, :], n + STEP),
                roomy(self.values[..., held, :], n + STEP),
            )
            self.base, at = oldest, self.offset - oldest
        self.keys[..., at : at + n, :] = keys
        self.values[..., at : at + n, :] = values
        self.offset += n
        seen = slice(first - self.base, at + n)
        return self.keys[..., seen, :], self.values[..., seen, :]

    def make_mask(self, N: int, window_size: int | None = None, return_array: bool = False) -> Any:
        """The mask that fits the rows of the next update_and_fetch; the window is always this cache's own."""
        before = self.before(self.offset)
        if before + N > self.window:
            return create_causal_mask(N, before, window_size=self.window)
        if N == 1:
            return None
        return create_causal_mask(N, before) if return_array else "causal"

    def before(self, position: int) -> int:
        """Rows before `position` that a query there sees."""
        return min(position, self.window - 1)

    def begin(self) -> None:
        self.start = self.offset

    def commit(self, keep: int) -> None:
        self.offset = self.start + keep

    def checkpoint(self) -> SavedWindow:
        if self.keys is None or self.values is None:
            return SavedWindow(self.offset, None, None)
        at = self.offset - self.base
        rows = slice(at - self.before(self.offset), at)
        keys, values = mx.contiguous(self.keys[..., rows, :]), mx.contiguous(self.values[..., rows, :])
        mx.async_eval(keys, values)  # left lazy they would hold the buffers
        return SavedWindow(self.offset, keys, values)

    def restore(self, saved: SavedWindow) -> None:
        self.offset = self.start = saved.offset
        self.base = saved.offset - self.before(saved.offset)
        # Full to the last row, so the next row moves them to a new buffer and the saved arrays are never written to.
        self.keys, self.values = saved.keys, saved.values

    def arrays(self) -> list[mx.array]:
        return [] if self.keys is None or self.values is None else [self.keys, self.values]
