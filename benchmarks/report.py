"""`report`: results as Markdown, or as one HTML page with charts that needs no other file; both end in a verdict."""

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mlx_dflash.benchmarks import context, endpoint, sweep
from mlx_dflash.benchmarks import run as runs
from mlx_dflash.benchmarks.metrics import number
from mlx_dflash.benchmarks.page import Block, Table, as_html, as_markdown
from mlx_dflash.benchmarks.roofline import published_lines
from mlx_dflash.benchmarks.schema import Result, read
from mlx_dflash.benchmarks.svg import bars, curves
from mlx_dflash.benchmarks.verdict import verdicts


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("results", type=Path, nargs="+", help="files that other commands wrote")
    parser.add_argument("--html", type=Path, default=None, metavar="FILE", help="write one HTML page")
    parser.add_argument(
        "--markdown", type=Path, default=None, metavar="FILE", help="write Markdown (default: print it)"
    )


def run(args: argparse.Namespace) -> int:
    blocks = [block for path in args.results for block in blocks_of(concluded(read(path)))]
    if args.html is not None:
        args.html.write_text(as_html(blocks), encoding="utf-8")
    if args.markdown is not None:
        args.markdown.write_text(as_markdown(blocks), encoding="utf-8")
    if args.html is None and args.markdown is None:
        print(as_markdown(blocks), end="")
    return 0


def concluded(result: Result) -> Result:
    """A result that is still being made has requests and no summary yet."""
    if not result["finished"] and result["command"] in CONCLUDE:
        CONCLUDE[result["command"]](result)
    return result


def blocks_of(result: Result) -> Iterator[Block]:
    """A result's page, from its mode to its verdict."""
    setup, machine = result["setup"], result.get("machine", {})
    mode = {None: "nothing generated"}.get(result["mode"], result["mode"])
    yield "h1", f"{result['command']}: {setup.get('model') or setup.get('shape') or setup.get('url') or ''} ({mode})"
    yield "p", facts_of(setup, machine)
    yield from SECTIONS.get(result["command"], other)(result)
    for mark in result["marks"]:
        yield "mark", mark
    if result["command"] in ("run", "sweep", "context"):
        yield "h2", "Verdict"
        for verdict in verdicts(result):
            yield "verdict", f"{verdict.name}: {verdict.text}"


def facts_of(setup: dict[str, Any], machine: dict[str, Any]) -> str:
    """One paragraph: the pair, sampling with where it comes from, prompts, machine."""
    parts = []
    if setup.get("draft_model"):
        parts.append(f"drafter {setup['draft_model']}, trained block {setup.get('trained_block')}")
    if setup.get("quantization"):
        parts.append(f"quantization {setup['quantization']}")
    if setup.get("quality"):
        kept = ("kl_mean", "top1_agreement")
        parts.append(
            "against its source: " + ", ".join(f"{k} {setup['quality'][k]:.3g}" for k in kept if k in setup["quality"])
        )
    if isinstance(setup.get("sampling"), dict):
        origins = setup.get("sampling_from", {})
        given = [
            f"{k} {v} ({origins.get(k, '?')})" for k, v in setup["sampling"].items() if v is not None and v is not False
        ]
        parts.append("sampling " + ", ".join(given))
    if setup.get("prompts"):
        parts.append("{count} prompts, {source}, hash {hash}".format(**setup["prompts"]))
    if setup.get("batch_size"):
        parts.append(f"batch {setup['batch_size']}")
    on = [machine.get(k) for k in ("processor", "device", "os")]
    parts.append(", ".join(str(v) for v in on if v))
    parts += [f"{k} {machine[k]}" for k in ("mlx", "mlx-lm", "mlx-dflash") if machine.get(k)]
    parts += [f"power {machine['power_source']}"] if machine.get("power_source") else []
    return "; ".join(part for part in parts if part) + "."


def of_run(result: Result) -> Iterator[Block]:
    yield from of_speed(result)
    yield from of_latency(result)
    yield from of_acceptance(result["summary"]["arms"]["dflash"])
    yield from of_phases_and_memory(result)
    for name, found in result["summary"].get("equality", {}).items():
        parted = "; ".join(
            f"{p['id']} at {p['at']}, margin {number(p['logit_margin'], '.1e')}" for p in found["parted"][:6]
        )
        end = f"; parted: {parted}." if parted else "."
        yield "p", f"{name}: {found['equal']} texts equal to plain decoding's{end}"


