"""Which drafter was published for which target: one data file, `data/pairs.json`.

A target is told by its exact hub name, by that name with a quantization's suffix under mlx-community, or by what its
model card says it was quantized from. A name that is merely similar is another model.
"""

import json
import re
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

import yaml  # what huggingface_hub reads cards with
from huggingface_hub import metadata_load

from .checkpoint import open_checkpoint
from .drafters.config import DrafterConfig
from .drafters.formats import read_layout
from .errors import CheckpointError, PairError
from .facts import cached_name

# What converters append to a model's name for its quantization: 4bit, MLX-8bit, 4bit-DWQ, MXFP4-Q8, bf16 ...
QUANTIZATION = re.compile(
    r"(?:mlx-|optiq-)?(?:[2-8]bit(?:-g(?:s)?\d+)?(?:-dwq(?:-\d+)?)?|bf16|fp16|mxfp[48](?:-q[48])?|nvfp4)", re.IGNORECASE
)


@dataclass(frozen=True)
class Pair:
    """A published pair, and what is known of it before anything is downloaded.

    target, names: hub names of one target. revision: the drafter's commit, None where it is not known. layouts: what
    the drafter's config.json says, one of them. parameters, bits: of the target, bits a weight at 4-bit quantization.
    kv: (layers, KV heads, head_dim, window or None). state_bytes: of all recurrent layers.
    """

    target: str
    names: list[str]
    drafter: str
    revision: str | None
    parameters: int
    bits: float
    kv: list[tuple[int, int, int, int | None]]
    state_bytes: int
    drafter_parameters: int
    layouts: list[dict[str, Any]]

    @property
    def example(self) -> str:
        """A name to give to --model: the target at 4 bits."""
        model = self.target.rpartition("/")[2]
        if model.startswith("gpt-oss"):
            return f"mlx-community/{model}-MXFP4-Q8"
        return f"mlx-community/{model.lower() if model.startswith('gemma') else model}-4bit"


@cache
def pairs() -> tuple[Pair, ...]:
    text = (resources.files("mlx_dflash") / "data" / "pairs.json").read_text(encoding="utf-8")
    return tuple(Pair(**entry) for entry in json.loads(text)["pairs"])


def pair_of(name: str, folder: Path | None = None) -> Pair | None:
    """The pair of a target, from the name it was asked for by and, where it is known, its local folder."""
    names = [name]
    if folder is not None:
        names += [n for n in (cached_name(folder), base_model(folder)) if n is not None]
    return next((pair for n in names for pair in pairs() if is_target(n, pair)), None)


def is_target(name: str, pair: Pair) -> bool:
    """Whether a hub name is this pair's target, as published or quantized by mlx-community. Case does not matter."""
    known = [pair.target, *pair.names]
    if name.casefold() in (n.casefold() for n in known):
        return True
    owner, _, model = name.rpartition("/")
    if owner.casefold() != "mlx-community":
        return False
    for base in (n.rpartition("/")[2] for n in known):
        if model.casefold().startswith(f"{base}-".casefold()) and QUANTIZATION.fullmatch(model[len(base) + 1 :]):
            return True
    return False


def base_model(folder: Path) -> str | None:
    """What a model card says the folder is a quantization of.

    mlx-lm's converter writes `library_name: mlx` and the source as `base_model`. A fine-tune names its base by the same
    key, with `base_model_relation: finetune` or another library.
    """
    try:
        card = metadata_load(folder / "README.md") or {}
    except (OSError, ValueError, yaml.YAMLError):
        return None
    relation, base = card.get("base_model_relation"), card.get("base_model")
    if isinstance(base, list) and len(base) == 1:
        base = base[0]
    quantized = relation == "quantized" or (relation is None and card.get("library_name") == "mlx")
    return base if quantized and isinstance(base, str) else None


def check_drafter(pair: Pair, folder: Path) -> None:
    """Raise PairError if the files are not the drafter that the registry knows under this name.

    Hub repositories were re-released under one name with other taps and layers.
    """
    checkpoint = open_checkpoint(folder)
    if not checkpoint.is_drafter:
        raise CheckpointError(f"{pair.drafter} in {folder} is no DFlash drafter; give another with --draft-model")
    config = read_layout(checkpoint.config, str(folder / "config.json"), checkpoint.shapes).config
    wrong = [difference(config, layout) for layout in pair.layouts]
    if pair.layouts and all(wrong):
        raise PairError(
            f"{pair.drafter} in {folder} is not a release that is known for {pair.target}: {wrong[-1]}; to use it as "
            f"it is, give it by name with --draft-model {pair.drafter}"
        )


def difference(config: DrafterConfig, layout: dict[str, Any]) -> str:
    """The first value in which a drafter's config is not the known layout; '' where it is."""
    for key, value in layout.items():
        found = getattr(config, key)
        found = list(found) if isinstance(found, tuple) else found
        if value is not None and found != value:
            return f"{key} is {found}, not {value}"
    return ""
