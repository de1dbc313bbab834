"""`sweep`: fixed widths and temperatures of a pair: speed-up, mean accepted length and acceptance side by side.

The three do not rise and fall together: more rows commit more tokens a round, at a lower acceptance and a higher cost,
so that the speed is an inverted U. Widths beyond the trained block are run too, and marked: the drafter never saw so
many masks.
"""

import argparse
from collections.abc import Sequence
from copy import copy
from dataclasses import replace
from typing import Any

from mlx_dflash.benchmarks import pair as pairs
from mlx_dflash.benchmarks.measure import PLAIN, Arm, Bench, with_partings
from mlx_dflash.benchmarks.metrics import number, summary_of
from mlx_dflash.benchmarks.prompts import Prompt, add_prompt_arguments, chosen, prompts_hash
from mlx_dflash.benchmarks.run import progress, ratio_of
from mlx_dflash.benchmarks.schema import Result, new_result, resumed, write
from mlx_dflash.benchmarks.verdict import FAR_BELOW

from mlx_dflash.command import Interrupt
from mlx_dflash.download import say
from mlx_dflash.drafters import DFlashDrafter
from mlx_dflash.errors import RequestError
from mlx_dflash.lookup import Lookup

USUAL = (8, 12, 15, 16)  # rows that engines and publications start with
STEP = 4
AUTO = "auto"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    pairs.add_arguments(parser, max_tokens=96)
    add_prompt_arguments(parser)
    parser.add_argument(
        "--block-sizes", type=int, nargs="+", default=None, metavar="N", help="widths (default: usual ones)"
    )
    parser.add_argument(
        "--temps", type=float, nargs="+", default=None, metavar="T", help="temperatures (default: --temp)"
    )
    parser.add_argument(
        "--repeats", type=int, default=2, help="requests of an arm and prompt (default 2: an ABBA block)"
    )


def widths(trained: int) -> list[int]:
    """Widths to try: the trained block, 4 less and 4 more, the usual ones, and 3 and 5, where small ones win."""
    near = {3, 5, trained - STEP, trained, trained + STEP}
    return sorted(n for n in {*near, *USUAL} if 2 <= n <= max(trained + STEP, 2))


def run(args: argparse.Namespace) -> int:
    if args.block_size is not None or args.num_draft_tokens is not None:
        raise RequestError("sweep takes --block-sizes N ..., not --block-size")
    prompts, source = chosen(args)
    pair = pairs.load_pair(args)
    options = pairs.options_of(args, pair)
    sizes = args.block_sizes or widths(pair.drafter.block_size)
    if min(sizes) < 2:
        raise RequestError(f"--block-sizes must be 2 or more, not {min(sizes)}; plain decoding is always run")
    setup = pairs.describe(args, pair, options)
    temps = args.temps or [setup["sampling"]["temp"]]
    setup |= {
        "prompts": {"hash": prompts_hash(prompts), "count": len(prompts), "source": source},
        "repeats": args.repeats,
        "block_sizes": sizes,
        "temps": temps,
    }
    mode = "greedy" if not any(temps) else "sampled" if all(temps) else "greedy and sampled"
    result = resumed(args.output, new_result("sweep", mode, setup))
    say(f"{mode} | {pair.name} | widths {sizes}, temperatures {temps} | {len(prompts)} prompts, {source}")
    arms = [Arm(PLAIN), *(width_arm(pair.drafter, n, pairs.drafting_of(args)) for n in sizes)]
    arms.append(Arm(AUTO, {**pairs.drafting_of(args), "draft_model": pair.drafter, "block_size": "auto"}))
    stopped = False
    with Interrupt() as interrupt:
        for temp in temps:
            bench = Bench(pair.target, pair.tokenizer, {**options, "temp": temp}, args.max_tokens, interrupt.asked)
            stopped = stopped or measure(result, bench, arms, prompts, args, temp)
    result["finished"] = not stopped
    conclude(result)
    write(result, args.output)
    print("\n".join(lines(result)))
    return 130 if stopped else 0


def width_arm(drafter: DFlashDrafter | Lookup, rows: int, drafting: dict[str, Any]) -> Arm:
    """Always `rows` rows from the drafter alone; beyond the trained block with more masks than it was trained on."""
    if rows > drafter.block_size:
        if not isinstance(drafter, DFlashDrafter):
            raise RequestError(f"lookup drafts up to {drafter.block_size} rows, not {rows}")
        drafter = copy(drafter)
        drafter.config = replace(drafter.config, block_size=rows)
    return Arm(f"{rows} rows", {**drafting, "lookup": False, "draft_model": drafter, "block_size": rows})


def measure(
    result: Result, bench: Bench, arms: Sequence[Arm], prompts: Sequence[Prompt], args: Any, temp: float
) -> bool:
    """Run what the result lacks at one temperature. True: stopped by Ctrl-C, the rest is kept."""
    mine = [r for r in result["requests"] if r["temp"] == temp]
    if not mine:
        if (cold := bench.cold(arms, prompts[0])) is None:
            return True
        result["requests"] += [{**record, "temp": temp} for record in cold]
    done = {record["id"] for record in mine if not record["cold"]}
    for index, prompt in enumerate(prompts):
        progress(index, len(prompts))
        if prompt.id in done:
            continue
        if (found := bench.turns(arms, prompt, args.repeats)) is None:
            return True
        result["requests"] += [{**record, "temp": temp} for record in with_partings(found)]
        write(result, args.output)
    progress(len(prompts), len(prompts))
    return False


