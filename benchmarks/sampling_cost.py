"""`python -m mlx_dflash.benchmarks.sampling_cost`: what choosing the tokens of a round costs, by settings.

Rows of logits as large as a model's, whose nuclei have the size that one sees in text; beside whole-row sorting.
"""

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_dflash.benchmarks.machine import describe
from mlx_dflash.benchmarks.output import write_result

from mlx_dflash.accept import Sampler, Sampling
from mlx_dflash.processors import Processors

SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "temp": {"temp": 0.8},
    "top_p": {"temp": 0.8, "top_p": 0.95},
    "top_k": {"temp": 0.8, "top_k": 64},
    "min_p": {"temp": 0.8, "min_p": 0.05},
    "top_p + top_k + min_p": {"temp": 0.8, "top_p": 0.95, "top_k": 64, "min_p": 0.05},
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m mlx_dflash.benchmarks.sampling_cost", description=__doc__)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--vocab", type=int, default=49152)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--output", type=Path, default=None)
    args = parser.parse_args()
    logits = 2.5 * mx.random.normal((args.rows, args.vocab), key=mx.random.key(0))
    logits = logits + mx.where(mx.arange(args.vocab) % 1999 == 7, 14.0, 0.0)  # a few dozen likely tokens
    mx.eval(logits)
    ids, before = mx.zeros(args.rows, mx.uint32), list(range(100))
    rows: dict[str, dict[str, float]] = {}

    def measure(name: str, sampler: Sampler, whole: bool = False) -> None:
        def once() -> mx.array:
            sampler._noise = None
            drawn = sampler.draw(logits, ids, before, len(before))
            return (drawn.again() if whole else drawn).pack(None)

        rows[name] = timed(once, args.repeats)

    for name, options in SETTINGS.items():
        measure(name, Sampler(Sampling(seed=1, **options)))
    measure("top_p, drawn again from whole rows", Sampler(Sampling(seed=1, **SETTINGS["top_p"])), whole=True)
    penalties = Processors(repetition_penalty=1.2, presence_penalty=0.5, frequency_penalty=0.5)
    measure("greedy + all penalties", Sampler(Sampling(), penalties))
    measure("greedy + logprobs", Sampler(Sampling(), logprobs=True, top_logprobs=5))
    rows["sorting whole rows, no more"] = timed(lambda: mx.sort(logits, axis=-1), args.repeats)
    result = {"machine": describe(), "rows": args.rows, "vocab": args.vocab, "milliseconds": rows}
    print(json.dumps(result, indent=1))
    write_result(result, args.output)


def timed(run: Callable[[], mx.array], repeats: int) -> dict[str, float]:
    """Least wall and processor time of a call, in ms: the machine's other work can only add to it."""
    mx.eval(run())
    wall, cpu = [], []
    for _ in range(repeats):
        start, busy = time.perf_counter(), time.process_time()
        mx.eval(run())
        wall.append(time.perf_counter() - start)
        cpu.append(time.process_time() - busy)
    return {"wall": round(1e3 * min(wall), 2), "processor": round(1e3 * min(cpu), 2)}


if __name__ == "__main__":
    main()
