"""What changes logits before anything is chosen: logit bias, penalties, a user's own processors.

Formulas and windows are mlx-lm's (`sample_utils.make_logits_processors`). A row's result depends on its logits and on
the tokens before it alone, drafts included, so a row that is verified says what decoding one token at a time would have
said. Rows after a rejected draft see a text that never comes to be; they are thrown away.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx

from .errors import RequestError

# (all tokens so far (length,), logits of the next one (1, vocab)) -> new logits (1, vocab), as in mlx-lm
LogitsProcessor = Callable[[mx.array, mx.array], mx.array]

WINDOW = 20  # mlx-lm's


@dataclass(frozen=True)
class Processors:
    """In this order: logit_bias, repetition, presence and frequency penalty, then `own`.

    A penalty sees the last `..._context_size` tokens, those of the prompt included. own: pure functions of (tokens,
    logits), called a row at a time; they may see texts that are rejected later. Raises RequestError for bad values.
    """

    logit_bias: Mapping[int, float] | None = None
    repetition_penalty: float | None = None
    repetition_context_size: int = WINDOW
    presence_penalty: float | None = None
    presence_context_size: int = WINDOW
    frequency_penalty: float | None = None
    frequency_context_size: int = WINDOW
    own: Sequence[LogitsProcessor] = field(default=(), repr=False)

    def __post_init__(self) -> None:
        for name in ("repetition", "presence", "frequency"):
            value, window = getattr(self, f"{name}_penalty"), getattr(self, f"{name}_context_size")
            if value is not None and not (is_number(value) and math.isfinite(value)):
                raise RequestError(f"{name}_penalty = {value!r} is out of range; it must be a number")
            if not is_whole(window) or window < 1:
                raise RequestError(f"{name}_context_size = {window!r} is out of range; it must be 1 or more tokens")
        if (self.repetition_penalty or 0) < 0:
            raise RequestError(f"repetition_penalty = {self.repetition_penalty} is out of range; it must be above 0")
        self._check_bias()
        for number, processor in enumerate(self.own):
            if not callable(processor):
                raise RequestError(f"logits_processors[{number}] is not a function of (tokens, logits)")

    def _check_bias(self) -> None:
        bias = self.logit_bias
        if bias is not None and not isinstance(bias, Mapping):
            raise RequestError(f"logit_bias must map token ids to numbers, not be {bias!r}")
        for token, value in (bias or {}).items():
            if not is_whole(token) or token < 0:
                raise RequestError(f"logit_bias has the key {token!r}; keys must be token ids")
            if not is_number(value) or math.isnan(value) or value == math.inf:
                raise RequestError(f"logit_bias of token {token} is {value!r}; it must be a number, or -inf to forbid")

    def check_vocabulary(self, size: int) -> None:
        """Raises RequestError for a bias that names a token which the target does not have, or forbids all it has."""
        bias = self.logit_bias or {}
        if bias and max(bias) >= size:
            raise RequestError(f"logit_bias names token {max(bias)}; the model has the tokens 0 to {size - 1}")
        if bias and sum(value == -math.inf for value in bias.values()) >= size:
            raise RequestError("logit_bias forbids every token of the model; leave at least one")

    @property
    def active(self) -> bool:
        return bool(self.logit_bias or self.window or self.own)

    @property
    def window(self) -> int:
        """Tokens that the widest penalty in force looks back on; 0 without penalties."""
        windows = (
            (self.repetition_penalty, self.repetition_context_size),
            (self.presence_penalty, self.presence_context_size),
            (self.frequency_penalty, self.frequency_context_size),
        )
        return max((size for penalty, size in windows if penalty), default=0)

    def apply(self, logits: mx.array, ids: mx.array, tokens: list[int], before: int) -> mx.array:
        """Logits (n, vocab) of the tokens after each of `ids` (n,), which follow `tokens[:before]`; nothing is read."""
        if bias := self.logit_bias:
            keys, values = mx.array(list(bias)), mx.array(list(bias.values()), mx.float32)
            logits = logits.at[:, keys].add(values.astype(logits.dtype))
        if window := self.window:
            tail = mx.concatenate([mx.array(tokens[max(0, before - window + 1) : before], ids.dtype), ids])
            if penalty := self.repetition_penalty:
                seen, _ = look_back(tail, len(ids), self.repetition_context_size)
                old = mx.take_along_axis(logits, seen, axis=-1)
                new = mx.where(old < 0, old * penalty, old / penalty)
                logits = mx.put_along_axis(logits, seen, new, axis=-1)
            if penalty := self.presence_penalty:
                seen, _ = look_back(tail, len(ids), self.presence_context_size)
                logits = mx.put_along_axis(logits, seen, mx.take_along_axis(logits, seen, axis=-1) - penalty, axis=-1)
            if penalty := self.frequency_penalty:
                seen, real = look_back(tail, len(ids), self.frequency_context_size)
                rows = mx.arange(len(ids))[:, None]
                logits = logits.at[rows, seen].subtract((real * penalty).astype(logits.dtype))
        return self._run_own(logits, ids, tokens, before) if self.own else logits

    def _run_own(self, logits: mx.array, ids: mx.array, tokens: list[int], before: int) -> mx.array:
        text = mx.concatenate([mx.array(tokens[:before], ids.dtype), ids])
        rows = []
        for i in range(len(ids)):
            row = logits[i : i + 1]
            for number, processor in enumerate(self.own):
                row = processor(text[: before + i + 1], row)
                if not isinstance(row, mx.array) or row.shape != (1, logits.shape[-1]):
                    got: Any = row.shape if isinstance(row, mx.array) else type(row).__name__
                    raise RequestError(
                        f"logits_processors[{number}] returned {got}; it must return logits of shape "
                        f"(1, {logits.shape[-1]})"
                    )
            rows.append(row)
        return mx.concatenate(rows)


def look_back(tail: mx.array, rows: int, window: int) -> tuple[mx.array, mx.array]:
    """The `window` tokens up to and with each of the last `rows` tokens of `tail`: ids (rows, window), bool alike.

    Where a text is shorter, its newest token stands in, marked False.
    """
    ends = mx.arange(len(tail) - rows, len(tail))[:, None]
    places = ends - mx.arange(window)
    real = places >= 0
    return tail[mx.where(real, places, ends)], real


def is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
