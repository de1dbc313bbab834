"""What a run measured, as data, and the observer that the loop tells its events to.

Knows counts and clocks; nothing of models or text. Acceptance is over rounds that drafted, counted after the cut; the
first token belongs to no round; plain rounds are counted apart.
"""

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import mlx.core as mx

from .costs import DRAFTER, Kind

AWAY = 0.1  # share of a round's time beyond which its taker's own time makes the clock useless
# Told of every round: its kind, its tokens, its seconds if they mean something, the tokens of context.
Learn = Callable[[Kind, int, float | None, int], None]


@dataclass
class Stats:
    """Times in seconds, speeds in tokens a second, memory in bytes.

    mode: 'dflash' if the drafter drafted, 'lookup' if only the text itself did, else 'plain'. timing: 'fused' (rounds
    timed whole; draft_time, verify_time and host_time are None) or 'profiled' (work evaluated between draft and verify,
    which slows the run). acceptance_lengths: tokens committed by each round that drafted. accepted_by_position: how
    often draft i was kept. block_sizes: rows verified -> rounds, the plain ones under 1. width_reason: why "auto" took
    them. lookup_rounds: those of `rounds` whose drafts came from the text itself. redraws: rounds whose filters kept
    more tokens than the candidates first looked at, drawn and read once more. cached_tokens: those of the prompt that
    an earlier request had left in the caches; prompt_tps counts the others. generation_tps: tokens after the first over
    the time after the first. ttft: from the request to the first token. sampling: every setting in force; under "from",
    its origin.
    """

    mode: str = "plain"
    timing: str = "fused"
    rounds: int = 0
    plain_rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    acceptance_rate: float | None = None
    mean_accepted_length: float | None = None
    acceptance_lengths: list[int] = field(default_factory=list)
    accepted_by_position: list[int] = field(default_factory=list)
    block_sizes: dict[int, int] = field(default_factory=dict)
    width_reason: str = ""
    lookup_rounds: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generation_tokens: int = 0
    ttft: float = 0.0
    prompt_tps: float = 0.0
    generation_tps: float = 0.0
    round_time: float = 0.0
    draft_time: float | None = None
    verify_time: float | None = None
    host_time: float | None = None
    host_reads: int = 0
    redraws: int = 0
    peak_memory: int = 0
    sampling: dict[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


class Observer:
    """Counts a run. `round_time` is the sum over rounds, from one round's commit to the next one's.

    away: seconds since the last commit that whoever takes the tokens has spent.
    """

    def __init__(self, prompt_progress: Any = None, learn: Learn | None = None) -> None:
        self.stats = Stats()
        self.learn = learn
        self.away = 0.0
        self.progress = prompt_progress
        self.started = self.last = self.first_token = time.perf_counter()

    def prefilled(self, done: int, total: int) -> None:
        if self.progress is not None:
            self.progress(done, total)
        self.stats.prompt_tokens = total

    def drafted(self, drafts: mx.array) -> None:
        """Drafts of the round being launched, still lazy."""

    def verified(self, draws: mx.array) -> None:
        """The target's draws of the round being launched, still lazy."""

    def read(self) -> None:
        self.stats.host_reads += 1

    def drawn_again(self) -> None:
        """A round whose filters kept more than the candidates first looked at; it costs a second read."""
        self.stats.redraws += 1

    def committed(self, kind: Kind, kept: int, accepted: int, context: int) -> None:
        """A round kept `kept` tokens, of which up to `accepted` were drafts, after `context` tokens."""
        stats, now, (source, rows) = self.stats, time.perf_counter(), kind
        stats.generation_tokens += kept
        if stats.generation_tokens == kept:  # the first token, in no round
            self.first_token = now
            stats.ttft = now - self.started
            if self.progress is not None:
                self.progress(stats.prompt_tokens, stats.prompt_tokens)
        else:
            seconds = now - self.last
            stats.round_time += seconds
            if self.learn is not None:
                self.learn(kind, accepted + 1, seconds if self.away < AWAY * seconds else None, context)
            stats.block_sizes[rows] = stats.block_sizes.get(rows, 0) + 1
            if rows == 1:
                stats.plain_rounds += 1
            else:
                stats.rounds += 1
                stats.lookup_rounds += source != DRAFTER
                stats.drafted += rows - 1
                accepted = min(accepted, kept)
                stats.accepted += accepted
                places = stats.accepted_by_position
                places += [0] * (rows - 1 - len(places))
                for i in range(accepted):
                    places[i] += 1
                stats.acceptance_lengths.append(kept)
        self.last, self.away = now, 0.0

    def generation_tps(self) -> float:
        """Tokens after the first over the time after the first, up to now; 0 with the first token."""
        elapsed = self.last - self.first_token
        return (self.stats.generation_tokens - 1) / elapsed if elapsed > 0 else 0.0

    def finish(self) -> Stats:
        """Fill in what follows from the counts."""
        stats = self.stats
        stats.peak_memory = mx.get_peak_memory()
        stats.generation_tps = self.generation_tps()
        if stats.ttft > 0:
            stats.prompt_tps = (stats.prompt_tokens - stats.cached_tokens) / stats.ttft
        if stats.rounds:
            stats.mode = "dflash" if stats.rounds > stats.lookup_rounds else "lookup"
            stats.acceptance_rate = stats.accepted / stats.drafted
            stats.mean_accepted_length = sum(stats.acceptance_lengths) / stats.rounds
        return stats


class Profiler(Observer):
    """Evaluates between draft and verify, so that their times stand apart; the rest of a round is the host's."""

    def __init__(self, prompt_progress: Any = None, learn: Learn | None = None) -> None:
        super().__init__(prompt_progress, learn)
        stats = self.stats
        stats.timing, stats.draft_time, stats.verify_time, stats.host_time = "profiled", 0.0, 0.0, 0.0

    def drafted(self, drafts: mx.array) -> None:
        self.stats.draft_time = (self.stats.draft_time or 0.0) + timed(drafts)

    def verified(self, draws: mx.array) -> None:
        if self.stats.generation_tokens:  # the first token's pass is prefill
            self.stats.verify_time = (self.stats.verify_time or 0.0) + timed(draws)

    def finish(self) -> Stats:
        stats = super().finish()
        stats.host_time = stats.round_time - (stats.draft_time or 0.0) - (stats.verify_time or 0.0)
        return stats


def timed(array: mx.array) -> float:
    start = time.perf_counter()
    mx.eval(array)
    return time.perf_counter() - start
