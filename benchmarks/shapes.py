"""Pairs of random weights in the shapes of published ones: what rounds cost on a machine, without a download.

Built by the same modules as loaded pairs, quantized as `mlx_lm.convert` does it, with random words for packed weights;
on MLX's CPU backend held in fp32, as `load` holds them. With fewer layers than the real target the taps move down and
everything else keeps its size.
"""

import copy
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.utils import _get_classes

from mlx_dflash import memory, registry
from mlx_dflash.checkpoint import hold_in_fp32
from mlx_dflash.download import say
from mlx_dflash.drafters import DFlashDrafter, check_pair, model_class
from mlx_dflash.drafters.formats import read_layout
from mlx_dflash.errors import RequestError
from mlx_dflash.targets import FAMILIES, Target, private_arrays
from mlx_dflash.targets.config import normalise

GROUP = 64  # weights that share a scale, mlx_lm.convert's default
UNQUANTIZED = 16  # bits
RANDOM = "random "  # how the names of such targets begin
FULL, SLIDING = "full_attention", "sliding_attention"


@dataclass(frozen=True)
class Shape:
    """A pair's sizes. target, drafter: their config.json. period: layers after which kinds of attention repeat."""

    target: dict[str, Any]
    drafter: dict[str, Any]
    period: int = 1

    @property
    def layers(self) -> int:
        return int(self.target["num_hidden_layers"])


def published(name: str, target: dict[str, Any], **more: Any) -> dict[str, Any]:
    """config.json of a drafter that the registry knows, the last release of it. more: what the registry leaves out."""
    layout = next(pair.layouts[-1] for pair in registry.pairs() if pair.drafter == name)
    mask = layout["mask_token_id"] or target["vocab_size"] - 1
    common = {"rms_norm_eps": target["rms_norm_eps"], "rope_theta": target["rope_theta"], "model_type": "qwen3"}
    return {**common, "vocab_size": target["vocab_size"], **layout, "mask_token_id": mask, **more}


QWEN3: dict[str, Any] = {
    "rms_norm_eps": 1e-6, "rope_theta": 1e6, "vocab_size": 151936, "max_position_embeddings": 40960, "head_dim": 128,
    "tie_word_embeddings": False, "attention_bias": False,
}  # fmt: skip
QWEN3_8B: dict[str, Any] = QWEN3 | {
    "model_type": "qwen3", "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36,
    "num_attention_heads": 32, "num_key_value_heads": 8,
}  # fmt: skip
QWEN3_30B: dict[str, Any] = QWEN3 | {
    "model_type": "qwen3_moe", "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768,
    "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4, "num_experts": 128,
    "num_experts_per_tok": 8, "norm_topk_prob": True, "decoder_sparse_step": 1,
}  # fmt: skip
QWEN35: dict[str, Any] = {
    "rms_norm_eps": 1e-6, "rope_theta": 1e7, "partial_rotary_factor": 0.25, "vocab_size": 248320, "head_dim": 256,
    "max_position_embeddings": 262144, "tie_word_embeddings": False, "attention_bias": False,
    "full_attention_interval": 4, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128,
    "linear_value_head_dim": 128, "linear_num_key_heads": 16,
}  # fmt: skip
QWEN35_27B: dict[str, Any] = QWEN35 | {
    "model_type": "qwen3_5", "hidden_size": 5120, "intermediate_size": 17408, "num_hidden_layers": 64,
    "num_attention_heads": 24, "num_key_value_heads": 4, "linear_num_value_heads": 48,
}  # fmt: skip
QWEN35_35B: dict[str, Any] = QWEN35 | {
    "model_type": "qwen3_5_moe", "hidden_size": 2048, "num_hidden_layers": 40, "num_attention_heads": 16,
    "num_key_value_heads": 2, "linear_num_value_heads": 32, "num_experts": 256, "num_experts_per_tok": 8,
    "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512,
}  # fmt: skip
MUSE: dict[str, Any] = {
    "model_type": "muse_glimmer", "hidden_size": 6656, "intermediate_size": 19968, "num_hidden_layers": 52,
    "num_attention_heads": 32, "num_key_value_heads": 2, "head_dim": 128, "vocab_size": 202048, "rms_norm_eps": 1e-5,
    "post_norm_eps": 1e-8, "sliding_window": 2048, "qk_scale_factor": 3.87, "max_position_embeddings": 131072,
    "rope_theta": 5e5, "tie_word_embeddings": False,
}  # fmt: skip
WINDOWED: dict[str, Any] = {
    "layer_types": [SLIDING] * 5 + [FULL], "sliding_window": 4096, "use_sliding_window": True,
}  # fmt: skip
SHAPES: dict[str, Shape] = {
    "qwen3-8b": Shape(QWEN3_8B, published("z-lab/Qwen3-8B-DFlash-b16", QWEN3_8B)),
    "qwen3-30b-a3b": Shape(QWEN3_30B, published("z-lab/Qwen3-Coder-30B-A3B-DFlash", QWEN3_30B)),
    "qwen3.5-27b": Shape(QWEN35_27B, published("z-lab/Qwen3.5-27B-DFlash", QWEN35_27B, **WINDOWED), period=4),
    "qwen3.5-35b-a3b": Shape(QWEN35_35B, published("z-lab/Qwen3.5-35B-A3B-DFlash", QWEN35_35B, **WINDOWED), period=4),
    "muse-30b": Shape(
        MUSE,
        published(
            "meta-models/Muse-Glimmer-30B-assistant", MUSE, model_type="muse_glimmer_assistant", sliding_window=2048
        ),
        period=4,
    ),
}