def of_speed(result: Result) -> Iterator[Block]:
    summary = result["summary"]
    ratios = {task: found["dflash"] for task, found in summary["ratios"].items() if found.get("dflash")}
    yield "h2", "Speed against plain decoding"
    medians = {task: found["median"] for task, found in ratios.items()}
    spans = {task: found["interval_95"] for task, found in ratios.items()}
    yield "svg", bars("decoding speed over plain, median and 95 %", medians, spans, " x", line=1)
    rows = []
    for task, found in ratios.items():
        arm = (summary["arms"] if task == "all" else summary["tasks"][task])["dflash"]
        rows.append(
            [
                task,
                f"{found['median']:.2f}",
                "{:.2f}-{:.2f}".format(*found["interval_95"]),
                number(arm["acceptance"], ".1%"),
                number(arm["mean_accepted_length"], ".2f"),
                number(arm["tokens_per_finished"], ".0f"),
                str(arm["cached_tokens"]),
                str(arm["loops"]),
            ]
        )
    head = ("task", "x plain", "95 %", "acceptance", "mean accepted length", "tokens a finished answer",
            "prompt tokens from cache", "loops")  # fmt: skip
    yield "table", (head, rows)


def of_latency(result: Result) -> Iterator[Block]:
    arms = result["summary"]["arms"]
    yield "h2", "What a user sees"
    yield "table", latency_table(arms)
    yield (
        "p",
        (
            "Gaps between tokens: burst, the first token of a block after the wait for it and the others at once; "
            "smoothed, the wait shared by the tokens that came with it. P90 speed: nine of ten requests reach it."
        ),
    )
    text = "; ".join(
        f"{name} first token {first['ttft']:.2f} s, then {number(first['tps'], '.1f')} tokens/s"
        for name, arm in arms.items()
        for first in arm["cold"][:1]
    )
    yield "p", f"Cold, the first request of each arm: {text}."


def of_acceptance(arm: dict[str, Any]) -> Iterator[Block]:
    """arm: figures of one that drafts."""
    yield "h2", "Acceptance"
    places = {str(k): share for k, share in enumerate(arm["acceptance_by_position"], 1)}
    yield "svg", bars("share of drafts kept, by position", places)
    lengths = {f"{n} token{'s' * (n != '1')}": float(count) for n, count in arm["histogram"].items()}
    yield "svg", bars("rounds, by the tokens that they committed", lengths)
    sizes = ", ".join(f"{count} of {rows} rows" for rows, count in arm["block_sizes"].items())
    yield "p", f"Rounds: {sizes}; {number(arm['host_reads_per_round'], '.2f')} host reads a round."


def of_phases_and_memory(result: Result) -> Iterator[Block]:
    summary = result["summary"]
    yield "h2", "Where the time goes, and memory"
    if (phases := summary.get("phases")) and phases["share"]:
        yield (
            "table",
            (
                ("a round, timed apart", "ms", "share"),
                [[n, f"{v * 1e3:.1f}", f"{phases['share'][n]:.1%}"] for n, v in phases["seconds_a_round"].items()],
            ),
        )
        yield (
            "p",
            f"Tokens are chosen on {phases['token_selection']}; {phases['host_reads_a_round']:.2f} host reads a round.",
        )
    memory = summary.get("memory", {})
    held = [r for r in result["requests"] if r.get("kv_bytes") and r["kv_bytes"]["drafter"]]
    full = max(held, key=lambda r: r["kv_bytes"]["tokens"], default=None)
    cells = [["target", mb(memory.get("target"))], ["drafter", mb(memory.get("drafter"))]]
    if full is not None:
        tokens = full["kv_bytes"]["tokens"]
        cells.append([f"target's cache at {tokens} tokens", mb(full["kv_bytes"]["target"])])
        cells.append([f"drafter's at {tokens} tokens", mb(full["kv_bytes"]["drafter"])])
    cells.append(["peak", mb(max((r.get("peak_bytes") or 0 for r in result["requests"]), default=None))])
    yield "table", (("memory", "MB"), cells)


def latency_table(arms: dict[str, Any]) -> Table:
    head = ("arm", "tokens/s decoding", "user P50", "user P90", "first token P50 s", "P90", "P99", "burst gap P50 ms",
            "P90", "P99", "smoothed P50 ms", "P90", "P99")  # fmt: skip
    rows = []
    for name, arm in arms.items():
        cells = [name, number(arm["raw_tps"], ".1f"), *(number(arm["user_tps"][p], ".1f") for p in ("p50", "p90"))]
        cells += [number(arm["ttft"][p], ".3f") for p in ("p50", "p90", "p99")]
        for gaps in ("itl_burst", "itl_smoothed"):
            values = (arm[gaps][p] for p in ("p50", "p90", "p99"))
            cells += [number(None if v is None else v * 1e3, ".1f") for v in values]
        rows.append(cells)
    return head, rows


