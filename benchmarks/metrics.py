"""Figures of a run from what was recorded of its requests: percentiles, gaps between tokens, speeds, loops.

An arrival is (seconds since the request began, tokens that came together then): a round commits a block of tokens at
once. Inter-token latency is therefore told twice. *Burst*: what a client sees, the first token of a block after the
wait for it, the others after nothing. *Smoothed*: the wait shared evenly by the tokens that came with it, what a client
sees that shows text at an even pace. Both have one value a token after the first arrival.
"""

import hashlib
import json
import math
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

Arrivals = Sequence[Sequence[float]]
Record = dict[str, Any]

LOOP_PERIOD, LOOP_TIMES, LOOP_TOKENS = 64, 4, 32  # longest repeated piece, how often, and how much text in all
POSITIONS = 16  # draft positions that are told apart; published blocks are no longer


def percentile(values: Iterable[float], share: float) -> float | None:
    """By linear interpolation between the two nearest ranks (NumPy's default); None of no values. share: percent."""
    ordered = sorted(values)
    if not ordered:
        return None
    place = (len(ordered) - 1) * share / 100
    low, high = math.floor(place), math.ceil(place)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def percentiles(values: Iterable[float], shares: Sequence[int] = (50, 90, 99)) -> dict[str, float | None]:
    ordered = sorted(values)
    return {f"p{share}": percentile(ordered, share) for share in shares}


def burst_gaps(arrivals: Arrivals) -> list[float]:
    """Seconds before each token after the first arrival; tokens that came with another: 0."""
    gaps: list[float] = []
    for (before, _), (now, tokens) in pairwise(arrivals):
        gaps += [now - before, *[0.0] * (int(tokens) - 1)]
    return gaps


def smoothed_gaps(arrivals: Arrivals) -> list[float]:
    """The same with the wait shared by the tokens that came with it."""
    gaps: list[float] = []
    for (before, _), (now, tokens) in pairwise(arrivals):
        gaps += [(now - before) / tokens] * int(tokens)
    return gaps


def decode_seconds(record: Record) -> float:
    """From the first arrival to the last."""
    arrivals = record["arrivals"]
    return arrivals[-1][0] - arrivals[0][0] if arrivals else 0.0


def decode_tokens(record: Record) -> float:
    """Tokens after the first arrival; where a server says how many came in all, each arrival counts its share."""
    counts = [tokens for _, tokens in record["arrivals"]]
    return record["tokens"] * sum(counts[1:]) / sum(counts) if counts else 0.0


def decode_tps(record: Record) -> float | None:
    """Tokens after the first arrival over the time after it; None of a request without such tokens."""
    seconds = decode_seconds(record)
    return decode_tokens(record) / seconds if seconds > 0 else None


def user_tps(record: Record) -> float | None:
    """What one user gets: all tokens of a request over all its time, the wait for the first included."""
    return record["tokens"] / record["seconds"] if record["seconds"] > 0 else None


def summary_of(records: Sequence[Record]) -> dict[str, Any]:
    """Figures of one arm's requests. Those that failed are counted and left out, cold ones are told apart."""
    done = [r for r in records if r["error"] is None and r["tokens"] > 0]
    warm = [r for r in done if not r["cold"]]
    seconds = sum(map(decode_seconds, warm))
    user = [speed for r in warm if (speed := user_tps(r)) is not None]
    out: dict[str, Any] = {
        "requests": len(records),
        "failed": sum(r["error"] is not None for r in records),
        "cold": [{"ttft": r["ttft"], "tps": decode_tps(r)} for r in done if r["cold"]],
        "tokens": sum(r["tokens"] for r in warm),
        "raw_tps": sum(map(decode_tokens, warm)) / seconds if seconds > 0 else None,
        # nine users of ten get at least the P90 speed, so it is the slow end
        "user_tps": {"p50": percentile(user, 50), "p90": percentile(user, 10)},
        "ttft": percentiles(r["ttft"] for r in warm),
        "itl_burst": percentiles(gap for r in warm for gap in burst_gaps(r["arrivals"])),
        "itl_smoothed": percentiles(gap for r in warm for gap in smoothed_gaps(r["arrivals"])),
        "prompt_tokens": sum(r["prompt_tokens"] for r in warm),
        "cached_tokens": sum(r["cached_tokens"] or 0 for r in warm),
        "loops": sum(r["loop"] for r in done),
    }
    finished = [r["tokens"] for r in warm if r["finish_reason"] == "stop"]
    out["finished"] = len(finished)
    out["tokens_per_finished"] = sum(finished) / len(finished) if finished else None
    return {**out, **acceptance_of([r for r in warm if "rounds" in r])}


def acceptance_of(records: Sequence[Record]) -> dict[str, Any]:
    """Acceptance (accepted over drafted), mean accepted length (tokens a round that drafted), both by the counts.

    position k: of the rounds that drafted k, the share that kept it. histogram: rounds by the tokens they committed.
    """
    total = {name: sum(r[name] for r in records) for name in ("rounds", "plain_rounds", "drafted", "accepted")}
    lengths = [n for r in records for n in r["acceptance_lengths"]]
    sizes: dict[int, int] = {}
    for record in records:
        for rows, count in record["block_sizes"].items():
            sizes[int(rows)] = sizes.get(int(rows), 0) + count
    tried = [sum(count for rows, count in sizes.items() if rows > k) for k in range(1, POSITIONS)]
    kept = [
        sum(r["accepted_by_position"][k] for r in records if k < len(r["accepted_by_position"]))
        for k in range(POSITIONS - 1)
    ]
    rounds = total["rounds"] + total["plain_rounds"]
    return {
        **total,
        "acceptance": total["accepted"] / total["drafted"] if total["drafted"] else None,
        "mean_accepted_length": sum(lengths) / len(lengths) if lengths else None,
        "acceptance_by_position": [k / t for k, t in zip(kept, tried, strict=True) if t],
        "histogram": {str(n): lengths.count(n) for n in sorted(set(lengths))},
        "block_sizes": {str(rows): sizes[rows] for rows in sorted(sizes)},
        "lookup_rounds": sum(r["lookup_rounds"] for r in records),
        "host_reads_per_round": sum(r["host_reads"] for r in records) / rounds if rounds else None,
    }


def has_loop(tokens: Sequence[Any]) -> bool:
    """Does the text end in one piece of up to 64 tokens again and again, four times or more and 32 tokens in all?"""
    if len(tokens) < LOOP_TOKENS:
        return False
    for period in range(1, min(LOOP_PERIOD, len(tokens) // LOOP_TIMES) + 1):
        tail = tokens[-max(LOOP_TIMES * period, LOOP_TOKENS) :]
        if all(tail[i] == tail[i - period] for i in range(period, len(tail))):
            return True
    return False


def number(value: float | None, form: str) -> str:
    """A figure for a table; "-" where there is none."""
    return "-" if value is None else format(value, form)


def record_hash(values: Any) -> str:
    """Sixteen hex digits of what can be written as JSON."""
    return hashlib.sha256(json.dumps(values, sort_keys=True, default=str).encode()).hexdigest()[:16]
