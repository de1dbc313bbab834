"""Google's Gemma 4, the text tower, in its three shapes.

31B: keys are values too on full-attention layers. 26B-A4B: the same, with experts beside the MLP. E2B and E4B: every
layer gets its own embedding of the tokens, and the last layers attend with the keys and values of earlier ones, so
there are fewer caches than layers.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..cache import LayerCache, SlidingKV, TargetCache
from ..errors import CheckpointError, UnsupportedError
from .base import Target
from .config import refuse_other_values
from .windowed import FULL, SLIDING, check_layers

# What transformers' Gemma4TextConfig means by a missing key. mlx-lm means something else by most of them: 20 layers
# that share keys and values, a softcap of 30, every fifth layer full.
MISSING: dict[str, Any] = {
    "vocab_size": 262144,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 30,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "num_global_key_value_heads": None,
    "head_dim": 256,
    "global_head_dim": 512,
    "rms_norm_eps": 1e-6,
    "sliding_window": 512,
    "attention_k_eq_v": False,
    "num_kv_shared_layers": 0,
    "use_double_wide_mlp": False,
    "hidden_size_per_layer_input": 256,
    "vocab_size_per_layer_input": 262144,
    "enable_moe_block": False,
    "num_experts": None,
    "top_k_experts": None,
    "moe_intermediate_size": None,
    "final_logit_softcapping": None,
    "tie_word_embeddings": True,
}
MISSING_ROPE: dict[str, dict[str, Any]] = {
    SLIDING: {"rope_type": "default", "rope_theta": 10_000.0},
    FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
}


class Gemma4(Target):
    """mlx-lm's layers return tuples, and take the keys and values that they share with an earlier one."""

    model_types = ("gemma4", "gemma4_text")

    def __init__(self, model: nn.Module, config: dict[str, Any]):
        super().__init__(model, config)
        self.language_model: Any = model if config["model_type"] == "gemma4_text" else self.model.language_model
        self.text: Any = self.language_model.model
        if config["num_kv_shared_layers"]:
            self.kv_bits_refusal = "its last layers share keys and values, which mlx-lm attends to unquantized"

    @classmethod
    def prepare(cls, config: dict[str, Any]) -> dict[str, Any]:
        """Give missing keys transformers' meaning, and the heads of full layers the keys that mlx-lm reads."""
        given = {key: value for key, value in config.items() if value is not None}
        text = {**MISSING, **given}
        refuse_other_values(text, hidden_activation="gelu_pytorch_tanh", attention_bias=False)
        refuse_other_values(given, use_bidirectional_attention="vision")  # which does not touch text
        text["layer_types"] = layer_types(text)
        text["rope_parameters"] = rope_parameters(text)
        text |= full_attention_heads(text)
        check_layers(text)
        if text["model_type"] == "gemma4":
            # mlx-lm reads vocab_size from the outer level alone, all else from the inner one.
            text["text_config"] = {k: v for k, v in text.items() if k not in ("text_config", "model_type")}
        return text

    @property
    def full_head_dim(self) -> int:
        return int(self.config["global_head_dim"])

    def make_cache(self, kv_bits: int | None = None, kv_group_size: int | None = None) -> TargetCache:
        full = self.full_attention_cache(kv_bits, kv_group_size)
        window, own = self.config["sliding_window"], self.num_layers - self.config["num_kv_shared_layers"]
        kinds = self.config["layer_types"][:own]
        return TargetCache([SlidingKV(window) if kind == SLIDING else full() for kind in kinds])

    def embed(self, ids: mx.array) -> mx.array:
        return self.text.embed_tokens(ids) * self.text.embed_scale

    def layers(self, ids: mx.array, cache: Sequence[LayerCache]) -> Iterator[mx.array]:
        hidden = self.embed(ids)
        inputs = self.layer_inputs(ids, hidden)
        masks: dict[str, Any] = {}  # made when a kind is first met, before its caches get the new rows
        shared: dict[str, Any] = {}  # kind -> keys, values and offset of the last layer with its own
        for index, (layer, kind) in enumerate(zip(self.text.layers, self.config["layer_types"], strict=True)):
            own: Any = cache[index] if index < len(cache) else None
            if kind not in masks:
                masks[kind] = own.make_mask(ids.shape[1])
            keys_values, offset = shared[kind] if own is None else (None, None)
            hidden, *shared[kind] = layer(
                hidden,
                masks[kind],
                own,
                per_layer_input=None if inputs is None else inputs[:, :, index],
                shared_kv=keys_values,
                offset=offset,
            )
            yield hidden

    def layer_inputs(self, ids: mx.array, hidden: mx.array) -> mx.array | None:
        """E2B and E4B: what each layer is told of the tokens beside `hidden`, (B, n, layers, width); else None."""
        text = self.text
        if not (width := self.config["hidden_size_per_layer_input"]):
            return None
        shape = (*ids.shape, self.num_layers, width)
        looked_up = (text.embed_tokens_per_layer(ids) * text.embed_tokens_per_layer_scale).reshape(shape)
        projected = (text.per_layer_model_projection(hidden) * text.per_layer_projection_scale).reshape(shape)
        return (text.per_layer_projection_norm(projected) + looked_up) * text.per_layer_input_scale

    def norm(self, hidden: mx.array) -> mx.array:
        return self.text.norm(hidden)

    def head(self, hidden: mx.array) -> mx.array:
        if self.config["tie_word_embeddings"]:
            return self.text.embed_tokens.as_linear(hidden)
        return self.language_model.lm_head(hidden)

    def logits(self, hidden: mx.array) -> mx.array:
        logits, cap = super().logits(hidden), self.config["final_logit_softcapping"]
        return logits if cap is None else mx.tanh(logits / cap) * cap


