"""What verifying 1 to 16 rows costs on this machine, at real layer shapes with random weights."""

import statistics
import time
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..targets import Target
from .quantized import random_layers

ROWS = range(1, 17)
CONTEXT = 256  # tokens in the cache
# layers, hidden, inner, heads, KV heads, head_dim: two layers of a 27B on Metal; on a CPU, which runs quantized layers
# very slowly, one of SmolLM2-135M.
SHAPES = {"gpu": (2, 5120, 17408, 40, 8, 128), "cpu": (1, 576, 1536, 9, 3, 64)}
PRECISIONS = ("4-bit", "8-bit", "bf16")
BUDGET = 10.0  # seconds a precision


def measure_all(budget: float = BUDGET) -> dict[str, Any]:
    """For each precision the milliseconds of 1 to 16 rows, and their ratios to one row."""
    kind = "cpu" if mx.default_device() == mx.Device(mx.cpu) else "gpu"
    names = ("layers", "hidden_size", "intermediate_size", "heads", "kv_heads", "head_dim")
    out: dict[str, Any] = {"shape": dict(zip(names, SHAPES[kind], strict=True)), "context": CONTEXT}
    for precision in PRECISIONS:
        target = random_layers(*SHAPES[kind], vocab=512)
        target.model.set_dtype(mx.bfloat16)
        if precision != "bf16":
            nn.quantize(target.model, group_size=64, bits=int(precision[0]))
        mx.eval(target.model.parameters())
        times = measure(target, budget)
        one = times.get(1)
        out[precision] = {
            "milliseconds": {rows: 1000 * t for rows, t in times.items()},
            "ratio": {rows: t / one for rows, t in times.items()} if one else {},
        }
    return out


def measure(target: Target, budget: float) -> dict[int, float]:
    """Median seconds of a pass for each number of rows, in interleaved turns until the budget is spent.

    The first turn is always finished, and warms up; it counts only where there is no other.
    """
    cache = target.make_cache()
    rows = mx.zeros((1, target.config["num_key_value_heads"], CONTEXT, target.full_head_dim), mx.bfloat16)
    for layer in cache.layers:
        layer.update_and_fetch(rows, rows)  # type: ignore[attr-defined]
    mx.eval(cache.arrays())
    found: dict[int, list[float]] = {count: [] for count in ROWS}
    end = time.perf_counter() + budget
    turn = 0
    while turn == 0 or time.perf_counter() < end:
        for count in ROWS:
            if turn and time.perf_counter() > end:
                break
            cache.begin()
            start = time.perf_counter()
            mx.eval(target.forward(mx.zeros((1, count), mx.uint32), cache)[0])
            found[count].append(time.perf_counter() - start)
            cache.abort()
        turn += 1
    return {count: statistics.median(times[1:] or times) for count, times in found.items()}
