"""Key and value caches of full attention: every position is held, the last ones can be forgotten."""

from typing import Any

import mlx.core as mx
from mlx_lm.models.base import create_causal_mask

STEP = 256  # rows by which buffers grow, as in mlx-lm


class ByLength:
    """What all caches share that hold every position: they rewind by forgetting their last rows."""

    def __init__(self) -> None:
        self.offset = 0  # rows in use; the buffers may be longer
        self.start = 0  # offset at begin()

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


class FullKV(ByLength):
    """Keys and values of every position, (B, kv_heads, rows, head_dim)."""

    def __init__(self) -> None:
        super().__init__()
        self.keys: mx.array | None = None
        self.values: mx.array | None = None

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Append rows (B, kv_heads, n, head_dim); return all rows in use."""
        end = self.offset + keys.shape[2]
        self.keys = write_rows(self.keys, keys, self.offset)
        self.values = write_rows(self.values, values, self.offset)
        self.offset = end
        return self.keys[..., :end, :], self.values[..., :end, :]

    def arrays(self) -> list[mx.array]:
        return [] if self.keys is None or self.values is None else [self.keys, self.values]


Quantized = tuple[mx.array, mx.array, mx.array]  # packed values, scales, biases: each (B, kv_heads, rows, ...)


class QuantizedKV(ByLength):
    """Keys and values of every position, quantized from the first one on.

    mlx-lm's attention asks a cache for `bits` and then multiplies with the packed rows. head_dim must be a multiple of
    group_size.
    """

    def __init__(self, bits: int, group_size: int = 64) -> None:
        super().__init__()
        self.bits = bits
        self.group_size = group_size
        self.keys: Quantized | None = None
        self.values: Quantized | None = None

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Quantized, Quantized]:
        """Append rows (B, kv_heads, n, head_dim); return all rows in use, packed."""
        end = self.offset + keys.shape[2]
        self.keys, self.values = self.write(self.keys, keys), self.write(self.values, values)
        self.offset = end
        return rows_before(self.keys, end), rows_before(self.values, end)

    def write(self, buffers: Quantized | None, rows: mx.array) -> Quantized:
        old = buffers or (None, None, None)
        new = mx.quantize(rows, group_size=self.group_size, bits=self.bits)
        packed, scales, biases = (write_rows(b, r, self.offset) for b, r in zip(old, new, strict=True))
        return packed, scales, biases

    def arrays(self) -> list[mx.array]:
        return [] if self.keys is None or self.values is None else [*self.keys, *self.values]


def rows_before(buffers: Quantized, end: int) -> Quantized:
    packed, scales, biases = (b[..., :end, :] for b in buffers)
    return packed, scales, biases


def write_rows(buffer: mx.array | None, rows: mx.array, at: int) -> mx.array:
    """`rows` written into `buffer` from row `at` on; the buffer grows by whole steps, rows beyond `at` are dead."""
    end = at + rows.shape[2]
    if buffer is None or end > buffer.shape[2]:
        batch, heads, _, width = rows.shape
        fresh = mx.zeros((batch, heads, -(-rows.shape[2] // STEP) * STEP, width), rows.dtype)
        buffer = fresh if buffer is None else mx.concatenate([buffer[..., :at, :], fresh], axis=2)
    buffer[..., at:end, :] = rows
    return buffer


def roomy(rows: mx.array, extra: int) -> mx.array:
    """A buffer that begins with `rows` (B, heads, n, width), with room for `extra` more in whole steps."""
    batch, heads, _, width = rows.shape
    room = -(-extra // STEP) * STEP
    return mx.concatenate([rows, mx.zeros((batch, heads, room, width), rows.dtype)], axis=2)
