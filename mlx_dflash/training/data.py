"""Training text: the target's own greedy answers to prompts, as token ids in a JSON-lines file.

Batches are decoded by mlx-lm's batch generator on the runtime that will later verify the drafts. The file grows batch
by batch, and a second run goes on after the last complete line.
"""

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mlx_lm.generate import batch_generate


@dataclass(frozen=True)
class Sample:
    """One conversation turn: templated prompt ids and the answer's ids, the stop token included if it came."""

    task: str
    prompt: list[int]
    answer: list[int]


def generate_answers(
    model: Any,
    tokenizer: Any,
    prompts: Iterable[tuple[str, str]],
    path: Path,
    *,
    max_tokens: int = 160,
    batch: int = 48,
    report: Any = print,
) -> None:
    """Append a Sample per (class, prompt) to `path`; prompts whose lines are there already are passed over.

    model, tokenizer: of `mlx_lm.load`. An answer that does not end by itself is cut at `max_tokens`.
    """
    todo = list(prompts)[len(load_samples(path)) :]
    stop = min(tokenizer.eos_token_ids)
    for start in range(0, len(todo), batch):
        part = todo[start : start + batch]
        ids = [
            tokenizer.apply_chat_template([{"role": "user", "content": text}], add_generation_prompt=True)
            for _, text in part
        ]
        answers = batch_generate(
            model,
            tokenizer,
            ids,
            max_tokens=max_tokens,
            completion_batch_size=batch,
            prefill_batch_size=batch,
            return_token_ids=True,
        ).token_ids
        with path.open("a", encoding="utf-8") as f:
            for (task, _), prompt, answer in zip(part, ids, answers, strict=True):
                ended = len(answer) < max_tokens
                sample = Sample(task, list(prompt), list(answer) + [stop] * ended)
                f.write(json.dumps(asdict(sample), separators=(",", ":")) + "\n")
        report(f"generated {min(start + batch, len(todo))} of {len(todo)} answers")


def load_samples(path: Path) -> list[Sample]:
    """The samples of a file written by `generate_answers`; none if there is no file."""
    if not path.exists():
        return []
    with path.open(encoding="utf-8") as f:
        return [Sample(**json.loads(line)) for line in f]
