"""THE LOOP: draft -> verify -> accept -> commit, one round at a time.

Knows targets, drafters and caches through their contracts; nothing of text, sampling settings or clocks. Between rounds
one thing always holds: `state.tokens` is all that was given and emitted, and the cache holds all of it but the last
token, the next round's *anchor*. Plain decoding is the same loop with rounds of one row.
"""

from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass

import mlx.core as mx

from .accept import Drawn, Outcome, Sampler, Score
from .cache import TargetCache
from .costs import DRAFTER, PLAIN_ROUND, Kind
from .drafters import DFlashDrafter, DraftContext
from .lookup import History
from .stats import Observer
from .targets import Target

Cut = Callable[[list[int]], int | None]  # a round's tokens -> how many to keep, the stop included; None: no stop
Width = Callable[[Mapping[str, int], int], Kind]  # most rows by who offers drafts, tokens of context -> the next round


@dataclass
class State:
    """One conversation: its tokens, never empty, and what the models remember of them.

    The tokens past `cache.length` are those the next run forwards. context: None without a drafter.
    """

    tokens: list[int]
    cache: TargetCache
    context: DraftContext | None = None

    @property
    def rewindable(self) -> bool:
        """Whether both memories can go back to any length, so that no checkpoint is needed."""
        return self.cache.rewindable and (self.context is None or self.context.rewindable)


@dataclass(frozen=True)
class Round:
    """A verify pass in flight."""

    kind: Kind
    drafts: mx.array | None  # (rows - 1,); None in a round of one row
    drawn: Drawn  # the target's token after every row
    outcome: mx.array  # accepted drafts, draws and what else was asked for, packed: the one thing the host reads
    features: mx.array | None  # (1, rows, taps * hidden)


@dataclass(frozen=True)
class Emitted:
    token: int
    from_draft: bool
    last: bool
    score: Score | None = None  # if log-probabilities were asked for


