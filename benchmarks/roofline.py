"""What a curve of round times predicts, what memory bandwidth would allow, and what others measured on Macs.

A plain step reads every weight it uses once, and the keys and values of the text. A round reads them once too, however
many rows it verifies, and the drafter; so no round is faster than its bytes over the bandwidth. Verifying rows of a
target with experts reads more of them than one token does: there the ceiling with a drafter is higher than can be had.
"""

import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_dflash.benchmarks.schema import said
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear

from mlx_dflash import memory
from mlx_dflash.drafters import DFlashDrafter
from mlx_dflash.targets import Target

ARRAY = 2**30  # bytes that are read to measure bandwidth, or CACHES times the last-level cache if that is more
CACHES = 4
WIDTH = 4096  # of the array as a matrix

TAUS = (1.5, 2, 3, 4, 5, 6, 8)  # mean accepted lengths for which speeds are predicted
CHANCES = tuple(round(0.5 + 0.05 * k, 2) for k in range(10))  # of a draft to be kept

# Other people's figures. None was measured with this package.
SOURCE = "published measurements and figures of others, stock MLX 0.32 at 4 bits; not measured with this package"
PUBLISHED: dict[str, Any] = {
    "source": SOURCE,
    "machines": [
        {
            "machine": "M4 Max",
            "bandwidth_gb_s": 546,
            "floor_ms": {"Muse 30B": 27.3, "Qwen3.5-27B": 26.0, "gemma-4-31B": 32.0, "35B-A3B": 3.0},
        },
        {
            "machine": "M5 Max",
            "bandwidth_gb_s": 614,
            "floor_ms": {"Muse 30B": 24.3, "Qwen3.5-27B": 23.5, "gemma-4-31B": 28.0, "35B-A3B": 2.7},
        },
    ],
    "bandwidth_reached": [0.80, 0.87],
    "moe_step_ms": 7.0,
    "speeds": [
        {"machine": "M5 Max", "target": "Muse 30B", "plain_tps": 26.6, "dflash_tps": 50.2, "speed_up": 1.8},
        {"machine": "M4 Max", "target": "Muse 30B", "speed_up": 1.5},
        {"machine": "M5 Max", "target": "Qwen3.5-27B", "plain_tps": 33.6, "dflash_tps": 79, "tau": 10},
    ],
    "verify_ratio": [
        {"machine": "M5 Max, 70B dense", "rows": {5: [1.42], 8: [2.2], 12: [3.2], 16: [3.9]}},
        {"machine": "M5 Max, 27B dense", "rows": {4: [1.28], 8: [2.5]}},
        {"machine": "M3 Max, one layer", "rows": {4: [1.28], 8: [2.5], 12: [3.9], 16: [3.9]}},
        {"machine": "M4 Pro, layers", "rows": {4: [1.1, 1.6], 8: [1.7, 2.7]}},
    ],
}


