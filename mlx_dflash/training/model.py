"""The drafter as training sees it: many blocks in one forward, and a start from the target's layers.

Same weights and arithmetic as `drafters.dflash`; only packing differs. `tests/test_training.py` holds the two together.
"""

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from ..drafters.config import DrafterConfig
from ..drafters.dflash import Attention, DFlashModel
from ..targets import Target


def block_mask(lengths: mx.array, anchors: mx.array, context: int, block: int) -> mx.array:
    """Who sees whom, (S, 1, K * block, context + K * block), True = visible.

    anchors (S, K): position of each block's anchor; lengths (S,): real context rows of each sequence. A block's rows
    see the context before their anchor and their own block, both ways; blocks are blind to each other.
    """
    count = anchors.shape[1]
    owner = mx.repeat(mx.arange(count), block)  # (K * block,) block of every noise row
    before = mx.repeat(anchors, block, axis=1)[..., None]  # (S, K * block, 1)
    columns = mx.arange(context)[None, None]
    sees_context = (columns < before) & (columns < lengths[:, None, None])
    sees_noise = mx.broadcast_to(owner[:, None] == owner[None], (anchors.shape[0], count * block, count * block))
    return mx.concatenate([sees_context, sees_noise], axis=-1)[:, None]


def rotary(x: mx.array, positions: mx.array, base: float) -> mx.array:
    """Rotate halves of x (S, heads, n, d) by `positions` (S, n): what mx.fast.rope does for contiguous positions."""
    half = x.shape[-1] // 2
    freqs = base ** (-mx.arange(half, dtype=mx.float32) / half)
    angles = positions[:, None, :, None].astype(mx.float32) * freqs
    cos, sin = mx.cos(angles), mx.sin(angles)
    left, right = x[..., :half], x[..., half:]
    return mx.concatenate([left * cos - right * sin, left * sin + right * cos], axis=-1)


def attend(
    attention: Attention, noise: mx.array, context: mx.array, positions: mx.array, mask: mx.array, base: float
) -> mx.array:
    """`Attention` over packed blocks: positions (S, context + noise rows), mask as `block_mask` makes it."""
    new, rows = noise.shape[1], mx.concatenate([context, noise], axis=1)
    q = attention.q_norm(attention.heads(attention.q_proj(noise))).transpose(0, 2, 1, 3)
    k = attention.k_norm(attention.heads(attention.k_proj(rows))).transpose(0, 2, 1, 3)
    v = attention.heads(attention.v_proj(rows)).transpose(0, 2, 1, 3)
    q, k = rotary(q, positions[:, -new:], base), rotary(k, positions, base)
    out = mx.fast.scaled_dot_product_attention(q, k, v, scale=attention.scale, mask=mask)
    return attention.o_proj(out.transpose(0, 2, 1, 3).reshape(*noise.shape[:2], -1))


def draft_hidden(
    model: DFlashModel,
    config: DrafterConfig,
    features: mx.array,
    lengths: mx.array,
    noise: mx.array,
    anchors: mx.array,
) -> mx.array:
    """Final normed hidden states (S, K, block, hidden) of K blocks a sequence.

    features (S, context, taps * hidden), padded; noise (S, K, block, hidden): embeddings of [anchor, mask, ...].
    """
    sequences, count, block, width = noise.shape
    rows = features.shape[1]
    offsets = mx.arange(block)
    noise_at = (anchors[..., None] + offsets).reshape(sequences, -1)
    positions = mx.concatenate([mx.broadcast_to(mx.arange(rows)[None], (sequences, rows)), noise_at], axis=1)
    mask = block_mask(lengths, anchors, rows, block)
    context = model.context(features)
    hidden = noise.reshape(sequences, count * block, width)
    for layer in model.layers:
        normed = layer.input_layernorm(hidden)
        hidden = hidden + attend(layer.self_attn, normed, context, positions, mask, config.rope_theta)
        hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
    return model.norm(hidden).reshape(sequences, count, block, width)


def start_from_target(model: DFlashModel, config: DrafterConfig, target: Target, sample: mx.array) -> None:
    """Initialise the draft layers with the target's last layers, the context with the last tap.

    A Llama layer has no q/k norm; the new norms get the mean rms of that layer's queries and keys on `sample`
    (1, n) token ids, so attention starts at about the target's temperature. `fc` passes the last tap through, other
    taps start small.
    """
    first = target.num_layers - config.num_hidden_layers
    inputs = {}
    for index, hidden in enumerate(target.layers(sample, target.make_cache().layers)):
        inputs[index + 1] = hidden
    for layer, index in zip(model.layers, range(first, target.num_layers), strict=True):
        source = target.model.layers[index]
        layer.input_layernorm.weight = source.input_layernorm.weight
        layer.post_attention_layernorm.weight = source.post_attention_layernorm.weight
        for name in ("gate_proj", "up_proj", "down_proj"):
            layer.mlp[name].weight = source.mlp[name].weight
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            layer.self_attn[name].weight = source.self_attn[name].weight
        normed = source.input_layernorm(inputs[index])
        for name in ("q", "k"):
            heads = layer.self_attn.heads(source.self_attn[f"{name}_proj"](normed))
            rms = mx.sqrt((heads**2).mean(axis=-1)).mean()
            layer.self_attn[f"{name}_norm"].weight = mx.full((config.head_dim,), rms)
    width, taps = config.hidden_size, len(config.target_layer_ids)
    fc = 0.1 / (width * taps) ** 0.5 * mx.random.normal((width, (taps - 1) * width), key=mx.random.key(0))
    model.fc.weight = mx.concatenate([fc, mx.eye(width)], axis=1)
    model.hidden_norm.weight = target.model.layers[first].input_layernorm.weight
    model.norm.weight = target.model.model.norm.weight


def fold_scales(model: DFlashModel, scales: list[float], hidden: int) -> None:
    """Fold a factor a tap into `fc`, so that the trained drafter takes raw taps."""
    columns = mx.repeat(mx.array(scales, dtype=mx.float32), hidden)
    model.fc.weight = model.fc.weight * columns


def quantize_linears(model: DFlashModel, bits: int, group_size: int) -> None:
    """Quantize the draft layers' matrices; fc and norms stay as they are."""
    nn.quantize(
        model,
        group_size=group_size,
        bits=bits,
        class_predicate=lambda path, m: path.startswith("layers.") and isinstance(m, nn.Linear),
    )


def unquantized(model: DFlashModel) -> dict[str, mx.array]:
    """The model's weights by name, as if it had not been quantized."""
    weights = dict(tree_flatten(model.parameters()))
    for name, module in model.named_modules():
        if isinstance(module, nn.QuantizedLinear):
            scales, biases = (weights.pop(f"{name}.{k}") for k in ("scales", "biases"))
            sizes = {"group_size": module.group_size, "bits": module.bits}
            weights[f"{name}.weight"] = mx.dequantize(weights[f"{name}.weight"], scales, biases, **sizes)
    return weights
