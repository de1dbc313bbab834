"""z-lab's DFlash v1 drafter (arXiv 2602.06036): denoises a block in one pass, conditioned on tapped target states.

Knows hidden states and ids; nothing of verifying or accepting. The rules follow the torch reference, z-lab's `dflash`
0.1.0, model.py: context rows are norm(fc(taps)) and skip `input_layernorm`; noise rows are [anchor, mask, mask, ...];
queries come from the noise, keys and values from [context; noise] at absolute positions; no mask, so noise rows see
each other both ways; row 0 predicts nothing.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import mlx.core as mx
import mlx.nn as nn

from ..cache import FullKV
from ..errors import RequestError
from ..targets import Target
from .config import DrafterConfig

# Feature rows that may wait before they are projected, so that plain rounds don't pay for a drafter pass each.
MAX_PENDING = 256


class Attention(nn.Module):
    def __init__(self, config: DrafterConfig):
        super().__init__()
        width, head_dim = config.hidden_size, config.head_dim
        self.head_dim = head_dim
        self.scale = head_dim**-0.5
        self.q_proj = nn.Linear(width, config.num_attention_heads * head_dim, bias=False)
        self.k_proj = nn.Linear(width, config.num_key_value_heads * head_dim, bias=False)
        self.v_proj = nn.Linear(width, config.num_key_value_heads * head_dim, bias=False)
        self.o_proj = nn.Linear(config.num_attention_heads * head_dim, width, bias=False)
        self.q_norm = nn.RMSNorm(head_dim, eps=config.rms_norm_eps)
        self.k_norm = nn.RMSNorm(head_dim, eps=config.rms_norm_eps)
        self.rope = nn.RoPE(head_dim, traditional=False, base=config.rope_theta)

    def heads(self, x: mx.array) -> mx.array:
        """(B, n, heads * head_dim) -> (B, n, heads, head_dim)"""
        return x.reshape(*x.shape[:2], -1, self.head_dim)

    def queries(self, x: mx.array, offset: int) -> mx.array:
        return self.rope(self.q_norm(self.heads(self.q_proj(x))).transpose(0, 2, 1, 3), offset=offset)

    def keys_values(self, x: mx.array, offset: int) -> tuple[mx.array, mx.array]:
        keys = self.k_norm(self.heads(self.k_proj(x))).transpose(0, 2, 1, 3)
        return self.rope(keys, offset=offset), self.heads(self.v_proj(x)).transpose(0, 2, 1, 3)

    def __call__(self, noise: mx.array, context: mx.array | None, cache: FullKV) -> mx.array:
        """noise (B, w, hidden) normed; context (B, c, hidden) new rows; both are left in the cache, noise last."""
        new = 0 if context is None else context.shape[1]
        rows = noise if context is None else mx.concatenate([context, noise], axis=1)
        queries = self.queries(noise, cache.offset + new)
        keys, values = cache.update_and_fetch(*self.keys_values(rows, cache.offset))
        out = mx.fast.scaled_dot_product_attention(queries, keys, values, scale=self.scale)
        return self.o_proj(out.transpose(0, 2, 1, 3).reshape(*noise.shape[:2], -1))


class MLP(nn.Module):
    def __init__(self, width: int, inner: int):
        super().__init__()
        self.gate_proj = nn.Linear(width, inner, bias=False)
        self.up_proj = nn.Linear(width, inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)

    def __call__(self, x: mx.array) -> mx.array:
        return self.down_proj(nn.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, config: DrafterConfig):
        super().__init__()
        self.self_attn = Attention(config)
        self.mlp = MLP(config.hidden_size, config.intermediate_size)
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def __call__(self, noise: mx.array, context: mx.array | None, cache: FullKV) -> mx.array:
        hidden = noise + self.self_attn(self.input_layernorm(noise), context, cache)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class DFlashModel(nn.Module):
    """The drafter's own weights, under z-lab's tensor names; embedding and head are the target's."""

    def __init__(self, config: DrafterConfig):
        super().__init__()
        self.fc = nn.Linear(len(config.target_layer_ids) * config.hidden_size, config.hidden_size, bias=False)
        self.hidden_norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.layers = [Layer(config) for _ in range(config.num_hidden_layers)]
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def context(self, features: mx.array) -> mx.array:
        """(B, n, taps * hidden) tapped states -> (B, n, hidden) context rows, shared by all layers."""
        return self.hidden_norm(self.fc(features))


