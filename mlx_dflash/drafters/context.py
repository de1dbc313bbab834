"""What a drafter remembers of the committed text: keys and values of context rows, and features not yet projected.

Knows rows and positions; nothing of weights or masks. Only committed rows enter and noise rows never stay, so there is
nothing to abort. A windowed layer keeps only the rows that its next block can see.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from ..cache.kv import roomy


@dataclass(frozen=True)
class SavedRows:
    """A layer's part of a checkpoint. keys, values: None where the layer keeps all rows, and so needs no copy."""

    end: int
    keys: mx.array | None = None
    values: mx.array | None = None


@dataclass(frozen=True)
class ContextCheckpoint:
    length: int
    pending: tuple[mx.array, ...]
    layers: tuple[SavedRows, ...]
    rewinds: int  # how many restores had happened when it was taken


class ContextKV:
    """Keys and values of one draft layer's context rows, (B, kv_heads, rows, head_dim), oldest first.

    reach: how many rows before the anchor a block sees; None: all. Older rows go when a buffer is full, about once in
    STEP rows. sink: with a reach, the text's first rows are seen besides, however far back (arXiv 2309.17453).
    """

    def __init__(self, reach: int | None = None, sink: int = 0) -> None:
        self.reach = reach
        self.sink = sink
        self.first: tuple[mx.array, mx.array] | None = None  # keys and values of the sink, once there are so many
        self.keys: mx.array | None = None
        self.values: mx.array | None = None
        self.base = 0  # position of the buffers' first row
        self.end = 0  # position after the last context row

    def within_reach(self, rows: mx.array) -> mx.array:
        """The last of context rows (B, n, ...) that the next block sees; the others need no projection."""
        if self.reach is None or self.end < self.sink:
            return rows
        return rows[:, max(rows.shape[1] - self.reach, 0) :]

    def oldest(self, end: int) -> int:
        """The first row of those, without a gap up to `end`, that a block at `end` sees; the sink may lie before."""
        start = 0 if self.reach is None else max(end - self.reach, 0)
        return 0 if start <= self.sink else start

    def update(self, keys: mx.array, values: mx.array, at: int, context: int) -> tuple[mx.array, mx.array]:
        """Write rows (B, kv_heads, n, head_dim) at positions `at` on; the first `context` stay, noise does not.

        `at` lies beyond the end only if the rows up to it are out of reach. Returns all rows that the block sees.
        """
        n, end = keys.shape[2], at + context
        oldest = self.oldest(end)
        if self.keys is None or self.values is None:
            self.base = at
            self.keys, self.values = roomy(keys[..., :0, :], n), roomy(values[..., :0, :], n)
        elif at + n - self.base > self.keys.shape[2]:
            keep = min(max(oldest, self.base), at)
            held = slice(keep - self.base, at - self.base)
            self.keys, self.values = roomy(self.keys[..., held, :], n), roomy(self.values[..., held, :], n)
            self.base = keep
        written = slice(at - self.base, at - self.base + n)
        self.keys[..., written, :] = keys
        self.values[..., written, :] = values
        self.end = end
        if self.sink and self.first is None and end >= self.sink:
            first = slice(0, self.sink)
            self.first = mx.contiguous(self.keys[..., first, :]), mx.contiguous(self.values[..., first, :])
        seen = slice(max(oldest - self.base, 0), written.stop)
        seen_keys, seen_values = self.keys[..., seen, :], self.values[..., seen, :]
        if self.first is None or (apart := min(self.sink, self.base + seen.start)) == 0:
            return seen_keys, seen_values
        first_keys, first_values = (rows[..., :apart, :] for rows in self.first)
        return mx.concatenate([first_keys, seen_keys], axis=2), mx.concatenate([first_values, seen_values], axis=2)

    def checkpoint(self) -> SavedRows:
        if self.reach is None or self.keys is None or self.values is None:
            return SavedRows(self.end)
        rows = slice(max(self.oldest(self.end) - self.base, 0), self.end - self.base)
        keys, values = mx.contiguous(self.keys[..., rows, :]), mx.contiguous(self.values[..., rows, :])
        mx.async_eval(keys, values)  # left lazy they would hold the buffers
        return SavedRows(self.end, keys, values)

    def restore(self, saved: SavedRows) -> None:
        self.end = saved.end
        if saved.end < self.sink:
            self.first = None
        if self.reach is not None:
            # Full to the last row, so the next write moves them to a new buffer and never touches the saved arrays.
            self.keys, self.values = saved.keys, saved.values
            self.base = saved.end - (0 if saved.keys is None else saved.keys.shape[2])

    def arrays(self) -> list[mx.array]:
        return [] if self.keys is None or self.values is None else [self.keys, self.values, *(self.first or ())]


