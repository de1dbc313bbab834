"""A config's values by name: each present and of the right type, or an error that names file, key and value."""

from collections.abc import Collection, Mapping
from typing import Any

from ...errors import CheckpointError, UnsupportedError
from ...rope import yarn_attention
from ..rope import RopeScaling
from .keys import SIZES


class Fields:
    """Typed access to a config. where: names the file in messages."""

    def __init__(self, values: Mapping[str, Any], where: str):
        self.values = values
        self.where = where

    def __contains__(self, name: str) -> bool:
        return self.values.get(name) is not None

    def get(self, name: str, kind: type, default: Any = None) -> Any:
        """The value, `default` where it is missing or null."""
        value = self.values.get(name)
        if value is None:
            return default
        if kind is float and isinstance(value, int):
            value = value if isinstance(value, bool) else float(value)
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise CheckpointError(f"{self.where} needs {name!r} as {kind.__name__}, found {value!r}")
        return value

    def need(self, name: str, kind: type) -> Any:
        if name not in self:
            raise CheckpointError(f"{self.where} needs {name!r} as {kind.__name__}, found {self.values.get(name)!r}")
        return self.get(name, kind)

    def count(self, name: str, least: int = 1) -> int:
        value: int = self.need(name, int)
        if value < least:
            raise CheckpointError(f"{self.where} has {name} {value}; at least {least} is needed")
        return value

    def refuse_unknown(self, known: Collection[str], what: str = "key") -> None:
        """Anything else that is set may change the computation."""
        for name, value in sorted(self.values.items()):
            if name not in known and value is not None and value is not False:
                shown = str(value)[:40]
                raise UnsupportedError(f"{self.where} has the unknown {what} {name!r} ({shown}); not supported")

    def refuse_options(self) -> None:
        """Options of the block that no known drafter uses."""
        if (act := self.get("hidden_act", str, "silu")) != "silu":
            raise UnsupportedError(f"{self.where} has hidden_act {act!r}; only 'silu' is known")
        if "quantization_config" in self and self.values.get("quantization") is None:
            method = self.get("quantization_config", dict).get("quant_method", "unknown")
            raise UnsupportedError(f"{self.where} has weights quantized by {method!r}; only mlx-lm's own is known")


def block(fields: Fields) -> dict[str, Any]:
    """The arguments of DrafterConfig that describe the transformer block."""
    fields.refuse_options()
    sizes = {name: fields.count(name) for name in SIZES}
    if sizes["num_attention_heads"] % sizes["num_key_value_heads"] or sizes["head_dim"] % 2:
        raise CheckpointError(f"{fields.where} has heads that don't fit each other: {sizes}")
    theta, scaling = rope(fields)
    return {
        **sizes,
        "rms_norm_eps": fields.need("rms_norm_eps", float),
        "rope_theta": theta,
        "rope_scaling": scaling,
        "attention_bias": fields.get("attention_bias", bool, False),
        "quantization": quantization(fields),
        "bos_token_id": fields.get("bos_token_id", int),
    }


def layer_types(fields: Fields, default: str = "full_attention") -> list[str]:
    """One of "full_attention" and "sliding_attention" for every layer; `default` for all where the file doesn't say."""
    count = fields.count("num_hidden_layers")
    kinds: list[str] = fields.get("layer_types", list) or [default] * count
    if unknown := [k for k in kinds if k not in ("full_attention", "sliding_attention")]:
        raise UnsupportedError(f"{fields.where} has the unknown layer type {unknown[0]!r}")
    if len(kinds) != count:
        raise CheckpointError(f"{fields.where} has {len(kinds)} layer_types for {count} layers")
    return kinds


def qwen3_window(fields: Fields) -> int:
    """The sliding window of a Qwen3 config. transformers drops it unless `use_sliding_window` is on, others don't."""
    if not fields.get("use_sliding_window", bool):
        off = fields.values.get("use_sliding_window")
        raise UnsupportedError(f"{fields.where} has sliding layers and use_sliding_window {off}; only true is known")
    return fields.count("sliding_window", least=2)


