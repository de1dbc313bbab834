"""What a result comes to, in one line each: what holds the speed back, and what to do, or that all is well.

Rules over a result's figures alone, so that they can be tested on figures whose verdict is known.
"""

import statistics
from dataclasses import dataclass
from typing import Any

from mlx_dflash.benchmarks.schema import Result

FIRST_DRAFT = 0.25  # of the first drafts kept; below it a drafter does not know its target or this text
ENOUGH = 50  # drafting rounds from which acceptance says something of the pair
FAR_BELOW = 0.5  # mean accepted length over the block, below which most rows are verified for nothing
HOST_SHARE = 0.2  # of a round spent by the host; the design asks for 0.08
DRIFT = 0.05  # of the plain arm's speed
SWAP = 64 * 2**20  # bytes by which swap grew
FULL = 0.9  # of the memory that a model may take
FADING = 0.8  # speed-up at the fullest cache over that at the emptiest


@dataclass(frozen=True)
class Verdict:
    """name: of the rule; text: what was seen, and what to do about it."""

    name: str
    text: str


def verdicts(result: Result) -> list[Verdict]:
    """All rules that hold, the worst first; "all well" or "no gain" where none does."""
    found = [rule(result) for rule in RULES]
    named = [verdict for verdict in found if verdict is not None]
    if named:
        return named
    gain = speedup(result)
    if gain is None:
        return [Verdict("nothing measured", "no drafting was compared with plain decoding here")]
    low = gain["interval_95"][0]
    if low > 1:
        return [Verdict("all well", f"{gain['median']:.2f} x plain decoding (95 % from {low:.2f}), nothing in its way")]
    return [Verdict("no gain", f"{gain['median']:.2f} x plain decoding: the interval holds 1, so this shows no gain")]


def speedup(result: Result) -> dict[str, Any] | None:
    """Of a run over all prompts: median ratio to plain and its interval. Of a sweep the best row's; of `context` the
    median over fills and their range."""
    summary = result["summary"]
    if rows := [row for row in summary.get("table", []) if not row["beyond_trained_block"]]:
        best = max(rows, key=lambda row: row["speedup"])
        return {"median": best["speedup"], "interval_95": best["interval_95"]}
    if ratios := sorted(row["speedup"] for row in summary.get("fills", []) if row.get("speedup") is not None):
        return {"median": statistics.median(ratios), "interval_95": [ratios[0], ratios[-1]]}
    found: dict[str, Any] | None = summary.get("ratios", {}).get("all", {}).get("dflash")
    return found


def drafting(result: Result) -> dict[str, Any]:
    """Figures of the drafting arm of a run; of other commands none."""
    return result["summary"].get("arms", {}).get("dflash") or {}


def memory_pressure(result: Result) -> Verdict | None:
    grown = result["summary"].get("swap_grown_bytes", 0) or 0
    peak = max((r.get("peak_bytes") or 0 for r in result["requests"]), default=0)
    limit = result["machine"].get("memory_bytes") or 0
    if grown > SWAP:
        return Verdict(
            "memory pressure",
            f"swap grew by {grown / 2**30:.2f} GiB: a smaller or more quantized model, a shorter context, --kv-bits",
        )
    if limit and peak > FULL * limit:
        return Verdict("memory pressure", f"the peak took {peak / limit:.0%} of the memory: leave some for the system")
    return None


def thermal(result: Result) -> Verdict | None:
    drift = result["summary"].get("drift")
    if drift is None or abs(drift) <= DRIFT:
        return None
    why = "the machine throttles" if drift < 0 else "it was busy or cold at first"
    return Verdict("thermal", f"plain decoding changed by {drift:+.0%} within the run ({why}): rest it and run again")


def mismatched(result: Result) -> Verdict | None:
    arm = drafting(result)
    places = arm.get("acceptance_by_position") or []
    if arm.get("rounds", 0) < ENOUGH or not places or places[0] >= FIRST_DRAFT:
        return None
    return Verdict(
        "pair mismatched",
        f"only {places[0]:.0%} of first drafts are kept: another drafter than this target's, a broken conversion, "
        "thinking that it never saw, or text unlike its training data; try python -m mlx_dflash.doctor and other "
        "tasks",
    )


def too_wide(result: Result) -> Verdict | None:
    if rows := [row for row in result["summary"].get("table", []) if row["rows"] and not row["beyond_trained_block"]]:
        widest, best = max(rows, key=lambda row: row["rows"]), max(rows, key=lambda row: row["speedup"])
        if widest["mean_accepted_length"] >= FAR_BELOW * widest["rows"]:
            return None
        return Verdict(
            "width too large",
            f"at {widest['rows']} rows {widest['mean_accepted_length']:.2f} tokens are kept a round; "
            f"{best['rows']} rows are fastest ({best['speedup']:.2f} x plain): --block-size {best['rows']} or auto",
        )
    arm = drafting(result)
    length, sizes = arm.get("mean_accepted_length"), arm.get("block_sizes") or {}
    fixed = result["setup"].get("block_size")
    if length is None or not isinstance(fixed, int) or length >= FAR_BELOW * fixed or str(fixed) not in sizes:
        return None
    return Verdict(
        "width too large",
        f"rounds of {fixed} rows commit {length:.2f} tokens: verify fewer, --block-size "
        f"{max(round(length) + 1, 2)} or auto",
    )


def host_bound(result: Result) -> Verdict | None:
    share = ((result["summary"].get("phases") or {}).get("share") or {}).get("host")
    if share is None or share <= HOST_SHARE:
        return None
    return Verdict(
        "host-bound", f"{share:.0%} of a round is the host's own work: close other programs, drop processors"
    )


def long_context(result: Result) -> Verdict | None:
    fills = [row for row in result["summary"].get("fills", []) if row.get("speedup") is not None]
    if len(fills) < 2 or fills[-1]["speedup"] >= FADING * fills[0]["speedup"]:
        return None
    return Verdict(
        "long context",
        f"{fills[0]['speedup']:.2f} x at {fills[0]['fill']} tokens, {fills[-1]['speedup']:.2f} x at "
        f"{fills[-1]['fill']}: the drafter or the verify rows suffer; try --draft-window 2048 --draft-sink 64, "
        "fewer rows",
    )


def slower(result: Result) -> Verdict | None:
    gain = speedup(result)
    if gain is None or gain["interval_95"][1] >= 1:
        return None
    return Verdict("slower than plain", f"{gain['median']:.2f} x plain decoding: use --block-size auto, or --plain")


# The machine first: on one that throttles or swaps the other figures mean little.
RULES = (memory_pressure, thermal, mismatched, too_wide, host_bound, long_context, slower)
