"""Prompts that the target writes itself: it is given the chat template up to where the user speaks, and sampled.

An aligned model knows what its users ask (Magpie, arXiv 2406.08464), so this yields as many different prompts as
wanted, with no network and no file. Half of the batches, or all, begin with an opener of a task class, the others with
nothing.
"""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx

from ..errors import RequestError
from ..targets import Target
from .data import decode_batch
from .prompts import OPENERS, held_out_prompts, split

LONGEST = 36  # sampled tokens of a prompt
TEMPERATURE = 0.9
SENTENCE_END = re.compile(r"[.?!](?=\s|$)")


def written_prompts(
    target: Target,
    tokenizer: Any,
    count: int,
    path: Path,
    *,
    seed: int = 0,
    batch: int = 96,
    openers_only: bool = False,
    report: Callable[[str], None] = print,
) -> list[tuple[str, str]]:
    """`count` distinct prompts as (class, text), the class "written" where there was no opener.

    They are kept in the JSON-lines file `path`, which grows batch by batch.
    Raises RequestError where the chat template has no place that a user's text could be sampled for.
    """
    mark = "USER-TEXT"
    text = tokenizer.apply_chat_template([{"role": "user", "content": mark}], tokenize=False)
    if text.count(mark) != 1:
        raise RequestError("this chat template changes or repeats the user's text; prompts can't be sampled from it")
    before = text[: text.index(mark)]
    groups = [[(name, opener) for opener in split(group)] for name, group in OPENERS.items()]
    all_openers = [group[i] for i in range(max(map(len, groups))) for group in groups if i < len(group)]
    held_out = {prompt for _, prompt in held_out_prompts()}
    stops = sorted(tokenizer.eos_token_ids)
    found: dict[str, str] = {}
    rounds = 0
    if path.exists():
        for line in path.read_text(encoding="utf-8").splitlines():
            entry = json.loads(line)
            found[entry["prompt"]] = entry["task"]
            rounds = entry["batch"] + 1
    while len(found) < count:

        def sample(logits: mx.array, step: int, batch_number: int = rounds) -> mx.array:
            key = mx.random.key((seed * 1_000_003 + batch_number) * LONGEST + step)
            return mx.random.categorical(logits / TEMPERATURE, key=key)

        task, opener = "written", ""
        if openers_only or rounds % 2:
            task, opener = all_openers[(rounds if openers_only else rounds // 2) % len(all_openers)]
        start = tokenizer.encode(before + opener, add_special_tokens=False)
        answers, _ = decode_batch(target, [start] * batch, stops, LONGEST, choose=sample)
        new = [whole(tokenizer, ids, stops, opener) for ids in answers]
        with path.open("a", encoding="utf-8") as f:
            for prompt in new:
                if prompt and prompt not in found and prompt not in held_out:
                    found[prompt] = task
                    entry = {"batch": rounds, "task": task, "prompt": prompt}
                    f.write(json.dumps(entry, ensure_ascii=False) + "\n")
        rounds += 1
        report(f"wrote {len(found)} of {count} prompts")
    return [(task, prompt) for prompt, task in list(found.items())[:count]]


def whole(tokenizer: Any, ids: list[int], stops: list[int], opener: str = "") -> str | None:
    """The prompt of an opener and sampled ids, cut after its last whole sentence if it did not end.

    None if that leaves nothing.
    """
    ended = ids[-1] in stops
    text = opener + tokenizer.decode(ids[:-1] if ended else ids)
    if not ended:
        ends = [m.end() for m in SENTENCE_END.finditer(text)]
        text = text[: ends[-1]] if ends else ""
    text = text.strip()
    special = any(token in text for token in tokenizer.all_special_tokens)
    return None if len(text) < 12 or special or "\ufffd" in text else text
