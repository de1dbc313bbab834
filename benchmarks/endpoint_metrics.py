"""What a server itself says of its drafting, in our terms, and the figures of a level of concurrency.

Acceptance is accepted over drafted tokens, mean accepted length the tokens that a verify pass commits, the target's own
among them. Each server counts in its own way; the definition that was used goes into the result. Counters are of the
whole server: requests of others while a level runs are among them.
"""

import json
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from http.client import HTTPException
from itertools import pairwise
from typing import Any

from mlx_dflash.benchmarks.endpoint_client import Server, message_in
from mlx_dflash.benchmarks.metrics import Record, acceptance_of, summary_of
from mlx_dflash.benchmarks.schema import Result

from mlx_dflash.errors import RequestError

VLLM, SGLANG, LLAMA, MLX = "vLLM", "SGLang", "llama.cpp", "mlx_lm.server"
PREFIXES = {"vllm:": VLLM, "sglang:": SGLANG, "llamacpp:": LLAMA}
OWNERS = {"vllm": VLLM, "sglang": SGLANG, "llamacpp": LLAMA}
TOP_K_OFF = {VLLM: -1, SGLANG: -1}  # what they call off; others call 0 so
FINGERPRINT = re.compile(r"\d+\.\d+[^-]*-\d+\.\d+[^-]*-(macOS|Darwin|Linux|Windows)")  # mlx-lm, mlx, platform

DRAFTS, DRAFTED = "vllm:spec_decode_num_drafts", "vllm:spec_decode_num_draft_tokens"
ACCEPTED, BY_POSITION = "vllm:spec_decode_num_accepted_tokens", "vllm:spec_decode_num_accepted_tokens_per_pos"
LENGTH, RATE = "sglang:spec_accept_length", "sglang:spec_accept_rate"

DEFINITIONS = {
    VLLM: f"differences of counters over the level: acceptance = {ACCEPTED} / {DRAFTED}, mean accepted length = "
    f"1 + {ACCEPTED} / {DRAFTS}, position k = {BY_POSITION}[k] / {DRAFTS}",
    SGLANG: f"gauges of the server's last batches, no average over the level: mean accepted length = {LENGTH}, "
    f"the target's own token among them; acceptance = {RATE}; read after the level",
    LLAMA: "acceptance = draft_n_accepted / draft_n of the requests' own timings; verify passes are not counted, so "
    "there is no mean accepted length",
}

SAMPLE = re.compile(r"([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{(.*)\})?\s+(\S+)")
LABEL = re.compile(r'([a-zA-Z_]\w*)="((?:[^"\\]|\\.)*)"')
GROWTH, HALF = 0.10, 0.5  # of all users together from level to level; of one user's speed at the first level


@dataclass
class Exposition:
    """A Prometheus page. samples: name -> (labels, value) of each series; help: the server's own words on a name."""

    samples: dict[str, list[tuple[dict[str, str], float]]] = field(default_factory=dict)
    help: dict[str, str] = field(default_factory=dict)

    def series(self, name: str) -> list[tuple[dict[str, str], float]]:
        """Of a counter with or without the suffix that newer clients add."""
        return self.samples.get(f"{name}_total") or self.samples.get(name) or []

    def total(self, name: str) -> float | None:
        found = self.series(name)
        return sum(value for _, value in found) if found else None

    def mean(self, name: str) -> float | None:
        found = [value for _, value in self.series(name) if value > 0]
        return sum(found) / len(found) if found else None

    def words(self, names: Iterable[str]) -> dict[str, str]:
        both = [n for name in names for n in (name, f"{name}_total")]
        return {name: self.help[name] for name in both if name in self.help}


def parse(text: str) -> Exposition:
    page = Exposition()
    for line in text.splitlines():
        if line.startswith("# HELP "):
            name, _, words = line[7:].partition(" ")
            page.help[name] = words
        elif found := SAMPLE.match(line):
            name, labels, value = found.groups()
            try:
                page.samples.setdefault(name, []).append((dict(LABEL.findall(labels or "")), float(value)))
            except ValueError:
                continue
    return page


