"""`python -m mlx_dflash.benchmarks.speed`: `auto` and lookup against fixed widths and plain decoding, by task class.

All arms of a prompt run in one process, in an order and then in its reverse, and give the same tokens; what is compared
is decoding speed, tokens after the first over the time after the first. Ratios are of the same prompt's arms; medians
and 95 % bootstrap intervals. On Linux, preload OpenBLAS: MLX's wheel brings a BLAS whose cost is linear in rows.
"""

import argparse
import random
import statistics
from pathlib import Path
from typing import Any

from mlx_dflash.benchmarks.machine import describe
from mlx_dflash.benchmarks.output import write_result
from mlx_dflash.benchmarks.plain import bootstrap

from mlx_dflash import generate, load, load_drafter
from mlx_dflash.training.prompts import held_out_prompts

COPY_EDIT = (
    "Repeat this text word for word: The council voted on Tuesday to build a new bridge over the river. It will cost "
    "twelve million euros and open to traffic in three years. Cyclists will get a lane of their own.",
    "Repeat this code exactly as it is:\n```python\ndef mean(values):\n    total = 0\n    for value in values:\n"
    "        total += value\n    return total / len(values)\n\n\ndef spread(values):\n    middle = mean(values)\n"
    "    total = 0\n    for value in values:\n        total += (value - middle) ** 2\n"
    "    return total / len(values)\n```",
    "Copy this list without any change:\n1. Wash the vegetables in cold water.\n2. Cut the carrots into thin slices.\n"
    "3. Fry the onions in butter until they are brown.\n4. Add the carrots and a glass of water.\n"
    "5. Cook for ten minutes.",
    "Say this text again, unchanged: My grandmother kept bees in the garden behind the house. Every summer we helped "
    "her to take the honey from the hives. She wore no gloves, and the bees never stung her.",
)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m mlx_dflash.benchmarks.speed", description=__doc__)
    add = parser.add_argument
    add("--model", default="demo")
    add("--draft-model", default="demo")
    add("--block-sizes", type=int, nargs="+", default=[3, 5, 8], help="fixed widths")
    add("--arms", nargs="+", default=None, metavar="ARM", help="plain and only these, such as auto or '5 rows'")
    add("--per-class", type=int, default=3, help="prompts of each task class")
    add("--tasks", nargs="+", default=None, metavar="CLASS", help="only these classes")
    add("--max-tokens", type=int, default=96)
    add("--output", type=Path, default=None)
    args = parser.parse_args()
    write_result(run(args), args.output)


def run(args: argparse.Namespace) -> dict[str, Any]:
    target, tokenizer = load(args.model)
    drafter, lookup = load_drafter(args.draft_model, target), load_drafter("lookup", target)
    drafting = {"draft_model": drafter}
    arms: dict[str, dict[str, Any]] = {
        "plain": {},
        **{f"{n} rows": {**drafting, "block_size": n} for n in args.block_sizes},
        "auto": drafting,
        "auto, no lookup": {**drafting, "lookup": False},
        "lookup": {"draft_model": lookup},
    }
    if args.arms is not None:
        if unknown := set(args.arms) - set(arms):
            raise SystemExit(f"no such arms: {', '.join(sorted(unknown))}; there are {', '.join(arms)}")
        arms = {name: options for name, options in arms.items() if name in ("plain", *args.arms)}
    for options in arms.values():  # measures what is not measured yet, and warms up
        generate(target, tokenizer, [1, 2, 3], max_tokens=8, **options)
    runs: list[dict[str, Any]] = []
    for task, prompt in prompts(tokenizer, args.per_class, target.vocab_size):
        if args.tasks is not None and task not in args.tasks:
            continue
        speeds: dict[str, list[float]] = {name: [] for name in arms}
        tokens, taken = None, {}
        for name in [*arms, *reversed(arms)]:
            result = generate(target, tokenizer, prompt, max_tokens=args.max_tokens, **arms[name])
            assert tokens in (None, result.tokens), f"{name} gave other tokens"
            tokens = result.tokens
            speeds[name].append(result.stats.generation_tps)
            taken[name] = {
                "block_sizes": result.stats.block_sizes,
                "mean_accepted_length": result.stats.mean_accepted_length,
                "lookup_rounds": result.stats.lookup_rounds,
                "why": result.stats.width_reason,
            }
        if tokens is not None and len(tokens) > 8:
            runs.append({"task": task, "tokens": len(tokens), "speeds": speeds, "taken": taken})
            means = {name: statistics.mean(values) for name, values in speeds.items()}
            print(task, len(tokens), {name: round(v / means["plain"], 2) for name, v in means.items()}, flush=True)
    summary = {task: compare([r for r in runs if task in ("all", r["task"])]) for task in ("all", *tasks(runs))}
    for task, found in summary.items():
        print(task, {name: round(values[0], 3) for name, values in found.items()})
    return {"machine": describe(), "model": args.model, "max_tokens": args.max_tokens, "summary": summary, "runs": runs}


def prompts(tokenizer: Any, per_class: int, vocab: int) -> list[tuple[str, Any]]:
    """(task class, messages), or random token ids for a tokenizer without a chat template."""
    if not tokenizer.has_chat_template:
        rng = random.Random(0)
        return [("random ids", rng.choices(range(10, vocab - 10), k=24)) for _ in range(6 * per_class)]
    asked = [*held_out_prompts(per_class), *(("copy-edit", text) for text in COPY_EDIT)]
    return [(task, [{"role": "user", "content": text}]) for task, text in asked]


def tasks(runs: list[dict[str, Any]]) -> list[str]:
    return list(dict.fromkeys(run["task"] for run in runs))


def compare(runs: list[dict[str, Any]]) -> dict[str, list[float]]:
    """Median ratio and its interval: each arm over plain, and auto, if run, over the best fixed width (1 included)."""
    speed = [{name: statistics.mean(values) for name, values in run["speeds"].items()} for run in runs]
    found = {}
    for name in speed[0]:
        ratios = [s[name] / s["plain"] for s in speed]
        found[f"{name} / plain"] = [statistics.median(ratios), *bootstrap(ratios)]
    fixed = [name for name in speed[0] if name == "plain" or name.endswith(" rows")]
    best = max(fixed, key=lambda name: found[f"{name} / plain"][0])
    if "auto" in speed[0]:
        ratios = [s["auto"] / s[best] for s in speed]
        found[f"auto / best fixed ({best})"] = [statistics.median(ratios), *bootstrap(ratios)]
    return found


if __name__ == "__main__":
    main()
