"""Which drafts to keep: draw the target's own token at every row, keep the drafts that equal the draws.

The first draw that differs is the token emitted there. That is exact for any drafter, at every temperature, because the
noise of a draw depends on the seed and the token's absolute position alone: a run with a drafter draws what a run
without one draws. Knows logits and ids; nothing of models, caches or text.
"""

import math
import secrets
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import mlx.core as mx

from .errors import RequestError
from .filters import Filters, Pool
from .processors import Processors, is_number, is_whole

# (scores (n, m), slot of the first row, target id of every column (m,) or (n, m), None: its index) -> indices (n,)
Choice = Callable[..., mx.array]

LOWEST_TEMP = 1e-6  # below it a logit over the temperature overflows fp32


def count_accepted(drafts: mx.array, draws: mx.array) -> mx.array:
    """Length of the longest prefix of `drafts` (w - 1,) that equals the first `draws` (w,): a scalar on device."""
    return mx.cumprod((drafts == draws[:-1]).astype(mx.int32)).sum()


def greedy(logits: mx.array, slot: int = 0, ids: mx.array | None = None) -> mx.array:
    """The most likely token of every row; of equal ones the lowest id."""
    return mx.argmax(logits, axis=-1)


def gumbel(seed: int, position: int, shape: tuple[int, ...]) -> mx.array:
    """Gumbel noise (n, vocab) whose row i depends on `seed` and `position` + i alone, at any n."""
    rows, vocab = shape
    keys = mx.stack([mx.full((rows,), seed, mx.uint32), mx.arange(position, position + rows).astype(mx.uint32)], axis=1)
    return mx.vmap(lambda key: mx.random.gumbel((vocab,), key=key))(keys)


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen. temp 0 is greedy and ignores the rest; filters see untempered probabilities.

    The order is mlx-lm's: top_p, then min_p, then top_k, then the temperature. seed None becomes a fresh seed, which
    the run's stats report. Raises RequestError for what is out of range.
    """

    temp: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    min_tokens_to_keep: int = 1
    seed: int | None = None

    def __post_init__(self) -> None:
        temp, top_p, min_p = self.temp, self.top_p, self.min_p
        check = {
            "temp": (
                is_number(temp) and math.isfinite(temp) and (temp == 0 or temp >= LOWEST_TEMP),
                f"0 (greedy) or a number from {LOWEST_TEMP:f} on",
            ),
            "top_p": (is_number(top_p) and 0 <= top_p <= 1, "between 0 and 1"),
            "top_k": (is_whole(self.top_k) and self.top_k >= 0, "a whole number, 0 (off) or more"),
            "min_p": (is_number(min_p) and 0 <= min_p <= 1, "between 0 and 1"),
            "min_tokens_to_keep": (
                is_whole(self.min_tokens_to_keep) and self.min_tokens_to_keep >= 1,
                "a whole number, 1 or more",
            ),
            "seed": (
                self.seed is None or (is_whole(self.seed) and 0 <= self.seed < 2**32),
                "a whole number from 0 to 4294967295",
            ),
        }
        for name, (right, wanted) in check.items():
            if not right:
                raise RequestError(f"{name} = {getattr(self, name)!r} is out of range; it must be {wanted}")
        if self.top_k and self.min_p and self.min_tokens_to_keep > self.top_k:
            raise RequestError(
                f"min_tokens_to_keep = {self.min_tokens_to_keep} contradicts top_k = {self.top_k}; lower one"
            )
        if self.seed is None and self.temp > 0:
            object.__setattr__(self, "seed", secrets.randbits(32))

    @property
    def filters(self) -> Filters:
        return Filters(self.top_p, self.min_p, self.top_k, self.min_tokens_to_keep)


@dataclass(frozen=True)
class Score:
    """What the target thought of a token in the pass that verified it: after processors, before filters.

    vector: log-probabilities (vocab,), on device. chosen: the token's own. top: the likeliest (id, log-probability).
    """

    vector: mx.array
    chosen: float
    top: list[tuple[int, float]]


@dataclass(frozen=True)
class Outcome:
    """A verify pass as the host reads it. final: False if a row has to be drawn again from all its logits."""

    accepted: int
    tokens: list[int]
    final: bool
    scores: list[Score] | None


@dataclass(frozen=True)
class Drawn:
    """The target's choice at every row of a verify pass (n,), on device.

    sure (n,): the candidates that were looked at held all that the filters keep; None: they all did. exactly: the same
    draws from whole rows, where not sure. logprobs (n, vocab), if they were asked for, and how many of the likeliest.
    """

    tokens: mx.array
    sure: mx.array | None = None
    exactly: Callable[[], mx.array] | None = None
    logprobs: mx.array | None = None
    top: int = 0

    def again(self) -> "Drawn":
        """Drawn once more, from whole rows."""
        assert self.exactly is not None
        return Drawn(self.exactly(), None, None, self.logprobs, self.top)

    def pack(self, drafts: mx.array | None) -> mx.array:
        """All that the host has to know, in one array of uint32 (or the bare tokens, where they are all)."""
        parts = [] if drafts is None else [count_accepted(drafts, self.tokens)[None]]
        if self.sure is not None:
            parts.append(mx.cumprod(self.sure.astype(mx.int32)).sum()[None])
        parts.append(self.tokens)
        if self.logprobs is not None:
            parts.append(mx.take_along_axis(self.logprobs, self.tokens[:, None], axis=-1)[:, 0].view(mx.uint32))
            if self.top:
                ids = mx.argpartition(self.logprobs, -self.top, axis=-1)[:, -self.top :]
                values = mx.take_along_axis(self.logprobs, ids, axis=-1)
                order = mx.argsort(-values, axis=-1)
                parts.append(mx.take_along_axis(ids, order, axis=-1).flatten())
                parts.append(mx.take_along_axis(values, order, axis=-1).flatten().view(mx.uint32))
        return parts[0] if len(parts) == 1 else mx.concatenate([part.astype(mx.uint32) for part in parts])

    def unpack(self, values: list[int], drafted: bool) -> Outcome:
        """`pack`'s array, read."""
        rows, rest = len(self.tokens), iter(values)

        def take(count: int) -> list[int]:
            return [next(rest) for _ in range(count)]

        accepted = next(rest) if drafted else 0
        known = next(rest) if self.sure is not None else rows
        tokens = take(rows)
        if self.logprobs is None:
            return Outcome(accepted, tokens, known > accepted, None)
        chosen = floats(take(rows))
        ids, top = take(rows * self.top), floats(take(rows * self.top))
        scores = []
        for i in range(rows):
            part = slice(i * self.top, (i + 1) * self.top)
            scores.append(Score(self.logprobs[i], chosen[i], list(zip(ids[part], top[part], strict=True))))
        return Outcome(accepted, tokens, known > accepted, scores)