@dataclass
class DraftContext:
    """What one request's drafter knows of the committed text: projected rows, and features still to be projected.

    Only committed rows enter (`append`), and noise rows never stay, so there is nothing to abort.
    """

    layers: list[FullKV]
    pending: list[mx.array] = field(default_factory=list)  # each (B, n, taps * hidden)

    @property
    def pending_rows(self) -> int:
        return sum(f.shape[1] for f in self.pending)

    @property
    def length(self) -> int:
        """Context rows plus pending rows: the number of committed tokens it has been given."""
        return self.layers[0].offset + self.pending_rows

    def checkpoint(self) -> tuple[int, tuple[mx.array, ...]]:
        return self.layers[0].offset, tuple(self.pending)

    def restore(self, saved: tuple[int, tuple[mx.array, ...]]) -> None:
        for layer in self.layers:
            layer.restore(saved[0])
        self.pending = list(saved[1])

    def take_pending(self) -> mx.array | None:
        """All pending features as one array (B, n, taps * hidden), and forget them."""
        if not self.pending:
            return None
        taken, self.pending = self.pending, []
        return taken[0] if len(taken) == 1 else mx.concatenate(taken, axis=1)

    def arrays(self) -> list[mx.array]:
        """Everything that must be evaluated for the context to hold no lazy graph."""
        return [*self.pending, *(a for layer in self.layers for a in layer.arrays())]


class DFlashDrafter:
    """A drafter bound to the target it was checked against."""

    def __init__(self, model: DFlashModel, config: DrafterConfig, target: Target):
        self.model = model
        self.config = config
        self.target = target

    @property
    def taps(self) -> tuple[int, ...]:
        return self.config.target_layer_ids

    @property
    def block_size(self) -> int:
        """Rows of the trained block, anchor included: the most that may be verified in a round."""
        return self.config.block_size

    def make_context(self) -> DraftContext:
        return DraftContext([FullKV() for _ in self.model.layers])

    def rows(self, width: int, remaining: int) -> int:
        """Rows of the next round, given the wanted width and the tokens still to emit (z-lab, dflash_generate)."""
        if width > self.block_size:
            raise RequestError(f"block size {width} is above the drafter's trained block of {self.block_size}")
        return min(width, remaining + 1)

    def append(self, features: mx.array, context: DraftContext) -> None:
        """Give the context the features (B, n, taps * hidden) of n newly committed tokens."""
        context.pending.append(features)
        if context.pending_rows >= MAX_PENDING and (waiting := context.take_pending()) is not None:
            rows = self.model.context(waiting)
            for layer, cache in zip(self.model.layers, context.layers, strict=True):
                cache.update_and_fetch(*layer.self_attn.keys_values(rows, cache.offset))

    def propose(
        self, anchor: mx.array, rows: int, context: DraftContext, draw: Callable[[mx.array], mx.array]
    ) -> mx.array:
        """Draft ids (rows - 1,) that may follow `anchor` (1,), the last emitted token; nothing is read by the host.

        draw: logits (rows - 1, vocab) -> ids (rows - 1,).
        """
        logits = self.logits(anchor, rows, context)
        return draw(logits[0]).astype(anchor.dtype)

    def logits(self, anchor: mx.array, rows: int, context: DraftContext) -> mx.array:
        """Draft logits (1, rows - 1, vocab); pending features move into the context, noise rows do not."""
        features = context.take_pending()
        new = None if features is None else self.model.context(features)
        ids = mx.concatenate([anchor, mx.full((rows - 1,), self.config.mask_token_id, anchor.dtype)])
        hidden = self.target.embed(ids[None])  # (1, rows, hidden)
        if self.config.input_embedding_scale != 1.0:
            hidden = hidden * self.config.input_embedding_scale
        for layer, cache in zip(self.model.layers, context.layers, strict=True):
            hidden = layer(hidden, new, cache)
            cache.offset -= rows
        logits = self.target.head(self.model.norm(hidden[:, 1:]))
        if self.config.output_multiplier != 1.0:
            logits = logits * self.config.output_multiplier
        if (cap := self.config.final_logit_softcapping) is not None:
            logits = mx.tanh(logits / cap) * cap
        return logits