def conclude(result: Result) -> None:
    """One row for each temperature and width, the recommended width, and what acceptance alone would have said."""
    setup, rows, marks = result["setup"], [], []
    trained = setup["trained_block"]
    for temp in setup["temps"]:
        records = [r for r in result["requests"] if r["temp"] == temp]
        table = []
        for name in [f"{n} rows" for n in setup["block_sizes"]] + [AUTO]:
            figures = summary_of([r for r in records if r["arm"] == name])
            ratio = ratio_of(records, name, None)
            if ratio is None:
                continue
            width = None if name == AUTO else int(name.split()[0])
            table.append(
                {
                    "temp": temp,
                    "rows": width,
                    "beyond_trained_block": width is not None and width > trained,
                    "speedup": ratio["median"],
                    "interval_95": ratio["interval_95"],
                    "mean_accepted_length": figures["mean_accepted_length"],
                    "acceptance": figures["acceptance"],
                    "raw_tps": figures["raw_tps"],
                }
            )
        rows += table
        marks += advice([row for row in table if row["rows"]], temp, trained)
    parted = sum(r.get("parts_at") is not None for r in result["requests"])
    if parted:
        marks.append(f"{parted} texts part from plain decoding's")
    looped = sum(r["loop"] for r in result["requests"] if r["arm"] == PLAIN)
    if looped:
        marks.append(f"loops: {looped} plain texts end in a loop, which is easy to draft")
    if not result["finished"]:
        marks.append("stopped before its end; run it again to go on")
    result["summary"] = {"table": rows, "recommended": recommended(rows)}
    result["marks"] = marks


def recommended(rows: Sequence[dict[str, Any]]) -> dict[str, int | None]:
    """By temperature the fastest width within the trained block; None where plain decoding is faster than all."""
    out: dict[str, int | None] = {}
    for temp in dict.fromkeys(row["temp"] for row in rows):
        mine = [row for row in rows if row["temp"] == temp and row["rows"] and not row["beyond_trained_block"]]
        best = max(mine, key=lambda row: row["speedup"], default=None)
        out[str(temp)] = None if best is None or best["speedup"] <= 1 else best["rows"]
    return out


def advice(rows: Sequence[dict[str, Any]], temp: float, trained: int) -> list[str]:
    """Where one figure alone would mislead."""
    drafted = [row for row in rows if row["acceptance"] is not None]
    if not drafted:
        return []
    best = max(drafted, key=lambda row: row["speedup"])
    keen = max(drafted, key=lambda row: row["acceptance"])
    long = max(drafted, key=lambda row: row["mean_accepted_length"])
    out = []
    for other, figure, value in (
        (keen, "acceptance", f"{keen['acceptance']:.1%}"),
        (long, "mean accepted length", f"{long['mean_accepted_length']:.2f}"),
    ):
        if other["rows"] != best["rows"] and other["speedup"] < 0.99 * best["speedup"]:
            out.append(
                f"temp {temp:g}: {figure} alone would pick {other['rows']} rows ({value}, {other['speedup']:.2f} x); "
                f"{best['rows']} rows are faster ({best['speedup']:.2f} x)"
            )
    widest = max((row for row in drafted if row["rows"] <= trained), key=lambda row: row["rows"], default=None)
    if widest is not None and widest["mean_accepted_length"] < FAR_BELOW * widest["rows"]:
        out.append(
            f"temp {temp:g}: at {widest['rows']} rows {widest['mean_accepted_length']:.2f} tokens are kept a round, "
            "far below the block: lower N"
        )
    if best["speedup"] <= 1:
        out.append(f"temp {temp:g}: no width is faster than plain decoding on these prompts")
    return out


def lines(result: Result) -> list[str]:
    out = [f"{result['mode']}, trained block {result['setup']['trained_block']}"]
    out.append(f"{'temp':>5}{'rows':>6}{'x plain':>9}{'95 %':>14}{'length':>8}{'accepted':>10}")
    for row in result["summary"]["table"]:
        span = "{:.2f}-{:.2f}".format(*row["interval_95"])
        note = "  beyond the trained block" if row["beyond_trained_block"] else ""
        out.append(
            f"{row['temp']:>5g}{row['rows'] or AUTO:>6}{row['speedup']:>9.2f}{span:>14}"
            f"{number(row['mean_accepted_length'], '.2f'):>8}{number(row['acceptance'], '.1%'):>10}{note}"
        )
    for temp, rows in result["summary"]["recommended"].items():
        out.append(f"temp {temp}: " + (f"--block-size {rows}" if rows else "plain decoding, or --block-size auto"))
    return [*out, *(f"mark | {mark}" for mark in result["marks"])]
