"""The DFlash drafter (arXiv 2602.06036): denoises a block in one pass, conditioned on tapped target states.

Knows hidden states and ids; nothing of verifying or accepting. The rules follow the torch references (z-lab's `dflash`
0.1.0, transformers' Muse assistant, vLLM's `speculators`): context rows are norm(fc(taps)) and skip `input_layernorm`;
noise rows are [anchor, mask, mask, ...]; queries come from the noise, keys and values from [context; noise] at absolute
positions; row 0 predicts nothing. Formats differ in their masks (`masks`) and in what they add (`dflash2`, `laguna`,
own head).
"""

from collections.abc import Callable
from typing import ClassVar

import mlx.core as mx
import mlx.nn as nn

from ..errors import RequestError
from ..targets import Target
from .config import DrafterConfig
from .context import ContextKV, DraftContext
from .rope import Rope

# Feature rows that may wait before they are projected, so that plain rounds don't pay for a drafter pass each.
MAX_PENDING = 256

# (scores (n, m), slot of the first row, target id of every column (m,) or (n, m), None: its index) -> indices (n,)
Choice = Callable[..., mx.array]


class Attention(nn.Module):
    """Attention of a block's noise rows over [context; noise]. layer: its index, which decides what it sees."""

    def __init__(self, config: DrafterConfig, layer: int = 0):
        super().__init__()
        width, head_dim, bias = config.hidden_size, config.head_dim, config.attention_bias
        self.head_dim = head_dim
        self.scale = head_dim**-0.5
        self.q_proj = nn.Linear(width, config.num_attention_heads * head_dim, bias=bias)
        self.k_proj = nn.Linear(width, config.num_key_value_heads * head_dim, bias=bias)
        self.v_proj = nn.Linear(width, config.num_key_value_heads * head_dim, bias=bias)
        self.o_proj = nn.Linear(config.num_attention_heads * head_dim, width, bias=bias)
        self.q_norm = nn.RMSNorm(head_dim, eps=config.rms_norm_eps)
        self.k_norm = nn.RMSNorm(head_dim, eps=config.rms_norm_eps)
        self.rope = Rope(head_dim, config.rope_theta, config.rope_scaling, config.rope_interleaved)
        self.sees = config.sees(layer)

    def heads(self, x: mx.array) -> mx.array:
        """(B, n, heads * head_dim) -> (B, n, heads, head_dim)"""
        return x.reshape(*x.shape[:2], -1, self.head_dim)

    def queries(self, x: mx.array, offset: int) -> mx.array:
        return self.rope(self.q_norm(self.heads(self.q_proj(x))).transpose(0, 2, 1, 3), offset)

    def keys_values(self, x: mx.array, offset: int) -> tuple[mx.array, mx.array]:
        keys = self.k_norm(self.heads(self.k_proj(x))).transpose(0, 2, 1, 3)
        return self.rope(keys, offset), self.heads(self.v_proj(x)).transpose(0, 2, 1, 3)

    def remember(self, context: mx.array, kv: ContextKV, end: int) -> None:
        """Append context rows (B, c, hidden), the last of them at position end - 1."""
        context = kv.within_reach(context)
        count = context.shape[1]
        kv.update(*self.keys_values(context, end - count), end - count, count)

    def __call__(self, noise: mx.array, context: mx.array | None, kv: ContextKV, anchor: int) -> mx.array:
        """noise (B, w, hidden) normed, from position `anchor` on; context (B, c, hidden): new rows, which kv keeps."""
        rows, new = noise, 0
        if context is not None:
            context = kv.within_reach(context)
            rows, new = mx.concatenate([context, noise], axis=1), context.shape[1]
        queries = self.queries(noise, anchor)
        keys, values = kv.update(*self.keys_values(rows, anchor - new), anchor - new, new)
        mask = self.sees.mask(keys.shape[2] - noise.shape[1], noise.shape[1])
        out = mx.fast.scaled_dot_product_attention(queries, keys, values, scale=self.scale, mask=mask)
        return self.output(out.transpose(0, 2, 1, 3), noise)

    def output(self, heads: mx.array, noise: mx.array) -> mx.array:
        """What the heads found (B, w, heads, head_dim) -> (B, w, hidden)."""
        return self.o_proj(heads.flatten(-2))


class MLP(nn.Module):
    def __init__(self, width: int, inner: int):
        super().__init__()
        self.gate_proj = nn.Linear(width, inner, bias=False)
        self.up_proj = nn.Linear(width, inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)

    def __call__(self, x: mx.array) -> mx.array:
        return self.down_proj(nn.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    attention_class: ClassVar[type[Attention]] = Attention

    def __init__(self, config: DrafterConfig, layer: int):
        super().__init__()
        self.self_attn = self.attention_class(config, layer)
        self.mlp = MLP(config.hidden_size, config.intermediate_size)
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def __call__(self, noise: mx.array, context: mx.array | None, kv: ContextKV, anchor: int) -> mx.array:
        hidden = noise + self.self_attn(self.input_layernorm(noise), context, kv, anchor)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))

    def remember(self, context: mx.array, kv: ContextKV, end: int) -> None:
        """Append context rows (B, c, hidden), the last of them at position end - 1."""
        self.self_attn.remember(context, kv, end)


