"""How good a drafter is: real speculative decoding of held-out prompts, by task class."""

from collections.abc import Callable, Iterable
from typing import Any

from ..api import generate
from ..drafters import DFlashDrafter
from ..targets import Target


def evaluate(
    target: Target,
    tokenizer: Any,
    drafter: DFlashDrafter,
    prompts: Iterable[tuple[str, str]],
    block_size: int,
    max_tokens: int = 128,
    report: Callable[[str], None] = print,
) -> dict[str, dict[str, Any]]:
    """Under "all", then per task class: rounds, drafted, accepted, tokens, and the two ratios that follow.

    mean_accepted_length is tokens committed per round that drafted; acceptance_rate is accepted over drafted.
    """
    counts: dict[str, dict[str, Any]] = {}
    for task, prompt in prompts:
        messages = [{"role": "user", "content": prompt}]
        stats = generate(
            target, tokenizer, messages, draft_model=drafter, block_size=block_size, max_tokens=max_tokens
        ).stats
        for name in ("all", task):
            row = counts.setdefault(name, {"rounds": 0, "drafted": 0, "accepted": 0, "tokens": 0})
            row["rounds"] += stats.rounds
            row["drafted"] += stats.drafted
            row["accepted"] += stats.accepted
            row["tokens"] += sum(stats.acceptance_lengths)
    for name, row in counts.items():
        row["mean_accepted_length"] = row["tokens"] / row["rounds"] if row["rounds"] else 0.0
        row["acceptance_rate"] = row["accepted"] / row["drafted"] if row["drafted"] else 0.0
        tau, share = row["mean_accepted_length"], row["acceptance_rate"]
        report(f"{name:9} block {block_size}: mean accepted length {tau:.3f}, acceptance {share:.1%}")
    return counts
