"""`run`: a pair on prompts of many task classes, against plain decoding and stock mlx-lm in the same process.

Arms of a prompt run in an order and then in its reverse, so that a machine whose speed drifts favours none. The first
request of every arm is cold and told apart. One prompt of every class runs once more with drafting and verifying timed
apart, which slows it, so that those times stand beside the speeds and not in them.
"""

import argparse
import statistics
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx
from mlx_dflash.benchmarks import pair as pairs
from mlx_dflash.benchmarks.measure import (
    PHASES,
    PLAIN,
    STOCK,
    Arm,
    Bench,
    prompt_ids,
    stock_refusal,
)
from mlx_dflash.benchmarks.metrics import Record, decode_tps, number, summary_of
from mlx_dflash.benchmarks.plain import bootstrap
from mlx_dflash.benchmarks.prompts import Prompt, add_prompt_arguments, chosen, prompts_hash
from mlx_dflash.benchmarks.schema import Result, new_result, resumed, swap_used, write
from mlx_dflash.benchmarks.verdict import DRIFT, SWAP

from mlx_dflash.command import Interrupt, bar, wanted_rows
from mlx_dflash.download import say
from mlx_dflash.report import first_difference, logit_margin

PROFILED = "profiled"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    pairs.add_arguments(parser, max_tokens=128)
    add_prompt_arguments(parser)
    parser.add_argument(
        "--repeats", type=int, default=2, help="requests of an arm and prompt (default 2: an ABBA block)"
    )
    parser.add_argument("--no-stock", action="store_true", help="leave stock mlx-lm out")


def run(args: argparse.Namespace) -> int:
    prompts, source = chosen(args)
    pair = pairs.load_pair(args)
    options = pairs.options_of(args, pair)
    setup = pairs.describe(args, pair, options)
    drafting = {**pairs.drafting_of(args), "draft_model": pair.drafter, "block_size": wanted_rows(args)}
    arms = [Arm(PLAIN), Arm("dflash", drafting)]
    refusal = "left out (--no-stock)" if args.no_stock else stock_refusal(pair.target)
    if refusal is None:
        arms.append(Arm(STOCK, None))
    setup |= {
        "block_size": drafting["block_size"],
        "prompts": {"hash": prompts_hash(prompts), "count": len(prompts), "source": source},
        "repeats": args.repeats,
        "arms": [arm.name for arm in arms],
    }
    result = resumed(args.output, new_result("run", pairs.mode_of(setup), setup))
    if refusal is not None:
        result["summary"]["stock"] = refusal
    say(f"{result['mode']} | {pair.name} | {len(prompts)} prompts, {source} | {args.max_tokens} tokens at most")
    with Interrupt() as interrupt:
        bench = Bench(pair.target, pair.tokenizer, options, args.max_tokens, interrupt.asked)
        result["summary"]["memory"] = pairs.memory_of(pair)
        stopped = measure(result, bench, arms, prompts, args)
    result["finished"] = not stopped
    conclude(result)
    write(result, args.output)
    print("\n".join(lines(result)))
    return 130 if stopped else 0


def measure(result: Result, bench: Bench, arms: Sequence[Arm], prompts: Sequence[Prompt], args: Any) -> bool:
    """Run what the result lacks, writing it after every prompt. True: stopped by Ctrl-C, the rest is kept."""
    if not result["requests"]:
        if (cold := bench.cold(arms, prompts[0])) is None:
            return True
        result["requests"] += cold
    done = {record["id"] for record in result["requests"] if not record["cold"]}  # a prompt is kept whole or not at all
    swap = swap_used()
    profiled = {task: next(p for p in prompts if p.task == task) for task in dict.fromkeys(p.task for p in prompts)}
    for index, prompt in enumerate(prompts):
        progress(index, len(prompts))
        if prompt.id in done:
            continue
        if (found := bench.turns(arms, prompt, args.repeats)) is None:
            return True
        fresh = [record for record, _ in found]
        if profiled[prompt.task] is prompt:
            slow = replace(arms[1], name=PROFILED, options={**(arms[1].options or {}), "profile": True})
            fresh.append(bench.request(slow, prompt)[0])
            if bench.interrupted():
                return True
        result["requests"] += fresh
        texts: dict[str, list[int]] = {}
        for record, tokens in found:
            if texts.setdefault(record["arm"], tokens) != tokens:
                result["marks"].append(f"{record['arm']} gave two texts for {prompt.id}")
        note_equality(result, bench, prompt, texts)
        write(result, args.output)
    progress(len(prompts), len(prompts))
    grown = (swap_used() or 0) - (swap or 0)
    result["summary"]["swap_grown_bytes"] = grown
    return False


