"""A drafter's config.json -> one strict DrafterConfig. What is not understood is refused, never guessed.

Being wrong here raises no error later: acceptance just drops. So every key that changes the computation is read or
refused by name.
"""

from dataclasses import dataclass
from typing import Any

from ..errors import CheckpointError, UnsupportedError

# Methods whose checkpoints look alike but draft by other rules.
OTHER_METHODS = ("dspark", "dfly", "eagle", "mtp", "medusa")
DFLASH_KEYS = {
    "mask_token_id",
    "target_layer_ids",
    "block_size",
    "causal",
    "input_embedding_scale",
    "output_multiplier",
    "final_logit_softcapping",
}
DFLASH2_KEYS = {"conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k"}


@dataclass(frozen=True)
class DrafterConfig:
    """z-lab's v1 drafter with full attention in every layer.

    block_size: rows of the trained block, anchor included. target_layer_ids: taps in the order they are concatenated.
    num_target_layers: layers of the target it was trained on, where the file says so. quantization: mlx-lm's map or
    None. Head counts, head_dim and RoPE are the drafter's own, never the target's.
    """

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    vocab_size: int
    block_size: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    num_target_layers: int | None
    input_embedding_scale: float = 1.0
    output_multiplier: float = 1.0
    final_logit_softcapping: float | None = None
    quantization: dict[str, Any] | None = None


def parse_config(config: dict[str, Any], where: str) -> DrafterConfig:
    """Read a z-lab v1 config, flat or with `dflash_config`; `where` names the file in error messages.

    Raises UnsupportedError for another method or option, CheckpointError for a missing or wrong value.
    """
    nested = read_object(config, "dflash_config", where)
    if (config.keys() | nested.keys()) & DFLASH2_KEYS:
        raise UnsupportedError(f"{where} is a DFlash 2 drafter (dynamic convolutions), which is not supported yet")
    if unknown := sorted(nested.keys() - DFLASH_KEYS):
        raise UnsupportedError(f"{where} has the unknown dflash_config key {unknown[0]!r}")
    merged = {**config, **nested}
    refuse_options(merged, where)

    def need(key: str, kind: type) -> Any:
        value = merged.get(key)
        if not isinstance(value, kind) or isinstance(value, bool):
            raise CheckpointError(f"{where} needs {key!r} as {kind.__name__}, found {value!r}")
        return value

    def number(key: str, default: float | None) -> float | None:
        value = merged.get(key)
        if value is not None and (not isinstance(value, (int, float)) or isinstance(value, bool)):
            raise CheckpointError(f"{where} needs {key!r} as a number, found {value!r}")
        return float(value) if value else default

    taps = need("target_layer_ids", list)
    quantization = read_object(merged, "quantization", where) or None
    if quantization is not None and not {"group_size", "bits"} <= quantization.keys():
        raise CheckpointError(f"{where} has 'quantization' without group_size and bits; convert the drafter again")
    parsed = DrafterConfig(
        **{k: need(k, int) for k in ("hidden_size", "intermediate_size", "num_hidden_layers", "vocab_size")},
        **{k: need(k, int) for k in ("num_attention_heads", "num_key_value_heads", "head_dim")},
        **{k: need(k, int) for k in ("block_size", "mask_token_id")},
        rms_norm_eps=need("rms_norm_eps", float),
        rope_theta=rope_theta(merged, where),
        target_layer_ids=tuple(taps),
        num_target_layers=merged.get("num_target_layers"),
        input_embedding_scale=number("input_embedding_scale", 1.0) or 1.0,
        output_multiplier=number("output_multiplier", 1.0) or 1.0,
        final_logit_softcapping=number("final_logit_softcapping", None),
        quantization=quantization,
    )
    if parsed.block_size < 2 or not taps or not all(isinstance(t, int) and t >= 0 for t in taps):
        raise CheckpointError(f"{where} has block_size {parsed.block_size} and taps {taps}: not a usable drafter")
    return parsed


def read_object(config: dict[str, Any], key: str, where: str) -> dict[str, Any]:
    value = config.get(key) or {}
    if not isinstance(value, dict):
        raise CheckpointError(f"{where} needs {key!r} as an object, found {value!r}")
    return dict(value)


def refuse_other_methods(config: dict[str, Any], where: str) -> None:
    names = [str(config.get("model_type", "")), *map(str, config.get("architectures") or [])]
    for name in names:
        for method in OTHER_METHODS:
            if method in name.lower():
                raise UnsupportedError(f"{where} is for another method ({name}); only DFlash drafters are supported")
    if "speculators_config" in config:
        raise UnsupportedError(f"{where} is in the speculators format, which is not supported yet")
    if "assistant" in names[0]:
        raise UnsupportedError(f"{where} is a Transformers assistant ({names[0]}), which is not supported yet")


def refuse_options(merged: dict[str, Any], where: str) -> None:
    layer_types = merged.get("layer_types") or ["full_attention"]
    if not isinstance(layer_types, list) or not all(isinstance(t, str) for t in layer_types):
        raise CheckpointError(f"{where} needs 'layer_types' as a list of names, found {layer_types!r}")
    kinds = set(layer_types)
    if merged.get("use_sliding_window") and merged.get("sliding_window") and kinds == {"full_attention"}:
        raise UnsupportedError(f"{where} has use_sliding_window without sliding layer_types, which is not supported")
    if kinds != {"full_attention"}:
        raise UnsupportedError(f"{where} has layer types {sorted(kinds)}; only full_attention is supported yet")
    causal = merged.get("is_causal") if merged.get("is_causal") is not None else merged.get("causal")
    if causal:
        raise UnsupportedError(f"{where} drafts causally (is_causal), which is not supported yet")
    if merged.get("attention_bias"):
        raise UnsupportedError(f"{where} has attention_bias, which no DFlash drafter is known to use")
    if merged.get("hidden_act", "silu") != "silu":
        raise UnsupportedError(f"{where} has hidden_act {merged['hidden_act']!r}; only 'silu' is known")


def rope_theta(merged: dict[str, Any], where: str) -> float:
    rope = {**read_object(merged, "rope_scaling", where), **read_object(merged, "rope_parameters", where)}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default":
        raise UnsupportedError(f"{where} has RoPE scaling {kind!r}, which is not supported yet")
    theta = merged.get("rope_theta", rope.get("rope_theta"))
    if not isinstance(theta, (int, float)):
        raise CheckpointError(f"{where} needs 'rope_theta', found {theta!r}")
    return float(theta)
