"""A target's GGUF file -> a folder in Hugging Face's or mlx-lm's names: tensors, config, tokenizer, chat template."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx

from mlx_dflash.errors import CheckpointError, UnsupportedError

from .decode import Tensors
from .gguf import quantization_of
from .gguf_families import Family, GptOss, Llama, MuseGlimmer, Qwen3Moe, Qwen35, Qwen35Moe
from .gguf_file import GgufFile, Unpacked, groups, unpack_tensor
from .gguf_gemma import Gemma4
from .gguf_tokenizer import write_tokenizer
from .source import Source, hash_files
from .writer import write_json, write_weights

PART_BYTES = 1_000_000_000  # tensors unpacked at a time, as fp32
FAMILIES: dict[str, type[Family]] = {
    "llama": Llama,
    "qwen3": Family,
    "qwen3moe": Qwen3Moe,
    "qwen35": Qwen35,
    "qwen35moe": Qwen35Moe,
    "gpt-oss": GptOss,
    "gemma4": Gemma4,
    "muse-glimmer": MuseGlimmer,
}


def unpack_target(source: Source, scratch: Path) -> Unpacked:
    """Write the folder into `scratch`. Raises UnsupportedError for another architecture or an unknown tensor."""
    file = GgufFile(source.path)
    arch = file.architecture
    if "dflash" in arch:
        raise CheckpointError(f"{source.path} is a DFlash drafter, not a target; convert it as a drafter")
    if arch == "clip":
        raise UnsupportedError(f"{source.path} is a vision tower (mmproj); give the text model's .gguf file")
    if arch not in FAMILIES:
        raise UnsupportedError(
            f"{source.path} has GGUF architecture {arch!r}; known are {', '.join(FAMILIES)}; give the Hugging Face "
            "release"
        )
    family = FAMILIES[arch](file)
    source.hashes = hash_files(file.paths)
    scratch.mkdir(parents=True, exist_ok=True)
    unpacked = Unpacked(scratch)
    shapes = write_tensors(file, scratch, unpacked, family.place)
    config = family.config("lm_head.weight" not in shapes)
    if (layout := quantization_of(shapes)) is not None:
        config["quantization"] = layout
    write_json(scratch / "config.json", config)
    write_tokenizer(file, scratch)
    return unpacked


def write_tensors(
    file: GgufFile, folder: Path, unpacked: Unpacked, place: Callable[[str, Tensors], Tensors | str]
) -> dict[str, mx.array]:
    """Unpack and write all tensors, part by part; returns name -> array without its data kept.

    place: (GGUF name, its parts) -> the same under the folder's names, or why they are left out.
    """
    kinds: dict[str, int] = {}

    def note(kind: str) -> None:
        kinds[kind] = kinds.get(kind, 0) + 1

    shapes: dict[str, Any] = {}
    for number, part in enumerate(groups(list(file.tensors.items()), PART_BYTES)):
        tensors: Tensors = {}
        for name, tensor in part:
            found = place(name, unpack_tensor(tensor, note))
            if isinstance(found, str):
                unpacked.dropped[name] = found
            else:
                tensors |= found
        shapes |= {name: Shape(value.shape) for name, value in tensors.items()}
        write_weights(folder, tensors, shard_bytes=2**62, stem=f"model-{number:05d}")
    for kind, count in kinds.items():
        unpacked.notes.append(
            f"{count} {kind} tensors are decoded and packed anew as affine 8-bit, groups of 32; MLX has no {kind}"
        )
    if len(kinds) == 0:
        unpacked.notes.append("every GGUF block is held exactly")
    return shapes


class Shape:
    """What is remembered of a written array."""

    def __init__(self, shape: tuple[int, ...]):
        self.shape = shape
