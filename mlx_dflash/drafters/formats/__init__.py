"""The layouts in which drafters are published, told apart by config.json.

A format is a file here with `parse` (config.json -> DrafterConfig) and `rename` (tensor names -> the module's).
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from ...errors import UnsupportedError
from ..config import DrafterConfig
from . import laguna, muse, speculators, zlab

# Methods whose checkpoints look alike but draft by other rules.
OTHER_METHODS = ("dspark", "dfly", "dflare", "domino", "eagle", "mtp", "medusa")


@dataclass(frozen=True)
class Layout:
    """A drafter's config, and what its tensors are called in the module; None: not needed.

    split: what else must happen to renamed tensors.
    """

    name: str
    config: DrafterConfig
    rename: Callable[[str], str | None]
    split: Callable[[dict[str, mx.array], DrafterConfig], dict[str, mx.array]] | None = None


def read_layout(config: dict[str, Any], where: str, tensors: Collection[str] = ()) -> Layout:
    """Tell the format and read its config. where: names config.json in messages; tensors: the files' tensor names.

    Raises UnsupportedError for another method, format or option, CheckpointError for a missing or wrong value.
    """
    refuse_other_methods(config, where)
    if "speculators_model_type" in config or "speculators_config" in config:
        return Layout("speculators", speculators.parse(config, where, tensors), speculators.rename)
    if config.get("model_type") == "muse_glimmer_assistant":
        return Layout("Muse assistant", muse.parse(config, where), muse.rename)
    if config.get("model_type") == "laguna":
        return Layout("Laguna", laguna.parse(config, where), laguna.rename, laguna.split)
    if "assistant" in str(config.get("model_type")):
        raise UnsupportedError(f"{where} is the assistant {config['model_type']!r}, which is not supported")
    parsed = zlab.parse(config, where)
    return Layout("z-lab v1" if parsed.dflash2 is None else "DFlash 2", parsed, zlab.rename)


def refuse_other_methods(config: dict[str, Any], where: str) -> None:
    names = [str(config.get(key, "")) for key in ("model_type", "speculators_model_type")]
    names += map(str, config.get("architectures") or [])
    for name in names:
        for method in OTHER_METHODS:
            if method in name.lower():
                raise UnsupportedError(f"{where} is for another method ({name}); only DFlash drafters are supported")
    if (kind := config.get("speculators_model_type", "dflash")) not in ("dflash", "dflash2"):
        raise UnsupportedError(f"{where} is a speculators file of {kind!r}; only DFlash drafters are supported")
