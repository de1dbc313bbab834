"""`python -m mlx_dflash.benchmarks.parity`: is the text with a drafter the text without one, and mlx-lm's?

Decodes held-out prompts with the pair at several block sizes, plainly, and with stock mlx-lm on the same fp32 values.
Where tokens part, the position and the logit margin there are recorded: kernels that round differently with the number
of rows can only part near-ties.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from mlx_dflash.benchmarks.machine import describe
from mlx_dflash.benchmarks.output import write_result
from mlx_dflash.benchmarks.reference import mlx_lm_model, mlx_lm_tokens

from mlx_dflash import generate, load, load_drafter
from mlx_dflash.hub import target_folder
from mlx_dflash.report import first_difference, logit_margin
from mlx_dflash.targets import Target
from mlx_dflash.training.prompts import held_out_prompts


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m mlx_dflash.benchmarks.parity", description=__doc__)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--draft-model", default="demo")
    parser.add_argument("--prompts", type=int, default=20)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--block-sizes", type=int, nargs="+", default=[5, 8])
    parser.add_argument("--output", type=Path, default=None, help="write the result here as well")
    args = parser.parse_args()
    result = run(args)
    print(json.dumps(result, indent=1))
    write_result(result, args.output)
    sys.exit(0 if result["unexplained"] == 0 else 1)


def run(args: argparse.Namespace) -> dict[str, Any]:
    target, tokenizer = load(args.model)
    drafter = load_drafter(args.draft_model, target)
    pool = held_out_prompts()
    prompts = [pool[i * len(pool) // args.prompts] for i in range(args.prompts)]
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as scratch:
        stock = mlx_lm_model(target_folder(args.model), target, Path(scratch))
        for task, prompt in prompts:
            messages = [{"role": "user", "content": prompt}]
            ids = list(tokenizer.apply_chat_template(messages, add_generation_prompt=True))
            plain = generate(target, tokenizer, ids, max_tokens=args.max_tokens).tokens
            row: dict[str, Any] = {"task": task, "prompt": prompt, "tokens": len(plain)}
            stops = set(tokenizer.eos_token_ids)
            row["mlx_lm"] = part(target, ids, plain, mlx_lm_tokens(stock, ids, args.max_tokens, stops))
            for size in args.block_sizes:
                run = generate(target, tokenizer, ids, draft_model=drafter, block_size=size, max_tokens=args.max_tokens)
                row[f"block {size}"] = part(target, ids, plain, run.tokens) | {
                    "rounds": run.stats.rounds,
                    "accepted": run.stats.accepted,
                    "mean_accepted_length": run.stats.mean_accepted_length,
                }
            rows.append(row)
            print(json.dumps(row), file=sys.stderr, flush=True)
    arms = ["mlx_lm", *(f"block {size}" for size in args.block_sizes)]
    return {
        "machine": describe(),
        "model": args.model,
        "draft_model": args.draft_model,
        "max_tokens": args.max_tokens,
        "equal": {arm: sum(row[arm]["equal"] for row in rows) for arm in arms},
        "of": len(rows),
        "rounds": {arm: sum(row[arm]["rounds"] for row in rows) for arm in arms[1:]},
        "accepted": {arm: sum(row[arm]["accepted"] for row in rows) for arm in arms[1:]},
        "unexplained": sum(row[arm].get("margin", 0.0) >= 1e-3 for row in rows for arm in arms),
        "rows": rows,
    }


def part(target: Target, prompt: list[int], plain: list[int], other: list[int]) -> dict[str, Any]:
    """Whether two runs are equal; else where they part and by what margin of the target's logits (inf: by length)."""
    if (at := first_difference(plain, other)) is None:
        return {"equal": True}
    margin = logit_margin(target, prompt, plain, other, at)
    return {"equal": False, "position": at, "margin": float("inf") if margin is None else margin}


if __name__ == "__main__":
    main()
