"""`calibrate`: what rounds cost on this machine, with a pair or with random weights of a shape, and what follows.

At a short context and a longer one, for every number of rows: a round as the loop runs it, its drafts thrown away, and
once more with drafting and verifying timed apart. From these the speed-up for any mean accepted length (tau), the tau
that breaks even and the width to take, no text or acceptance being measured; and beside them what the memory bandwidth
would allow. With fewer layers than the shape has, times are scaled by what a layer adds.
"""

import argparse
import random
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_dflash.benchmarks import roofline, shapes
from mlx_dflash.benchmarks.pair import quantization
from mlx_dflash.benchmarks.schema import Result, new_result, write

from mlx_dflash import load, memory
from mlx_dflash.accept import Sampler
from mlx_dflash.api import wired_limit
from mlx_dflash.calibrate import timed_round
from mlx_dflash.choice import choose_drafter
from mlx_dflash.costs import DRAFTER, PLAIN_ROUND, Kind
from mlx_dflash.decode import Decoder, State
from mlx_dflash.download import say
from mlx_dflash.drafters import DFlashDrafter
from mlx_dflash.errors import RequestError
from mlx_dflash.lookup import History, Lookup
from mlx_dflash.stats import Observer, timed
from mlx_dflash.width import fixed

SHORT = 48  # tokens of context, as when a pair is first measured
ROWS = [*range(1, 17), 32]
FILLS = (2048, 8192, 32768)
PLAIN_TOKENS = 4  # decoded each turn for the time of a plain step
NOISY = 0.25  # by which a width's slowest round exceeds its fastest


@dataclass
class Samples:
    """Seconds as they were measured, by rows. The first of each warmed up, and counts only where there is no other.

    phases: draft, verify and the rest of rounds that were timed apart.
    """

    plain: list[float] = field(default_factory=list)
    rounds: dict[int, list[float]] = field(default_factory=dict)
    phases: dict[int, list[tuple[float, float, float]]] = field(default_factory=dict)

    def medians(self) -> "Times":
        phases = {n: [statistics.median(p) for p in zip(*(v[1:] or v), strict=True)] for n, v in self.phases.items()}
        rounds = {n: values[1:] or values for n, values in self.rounds.items() if n in phases}
        return Times(
            plain=statistics.median(self.plain[1:] or self.plain),
            rounds={n: statistics.median(values) for n, values in rounds.items()},
            draft={n: draft for n, (draft, _, _) in phases.items() if n in rounds},
            verify={n: verify for n, (_, verify, _) in phases.items()},
            host={n: host for n, (_, _, host) in phases.items()},
            noise=max((max(values) / min(values) - 1 for values in rounds.values()), default=0.0),
        )


@dataclass
class Times:
    """Seconds at one context. plain: a step of plain decoding; the others by rows, `rounds` and `draft` up to the
    trained block. host: a round's time without drafting and verifying, profiled. noise: the widest spread of rounds."""

    plain: float
    rounds: dict[int, float]
    draft: dict[int, float]
    verify: dict[int, float]
    host: dict[int, float]
    noise: float = 0.0


class Phases(Observer):
    """Evaluates between draft and verify, as `stats.Profiler` does, and keeps the seconds of one round."""

    draft_seconds = verify_seconds = 0.0

    def drafted(self, drafts: mx.array) -> None:
        self.draft_seconds = timed(drafts)

    def verified(self, draws: mx.array) -> None:
        self.verify_seconds = timed(draws)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--model", default=None, help="hub name or folder (default demo)")
    add("--draft-model", default=None, help="its drafter (default: the one known for it)")
    add("--shape", default=None, metavar="NAME", help=f"random weights instead: {', '.join(shapes.SHAPES)}")
    add("--q-bits", type=int, choices=[4, 8, 16], default=4, help="of the shape's target (default 4; 16: unquantized)")
    add("--layers", type=int, default=None, help="of the shape's target to measure and scale up from (default: all)")
    add("--context", type=int, default=1024, help=f"tokens of the longer context, beside {SHORT} (default 1024)")
    add("--rows", type=int, nargs="+", default=None, help="rows to time (default: 1 to 16, and 32 if the drafter can)")
    add("--repeats", type=int, default=3, help="of every round (default 3)")
    add("--output", type=Path, default=None, metavar="FILE", help="the result as JSON")
    parser.set_defaults(revision=None, draft_revision=None, plain=False, num_draft_tokens=None, block_size=None)


