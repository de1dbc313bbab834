"""What is in a model folder, read from headers alone, and whether its files are whole.

Knows safetensors and config.json; nothing of families, drafters or arrays. Everything wrong ends in a CheckpointError
that names the file and the remedy.
"""

import hashlib
import json
import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_map_with_path
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear

from .errors import CheckpointError, UnsupportedError

INDEX = "model.safetensors.index.json"
ITEM_BYTES = {"BOOL": 1, "U8": 1, "I8": 1, "U16": 2, "I16": 2, "F16": 2, "BF16": 2}
ITEM_BYTES |= {"U32": 4, "I32": 4, "F32": 4, "U64": 8, "I64": 8, "F64": 8}
FP8_BYTES = {"F8_E4M3": 1, "F8_E8M0": 1}  # what mlx loads of fp8, as bare bytes
HEADER_LIMIT = 100_000_000  # the safetensors format's own limit on its JSON header, bytes


@dataclass(frozen=True)
class Checkpoint:
    """A folder whose weight files are present and whole.

    folder: where it lies; config: config.json; shapes: tensor name -> shape, of all weight files.
    """

    folder: Path
    config: dict[str, Any]
    shapes: dict[str, tuple[int, ...]]
    files: list[Path]

    @property
    def is_drafter(self) -> bool:
        """A drafter may say `model_type: qwen3` and hold an embedding; the context projection tells it apart."""
        names = {n.removeprefix("model.") for n in self.shapes}
        pairs = (("fc", "hidden_norm"), ("encoder.fc", "encoder.output_norm_enc"))  # the second: Muse assistant
        return any(f"{fc}.weight" in names and f"{norm}.weight" in names for fc, norm in pairs)


def open_checkpoint(folder: Path, fp8: bool = False) -> Checkpoint:
    """Check a folder's config and weight files without loading a tensor. fp8: the caller decodes fp8 tensors."""
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is not a folder; give the folder that holds config.json and *.safetensors")
    if (folder / "adapter_config.json").exists():
        raise CheckpointError(f"{folder} holds a LoRA adapter; fuse it into its base model first (mlx_lm.fuse)")
    config = read_json(folder / "config.json")
    files = weight_files(folder)
    shapes: dict[str, tuple[int, ...]] = {}
    for file in files:
        shapes |= read_header(file, fp8)
    return Checkpoint(folder, config, shapes, files)


def weight_files(folder: Path) -> list[Path]:
    """The shards that the index names, or the folder's *.safetensors files where there is no index."""
    found = sorted(folder.glob("model*.safetensors"))
    if (folder / INDEX).exists():
        shards = read_json(folder / INDEX).get("weight_map")
        if not isinstance(shards, dict) or not shards or not all(isinstance(n, str) for n in shards.values()):
            raise CheckpointError(f"{folder / INDEX} has no usable weight_map; download it again")
        names = sorted(set(shards.values()))
        if missing := [n for n in names if not (folder / n).exists()]:
            raise CheckpointError(f"{folder} lacks the shard {missing[0]} that {INDEX} names; download it again")
        if stray := [f.name for f in found if f.name not in names]:  # mlx-lm would load it with the rest
            raise CheckpointError(f"{folder} has {stray[0]}, which {INDEX} does not name; move it away")
        return [folder / n for n in names]
    if not found:
        raise CheckpointError(f"{folder} has no model*.safetensors file; give a complete model folder")
    if broken := [f for f in found if not f.exists()]:
        raise CheckpointError(f"{broken[0]} is a link to a missing file; download it again")
    return found


def read_header(file: Path, fp8: bool = False) -> dict[str, tuple[int, ...]]:
    """Tensor shapes of one safetensors file, after holding its size against what the header promises."""
    size = file.stat().st_size
    with file.open("rb") as f:
        head = f.read(8)
        length = struct.unpack("<Q", head)[0] if len(head) == 8 else HEADER_LIMIT + 1
        if length > min(size - 8, HEADER_LIMIT):
            raise CheckpointError(f"{file} is cut or no safetensors file ({size} bytes); download it again")
        try:
            header = json.loads(f.read(length))
            header.pop("__metadata__", None)
            for name, tensor in header.items():
                check_tensor(file, name, tensor, fp8)
            promised = 8 + length + max((int(t["data_offsets"][1]) for t in header.values()), default=0)
            shapes = {name: tuple(map(int, t["shape"])) for name, t in header.items()}
        except (ValueError, TypeError, AttributeError, LookupError) as e:
            problem = " ".join(str(e).split())[:100]
            raise CheckpointError(f"{file} has a damaged header ({problem}); download it again") from e
    if size != promised:
        raise CheckpointError(f"{file} has {size} bytes, its header promises {promised}; download it again")
    return shapes