def note_equality(result: Result, bench: Bench, prompt: Prompt, texts: dict[str, list[int]]) -> None:
    """Whether the arms said the same, else where they part and by what margin, once a prompt."""
    table = result["summary"].setdefault("equality", {})
    for name, tokens in texts.items():
        if name == PLAIN or (name == STOCK and result["mode"] == "sampled"):
            continue  # mlx-lm draws other noise
        at = first_difference(texts[PLAIN], tokens)
        entry = table.setdefault(name, {"equal": 0, "parted": []})
        if at is None:
            entry["equal"] += 1
        else:
            ids = prompt_ids(bench.tokenizer, prompt, bench.options.get("thinking"))
            cache = bench.options.get("kv_bits"), bench.options.get("kv_group_size")
            margin = logit_margin(bench.target, ids, texts[PLAIN], tokens, at, *cache)
            entry["parted"].append({"id": prompt.id, "at": at, "logit_margin": margin})


def conclude(result: Result) -> None:
    """Fill in the summary and the marks from the requests."""
    records, summary = result["requests"], result["summary"]
    timed = [r for r in records if r["arm"] != PROFILED]
    tasks = list(dict.fromkeys(r["task"] for r in timed))
    names = result["setup"]["arms"]
    summary["arms"] = {name: summary_of([r for r in timed if r["arm"] == name]) for name in names}
    summary["tasks"] = {
        task: {name: summary_of([r for r in timed if (r["arm"], r["task"]) == (name, task)]) for name in names}
        for task in tasks
    }
    summary["ratios"] = {
        task: {name: ratio_of(timed, name, None if task == "all" else task) for name in names if name != PLAIN}
        for task in ("all", *tasks)
    }
    summary["phases"] = phases_of([r for r in records if r["arm"] == PROFILED])
    summary["drift"] = drift_of(timed)
    result["marks"] = list(dict.fromkeys([*result["marks"], *marks_of(result)]))


def speeds_by_prompt(records: Sequence[Record], arm: str) -> dict[str, float]:
    """Mean decode speed of an arm's warm requests, by prompt."""
    found: dict[str, list[float]] = {}
    for record in records:
        if record["arm"] == arm and not record["cold"] and (speed := decode_tps(record)) is not None:
            found.setdefault(record["id"], []).append(speed)
    return {name: statistics.mean(speeds) for name, speeds in found.items()}


def ratio_of(records: Sequence[Record], arm: str, task: str | None) -> dict[str, Any] | None:
    """Median over prompts of an arm's decode speed over plain's, with its 95 % interval."""
    chosen = [r for r in records if task is None or r["task"] == task]
    mine, plain = speeds_by_prompt(chosen, arm), speeds_by_prompt(chosen, PLAIN)
    ratios = [mine[name] / plain[name] for name in mine if name in plain]
    if not ratios:
        return None
    return {"median": statistics.median(ratios), "interval_95": bootstrap(ratios), "prompts": len(ratios)}


def phases_of(records: Sequence[Record]) -> dict[str, Any] | None:
    """Seconds a round of drafting, verifying and the host's own work, in rounds timed apart."""
    rounds = sum(r["rounds"] + r["plain_rounds"] for r in records)
    if not rounds:
        return None
    total = {name.removesuffix("_time"): sum(r[name] or 0.0 for r in records) for name in PHASES}
    whole = sum(total.values())
    return {
        "rounds": rounds,
        "seconds_a_round": {name: value / rounds for name, value in total.items()},
        "share": {name: value / whole for name, value in total.items()} if whole else None,
        "token_selection": str(mx.default_device()),
        "host_reads_a_round": sum(r["host_reads"] for r in records) / rounds,
    }


