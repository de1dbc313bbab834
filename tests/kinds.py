"""One small target for every kind of cache, so that the tests of the transaction run on all of them.

A new kind is one entry of KINDS and one case of `held`.
"""

import copy
import functools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import mlx.core as mx
from mlx.utils import tree_flatten, tree_unflatten
from mlx_dflash.benchmarks.machine import rows_independent
from mlx_lm.models import llama

from mlx_dflash.cache import FullKV, LayerCache, QuantizedKV, RecurrentState, SlidingKV, TargetCache
from mlx_dflash.targets import Target, private_arrays
from mlx_dflash.targets.dense import Dense
from mlx_dflash.targets.qwen3_next import Qwen3Next

WINDOW = 16
VOCABULARY = 300
FULL, SLIDING = "full_attention", "sliding_attention"


def random_llama(layer_types: Sequence[str], head_dim: int = 16) -> Target:
    config = {
        "model_type": "llama",
        "hidden_size": 48,
        "num_hidden_layers": len(layer_types),
        "layer_types": list(layer_types),
        "sliding_window": WINDOW,
        "intermediate_size": 80,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": head_dim,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "vocab_size": VOCABULARY,
    }
    return random_target(Dense, config, llama.Model, llama.ModelArgs)


def random_hybrid() -> Target:
    """A gated-delta layer and one of full attention."""
    config = {
        "model_type": "qwen3_next",
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "full_attention_interval": 2,
        "intermediate_size": 48,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "linear_key_head_dim": 32,
        "linear_num_key_heads": 1,
        "linear_num_value_heads": 2,
        "linear_value_head_dim": 32,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 24,
        "vocab_size": VOCABULARY,
    }
    return random_target(Qwen3Next, config, *Qwen3Next.model_classes(config))


def random_target(family: type[Target], config: dict[str, Any], module: Any, arguments: Any) -> Target:
    """Random weights under which attention and position matter to the logits."""
    config = family.prepare(config)
    model = module(arguments.from_dict(config))
    parameters = tree_flatten(model.parameters())
    weights = []
    for (name, value), key in zip(parameters, mx.random.split(mx.random.key(0), len(parameters)), strict=True):
        matrix = value.ndim > 1  # norms and gates stay as they are made
        weights.append((name, mx.random.normal(value.shape, key=key) * value.shape[-1] ** -0.5 if matrix else value))
    model.update(tree_unflatten(weights))
    mx.eval(model.parameters(), private_arrays(model))
    return family(model, config)


@dataclass(frozen=True)
class Kind:
    """A target and how its cache is made. tolerance: of rows and logits, where kernels round by the number of rows."""

    target: Target
    kv_bits: int | None = None
    tolerance: float = 1e-4

    def make_cache(self) -> TargetCache:
        return self.target.make_cache(self.kv_bits)

    def forward(self, cache: TargetCache, ids: Sequence[int]) -> mx.array:
        """Logits (1, n, vocab), in whatever transaction is open."""
        logits, _ = self.target.forward(mx.array([ids], mx.uint32), cache)
        mx.eval(logits, cache.arrays())
        return logits

    def feed(self, cache: TargetCache, ids: Sequence[int], chunk: int | None = None) -> TargetCache:
        """Commit `ids`, forwarded in chunks (None: all at once)."""
        for at in range(0, len(ids), chunk or len(ids) or 1):
            part = ids[at : at + (chunk or len(ids))]
            cache.begin()
            self.forward(cache, part)
            cache.commit(len(part))
        return cache

    def built(self, ids: Sequence[int]) -> TargetCache:
        """A fresh cache fed `ids` once."""
        return self.feed(self.make_cache(), ids)

    def same(self, a: mx.array, b: mx.array) -> bool:
        if rows_independent():
            return bool(mx.array_equal(a, b))
        return a.shape == b.shape and bool(mx.allclose(a, b, rtol=self.tolerance, atol=self.tolerance))

    def contents(self, cache: TargetCache) -> "Contents":
        cache.begin()
        following = self.forward(cache, [7, 8])
        cache.abort()
        lengths = [cache.length, *(layer.offset for layer in cache.layers)]
        return Contents(lengths, [held(layer) for layer in cache.layers], following)

    def assert_equal(self, cache: TargetCache, other: "TargetCache | Contents") -> None:
        """Same length, same rows, and the same logits for what follows."""
        a, b = self.contents(cache), other if isinstance(other, Contents) else self.contents(other)
        assert a.lengths == b.lengths and len(set(a.lengths)) == 1
        for layer, (mine, others) in enumerate(zip(a.layers, b.layers, strict=True)):
            equal = [self.same(x, y) for x, y in zip(mine, others, strict=True)]
            assert all(equal), f"layer {layer}: {equal}"
        assert self.same(a.following, b.following)


