"""`python -m mlx_dflash.benchmarks.width`: the width controller on simulated machines and texts.

A machine is a table of round costs, a text the chance of each draft to be kept at each place. The controller begins
with the machine's own table (or a stale one), sees noisy times and its own outcomes, and is held against the mean speed
of every fixed width on such texts: the best of them was chosen in hindsight.
"""

import argparse
import itertools
import math
import random
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from mlx_dflash.benchmarks.output import write_result
from mlx_dflash.benchmarks.plain import bootstrap

from mlx_dflash.acceptance import RUNS, Tally
from mlx_dflash.costs import DRAFTER, Costs, Curve
from mlx_dflash.width import Controller

TRAINED = 16  # rows of the trained block
DRAFT, HOST = 0.15, 0.02  # of a plain round; the vendor's figure for the drafter of a 30B target
NOISE = 0.03  # standard deviation of a round's time, as a share
Cost = Callable[[int], float]  # rows -> verify time, in plain rounds
Text = Callable[[int], list[float]]  # position -> chance of each draft, if all before it were kept


def through(points: dict[int, float]) -> Cost:
    """Straight lines through measured points, the last one going on."""
    known = sorted(points)

    def cost(rows: int) -> float:
        a, b = next(((a, b) for a, b in itertools.pairwise(known) if rows <= b), tuple(known[-2:]))
        return points[a] + (points[b] - points[a]) * (rows - a) / (b - a)

    return cost