def drift_of(records: Sequence[Record]) -> float | None:
    """Plain speed of the second half of the prompts over the first's, less 1; prompts come class by class in turn."""
    speeds = list(speeds_by_prompt(records, PLAIN).values())
    half = len(speeds) // 2
    return statistics.median(speeds[-half:]) / statistics.median(speeds[:half]) - 1 if half else None


def marks_of(result: Result) -> list[str]:
    """What makes the run doubtful, a line each."""
    summary, machine, marks = result["summary"], result["machine"], []
    if (drift := summary["drift"]) is not None and abs(drift) > DRIFT:
        marks.append(f"thermal: the plain arm's speed changed by {drift:+.0%} between the halves of the run")
    for name, arm in summary["arms"].items():
        if arm["loops"]:
            marks.append(f"loops: {arm['loops']} texts of {name} end in a loop, which is easy to draft")
        if arm["failed"]:
            marks.append(f"{arm['failed']} requests of {name} failed")
    for name, found in summary.get("equality", {}).items():
        if found["parted"]:
            marks.append(f"{len(found['parted'])} texts of {name} part from plain decoding (see equality)")
    if summary.get("swap_grown_bytes", 0) > SWAP:
        marks.append(f"memory pressure: swap grew by {summary['swap_grown_bytes'] / 2**20:.0f} MiB")
    if machine["low_power_mode"]:
        marks.append("the system saves power")
    if machine["power_source"] == "battery":
        marks.append("runs on battery")
    if not result["finished"]:
        marks.append("stopped before its end; run it again to go on")
    return marks


def progress(done: int, total: int) -> None:
    if sys.stderr.isatty():
        end = "\n" if done == total else ""
        print(f"\r\x1b[K{bar(done, total)} {done} of {total} prompts", end=end, file=sys.stderr, flush=True)
    elif done % 12 == 0 or done == total:
        print(f"{done} of {total} prompts", file=sys.stderr, flush=True)


def lines(result: Result) -> list[str]:
    """What is printed at the end: one table by task class, the arms, the marks."""
    summary = result["summary"]
    head = f"{'task':15}{'x plain':>9}{'95 %':>14}{'length':>8}{'accepted':>10}"
    out = [f"{result['mode']}, batch 1, {result['setup']['model']} + {result['setup']['draft_model']}", head]
    for task, ratios in summary["ratios"].items():
        ratio = ratios.get("dflash")
        arm = (summary["arms"] if task == "all" else summary["tasks"][task])["dflash"]
        span = "-" if ratio is None else "{:.2f}-{:.2f}".format(*ratio["interval_95"])
        median = None if ratio is None else ratio["median"]
        out.append(
            f"{task:15}{number(median, '.2f'):>9}{span:>14}{number(arm['mean_accepted_length'], '.2f'):>8}"
            f"{number(arm['acceptance'], '.1%'):>10}"
        )
    for name, arm in summary["arms"].items():
        ttft, gaps = arm["ttft"], arm["itl_burst"]
        speeds = (
            f"{number(arm['raw_tps'], '.1f')} tokens/s decoding, {number(arm['user_tps']['p50'], '.1f')} to one user"
        )
        first = f"first token {number(ttft['p50'], '.3f')} s (P90 {number(ttft['p90'], '.3f')})"
        waits = f"gaps P50 {number(gaps['p50'], '.4f')} P99 {number(gaps['p99'], '.4f')} s"
        out.append(f"{name:9}{speeds}, {first}, {waits}")
    if (phases := summary.get("phases")) is not None and phases["share"]:
        out.append("a round, timed apart: " + ", ".join(f"{n} {v:.1%}" for n, v in phases["share"].items()))
    for name, found in summary.get("equality", {}).items():
        out.append(
            f"{name}: {found['equal']} of {found['equal'] + len(found['parted'])} texts equal to plain decoding's"
        )
    if "stock" in summary:
        out.append(f"mlx-lm: {summary['stock']}")
    return [*out, *(f"mark | {mark}" for mark in result["marks"])]