def of_sweep(result: Result) -> Iterator[Block]:
    table = result["summary"]["table"]
    for title, figure in (
        ("speed over plain decoding", "speedup"),
        ("mean accepted length", "mean_accepted_length"),
        ("acceptance", "acceptance"),
    ):
        series = {
            f"temp {temp:g}": [(r["rows"], r[figure]) for r in table if r["temp"] == temp and r["rows"] and r[figure]]
            for temp in dict.fromkeys(r["temp"] for r in table)
        }
        yield "svg", curves(f"{title}, by rows a round", series, "rows verified a round", "")
    rows = []
    for r in table:
        name = (
            "auto"
            if r["rows"] is None
            else f"{r['rows']}{' (beyond the trained block)' if r['beyond_trained_block'] else ''}"
        )
        span = "{:.2f}-{:.2f}".format(*r["interval_95"])
        accepted, length = number(r["acceptance"], ".1%"), number(r["mean_accepted_length"], ".2f")
        rows.append([name, f"{r['temp']:g}", f"{r['speedup']:.2f}", span, length, accepted])
    yield "table", (("rows", "temp", "x plain", "95 %", "mean accepted length", "acceptance"), rows)
    for temp, best in result["summary"]["recommended"].items():
        yield "p", f"Temperature {temp}: {f'--block-size {best}' if best else 'no fixed width beats plain decoding'}."


def of_context(result: Result) -> Iterator[Block]:
    fills = result["summary"]["fills"]
    arms = list(dict.fromkeys(name for row in fills for name in row["arms"]))
    for title, figure, unit, factor in (
        ("decoding speed", "raw_tps", "tokens/s", 1.0),
        ("time to first token", "ttft", "s", 1.0),
        ("acceptance", "acceptance", "", 1.0),
        ("caches held", "cache_bytes", "MB", 1e-6),
    ):
        series = {
            name: [
                (row["fill"], row["arms"][name][figure] * factor)
                for row in fills
                if name in row["arms"] and row["arms"][name][figure] is not None
            ]
            for name in arms
        }
        yield "svg", curves(title, series, "tokens of context", unit, log_x=True)
    rows = [
        [
            str(row["fill"]),
            name,
            number(arm["raw_tps"], ".1f"),
            number(arm["ttft"], ".2f"),
            number(arm["mean_accepted_length"], ".2f"),
            number(arm["acceptance"], ".1%"),
            mb((arm["cache_bytes"] or 0) + (arm["drafter_cache_bytes"] or 0)),
            mb(arm["peak_bytes"]),
        ]
        for row in fills
        for name, arm in row["arms"].items()
    ]
    yield "table", (("fill", "arm", "tokens/s", "first token s", "length", "acceptance", "caches MB", "peak MB"), rows)


def of_endpoint(result: Result) -> Iterator[Block]:
    summary = result["summary"]
    levels = list(zip(result["setup"]["concurrency"], summary["arms"].items(), strict=True))
    series = {
        "all users": [(n, level["aggregate_tps"]) for n, (_, level) in levels if level["aggregate_tps"]],
        "one user (P50)": [(n, level["user_tps"]["p50"]) for n, (_, level) in levels if level["user_tps"]["p50"]],
    }
    yield "svg", curves("throughput against users", series, "requests at a time", "tokens/s")
    rows = [
        [name, number(level["aggregate_tps"], ".1f"), number(level["acceptance"], ".1%"),
         number(level["mean_accepted_length"], ".2f"), str(level["requests"]), str(level["failed"])]
        for _, (name, level) in levels
    ]  # fmt: skip
    head = ("level", "tokens/s of all", "acceptance (the server's)", "mean accepted length", "requests", "failed")
    yield "table", (head, rows)
    yield "table", latency_table(summary["arms"])
    for level in summary["server"]["levels"].values():
        yield "p", level.get("definition") or f"Acceptance unknown: {level['reason']}."
        break
    points = summary["more_users"]
    for name, text in (("little_growth", "all users together gain little"), ("half_speed", "a user's speed is halved")):
        where = "at no level measured" if points[name] is None else f"first at {points[name]} at a time"
        yield "p", f"More users stop paying: {text} {where}."


