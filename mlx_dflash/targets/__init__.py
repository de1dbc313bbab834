"""Target families, and how a folder becomes one."""

import copy
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.tokenizer_utils import load as load_tokenizer
from mlx_lm.utils import load_model

from ..checkpoint import Checkpoint, has_tokenizer, hold_in_fp32, open_checkpoint, read_json
from ..errors import CheckpointError, UnsupportedError
from ..facts import name_of
from .base import Target
from .config import normalise
from .dense import Dense
from .gemma4 import Gemma4
from .gpt_oss import GptOss
from .laguna import Laguna
from .muse_glimmer import MuseGlimmer
from .qwen3_5 import Qwen35
from .qwen3_moe import Qwen3MoE
from .qwen3_next import Qwen3Next

FAMILIES: tuple[type[Target], ...] = (Dense, Gemma4, GptOss, Laguna, MuseGlimmer, Qwen3MoE, Qwen3Next, Qwen35)

__all__ = ["FAMILIES", "Target", "evaluate", "load_target", "open_target"]


def load_target(folder: Path) -> tuple[Target, TokenizerWrapper]:
    """Load a target's weights and tokenizer from a local folder.

    Every array is evaluated, so the target can be used from any thread. Raises CheckpointError or UnsupportedError.
    """
    target = open_target(folder)
    return target, evaluate(target, folder)


def evaluate(target: Target, folder: Path) -> TokenizerWrapper:
    """Read all arrays of an opened target into memory, and the folder's tokenizer."""
    mx.eval(target.model.parameters(), private_arrays(target.model))
    return tokenizer_of(folder)


def open_target(folder: Path) -> Target:
    """A target whose arrays are not read yet: shapes and sizes are known, and it takes no memory.

    On MLX's CPU backend all weights will be held in fp32, with the file's exact values.
    """
    checkpoint = open_checkpoint(folder)
    family = family_of(checkpoint)
    flat = normalise(checkpoint.config, str(folder / "config.json"))
    try:
        config = family.prepare(flat)
    except (CheckpointError, UnsupportedError) as e:
        raise type(e)(f"{folder}: {e}") from e
    classes = {"get_model_classes": family.model_classes} if family.model_classes else {}
    path = folder / "generation_config.json"
    generation_config = read_json(path) if path.exists() else {}
    try:
        model, _ = load_model(folder, lazy=True, model_config=copy.deepcopy(config), **classes)
    except (ValueError, RuntimeError, LookupError, TypeError, AttributeError) as e:
        raise CheckpointError(
            f"{folder} does not load as {config['model_type']}: {one_line(e)}; download or convert it again"
        ) from e
    if mx.default_device() == mx.Device(mx.cpu):
        hold_in_fp32(model)
    target = family(model, config)
    target.folder = folder
    target.name, target.generation_config = name_of(folder.resolve()), generation_config
    return target


def family_of(checkpoint: Checkpoint) -> type[Target]:
    folder, model_type = checkpoint.folder, checkpoint.config.get("model_type")
    if checkpoint.is_drafter:
        raise CheckpointError(f"{folder} is a DFlash drafter, not a target model; pass it as --draft-model")
    for family in FAMILIES:
        if model_type in family.model_types:
            return family
    known = ", ".join(sorted(t for f in FAMILIES for t in f.model_types))
    raise UnsupportedError(f"{folder} has model_type {model_type!r}; supported families: {known}")


def private_arrays(model: Any) -> list[mx.array]:
    """Arrays that modules keep out of their parameters (RoPE's `_freqs`); lazy ones tie a model to one thread."""
    return [v for m in model.modules() for v in m.values() if isinstance(v, mx.array)]


def tokenizer_of(folder: Path) -> TokenizerWrapper:
    """The folder's tokenizer; its end-of-text ids are the union of tokenizer, config and generation_config."""
    config = read_json(folder / "config.json")
    ends = end_ids(config, folder / "config.json")
    ends |= end_ids(config.get("text_config") or {}, folder / "config.json")
    if (path := folder / "generation_config.json").exists():
        ends |= end_ids(read_json(path), path)
    if not has_tokenizer(folder):
        raise CheckpointError(f"{folder} has no tokenizer files; give a complete model folder")
    try:
        return load_tokenizer(folder, eos_token_ids=sorted(ends))
    except (ValueError, OSError, LookupError, TypeError, AttributeError) as e:
        raise CheckpointError(f"{folder} has no usable tokenizer: {one_line(e)}; download it again") from e


def end_ids(config: dict[str, Any], where: Path) -> set[int]:
    value = config.get("eos_token_id")
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if not all(isinstance(i, int) for i in ids):
        raise CheckpointError(f"{where} has eos_token_id {value!r}; it must be a token id or a list of them")
    return set(ids)


def one_line(e: BaseException, limit: int = 300) -> str:
    return " ".join(str(e).split())[:limit] or type(e).__name__
