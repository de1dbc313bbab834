"""`python -m mlx_dflash.benchmarks.draft_head`: drafts chosen among the commonest tokens only, as a try.

The drafter borrows the target's head; a head of the commonest tokens alone is cheaper to read, can't propose the other
tokens, and changes no text, since the target verifies. Rank is by how often a token stands in the answers that the demo
drafter was trained on. Arms of a prompt run in an order and then in its reverse, at one fixed width; ratios are to the
full head, medians and 95 % bootstrap intervals. `mean accepted length` shows what the missing tokens cost.
"""

import argparse
import gzip
import json
import statistics
from collections import Counter
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_dflash.benchmarks.machine import describe
from mlx_dflash.benchmarks.output import write_result
from mlx_dflash.benchmarks.plain import bootstrap

from mlx_dflash import generate, load, load_drafter
from mlx_dflash.drafters import DFlashDrafter
from mlx_dflash.targets import Target
from mlx_dflash.training.prompts import held_out_prompts

ANSWERS = Path(__file__).parent / "results" / "demo_drafter" / "answers.jsonl.gz"
FULL = "full head"


class FrequentHead(DFlashDrafter):
    """A drafter whose head has the rows of `ids` (n,) of the target's only."""

    def __init__(self, drafter: DFlashDrafter, ids: mx.array) -> None:
        super().__init__(drafter.model, drafter.config, drafter.target)
        self.ids = ids
        # A head is linear: its weights are what it answers to the unit vectors.
        width = drafter.config.hidden_size
        self.weights = drafter.target.head(mx.eye(width)[None])[0][:, ids]  # (hidden, n)
        mx.eval(self.weights)

    def draft(self, anchor: mx.array, rows: int, context: Any, draw: Any) -> tuple[mx.array, mx.array]:
        logits = self.hidden(anchor, rows, context) @ self.weights
        return self.ids[draw(logits[0], 0, self.ids)].astype(anchor.dtype), logits


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m mlx_dflash.benchmarks.draft_head", description=__doc__)
    add = parser.add_argument
    add("--block-size", type=int, default=5)
    add("--tokens", type=int, nargs="+", default=[4096, 8192, 16384], help="sizes of the smaller heads")
    add("--per-class", type=int, default=2, help="prompts of each of six task classes")
    add("--max-tokens", type=int, default=64)
    add("--output", type=Path, default=None)
    args = parser.parse_args()
    write_result(run(args), args.output)


def run(args: argparse.Namespace) -> dict[str, Any]:
    target, tokenizer = load("demo")
    drafter = load_drafter("demo", target)
    assert isinstance(drafter, DFlashDrafter)
    ranked, share = commonest(target)
    arms: dict[str, DFlashDrafter] = {FULL: drafter}
    arms |= {f"{n} tokens": FrequentHead(drafter, mx.array(ranked[:n], mx.uint32)) for n in args.tokens}
    options = {"block_size": args.block_size, "max_tokens": args.max_tokens}
    for arm in arms.values():
        generate(target, tokenizer, [1, 2, 3], draft_model=arm, block_size=args.block_size, max_tokens=8)
    runs: list[dict[str, Any]] = []
    for task, text in held_out_prompts(args.per_class):
        prompt = [{"role": "user", "content": text}]
        speeds: dict[str, list[float]] = {name: [] for name in arms}
        lengths: dict[str, float] = {}
        for name in [*arms, *reversed(arms)]:
            result = generate(target, tokenizer, prompt, draft_model=arms[name], **options)
            speeds[name].append(result.stats.generation_tps)
            lengths[name] = result.stats.mean_accepted_length or 1.0
        runs.append({"task": task, "speeds": speeds, "mean_accepted_length": lengths})
        print(task, {name: round(statistics.mean(v) / statistics.mean(speeds[FULL]), 3) for name, v in speeds.items()})
    summary = {}
    for name in arms:
        ratios = [statistics.mean(r["speeds"][name]) / statistics.mean(r["speeds"][FULL]) for r in runs]
        summary[name] = {
            "speed / full head": [statistics.median(ratios), *bootstrap(ratios)],
            "mean accepted length": statistics.mean(r["mean_accepted_length"][name] for r in runs),
            "share of training tokens": 1.0 if name == FULL else share[int(name.split()[0]) - 1],
        }
        print(name, summary[name])
    return {"machine": describe(), **vars(args) | {"output": None}, "summary": summary, "runs": runs}


def commonest(target: Target) -> tuple[list[int], list[float]]:
    """All ids, the commonest of the training answers first, and the share of their tokens covered up to each."""
    with gzip.open(ANSWERS, "rt") as file:
        counts = Counter(token for line in file for token in json.loads(line)["answer"])
    ranked = sorted(range(target.vocab_size), key=lambda token: -counts[token])
    total, seen, share = sum(counts.values()), 0, []
    for token in ranked:
        seen += counts[token]
        share.append(seen / total)
    return ranked, share


if __name__ == "__main__":
    main()