class DraftContext:
    """One request's context, of all draft layers.

    length: the committed tokens it was given. layers: rows already projected. pending: features (B, n, taps * hidden)
    of the last tokens, still to be projected. Together they are all committed tokens, or all that a block can see.
    """

    def __init__(self, reaches: Sequence[int | None], sink: int = 0) -> None:
        self.layers = [ContextKV(reach, sink) for reach in reaches]
        self.sink = sink
        self.reach = None if None in reaches else max(r for r in reaches if r is not None)
        self.pending: list[mx.array] = []
        self.length = 0
        self._rewinds: list[int] = []  # lengths that restores went back to, in order

    @property
    def pending_rows(self) -> int:
        return sum(f.shape[1] for f in self.pending)

    def add(self, features: mx.array) -> None:
        """Take the features of newly committed tokens; forget pending ones that no block will see."""
        holds_sink = self.length < self.sink
        self.length += features.shape[1]
        if self.reach is not None and not holds_sink:
            features = features[:, max(features.shape[1] - self.reach, 0) :]
            while self.pending and self.pending_rows - self.pending[0].shape[1] + features.shape[1] >= self.reach:
                del self.pending[0]
        self.pending.append(features)

    def take_pending(self) -> mx.array | None:
        """All pending features as one array (B, n, taps * hidden), the last row at length - 1, and forget them."""
        if not self.pending:
            return None
        taken, self.pending = self.pending, []
        return taken[0] if len(taken) == 1 else mx.concatenate(taken, axis=1)

    def checkpoint(self) -> ContextCheckpoint:
        """A mark to come back to."""
        layers = tuple(layer.checkpoint() for layer in self.layers)
        return ContextCheckpoint(self.length, tuple(self.pending), layers, len(self._rewinds))

    def restore(self, saved: ContextCheckpoint) -> None:
        """Go back to a checkpoint.

        Raises RuntimeError for a mark whose rows are gone because an earlier mark was restored since it was taken.
        """
        if any(length < saved.length for length in self._rewinds[saved.rewinds :]):
            raise RuntimeError(f"the checkpoint at {saved.length} tokens was overwritten after a restore to fewer")
        for layer, part in zip(self.layers, saved.layers, strict=True):
            layer.restore(part)
        self.pending = list(saved.pending)
        self.length = saved.length
        self._rewinds.append(saved.length)

    @property
    def rewindable(self) -> bool:
        """Whether no row was forgotten, so that the context can go back to any length without a checkpoint."""
        return all(layer.reach is None for layer in self.layers)

    def rewind(self, length: int) -> None:
        """Forget all that was given after the first `length` tokens; only where `rewindable`."""
        if not self.rewindable or not 0 <= length <= self.length:
            raise RuntimeError(f"can't rewind a context of {self.length} tokens to {length}")
        projected = self.length - self.pending_rows
        waiting = self.take_pending()
        kept = () if waiting is None or length <= projected else (waiting[:, : length - projected],)
        layers = tuple(SavedRows(min(layer.end, length)) for layer in self.layers)
        self.restore(ContextCheckpoint(length, kept, layers, len(self._rewinds)))

    def arrays(self) -> list[mx.array]:
        """Everything that must be evaluated for the context to hold no lazy graph."""
        return [*self.pending, *(a for layer in self.layers for a in layer.arrays())]
