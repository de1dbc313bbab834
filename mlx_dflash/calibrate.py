"""Measures what rounds cost on this machine with this pair, and keeps the curves in the cache folder.

The rounds are the loop's own, on a text of random ids, aborted instead of committed. A few seconds at first use; later
runs begin with what the last one knew.
"""

import hashlib
import json
import logging
import math
import platform
import random
import statistics
import time
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path

import mlx.core as mx

from . import costs, hub
from .accept import Sampler
from .costs import DRAFTER, Costs, Curve, Kind
from .decode import Decoder, State
from .download import say
from .drafters import DFlashDrafter
from .lookup import History, Lookup
from .stats import Observer
from .targets import Target
from .width import START_ROWS, fixed

log = logging.getLogger(__name__)

SECONDS = 3.0  # for all curves of a pair; a slow machine measures fewer numbers of rows, and fills in between
REPEATS = 3
PLAIN_ROUNDS = 6
PROMPT = 48  # tokens of context while measuring


def costs_of(target: Target, drafter: DFlashDrafter | None, lookup: Lookup | None) -> Costs:
    """The pair's costs: of this process, else of an earlier one, else measured now."""
    name = key(target, drafter)
    known = target.costs
    if name not in known:
        path = folder() / f"{name}.json"
        wanted = [s for s, given in ((DRAFTER, drafter), (Lookup.name, lookup)) if given is not None]
        stored = costs.load(path)
        if stored is None or any(set(wanted) - set(curve.sources) for curve in stored.curves.values()):
            stored = measure(target, drafter, lookup)
            keep(stored, path)
        stored.path = path
        known[name] = stored
    return known[name]


def remember(known: Costs, context: int) -> None:
    """Keep what a run learned, as the curve of its context, for later processes."""
    known.settle(context)
    if known.path is not None:
        keep(known, known.path)


def keep(known: Costs, path: Path) -> None:
    """A cache folder that can't be written costs a measurement each time, no more."""
    try:
        costs.save(known, path)
    except OSError as e:
        log.info("could not keep the measured costs in %s: %s", path, e)


def folder() -> Path:
    return hub.cache_folder() / "costs"


def key(target: Target, drafter: DFlashDrafter | None) -> str:
    """Names the machine, MLX, and both models by their configs, quantization included."""
    device = mx.device_info() if mx.metal.is_available() else {}
    facts = {
        "machine": [platform.machine(), device.get("device_name", platform.processor()), str(mx.default_device())],
        "mlx": version("mlx"),
        "target": [target.config, target.name],
        "drafter": None if drafter is None else [getattr(drafter, "name", ""), repr(getattr(drafter, "config", None))],
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()[:16]


def measure(target: Target, drafter: DFlashDrafter | None, lookup: Lookup | None, seconds: float = SECONDS) -> Costs:
    """Time plain rounds, then rounds of every number of rows, the likely ones first, until `seconds` are spent."""
    say("measuring what a round costs on this machine with this pair, once, some seconds ...")
    half = random.Random(0).sample(range(target.vocab_size), min(PROMPT, target.vocab_size) // 2)
    context = None if drafter is None else drafter.make_context()
    state = State(half + half, target.make_cache(), context)
    history = None if lookup is None else History(half + half)  # a text of its own, whose end has a match
    decoder = Decoder(target, drafter, state, fixed(1), Sampler(), lambda tokens: None, Observer(), history)
    stamps = [time.perf_counter() for _ in decoder.run(PLAIN_ROUNDS)]
    plain = statistics.median(b - a for a, b in pairwise(stamps))

    most = {
        DRAFTER: 0 if drafter is None else drafter.block_size,
        Lookup.name: 0 if lookup is None else lookup.block_size,
    }
    kinds = [(source, rows) for source, block in most.items() for rows in order(block)]
    kinds.sort(key=lambda kind: order(most[kind[0]]).index(kind[1]))
    times: dict[Kind, list[float]] = {}
    needed = {(source, order(block)[0]) for source, block in most.items() if block > 1}
    started = time.perf_counter()
    for _ in range(REPEATS):
        for kind in kinds:
            if time.perf_counter() - started < seconds or (kind in needed and kind not in times):
                times.setdefault(kind, []).append(timed_round(decoder, kind))
    sources: dict[str, dict[int, float]] = {}
    for source, rows in sorted(times, reverse=True):  # fewer rows never cost more: what says otherwise is noise
        points = sources.setdefault(source, {})
        points[rows] = min(statistics.median(times[source, rows]), points.get(min(points, default=0), math.inf))
    return Costs({0: Curve(plain, sources)})


def order(block: int) -> list[int]:
    """Rows from 2 to the block, those first whose costs say most of the others'."""
    first = [n for n in (min(START_ROWS, block), block, 8, 3, 12, 6, 2, 4) if 1 < n <= block]
    return list(dict.fromkeys([*first, *range(2, block + 1)]))


def timed_round(decoder: Decoder, kind: Kind) -> float:
    """Seconds of one round whose drafts are thrown away."""
    anchor = mx.array(decoder.state.tokens[-1:], mx.uint32)
    started = time.perf_counter()
    decoder.read(decoder.launch(anchor, kind))
    seconds = time.perf_counter() - started
    decoder.state.cache.abort()
    return seconds
