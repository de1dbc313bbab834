"""What a drafter is, whatever its files call things: one strict DrafterConfig.

`formats/` reads config.json into it. What is not understood is refused there, never guessed: being wrong raises no
error later, acceptance just drops.
"""

from dataclasses import dataclass
from typing import Any

from .masks import Visibility
from .rope import RopeScaling


@dataclass(frozen=True)
class DFlash2:
    """The parts that DFlash 2 adds: convolutions over block rows and a selector among candidate tokens."""

    kernel_size: int
    group_size: int
    rank: int
    top_k: int


@dataclass(frozen=True)
class Vocabulary:
    """What a drafter with its own vocabulary holds in its files; what it lacks is the target's.

    rows: tokens it can draft; below the target's number its ids are mapped (`d2t`).
    """

    rows: int
    own_embedding: bool
    own_head: bool
    mapped: bool


@dataclass(frozen=True)
class DrafterConfig:
    """A DFlash drafter.

    block_size: rows of the trained block, anchor included. target_layer_ids: taps in the order they are concatenated;
    tap L is the output of decoder layer L. num_target_layers, vocab_size: of the target it was trained on, where the
    file says so. Head counts, head_dim and RoPE are the drafter's own, never the target's. visibility: one rule a
    layer; () stands for full attention in all. whole_block: the last blocks before max_tokens are not shortened.
    laguna: with the parts of Poolside's drafters (`drafters.laguna`).
    quantization: mlx-lm's map or None. bos_token_id, verifier: of the target it was trained on, for the pairing check.
    """

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    vocab_size: int | None
    block_size: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    num_target_layers: int | None
    input_embedding_scale: float = 1.0
    output_multiplier: float = 1.0
    final_logit_softcapping: float | None = None
    quantization: dict[str, Any] | None = None
    rope_scaling: RopeScaling | None = None
    rope_interleaved: bool = False
    attention_bias: bool = False
    visibility: tuple[Visibility, ...] = ()
    whole_block: bool = False
    laguna: bool = False
    dflash2: DFlash2 | None = None
    vocabulary: Vocabulary | None = None
    bos_token_id: int | None = None
    verifier: str | None = None

    def sees(self, layer: int) -> Visibility:
        """The mask rule of one layer."""
        return self.visibility[layer] if self.visibility else Visibility()
