"""Drafter formats, how a folder becomes a drafter, and whether it fits a target."""

from pathlib import Path

import mlx.core as mx
import mlx.nn as nn

from ..checkpoint import Checkpoint, hold_in_fp32, load_arrays, open_checkpoint
from ..errors import CheckpointError, PairError
from ..targets import Target
from .config import DrafterConfig, parse_config, refuse_other_methods
from .dflash import DFlashDrafter, DFlashModel, DraftContext

__all__ = ["DFlashDrafter", "DraftContext", "DrafterConfig", "load_drafter_folder"]


def load_drafter_folder(folder: Path, target: Target) -> DFlashDrafter:
    """Load a drafter from a local folder and bind it to `target`.

    The pair is checked before any weight is read. Raises CheckpointError, UnsupportedError or PairError.
    """
    checkpoint = open_checkpoint(folder)
    refuse_other_methods(checkpoint.config, str(folder / "config.json"))
    if not checkpoint.is_drafter:
        raise CheckpointError(
            f"{folder} is a full model, not a DFlash drafter (no fc and hidden_norm); give the drafter of this target"
        )
    config = parse_config(checkpoint.config, str(folder / "config.json"))
    check_pair(config, target, str(folder))
    model = load_weights(checkpoint, config)
    if mx.default_device() == mx.Device(mx.cpu):
        hold_in_fp32(model)
    mx.eval(model.parameters())
    return DFlashDrafter(model, config, target)


def check_pair(config: DrafterConfig, target: Target, where: str) -> None:
    """Raise PairError, naming both sides, if the drafter can't run on this target."""
    kind = target.config["model_type"]
    if config.hidden_size != target.hidden_size:
        raise PairError(
            f"{where} is for a target of hidden size {config.hidden_size}, this {kind} has {target.hidden_size}; "
            "use the drafter made for it"
        )
    if max(config.target_layer_ids) >= target.num_layers or config.num_target_layers not in (None, target.num_layers):
        trained = config.num_target_layers or f"at least {max(config.target_layer_ids) + 1}"
        raise PairError(
            f"{where} taps layers {list(config.target_layer_ids)} of a target with {trained} layers, this {kind} has "
            f"{target.num_layers}; use the drafter made for it"
        )
    if not 0 <= config.mask_token_id < target.vocab_size:
        raise PairError(
            f"{where} has mask token {config.mask_token_id}, outside this {kind}'s table of {target.vocab_size} rows; "
            "use the drafter made for it"
        )


def load_weights(checkpoint: Checkpoint, config: DrafterConfig) -> DFlashModel:
    """Build the module and fill it strictly: every tensor used, none missing; quantized ones as the config says."""
    weights: dict[str, mx.array] = {}
    for file in checkpoint.files:  # whole, by open_checkpoint
        weights |= {name.removeprefix("model."): value for name, value in load_arrays(file)[0].items()}
    model = DFlashModel(config)
    if config.quantization is not None:
        layout = config.quantization
        nn.quantize(
            model,
            group_size=layout["group_size"],
            bits=layout["bits"],
            mode=layout.get("mode", "affine"),
            class_predicate=lambda path, _: layout.get(path, f"{path}.scales" in weights),
        )
    try:
        model.load_weights(list(weights.items()), strict=True)
    except ValueError as e:
        problem = " ".join(str(e).split())[:300]
        raise CheckpointError(
            f"{checkpoint.folder} does not hold a z-lab v1 drafter: {problem}; download it again"
        ) from e
    return model
