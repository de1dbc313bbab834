"""Quantized keys and values: packed attention against the same rows unpacked, and a rewind against a fresh cache."""

from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.models import llama

from ..cache import FullKV, QuantizedKV, TargetCache
from ..targets import Target
from ..targets.dense import Dense

TOLERANCE = 2e-3


class UnpackedKV(FullKV):
    """Holds what quantized rows stand for, so that plain attention runs on them."""

    def __init__(self, bits: int, group_size: int) -> None:
        super().__init__()
        self.how: dict[str, Any] = {"bits": bits, "group_size": group_size}

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        return super().update_and_fetch(self.rounded(keys), self.rounded(values))

    def rounded(self, rows: mx.array) -> mx.array:
        return mx.dequantize(*mx.quantize(rows, **self.how), **self.how)


def random_layers(layers: int, hidden: int, inner: int, heads: int, kv_heads: int, head_dim: int, vocab: int) -> Target:
    """A Llama of random weights, not evaluated yet."""
    config: dict[str, Any] = {
        "model_type": "llama",
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "intermediate_size": inner,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "vocab_size": vocab,
    }
    config = Dense.prepare(config)
    model = llama.Model(llama.ModelArgs.from_dict(config))
    parameters = tree_flatten(model.parameters())
    weights = []
    for (name, value), key in zip(parameters, mx.random.split(mx.random.key(0), len(parameters)), strict=True):
        random = mx.random.normal(value.shape, key=key) * value.shape[-1] ** -0.5 if value.ndim > 1 else value
        weights.append((name, random))
    model.update(tree_unflatten(weights))
    return Dense(model, config)


def check_quantized(bits: int) -> list[str]:
    """Problems in words. One layer, so that no row is rounded after another rounding."""
    target = random_layers(1, 128, 256, 4, 2, 64, 300)
    mx.eval(target.model.parameters())
    ids = mx.array([[(7 * i * i + 3 * i) % 290 for i in range(48)]])
    problems = []
    packed, plain = target.forward(ids, target.make_cache(bits))[0], TargetCache([UnpackedKV(bits, 64)])
    off = mx.abs(packed - target.forward(ids, plain)[0]).max().item()
    if not off <= TOLERANCE:  # type: ignore[operator]
        problems.append(f"{bits}-bit attention is off by {off:.1e} from the same rows unpacked")
    rewound = target.make_cache(bits)
    target.forward(ids[:, :40], rewound)
    rewound.begin()
    target.forward(ids[:, 20:28] + 1, rewound)
    rewound.commit(0)
    fresh = target.make_cache(bits)
    target.forward(ids[:, :40], fresh)
    after = [target.forward(ids[:, 40:], cache)[0] for cache in (rewound, fresh)]
    if not isinstance(rewound.layers[0], QuantizedKV) or rewound.length != 48:
        problems.append(f"the {bits}-bit cache holds {rewound.length} rows, not 48")
    if not mx.abs(after[0] - after[1]).max().item() <= TOLERANCE:  # type: ignore[operator]
        problems.append(f"a rewound {bits}-bit cache is not a fresh one")
    return problems