def check_tensor(file: Path, name: str, tensor: dict[str, Any], fp8: bool = False) -> None:
    """Hold one header entry against itself: a known dtype, and as many bytes as its shape needs.

    Packed words are uint32; uint8 only comes as the scales and blocks of MX formats. mlx reads fp8 weights as bare
    uint8 numbers, so they are refused unless the caller decodes them.
    """
    dtype = tensor["dtype"]
    if not fp8 and (dtype.startswith("F8_") or (dtype == "U8" and name.endswith(".weight"))):
        raise UnsupportedError(f"{file}: {name} is stored as {dtype}; port it first with mlx_dflash.convert")
    item_bytes = ITEM_BYTES | FP8_BYTES if fp8 else ITEM_BYTES
    if dtype not in item_bytes:
        raise ValueError(f"{name} has the unknown dtype {dtype}")
    start, end = tensor["data_offsets"]
    if end - start != item_bytes[dtype] * math.prod(tensor["shape"]):
        raise ValueError(f"{name} has {end - start} bytes, not those of {dtype} {tensor['shape']}")


def has_tokenizer(folder: Path) -> bool:
    return any((folder / name).exists() for name in ("tokenizer.json", "tokenizer.model", "tokenizer_config.json"))


def sha256(path: Path) -> str:
    with path.open("rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def load_arrays(file: Path) -> tuple[dict[str, mx.array], dict[str, str]]:
    """All tensors of a safetensors file, lazily, and its metadata."""
    arrays, metadata = mx.load(str(file), return_metadata=True)
    return arrays, metadata  # type: ignore[return-value]


def read_json(path: Path) -> dict[str, Any]:
    if not path.exists():
        raise CheckpointError(f"{path.parent} has no {path.name}; give a complete model folder")
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as e:
        raise CheckpointError(f"{path} is not valid JSON ({e}); download it again") from e
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} does not hold a JSON object; download it again")
    return value


def hold_in_fp32(model: nn.Module) -> None:
    """Replace quantized modules by plain ones of the same values and widen all other floats to fp32.

    MLX's CPU backend runs quantized layers on 16-bit activations 8 to 40 times slower than fp32, and accumulates
    bf16 in bf16. Raises UnsupportedError for a packed module of a kind that is not known here.
    """
    leaves = tree_map_with_path(lambda _, module: plain(module), model.leaf_modules(), is_leaf=nn.Module.is_module)
    model.update_modules(leaves)
    for path, module in model.named_modules():
        if (weight := module.get("weight")) is not None and not mx.issubdtype(weight.dtype, mx.floating):
            raise UnsupportedError(
                f"{path} is a {type(module).__name__}, a packed layer that can't be held in fp32 on the CPU; "
                "give a folder that is not quantized, or one that mlx_lm.convert quantized"
            )
    model.set_dtype(mx.float32)


def plain(module: nn.Module) -> nn.Module:
    """The module without quantization, for the kinds that mlx-lm's models are built of; any other as it is.

    By exact type: a subclass may compute something else.
    """
    kind, bias = type(module), "bias" in module
    if kind is nn.QuantizedLinear:
        out: nn.Module = nn.Linear(1, 1, bias=bias)
    elif kind is nn.QuantizedEmbedding:
        out = nn.Embedding(1, 1)
    elif kind is QuantizedSwitchLinear:
        out = SwitchLinear(1, 1, 1, bias=bias)
    else:
        return module
    out.weight = unpacked(module)
    if bias:
        out.bias = module.bias
    return out


def unpacked(module: nn.Module) -> mx.array:
    """The weights (..., out, in) of a quantized module in fp32, which holds them exactly.

    Affine scales and biases are widened first, so ``scale * q + bias`` is not rounded to their 16 bits.
    """
    scales, biases = module.scales, module.get("biases")
    if module.mode == "affine":
        scales, biases = scales.astype(mx.float32), biases.astype(mx.float32)
    how = {"group_size": module.group_size, "bits": module.bits, "mode": module.mode, "dtype": mx.float32}
    if (tensor_scales := module.get("global_scale")) is None:
        return mx.dequantize(module.weight, scales, biases, **how)
    # nvfp4 with one more scale for every expert, (experts,)
    experts = zip(module.weight, scales, tensor_scales, strict=True)
    return mx.stack([mx.dequantize(w, s, global_scale=g, **how) for w, s, g in experts])