def run(args: argparse.Namespace) -> int:
    check(args)
    names = ("shape", "q_bits", "layers") if args.shape else ("model", "draft_model")
    setup = {name: getattr(args, name) for name in names}
    setup |= {"contexts": sorted({SHORT, args.context}), "repeats": args.repeats}
    result = new_result("calibrate", None, setup)
    samples: dict[int, dict[int, Samples]] = {}
    bench = None
    try:
        say("measuring the memory bandwidth ...")
        result["summary"]["bandwidth"] = roofline.bandwidth()
        size = args.layers, args.q_bits, args.context
        bench = shapes.random_bench(args.shape, *size) if args.shape else loaded_bench(args)
        setup |= describe(bench)
        result["summary"]["memory"] = fill_of(bench)
        for context in setup["contexts"]:
            say(f"measuring rounds at {context} tokens of context ...")
            found = samples.setdefault(context, {})
            with wired_limit():
                measure(bench.by_depth, context, rows_of(args, bench.whole), args.repeats, found)
            conclude(result, bench, samples)
            write(result, args.output)
        result["finished"] = True
    except KeyboardInterrupt:
        say("interrupted")
    if bench is not None:
        conclude(result, bench, samples)
    write(result, args.output)
    print("\n".join(lines(result)))
    return 0 if result["finished"] else 130


