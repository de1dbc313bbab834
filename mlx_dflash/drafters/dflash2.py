"""DFlash 2: short convolutions over a block's rows, and a selector that makes one chain of the parallel drafts.

The rules follow z-lab's `dflash` 0.1.0, model.py (GroupedDynamicCausalConv, CandidateSelector).
"""

import mlx.core as mx
import mlx.nn as nn

from .config import DFlash2, DrafterConfig
from .context import ContextKV
from .dflash import Choice, DFlashModel, Layer


class BlockConv(nn.Module):
    """Depthwise causal convolutions before and after a sublayer, over block rows only, zero before the anchor.

    A kernel is a base, one value a channel, plus what a projection of the sublayer's input adds, one value a group of
    channels.
    """

    def __init__(self, width: int, parts: DFlash2):
        super().__init__()
        self.groups = width // parts.group_size
        self.base_kernel = mx.zeros((2, parts.kernel_size, width))
        self.kernel_projection = nn.Linear(width, 2 * parts.kernel_size * self.groups, bias=False)

    def before(self, x: mx.array) -> tuple[mx.array, mx.array]:
        """(B, w, hidden) -> the convolved rows, and the kernel for `after` (B, w, taps, groups)."""
        _, taps, _ = self.base_kernel.shape
        dynamic = self.kernel_projection(x).reshape(*x.shape[:2], 2, taps, self.groups)
        return self.convolve(x, dynamic[:, :, 0], self.base_kernel[0]), dynamic[:, :, 1]

    def after(self, x: mx.array, dynamic: mx.array) -> mx.array:
        return self.convolve(x, dynamic, self.base_kernel[1])

    def convolve(self, x: mx.array, dynamic: mx.array, base: mx.array) -> mx.array:
        """Row t gets the sum over taps j of (base[j] + dynamic[t, j]) * x[t - j]."""
        rows = x.shape[1]
        grouped = x.reshape(*x.shape[:2], self.groups, -1)  # (B, w, groups, channels)
        kernel = base.reshape(base.shape[0], self.groups, -1) + dynamic[..., None]  # (B, w, taps, groups, channels)
        out = kernel[:, :, 0] * grouped
        for tap in range(1, min(base.shape[0], rows)):
            earlier = mx.pad(grouped[:, :-tap], [(0, 0), (tap, 0), (0, 0), (0, 0)])
            out = out + kernel[:, :, tap] * earlier
        return out.reshape(x.shape)


class ConvLayer(Layer):
    def __init__(self, config: DrafterConfig, layer: int):
        super().__init__(config, layer)
        assert config.dflash2 is not None
        self.attention_conv = BlockConv(config.hidden_size, config.dflash2)
        self.mlp_conv = BlockConv(config.hidden_size, config.dflash2)

    def __call__(self, noise: mx.array, context: mx.array | None, kv: ContextKV, anchor: int) -> mx.array:
        rows, kernel = self.attention_conv.before(self.input_layernorm(noise))
        hidden = noise + self.attention_conv.after(self.self_attn(rows, context, kv, anchor), kernel)
        rows, kernel = self.mlp_conv.before(self.post_attention_layernorm(hidden))
        return hidden + self.mlp_conv.after(self.mlp(rows), kernel)


class CandidateSelector(nn.Module):
    """Scores neighbours among each slot's likeliest tokens: logit(b) + sum of A[a] * proj(h) * B[b] for a before b."""

    def __init__(self, config: DrafterConfig, parts: DFlash2):
        super().__init__()
        self.top_k = parts.top_k
        self.predecessor_codebook = mx.zeros((config.vocab_size or 0, parts.rank))
        self.successor_codebook = mx.zeros((config.vocab_size or 0, parts.rank))
        self.hidden_projection = nn.Linear(config.hidden_size, parts.rank, bias=False)

    def __call__(self, anchor: mx.array, hidden: mx.array, logits: mx.array, draw: Choice) -> mx.array:
        """Walk from the anchor (1,) over n slots, left to right, on device: ids (n,).

        hidden (n, hidden), logits (n, vocab). All pairs of neighbours are scored at once, so that a step of the walk
        is one look-up and one choice.
        """
        count = logits.shape[0]
        candidates = mx.argpartition(logits, -self.top_k, axis=-1)[:, -self.top_k :]  # (n, k)
        successors = self.successor_codebook[candidates] * self.hidden_projection(hidden)[:, None]  # (n, k, rank)
        alone = mx.take_along_axis(logits, candidates, axis=-1)[:, None]  # (n, 1, k)
        first = self.predecessor_codebook[anchor][None] @ successors[:1].swapaxes(1, 2) + alone[:1]  # (1, 1, k)
        pairs = self.predecessor_codebook[candidates[:-1]] @ successors[1:].swapaxes(1, 2) + alone[1:]  # (n - 1, k, k)
        chosen = [draw(first[0], 0, candidates[:1])]  # each (1,), an index among the slot's candidates
        for slot in range(1, count):
            chosen.append(draw(pairs[slot - 1][chosen[-1]], slot, candidates[slot : slot + 1]))
        return mx.take_along_axis(candidates, mx.stack(chosen), axis=-1)[:, 0]


class DFlash2Model(DFlashModel):
    layer_class = ConvLayer

    def __init__(self, config: DrafterConfig):
        super().__init__(config)
        assert config.dflash2 is not None
        self.candidate_selector = CandidateSelector(config, config.dflash2)

    def choose(self, anchor: mx.array, hidden: mx.array, logits: mx.array, draw: Choice) -> mx.array:
        return self.candidate_selector(anchor, hidden, logits, draw)