def bandwidth(repeats: int = 5) -> dict[str, Any]:
    """Bytes a second at which one large array is read, the fastest of three ways, each the median of its repeats."""
    cache = cache_bytes()
    rows = -(-max(ARRAY, CACHES * (cache or 0)) // (4 * WIDTH))
    array, vector = mx.ones((rows, WIDTH), mx.float32), mx.ones((1, rows), mx.float32)
    mx.eval(array, vector)
    ways: dict[str, Callable[[], mx.array]] = {
        "sum": array.sum,
        "largest": array.max,
        "vector times matrix": lambda: vector @ array,
    }
    size = array.nbytes
    speeds = {name: size / statistics.median(seconds_of(way, repeats)) for name, way in ways.items()}
    best = max(speeds, key=speeds.__getitem__)
    return {
        "bytes_per_second": speeds[best],
        "way": best,
        "ways": speeds,
        "array_bytes": size,
        "cache_bytes": cache,
        "repeats": repeats,
    }


def seconds_of(work: Callable[[], mx.array], repeats: int) -> list[float]:
    """The first run, which compiles, is left out."""
    times = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        mx.eval(work())
        times.append(time.perf_counter() - start)
    return times[1:]


def cache_bytes() -> int | None:
    """Bytes of the largest cache that the system tells of; None where it tells of none."""
    sizes = [
        int(text)
        for name in ("hw.l3cachesize", "hw.perflevel0.l2cachesize")
        if (text := said("sysctl", "-n", name).strip()).isdigit()
    ]
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = path.read_text().strip()
        sizes.append(int(text[:-1]) * {"K": 2**10, "M": 2**20}[text[-1]])
    return max(sizes, default=None)


def token_bytes(target: Target, context: int) -> int:
    """Bytes that a plain step reads: weights, and keys, values and states at `context` tokens."""
    kept = memory.layer_memory(memory.one_token(target))
    return weights_read(target) + sum(layer.held(context) for layer in kept)


def weights_read(target: Target) -> int:
    """Bytes of weights for one token: of an embedding table one row, unless it is the head too; of experts the chosen
    ones."""
    config = target.config
    chosen = config.get("num_experts_per_tok") or config.get("top_k_experts")
    unread, head = 0, head_of(target)
    for _, module in target.model.named_modules():
        size = memory.weight_bytes(module)
        if isinstance(module, nn.Embedding | nn.QuantizedEmbedding) and module is not head:
            unread += size - size // module.weight.shape[0]
        elif isinstance(module, SwitchLinear | QuantizedSwitchLinear) and chosen:
            unread += size - size * int(chosen) // module.num_experts
    return memory.weight_bytes(target.model) - unread


def head_of(target: Target) -> nn.Module:
    """The module that makes logits: the model's own head, else the embedding table."""
    modules = dict(target.model.named_modules())
    ends = [name for end in ("lm_head", "embed_tokens") for name in modules if name.split(".")[-1] == end]
    return modules[ends[0]]


def draft_bytes(drafter: DFlashDrafter, context: int) -> int:
    """Bytes that a draft pass reads: its weights, the head, which is the target's unless it has one, and its rows."""
    config, own = drafter.config, drafter.config.vocabulary
    size = sum(v.nbytes for name, v in tree_flatten(drafter.model.parameters()) if not name.startswith("embed_tokens"))
    if own is None or not own.own_head:
        size += memory.weight_bytes(head_of(drafter.target))
    row = 2 * config.num_key_value_heads * config.head_dim * memory.item_size(drafter.target)
    reaches = [layer.self_attn.sees.behind for layer in drafter.model.layers]
    return size + sum(row * (context if reach is None else min(context, reach)) for reach in reaches)


def ceilings(speed: float, target: int, drafter: int, plain: float) -> dict[str, Any]:
    """speed: bytes a second. target, drafter: bytes a pass. plain: measured seconds of a plain step."""
    ceiling = speed / target
    return {
        "target_bytes": target,
        "drafter_bytes": drafter,
        "plain_ceiling_tps": ceiling,
        "dflash_ceiling_tps": {tau: speed * tau / (target + drafter) for tau in TAUS},
        "plain_tps": 1 / plain,
        "share_reached": 1 / plain / ceiling,
    }


def predicted(plain: float, rounds: Mapping[int, float]) -> dict[str, Any]:
    """What seconds of a plain step and of rounds, by rows, amount to."""
    return {
        "speed_up": speed_ups(plain, rounds),
        "break_even_tau": {rows: seconds / plain for rows, seconds in rounds.items()},
        "recommended": {chance: recommended(plain, rounds, chance) for chance in CHANCES},
    }


def speed_ups(plain: float, rounds: Mapping[int, float]) -> dict[int, dict[float, float]]:
    """Over plain decoding, by rows and by mean accepted length, which can't exceed the rows."""
    return {rows: {tau: tau * plain / t for tau in TAUS if tau <= rows} for rows, t in rounds.items()}


def recommended(plain: float, rounds: Mapping[int, float], chance: float) -> dict[str, Any]:
    """The rows with the most tokens a second if every draft is kept with `chance` once all before it were; 1: plain."""
    speeds = {1: 1 / plain} | {rows: sum(chance**k for k in range(rows)) / t for rows, t in rounds.items()}
    best = max(speeds, key=speeds.__getitem__)
    return {"rows": best, "tokens_per_second": speeds[best], "speed_up": speeds[best] * plain}


def lines(found: dict[str, Any]) -> list[str]:
    """A printed table of `ceilings` by context."""
    first = next(iter(found.values()))
    taus = "".join(f"{'tau ' + format(tau, 'g'):>9}" for tau in first["dflash_ceiling_tps"])
    out = [f"{'context':>8}{'target MB':>11}{'drafter MB':>12}{'plain':>9}{'ceiling':>9}{'reached':>9}{taus}"]
    for context, row in found.items():
        speeds = "".join(f"{value:>9.1f}" for value in row["dflash_ceiling_tps"].values())
        out.append(
            f"{context:>8}{row['target_bytes'] / 1e6:>11.1f}{row['drafter_bytes'] / 1e6:>12.1f}{row['plain_tps']:>9.2f}"
            f"{row['plain_ceiling_tps']:>9.2f}{row['share_reached']:>9.0%}{speeds}"
        )
    return out


def published_lines() -> list[str]:
    """Other people's figures, said to be theirs."""
    low, high = PUBLISHED["bandwidth_reached"]
    out = [f"other people's figures ({SOURCE}):"]
    for entry in PUBLISHED["machines"]:
        floors = ", ".join(f"{name} {ms:g}" for name, ms in entry["floor_ms"].items())
        out.append(f"  {entry['machine']}: {entry['bandwidth_gb_s']} GB/s; least ms a plain token: {floors}")
    out.append(
        f"  decoding reaches {low:.0%} to {high:.0%} of the bandwidth; a step of 35B-A3B, which overheads bound, takes "
        f"about {PUBLISHED['moe_step_ms']:g} ms"
    )
    for entry in PUBLISHED["speeds"]:
        parts = [f"{entry['plain_tps']:g} -> {entry['dflash_tps']:g} tokens/s"] if "plain_tps" in entry else []
        parts += [f"{entry['speed_up']:g} x"] if "speed_up" in entry else []
        parts += [f"tau {entry['tau']:g}"] if "tau" in entry else []
        out.append(f"  {entry['target']} with DFlash on {entry['machine']}: {', '.join(parts)}")
    for entry in PUBLISHED["verify_ratio"]:
        ratios = ", ".join(f"{n} rows {'-'.join(map(str, span))}" for n, span in entry["rows"].items())
        out.append(f"  verify time over one row's, {entry['machine']}: {ratios}")
    return out
