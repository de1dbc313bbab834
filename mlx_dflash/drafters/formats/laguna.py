"""Poolside's layout (`DFlashLagunaForCausalLM`): Laguna-XS-2.1-DFlash, Laguna-S-2.1-DFlash.

The config says `model_type: laguna` like the target's; options of drafting lie in `dflash_config`. Queries, keys and
values come from one tensor, `qkv_proj`. Windows are those of z-lab's causal layers.
"""

from typing import Any

import mlx.core as mx

from ...errors import CheckpointError, UnsupportedError
from ..config import DrafterConfig
from ..masks import Visibility
from .fields import Fields, block, layer_types, target_layers
from .keys import COMMON

OWN = {"dflash_config", "draft_vocab_size", "eagle_aux_hidden_state_layer_ids", "gating", "num_experts"}
OWN |= {"sliding_windows"}
NESTED = {"block_size", "causal", "mask_token_id", "num_target_layers", "target_layer_ids"}
FUSED = "self_attn.qkv_proj"
SPLIT = tuple(FUSED.replace("qkv", part) for part in "qkv")


def parse(config: dict[str, Any], where: str) -> DrafterConfig:
    """Raises UnsupportedError for an option that can't be run, CheckpointError for a missing or wrong value."""
    fields = Fields(config, where)
    fields.refuse_unknown(COMMON | OWN)
    nested = Fields(fields.need("dflash_config", dict), f"{where} dflash_config")
    nested.refuse_unknown(NESTED, "key")
    refuse_options(fields, nested)
    taps = target_layers(nested, "target_layer_ids")
    counted = fields.get("eagle_aux_hidden_state_layer_ids", list)
    if counted is not None and counted != [tap + 1 for tap in taps]:
        raise CheckpointError(
            f"{where} taps layers {list(taps)} and, in eagle_aux_hidden_state_layer_ids, {counted}, which should be "
            "one above; download it again"
        )
    return DrafterConfig(
        **{**block(fields), "quantization": quantization(fields)},
        vocab_size=fields.count("vocab_size"),
        block_size=nested.count("block_size", least=2),
        mask_token_id=nested.need("mask_token_id", int),
        target_layer_ids=taps,
        num_target_layers=nested.count("num_target_layers"),
        visibility=visibility(fields),
        laguna=True,
    )


def refuse_options(fields: Fields, nested: Fields) -> None:
    where = fields.where
    if (gating := fields.values.get("gating", True)) not in (True, "per-head"):
        raise UnsupportedError(f"{where} has gating {gating!r}; only 'per-head' is known")
    if not nested.need("causal", bool):
        raise UnsupportedError(f"{where} drafts with causal false, which no Laguna drafter is known to do")
    if fields.get("num_experts", int, 0) or fields.get("attention_bias", bool, False):
        raise UnsupportedError(f"{where} has experts or attention_bias, which no Laguna drafter is known to use")
    rows, vocab = fields.get("draft_vocab_size", int), fields.count("vocab_size")
    if rows not in (None, vocab):
        raise UnsupportedError(f"{where} has draft_vocab_size {rows} and vocab_size {vocab}; only equal ones are known")


def visibility(fields: Fields) -> tuple[Visibility, ...]:
    """Every layer is causal; a sliding layer's row at q sees keys with q - k < window."""
    kinds = layer_types(fields)
    windows = fields.get("sliding_windows", list)
    if windows is not None and windows != [fields.values.get("sliding_window")] * len(kinds):
        raise UnsupportedError(f"{fields.where} has sliding_windows {windows}; only sliding_window for all is known")
    reach = fields.count("sliding_window", least=2) - 1 if "sliding_attention" in kinds else None
    return tuple(Visibility(reach if kind == "sliding_attention" else None, 0) for kind in kinds)


def quantization(fields: Fields) -> dict[str, Any] | None:
    """mlx-lm's map, with what it says of a fused module said of its three parts."""
    layout: dict[str, Any] | None = block(fields)["quantization"]
    if layout is None:
        return None
    out: dict[str, Any] = {}
    for path, how in layout.items():
        out |= {path.replace(FUSED, part): how for part in SPLIT} if FUSED in path else {path: how}
    return out


def rename(name: str) -> str | None:
    """A file's tensor name -> the module's."""
    return name.removeprefix("model.")


def split(weights: dict[str, mx.array], config: DrafterConfig) -> dict[str, mx.array]:
    """Fused `qkv_proj` tensors, packed or not, as three; all others as they are."""
    ends = [config.num_attention_heads * config.head_dim]
    ends.append(ends[0] + config.num_key_value_heads * config.head_dim)
    out = {}
    for name, value in weights.items():
        if FUSED not in name:
            out[name] = value
            continue
        for part, rows in zip(SPLIT, mx.split(value, ends, axis=0), strict=True):
            out[name.replace(FUSED, part)] = rows
    return out