class Contents(NamedTuple):
    """All that a cache remembers. following: the logits of two tokens that would come next."""

    lengths: list[int]
    layers: list[list[mx.array]]
    following: mx.array


# A value that rounds to another quantized one elsewhere moves by a whole quantization step.
KINDS: dict[str, Callable[[], Kind]] = {
    "full": lambda: Kind(random_llama([FULL, FULL])),
    "sliding": lambda: Kind(random_llama([SLIDING, FULL, SLIDING])),
    "quantized 4": lambda: Kind(random_llama([FULL, FULL], head_dim=64), kv_bits=4, tolerance=0.2),
    "quantized 8": lambda: Kind(random_llama([FULL, FULL], head_dim=32), kv_bits=8, tolerance=0.02),
    "quantized 4, sliding": lambda: Kind(random_llama([SLIDING, FULL], head_dim=32), kv_bits=4, tolerance=0.2),
    "recurrent": lambda: Kind(random_hybrid()),
}


@functools.cache
def kind(name: str) -> Kind:
    return KINDS[name]()


def clone(cache: TargetCache) -> TargetCache:
    """A copy that goes its own way; assigning into an array of one does not change the other."""
    return copy.deepcopy(cache)


def held(layer: LayerCache) -> list[mx.array]:
    """The arrays that decide what follows."""
    if isinstance(layer, RecurrentState):
        return layer.arrays()
    if not layer.arrays() or not layer.offset:
        return []
    if isinstance(layer, QuantizedKV):
        packed = [[x[..., : layer.offset, :] for x in side] for side in (layer.keys, layer.values)]
        if rows_independent():
            return [x for side in packed for x in side]
        return [mx.dequantize(*side, group_size=layer.group_size, bits=layer.bits) for side in packed]
    if isinstance(layer, SlidingKV):
        end, rows = layer.offset - layer.base, min(layer.offset, layer.window - 1)
        return [layer.keys[..., end - rows : end, :], layer.values[..., end - rows : end, :]]
    assert isinstance(layer, FullKV)
    return [layer.keys[..., : layer.offset, :], layer.values[..., : layer.offset, :]]


class Marks:
    """A cache in random transactions: what it should hold, and the checkpoints that it can still go back to."""

    def __init__(self, cache: TargetCache, text: Sequence[int]):
        self.cache, self.text = cache, list(text)
        self.taken = [(cache.checkpoint(), list(text))]
        self.longest = self.lost = 0  # the longest text, and the most tokens that a restore took away

    def end(self, rng: random.Random, block: list[int]) -> None:
        """End the open transaction, which appended `block`, in one way or another."""
        action = rng.choice(["commit", "commit", "commit", "abort", "mark", "restore"])
        if action == "abort":
            self.cache.abort()
        elif action == "restore":
            mark, kept = rng.choice(self.taken)
            self.cache.restore(mark)
            self.lost = max(self.lost, len(self.text) - len(kept))
            self.text = list(kept)
            self.taken = [m for m in self.taken if len(m[1]) <= len(kept)]
        else:
            keep = rng.randint(0, len(block))
            self.cache.commit(keep)
            self.text += block[:keep]
            if action == "mark":
                self.taken.append((self.cache.checkpoint(), list(self.text)))
        self.longest = max(self.longest, len(self.text))