class DFlashModel(nn.Module):
    """The drafter's own weights, under z-lab's tensor names.

    Embedding and head are the target's, unless the file holds its own (`config.vocabulary`).
    """

    layer_class: ClassVar[type[Layer]] = Layer

    def __init__(self, config: DrafterConfig):
        super().__init__()
        width = config.hidden_size
        self.fc = nn.Linear(len(config.target_layer_ids) * width, width, bias=False)
        self.hidden_norm = nn.RMSNorm(width, eps=config.rms_norm_eps)
        self.layers = [self.layer_class(config, i) for i in range(config.num_hidden_layers)]
        self.norm = nn.RMSNorm(width, eps=config.rms_norm_eps)
        if (own := config.vocabulary) is not None:
            if own.own_embedding:
                self.embed_tokens = nn.Embedding(config.vocab_size or 0, width)
            if own.own_head:
                self.lm_head = nn.Linear(width, own.rows, bias=False)
            if own.mapped:
                self.d2t = mx.zeros((own.rows,), mx.int64)

    def context(self, features: mx.array) -> mx.array:
        """(B, n, taps * hidden) tapped states -> (B, n, hidden) context rows, shared by all layers."""
        return self.hidden_norm(self.fc(features))

    def choose(self, anchor: mx.array, hidden: mx.array, logits: mx.array, draw: Choice) -> mx.array:
        """Draft ids (n,), in the target's vocabulary, from normed states (n, hidden) and their logits (n, tokens)."""
        if "d2t" not in self:
            return draw(logits)
        names = mx.arange(self.d2t.size) + self.d2t  # the target's id of every column
        return names[draw(logits, 0, names)]


class DFlashDrafter:
    """A drafter bound to the target it was checked against."""

    def __init__(self, model: DFlashModel, config: DrafterConfig, target: Target):
        self.model = model
        self.config = config
        self.target = target
        self.name = ""  # what the folder is called, by which model cards are known

    @property
    def taps(self) -> tuple[int, ...]:
        return self.config.target_layer_ids

    @property
    def block_size(self) -> int:
        """Rows of the trained block, anchor included: the most that may be verified in a round."""
        return self.config.block_size

    def make_context(self, window: int | None = None, sink: int = 0) -> DraftContext:
        """An empty context. window: for a drafter that sees all rows, the last ones that it is to see, and the first
        `sink` ones: one trained on short texts drafts better so on long ones. Raises RequestError where it can't be.
        """
        reaches = [layer.self_attn.sees.behind for layer in self.model.layers]
        if window is not None:
            if any(reach is not None for reach in reaches):
                raise RequestError(f"{self.name or 'this drafter'} has a window of its own; drop draft_window")
            reaches = [window] * len(reaches)
        return DraftContext(reaches, sink)

    def rows(self, width: int, remaining: int) -> int:
        """Rows of the next round, given the wanted width and the tokens still to emit.

        z-lab (dflash_generate) shortens a block that would pass the last token; transformers' Muse never does, and
        drafts nothing for one token.
        """
        if width > self.block_size:
            raise RequestError(f"block size {width} is above the drafter's trained block of {self.block_size}")
        if self.config.whole_block:
            return width if remaining > 1 else 1
        return min(width, remaining + 1)

    def append(self, features: mx.array, context: DraftContext) -> None:
        """Give the context the features (B, n, taps * hidden) of n newly committed tokens."""
        of_sink = context.length < context.sink
        context.add(features)
        if (of_sink or context.pending_rows >= MAX_PENDING) and (waiting := context.take_pending()) is not None:
            rows = self.model.context(waiting)
            for layer, kv in zip(self.model.layers, context.layers, strict=True):
                layer.remember(rows, kv, context.length)

    def propose(self, anchor: mx.array, rows: int, context: DraftContext, draw: Choice) -> mx.array:
        """Draft ids (rows - 1,) that may follow `anchor` (1,), the last emitted token; nothing is read by the host."""
        return self.draft(anchor, rows, context, draw)[0]

    def draft(self, anchor: mx.array, rows: int, context: DraftContext, draw: Choice) -> tuple[mx.array, mx.array]:
        """Draft ids (rows - 1,) in the target's vocabulary, and the logits (1, rows - 1, tokens) behind them.

        draw: chooses a column of every row. Pending features move into the context, noise rows do not.
        """
        hidden = self.hidden(anchor, rows, context)
        logits = self.head(hidden)
        ids = self.model.choose(anchor, hidden[0], logits[0], draw)
        return ids.astype(anchor.dtype), logits

    def logits(self, anchor: mx.array, rows: int, context: DraftContext) -> mx.array:
        """Draft logits (1, rows - 1, tokens), over the drafter's vocabulary."""
        return self.head(self.hidden(anchor, rows, context))

    def hidden(self, anchor: mx.array, rows: int, context: DraftContext) -> mx.array:
        """Normed states (1, rows - 1, hidden) of all rows but the anchor's."""
        features = context.take_pending()
        new = None if features is None else self.model.context(features)
        ids = mx.concatenate([anchor, mx.full((rows - 1,), self.config.mask_token_id, anchor.dtype)])
        hidden = self.embed(ids[None])  # (1, rows, hidden)
        for layer, kv in zip(self.model.layers, context.layers, strict=True):
            hidden = layer(hidden, new, kv, context.length)
        return self.model.norm(hidden[:, 1:])

    def embed(self, ids: mx.array) -> mx.array:
        """(1, n) ids -> the noise rows (1, n, hidden)."""
        own = self.config.vocabulary is not None and self.config.vocabulary.own_embedding
        rows = self.model.embed_tokens(ids) if own else self.target.embed(ids)
        return rows if self.config.input_embedding_scale == 1.0 else rows * self.config.input_embedding_scale

    def head(self, hidden: mx.array) -> mx.array:
        """(..., hidden) -> draft logits; multiplier and softcap are the drafter's own."""
        own = self.config.vocabulary is not None and self.config.vocabulary.own_head
        logits = self.model.lm_head(hidden) if own else self.target.head(hidden)
        if self.config.output_multiplier != 1.0:
            logits = logits * self.config.output_multiplier
        if (cap := self.config.final_logit_softcapping) is not None:
            logits = mx.tanh(logits / cap) * cap
        return logits
