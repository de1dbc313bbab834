"""Many rounds with forced rejects: the tokens stay plain decoding's, and memory stays flat.

    python -m tests.test_soak 5000        # rounds a kind; prints what it found, minutes

A run is made of conversations that go on from one checkpoint of the prompt, each with another seed, so that their
contexts stay short. Sampling keeps them from falling into loops.
"""

import random
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import mlx.core as mx
import pytest

from mlx_dflash import load, load_drafter
from mlx_dflash.accept import Sampler, Sampling
from mlx_dflash.decode import Decoder, State
from mlx_dflash.stats import Observer
from mlx_dflash.width import fixed

GOLDEN = Path(__file__).parent / "golden"
KINDS = {"hybrid": "qwen3_5", "windowed": "muse_glimmer", "full": "qwen3"}
ROUNDS = 120  # of each kind in the test suite: seconds. The long run takes its number from the command line
PROMPT, CONVERSATION = 150, 140  # tokens: past the windows of the tiny pairs, and past a step of the buffers' growth
SLACK = 96 * 1024  # bytes that may come and go: features not yet projected, buffers that MLX lets a small slice keep


class Rejecting:
    """A drafter that does all its own work, but of every block proposes only a random number of right tokens."""

    def __init__(self, drafter, seed):
        self.drafter, self.random = drafter, random.Random(seed)
        self.taps, self.block_size, self.target = drafter.taps, drafter.block_size, drafter.target
        self.make_context, self.append, self.rows = drafter.make_context, drafter.append, drafter.rows
        self.right: list[int] = []  # the run that is to come, by absolute position

    def propose(self, anchor, rows, context, draw):
        at, count = context.length + 1, rows - 1
        self.drafter.propose(anchor, rows, context, draw)
        kept = self.random.randint(0, count)
        true = (self.right + [0] * count)[at : at + count]
        return mx.array([t if i < kept else (t + 1) % 290 for i, t in enumerate(true)], mx.uint32)


@dataclass
class Report:
    """What a soak did. memory: MLX's active bytes after each conversation; resident: the process's, in MiB."""

    rounds: int = 0
    tokens: int = 0
    rejected: int = 0
    seconds: float = 0.0
    memory: list[int] = field(default_factory=list)
    resident: list[float] = field(default_factory=list)


class Counter(Observer):
    def __init__(self, report):
        super().__init__()
        self.report = report

    def committed(self, kind, kept, accepted, context):
        rows = kind[1]
        if rows > 1:
            self.report.rounds += 1
            self.report.rejected += rows - 1 - accepted
        self.report.tokens += kept


def run(target, drafter, state, seed, observer):
    sampler = Sampler(Sampling(temp=1.0, seed=seed))
    decoder = Decoder(target, drafter, state, fixed(8), sampler, lambda tokens: None, observer)
    return [e.token for e in decoder.run(CONVERSATION)]


def resident():
    """MiB of this process in memory; 0 where the system does not say."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return 0.0
    return pages * 4096 / 2**20


def soak(family, rounds):
    """Raises AssertionError at the first token that is not plain decoding's."""
    target, _ = load(GOLDEN / family / "target")
    drafter = Rejecting(load_drafter(GOLDEN / family / "draft", target), seed=0)
    prompt = [random.Random(i).randrange(3, 290) for i in range(PROMPT)]
    plain, state = State(list(prompt), target.make_cache()), State(list(prompt), target.make_cache())
    state.context = drafter.make_context()
    marks = [(s, s.cache.checkpoint()) for s in (plain, state)]
    context_mark = state.context.checkpoint()
    report, start, seed = Report(), time.perf_counter(), 0
    while report.rounds < rounds:
        for s, mark in marks:
            s.tokens = list(prompt)
            s.cache.restore(mark)
        state.context.restore(context_mark)
        expected = run(target, None, plain, seed, Observer())
        drafter.right = prompt + expected
        assert run(target, drafter, state, seed, Counter(report)) == expected, f"conversation {seed} of {family}"
        mx.eval([s.cache.arrays() for s, _ in marks], state.context.arrays())  # the last commit's is still lazy
        report.memory.append(mx.get_active_memory())
        report.resident.append(resident())
        seed += 1
    report.seconds = time.perf_counter() - start
    return report


@pytest.mark.parametrize("kind", KINDS)
def test_many_rounds_leave_the_tokens_right_and_the_memory_flat(kind):
    report = soak(KINDS[kind], ROUNDS)
    assert report.rounds >= ROUNDS and report.rejected > report.rounds
    assert len(report.memory) > 3
    assert max(report.memory[1:]) - min(report.memory[1:]) <= SLACK


if __name__ == "__main__":
    for kind, family in KINDS.items():
        r = soak(family, int(sys.argv[1]))
        settled, spread = len(r.memory) // 10, r.memory[len(r.memory) // 10 :]
        print(
            f"{kind} ({family}): {r.rounds} rounds, {r.tokens} tokens equal plain, {r.rejected} drafts rejected; "
            f"active memory {spread[0]} -> {spread[-1]} bytes, spread {max(spread) - min(spread)}; "
            f"resident {r.resident[settled]:.1f} -> {r.resident[-1]:.1f} MiB; {r.seconds:.0f} s",
            flush=True,
        )