@dataclass(frozen=True)
class Bench:
    """What is measured. by_depth: layers -> the pair with so many, deepest first. whole: the pair at full depth, not
    computed where it is deeper than any that is measured."""

    by_depth: dict[int, DFlashDrafter]
    whole: DFlashDrafter
    weight_bytes: int  # what the device holds for the deepest


def shape_of(name: str) -> Shape:
    if name not in SHAPES:
        raise RequestError(f"--shape {name} is not known; choose one of {', '.join(SHAPES)}")
    return SHAPES[name]


def depths(shape: Shape, layers: int | None) -> list[int]:
    """The numbers of layers to measure: all, or `layers` of them and about half as many, in whole periods.

    A layer's cost is the difference between the two depths, so that head and embedding are not scaled.
    """
    if layers in (None, shape.layers):
        return [shape.layers]
    assert layers is not None
    step = shape.period
    if layers % step or not 2 * step <= layers <= shape.layers:
        raise RequestError(
            f"--layers must be a multiple of {step} from {2 * step} to {shape.layers} for this shape, not {layers}; "
            "a layer's cost is the difference between two depths"
        )
    return [layers, step * (layers // step // 2)]


def open_pair(name: str, layers: int, bits: int) -> DFlashDrafter:
    """A random pair whose arrays are not computed yet: sizes are known, and it takes no memory. Its target is bound."""
    shape = shape_of(name)
    target = open_target(shape, layers, bits)
    target.name = target.asked_for = f"{RANDOM}{name}"
    config = read_layout(shape.drafter, f"the drafter of {name}").config
    if layers != shape.layers:
        taps = tuple(min(round(tap * layers / shape.layers), layers - 1) for tap in config.target_layer_ids)
        config = replace(config, target_layer_ids=taps, num_target_layers=None)
    check_pair(config, target, f"the drafter of {name}")
    model = model_class(config)(config)
    model.set_dtype(mx.bfloat16)
    randomise(model, seed=1)
    if mx.default_device() == mx.Device(mx.cpu):
        hold_in_fp32(model)
    drafter = DFlashDrafter(model, config, target)
    drafter.name = f"random drafter of {name}"
    return drafter


def open_target(shape: Shape, layers: int, bits: int) -> Target:
    flat = normalise({**shape.target, "num_hidden_layers": layers})
    family = next(f for f in FAMILIES if flat["model_type"] in f.model_types)
    config = family.prepare(flat)
    classes: Callable[..., Any] = family.model_classes or _get_classes
    model_type, arguments = classes(config)
    model: Any = model_type(arguments.from_dict(copy.deepcopy(config)))
    model.set_dtype(mx.bfloat16)
    if bits < UNQUANTIZED:
        config["quantization"] = {"group_size": GROUP, "bits": bits}
        predicate = getattr(model, "quant_predicate", None)

        def packs(path: str, module: nn.Module) -> Any:
            fits = hasattr(module, "to_quantized") and module.weight.shape[-1] % GROUP == 0
            return fits and (predicate is None or predicate(path, module))

        nn.quantize(model, GROUP, bits, class_predicate=packs)
    randomise(model, seed=0)
    if mx.default_device() == mx.Device(mx.cpu):
        hold_in_fp32(model)
    return family(model, config)


def randomise(model: nn.Module, seed: int) -> None:
    """Replace matrices by random values, lazily, with products of about their inputs' size."""
    modules: list[Any] = [
        m for _, m in model.named_modules() if isinstance(m.get("weight"), mx.array) and m.weight.ndim > 1
    ]
    for module, key in zip(modules, mx.random.split(mx.random.key(seed), len(modules)), strict=True):
        shape, dtype = module.weight.shape, module.weight.dtype
        if "scales" not in module:
            most = math.sqrt(3 / max(shape[1:]))
            module.weight = mx.random.uniform(-most, most, shape, dtype, key)
            continue
        most = math.sqrt(3 / (module.scales.shape[-1] * module.group_size))
        step = 2 * most / (2**module.bits - 1)
        module.weight = words(shape, key)
        module.scales = mx.full(module.scales.shape, step, dtype=module.scales.dtype)
        module.biases = mx.full(module.biases.shape, -most, dtype=module.biases.dtype)


def words(shape: tuple[int, ...], key: mx.array) -> mx.array:
    """Random uint32: keys are nothing else, and `mx.random` has no other way to bare bits."""
    count = math.prod(shape)
    return mx.random.split(key, -(-count // 2)).flatten()[:count].reshape(shape)


def arrays_of(drafter: DFlashDrafter) -> Iterator[mx.array]:
    for model in (drafter.target.model, drafter.model):
        yield from (array for _, array in tree_flatten(model.parameters()))
        yield from private_arrays(model)


def evaluate(drafter: DFlashDrafter) -> None:
    """Compute all arrays of a pair one by one: where packed weights are unpacked, few are held as both."""
    for array in arrays_of(drafter):
        mx.eval(array)
        mx.clear_cache()


def shallower(drafter: DFlashDrafter, name: str, layers: int, bits: int) -> DFlashDrafter:
    """The same pair with the target's first `layers` layers: its arrays, no others."""
    out = open_pair(name, layers, bits)
    known = dict(tree_flatten(drafter.target.model.parameters()))
    paths = [path for path, _ in tree_flatten(out.target.model.parameters())]
    out.target.model.load_weights([(path, known[path]) for path in paths])
    out.model = drafter.model
    evaluate(out)
    return out


def need_room(drafter: DFlashDrafter, name: str, layers: int, context: int) -> None:
    """Raise RequestError where the machine has no memory for a pair that is not computed yet."""
    found = memory.estimate(drafter.target, drafter, context)
    if not found.fits:
        raise RequestError(
            f"{name} with {layers} layers needs {memory.gib(found.peak)}, more than {memory.COMFORT:.0%} of the "
            f"{found.limit_name} of {memory.gib(found.limit)}; give fewer --layers or a smaller --shape"
        )


def random_bench(name: str, layers: int | None, bits: int, context: int) -> Bench:
    """Random pairs at the depths to measure. context: the longest that will be. Raises RequestError if too large."""
    shape = shape_of(name)
    deep, *low = depths(shape, layers)
    before = held()
    drafter = open_pair(name, deep, bits)
    need_room(drafter, name, deep, context)
    say(f"making random weights of {name}, {deep} of {shape.layers} layers ...")
    evaluate(drafter)
    size = held() - before
    by_depth = {deep: drafter} | {n: shallower(drafter, name, n, bits) for n in low}
    return Bench(by_depth, open_pair(name, shape.layers, bits) if low else drafter, size)


def held() -> int:
    """Bytes that the device holds for arrays."""
    mx.clear_cache()
    return int(mx.get_active_memory())