def target_layers(fields: Fields, name: str, offset: int = 0) -> tuple[int, ...]:
    """Tapped layers; `offset` is how much the file counts above the layer whose output it means."""
    ids = fields.need(name, list)
    taps = [i - offset for i in ids if isinstance(i, int) and not isinstance(i, bool)]
    if not ids or len(taps) != len(ids) or min(taps) < 0:
        raise CheckpointError(f"{fields.where} has {name} {ids}: not a usable drafter")
    return tuple(taps)


def rope(fields: Fields) -> tuple[float, RopeScaling | None]:
    """Base and scaling, from flat `rope_theta` and `rope_scaling` or from transformers 5's `rope_parameters`."""
    where = fields.where
    given = {**fields.get("rope_scaling", dict, {}), **fields.get("rope_parameters", dict, {})}
    if isinstance(given.get("full_attention", given.get("sliding_attention")), dict):
        raise UnsupportedError(f"{where} has other rope_parameters a layer type, which no drafter is known to use")
    values = Fields({"rope_theta": fields.values.get("rope_theta"), **given}, where)
    theta: float = values.need("rope_theta", float)
    kind = values.get("rope_type", str) or values.get("type", str, "default")
    if values.get("partial_rotary_factor", float, 1.0) != 1.0:
        raise UnsupportedError(f"{where} has partial_rotary_factor, which no drafter is known to use")
    known = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
    if kind == "default":
        values.refuse_unknown(known, "RoPE key")
        return theta, None
    own = {
        "linear": {"factor"},
        "yarn": {"factor", "beta_fast", "beta_slow", "truncate", "attention_factor", "mscale", "mscale_all_dim"},
        "llama3": {"factor", "low_freq_factor", "high_freq_factor"},
    }
    if kind not in own:
        raise UnsupportedError(f"{where} has RoPE scaling {kind!r}; known are {sorted(own)}")
    values.refuse_unknown(known | own[kind] | {"original_max_position_embeddings"}, "RoPE key")
    return theta, scaling(kind, values, fields)


def scaling(kind: str, values: Fields, config: Fields) -> RopeScaling:
    factor: float = values.need("factor", float)
    if kind == "linear":
        return RopeScaling(kind, factor)
    # transformers' order: the config's own key, the RoPE dict's, the longest position
    length = config.get("original_max_position_embeddings", int)
    length = length or values.get("original_max_position_embeddings", int)
    length = length or config.need("max_position_embeddings", int)
    if kind == "llama3":
        low, high = values.need("low_freq_factor", float), values.need("high_freq_factor", float)
        return RopeScaling(kind, factor, length, low_freq_factor=low, high_freq_factor=high)
    attention = values.get("attention_factor", float)
    if attention is None:
        attention = yarn_attention(factor, values.get("mscale", float), values.get("mscale_all_dim", float))
    return RopeScaling(
        kind,
        factor,
        length,
        beta_fast=values.get("beta_fast", float) or 32.0,
        beta_slow=values.get("beta_slow", float) or 1.0,
        truncate=values.get("truncate", bool, True),
        attention=attention,
    )


def quantization(fields: Fields) -> dict[str, Any] | None:
    """mlx-lm's map: bits, group_size and mode of all quantized modules, and exceptions by path."""
    layout: dict[str, Any] | None = fields.get("quantization", dict)
    if layout is None:
        return None
    inner = Fields(layout, f"{fields.where} quantization")
    for name in ("bits", "group_size"):
        inner.count(name)
    if (mode := inner.get("mode", str, "affine")) not in ("affine", "mxfp4", "mxfp8", "nvfp4"):
        raise UnsupportedError(f"{fields.where} has the unknown quantization mode {mode!r}")
    return layout
