"""`python -m mlx_dflash.selftest`: run it all, print what was found, write one JSON file; exit 1 if anything is off."""

import argparse
import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..command import Parser
from ..errors import DFlashError


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m mlx_dflash.selftest", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("mlx_dflash-selftest.json"), help="the JSON file")
    parser.add_argument("--quick", action="store_true", help="leave out the verify curve")
    parser.add_argument("--only", nargs="+", metavar="PAIR", help="only these pairs")
    args = parser.parse_args(argv)
    # Metal may multiply fp32 in TF32, which is not what is compared here. MLX reads this at its first matmul.
    os.environ.setdefault("MLX_ENABLE_TF32", "0")
    report = run(args.only, curve=not args.quick)
    try:
        args.out.write_text(json.dumps(report, indent=1) + "\n")
    except OSError as e:
        Parser.fail(f"{args.out} can't be written ({e}); name another file with --out")
    verdict = "passed" if report["passed"] else "FAILED"
    print(f"{verdict} in {report['seconds']:.0f} s; report in {args.out}, which can be attached to an issue")
    raise SystemExit(0 if report["passed"] else 1)


def run(only: Sequence[str] | None = None, curve: bool = True) -> dict[str, Any]:
    """The report as data; prints each finding as it comes."""
    from ..benchmarks.machine import describe
    from .curve import measure_all
    from .pairs import PairResult, check_family, families
    from .quantized import check_quantized

    start = time.perf_counter()
    report: dict[str, Any] = {"machine": describe(), "pairs": [], "quantized_kv": {}, "verify_curve": None}
    print(" | ".join(f"{key} {value}" for key, value in report["machine"].items()))
    unknown = set(only or ()) - set(families())
    if unknown:
        Parser.fail(f"no pair {', '.join(sorted(unknown))}; {', '.join(families())}")
    for family in only or families():
        try:
            result = check_family(family)
        except (DFlashError, RuntimeError, ValueError) as e:
            result = PairResult(family, [], [f"does not run: {' '.join(str(e).split())[:300]}"])
        report["pairs"].append(result.to_dict())
        print(pair_line(report["pairs"][-1]), flush=True)
    for bits in (4, 8):
        try:
            problems = check_quantized(bits)
        except (RuntimeError, ValueError) as e:
            problems = [f"does not run: {' '.join(str(e).split())[:300]}"]
        report["quantized_kv"][bits] = problems
        print(f"{'FAILED' if problems else 'ok':<7}{bits}-bit keys and values {'; '.join(problems)}", flush=True)
    if curve:
        report["verify_curve"] = measure_all()
        print("\n".join(curve_lines(report["verify_curve"])))
    report["passed"] = not any(p["problems"] for p in report["pairs"]) and not any(report["quantized_kv"].values())
    report["seconds"] = time.perf_counter() - start
    return report


def pair_line(pair: dict[str, Any]) -> str:
    if pair["problems"]:
        return f"FAILED {pair['family']}: {'; '.join(pair['problems'])}"
    worst = max(pair["partings"], key=lambda p: p["difference"])
    rows = "rows bit-equal at every width"
    if worst["difference"]:
        parted = [str(p["rows"]) for p in pair["partings"] if not p["tokens_equal"]]
        rows = f"rows part by {worst['difference']:.0e} at {worst['rows']} (smallest lead {worst['margin']:.0e})"
        rows += f", other tokens at {', '.join(parted)} rows" if parted else ", same tokens"
    errors = f"taps {pair['tap_error']:.0e}, logits {pair['logit_error']:.0e}"
    drafts = f"{pair['accepted']} drafts kept in {pair['rounds']} rounds"
    return f"ok     {pair['family']:<18} {'+'.join(pair['caches'])}: {errors}; {drafts}; {rows}"


def curve_lines(curve: dict[str, Any]) -> list[str]:
    shape = ", ".join(f"{key} {value}" for key, value in curve["shape"].items())
    lines = [f"verify time over one row's ({shape})", f"{'rows':<8}" + "".join(f"{n:>6}" for n in range(1, 17))]
    for precision in ("4-bit", "8-bit", "bf16"):
        ratios = curve[precision]["ratio"].values()
        one = curve[precision]["milliseconds"][1]
        lines.append(f"{precision:<8}" + "".join(f"{r:>6.2f}" for r in ratios) + f"   one row {one:.2f} ms")
    return lines


if __name__ == "__main__":
    main()
