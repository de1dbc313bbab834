"""`python -m mlx_dflash.benchmarks.conversation`: time to first token of a second turn, against the same one cold.

A first message of about `--tokens` tokens gets a short reply; the second question is then asked in the same session,
and once more in a fresh one that is given the same messages.
"""

import argparse
from pathlib import Path
from typing import Any

from mlx_dflash.benchmarks.machine import describe
from mlx_dflash.benchmarks.output import write_result

from mlx_dflash import Session, load, load_drafter
from mlx_dflash.stats import Stats
from mlx_dflash.training.prompts import held_out_prompts


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m mlx_dflash.benchmarks.conversation", description=__doc__)
    add = parser.add_argument
    add("--model", default="demo")
    add("--draft-model", default="demo")
    add("--tokens", type=int, default=7900)
    add("--reply", type=int, default=16, help="most tokens of a reply")
    add("--block-size", type=int, default=5)
    add("--output", type=Path, default=None)
    args = parser.parse_args()
    write_result(run(args), args.output)


def run(args: argparse.Namespace) -> dict[str, Any]:
    target, tokenizer = load(args.model)
    drafter = load_drafter(args.draft_model, target)
    options = {"max_tokens": args.reply, "block_size": args.block_size, "context_limit": 2 * args.tokens}
    texts = " ".join(text for _, text in held_out_prompts(10))
    ids = tokenizer.encode(texts)
    long = tokenizer.decode((ids * (args.tokens // len(ids) + 1))[: args.tokens])
    session = Session(target, tokenizer, drafter, **options)
    first = last(session.send(f"{long}\n\nWhat is this text about?"))
    warm = last(session.send("Say it in one word."))
    again = Session(target, tokenizer, drafter, **options)
    again.turns = session.turns[:2]
    cold = last(again.send("Say it in one word."))
    same = again.turns == session.turns
    result = {"first": figures(first), "warm": figures(warm), "cold": figures(cold)}
    ratio = warm.ttft / cold.ttft
    print(f"first token after {cold.ttft:.1f} s cold, {warm.ttft:.2f} s warm: {ratio:.2%}; same reply: {same}")
    return {"machine": describe(), "model": args.model, **result, "warm / cold": ratio, "same reply": same}


def last(stream: Any) -> Stats:
    *_, response = stream
    stats: Stats = response.stats
    return stats


def figures(stats: Stats) -> dict[str, Any]:
    forwarded = stats.prompt_tokens - stats.cached_tokens
    return {"ttft": stats.ttft, "forwarded": forwarded, "cached": stats.cached_tokens, "rounds": stats.rounds}


if __name__ == "__main__":
    main()
