"""`python -m mlx_dflash.benchmarks.plain`: our plain decoding against mlx_lm.generate_step, interleaved in one process.

ABBA blocks from the same prompt on the same fp32 values; the ratio is formed block by block, so a machine whose speed
drifts does not decide it.
"""

import argparse
import json
import random
import statistics
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_dflash.benchmarks.machine import describe
from mlx_dflash.benchmarks.output import write_result
from mlx_dflash.benchmarks.reference import mlx_lm_model
from mlx_lm.generate import generate_step

from mlx_dflash import load, stream_generate
from mlx_dflash.hub import target_folder


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m mlx_dflash.benchmarks.plain", description=__doc__)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--blocks", type=int, default=12, help="ABBA blocks")
    parser.add_argument("--output", type=Path, default=None)
    args = parser.parse_args()
    target, tokenizer = load(args.model)
    messages = [{"role": "user", "content": "Write a story about a lighthouse keeper."}]
    ids = list(tokenizer.apply_chat_template(messages, add_generation_prompt=True))
    with tempfile.TemporaryDirectory() as scratch:
        stock = mlx_lm_model(target_folder(args.model), target, Path(scratch))

        def ours() -> float:
            return seconds_a_token(stream_generate(target, tokenizer, ids, max_tokens=args.tokens))

        def theirs() -> float:
            return seconds_a_token(generate_step(mx.array(ids), stock, max_tokens=args.tokens))

        ours(), theirs()
        blocks: list[dict[str, Any]] = []
        for i in range(args.blocks):
            a, b, c, d = ours(), theirs(), theirs(), ours()
            blocks.append({"ours": [a, d], "mlx_lm": [b, c], "ratio": (b + c) / (a + d)})
            print(f"block {i + 1}: {blocks[-1]['ratio']:.3f}", flush=True)
    ratios = [b["ratio"] for b in blocks]
    result = {
        "machine": describe(),
        "model": args.model,
        "tokens": args.tokens,
        "speed_ratio_median": statistics.median(ratios),
        "speed_ratio_interval_95": bootstrap(ratios),
        "blocks": blocks,
    }
    print(json.dumps({k: v for k, v in result.items() if k != "blocks"}, indent=1))
    write_result(result, args.output)


def seconds_a_token(stream: Iterable[Any]) -> float:
    """From the first token to the last but one: mlx-lm has launched a step that nobody reads by its last token."""
    times = [time.perf_counter() for _ in stream]
    return (times[-2] - times[0]) / (len(times) - 2)


def bootstrap(values: list[float], rounds: int = 2000) -> list[float]:
    """95% interval of the median."""
    rng = random.Random(0)
    medians = sorted(statistics.median(rng.choices(values, k=len(values))) for _ in range(rounds))
    return [medians[int(0.025 * rounds)], medians[int(0.975 * rounds)]]


if __name__ == "__main__":
    main()