def layer_types(text: dict[str, Any]) -> list[str]:
    """The kind of every layer: the last one is always full, whatever the file says."""
    count = text["num_hidden_layers"]
    kinds = text.get("layer_types") or [SLIDING if (i + 1) % 6 else FULL for i in range(count)]
    return [*kinds[:-1], FULL]


def rope_parameters(text: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """RoPE settings by kind of layer: those of `rope_parameters`, with transformers' for a kind that is not there."""
    if any(text.get(key) for key in ("rope_theta", "rope_scaling")):
        raise UnsupportedError("gemma4 with rope_theta or rope_scaling is not supported; rope_parameters by layer are")
    rope = {**MISSING_ROPE, **(text.get("rope_parameters") or {})}
    for kind, settings in rope.items():
        if not isinstance(settings, dict) or "rope_theta" not in settings:
            raise CheckpointError(f"gemma4 needs 'rope_theta' in the rope_parameters of {kind}, found {settings!r}")
        known = MISSING_ROPE.get(kind, {}).get("rope_type")
        if settings.get("rope_type", "default") != known:
            raise UnsupportedError(f"gemma4 with RoPE {settings} in {kind} layers is not supported; {known!r} is")
    if rope[SLIDING].get("partial_rotary_factor", 1.0) != 1.0:  # mlx-lm would rotate all dimensions
        raise UnsupportedError(f"gemma4 with partial_rotary_factor in {SLIDING} layers is not supported")
    return rope


def full_attention_heads(text: dict[str, Any]) -> dict[str, Any]:
    """`global_head_dim` and `num_global_key_value_heads`, out of `per_layer_config`, where transformers 5.24 on writes
    what full layers have otherwise."""
    found = {"global_head_dim": text["global_head_dim"], "num_global_key_value_heads": None}
    if text["attention_k_eq_v"]:
        found["num_global_key_value_heads"] = text["num_global_key_value_heads"]
    if not (by_layer := text.get("per_layer_config")):
        return found
    full = [i for i, kind in enumerate(text["layer_types"]) if kind == FULL]
    first = by_layer[min(by_layer, key=int)]
    known = {"head_dim", "num_key_value_heads"} if text["attention_k_eq_v"] else {"head_dim"}
    if sorted(map(int, by_layer)) != full or any(v != first for v in by_layer.values()) or not known >= first.keys():
        raise UnsupportedError(f"gemma4 with per_layer_config {by_layer} is not supported; equal full layers are")
    return {
        "global_head_dim": first.get("head_dim", text["head_dim"]),
        "num_global_key_value_heads": first.get("num_key_value_heads"),
    }
