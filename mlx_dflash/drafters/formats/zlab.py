"""z-lab's own layout: DFlash v1 and DFlash 2 (the `dflash` package, 0.1.0).

Options lie in `dflash_config` or, in older files, at top level. Tensors may all begin with `model.`, and DFlash 2's
codebooks may or may not end in `.weight`.
"""

from typing import Any

from ...errors import CheckpointError, UnsupportedError
from ..config import DFlash2, DrafterConfig
from ..masks import Visibility
from .fields import Fields, block, layer_types, qwen3_window, target_layers
from .keys import COMMON, DFLASH2, LEFTOVER

SCALES = {"input_embedding_scale", "output_multiplier", "final_logit_softcapping"}
NESTED = {"mask_token_id", "target_layer_ids", "block_size", "num_target_layers", "causal"} | SCALES | DFLASH2
FLAT = (NESTED - {"causal"}) | {"dflash_config", "is_causal", "is_neox_style"}
ARCHITECTURES = {"DFlashDraftModel", "DFlash2DraftModel"}
CODEBOOKS = ("candidate_selector.predecessor_codebook", "candidate_selector.successor_codebook")


def parse(config: dict[str, Any], where: str) -> DrafterConfig:
    """The config as Qwen3's, whatever its model_type, since that is how z-lab's package reads it.

    Raises UnsupportedError for an option that can't be run, CheckpointError for a missing or wrong value.
    """
    model_type, names = config.get("model_type"), config.get("architectures") or []
    if model_type != "qwen3" and not ARCHITECTURES & set(names):
        raise UnsupportedError(f"{where} has model_type {model_type!r} and architectures {names}; no known drafter's")
    outer = Fields(config, where)
    outer.refuse_unknown(COMMON | LEFTOVER | FLAT)
    nested = outer.get("dflash_config", dict, {})
    Fields(nested, where).refuse_unknown(NESTED, "dflash_config key")
    for name in sorted(nested.keys() & config.keys()):
        flat, inner = config[name], nested[name]
        if None not in (flat, inner) and flat != inner:
            raise CheckpointError(f"{where} gives {name} twice: {flat!r} and, in dflash_config, {inner!r}")
    fields = Fields({**config, **{k: v for k, v in nested.items() if v is not None}}, where)
    cap = fields.get("final_logit_softcapping", float)
    return DrafterConfig(
        **block(fields),
        vocab_size=fields.count("vocab_size"),
        block_size=fields.count("block_size", least=2),
        mask_token_id=fields.need("mask_token_id", int),
        target_layer_ids=target_layers(fields, "target_layer_ids"),
        num_target_layers=fields.get("num_target_layers", int),
        input_embedding_scale=fields.get("input_embedding_scale", float, 1.0),
        output_multiplier=fields.get("output_multiplier", float, 1.0),
        final_logit_softcapping=cap if cap is not None and cap > 0 else None,
        rope_interleaved=not fields.get("is_neox_style", bool, True),
        visibility=visibility(fields),
        dflash2=dflash2(fields, config),
    )


def visibility(fields: Fields) -> tuple[Visibility, ...]:
    """One rule a layer. Causality: top-level `is_causal`, then `dflash_config.causal`, then sliding layers are causal.

    A sliding layer's row at q sees keys with q - k < window and, where it isn't causal, k - q < window.
    """
    kinds = layer_types(fields)
    if "sliding_attention" not in kinds and fields.get("use_sliding_window", bool) and "sliding_window" in fields:
        raise UnsupportedError(f"{fields.where} has use_sliding_window but no sliding layer_types; only both are known")
    given: bool | None = fields.get("is_causal", bool)
    if given is None:
        given = fields.get("causal", bool)
    rules = []
    for kind in kinds:
        sliding = kind == "sliding_attention"
        causal = sliding if given is None else given
        behind = qwen3_window(fields) - 1 if sliding else None
        rules.append(Visibility(behind, 0 if causal else behind))
    return tuple(rules)


def dflash2(fields: Fields, config: dict[str, Any]) -> DFlash2 | None:
    named = "DFlash2DraftModel" in (config.get("architectures") or [])
    if not named and not any(key in fields for key in DFLASH2):
        return None
    return parts_of_dflash2(fields)


def parts_of_dflash2(fields: Fields) -> DFlash2:
    parts = DFlash2(
        fields.count("conv_kernel_size"),
        fields.count("conv_group_size"),
        fields.count("selector_rank"),
        fields.count("selector_top_k"),
    )
    if fields.need("hidden_size", int) % parts.group_size:
        raise CheckpointError(f"{fields.where} has conv_group_size {parts.group_size}, no divisor of its hidden_size")
    if parts.top_k > fields.need("vocab_size", int):
        raise CheckpointError(f"{fields.where} has selector_top_k {parts.top_k}, more than its vocab_size")
    return parts


def rename(name: str) -> str | None:
    """A file's tensor name -> the module's."""
    name = name.removeprefix("model.")
    return name.removesuffix(".weight") if name.removesuffix(".weight") in CODEBOOKS else name
