"""Which modules are quantized, and how: mlx-lm's modes and mixed recipes, and reasons for what stays as it is."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.nn as nn
from mlx_lm.convert import QUANT_RECIPES, mixed_quant_predicate_builder

from mlx_dflash.errors import RequestError, UnsupportedError

Settings = dict[str, Any]  # group_size, bits, mode
MODES = {"affine": (64, 4), "mxfp4": (32, 4), "mxfp8": (32, 8), "nvfp4": (16, 4)}  # mode -> group size, bits
AFFINE_BITS, AFFINE_GROUPS = (2, 3, 4, 5, 6, 8), (32, 64, 128)
WIDE_ENDS = "wide_ends"
RECIPES = (*QUANT_RECIPES, WIDE_ENDS)


@dataclass(frozen=True)
class Recipe:
    """What the flags ask for. mixed: one of RECIPES or None; skip_unfit: leave layers that the group doesn't divide."""

    mode: str
    group_size: int
    bits: int
    mixed: str | None = None
    skip_unfit: bool = False

    @property
    def settings(self) -> Settings:
        return {"group_size": self.group_size, "bits": self.bits, "mode": self.mode}

    def to_dict(self) -> dict[str, Any]:
        return self.settings | ({"quant_predicate": self.mixed} if self.mixed else {})


def make_recipe(
    mode: str = "affine",
    bits: int | None = None,
    group_size: int | None = None,
    mixed: str | None = None,
    skip_unfit: bool = False,
) -> Recipe:
    """mlx-lm's defaults for what is left out. Raises RequestError for what MLX can't pack."""
    if mode not in MODES:
        raise RequestError(f"--q-mode must be one of {', '.join(MODES)}, not {mode!r}")
    own_group, own_bits = MODES[mode]
    if mixed is not None and (mixed not in RECIPES or mode != "affine"):
        raise RequestError(f"--quant-predicate must be one of {', '.join(RECIPES)}, with --q-mode affine, not {mixed}")
    recipe = Recipe(mode, group_size or own_group, bits or own_bits, mixed, skip_unfit)
    if mode == "affine" and (recipe.bits not in AFFINE_BITS or recipe.group_size not in AFFINE_GROUPS):
        raise RequestError(
            f"affine quantization takes --q-bits {AFFINE_BITS} and --q-group-size {AFFINE_GROUPS}, not "
            f"{recipe.bits} and {recipe.group_size}"
        )
    if mode != "affine" and (recipe.group_size, recipe.bits) != (own_group, own_bits):
        raise RequestError(f"--q-mode {mode} has {own_bits} bits and groups of {own_group}; leave the two flags out")
    return recipe


def predicate(recipe: Recipe, model: nn.Module) -> Callable[[str, nn.Module], Settings | str]:
    """A function (path, module) -> the settings it is quantized with, or the reason why it is not."""
    own = getattr(model, "quant_predicate", None)
    if recipe.mixed in QUANT_RECIPES:
        own = mixed_quant_predicate_builder(recipe.mixed, model, recipe.group_size)
    elif recipe.mixed == WIDE_ENDS:
        own = wide_ends(recipe, len(model.layers))

    def choose(path: str, module: nn.Module) -> Settings | str:
        choice = True if own is None else own(path, module)
        if choice is False:
            return "the model's own rule keeps it"
        width = module.weight.shape[-1]
        settings = {"mode": "affine"} | choice if isinstance(choice, dict) else recipe.settings
        if settings is not recipe.settings and width % settings["group_size"]:
            settings = settings | {"group_size": next((g for g in AFFINE_GROUPS if width % g == 0), recipe.group_size)}
        if width % settings["group_size"] == 0:
            return settings
        if recipe.skip_unfit:
            return f"its width {width} is no multiple of the group size {settings['group_size']}"
        fitting = [f"--q-group-size {g}" for g in AFFINE_GROUPS if width % g == 0 and recipe.mode == "affine"]
        raise UnsupportedError(
            f"{path} is {width} wide, which the group size {settings['group_size']} does not divide; give "
            f"{' or '.join([*fitting, '--skip-unfit to leave such layers unquantized'])}"
        )

    return choose


def wide_ends(recipe: Recipe, layers: int) -> Callable[[str, nn.Module], bool | Settings]:
    """8 bits for the embedding, the head, and the first and last decoder layer."""
    wide = {"group_size": recipe.group_size, "bits": 8, "mode": "affine"}
    ends = ("layers.0.", f"layers.{layers - 1}.")

    def choose(path: str, module: nn.Module) -> bool | Settings:
        parts = f".{path}."
        is_end = "embed_tokens" in path or "lm_head" in path or any(f".{end}" in parts for end in ends)
        return wide if is_end else True

    return choose
