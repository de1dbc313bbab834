"""Which drafts to keep: draw the target's own token at every row, keep the drafts that equal the draws.

The first draw that differs is the token emitted there. That is exact for any drafter, at every temperature, because the
noise of a draw depends on the seed and the token's absolute position alone: a run with a drafter draws what a run
without one draws. Knows logits and ids; nothing of models, caches or text.
"""

import math
import secrets
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import mlx.core as mx

from .errors import RequestError

# (logits (n, vocab), absolute position of the first drawn token) -> ids (n,)
Draw = Callable[[mx.array, int], mx.array]


def count_accepted(drafts: mx.array, draws: mx.array) -> mx.array:
    """Length of the longest prefix of `drafts` (w - 1,) that equals the first `draws` (w,): a scalar on device."""
    return mx.cumprod((drafts == draws[:-1]).astype(mx.int32)).sum()


def greedy(logits: mx.array, position: int = 0) -> mx.array:
    """The most likely token of every row; of equal ones the lowest id."""
    return mx.argmax(logits, axis=-1)


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen. temp 0 is greedy and ignores the rest; filters see untempered probabilities.

    The order is mlx-lm's: top_p, then min_p, then top_k, then the temperature. seed None becomes a fresh seed, which
    the run's stats report.
    """

    temp: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    min_tokens_to_keep: int = 1
    seed: int | None = None

    def __post_init__(self) -> None:
        check = {
            "temp": (math.isfinite(self.temp) and self.temp >= 0, "a number from 0 on"),
            "top_p": (0 <= self.top_p <= 1, "between 0 and 1"),
            "top_k": (isinstance(self.top_k, int) and self.top_k >= 0, "a whole number, 0 (off) or more"),
            "min_p": (0 <= self.min_p <= 1, "between 0 and 1"),
            "min_tokens_to_keep": (self.min_tokens_to_keep >= 1, "a whole number, 1 or more"),
            "seed": (self.seed is None or 0 <= self.seed < 2**32, "a whole number from 0 to 4294967295"),
        }
        for name, (right, wanted) in check.items():
            if not right:
                raise RequestError(f"{name} = {getattr(self, name)!r} is out of range; it must be {wanted}")
        if self.seed is None and self.temp > 0:
            object.__setattr__(self, "seed", secrets.randbits(32))

    def to_dict(self) -> dict[str, Any]:
        return {"temp": 0.0} if self.temp == 0 else asdict(self)

    def draw(self, logits: mx.array, position: int) -> mx.array:
        """The target's choice at every row of `logits` (n, vocab); row i draws the token at `position` + i."""
        if self.temp == 0:
            return greedy(logits)
        scores = self.keep(logits.astype(mx.float32)) / self.temp
        return mx.argmax(scores + gumbel(self.seed or 0, position, scores.shape), axis=-1)

    def keep(self, logits: mx.array) -> mx.array:
        """`logits` (n, vocab) with everything that the filters remove at -inf, normalised to log-probabilities."""
        logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        if 0 < self.top_p < 1:  # 0 means off, as in mlx-lm
            logprobs = mx.where(logprobs < nucleus_edge(logprobs, self.top_p), -mx.inf, logprobs)
        if self.min_p > 0:
            edge = mx.max(logprobs, axis=-1, keepdims=True) + math.log(self.min_p)
            if self.min_tokens_to_keep > 1:
                edge = mx.minimum(edge, kth_largest(logprobs, self.min_tokens_to_keep))
            logprobs = mx.where(logprobs < edge, -mx.inf, logprobs)
        if 0 < self.top_k < logits.shape[-1]:
            logprobs = mx.where(logprobs < kth_largest(logprobs, self.top_k), -mx.inf, logprobs)
        return logprobs


def nucleus_edge(logprobs: mx.array, top_p: float) -> mx.array:
    """(n, 1) log-probability of the last token kept: the smallest set whose mass reaches `top_p` of the whole."""
    ascending = mx.sort(logprobs, axis=-1)
    probs = mx.exp(ascending)
    above = mx.cumsum(probs, axis=-1, reverse=True, inclusive=False)
    dropped = (above >= top_p * probs.sum(axis=-1, keepdims=True)).sum(axis=-1, keepdims=True)
    return mx.take_along_axis(ascending, dropped, axis=-1)


def kth_largest(values: mx.array, k: int) -> mx.array:
    """(n, vocab) -> (n, 1)"""
    return mx.min(mx.topk(values, min(k, values.shape[-1]), axis=-1), axis=-1, keepdims=True)


def gumbel(seed: int, position: int, shape: tuple[int, ...]) -> mx.array:
    """Gumbel noise (n, vocab) whose row i depends on `seed` and `position` + i alone, at any n."""
    rows, vocab = shape
    keys = mx.stack([mx.full((rows,), seed, mx.uint32), mx.arange(position, position + rows).astype(mx.uint32)], axis=1)
    return mx.vmap(lambda key: mx.random.gumbel((vocab,), key=key))(keys)
