"""Meta's Muse Glimmer, the text tower: three sliding-window layers with RoPE, then a full one without positions."""

from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import muse_glimmer

from ..errors import CheckpointError, UnsupportedError
from .config import refuse_other_values
from .windowed import FULL, SLIDING, Windowed, check_layers


class TextModel(muse_glimmer.Model):
    """mlx-lm's module for files that hold the vision tower under Hugging Face's names, `model.vision_*`."""

    def sanitize(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
        return super().sanitize({k: v for k, v in weights.items() if not k.startswith("model.vision_")})


class MuseGlimmer(Windowed):
    """Gated attention inside mlx-lm's layers; embeddings normed, logits multiplied and soft-capped here."""

    model_types = ("muse_glimmer",)

    @staticmethod
    def model_classes(config: dict[str, Any]) -> tuple[type[nn.Module], type]:
        return TextModel, muse_glimmer.ModelArgs

    @classmethod
    def prepare(cls, config: dict[str, Any]) -> dict[str, Any]:
        """Spell out which layers slide and which have RoPE: mlx-lm counts the pattern from the first layer, Hugging
        Face from the last, and mlx-lm rotates all layers by one base."""
        refuse_other_values(config, hidden_activation="silu", attention_bias=False, rope_scaling=None)
        theta, count = config.get("rope_theta"), config["num_hidden_layers"]
        if not isinstance(theta, int | float):
            raise CheckpointError(f"muse_glimmer needs rope_theta in its config.json, found {theta!r}")
        full = [(count - 1 - i) % 4 == 0 for i in range(count)]
        bases = config.get("layer_rope_theta") or [0 if f else theta for f in full]
        if len(bases) != count or not {0, theta} >= set(bases):
            raise UnsupportedError(f"muse_glimmer with layer_rope_theta {bases} is not supported; {theta} or 0 is")
        kinds = config.get("layer_types") or [FULL if f else SLIDING for f in full]
        # mlx-lm reads text_config over what is at top level
        flat = super().prepare({**config, "layer_types": kinds, "layer_rope_theta": bases, "text_config": {}})
        check_layers(flat)
        return {"output_multiplier": 0.19611613513818404, "final_logit_softcapping": 20.0, **flat}

    def first(self, ids: mx.array) -> mx.array:
        return mx.fast.rms_norm(self.embed(ids), None, self.model.model.embed_eps)

    def head(self, hidden: mx.array) -> mx.array:
        if self.config["tie_word_embeddings"]:
            return self.model.model.embed_tokens.as_linear(hidden)
        return self.model.lm_head(hidden)

    def logits(self, hidden: mx.array) -> mx.array:
        cap = self.config["final_logit_softcapping"]
        return mx.tanh(super().logits(hidden) * self.config["output_multiplier"] / cap) * cap
