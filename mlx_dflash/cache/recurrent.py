"""The memory of a gated-delta layer: a fixed-size state that can't forget rows, so it is rebuilt from recorded ones.

Knows convolution inputs and the arguments of mlx-lm's `gated_delta_update`; nothing of weights or of who computes them.
"""

from dataclasses import dataclass
from typing import NamedTuple

import mlx.core as mx
from mlx_lm.models.gated_delta import gated_delta_update


class DeltaRows(NamedTuple):
    """What `gated_delta_update` takes: n rows of queries, keys, values and gates, and the layer's two constants."""

    queries: mx.array  # (B, n, key_heads, key_dim), normalised
    keys: mx.array  # (B, n, key_heads, key_dim), normalised
    values: mx.array  # (B, n, value_heads, value_dim)
    decay: mx.array  # (B, n, value_heads)
    beta: mx.array  # (B, n, value_heads)
    A_log: mx.array  # (value_heads,)
    dt_bias: mx.array  # (value_heads,)

    def first(self, n: int) -> "DeltaRows":
        queries, keys, values, decay, beta = (x[:, :n] for x in self[:5])
        return DeltaRows(queries, keys, values, decay, beta, self.A_log, self.dt_bias)


@dataclass(frozen=True)
class Moment:
    """All that a layer remembers after `offset` rows. Its arrays are never assigned into, so any number can be kept."""

    offset: int = 0
    conv: mx.array | None = None  # (B, kernel - 1, channels), the convolution's last inputs; None: zeros
    state: mx.array | None = None  # (B, value_heads, value_dim, key_dim) in fp32; None: zeros


@dataclass(frozen=True)
class Appended:
    """The rows of one forward pass, and what going through only some of them again takes."""

    before: Moment
    inputs: mx.array  # (B, kernel - 1 + n, channels), the remembered inputs of the convolution first
    rows: DeltaRows

    def after(self, keep: int) -> Moment:
        """The moment after the first `keep` of the n rows."""
        if keep == 0:
            return self.before
        _, state = gated_delta_update(*self.rows.first(keep), self.before.state)
        remembered = self.inputs.shape[1] - self.rows.queries.shape[1]
        # a copy, since a slice would pin all inputs
        conv = mx.contiguous(self.inputs[:, keep : keep + remembered])
        return Moment(self.before.offset + keep, conv, state)


class RecurrentState:
    """One gated-delta layer's part of the transaction. Inside one, any number of forward passes may append rows.

    Rewinding replays the kept rows of the pass in which it ends, from the state before that pass: the recurrence goes
    row by row, so the result has the bits that those rows alone would have given.
    """

    def __init__(self) -> None:
        self.now = Moment()
        self._begun: Moment | None = None
        self._appended: list[Appended] = []  # of the open transaction

    @property
    def offset(self) -> int:
        return self.now.offset

    def conv_inputs(self, rows: mx.array, kernel: int) -> mx.array:
        """(B, n, channels) new inputs of a causal convolution, after the `kernel` - 1 remembered ones."""
        conv = self.now.conv
        if conv is None:
            conv = mx.zeros((rows.shape[0], kernel - 1, rows.shape[2]), rows.dtype)
        return mx.concatenate([conv, rows], axis=1)

    def append(self, inputs: mx.array, rows: DeltaRows) -> mx.array:
        """Run n rows through the recurrence; returns its outputs (B, n, value_heads, value_dim).

        inputs: what `conv_inputs` gave for these rows.
        """
        n = rows.queries.shape[1]
        out, state = gated_delta_update(*rows, self.now.state)
        if self._begun is not None:
            self._appended.append(Appended(self.now, inputs, rows))
        self.now = Moment(self.offset + n, mx.contiguous(inputs[:, n:]), state)
        return out

    def begin(self) -> None:
        self._begun = self.now

    def commit(self, keep: int) -> None:
        assert self._begun is not None
        target = self._begun.offset + keep
        if target < self.offset:
            last = next(a for a in reversed(self._appended) if a.before.offset <= target)
            self.now = last.after(target - last.before.offset)
        self._begun = None
        self._appended = []

    def checkpoint(self) -> Moment:
        return self.now

    def restore(self, saved: Moment) -> None:
        self.now = saved

    def arrays(self) -> list[mx.array]:
        return [x for x in (self.now.conv, self.now.state) if x is not None]
