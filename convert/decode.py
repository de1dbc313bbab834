"""Weights that other packages quantized -> bf16, fp16 or fp32 ones, or MLX's packed ones where MLX holds them exactly.

Everything stays lazy: shapes and dtypes are known, values are read when a tensor is written. Knows the layouts of
Hugging Face's `quantization_config`; nothing of models.

- fp8 (`quant_method: fp8`): `weight` in e4m3 times `weight_scale_inv`, one for each block, or one `weight_scale`
- compressed-tensors: `pack-quantized` int4 and int8, `nvfp4-pack-quantized`, `mxfp4-pack-quantized`, `float-quantized`
- ModelOpt: FP8 and NVFP4
- mxfp4 (gpt-oss): left as it is, since mlx-lm's own module reads it
"""

import math
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx

from mlx_dflash.errors import CheckpointError, UnsupportedError
from mlx_dflash.targets.experts import ONE

Tensors = dict[str, mx.array]
FLOATS = {"bfloat16": mx.bfloat16, "float16": mx.float16, "float32": mx.float32}
# Scales of activations and of the KV cache: only for kernels that quantize those while running.
RUNTIME = (".input_scale", ".activation_scale", ".input_global_scale", ".k_scale", ".v_scale", ".weight_shape")
GROUPS = (128, 64, 32)
NVFP4_RANGE = 448.0 * 6.0  # MLX's global scale is the largest weight: those of e4m3 and e2m1 times the file's scale


@dataclass
class Decoded:
    """tensors: of this moment's names; notes: what a user should know, one line each; dropped: name -> reason."""

    tensors: Tensors
    notes: list[str] = field(default_factory=list)
    dropped: dict[str, str] = field(default_factory=dict)


def float_type(config: dict[str, Any]) -> Any:
    """The dtype that the config gives its floats, bfloat16 where it gives none."""
    name = str(config.get("dtype") or config.get("torch_dtype") or "bfloat16").removeprefix("torch.")
    return FLOATS.get(name, mx.bfloat16)


def decode(config: dict[str, Any], tensors: Tensors, where: str) -> Decoded:
    """Undo another package's quantization. Raises UnsupportedError for one that is not known."""
    text = config.get("text_config") or {}
    how = config.get("quantization_config") or text.get("quantization_config")
    if "quantization" in config or not how:
        if "quantization" not in config and (fp8 := [n for n, v in tensors.items() if is_fp8(n, v)]):
            raise UnsupportedError(
                f"{where}: {fp8[0]} is fp8, but config.json has no quantization_config that says how"
            )
        return Decoded(dict(tensors))
    method, layout = how.get("quant_method"), how.get("format")
    dtype = float_type({**text, **config})
    if method == "mxfp4":
        return Decoded(dict(tensors))
    if method == "compressed-tensors" and layout == "pack-quantized":
        return packed_integers(tensors, how, where)
    if method == "compressed-tensors" and layout in ("nvfp4-pack-quantized", "mxfp4-pack-quantized"):
        return packed_fp4(tensors, layout, dtype, where)
    settings = how.get("quantization", how)  # hf_quant_config.json nests them
    if method == "modelopt" and settings.get("quant_algo") == "NVFP4":
        return packed_fp4(tensors, "modelopt", dtype, where)
    is_fp8_method = method == "fp8" or (method == "modelopt" and settings.get("quant_algo") == "FP8")
    if is_fp8_method or (method == "compressed-tensors" and layout == "float-quantized"):
        return from_fp8(tensors, how, dtype, where)
    raise UnsupportedError(
        f"{where} is quantized by {method!r}{f' ({layout})' if layout else ''}, which is not supported; give the "
        "unquantized release, or one in fp8, mxfp4, nvfp4 or compressed-tensors int4"
    )


def is_fp8(name: str, value: mx.array) -> bool:
    return value.dtype == mx.uint8 and name.endswith((".weight", "_proj"))


def set_aside(tensors: Tensors) -> tuple[Tensors, dict[str, str]]:
    dropped = {name: "a scale of activations or of the KV cache" for name in tensors if name.endswith(RUNTIME)}
    return {name: value for name, value in tensors.items() if name not in dropped}, dropped


def from_fp8(tensors: Tensors, how: dict[str, Any], dtype: Any, where: str) -> Decoded:
    """e4m3 bytes times their scales, computed in fp32 and rounded once to `dtype`."""
    tensors, dropped = set_aside(tensors)
    out: Tensors = {}
    count = 0
    used = set()
    for name, value in tensors.items():
        if not is_fp8(name, value):
            out[name] = value
            continue
        found = [s for s in (f"{name}_scale_inv", f"{name}_scale") if s in tensors]
        if not found:
            raise CheckpointError(f"{where}: {name} is fp8 and has no {name}_scale_inv or {name}_scale; download again")
        used.add(found[0])
        out[name] = scaled(mx.from_fp8(value, mx.float32), tensors[found[0]], name, how, where).astype(dtype)
        count += 1
    for name in used:
        out.pop(name, None)
    return Decoded(out, [f"{count} fp8 tensors are decoded to {str(dtype).rpartition('.')[2]}"], dropped)