def floats(bits: Sequence[int]) -> list[float]:
    """fp32 values that travelled as uint32."""
    return list(struct.unpack(f"{len(bits)}f", struct.pack(f"{len(bits)}I", *bits)))


@dataclass
class Sampler:
    """A request's rule: processors, log-probabilities, filters, temperature, noise; and how the drafter proposes.

    coupled: drafts are drawn with the noise that the target's tokens will be drawn with, at draft_temp, over the
    target's `vocab` tokens; else they are the drafter's likeliest. Either way the emitted tokens are the same.
    """

    sampling: Sampling = field(default_factory=Sampling)
    processors: Processors = field(default_factory=Processors)
    logprobs: bool = False
    top_logprobs: int = 0
    coupled: bool = False
    draft_temp: float = 1.0
    vocab: int = 0
    _noise: tuple[int, mx.array] | None = field(default=None, init=False, repr=False)

    def draw(self, logits: mx.array, ids: mx.array, tokens: list[int], before: int) -> Drawn:
        """The target's choice after each of `ids` (n,), from `logits` (n, vocab); `tokens[:before]` precede them."""
        sampling = self.sampling
        if self.processors.active:
            logits = self.processors.apply(logits, ids, tokens, before)
        if sampling.temp == 0 and not self.logprobs:
            return Drawn(greedy(logits))
        logits = logits.astype(mx.float32)
        normaliser = logprobs = None
        if self.logprobs or sampling.filters.nucleus:
            normaliser = mx.logsumexp(logits, axis=-1, keepdims=True)
        if self.logprobs and normaliser is not None:
            logprobs = logits - normaliser
        if sampling.temp == 0:
            return Drawn(greedy(logits), None, None, logprobs, self.top_logprobs)
        noise = self.noise(before + 1, *logits.shape)
        choice, sure = self.choose(logits, noise, normaliser)
        if sure is None:
            return Drawn(choice, None, None, logprobs, self.top_logprobs)

        def exactly() -> mx.array:
            return mx.where(sure, choice, self.choose(logits, noise, normaliser, whole=True)[0])

        return Drawn(choice, sure, exactly, logprobs, self.top_logprobs)

    def choose(
        self, logits: mx.array, noise: mx.array, normaliser: mx.array | None, whole: bool = False
    ) -> tuple[mx.array, mx.array | None]:
        """Gumbel-max over what the filters keep: ids (n,), and whether each row's candidates were enough (n,) or None.

        whole: look at all tokens.
        """
        filters, temp = self.sampling.filters, self.sampling.temp
        pool = Pool(logits, None, None) if whole or not filters.ranked else filters.pool(logits)
        # The row's maximum goes to 0 first: a low temperature can't overflow what is added to noise.
        scores = (pool.values - mx.max(pool.values, axis=-1, keepdims=True)) / temp + pool.of(noise)
        sure = None
        if filters.ranked or filters.min_p > 0:
            kept = filters.keep(pool, normaliser)
            scores = mx.where(kept, scores, -mx.inf)
            sure = filters.sure(pool, kept)
        best = mx.argmax(scores, axis=-1)
        return best if pool.ids is None else mx.take_along_axis(pool.ids, best[:, None], axis=-1)[:, 0], sure

    def noise(self, position: int, rows: int, vocab: int) -> mx.array:
        """The noise (rows, vocab) of the tokens from `position` on; drafting and verifying a block share it."""
        if self._noise is None or self._noise[0] != position or self._noise[1].shape != (rows, vocab):
            self._noise = position, gumbel(self.sampling.seed or 0, position, (rows, vocab))
        return self._noise[1]

    def proposals(self, position: int, rows: int) -> Choice:
        """How a drafter chooses, from its own scores, the drafts of a round of `rows` rows; the first at `position`."""
        if not self.coupled or self.sampling.temp == 0:
            return greedy
        noise = self.noise(position, rows, self.vocab)

        def choose(scores: mx.array, slot: int = 0, ids: mx.array | None = None) -> mx.array:
            rows_ = noise[slot : slot + len(scores)]
            if ids is not None:
                rows_ = mx.take_along_axis(rows_, mx.broadcast_to(ids, scores.shape), axis=-1)
            return mx.argmax(scores.astype(mx.float32) / self.draft_temp + rows_, axis=-1)

        return choose
