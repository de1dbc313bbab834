"""A GGUF file as an MLX folder's tensors, block by block: exact where MLX's affine holds the block, decoded elsewhere.

Exact: F32, F16, BF16, MXFP4, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, and Q4_K and Q5_K, whose groups of 32 each have a scale and
a minimum. Scales and minima are widened to fp32, which holds the products of their parts without rounding. All other
types (Q6_K and Q3_K have groups of 16, ...) are decoded by the `gguf` package and packed anew, which is said aloud.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_dflash.errors import CheckpointError, UnsupportedError

from .decode import Tensors
from .gguf import BLOCK

REPACKED: dict[str, Any] = {"group_size": BLOCK, "bits": 8}  # what blocks that affine can't hold become
PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")
PARTS = ("weight", "scales", "biases")


@dataclass
class Unpacked:
    """What an unpacked GGUF file is: a folder like any other, and what is to be said of it."""

    folder: Path
    notes: list[str] = field(default_factory=list)
    dropped: dict[str, str] = field(default_factory=dict)


class GgufFile:
    """Typed access to the header of a GGUF file, and its tensors one at a time."""

    def __init__(self, path: Path):
        try:
            from gguf import GGUFReader
        except ImportError as e:
            raise UnsupportedError(
                f"{path}: reading GGUF needs the package gguf; install it with: pip install 'mlx-dflash[gguf]'"
            ) from e
        self.paths = shards(path)
        readers = [open_reader(file, GGUFReader) for file in self.paths]
        self.reader = readers[0]
        self.path = path
        self.architecture: str = self.get("general.architecture", "")
        if self.get("general.type") == "adapter":
            raise UnsupportedError(f"{path} is a LoRA adapter; fuse it into its base model first, and give that")
        self.tensors = {tensor.name: tensor for reader in readers for tensor in reader.tensors}
        if (count := self.get("split.tensors.count", 0)) not in (0, len(self.tensors)):
            held = f"{path} and its other parts hold {len(self.tensors)} tensors"
            raise CheckpointError(f"{held}, {count} are promised; download them again")

    def get(self, key: str, default: Any = None) -> Any:
        """A field's value: text, number, bool or a list of them."""
        found = self.reader.fields.get(key)
        return default if found is None else found.contents()

    def need(self, key: str) -> Any:
        if (value := self.get(key)) is None:
            raise CheckpointError(f"{self.path} has no field {key!r}; it is another kind of file, or cut")
        return value

    def own(self, key: str, default: Any = None) -> Any:
        """A field of the file's architecture."""
        return self.get(f"{self.architecture}.{key}", default)

    def need_own(self, key: str) -> Any:
        return self.need(f"{self.architecture}.{key}")


def shards(path: Path) -> list[Path]:
    """All files of a model that llama.cpp's gguf-split cut in parts, the first one first; any other file alone."""
    match = PART.fullmatch(path.name)
    if match is None:
        return [path]
    count = int(match[3])
    found = [path.with_name(f"{match[1]}-{i:05d}-of-{match[3]}.gguf") for i in range(1, count + 1)]
    if missing := [file for file in found if not file.exists()]:
        raise CheckpointError(f"{path} is a part of {count}, and {missing[0].name} is not beside it; download it too")
    return found


def open_reader(path: Path, kind: Any) -> Any:
    """The `gguf` package's reader of a file that has all bytes which its header promises."""
    try:
        reader = kind(str(path))
        ends = [int(t.data_offset) + int(t.n_bytes) for t in reader.tensors]
    except (ValueError, IndexError, KeyError, OSError, OverflowError) as e:
        problem = " ".join(str(e).split())[:120]
        raise CheckpointError(f"{path} is cut or no GGUF file ({problem}); download it again") from e
    if max(ends, default=0) > path.stat().st_size:
        raise CheckpointError(f"{path} has {path.stat().st_size} bytes, {max(ends)} are promised; download it again")
    return reader


def shortest(value: Any) -> float:
    """A float32 field as the decimal that was written into it."""
    return float(str(np.float32(value)))


def unpack_tensor(tensor: Any, note: Callable[[str], None], dtype: Any = mx.float32) -> Tensors:
    """One GGUF tensor -> {"weight"}, or with "scales" (MXFP4) and "biases", rows as in Hugging Face's (out, in).

    note: told the type of a block that had to be decoded and packed anew.
    """
    kind, shape = tensor.tensor_type.name, tuple(int(n) for n in reversed(tensor.shape))
    if kind in ("F32", "F16"):
        return {"weight": mx.array(np.asarray(tensor.data).reshape(shape))}
    if kind == "BF16":
        return {"weight": mx.array(np.asarray(tensor.data).view(np.uint16).reshape(shape)).view(mx.bfloat16)}
    if kind == "MXFP4":
        blocks = np.asarray(tensor.data).view(np.uint8).reshape(-1, 17)  # an exponent, then 32 codes
        packed = pack(nibbles(blocks[:, 1:]), 4, shape)
        return {"weight": packed, "scales": mx.array(blocks[:, 0].reshape(*shape[:-1], -1))}
    if (exact := EXACT.get(kind)) is not None:
        raw = np.asarray(tensor.data).view(np.uint8).reshape(-1)
        bits, integers, scales, minima = exact(raw)
        return {
            "weight": pack(integers.reshape(*shape[:-1], -1, 32), bits, shape),
            "scales": mx.array(scales.reshape(*shape[:-1], -1)),
            "biases": mx.array(minima.reshape(*shape[:-1], -1)),
        }
    values = decoded(tensor, shape)
    note(kind)
    if len(shape) < 2 or shape[-1] % REPACKED["group_size"]:
        return {"weight": values}
    parts = mx.quantize(values, **REPACKED)
    return dict(zip(PARTS, parts, strict=True))


