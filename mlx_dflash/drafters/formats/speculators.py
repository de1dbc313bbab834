"""vLLM's `speculators` layout (package 0.9.0): `speculators_model_type` "dflash" or "dflash2".

The block lies in `transformer_layer_config`. Files may hold an embedding and a head of their own, and a reduced
vocabulary with `d2t` (target id = draft id + d2t[draft id]). `aux_hidden_state_layer_ids` are one above the layer whose
output they mean; z-lab's converter drops a tap of the last layer, so `fc` takes as many taps as the file lists. A
sliding layer's window counts from the anchor, for all rows alike, and full layers are never causal.
"""

from collections.abc import Collection
from typing import Any

from ...errors import CheckpointError, UnsupportedError
from ..config import DrafterConfig, Vocabulary
from ..masks import Visibility
from .fields import Fields, block, layer_types, qwen3_window, target_layers
from .keys import COMMON, DFLASH2, NEUTRAL
from .zlab import CODEBOOKS, parts_of_dflash2

OUTER = {
    "aux_hidden_state_layer_ids",
    "block_size",
    "draft_vocab_size",
    "has_no_defaults_at_init",
    "mask_token_id",
    "sample_from_anchor",
    "sliding_window_non_causal",
    "speculators_config",
    "speculators_model_type",
    "speculators_version",
    "target_hidden_size",
    "transformer_layer_config",
}
# The verifier's own, for training; and the inverse of d2t.
UNUSED = ("verifier_norm.weight", "verifier_lm_head.weight", "t2d")


def parse(config: dict[str, Any], where: str, tensors: Collection[str]) -> DrafterConfig:
    """Raises UnsupportedError for an option that can't be run, CheckpointError for a missing or wrong value."""
    outer = Fields(config, where)
    kind = outer.need("speculators_model_type", str)
    outer.refuse_unknown(NEUTRAL | OUTER | DFLASH2 | {"quantization", "quantization_config"})
    if outer.get("sample_from_anchor", bool, False):
        raise UnsupportedError(f"{where} has sample_from_anchor, another method's rule; only false is known to DFlash")
    inner = layer_config(outer)
    hidden = inner.count("hidden_size")
    if outer.get("target_hidden_size", int, hidden) != hidden:
        raise UnsupportedError(f"{where} has target_hidden_size {config['target_hidden_size']}; only {hidden} is known")
    vocab = inner.count("vocab_size")
    rows = outer.get("draft_vocab_size", int, vocab)
    own = {rename(name) for name in tensors}
    verifier = outer.get("speculators_config", dict, {}).get("verifier") or {}
    return DrafterConfig(
        **block(inner),
        vocab_size=vocab,
        block_size=outer.count("block_size", least=2),
        mask_token_id=outer.need("mask_token_id", int),
        target_layer_ids=target_layers(outer, "aux_hidden_state_layer_ids", offset=1),
        num_target_layers=None,
        visibility=visibility(inner, outer.get("sliding_window_non_causal", bool, kind == "dflash2")),
        dflash2=parts_of_dflash2(Fields({**config, **inner.values}, where)) if kind == "dflash2" else None,
        vocabulary=vocabulary(rows, vocab, own, where),
        verifier=verifier.get("name_or_path"),
    )


def layer_config(outer: Fields) -> Fields:
    """`transformer_layer_config` as the package's model reads it."""
    inner = dict(outer.need("transformer_layer_config", dict))
    rope = inner.get("rope_parameters")
    if isinstance(rope, dict) and isinstance(rope.get("sliding_attention"), dict):
        inner["rope_parameters"] = rope["sliding_attention"]  # the package takes this one for all layers
    inner.setdefault("quantization", outer.values.get("quantization"))
    fields = Fields(inner, outer.where + " transformer_layer_config")
    fields.refuse_unknown(COMMON)
    return fields


def visibility(inner: Fields, non_causal: bool) -> tuple[Visibility, ...]:
    rules = []
    for kind in layer_types(inner):
        if kind == "full_attention":
            rules.append(Visibility())
            continue
        qwen3 = inner.get("model_type", str, "qwen3") == "qwen3"  # other configs have no such switch
        reach = qwen3_window(inner) if qwen3 else inner.count("sliding_window")
        rules.append(Visibility(reach, None if non_causal else 0, from_anchor=True))
    return tuple(rules)


def vocabulary(rows: int, vocab: int, own: Collection[str | None], where: str) -> Vocabulary:
    mapped = rows != vocab
    if rows > vocab or (mapped and not {"d2t", "lm_head.weight"} <= set(own)):
        raise CheckpointError(f"{where} drafts {rows} of {vocab} tokens, but its files lack d2t or lm_head")
    return Vocabulary(rows, "embed_tokens.weight" in own, "lm_head.weight" in own, mapped)


def rename(name: str) -> str | None:
    """A file's tensor name -> the module's, None for what drafting doesn't need."""
    name = name.removeprefix("model.")
    if name in UNUSED:
        return None
    return name.removesuffix(".weight") if name.removesuffix(".weight") in CODEBOOKS else name
