"""What a target is: an mlx-lm model that we loaded, run layer by layer so that hidden states can be tapped.

Knows nothing of drafters or tokens' text. A family adds its layer loop, and whatever its embedding, head or caches do
differently.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import mlx.core as mx
import mlx.nn as nn

from ..cache import FullKV, LayerCache, QuantizedKV, TargetCache
from ..costs import Costs
from ..errors import UnsupportedError


class Target(ABC):
    """The large model whose text is generated.

    model: mlx-lm's module, weights loaded; config: config.json in the flat layout (`targets.config.normalise`).
    """

    model_types: ClassVar[tuple[str, ...]]
    # What mlx-lm's `load_model` takes as `get_model_classes`; None: its own choice by model_type.
    model_classes: ClassVar[Callable[..., tuple[type[nn.Module], type]] | None] = None

    # The folder it was loaded from; a pairing check compares tokenizers.
    folder: Path | None = None

    # Why keys and values can't be quantized, where they can't.
    kv_bits_refusal: str | None = None

    asked_for: str = ""  # the name or folder that `mlx_dflash.load` was called with

    def __init__(self, model: nn.Module, config: dict[str, Any]):
        self.model: Any = model
        self.config = config
        self.name = ""  # what the folder is called, by which model cards are known
        self.generation_config: dict[str, Any] = {}
        self.costs: dict[str, Costs] = {}  # of its pairs, by calibrate.key

    @classmethod
    def prepare(cls, config: dict[str, Any]) -> dict[str, Any]:
        """The flat config -> what this family's mlx-lm module must be built from.

        Values that stand for missing keys are Hugging Face's, whose files these are; mlx-lm's often differ. Raises
        UnsupportedError for what the family can't run exactly.
        """
        head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        # mlx-lm's llama assumes tied embeddings where the key is missing
        return {"tie_word_embeddings": False, **config, "head_dim": head_dim}

    @property
    def hidden_size(self) -> int:
        return int(self.config["hidden_size"])

    @property
    def num_layers(self) -> int:
        return int(self.config["num_hidden_layers"])

    @property
    def vocab_size(self) -> int:
        """Rows of the embedding table, which may exceed the tokenizer's vocabulary."""
        return int(self.config["vocab_size"])

    @property
    def full_head_dim(self) -> int:
        """Dimensions of a head of full-attention layers."""
        return int(self.config["head_dim"])

    @abstractmethod
    def embed(self, ids: mx.array) -> mx.array:
        """(B, n) token ids -> (B, n, hidden): the rows that the drafter's noise starts from."""

    @abstractmethod
    def layers(self, ids: mx.array, cache: Sequence[LayerCache]) -> Iterator[mx.array]:
        """(B, n) token ids -> each decoder layer's output (B, n, hidden), in order, appending n rows to the cache."""

    @abstractmethod
    def norm(self, hidden: mx.array) -> mx.array:
        """The final norm before the head."""

    @abstractmethod
    def head(self, hidden: mx.array) -> mx.array:
        """(..., hidden) -> (..., vocab): bare logits from the target's own head, without multiplier or softcap."""

    def logits(self, hidden: mx.array) -> mx.array:
        """The target's own logits of its last layer's output."""
        return self.head(self.norm(hidden))

    def make_cache(self, kv_bits: int | None = None, kv_group_size: int | None = None) -> TargetCache:
        """An empty cache. kv_bits: quantize what full attention keeps, in groups of kv_group_size (None: chosen).

        Raises UnsupportedError where this target's keys and values can't be quantized.
        """
        full = self.full_attention_cache(kv_bits, kv_group_size)
        return TargetCache([full() for _ in range(self.num_layers)])

    def full_attention_cache(
        self, kv_bits: int | None, kv_group_size: int | None
    ) -> Callable[[], FullKV | QuantizedKV]:
        """What makes the cache of a full-attention layer."""
        if kv_bits is None:
            return FullKV
        kind, head_dim = self.config["model_type"], self.full_head_dim
        if self.kv_bits_refusal is not None:
            raise UnsupportedError(f"kv_bits is not supported with {kind}: {self.kv_bits_refusal}; leave it out")
        sizes = (64, 32) if kv_group_size is None else (kv_group_size,)
        size = next((size for size in sizes if head_dim % size == 0), None)
        if size is None:
            raise UnsupportedError(
                f"kv_bits is not supported with this {kind}: its head_dim of {head_dim} is no multiple of "
                f"{' or '.join(map(str, sizes))}; leave it out"
            )
        return partial(QuantizedKV, kv_bits, size)

    def forward(
        self, ids: mx.array, cache: TargetCache, taps: Sequence[int] = (), last_logits_only: bool = False
    ) -> tuple[mx.array, mx.array | None]:
        """Run (B, n) ids after what the cache holds.

        Returns logits (B, n or 1, vocab) and features (B, n, len(taps) * hidden): the outputs of decoder layers `taps`
        (`hidden_states[tap + 1]` in Hugging Face terms, before any final norm), concatenated in list order; None
        without taps.
        """
        wanted = set(taps)
        tapped = {}
        hidden = None
        for index, hidden in enumerate(self.layers(ids, cache.layers)):
            if index in wanted:
                tapped[index] = hidden
        assert hidden is not None
        if last_logits_only:
            hidden = hidden[:, -1:]
        features = mx.concatenate([tapped[tap] for tap in taps], axis=-1) if taps else None
        return self.logits(hidden), features
