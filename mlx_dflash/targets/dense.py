"""Llama (2 to 3.2 and its many relatives) and Qwen3: dense decoders."""

from typing import Any, ClassVar

import mlx.core as mx

from ..errors import UnsupportedError
from .config import refuse_unread_scaling
from .windowed import FULL, SLIDING, Windowed, check_layers


class Dense(Windowed):
    """mlx-lm's llama.py and qwen3.py share one shape: embedding, equal layers, norm, tied or own head.

    Of the two only mlx-lm's llama has sliding-window layers, where `layer_types` names some.
    """

    model_types: ClassVar[tuple[str, ...]] = ("llama", "qwen3")

    @classmethod
    def prepare(cls, config: dict[str, Any]) -> dict[str, Any]:
        refuse_unread_scaling(config)
        kind, kinds = config["model_type"], config.get("layer_types") or [FULL] * config["num_hidden_layers"]
        if config.get("use_sliding_window") or (SLIDING in kinds and kind != "llama"):
            raise UnsupportedError(f"{kind} with sliding-window layers is not supported")
        if FULL not in kinds:
            raise UnsupportedError(f"{kind} with no {FULL} layer is not supported")  # mlx-lm looks for one
        config = {**config, "layer_types": kinds, "sliding_window": config.get("sliding_window")}
        check_layers(config)
        return super().prepare(config)

    def head(self, hidden: mx.array) -> mx.array:
        if self.config["tie_word_embeddings"]:
            return self.model.model.embed_tokens.as_linear(hidden)
        return self.model.lm_head(hidden)
