"""YaRN in closed form (arXiv 2309.00071), as transformers computes it in `_compute_yarn_parameters`.

mlx-lm 0.32 rounds the ramp's ends to whole dimensions always, as with `truncate: true`, and knows no
`attention_factor`; OpenAI's gpt-oss has `truncate: false`. Knows numbers, nothing of models or files.
"""

import math


def yarn(
    dims: int,
    base: float,
    factor: float,
    trained_length: int,
    beta_fast: float = 32.0,
    beta_slow: float = 1.0,
    truncate: bool = True,
) -> list[float]:
    """Inverse frequencies, dims / 2: fast dimensions as they are, slow ones divided by `factor`, a ramp between.

    trained_length: `original_max_position_embeddings`; beta_fast, beta_slow: turns over that length at the ramp's ends.
    """

    def dimension(turns: float) -> float:
        """The dimension that turns so many times over the trained length."""
        return dims * math.log(trained_length / (turns * 2 * math.pi)) / (2 * math.log(base))

    low, high = dimension(beta_fast), dimension(beta_slow)
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dims - 1)
    if low == high:
        high += 0.001
    plain = [base ** (-2 * i / dims) for i in range(dims // 2)]
    ramp = [min(max((i - low) / (high - low), 0.0), 1.0) for i in range(dims // 2)]
    return [f / factor * r + f * (1 - r) for f, r in zip(plain, ramp, strict=True)]


def yarn_attention(factor: float, mscale: float | None = None, mscale_all_dim: float | None = None) -> float:
    """The factor on queries and keys where the file has no `attention_factor`."""

    def of(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    return of(mscale) / of(mscale_all_dim) if mscale and mscale_all_dim else of(1.0)