# Verify time over one-row time at 4 bits: published measurements of stock MLX; the rest are shapes to be right on.
MACHINES: dict[str, Cost] = {
    "M5 Max, 70B dense": through({1: 1, 5: 1.42, 8: 2.2, 12: 3.2, 16: 3.9}),
    "M5 Max, 27B dense": through({1: 1, 4: 1.28, 8: 2.5, 16: 4.4}),
    "M4 Max, 30B dense": through({1: 1, 4: 1.35, 5: 1.45, 6: 1.9, 8: 2.2, 12: 3.2, 13: 3.7, 16: 3.8}),
    "flat": lambda rows: 1 + 0.01 * (rows - 1),
    "linear": lambda rows: 1 + 0.8 * (rows - 1),
    "cliffs at 6 and 13": lambda rows: 1.0 if rows == 1 else 1.1 if rows < 6 else 1.9 if rows < 13 else 3.0,
    "MoE": lambda rows: 1 + 0.35 * (rows - 1) ** 0.8,
}
# Chance of draft k + 1. Code-like text keeps about six tokens a round at 16 rows, prose-like about two.
CODE = [max(0.90 - 0.010 * k, 0.3) for k in range(TRAINED - 1)]
MIDDLE = [max(0.75 - 0.020 * k, 0.1) for k in range(TRAINED - 1)]
PROSE = [max(0.55 - 0.030 * k, 0.1) for k in range(TRAINED - 1)]
NONE = [0.0] * (TRAINED - 1)
SEGMENT = 400  # tokens after which a drifting text turns
TEXTS: dict[str, Text] = {
    "code-like": lambda at: CODE,
    "middling": lambda at: MIDDLE,
    "prose-like": lambda at: PROSE,
    "zero": lambda at: NONE,
    "drifting": lambda at: (CODE, PROSE, NONE)[at // SEGMENT % 3],
}


@dataclass
class Case:
    """Medians over texts of one kind, [low, high] their 95 % bootstrap intervals; speeds are ratios."""

    machine: str
    text: str
    condition: str
    against_best: float
    against_best_interval: tuple[float, float]
    against_plain: float
    against_plain_interval: tuple[float, float]
    best_width: int
    widths: dict[int, int]


def simulate(auto: Controller, cost: Cost, text: Text, seed: int, tokens: int, jump: float) -> float:
    """Tokens per plain round's time of a run; from the middle on all costs are `jump` times higher."""
    rng, at, time = random.Random(seed), 0, 0.0
    while at < tokens:
        kind = auto.choose({DRAFTER: TRAINED}, at)
        rows, chances, kept = kind[1], text(at), 0
        while kept < rows - 1 and rng.random() < chances[kept]:
            kept += 1
        seconds = round_cost(cost, rows) * math.exp(rng.gauss(0, NOISE)) * (jump if at > tokens / 2 else 1.0)
        time += seconds
        at += kept + 1
        auto.observe(kind, kept + 1, seconds, at)
    return at / time


def round_cost(cost: Cost, rows: int) -> float:
    return 1.0 if rows == 1 else cost(rows) + DRAFT + HOST


def fixed_speed(rows: int, cost: Cost, text: Text, tokens: int, jump: float) -> float:
    """What `simulate` would give a fixed width on average; known exactly, since every chance is."""
    time = 0.0
    for at in range(tokens):
        kept = 1.0
        committed = 1.0 + sum(kept := kept * chance for chance in text(at)[: rows - 1])
        time += (jump if at > tokens / 2 else 1.0) / committed
    return tokens / (time * round_cost(cost, rows))


def controller(cost: Cost, earlier: Sequence[float] | None = None) -> Controller:
    """One that was calibrated on a machine, and perhaps saw 200 rounds of a text with other chances before."""
    table = {rows: round_cost(cost, rows) for rows in range(2, TRAINED + 1)}
    known = Costs({0: Curve(1.0, {DRAFTER: table})})
    if earlier is not None:
        reached = [200 * math.prod(earlier[:k]) for k in range(TRAINED)]
        known.outcomes[DRAFTER] = Tally(RUNS, reached[1:], reached[:-1])
    return Controller(known)


def case(machine: str, name: str, seeds: Sequence[int], tokens: int, condition: str = "calibrated") -> Case:
    """Hold the controller against all fixed widths.

    condition: 'calibrated'; 'throttled' midway; 'stale' curve; 'misled', by earlier runs on code-like text, or on text
    that kept nothing if this one is code-like.
    """
    cost, text = MACHINES[machine], TEXTS[name]
    jump = 1.4 if condition == "throttled" else 1.0
    believed = MACHINES["flat"] if condition == "stale" else cost
    earlier = None if condition != "misled" else NONE if name == "code-like" else CODE
    speeds, widths = [], dict[int, int]()
    for seed in seeds:
        auto = controller(believed, earlier)
        speeds.append(simulate(auto, cost, text, seed, tokens, jump))
        for (_, rows), count in auto.taken.items():
            widths[rows] = widths.get(rows, 0) + count
    arms = {rows: fixed_speed(rows, cost, text, tokens, jump) for rows in range(1, TRAINED + 1)}
    winner = max(arms, key=arms.__getitem__)
    best, plain = ([speed / arms[rows] for speed in speeds] for rows in (winner, 1))
    return Case(
        machine,
        name,
        condition,
        statistics.median(best),
        interval(best),
        statistics.median(plain),
        interval(plain),
        winner,
        dict(sorted(widths.items())),
    )


def interval(values: Sequence[float]) -> tuple[float, float]:
    low, high = bootstrap(list(values))
    return low, high


def cases(seeds: Sequence[int], tokens: int) -> Iterator[Case]:
    """Every machine and text as calibrated; some texts throttled, with a stale curve, after misleading runs."""
    for machine in MACHINES:
        for name in TEXTS:
            yield case(machine, name, seeds, tokens)
        for condition in ("throttled", "stale"):
            for name in ("code-like", "prose-like"):
                yield case(machine, name, seeds, tokens, condition)
        for name in ("code-like", "prose-like", "zero"):
            yield case(machine, name, seeds, tokens, "misled")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m mlx_dflash.benchmarks.width", description=__doc__)
    parser.add_argument("--seeds", type=int, default=15, help="texts of each kind")
    parser.add_argument("--tokens", type=int, default=4800, help="length of each")
    parser.add_argument("--output", type=Path, default=None)
    args = parser.parse_args()
    found = []
    for one in cases(range(args.seeds), args.tokens):
        found.append(asdict(one))
        print(
            f"{one.machine:20} {one.text:10} {one.condition:11} {one.against_best:.3f} of the best fixed width "
            f"({one.best_width}), {one.against_plain:.3f} of plain",
            flush=True,
        )
    settings = {"trained_block": TRAINED, "draft": DRAFT, "host": HOST, "noise": NOISE, "segment": SEGMENT}
    write_result({"seeds": args.seeds, "tokens": args.tokens, **settings, "cases": found}, args.output)


if __name__ == "__main__":
    main()
