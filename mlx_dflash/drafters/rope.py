"""Rotary positions of a drafter: plain, linear, YaRN or Llama 3 frequencies, in halves or interleaved.

The formulas are those of transformers 5 (modeling_rope_utils.py), on which the reference drafters stand; mlx-lm's YaRN
knows neither `truncate` nor a given `attention_factor`.
"""

import math
from dataclasses import dataclass

import mlx.core as mx

from ..rope import yarn


@dataclass(frozen=True)
class RopeScaling:
    """How positions beyond the trained length are squeezed. kind: "linear", "yarn" or "llama3".

    trained_length: `original_max_position_embeddings`. Linear uses the factor alone, YaRN the beta_* keys and
    `truncate` (whether its band ends on whole dimensions), Llama 3 the two *_freq_factor keys. attention: what
    queries and keys are multiplied with.
    """

    kind: str
    factor: float
    trained_length: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0


class Rope:
    """Rotates (B, heads, n, head_dim) for positions offset .. offset + n - 1.

    interleaved: pairs are (0, 1), (2, 3), ...; otherwise (0, d / 2), (1, d / 2 + 1), ...
    """

    def __init__(self, head_dim: int, base: float, scaling: RopeScaling | None = None, interleaved: bool = False):
        self.head_dim = head_dim
        self.interleaved = interleaved
        self.attention = 1.0 if scaling is None else scaling.attention
        self.base: float | None = base
        self.periods: mx.array | None = None  # 1 / inverse frequencies, (head_dim / 2,)
        if scaling is not None:
            self.base = None
            self.periods = mx.array([1.0 / f for f in frequencies(head_dim, base, scaling)], mx.float32)

    def __call__(self, x: mx.array, offset: int) -> mx.array:
        if self.attention != 1.0:
            x = x * self.attention  # rotation is linear, so this is the reference's factor on cos and sin
        return mx.fast.rope(
            x,
            self.head_dim,
            traditional=self.interleaved,
            base=self.base,
            scale=1.0,
            offset=offset,
            freqs=self.periods,
        )


def frequencies(head_dim: int, base: float, scaling: RopeScaling | None = None) -> list[float]:
    """Inverse frequencies, head_dim / 2 of them."""
    plain = [base ** (-2 * i / head_dim) for i in range(head_dim // 2)]
    if scaling is None:
        return plain
    if scaling.kind == "linear":
        return [f / scaling.factor for f in plain]
    if scaling.kind == "yarn":
        return yarn(
            head_dim,
            base,
            scaling.factor,
            scaling.trained_length,
            scaling.beta_fast,
            scaling.beta_slow,
            scaling.truncate,
        )
    return llama3(plain, scaling)


def llama3(plain: list[float], scaling: RopeScaling) -> list[float]:
    """Long wavelengths divided by the factor, short ones as they are, the band between blended."""
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    out = []
    for f in plain:
        turns = scaling.trained_length * f / (2 * math.pi)
        blend = min(max((turns - low) / (high - low), 0.0), 1.0)
        out.append(f / scaling.factor * (1 - blend) + f * blend)
    return out
