"""What a conversion will write, decided before a value is read: names, shapes, recipes, and what is left out and why.

A plan is about lazy arrays. `target.py` and `drafter.py` make one; `writer.py` carries it out.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.utils import infer_quant_config

from mlx_dflash.checkpoint import hold_in_fp32
from mlx_dflash.errors import CheckpointError, RequestError, UnsupportedError

from .decode import FLOATS, Tensors
from .recipe import Recipe, Settings, predicate


@dataclass
class Options:
    """What the flags ask for. dtype: of what is not quantized, None: the source's own; dequantize: unpack all."""

    recipe: Recipe | None = None
    dtype: str | None = None
    dequantize: bool = False

    def __post_init__(self) -> None:
        if self.recipe is not None and self.dequantize:
            raise RequestError("--quantize and --dequantize contradict each other; give one of them")
        if self.dtype not in (None, *FLOATS):
            raise RequestError(f"--dtype must be one of {', '.join(FLOATS)}, not {self.dtype!r}")


@dataclass
class Plan:
    """weights: what is written, lazy, in the order of writing; quantization: path -> settings of packed modules.

    kept: module -> why it is not quantized; dropped: tensor -> why it is not used; casts: dtype changes, counted.
    """

    config: dict[str, Any]
    weights: Tensors = field(default_factory=dict)
    quantization: dict[str, Settings] = field(default_factory=dict)
    kept: dict[str, str] = field(default_factory=dict)
    dropped: dict[str, str] = field(default_factory=dict)
    casts: dict[str, int] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def parameters(self) -> int:
        return count_parameters(self.weights, self.quantization)

    @property
    def bytes(self) -> int:
        return sum(value.nbytes for value in self.weights.values())

    @property
    def bits_per_weight(self) -> float:
        return 8 * self.bytes / max(self.parameters, 1)


def count_parameters(weights: Tensors, quantization: dict[str, Settings]) -> int:
    """Weights as the model counts them: a packed matrix by its values, without scales."""
    total = 0
    for name, value in weights.items():
        path, _, leaf = name.rpartition(".")
        if path in quantization and leaf != "bias":
            total += value.size * 32 // quantization[path]["bits"] if leaf == "weight" else 0
        else:
            total += value.size
    return total


def quantize(
    plan: Plan,
    model: nn.Module,
    tensors: Tensors,
    given: dict[str, Any] | None,
    options: Options,
    keep: Callable[[str], str | None] = lambda path: None,
) -> None:
    """Fill the plan's weights from sanitized tensors: packed ones as they are, others by the recipe.

    given: config.json's `quantization`; keep: path -> the reason why this module must stay as it is, or None.
    """
    castable = getattr(model, "cast_predicate", None) or (lambda name: True)
    choose = None if options.recipe is None else predicate(options.recipe, model)
    modules = {path: module for path, module in model.named_modules() if hasattr(module, "to_quantized")}
    already, fresh = {}, 0
    for name in sorted(tensors, key=by_layer):
        if name not in tensors:
            continue
        path, _, leaf = name.rpartition(".")
        if path not in modules or leaf == "bias":
            plan.weights[name] = cast(plan, name, tensors.pop(name), options, castable)
            continue
        weight = tensors.pop(f"{path}.weight")
        if (scales := tensors.pop(f"{path}.scales", None)) is not None:
            biases = tensors.pop(f"{path}.biases", None)
            settings = packed_settings(path, modules[path], weight, scales, given)
            if (whole := tensors.pop(f"{path}.global_scale", None)) is not None:
                settings = settings | {"global_scale": True}
            already[path] = settings
            if options.dequantize:
                plan.weights[f"{path}.weight"] = unpack(weight, scales, biases, whole, settings, options)
                continue
            if whole is not None:
                plan.weights[f"{path}.global_scale"] = whole
            biases = None if biases is None else cast(plan, f"{path}.biases", biases, options, castable)
            scales = cast(plan, f"{path}.scales", scales, options, castable)
        else:
            if not mx.issubdtype(weight.dtype, mx.floating):
                raise CheckpointError(f"{path}.weight holds {weight.dtype}, not weights; download it again")
            weight = cast(plan, f"{path}.weight", weight, options, castable)
            choice: Settings | str = "not asked for" if choose is None else keep(path) or choose(path, modules[path])
            if isinstance(choice, str):
                plan.weights[f"{path}.weight"] = weight
                if choose is not None:
                    plan.kept[path] = choice
                continue
            settings, fresh = choice, fresh + 1
            weight, scales, *rest = mx.quantize(weight, **{k: settings[k] for k in ("group_size", "bits", "mode")})
            biases = rest[0] if rest else None
        plan.quantization[path] = settings
        plan.weights |= {f"{path}.weight": weight, f"{path}.scales": scales}
        if biases is not None:
            plan.weights[f"{path}.biases"] = biases
    check_requantization(plan, already, fresh, options)
    record_quantization(plan, options.recipe)


def by_layer(name: str) -> list[tuple[int, int | str]]:
    """A sorting key that takes numbers as such: layer after layer, so that what shares a source tensor is near."""
    return [(0, int(part)) if part.isdigit() else (1, part) for part in name.split(".")]


