"""How much memory a pair takes, told before its weights are read, and whether the machine has it.

Works on opened targets and drafters, whose arrays are lazy: sizes come from shapes, and one lazy token tells what each
layer's cache keeps for a position. Or on the registry's figures, before anything is downloaded.
"""

import logging
import os
from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from .cache import STEP, RecurrentState, SlidingKV, TargetCache
from .drafters import DFlashDrafter
from .errors import RequestError
from .registry import Pair
from .targets import Target

log = logging.getLogger(__name__)

COMFORT = 0.9  # of the recommended working set; beyond it macOS begins to compress and swap
USUAL_CONTEXT = 8192  # tokens for which fit is judged unless another number is asked for


@dataclass(frozen=True)
class LayerMemory:
    """What one layer's cache keeps. row: bytes a position; window: positions kept, None: all; fixed: bytes in all."""

    row: int
    window: int | None = None
    fixed: int = 0

    def held(self, context: int) -> int:
        """Bytes of the rows that must be kept at `context` tokens."""
        return self.fixed + self.row * (context if self.window is None else min(context, self.window))

    def allocated(self, context: int, step: int) -> int:
        """Bytes of the buffers: whole steps of rows, and a sliding window's room to append a chunk and rewind it."""
        rows = -(-context // STEP) * STEP
        if self.window is not None:
            room = -(-(min(step, context) + STEP) // STEP) * STEP
            rows = min(context, self.window - 1) + room if context > step else room
        return self.fixed + self.row * rows


@dataclass(frozen=True)
class Estimate:
    """Bytes. target, drafter: weights. kv: the target's cache; context_kv: the drafter's. work: what a pass needs
    beside them at its peak. limit: what the machine has for it; limit_name says what that is."""

    context: int
    target: int
    drafter: int
    kv: int
    context_kv: int
    work: int
    limit: int
    limit_name: str

    @property
    def peak(self) -> int:
        return self.target + self.drafter + self.kv + self.context_kv + self.work

    @property
    def fits(self) -> bool:
        return self.peak <= COMFORT * self.limit

    def lines(self) -> list[str]:
        parts = [
            ("target weights", self.target),
            ("drafter weights", self.drafter),
            (f"target cache at {self.context} tokens", self.kv),
            ("drafter context", self.context_kv),
            ("working memory", self.work),
            ("peak", self.peak),
            (self.limit_name, self.limit),
        ]
        verdict = "fits" if self.fits else f"does not fit in {COMFORT:.0%} of that: {REMEDY}"
        return [*(f"{name:<36}{gib(size):>12}" for name, size in parts), verdict]

    def warning(self) -> str:
        return (
            f"needs {gib(self.peak)} at {self.context} tokens (weights {gib(self.target + self.drafter)}, caches "
            f"{gib(self.kv + self.context_kv)}), more than {COMFORT:.0%} of the {self.limit_name} of "
            f"{gib(self.limit)}; {REMEDY}"
        )


REMEDY = "use a smaller or more quantized model, a shorter context or --kv-bits, or close other programs"


def gib(size: float) -> str:
    return f"{size / 2**30:.2f} GiB"


def machine_limit() -> tuple[int, str]:
    """What a model may take: Metal's recommended working set, elsewhere the machine's memory."""
    if mx.metal.is_available():
        return int(mx.device_info()["max_recommended_working_set_size"]), "recommended working set"
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), "machine's memory"


def weight_bytes(model: nn.Module) -> int:
    return sum(array.nbytes for _, array in tree_flatten(model.parameters()))


def one_token(target: Target, kv_bits: int | None = None, kv_group_size: int | None = None) -> TargetCache:
    """A cache with one token, lazy and never computed: it tells the shapes that a real one will have."""
    cache = target.make_cache(kv_bits, kv_group_size)
    target.forward(mx.zeros((1, 1), mx.uint32), cache)
    return cache


def layer_memory(cache: TargetCache) -> list[LayerMemory]:
    """What each layer's cache keeps, from a cache of `one_token`."""
    out = []
    for layer in cache.layers:
        arrays = layer.arrays()
        if isinstance(layer, RecurrentState):
            out.append(LayerMemory(0, None, sum(a.nbytes for a in arrays)))
        else:
            row = sum(a.nbytes // a.shape[2] for a in arrays)
            out.append(LayerMemory(row, layer.window if isinstance(layer, SlidingKV) else None))
    return out


def estimate(
    target: Target,
    drafter: DFlashDrafter | None = None,
    context: int = USUAL_CONTEXT,
    step: int = 2048,
    kv_bits: int | None = None,
    kv_group_size: int | None = None,
) -> Estimate:
    """The peak of a generation whose prompt and text have `context` tokens, the prompt forwarded `step` at a time."""
    if context < 1 or step < 1:
        raise RequestError(f"the context and prefill step must be 1 or more, not {context} and {step}")
    cache = one_token(target, kv_bits, kv_group_size)
    layers = layer_memory(cache)
    limit, name = machine_limit()
    return Estimate(
        context=context,
        target=weight_bytes(target.model),
        drafter=weight_bytes(drafter.model) if drafter is not None else 0,
        kv=sum(layer.allocated(context, step) for layer in layers),
        context_kv=drafter_context(drafter, context, step) if drafter is not None else 0,
        work=working(target, drafter, cache, context, step),
        limit=limit,
        limit_name=name,
    )


def item_size(target: Target) -> int:
    """Bytes of one activation."""
    return target.embed(mx.zeros((1, 1), mx.uint32)).itemsize


def drafter_context(drafter: DFlashDrafter, context: int, step: int) -> int:
    """Bytes of the draft layers' keys and values."""
    config, size = drafter.config, item_size(drafter.target)
    row = 2 * config.num_key_value_heads * config.head_dim * size
    reaches = [layer.self_attn.sees.behind for layer in drafter.model.layers]
    rows = (context if reach is None else min(context, reach + step + STEP) for reach in reaches)
    return sum(-(-r // STEP) * STEP * row for r in rows)


def working(target: Target, drafter: DFlashDrafter | None, cache: TargetCache, context: int, step: int) -> int:
    """What the largest prefill chunk needs: hidden states, the MLP's inner rows, features, what gated-delta layers
    hold, and on the CPU the scores of one attention layer, which Metal's fused kernel never writes out."""
    config, size = target.config, item_size(target)
    rows = min(step, context)
    taps = len(drafter.taps) if drafter is not None else 0
    by_layer = int(config.get("hidden_size_per_layer_input") or 0) * target.num_layers  # Gemma 4's small sizes
    work = rows * size * ((6 + 2 * taps) * target.hidden_size + 3 * inner_width(target) + 4 * by_layer)
    work += 2 * target.vocab_size * 16 * size
    held = [layer.now for layer in cache.layers if isinstance(layer, RecurrentState)]
    work += 2 * sum(a.nbytes for m in held for a in (m.conv, m.state) if a is not None)  # before and after a chunk
    delta = rows * size * max((m.conv.shape[2] for m in held if m.conv is not None), default=0)
    if mx.default_device() != mx.Device(mx.cpu):
        return work + 10 * delta
    scores = rows * (context if context <= step else context // step * step) * score_bytes(target, size)
    # Measured. MLX's CPU backend goes row by row, with queries and keys repeated for each value head; or the peak is in
    # attention, where the next layers' inputs are made beside the scores, but for experts, whose sort waits for them.
    return work + max(21 * delta, scores + (3 if config.get("moe_intermediate_size") else 11) * delta)


def inner_width(target: Target) -> int:
    """The most inner values that a layer's MLP makes of a row: all chosen experts, and what stands beside them."""
    chosen = int(target.config.get("num_experts_per_tok") or target.config.get("top_k_experts") or 1)
    widths: dict[str, int] = {}
    for name, module in target.model.named_modules():
        if name.endswith("up_proj"):
            layer, shape = name.partition("layers.")[2].partition(".")[0], module.weight.shape
            widths[layer] = widths.get(layer, 0) + shape[-2] * (chosen if len(shape) == 3 else 1)
    return max(widths.values(), default=0)


def score_bytes(target: Target, size: int) -> int:
    """Bytes of a query and a key in one attention layer's scores and mask; with sinks they are copied twice more."""
    heads = max(target.config.get("num_attention_heads_per_layer") or [target.config["num_attention_heads"]])
    sinks = any(name.endswith("sinks") for name, _ in tree_flatten(target.model.parameters()))
    return int(heads) * size * (3 if sinks else 1) + 2


def of_pair(pair: Pair, context: int) -> Estimate:
    """The same before anything is downloaded, from the registry's figures.

    The target is taken at 4 bits; on MLX's CPU backend, which holds weights in fp32, at 32.
    """
    cpu = mx.default_device() == mx.Device(mx.cpu)
    size, limit = (4 if cpu else 2), machine_limit()
    layers = [LayerMemory(2 * heads * dim * size, window) for n, heads, dim, window in pair.kv for _ in range(n)]
    width, vocabulary = max(d["hidden_size"] for d in pair.layouts), 250_000
    # of all releases of the drafter the one that keeps most
    row = 2 * size * max(d["num_key_value_heads"] * d["head_dim"] * d["num_hidden_layers"] for d in pair.layouts)
    return Estimate(
        context=context,
        target=int(pair.parameters * (4 if cpu else pair.bits / 8)),
        drafter=pair.drafter_parameters * size,
        kv=pair.state_bytes + sum(layer.allocated(context, 2048) for layer in layers),
        context_kv=context * row,
        work=min(2048, context) * size * 28 * width + 32 * vocabulary * size,
        limit=limit[0],
        limit_name=limit[1],
    )


def download_bytes(pair: Pair) -> int:
    """What a first run fetches: the target at 4 bits and the drafter in 16."""
    return int(pair.parameters * pair.bits / 8) + 2 * pair.drafter_parameters


def best_pair(pairs: tuple[Pair, ...]) -> Pair | None:
    """The largest published pair that fits this machine at the usual context; of equals the one listed last, which is
    the later release."""
    fitting = (p for p in reversed(pairs) if of_pair(p, USUAL_CONTEXT).fits)
    return max(fitting, key=lambda p: p.parameters, default=None)


def warn(found: Estimate, what: str) -> None:
    """Say it, before the weights are read, if a model does not fit."""
    if not found.fits:
        log.warning("%s %s", what, found.warning())
