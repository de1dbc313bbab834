"""`python -m mlx_dflash.benchmarks.growth`: time to first token, time a round and memory against the prompt's length.

Prompts of random ids, plain and with the drafter in turn, in an order and then in its reverse (from `--once-from`
tokens on, where a prompt takes minutes, only once each). Rounds are pinned to a width and go on from the last prompt;
a width's time is the median over its rounds after the first two. Memory is what the device holds after the prompt, and
the peak up to there, both beyond the weights. `--chart FILE.png` draws the result (needs matplotlib: the `charts`
extra).
"""

import argparse
import random
import statistics
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from time import perf_counter
from typing import Any

import mlx.core as mx
from mlx_dflash.benchmarks.chart import draw_growth
from mlx_dflash.benchmarks.machine import describe
from mlx_dflash.benchmarks.output import write_result

from mlx_dflash import load, load_drafter
from mlx_dflash.accept import Sampler
from mlx_dflash.decode import Decoder, State
from mlx_dflash.drafters import DFlashDrafter
from mlx_dflash.stats import Observer
from mlx_dflash.targets import Target
from mlx_dflash.width import fixed


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m mlx_dflash.benchmarks.growth", description=__doc__)
    add = parser.add_argument
    add("--model", default="demo")
    add("--draft-model", default="demo")
    add("--lengths", type=int, nargs="+", default=[256, 1024, 2048, 4096, 8192, 16384])
    add("--once-from", type=int, default=8192, help="prompts of this length and above run once an arm")
    add("--block-sizes", type=int, nargs="+", default=[1, 5, 8])
    add("--rounds", type=int, default=8)
    add("--repeats", type=int, default=2, help="of each order")
    add("--output", type=Path, default=None)
    add("--chart", type=Path, default=None)
    args = parser.parse_args()
    for result in run(args):  # one length more each time, so that what is done outlives an interruption
        write_result(result, args.output)
        if args.chart is not None:
            draw_growth(result, args.chart)


def run(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """The result so far, after every length."""
    target, _ = load(args.model)
    drafter = load_drafter(args.draft_model, target)
    assert isinstance(drafter, DFlashDrafter)
    rng = random.Random(0)
    rows: list[dict[str, Any]] = []
    first_token(target, None, rng.choices(range(target.vocab_size), k=64))
    for length in args.lengths:
        prompt = rng.choices(range(target.vocab_size), k=length)
        arms: dict[str, list[tuple[float, int, int]]] = {"plain": [], "drafter": []}
        once = length >= args.once_from
        state: State | None = None
        for name in ["plain", "drafter"] if once else ["plain", "drafter", "drafter", "plain"] * args.repeats:
            state = state if name == "plain" else None  # the old one's memory goes before the new one's is counted
            seconds, kept, peak, after = first_token(target, drafter if name == "drafter" else None, prompt)
            arms[name].append((seconds, kept, peak))
            state = after if name == "drafter" else state
            del after
        assert state is not None
        ttft = {name: statistics.median(t for t, _, _ in runs) for name, runs in arms.items()}
        row = {
            "prompt_tokens": length,
            "ttft": ttft,
            "ttft_ratio": ttft["drafter"] / ttft["plain"],
            "ttft_runs": {name: [t for t, _, _ in runs] for name, runs in arms.items()},
            "held_bytes": {name: runs[-1][1] for name, runs in arms.items()},
            "peak_bytes": {name: max(p for _, _, p in runs) for name, runs in arms.items()},
            "round_seconds": {n: round_time(target, drafter, state, n, args.rounds) for n in args.block_sizes},
        }
        rows.append(row)
        rounds = ", ".join(f"{n} rows {t * 1e3:.0f} ms" for n, t in row["round_seconds"].items())
        held = ", ".join(f"{name} {b / 1e6:.0f} MB" for name, b in row["held_bytes"].items())
        print(
            f"{length} tokens: first token {ttft['plain']:.2f} s plain, {row['ttft_ratio']:.3f} x with the drafter; "
            f"{rounds}; held {held}",
            flush=True,
        )
        yield {"machine": describe(), "model": args.model, "draft_model": args.draft_model, "rows": rows}


def first_token(target: Target, drafter: DFlashDrafter | None, prompt: list[int]) -> tuple[float, int, int, State]:
    """Seconds to the first token, bytes held and peak bytes beyond what was held before, and the state after it."""
    mx.clear_cache()
    mx.reset_peak_memory()
    before, started = mx.get_active_memory(), perf_counter()
    context = None if drafter is None else drafter.make_context()
    state = State(list(prompt), target.make_cache(), context)
    run = new_decoder(target, drafter, state, 1).run(1)
    next(run)
    seconds = perf_counter() - started
    run.close()
    return seconds, mx.get_active_memory() - before, mx.get_peak_memory() - before, state


def round_time(target: Target, drafter: DFlashDrafter, state: State, rows: int, rounds: int) -> float:
    """Median seconds of a round, with the drafter at hand as in a real run; the first two are left out."""
    decoder = new_decoder(target, drafter, state, rows)
    stamps: list[float] = []

    class Clock(Observer):
        def committed(self, *_: object) -> None:
            stamps.append(perf_counter())

    decoder.observer = Clock()
    for _ in decoder.run(rows * (rounds + 3)):
        if len(stamps) > rounds + 2:
            break
    return statistics.median([b - a for a, b in pairwise(stamps)][2:])


def new_decoder(target: Target, drafter: DFlashDrafter | None, state: State, rows: int) -> Decoder:
    return Decoder(target, drafter, state, fixed(rows), Sampler(), lambda tokens: None, Observer())


if __name__ == "__main__":
    main()