def packed_settings(
    path: str, module: nn.Module, weight: mx.array, scales: mx.array, given: dict[str, Any] | None
) -> Settings:
    """How a packed matrix is packed: what config.json says of its path, else what the shapes say."""
    named = (given or {}).get(path)
    if isinstance(named, dict):
        return {"mode": "affine"} | named
    try:
        return infer_quant_config(path, module, {f"{path}.weight": weight, f"{path}.scales": scales})
    except ValueError as e:
        raise CheckpointError(f"{path} is packed in an unknown way: {e}; convert it again from its source") from e


def unpack(
    weight: mx.array,
    scales: mx.array,
    biases: mx.array | None,
    whole: mx.array | None,
    settings: Settings,
    options: Options,
) -> mx.array:
    """The values of a packed matrix. whole: (experts,) nvfp4's scales of whole tensors."""
    dtype = FLOATS[options.dtype] if options.dtype else scales.dtype if biases is not None else mx.bfloat16
    how: dict[str, Any] = {k: settings[k] for k in ("group_size", "bits", "mode")} | {"dtype": mx.float32}
    if whole is not None:
        experts = zip(weight, scales, whole, strict=True)
        return mx.stack([mx.dequantize(w, s, global_scale=g, **how) for w, s, g in experts]).astype(dtype)
    wide = (scales.astype(mx.float32), biases.astype(mx.float32)) if biases is not None else (scales, None)
    return mx.dequantize(weight, wide[0], wide[1], **how).astype(dtype)


def cast(plan: Plan, name: str, value: mx.array, options: Options, castable: Callable[[str], bool]) -> mx.array:
    if options.dtype is None or not mx.issubdtype(value.dtype, mx.floating) or not castable(name):
        return value
    if value.dtype != (dtype := FLOATS[options.dtype]):
        change = f"{str(value.dtype).rpartition('.')[2]} to {options.dtype}"
        plan.casts[change] = plan.casts.get(change, 0) + 1
    return value.astype(dtype)


def check_requantization(plan: Plan, already: dict[str, Settings], fresh: int, options: Options) -> None:
    """Quantizing what is quantized would lose quality twice: the same recipe changes nothing, another is refused."""
    if options.recipe is None or not already:
        if already and not options.dequantize:
            plan.notes.append(f"{len(already)} packed modules are kept as they are")
        return
    wanted = options.recipe.settings
    other = {path: s for path, s in already.items() if any(s.get(k, "affine") != v for k, v in wanted.items())}
    if not fresh and len(other) == len(already):
        path, has = next(iter(other.items()))
        raise UnsupportedError(
            f"{path} is quantized already ({describe(has)}), and quantizing it again to {describe(wanted)} would lose "
            "twice; convert the unquantized release, or leave --quantize out"
        )
    plan.notes.append(f"{len(already)} modules are packed already and kept as they are")


def describe(settings: Settings) -> str:
    return f"{settings.get('mode', 'affine')} {settings['bits']}-bit, groups of {settings['group_size']}"


def record_quantization(plan: Plan, recipe: Recipe | None) -> None:
    """mlx-lm's map in config.json: settings of most modules at top level, of the others by path."""
    plan.config.pop("quantization", None)
    plan.config.pop("quantization_config", None)
    if not plan.quantization:
        return
    keys = ("group_size", "bits", "mode")
    found = [tuple(s.get(k, "affine") for k in keys) for s in plan.quantization.values()]
    usual = max(dict.fromkeys(found), key=found.count)
    layout: dict[str, Any] = dict(zip(keys, usual, strict=True))
    for path, settings, kind in zip(plan.quantization, plan.quantization.values(), found, strict=True):
        if kind != usual or "global_scale" in settings:
            layout[path] = dict(settings)
    plan.config["quantization"] = layout
    plan.config["quantization_config"] = layout


def check_shapes(model: nn.Module, tensors: Tensors, where: str) -> None:
    """Every tensor that is not packed has the shape that the module, built from config.json, gives it."""
    for name, value in tree_flatten(model.parameters()):
        if f"{name.rpartition('.')[0]}.scales" not in tensors and tensors[name].shape != value.shape:
            raise CheckpointError(
                f"{where} has {name} of shape {tensors[name].shape}, its config.json says {value.shape}; "
                "download it again"
            )


def fill(model: nn.Module, tensors: Tensors, given: dict[str, Any] | None) -> None:
    """Put the source's own values into an empty module, packed ones as they are, as `load` holds them here."""

    def packed_like(path: str, module: nn.Module) -> Settings | bool:
        if (scales := tensors.get(f"{path}.scales")) is None:
            return False
        settings = packed_settings(path, module, tensors[f"{path}.weight"], scales, given)
        return settings | ({"global_scale": True} if f"{path}.global_scale" in tensors else {})

    nn.quantize(model, class_predicate=packed_like)
    model.load_weights(list(tensors.items()), strict=True)
    if mx.default_device() == mx.Device(mx.cpu):
        hold_in_fp32(model)


def check_names(wanted: set[str], found: set[str], where: str) -> None:
    """Every tensor used, none missing. Names of packed parts count as their weight's."""

    def unpacked(names: set[str]) -> set[str]:
        parts = (".scales", ".biases", ".global_scale")
        return {n.rpartition(".")[0] + ".weight" if n.endswith(parts) else n for n in names}

    if unknown := sorted(unpacked(found) - wanted):
        raise UnsupportedError(f"{where} holds {unknown[0]}, which has no place in the model; it is another variant")
    if missing := sorted(wanted - unpacked(found)):
        raise CheckpointError(f"{where} lacks {missing[0]} (one of {len(missing)} missing); download it again")