def of_calibrate(result: Result) -> Iterator[Block]:
    summary = result["summary"]
    for length, curve in summary.get("curves", {}).items():
        yield "h2", f"After {length} tokens: a plain step takes {curve['plain'] * 1e3:.1f} ms"
        ratios = [(int(rows), ratio) for rows, ratio in curve["verify_ratio"].items()]
        series = {"verify pass": ratios, "round": [(int(n), t / curve["plain"]) for n, t in curve["rounds"].items()]}
        yield "svg", curves("time over one of one row", series, "rows", "x")
        predicted = summary["predicted"][length]
        taus = list(dict.fromkeys(tau for speeds in predicted["speed_up"].values() for tau in speeds))
        rows = []
        for n, verify in curve["verify"].items():
            cells = [n, f"{verify * 1e3:.1f}", f"{curve['verify_ratio'][n]:.2f}"]
            if n in curve["rounds"]:
                cells += [f"{curve['rounds'][n] * 1e3:.1f}", f"{curve['draft_share'][n]:.0%}"]
                cells += [f"{curve['host_share'][n]:.1%}", f"{predicted['break_even_tau'][n]:.2f}"]
                cells += [number(predicted["speed_up"][n].get(tau), ".2f") for tau in taus]
            rows.append([*cells, *["-"] * (7 + len(taus) - len(cells))])
        head = ("rows", "verify ms", "over 1 row", "round ms", "draft", "host", "breaks even at",
                *(f"x plain at {float(tau):g}" for tau in taus))  # fmt: skip
        yield "table", (head, rows)
        best = (f"{c}: {f['rows']} ({f['speed_up']:.2f} x)" for c, f in predicted["recommended"].items())
        yield "p", f"Rows to take, by the chance that a draft is kept: {', '.join(best)}."
    if "bandwidth" in summary:
        yield "p", f"Memory bandwidth, measured: {summary['bandwidth']['bytes_per_second'] / 1e9:.1f} GB/s."
    for length, roof in summary.get("roofline", {}).items():
        figures = {name: value for name, value in roof.items() if not isinstance(value, (dict, list))}
        yield "h2", f"What the bandwidth allows after {length} tokens"
        yield "table", (("", ""), [[name.replace("_", " "), plain(value)] for name, value in figures.items()])
    title, *lines = published_lines()
    yield "h2", title[0].upper() + title[1:].rstrip(":")
    yield from (("p", line.strip()) for line in lines)


def of_compare(result: Result) -> Iterator[Block]:
    found = {name: ratio for name, ratio in result["summary"]["second_over_first"].items() if ratio}
    medians = {name: ratio["median"] for name, ratio in found.items()}
    yield "svg", bars("second over first", medians, {n: r["interval_95"] for n, r in found.items()}, " x", line=1)
    rows = [[n, f"{r['median']:.3f}", "{:.3f}-{:.3f}".format(*r["interval_95"])] for n, r in found.items()]
    yield "table", (("arm", "second / first", "95 %"), rows)


def other(result: Result) -> Iterator[Block]:
    """Tables of whatever figures a summary has: a table a list of objects, else a line a value."""
    lines = []
    for name, value in result["summary"].items():
        if isinstance(value, list) and value and isinstance(value[0], dict):
            head = [key for key in value[0] if not isinstance(value[0][key], (dict, list))]
            yield "h2", name.replace("_", " ")
            yield "table", (head, [[plain(row.get(key)) for key in head] for row in value])
        elif isinstance(value, dict) and not any(isinstance(v, (dict, list)) for v in value.values()):
            yield "h2", name.replace("_", " ")
            yield "table", (("", ""), [[key, plain(v)] for key, v in value.items()])
        elif not isinstance(value, (dict, list)):
            lines.append([name.replace("_", " "), plain(value)])
    if lines:
        yield "table", (("", ""), lines)


CONCLUDE = {"run": runs.conclude, "sweep": sweep.conclude, "context": context.conclude, "endpoint": endpoint.conclude}
SECTIONS = {"run": of_run, "sweep": of_sweep, "context": of_context, "endpoint": of_endpoint, "calibrate": of_calibrate,
            "compare": of_compare}  # fmt: skip


def mb(size: float | None) -> str:
    return number(None if size is None else size / 1e6, ".1f")


def plain(value: Any) -> str:
    return "-" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)