def read_page(server: Server) -> Exposition | None:
    """The server's /metrics; None where it has none."""
    try:
        status, text = server.get(f"{server.root}/metrics")
    except (OSError, HTTPException):
        return None
    return parse(text) if status == 200 else None


def known_of(server: Server, model: str | None) -> tuple[str, str | None, int]:
    """The model's name, the kind of server where it shows, and how many models it lists.

    Raises RequestError where nothing answers, or where no model is named and the server names none.
    """
    path = f"{server.path}/models"
    try:
        status, text = server.get(path)
    except (ConnectionResetError, TimeoutError, HTTPException):  # mlx_lm.server without a hub cache just hangs up
        status, text = 0, "no answer"
    except OSError as error:
        raise RequestError(f"nothing answers at {server.url}: {error}") from error
    try:
        models = [m for m in json.loads(text)["data"] if isinstance(m["id"], str)] if status == 200 else []
    except (ValueError, KeyError, TypeError):
        models = []
    if model is None and not models:
        said = server.without_key(message_in(text.encode()))
        raise RequestError(
            f"{server.url}/models names no model (HTTP {status}: {said}); give --model, or --api-key-env"
        )
    return model or models[0]["id"], kind_of(server, models), len(models) if model is None else 0


def kind_of(server: Server, models: Sequence[dict[str, Any]]) -> str | None:
    """Which server it is, by its metrics, its models' owner or llama.cpp's /props; None: not known yet."""
    page = read_page(server)
    for prefix, kind in PREFIXES.items():
        if page is not None and any(name.startswith(prefix) for name in page.samples):
            return kind
    for model in models:
        if model.get("owned_by") in OWNERS:
            return OWNERS[model["owned_by"]]
    props = server.get_json(f"{server.root}/props")
    return LLAMA if isinstance(props, dict) and "default_generation_settings" in props else None


def kind_by(fingerprint: str | None) -> str | None:
    """mlx_lm.server shows itself only by the fingerprint of its chunks: its version, MLX's and the platform."""
    return MLX if fingerprint and FINGERPRINT.match(fingerprint) else None


def nothing(reason: str) -> dict[str, Any]:
    return {"acceptance": None, "mean_accepted_length": None, "reason": reason}


def reading(
    kind: str | None, before: Exposition | None, after: Exposition | None, records: Sequence[Record]
) -> dict[str, Any]:
    """Drafting over a level: acceptance, mean accepted length and counts where known, else the reason why not."""
    if kind == VLLM:
        return of_vllm(before, after)
    if kind == SGLANG:
        return of_sglang(after)
    timed = [r for r in records if "drafted" in r]
    if timed:
        return from_counts(LLAMA, {name: sum(r[name] for r in timed) for name in ("drafted", "accepted")})
    if kind == LLAMA:
        return nothing("the timings of the requests hold no draft_n: the server ran without a draft model")
    if kind == MLX:
        return nothing("mlx_lm.server publishes nothing about its drafts")
    return nothing("unknown server: no counters or timings that are known here")


def of_vllm(before: Exposition | None, after: Exposition | None) -> dict[str, Any]:
    if before is None or after is None:
        return nothing("the server's /metrics did not answer")
    if after.total(DRAFTS) is None:
        return nothing(f"/metrics has no {DRAFTS}: the server runs without speculative decoding")
    names = {"drafts": DRAFTS, "drafted": DRAFTED, "accepted": ACCEPTED}
    # a counter that is not there before its first event stands at 0
    counts: dict[str, Any] = {
        key: int((after.total(name) or 0) - (before.total(name) or 0)) for key, name in names.items()
    }
    places = [by_position(page) for page in (before, after)]
    counts["accepted_by_position"] = [int(places[1][k] - places[0][k]) for k in sorted(places[1])]
    if min(counts["drafts"], counts["drafted"], counts["accepted"], *counts["accepted_by_position"]) < 0:
        return nothing("the counters fell: the server was started anew within the level")
    return from_counts(VLLM, counts) | {"words": after.words([*names.values(), BY_POSITION])}


def by_position(page: Exposition) -> Counter[int]:
    found: Counter[int] = Counter()
    for labels, value in page.series(BY_POSITION):
        if labels.get("position", "").isdigit():
            found[int(labels["position"])] += int(value)
    return found


