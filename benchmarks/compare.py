"""`compare`: two results of `run`, arm by arm and prompt by prompt, with intervals.

Refused unless the two may be compared: greedy against sampled, other prompts, another quantization, batch or
concurrency, other models. `--anyway` compares all the same and says in what they differ.
"""

import argparse
import random
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mlx_dflash.benchmarks.metrics import number
from mlx_dflash.benchmarks.plain import bootstrap
from mlx_dflash.benchmarks.run import speeds_by_prompt
from mlx_dflash.benchmarks.schema import Result, read, write

from mlx_dflash.errors import RequestError

# What must be equal: name -> where it stands in a result's setup.
SHARED = ("model_hash", "quantization", "batch_size", "concurrency", "max_tokens", "sampling")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("first", type=Path, help="result of run")
    parser.add_argument("second", type=Path, help="result that is compared with it")
    parser.add_argument("--anyway", action="store_true", help="compare what should not be compared, saying so")
    parser.add_argument("--output", type=Path, default=None, metavar="FILE")


def run(args: argparse.Namespace) -> int:
    found = compare(read(args.first), read(args.second), args.anyway)
    print("\n".join(lines(found)))
    write(found, args.output)
    return 0


def differences(first: Result, second: Result) -> list[str]:
    """In what two results differ that makes their figures incomparable, a line each."""
    out = []
    if first["command"] != second["command"]:
        out.append(f"command: {first['command']} against {second['command']}")
    if first["mode"] != second["mode"]:
        out.append(f"{first['mode']} against {second['mode']}")
    prompts = [result["setup"]["prompts"] for result in (first, second)]
    if prompts[0]["hash"] != prompts[1]["hash"]:
        out.append(f"other prompts ({prompts[0]['source']} against {prompts[1]['source']})")
    for name in SHARED:
        a, b = (result["setup"].get(name) for result in (first, second))
        if a != b and not (name == "sampling" and same_sampling(a, b)):
            out.append(f"{name.replace('_', ' ')}: {a} against {b}")
    return out


def same_sampling(first: Any, second: Any) -> bool:
    """The seed and how drafts are proposed change no distribution."""
    free = {"seed", "proposals", "draft_temp"}
    strip = [{k: v for k, v in (values or {}).items() if k not in free} for values in (first, second)]
    return strip[0] == strip[1]


def compare(first: Result, second: Result, anyway: bool = False) -> Result:
    """Second over first. Raises RequestError for results that should not be compared, unless `anyway`."""
    for result in (first, second):
        if "arms" not in result["setup"] or "arms" not in result["summary"]:
            raise RequestError(f"compare takes finished results of run or endpoint, not of {result['command']}")
    apart = differences(first, second)
    if apart and not anyway:
        raise RequestError(f"these results should not be compared: {'; '.join(apart)}. --anyway does it all the same")
    arms = [name for name in first["setup"]["arms"] if name in second["setup"]["arms"]]
    ratios = {}
    for name in arms:
        speeds = [speeds_by_prompt(result["requests"], name) for result in (first, second)]
        ratios[name] = ratio(*speeds)
    summary = {
        "second_over_first": ratios,
        "arms": [{name: figures(result["summary"]["arms"][name]) for name in arms} for result in (first, second)],
    }
    return {
        "schema": first["schema"],
        "command": "compare",
        "finished": True,
        "mode": first["mode"] if first["mode"] == second["mode"] else None,
        "setup": {"differences": apart},
        "requests": [],
        "summary": summary,
        "marks": [*(f"not comparable: {line}" for line in apart), *marks(summary, arms), *unlike(first, second)],
    }


def ratio(first: Mapping[str, float], second: Mapping[str, float]) -> dict[str, Any] | None:
    """Median of the ratios of the prompts that both have; of two disjoint sets that of the medians."""
    shared = [second[name] / first[name] for name in first if name in second]
    if shared:
        return {"median": statistics.median(shared), "interval_95": bootstrap(shared), "prompts": len(shared)}
    if not first or not second:
        return None
    rng = random.Random(0)
    draws = sorted(
        statistics.median(rng.choices(list(second.values()), k=len(second)))
        / statistics.median(rng.choices(list(first.values()), k=len(first)))
        for _ in range(2000)
    )
    median = statistics.median(second.values()) / statistics.median(first.values())
    return {"median": median, "interval_95": [draws[50], draws[1949]], "prompts": 0}


def figures(arm: dict[str, Any]) -> dict[str, Any]:
    return {name: arm.get(name) for name in ("raw_tps", "acceptance", "mean_accepted_length", "block_sizes")}


def marks(summary: dict[str, Any], arms: list[str]) -> list[str]:
    """Where acceptance or accepted length point the other way than speed: neither is a measure of speed."""
    out = []
    for name in arms:
        a, b = (values[name] for values in summary["arms"])
        if a["raw_tps"] is None or b["raw_tps"] is None or a["raw_tps"] == b["raw_tps"]:
            continue
        faster = b["raw_tps"] > a["raw_tps"]
        for figure, text in (("acceptance", "{:.1%}"), ("mean_accepted_length", "{:.2f}")):
            x, y = a[figure], b[figure]
            if x is not None and y is not None and x != y and (y > x) != faster:
                better, worse = (y, x) if faster else (x, y)
                out.append(
                    f"{name}: the {'second' if faster else 'first'} is faster at a lower {figure.replace('_', ' ')} "
                    f"({text.format(better)} against {text.format(worse)}); {figure.replace('_', ' ')} alone misleads"
                )
    return out


def unlike(first: Result, second: Result) -> list[str]:
    """Machines and versions that differ, which may be just what is compared."""
    names = ("processor", "device", "blas", "mlx", "mlx-lm", "mlx-dflash", "os", "power_source", "low_power_mode")
    pairs = [(name, first["machine"].get(name), second["machine"].get(name)) for name in names]
    return [f"{name}: {a} against {b}" for name, a, b in pairs if a != b]


def lines(result: Result) -> list[str]:
    out = []
    for name, found in result["summary"]["second_over_first"].items():
        if found is None:
            out.append(f"{name}: no requests to compare")
            continue
        low, high = found["interval_95"]
        verdict = "faster" if low > 1 else "slower" if high < 1 else "no difference that the data shows"
        first, second = (arms[name] for arms in result["summary"]["arms"])
        out.append(
            f"{name:9} second / first {found['median']:.3f} (95 % {low:.3f}-{high:.3f}, {found['prompts']} prompts): "
            f"{verdict}; {number(first['raw_tps'], '.1f')} -> {number(second['raw_tps'], '.1f')} tokens/s"
        )
    return [*out, *(f"mark | {mark}" for mark in result["marks"])]
