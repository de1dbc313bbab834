"""Target families, and how a folder becomes one."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.tokenizer_utils import load as load_tokenizer
from mlx_lm.utils import load_model

from ..checkpoint import Checkpoint, hold_in_fp32, open_checkpoint, read_json
from ..errors import CheckpointError, UnsupportedError
from .base import Target
from .config import normalise
from .dense import Dense

FAMILIES: tuple[type[Target], ...] = (Dense,)

__all__ = ["FAMILIES", "Target", "load_target"]


def load_target(folder: Path) -> tuple[Target, TokenizerWrapper]:
    """Load a target's weights and tokenizer from a local folder.

    On MLX's CPU backend all weights are held in fp32, with the file's exact values. Every array is evaluated, so the
    target can be used from any thread. Raises CheckpointError or UnsupportedError.
    """
    checkpoint = open_checkpoint(folder)
    family = family_of(checkpoint)
    config = normalise(checkpoint.config)
    try:
        model, _ = load_model(folder, lazy=True, model_config=config)
    except (ValueError, RuntimeError, KeyError, TypeError) as e:
        raise CheckpointError(f"{folder} does not load as {config['model_type']}: {first_line(e)}") from e
    if mx.default_device() == mx.Device(mx.cpu):
        hold_in_fp32(model)
    mx.eval(model.parameters(), private_arrays(model))
    return family(model, config), tokenizer_of(checkpoint)


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


def tokenizer_of(checkpoint: Checkpoint) -> TokenizerWrapper:
    """The folder's tokenizer; its end-of-text ids are the union of tokenizer, config and generation_config."""
    ends: set[int] = set(as_ids(checkpoint.config.get("eos_token_id")))
    if (path := checkpoint.folder / "generation_config.json").exists():
        ends |= set(as_ids(read_json(path).get("eos_token_id")))
    try:
        return load_tokenizer(checkpoint.folder, eos_token_ids=sorted(ends))
    except (ValueError, OSError, KeyError) as e:
        raise CheckpointError(f"{checkpoint.folder} has no usable tokenizer: {first_line(e)}") from e


def as_ids(value: int | Iterable[int] | None) -> list[int]:
    if value is None:
        return []
    return [value] if isinstance(value, int) else list(value)


def first_line(e: BaseException) -> str:
    lines = str(e).strip().splitlines()
    return lines[0] if lines else type(e).__name__