def from_counts(kind: str, counts: dict[str, Any]) -> dict[str, Any]:
    drafts, drafted, accepted = counts.get("drafts"), counts["drafted"], counts["accepted"]
    if not drafted:
        return nothing("no token was drafted")
    places = counts.get("accepted_by_position") or []
    return {
        "acceptance": accepted / drafted,
        "mean_accepted_length": 1 + accepted / drafts if drafts else None,
        "acceptance_by_position": [n / drafts for n in places] if drafts else [],
        "counts": counts,
        "definition": DEFINITIONS[kind],
        "reason": None,
    }


def of_sglang(after: Exposition | None) -> dict[str, Any]:
    if after is None:
        return nothing("the server's /metrics did not answer; SGLang has it with --enable-metrics")
    length, rate = after.mean(LENGTH), after.mean(RATE)
    if length is None and rate is None:
        return nothing(f"{LENGTH} is 0 or missing: the server runs without speculative decoding")
    found = {"acceptance": rate, "mean_accepted_length": length, "definition": DEFINITIONS[SGLANG], "reason": None}
    return found | {"words": after.words([LENGTH, RATE])}


def merged(old: dict[str, Any] | None, new: dict[str, Any]) -> dict[str, Any]:
    """The reading of a level that was measured in two sittings: counters add up, of gauges the last holds."""
    if old is None or "drafts" not in new.get("counts", {}) or "drafts" not in old.get("counts", {}):
        return new
    first, second = old["counts"], new["counts"]
    counts: dict[str, Any] = {name: first[name] + second[name] for name in ("drafts", "drafted", "accepted")}
    places = [first["accepted_by_position"], second["accepted_by_position"]]
    size = max(map(len, places))
    counts["accepted_by_position"] = [sum(p[k] for p in places if k < len(p)) for k in range(size)]
    return new | from_counts(VLLM, counts)


def level_of(records: Sequence[Record], drafting: dict[str, Any]) -> dict[str, Any]:
    """Figures of the requests of one level. drafting: its `reading`.

    aggregate_tps: all tokens that came, those of failed requests among them, over the time in which a request ran; a
    failed request runs up to its last chunk.
    """
    found = summary_of(records)
    for name in acceptance_of([]):  # a client does not see rounds
        found.pop(name, None)
    spans = [(r["began"], r["began"] + (r["seconds"] if r["error"] is None else last_arrival(r))) for r in records]
    busy, _ = overlap(spans)
    _, peak = overlap((r["began"], r["began"] + r["seconds"]) for r in records)
    return {
        **found,
        "aggregate_tps": sum(r["tokens"] for r in records) / busy if busy > 0 else None,
        "busy_seconds": busy,
        "in_flight": {"most": peak, "mean": sum(end - start for start, end in spans) / busy if busy > 0 else None},
        "finish_reasons": dict(Counter(str(r["finish_reason"]) for r in records if r["error"] is None)),
        "errors": dict(Counter(r["error"].split(":")[0] for r in records if r["error"] is not None)),
        **{name: drafting.get(name) for name in ("acceptance", "mean_accepted_length", "acceptance_by_position")},
    }


def last_arrival(record: Record) -> float:
    return float(record["arrivals"][-1][0]) if record["arrivals"] else 0.0


def overlap(spans: Iterable[tuple[float, float]]) -> tuple[float, int]:
    """Seconds in which at least one span runs, and how many ran at once at most."""
    edges = sorted((at, step) for start, end in spans if end > start for at, step in ((start, 1), (end, -1)))
    busy, running, peak, since = 0.0, 0, 0, 0.0
    for at, step in edges:
        if running:
            busy += at - since
        running, since = running + step, at
        peak = max(peak, running)
    return busy, peak