def check(args: argparse.Namespace) -> None:
    if args.shape is not None:
        if args.model is not None or args.draft_model is not None:
            raise RequestError("--shape makes a pair of random weights; drop --model and --draft-model, or --shape")
        shapes.depths(shapes.shape_of(args.shape), args.layers)
    elif args.layers is not None:
        raise RequestError("--layers goes with --shape; a loaded model is measured with all its layers")
    if min(args.context // 16, args.repeats, *(args.rows or [1])) < 1:
        raise RequestError("--context must be 16 or more, --repeats and --rows 1 or more")


def loaded_bench(args: argparse.Namespace) -> shapes.Bench:
    before = shapes.held()
    target, _ = load(args.model or "demo")
    drafter, _ = choose_drafter(args, target)
    if not isinstance(drafter, DFlashDrafter):
        raise RequestError(f"calibrate needs a drafter's folder or hub name for {args.model}; give --draft-model")
    return shapes.Bench({target.num_layers: drafter}, drafter, shapes.held() - before)


def describe(bench: shapes.Bench) -> dict[str, Any]:
    target = bench.whole.target
    return {
        "model": target.asked_for,
        "draft_model": bench.whole.name,
        "quantization": quantization(target.config),
        "held_in_fp32": mx.default_device() == mx.Device(mx.cpu),
        "trained_block": bench.whole.block_size,
        "layers": target.num_layers,
        "measured_layers": list(bench.by_depth),
    }


def fill_of(bench: shapes.Bench) -> dict[str, Any]:
    """Bytes of weights that the device holds, and estimates for the whole pair at several contexts."""
    fills = {}
    for context in FILLS:
        found = memory.estimate(bench.whole.target, bench.whole, context)
        fills[context] = {**asdict(found), "peak": found.peak, "fits": found.fits}
    deepest = next(iter(bench.by_depth))
    return {"weights_held": bench.weight_bytes, "weights_held_layers": deepest, "fills": fills}


def rows_of(args: argparse.Namespace, drafter: DFlashDrafter) -> list[int]:
    """Rows to time; above the trained block only the verify pass is."""
    return sorted({1, *(args.rows or (n for n in ROWS if n <= max(16, drafter.block_size)))})


class Loop:
    """The loop with one pair, after a text of random ids."""

    def __init__(self, drafter: DFlashDrafter, context: int) -> None:
        target = drafter.target
        half = random.Random(0).choices(range(target.vocab_size), k=context // 2)
        state = State(half + half, target.make_cache(), drafter.make_context())
        history = History(half + half)  # a text of its own, whose end has a match
        self.block_size = drafter.block_size
        self.quiet, self.phases = Observer(), Phases()
        self.decoder = Decoder(target, drafter, state, fixed(1), Sampler(), lambda tokens: None, self.quiet, history)

    def plain(self) -> float:
        """Seconds of a plain step in a run of some, each launched before the last one is read."""
        stamps = [time.perf_counter() for _ in self.decoder.run(PLAIN_TOKENS)]
        return statistics.median(b - a for a, b in pairwise(stamps))

    def kind(self, rows: int) -> Kind:
        """Above the trained block drafts come from the text: verifying does not depend on whose they are."""
        return PLAIN_ROUND if rows == 1 else (DRAFTER if rows <= self.block_size else Lookup.name, rows)

    def round(self, rows: int) -> float:
        return timed_round(self.decoder, self.kind(rows))

    def apart(self, rows: int) -> tuple[float, float, float]:
        """Seconds of drafting, verifying and the rest of a round."""
        self.decoder.observer, self.phases.draft_seconds = self.phases, 0.0
        whole = self.round(rows)
        self.decoder.observer = self.quiet
        draft, verify = self.phases.draft_seconds, self.phases.verify_seconds
        return draft, verify, whole - draft - verify


def measure(
    by_depth: Mapping[int, DFlashDrafter], context: int, rows: Sequence[int], repeats: int, into: dict[int, Samples]
) -> None:
    """Time rounds of every number of rows in turns, up and down the rows, at all depths beside each other.

    into: gets the samples by depth. The first turn warms up.
    """
    loops = {depth: Loop(drafter, context) for depth, drafter in by_depth.items()}
    into |= {depth: Samples() for depth in loops}
    for turn in range(repeats + 1):
        for depth, loop in loops.items():
            into[depth].plain.append(loop.plain())
        for n in reversed(rows) if turn % 2 else rows:
            for depth, loop in loops.items():
                if loop.kind(n)[0] == DRAFTER:
                    whole = loop.round(n)
                    into[depth].rounds.setdefault(n, []).append(whole)
                parts = loop.apart(n)
                into[depth].phases.setdefault(n, []).append(parts)


def scaled(by_depth: Mapping[int, Times], layers: int) -> Times:
    """Times at `layers` layers: the deeper pair's, and for every layer that it lacks what one adds between the two."""
    if len(by_depth) == 1:
        return next(iter(by_depth.values()))
    (n, deep), (m, low) = by_depth.items()

    def grown(a: float, b: float) -> float:
        return a + (layers - n) * max(a - b, 0.0) / (n - m)

    def each(a: dict[int, float], b: dict[int, float]) -> dict[int, float]:
        return {rows: grown(a[rows], b[rows]) for rows in a if rows in b}

    return Times(
        grown(deep.plain, low.plain),
        each(deep.rounds, low.rounds),
        deep.draft,
        each(deep.verify, low.verify),
        each(deep.host, low.host),
        max(deep.noise, low.noise),
    )


def conclude(result: Result, bench: shapes.Bench, samples: Mapping[int, Mapping[int, Samples]]) -> None:
    """All figures from what has been measured, at each context where every depth has been."""
    summary, whole = result["summary"], bench.whole
    curves, tables, roof = {}, {}, {}
    result["marks"] = marks_of(bench)
    for context, by_depth in samples.items():
        if len(by_depth) < len(bench.by_depth) or not all(s.plain and 1 in s.phases for s in by_depth.values()):
            continue
        times = scaled({depth: found.medians() for depth, found in by_depth.items()}, whole.target.num_layers)
        curves[context] = curve(times)
        tables[context] = roofline.predicted(times.plain, times.rounds)
        sizes = roofline.token_bytes(whole.target, context), roofline.draft_bytes(whole, context)
        roof[context] = roofline.ceilings(summary["bandwidth"]["bytes_per_second"], *sizes, times.plain)
        if times.noise > NOISY:
            result["marks"].append(f"{context} tokens: rounds of one width differ by up to {times.noise:.0%}")
        if roof[context]["share_reached"] > 1:
            result["marks"].append(f"{context} tokens: faster than the bandwidth allows; the machine's speed moved")
    if result["setup"]["repeats"] < 3:
        result["marks"].append("fewer than 3 repeats: a round that something held up counts in full")
    if not result["finished"]:
        result["marks"].append("stopped before its end")
    summary |= {"curves": curves, "predicted": tables, "roofline": roof, "published": roofline.PUBLISHED}


def marks_of(bench: shapes.Bench) -> list[str]:
    layers, measured = bench.whole.target.num_layers, next(iter(bench.by_depth))
    marks = [f"measured with {measured} of {layers} layers, scaled"] if measured < layers else []
    if bench.whole.target.name.startswith(shapes.RANDOM) and bench.whole.target.config.get("num_experts_per_tok"):
        marks.append("random rows choose experts that have less in common than those of a text: verifying costs more")
    if mx.default_device() == mx.Device(mx.cpu):
        marks.append("MLX's CPU backend: weights are held in fp32, and bytes are those of fp32")
    return marks


def curve(times: Times) -> dict[str, Any]:
    """The measured curve, by rows, and shares of a profiled round."""
    parts = {n: times.draft.get(n, 0.0) + times.verify[n] + times.host[n] for n in times.verify}
    return {
        **asdict(times),
        "verify_ratio": {n: t / times.verify[1] for n, t in times.verify.items()},
        "draft_share": {n: t / parts[n] for n, t in times.draft.items() if n in parts},
        "host_share": {n: times.host[n] / whole for n, whole in parts.items()},
    }


def lines(result: Result) -> list[str]:
    summary, setup = result["summary"], result["setup"]
    out = [f"{setup['model']} + {setup['draft_model']}"]
    if (found := summary.get("bandwidth")) is not None:
        size = f"{memory.gib(found['array_bytes'])} read, {found['way']}"
        out.append(f"memory bandwidth: {found['bytes_per_second'] / 1e9:.1f} GB/s ({size})")
    for context, times in summary.get("curves", {}).items():
        out += ["", *curve_lines(context, times, summary["predicted"][context])]
    if summary.get("roofline"):
        out += ["", "what the bandwidth allows, tokens/s:", *roofline.lines(summary["roofline"])]
    if "memory" in summary:
        out += ["", *memory_lines(summary["memory"])]
    return [*out, "", *roofline.published_lines(), *(f"mark | {mark}" for mark in result["marks"])]


def curve_lines(context: int, times: dict[str, Any], tables: dict[str, Any]) -> list[str]:
    """One row a width: verify time and its ratio to one row's, draft and host share, break-even tau, speed-ups."""
    taus = "".join(f"{'tau ' + format(tau, 'g'):>8}" for tau in roofline.TAUS)
    out = [
        f"after {context} tokens: a plain step takes {times['plain'] * 1e3:.1f} ms ({1 / times['plain']:.2f} tokens/s)",
        f"{'rows':>4}{'verify ms':>11}{'ratio':>7}{'round ms':>10}{'draft':>7}{'host':>7}{'breaks even':>13}{taus}",
    ]
    for rows, verify in times["verify"].items():
        text = f"{rows:>4}{verify * 1e3:>11.1f}{times['verify_ratio'][rows]:>7.2f}"
        if rows in times["rounds"]:
            speeds = tables["speed_up"][rows]
            text += f"{times['rounds'][rows] * 1e3:>10.1f}{times['draft_share'][rows]:>7.0%}"
            text += f"{times['host_share'][rows]:>7.1%}{tables['break_even_tau'][rows]:>13.2f}"
            text += "".join(f"{speeds[tau]:>8.2f}" if tau in speeds else f"{'-':>8}" for tau in roofline.TAUS)
        out.append(text)
    best = (
        f"{chance:g}: {found['rows']} ({found['speed_up']:.2f} x)" for chance, found in tables["recommended"].items()
    )
    return [*out, f"rows to take, by the chance that a draft is kept: {', '.join(best)}"]


def memory_lines(found: dict[str, Any]) -> list[str]:
    held = f"{memory.gib(found['weights_held'])} with {found['weights_held_layers']} layers"
    out = [f"memory: weights hold {held}; the whole pair, estimated:"]
    for context, row in found["fills"].items():
        sizes = f"peak {memory.gib(row['peak'])}, caches {memory.gib(row['kv'] + row['context_kv'])}"
        out.append(f"{context:>8} tokens: {sizes}; {'fits' if row['fits'] else 'does not fit'}")
    return out
