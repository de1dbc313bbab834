"""Transformers' Muse Glimmer assistant (`model_type: muse_glimmer_assistant`).

The same block as z-lab's under other tensor names and in a flat config. Its reference is transformers' assisted
generation: windows are one row wider than z-lab's, never causal, the head is bare, and every block is drafted whole.
"""

from typing import Any

from ..config import DrafterConfig
from ..masks import Visibility
from .fields import Fields, block, layer_types, target_layers
from .keys import COMMON

OWN = {"block_size", "mask_token_id", "target_layer_ids", "is_neox_style"}
NAMES = {"encoder.fc": "fc", "encoder.output_norm_enc": "hidden_norm"}


def parse(config: dict[str, Any], where: str) -> DrafterConfig:
    """Raises UnsupportedError for an option that can't be run, CheckpointError for a missing or wrong value."""
    fields = Fields(config, where)
    fields.refuse_unknown(COMMON | OWN)
    rules = []
    for kind in layer_types(fields, default="sliding_attention"):
        reach = fields.count("sliding_window") if kind == "sliding_attention" else None
        rules.append(Visibility(reach, reach))
    return DrafterConfig(
        **block(fields),
        vocab_size=fields.get("vocab_size", int),
        block_size=fields.count("block_size", least=2),
        mask_token_id=fields.need("mask_token_id", int),
        target_layer_ids=target_layers(fields, "target_layer_ids"),
        num_target_layers=None,
        rope_interleaved=not fields.get("is_neox_style", bool, True),
        visibility=tuple(rules),
        whole_block=True,
    )


def rename(name: str) -> str | None:
    """A file's tensor name -> the module's."""
    name = name.removeprefix("model.")
    module, _, leaf = name.rpartition(".")
    return f"{NAMES.get(module, module)}.{leaf}"