def decoded(tensor: Any, shape: tuple[int, ...]) -> mx.array:
    from gguf import dequantize

    try:
        return mx.array(dequantize(tensor.data, tensor.tensor_type).reshape(shape).astype(np.float32))
    except NotImplementedError as e:
        raise UnsupportedError(
            f"the tensor {tensor.name} is stored as {tensor.tensor_type.name}, which is not supported; give a file of "
            "K-quants, Q8_0 or F16"
        ) from e


def pack(integers: np.ndarray, bits: int, shape: tuple[int, ...]) -> mx.array:
    """(..., groups, 32) integers -> MLX's words (..., in * bits / 32): a run of bits, the lowest first."""
    flat = integers.astype(np.uint8).reshape(-1, 32)
    if bits == 8:
        words = flat.view("<u4")
    elif bits == 4:
        words = np.ascontiguousarray(flat[:, ::2] | (flat[:, 1::2] << 4)).view("<u4")
    else:
        runs = np.unpackbits(flat[..., None], axis=-1, count=bits, bitorder="little")
        words = np.packbits(runs.reshape(len(flat), -1), axis=-1, bitorder="little").view("<u4")
    return mx.array(np.ascontiguousarray(words).reshape(*shape[:-1], -1))


Block = tuple[int, np.ndarray, np.ndarray, np.ndarray]  # bits, integers (n, 32), scales (n,), minima (n,)


def half(raw: np.ndarray) -> np.ndarray:
    """(n, 2) bytes -> (n,) fp32"""
    return np.ascontiguousarray(raw).view("<f2")[:, 0].astype(np.float32)


def nibbles(raw: np.ndarray) -> np.ndarray:
    """(n, 16) bytes -> (n, 32): all low halves, then all high ones"""
    return np.hstack([raw & 15, raw >> 4])


def fifth_bits(raw: np.ndarray) -> np.ndarray:
    """(n, 4) bytes -> (n, 32) bits at their place"""
    return np.unpackbits(raw, axis=-1, bitorder="little") << 4


def q4_0(raw: np.ndarray) -> Block:
    raw = raw.reshape(-1, 18)
    scale = half(raw[:, :2])
    return 4, nibbles(raw[:, 2:]), scale, -8 * scale


def q4_1(raw: np.ndarray) -> Block:
    raw = raw.reshape(-1, 20)
    return 4, nibbles(raw[:, 4:]), half(raw[:, :2]), half(raw[:, 2:4])


def q5_0(raw: np.ndarray) -> Block:
    raw = raw.reshape(-1, 22)
    scale = half(raw[:, :2])
    return 5, nibbles(raw[:, 6:]) | fifth_bits(raw[:, 2:6]), scale, -16 * scale


def q5_1(raw: np.ndarray) -> Block:
    raw = raw.reshape(-1, 24)
    return 5, nibbles(raw[:, 8:]) | fifth_bits(raw[:, 4:8]), half(raw[:, :2]), half(raw[:, 2:4])


def q8_0(raw: np.ndarray) -> Block:
    raw = raw.reshape(-1, 34)
    scale = half(raw[:, :2])
    return 8, raw[:, 2:] ^ 128, scale, -128 * scale  # two's complement + 128


def k_scales(raw: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(n, 12) bytes -> eight 6-bit scales and eight 6-bit minima (n, 8) (llama.cpp's get_scale_min_k4)"""
    a, b, c = raw[:, 0:4], raw[:, 4:8], raw[:, 8:12]
    scales = np.hstack([a & 63, (c & 15) | ((a >> 6) << 4)])
    return scales, np.hstack([b & 63, (c >> 4) | ((b >> 6) << 4)])


def k_block(raw: np.ndarray, bits: int, integers: np.ndarray) -> Block:
    """Super-blocks of 256: value = d * scale * q - dmin * minimum, in eight groups of 32."""
    scales, minima = k_scales(raw[:, 4:16])
    scale, minimum = half(raw[:, :2])[:, None] * scales, half(raw[:, 2:4])[:, None] * minima
    return bits, integers.reshape(-1, 32), scale.reshape(-1).astype(np.float32), -minimum.reshape(-1).astype(np.float32)


def q4_k(raw: np.ndarray) -> Block:
    raw = raw.reshape(-1, 144)
    low = raw[:, 16:].reshape(-1, 4, 1, 32)
    return k_block(raw, 4, np.concatenate([low & 15, low >> 4], axis=2))


def q5_k(raw: np.ndarray) -> Block:
    raw = raw.reshape(-1, 176)
    low = raw[:, 48:].reshape(-1, 4, 1, 32)
    high = (raw[:, 16:48].reshape(-1, 1, 32) >> np.arange(8, dtype=np.uint8)[:, None]) & 1  # (n, 8, 32)
    return k_block(raw, 5, np.concatenate([low & 15, low >> 4], axis=2).reshape(-1, 8, 32) | (high << 4))


EXACT: dict[str, Callable[[np.ndarray], Block]] = {
    "Q4_0": q4_0,
    "Q4_1": q4_1,
    "Q5_0": q5_0,
    "Q5_1": q5_1,
    "Q8_0": q8_0,
    "Q4_K": q4_k,
    "Q5_K": q5_k,
}


def groups(tensors: list[tuple[str, Any]], most: int) -> Iterator[list[tuple[str, Any]]]:
    """Tensors in order, in lists of at most `most` bytes as fp32 (a larger one comes alone)."""
    part: list[tuple[str, Any]] = []
    room = most
    for name, tensor in tensors:
        need = int(tensor.n_elements) * 4
        if part and need > room:
            yield part
            part, room = [], most
        part.append((name, tensor))
        room -= need
    if part:
        yield part
