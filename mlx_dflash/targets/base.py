"""What a target is: an mlx-lm model that we loaded, run layer by layer so that hidden states can be tapped.

Knows nothing of drafters or tokens' text. A family adds its layer loop, and whatever its embedding, head or caches do
differently.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import mlx.core as mx
import mlx.nn as nn

from ..cache import FullKV, LayerCache, TargetCache


class Target(ABC):
    """The large model whose text is generated.

    model: mlx-lm's module, weights loaded; config: config.json in the flat layout (`targets.config.normalise`).
    """

    model_types: ClassVar[tuple[str, ...]]

    def __init__(self, model: nn.Module, config: dict[str, Any]):
        self.model: Any = model
        self.config = config

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

    def make_cache(self) -> TargetCache:
        return TargetCache([FullKV() for _ in range(self.num_layers)])

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