def turning_points(levels: dict[int, dict[str, Any]]) -> dict[str, Any]:
    """Where more users stop paying; None: at no level that was measured.

    little_growth: the first level whose tokens/s of all users grow by less than 10 % over the level before; half_speed:
    the first at which a user's speed (P50) is under half of that at the lowest level.
    """
    known = [n for n in sorted(levels) if levels[n]["aggregate_tps"] and levels[n]["user_tps"]["p50"]]
    growth = {n: levels[n]["aggregate_tps"] / levels[before]["aggregate_tps"] - 1 for before, n in pairwise(known)}
    user = {n: levels[n]["user_tps"]["p50"] / levels[known[0]]["user_tps"]["p50"] for n in known}
    return {
        "growth": {str(n): value for n, value in growth.items()},
        "user_speed": {str(n): value for n, value in user.items()},
        "little_growth": next((n for n, value in growth.items() if value < GROWTH), None),
        "half_speed": next((n for n, value in user.items() if value < HALF), None),
    }


def arm_of(users: int) -> str:
    return f"{users} at once"


def marks_of(result: Result) -> list[str]:
    """What makes a run doubtful, a line each."""
    setup, machine, summary = result["setup"], result["machine"], result["summary"]
    warm = [r for r in result["requests"] if not r["cold"]]
    good = [r for r in warm if r["error"] is None]
    marks = [f"the first request, cold, failed ({r['error']})" for r in result["requests"] if r["cold"] and r["error"]]
    marks += [mark for users in setup["concurrency"] for mark in level_marks(users, summary["arms"][arm_of(users)])]
    if any(str(r["error"]).startswith(("HTTP 400", "HTTP 422")) for r in warm) and not setup["send_only_openai"]:
        marks.append("the server refuses requests: it may be strict about fields; try --send-only-openai")
    marks += [*count_marks(good), *cache_marks(good)]
    if summary["server"]["kind"] == MLX and "seed" in setup["sent"] and max(setup["concurrency"]) > 1:
        marks.append("mlx_lm.server batches no requests that have a seed; --seed none lets it")
    if (listed := summary["server"]["listed_models"]) > 1:
        marks.append(f"the server lists {listed} models, of which the first was taken (see --model)")
    if loops := sum(r["loop"] for r in good):
        marks.append(f"loops: {loops} texts end in a loop, which is easy to draft")
    if machine["low_power_mode"] or machine["power_source"] == "battery":
        marks.append("the client's system saves power or runs on battery")
    if not result["finished"]:
        marks.append("stopped before its end; run it again to go on")
    return marks


def level_marks(users: int, level: dict[str, Any]) -> list[str]:
    marks, count, most = [], level["requests"], level["in_flight"]["most"]
    if level["failed"]:
        kinds = ", ".join(f"{kind} {n}" for kind, n in level["errors"].items())
        kept = "its figures leave them out, but for the tokens of all users together"
        marks.append(f"{arm_of(users)}: {level['failed']} of {count} requests failed ({kinds}); {kept}")
    if count and most < users:
        marks.append(f"{arm_of(users)}: no more than {most} of its {count} requests ran at once")
    return marks


def count_marks(records: Sequence[Record]) -> list[str]:
    """How far tokens were counted, and whether a chunk is one."""
    marks = []
    if by_chunks := sum(r["tokens_from"] == "chunks" for r in records):
        marks.append(f"tokens counted by chunks in {by_chunks} of {len(records)} requests: the server gives no usage")
    apart = [r for r in records if abs(r["tokens"] - r["chunks"]) > 1]  # one: a stop token has no text
    if apart:
        tokens, chunks = (sum(r[name] for r in apart) for name in ("tokens", "chunks"))
        several = "hold several tokens" if tokens > chunks else "are more than tokens"
        where = f"{len(apart)} of {len(records)} requests, {tokens} tokens in {chunks} chunks"
        marks.append(f"chunks {several} ({where}): gaps between tokens are by chunk")
    return marks


def cache_marks(records: Sequence[Record]) -> list[str]:
    """Whether the server knew prompts before, which brings first tokens early."""
    cached = [r["cached_tokens"] for r in records]
    if found := sum(n or 0 for n in cached):
        share = found / max(sum(r["prompt_tokens"] for r in records), 1)
        return [f"the server had {share:.0%} of the prompts' tokens in its cache: first tokens come early"]
    if None in cached and len(records) > len({r["id"] for r in records}):
        unknown = "the server doesn't tell what of them it had in its cache"
        return [f"prompts are sent again at every level and {unknown}: first tokens of later levels may come early"]
    return []