@dataclass
class Decoder:
    """Goes on from a State. width: asked before a round is launched. history: of the state's tokens, for lookup."""

    target: Target
    drafter: DFlashDrafter | None
    state: State
    width: Width
    sampler: Sampler
    cut: Cut
    observer: Observer
    history: History | None = None

    def run(self, max_tokens: int, prefill_step: int = 2048) -> Generator[Emitted, None, None]:
        """Yield tokens one by one until `cut` finds a stop or `max_tokens` are out.

        What a yield leaves running is already launched. Closing the generator, there or anywhere, aborts it and leaves
        a state that another run can go on from.
        """
        state, left = self.state, max_tokens
        unread: Round | None = None  # committed, but its token not yet in state.tokens
        try:
            self.prefill(prefill_step)
            flight = self.launch(mx.array(state.tokens[-1:], mx.uint32), PLAIN_ROUND)
            while True:
                # A round of one row has one outcome, so the next one need not wait for the host to read it.
                ahead = None
                if flight.kind == PLAIN_ROUND and left > 1 and self.plan(left - 1) == PLAIN_ROUND:
                    self.commit(flight, 1)
                    unread = flight
                    ahead = self.launch(flight.drawn.tokens, PLAIN_ROUND)

                outcome = self.read(flight)
                if not outcome.final:
                    outcome = self.read_again(flight)
                    if ahead is not None:  # it began with a token that may not be the one
                        state.cache.abort()
                        ahead = None
                accepted, scores = outcome.accepted, outcome.scores
                tokens = outcome.tokens[: min(accepted + 1, left)]
                stop = self.cut(tokens)
                tokens = tokens[:stop]
                state.tokens += tokens
                left -= len(tokens)
                done = stop is not None or left == 0

                if unread is None:
                    self.commit(flight, len(tokens))
                unread = None
                self.observer.committed(flight.kind, len(tokens), accepted, state.cache.length)
                if done:
                    state.cache.abort()
                elif ahead is None:
                    ahead = self.launch(mx.array(tokens[-1:], mx.uint32), self.plan(left))
                for i, token in enumerate(tokens):
                    last = done and i == len(tokens) - 1
                    yield Emitted(token, i < accepted, last, None if scores is None else scores[i])
                if done or ahead is None:
                    return
                flight = ahead
        finally:
            state.cache.abort()
            if unread is not None:
                outcome = self.read(unread)
                state.tokens += (outcome if outcome.final else self.read_again(unread)).tokens

    def plan(self, left: int) -> Kind:
        """The next round, with `left` tokens still to emit."""
        offers: dict[str, int] = {}
        if self.drafter is not None and self.state.context is not None:
            offers[DRAFTER] = self.drafter.rows(self.drafter.block_size, left)
        if self.history is not None:
            source, rows = self.history.offer(left)
            offers[source] = rows
        offers = {source: rows for source, rows in offers.items() if rows > 1}
        return self.width(offers, self.state.cache.length) if offers else PLAIN_ROUND

    def launch(self, anchor: mx.array, kind: Kind) -> Round:
        """Draft, verify and draw; all that the next round builds on is on its way to the device, nothing is read."""
        state, ids, drafts = self.state, anchor, None
        before = state.cache.length  # tokens before the anchor; the one drawn after it is at `before` + 1
        if kind != PLAIN_ROUND:
            drafts = self.draft(anchor, kind, before + 1)
            self.observer.drafted(drafts)
            ids = mx.concatenate([anchor, drafts])
        state.cache.begin()
        logits, features = self.target.forward(ids[None], state.cache, self.taps)
        drawn = self.sampler.draw(logits[0], ids, state.tokens, before)
        self.observer.verified(drawn.tokens)
        outcome = drawn.pack(drafts)
        # Caches and features are not all ancestors of the outcome; left lazy they would chain from round to round.
        mx.async_eval(outcome, features, state.cache.arrays(), self.context_arrays())
        return Round(kind, drafts, drawn, outcome, features)

    def draft(self, anchor: mx.array, kind: Kind, at: int) -> mx.array:
        """Draft ids (rows - 1,), the first of which would stand at position `at`."""
        (source, rows), state = kind, self.state
        if source == DRAFTER:
            assert self.drafter is not None and state.context is not None
            return self.drafter.propose(anchor, rows, state.context, self.sampler.proposals(at, rows))
        assert self.history is not None
        return mx.array(self.history.drafts(rows - 1), mx.uint32)

    def read(self, flight: Round) -> Outcome:
        """The host read: how many drafts were accepted, and the target's token after every row."""
        values: list[int] = flight.outcome.tolist()  # type: ignore[assignment]
        self.observer.read()
        return flight.drawn.unpack(values, flight.drafts is not None)

    def read_again(self, flight: Round) -> Outcome:
        """For the few rounds whose filters keep more than the candidates that were looked at: all rows, all tokens."""
        self.observer.drawn_again()
        drawn = flight.drawn.again()
        values: list[int] = drawn.pack(flight.drafts).tolist()  # type: ignore[assignment]
        self.observer.read()
        return drawn.unpack(values, flight.drafts is not None)

    def commit(self, flight: Round, keep: int) -> None:
        """Keep the first `keep` rows of a round, in the cache and in the drafter's context."""
        self.state.cache.commit(keep)
        self.remember(None if flight.features is None else flight.features[:, :keep])

    def prefill(self, step: int, until: int | None = None) -> None:
        """Forward all tokens that the cache lacks, but the last, or those before `until`, in chunks of `step` rows."""
        cache, tokens = self.state.cache, self.state.tokens
        end = len(tokens) - 1 if until is None else min(until, len(tokens) - 1)
        known, total = cache.length, len(tokens)
        if self.state.context is not None and self.state.context.length != known:
            raise RuntimeError(f"the drafter's context knows {self.state.context.length} tokens, the target {known}")
        self.observer.prefilled(known, total)
        for start in range(known, end, step):
            chunk = mx.array([tokens[start : min(start + step, end)]], mx.uint32)
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