def scaled(values: mx.array, scale: mx.array, name: str, how: dict[str, Any], where: str) -> mx.array:
    """(..., out, in) times a scale for each tensor, row, or block of `weight_block_size`."""
    if scale.dtype == mx.uint8:  # e8m0: a power of two
        scale = mx.power(mx.array(2.0), scale.astype(mx.float32) - 127)
    scale = scale.astype(mx.float32)
    if scale.size == 1:
        return values * scale.reshape(())
    rows, width = values.shape[-2:]
    block = how.get("weight_block_size") or [1, width]
    blocks = (math.ceil(rows / block[0]), math.ceil(width / block[1]))
    if scale.ndim == values.ndim - 1:
        scale = scale[..., None]
    if scale.shape != (*values.shape[:-2], *blocks):
        raise CheckpointError(
            f"{where}: {name} {values.shape} has scales {scale.shape}, which are not those of blocks {block}"
        )
    margin = [(0, 0)] * (values.ndim - 2) + [(0, blocks[0] * block[0] - rows), (0, blocks[1] * block[1] - width)]
    tiles = mx.pad(values, margin).reshape(*values.shape[:-2], blocks[0], block[0], blocks[1], block[1])
    tiles = tiles * scale[..., :, None, :, None]
    return tiles.reshape(*values.shape[:-2], blocks[0] * block[0], blocks[1] * block[1])[..., :rows, :width]


def packed_integers(tensors: Tensors, how: dict[str, Any], where: str) -> Decoded:
    """compressed-tensors' int4 and int8, symmetric: `(q - 2^(bits - 1)) * scale` is MLX's affine without rounding."""
    bits = integer_bits(how, where)
    tensors, dropped = set_aside(tensors)
    out: Tensors = {}
    for name, value in tensors.items():
        path = name.removesuffix(".weight_packed")
        if name.endswith((".weight_zero_point", ".weight_g_idx")):
            raise UnsupportedError(f"{where}: {name} (asymmetric or reordered groups) is not supported; give bf16")
        if path == name:
            if not name.endswith(".weight_scale"):
                out[name] = value
            continue
        if (scale := tensors.get(f"{path}.weight_scale")) is None:
            raise CheckpointError(f"{where}: {path} has weight_packed and no weight_scale; download it again")
        width, groups = value.shape[-1] * 32 // bits, scale.shape[-1]
        group = width // groups
        if group not in GROUPS:  # one scale a row, say: repeat it
            fit = next((g for g in GROUPS if group % g == 0), None)
            if fit is None:
                raise UnsupportedError(f"{where}: {path} has groups of {group}, which MLX does not have; give bf16")
            scale = mx.repeat(scale, group // fit, axis=-1)
        out |= {f"{path}.weight": value.view(mx.uint32), f"{path}.scales": scale}
        out[f"{path}.biases"] = scale * -(2 ** (bits - 1))
    return Decoded(out, [f"int{bits} weights are kept exactly, as MLX's affine"], dropped)


def integer_bits(how: dict[str, Any], where: str) -> int:
    kinds = [group.get("weights") or {} for group in (how.get("config_groups") or {}).values()]
    bits = {kind.get("num_bits") for kind in kinds}
    known = all(kind.get("type", "int") == "int" and kind.get("symmetric", True) for kind in kinds)
    if not known or len(bits) != 1 or not bits <= {4, 8}:
        raise UnsupportedError(f"{where}: compressed-tensors {kinds} is not supported; symmetric int4 and int8 are")
    return int(bits.pop() or 0)


def packed_fp4(tensors: Tensors, layout: str, dtype: Any, where: str) -> Decoded:
    """mxfp4 is MLX's own. nvfp4 has one more scale for each tensor, for which only MLX's expert layers have a place."""
    micro = layout == "mxfp4-pack-quantized"
    packed, second = (
        (".weight", ".weight_scale_2") if layout == "modelopt" else (".weight_packed", ".weight_global_scale")
    )
    tensors, dropped = set_aside(tensors)
    out: Tensors = {}
    decoded, kept, used = 0, 0, set()
    for name, value in tensors.items():
        path = name.removesuffix(packed)
        if path == name or value.dtype != mx.uint8:
            out[name] = value
            continue
        if (scale := tensors.get(f"{path}.weight_scale")) is None:
            raise CheckpointError(f"{where}: {path} is packed and has no weight_scale; download it again")
        used |= {f"{path}.weight_scale", f"{path}{second}"}
        weight, whole = value.view(mx.uint32), None
        if (given := tensors.get(f"{path}{second}")) is not None:
            given = given.astype(mx.float32).reshape(())
            whole = given if layout == "modelopt" else 1 / given
        if micro or whole is None or ONE.fullmatch(f"{path}.weight"):
            out |= {f"{path}.weight": weight, f"{path}.scales": scale}
            if whole is not None:
                out[f"{path}.global_scale"] = whole * NVFP4_RANGE
            kept += 1
            continue
        values = mx.dequantize(weight, scale, group_size=16, bits=4, mode="nvfp4", dtype=mx.float32)
        out[f"{path}.weight"] = (values if whole is None else values * whole).astype(dtype)
        decoded += 1
    for name in used:
        out.pop(name, None)
    notes = [f"{kept} {'mxfp4' if micro else 'nvfp4'} tensors are kept exactly"] if kept else []
    if decoded:
        kind = str(dtype).rpartition(".")[2]
        notes.append(
            f"{decoded} nvfp4 tensors are decoded to {kind}: MLX's layers have no place for the tensor's scale"
        )
    return Decoded(out, notes, dropped)
