"""THE LOOP: draft -> verify -> accept -> commit, one round at a time.

Knows targets, drafters and caches through their contracts; nothing of text, sampling settings or clocks. Between rounds
one thing always holds: `state.tokens` is all that was given and emitted, and the cache holds all of it but the last
token, the next round's *anchor*. Plain decoding is the same loop with rounds of one row.
"""

from collections.abc import Callable, Generator
from dataclasses import dataclass

import mlx.core as mx

from .accept import Draw, count_accepted, greedy
from .cache import TargetCache
from .drafters import DFlashDrafter, DraftContext
from .stats import Observer
from .targets import Target

Cut = Callable[[list[int]], int | None]  # a round's tokens -> how many to keep, the stop included; None: no stop


@dataclass
class State:
    """One conversation: its tokens, never empty, and what the models remember of them.

    The tokens past `cache.length` are those the next run forwards. context: None without a drafter.
    """

    tokens: list[int]
    cache: TargetCache
    context: DraftContext | None = None


@dataclass(frozen=True)
class Round:
    """A verify pass in flight."""

    rows: int
    draws: mx.array  # (rows,) the target's token after every row
    outcome: mx.array  # [accepted drafts, *draws], the one thing the host reads; just the draw of a one-row round
    features: mx.array | None  # (1, rows, taps * hidden)


@dataclass(frozen=True)
class Emitted:
    token: int
    from_draft: bool
    last: bool


@dataclass
class Decoder:
    """Goes on from a State. width: asked before a round is launched, returns the rows to verify."""

    target: Target
    drafter: DFlashDrafter | None
    state: State
    width: Callable[[], int]
    draw: Draw
    cut: Cut
    observer: Observer

    def run(self, max_tokens: int, prefill_step: int = 2048) -> Generator[Emitted, None, None]:
        """Yield tokens one by one until `cut` finds a stop or `max_tokens` are out.

        What a yield leaves running is already launched. Closing the generator, there or anywhere, aborts it and leaves
        a state that another run can go on from.
        """
        state, left = self.state, max_tokens
        unread: Round | None = None  # committed, but its token not yet in state.tokens
        try:
            self.prefill(prefill_step)
            flight = self.launch(mx.array(state.tokens[-1:], mx.uint32), 1)
            while True:
                # A round of one row has one outcome, so the next one need not wait for the host to read it.
                ahead, rows = None, self.rows(left - 1) if flight.rows == 1 and left > 1 else 0
                if rows == 1:
                    self.commit(flight, 1)
                    unread = flight
                    ahead = self.launch(flight.draws, 1)

                accepted, tokens = self.read(flight)
                tokens = tokens[: min(accepted + 1, left)]
                stop = self.cut(tokens)
                tokens = tokens[:stop]
                state.tokens += tokens
                left -= len(tokens)
                done = stop is not None or left == 0

                if unread is None:
                    self.commit(flight, len(tokens))
                unread = None
                self.observer.committed(flight.rows, len(tokens), accepted)
                if done:
                    state.cache.abort()
                elif ahead is None:
                    ahead = self.launch(mx.array(tokens[-1:], mx.uint32), rows or self.rows(left))
                for i, token in enumerate(tokens):
                    yield Emitted(token, i < accepted, done and i == len(tokens) - 1)
                if done or ahead is None:
                    return
                flight = ahead
        finally:
            state.cache.abort()
            if unread is not None:
                state.tokens += self.read(unread)[1]

    def rows(self, left: int) -> int:
        """Rows of the next round, with `left` tokens still to emit."""
        width = 1 if self.drafter is None else self.width()
        return 1 if width == 1 or self.drafter is None else self.drafter.rows(width, left)

    def launch(self, anchor: mx.array, rows: int) -> Round:
        """Draft, verify and draw; all that the next round builds on is on its way to the device, nothing is read."""
        state, ids = self.state, anchor
        if rows > 1 and self.drafter is not None and state.context is not None:
            drafts = self.drafter.propose(anchor, rows, state.context, greedy)
            self.observer.drafted(drafts)
            ids = mx.concatenate([anchor, drafts])
        position = state.cache.length + 1  # of the token drawn after the anchor
        state.cache.begin()
        logits, features = self.target.forward(ids[None], state.cache, self.taps)
        draws = self.draw(logits[0], position)
        self.observer.verified(draws)
        outcome = draws
        if rows > 1:
            outcome = mx.concatenate([count_accepted(ids[1:], draws)[None].astype(draws.dtype), draws])
        # Caches and features are not all ancestors of the outcome; left lazy they would chain from round to round.
        mx.async_eval(outcome, features, state.cache.arrays(), self.context_arrays())
        return Round(rows, draws, outcome, features)

    def read(self, flight: Round) -> tuple[int, list[int]]:
        """The host read: how many drafts were accepted, and the target's token after every row."""
        values: list[int] = flight.outcome.tolist()  # type: ignore[assignment]
        self.observer.read()
        return (0, values) if flight.rows == 1 else (values[0], values[1:])

    def commit(self, flight: Round, keep: int) -> None:
        """Keep the first `keep` rows of a round, in the cache and in the drafter's context."""
        self.state.cache.commit(keep)
        self.remember(None if flight.features is None else flight.features[:, :keep])

    def prefill(self, step: int) -> None:
        """Forward all tokens that the cache lacks, but the last, in chunks of `step` rows."""
        cache, tokens = self.state.cache, self.state.tokens
        known, total = cache.length, len(tokens)
        if self.state.context is not None and self.state.context.length != known:
            raise RuntimeError(f"the drafter's context knows {self.state.context.length} tokens, the target {known}")
        self.observer.prefilled(known, total)
        for start in range(known, total - 1, step):
            chunk = mx.array([tokens[start : min(start + step, total - 1)]], mx.uint32)
            cache.begin()
            _, features = self.target.forward(chunk, cache, self.taps, last_logits_only=True)  # logits never computed
            cache.commit(chunk.shape[1])
            self.remember(features)
            mx.eval(cache.arrays(), self.context_arrays())
            mx.clear_cache()
            self.observer.prefilled(start + chunk.shape[1], total)

    def remember(self, features: mx.array | None) -> None:
        if features is not None and self.drafter is not None and self.state.context is not None:
            self.drafter.append(features, self.state.context)

    @property
    def taps(self) -> tuple[int, ...]:
        return () if self.drafter is None or self.state.context is None else self.drafter.taps

    def context_arrays(self) -> list[mx.array]:
        return [] if self.state.context is None else self.state.context.arrays()
