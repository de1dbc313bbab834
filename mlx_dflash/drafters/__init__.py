"""How a folder becomes a drafter, of whatever format, and whether it fits a target."""

from pathlib import Path

import mlx.core as mx
import mlx.nn as nn

from ..checkpoint import Checkpoint, hold_in_fp32, load_arrays, open_checkpoint
from ..errors import CheckpointError, PairError
from ..facts import name_of
from ..targets import Target
from .config import DrafterConfig
from .context import DraftContext
from .dflash import DFlashDrafter, DFlashModel
from .dflash2 import DFlash2Model
from .formats import Layout, read_layout, refuse_other_methods
from .laguna import LagunaModel
from .pairing import check_pair, check_tokenizers

__all__ = [
    "DFlashDrafter",
    "DraftContext",
    "DrafterConfig",
    "check_pair",
    "evaluate_drafter",
    "load_drafter_folder",
    "open_drafter",
]


def load_drafter_folder(folder: Path, target: Target) -> DFlashDrafter:
    """Load a drafter from a local folder and bind it to `target`.

    The pair is checked before any weight is read. Raises CheckpointError, UnsupportedError or PairError.
    """
    return evaluate_drafter(open_drafter(folder, target), str(folder))


def evaluate_drafter(drafter: DFlashDrafter, where: str) -> DFlashDrafter:
    """Read all arrays of an opened drafter into memory."""
    mx.eval(drafter.model.parameters())
    check_map(drafter.model, drafter.target, where)
    return drafter


def open_drafter(folder: Path, target: Target) -> DFlashDrafter:
    """A drafter that is checked against `target` and whose arrays are not read yet."""
    checkpoint = open_checkpoint(folder)
    where = str(folder / "config.json")
    refuse_other_methods(checkpoint.config, where)
    if not checkpoint.is_drafter:
        raise CheckpointError(
            f"{folder} is a full model, not a DFlash drafter (no fc and hidden_norm); give the drafter of this target"
        )
    layout = read_layout(checkpoint.config, where, checkpoint.shapes)
    check_pair(layout.config, target, str(folder))
    check_tokenizers(folder, target.folder)
    model = load_weights(checkpoint, layout)
    if mx.default_device() == mx.Device(mx.cpu):
        hold_in_fp32(model)
    drafter = DFlashDrafter(model, layout.config, target)
    drafter.name = name_of(folder.resolve())
    return drafter


def load_weights(checkpoint: Checkpoint, layout: Layout) -> DFlashModel:
    """Build the module and fill it strictly: every tensor used, none missing; quantized ones as the config says."""
    config, folder = layout.config, checkpoint.folder
    weights: dict[str, mx.array] = {}
    for file in checkpoint.files:  # whole, by open_checkpoint
        weights |= {new: value for name, value in load_arrays(file)[0].items() if (new := layout.rename(name))}
    if layout.split is not None:
        weights = layout.split(weights, config)
    model = model_class(config)(config)
    if (quantized := config.quantization) is not None:
        nn.quantize(
            model,
            group_size=quantized["group_size"],
            bits=quantized["bits"],
            mode=quantized.get("mode", "affine"),
            class_predicate=lambda path, _: quantized.get(path, f"{path}.scales" in weights),
        )
    for name, value in weights.items():
        packed = name == "d2t" or f"{name.removesuffix('weight')}scales" in weights
        if not packed and not name.endswith(".scales") and not mx.issubdtype(value.dtype, mx.floating):
            raise CheckpointError(f"{folder}: {name} holds {value.dtype}, not weights; convert or download it again")
    try:
        model.load_weights(list(weights.items()), strict=True)
    except ValueError as e:
        problem = " ".join(str(e).split())[:300]
        raise CheckpointError(f"{folder} does not hold a {layout.name} drafter: {problem}; download it again") from e
    return model


def model_class(config: DrafterConfig) -> type[DFlashModel]:
    if config.laguna:
        return LagunaModel
    return DFlashModel if config.dflash2 is None else DFlash2Model


def check_map(model: DFlashModel, target: Target, where: str) -> None:
    """A reduced vocabulary must map into the target's."""
    if "d2t" not in model:
        return
    ids: list[int] = (mx.arange(model.d2t.shape[0]) + model.d2t).tolist()  # type: ignore[assignment]
    if min(ids) < 0 or max(ids) >= target.vocab_size:
        raise PairError(
            f"{where} maps its tokens (d2t) to ids {min(ids)} to {max(ids)}, this {target.config['model_type']} has "
            f"{target.vocab_size}; use the drafter made for it"
        )
