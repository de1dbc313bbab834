"""`context`: an empty to a full cache: speed, time to first token, memory and acceptance against fill.

A prompt is as many tokens of the built-in prompts' texts as the fill asks for, and a question about them. Every request
forwards it anew, plainly, with the drafter, and with a drafter that sees a window only (where it has none of its own),
in an order and then in its reverse; from `--once-from` tokens on, where a prompt takes long, once each.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mlx_dflash.benchmarks import pair as pairs
from mlx_dflash.benchmarks.measure import PLAIN, Arm, Bench, with_partings
from mlx_dflash.benchmarks.metrics import Record, number, summary_of
from mlx_dflash.benchmarks.prompts import Prompt, built_in, prompts_hash
from mlx_dflash.benchmarks.run import progress
from mlx_dflash.benchmarks.schema import Result, new_result, resumed, write
from mlx_dflash.benchmarks.verdict import FADING

from mlx_dflash.command import Interrupt, wanted_rows
from mlx_dflash.download import say
from mlx_dflash.drafters import DFlashDrafter
from mlx_dflash.errors import RequestError
from mlx_dflash.session import limit_of

FILLS = [512 * 2**k for k in range(9)]  # 0.5k to 128k
QUESTION = "Summarise the text above in a few sentences."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    pairs.add_arguments(parser, max_tokens=64)
    parser.add_argument(
        "--fills", type=int, nargs="+", default=None, metavar="N", help="prompt tokens (default: 512 to 131072)"
    )
    parser.add_argument(
        "--windows", type=int, nargs="*", default=[2048], metavar="N", help="draft windows to try (default 2048)"
    )
    parser.add_argument("--repeats", type=int, default=2, help="requests of an arm and fill (default 2: an ABBA block)")
    parser.add_argument("--once-from", type=int, default=8192, help="fills from here on run once an arm")


def run(args: argparse.Namespace) -> int:
    if args.draft_window is not None:
        raise RequestError("context takes --windows N ..., not --draft-window")
    pair = pairs.load_pair(args)
    options = pairs.options_of(args, pair)
    setup = pairs.describe(args, pair, options)
    limit = limit_of(pair.target)
    fills = [n for n in sorted(args.fills or FILLS) if n + args.max_tokens <= limit]
    if not fills or fills[0] < 64:
        raise RequestError(f"--fills must be 64 or more and leave room for the answer in {limit} tokens")
    texts = [filled(pair.tokenizer, n) for n in fills]
    setup |= {
        "block_size": wanted_rows(args),
        "fills": fills,
        "windows": windows_of(args, pair),
        "repeats": args.repeats,
        "once_from": args.once_from,
        "prompts": {"hash": prompts_hash(texts), "count": len(texts), "source": "built in, joined"},
    }
    result = resumed(args.output, new_result("context", pairs.mode_of(setup), setup))
    drafting = {**pairs.drafting_of(args), "draft_model": pair.drafter, "block_size": setup["block_size"]}
    arms = [Arm(PLAIN), Arm("dflash", drafting)]
    say(f"{result['mode']} | {pair.name} | fills {fills} of at most {limit} tokens")
    with Interrupt() as interrupt:
        bench = Bench(pair.target, pair.tokenizer, options, args.max_tokens, interrupt.asked)
        stopped = measure(result, bench, arms, texts, args.output)
    result["finished"] = not stopped
    conclude(result)
    write(result, args.output)
    print("\n".join(lines(result)))
    return 130 if stopped else 0


def windows_of(args: argparse.Namespace, pair: pairs.Pair) -> list[int]:
    """Windows to try: none for lookup, and for a drafter that has one of its own."""
    drafter = pair.drafter
    if not isinstance(drafter, DFlashDrafter):
        return []
    own = any(layer.self_attn.sees.behind is not None for layer in drafter.model.layers)
    return [] if own else list(args.windows)


def filled(tokenizer: Any, fill: int) -> Prompt:
    """A prompt whose text has about `fill` tokens, the template and the question included."""
    texts = [str(m["content"]) + "\n\n" for p in built_in() for m in p.messages]
    ids = [i for text in texts for i in tokenizer.encode(text, add_special_tokens=False)]
    want = max(fill - len(tokenizer.encode(QUESTION)) - 16, 16)
    body = tokenizer.decode((ids * (want // len(ids) + 1))[:want])
    message = {"role": "user", "content": f"{body}\n\n{QUESTION}"}
    return Prompt(id=f"fill-{fill}", task="context", messages=[message])


def measure(result: Result, bench: Bench, arms: Sequence[Arm], prompts: Sequence[Prompt], output: Path | None) -> bool:
    """Run the fills that the result lacks, one whole fill after the other. True: stopped by Ctrl-C."""
    setup = result["setup"]
    done = {record["fill"] for record in result["requests"]}
    if not done and bench.cold(arms, prompts[0]) is None:
        return True
    for index, (fill, prompt) in enumerate(zip(setup["fills"], prompts, strict=True)):
        progress(index, len(prompts))
        if fill in done:
            continue
        sink = setup["draft"]["draft_sink"]
        tried = [*arms, *(windowed(arms[1], w, sink) for w in setup["windows"] if w < fill)]
        found = bench.turns(tried, prompt, 1 if fill >= setup["once_from"] else setup["repeats"])
        if found is None:
            return True
        result["requests"] += [{**record, "fill": fill} for record in with_partings(found)]
        write(result, output)
    progress(len(prompts), len(prompts))
    return False


def windowed(arm: Arm, window: int, sink: int) -> Arm:
    return Arm(f"window {window}", {**(arm.options or {}), "draft_window": window, "draft_sink": sink})


def conclude(result: Result) -> None:
    """One row a fill, and what changes with it."""
    rows = []
    for fill in result["setup"]["fills"]:
        records = [r for r in result["requests"] if r["fill"] == fill]
        if not records:
            continue
        arms = {
            name: summary_of([r for r in records if r["arm"] == name])
            for name in dict.fromkeys(r["arm"] for r in records)
        }
        plain = arms[PLAIN]
        rows.append(
            {
                "fill": fill,
                "prompt_tokens": records[0]["prompt_tokens"],
                "speedup": over(arms["dflash"]["raw_tps"], plain["raw_tps"]),
                "ttft_ratio": over(arms["dflash"]["ttft"]["p50"], plain["ttft"]["p50"]),
                "arms": {name: figures(arm, [r for r in records if r["arm"] == name]) for name, arm in arms.items()},
            }
        )
    result["summary"] = {"fills": rows}
    result["marks"] = []
    parted = sum(r.get("parts_at") is not None for r in result["requests"])
    if parted:
        result["marks"].append(f"{parted} texts part from plain decoding's")
    speedups = [row["speedup"] for row in rows if row["speedup"] is not None]
    if len(speedups) > 1 and speedups[-1] < FADING * speedups[0]:
        result["marks"].append(
            f"long context: {speedups[0]:.2f} x at {rows[0]['fill']} tokens, {speedups[-1]:.2f} x at the last"
        )
    if not result["finished"]:
        result["marks"].append("stopped before its end; run it again to go on")


def figures(arm: dict[str, Any], records: Sequence[Record]) -> dict[str, Any]:
    kv = [r["kv_bytes"] for r in records if "kv_bytes" in r]
    return {
        "raw_tps": arm["raw_tps"],
        "ttft": arm["ttft"]["p50"],
        "mean_accepted_length": arm["mean_accepted_length"],
        "acceptance": arm["acceptance"],
        "block_sizes": arm["block_sizes"],
        "cache_bytes": max((b["target"] for b in kv), default=None),
        "drafter_cache_bytes": max((b["drafter"] for b in kv), default=None),
        "peak_bytes": max((r["peak_bytes"] for r in records), default=None),
    }


def over(a: float | None, b: float | None) -> float | None:
    return a / b if a and b else None


def lines(result: Result) -> list[str]:
    out = [f"{result['mode']}, block size {result['setup']['block_size']}"]
    out.append(
        f"{'fill':>7}{'arm':>13}{'tokens/s':>10}{'first s':>9}{'length':>8}{'accepted':>10}{'cache MB':>10}"
        f"{'peak MB':>9}"
    )
    for row in result["summary"]["fills"]:
        for name, arm in row["arms"].items():
            cache = (arm["cache_bytes"] or 0) + (arm["drafter_cache_bytes"] or 0)
            out.append(
                f"{row['fill']:>7}{name:>13}{number(arm['raw_tps'], '.1f'):>10}{number(arm['ttft'], '.2f'):>9}"
                f"{number(arm['mean_accepted_length'], '.2f'):>8}{number(arm['acceptance'], '.1%'):>10}"
                f"{cache / 1e6:>10.1f}{(arm['peak_bytes'] or 0) / 1e6:>9.1f}"
            )
    return [*out, *(f"mark | {mark}" for mark in result["marks"])]
