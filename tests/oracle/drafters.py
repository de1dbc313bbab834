"""The tiny drafters: their configs, random weights, and a short distillation that makes acceptance lengths vary.

The classes are the references' own (z-lab's `dflash`, transformers' Muse Glimmer assistant).  Knows nothing of
generation loops or files.
"""

import math

import torch
import transformers as T
from dflash.model import DFlash2DraftModel, DFlashDraftModel, build_target_layer_ids
from torch import nn

from .targets import MASK, VOCAB, Dims, default_rope

LAYERS = 3
CONTINUATION = 40  # greedy tokens per training prompt
# As gpt-oss's drafter has it, with a trained length that the recorded contexts pass.
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 32}
YARN |= {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}
DFLASH2 = {"conv_group_size": 16, "selector_rank": 12, "selector_top_k": 6}


def is_muse_assistant(family: str) -> bool:
    return family == "muse_glimmer"


def is_speculators(family: str) -> bool:
    """Needs the `speculators` package, in a venv of its own."""
    return family == "qwen3_speculators"


def is_laguna(family: str) -> bool:
    """Poolside's drafter has a layout of its own."""
    return family == "laguna"


def drafter_class(family: str) -> type:
    if is_laguna(family):
        from .laguna import LagunaDraftModel

        return LagunaDraftModel
    if is_muse_assistant(family):
        return T.MuseGlimmerAssistantModel
    if is_speculators(family):
        from .vllm_speculators import DFlashDraftModel as Speculator

        return Speculator
    return DFlash2DraftModel if family in ("qwen3_dflash2", "muse_glimmer_zlab") else DFlashDraftModel


def layer_types(family: str) -> list[str]:
    sliding, full = "sliding_attention", "full_attention"
    special = {
        "qwen3_sliding": [sliding, sliding, full],
        "qwen3_allsliding": [sliding] * LAYERS,
        "qwen3_bidir": [sliding, full, sliding],
        "qwen3_causal_yarn": [sliding, full, sliding],
        "qwen3_speculators": [sliding, full, sliding],
        "muse_glimmer_zlab": [sliding] * LAYERS,
        "laguna": [sliding] * LAYERS,
    }
    return special.get(family, [full] * LAYERS)


def dflash_keys(family: str, text: T.PretrainedConfig, d: Dims) -> dict:
    """The `dflash_config` dict of a z-lab drafter."""
    keys = {"mask_token_id": MASK, "target_layer_ids": build_target_layer_ids(text.num_hidden_layers, LAYERS)}
    if family == "muse_glimmer_zlab":
        keys |= {**DFLASH2, "conv_kernel_size": 2, "block_size": d.block}
        keys |= {"output_multiplier": text.output_multiplier, "final_logit_softcapping": text.final_logit_softcapping}
    if family == "qwen3_dflash2":
        keys |= {**DFLASH2, "conv_kernel_size": 3, "block_size": d.block}
        keys |= {"input_embedding_scale": 1.5, "output_multiplier": 0.7, "final_logit_softcapping": 15.0}
    return keys | wheel_embedding_scale(family, text.hidden_size)


def wheel_embedding_scale(family: str, hidden: int) -> dict:
    """Gemma's drafter takes embeddings scaled by sqrt(hidden); the 0.1.0 wheel's torch path takes raw rows times
    `input_embedding_scale`.  So it is run with this key, which the saved config.json does not have."""
    return {"input_embedding_scale": float(hidden) ** 0.5} if family.startswith("gemma4") else {}


def zlab_config(family: str, text: T.PretrainedConfig, d: Dims) -> T.Qwen3Config:
    types = layer_types(family)
    window = d.draft_window if "sliding_attention" in types else None
    config = T.Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=text.hidden_size,
        intermediate_size=64,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        rms_norm_eps=1e-6,
        max_position_embeddings=4096,
        rope_parameters=default_rope(1e6),
        layer_types=types,
        sliding_window=window,
        use_sliding_window=window is not None,
        max_window_layers=LAYERS,
        tie_word_embeddings=False,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    config.block_size = d.block
    config.dflash_config = dflash_keys(family, text, d)
    config.num_target_layers = text.num_hidden_layers
    if family == "qwen3_bidir":
        config.is_causal = False
    if family == "qwen3_causal_yarn":
        config.is_causal, config.attention_bias = True, True
        config.rope_parameters = YARN
    config._attn_implementation = "sdpa"
    return config


def muse_config(text: T.PretrainedConfig, d: Dims) -> T.PretrainedConfig:
    return T.MuseGlimmerAssistantConfig(
        hidden_size=text.hidden_size,
        intermediate_size=64,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        rms_norm_eps=1e-5,
        max_position_embeddings=4096,
        sliding_window=d.draft_window,
        rope_parameters=default_rope(500000.0),
        block_size=d.block,
        mask_token_id=MASK,
        target_layer_ids=build_target_layer_ids(text.num_hidden_layers, LAYERS),
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )


def new_drafter(family: str, target: nn.Module, d: Dims, seed: int) -> nn.Module:
    text = target.config.get_text_config()
    if is_speculators(family):
        from . import vllm_speculators

        drafter = vllm_speculators.new_drafter(zlab_config(family, text, d), VOCAB)
    else:
        config = muse_config(text, d) if is_muse_assistant(family) else zlab_config(family, text, d)
        drafter = drafter_class(family)(config)
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in drafter.named_parameters():
            noise = torch.randn(p.shape, generator=g)
            if name.endswith("base_kernel"):  # near the identity: (2, kernel, hidden), offset 0 is the row itself
                p.copy_(0.1 * noise)
                p[:, 0] += 1.0
            elif "codebook" in name:
                p.copy_(0.5 * noise)
            elif "kernel_projection" in name:
                p.copy_(0.1 / math.sqrt(p.shape[-1]) * noise)
            elif name.endswith("bias"):
                p.copy_(0.1 * noise)
            elif p.ndim >= 2:
                p.copy_(1.0 / math.sqrt(p.shape[-1]) * noise)
            else:
                p.copy_(1.0 + 0.15 * noise)
    return drafter.eval()


def tap_ids(drafter: nn.Module) -> list[int]:
    """Tap i is the output of decoder layer i, `hidden_states[i + 1]`; speculators files count from 1."""
    if ids := getattr(drafter.config, "aux_hidden_state_layer_ids", None):
        return [i - 1 for i in ids]
    return list(getattr(drafter, "target_layer_ids", None) or drafter.config.target_layer_ids)


def embedding_scale(drafter: nn.Module) -> float:
    return float(getattr(drafter.config, "dflash_config", {}).get("input_embedding_scale", 1.0))


def noise_rows(drafter: nn.Module, target: nn.Module, block: torch.Tensor) -> torch.Tensor:
    """Raw embedding rows of [anchor, mask, ...]: (batch, rows) -> (batch, rows, hidden)."""
    rows = nn.functional.embedding(block, target.get_input_embeddings().weight)
    return rows * embedding_scale(drafter)


def draft_logits(drafter: nn.Module, target: nn.Module, hidden: torch.Tensor) -> torch.Tensor:
    """Multiplier and softcap where z-lab's drafter has them; the Muse assistant uses the bare head, speculators an
    own one."""
    if hasattr(drafter, "d2t"):
        return drafter.lm_head(hidden)
    head = target.get_output_embeddings()
    return drafter.compute_logits(hidden, head) if hasattr(drafter, "compute_logits") else head(hidden)


def _training_hidden(drafter, target, taps, block):
    """One pass without a cache, as in training: (b, ctx, taps * hidden) and (b, rows) -> (b, rows, hidden)."""
    if hasattr(drafter, "d2t"):
        from .vllm_speculators import block_states

        return torch.cat([block_states(drafter, t[None], b[None]) for t, b in zip(taps, block, strict=True)])
    positions = torch.arange(taps.shape[1] + block.shape[1])[None].expand(taps.shape[0], -1)
    noise = noise_rows(drafter, target, block)
    if isinstance(drafter, DFlashDraftModel):
        return drafter(target_hidden=taps, noise_embedding=noise, position_ids=positions)
    cache = T.cache_utils.DFlashCache(config=drafter.config)
    cache.activate_past_recording()
    cache.set_previous_accepted_tokens(taps.shape[1])
    out = drafter(noise_embeds=noise, context_hidden_states=taps, position_ids=positions, cache=cache)
    return out.last_hidden_state


def distil(drafter, target, sequences, block_size: int, steps: int, seed: int) -> float:
    """Short fit to greedy continuations.  sequences: [(prompt length, ids (b, n), taps (b, n, taps * hidden))].
    Returns the last loss."""
    g = torch.Generator().manual_seed(seed)
    drafter.requires_grad_(True)
    optimiser = torch.optim.Adam(drafter.parameters(), lr=4e-3)
    for _ in range(steps):
        length, ids, taps = sequences[int(torch.randint(len(sequences), (1,), generator=g))]
        s = int(torch.randint(length, ids.shape[1] - block_size, (1,), generator=g))
        block = torch.full((ids.shape[0], block_size), MASK)
        block[:, 0] = ids[:, s]
        hidden = _training_hidden(drafter, target, taps[:, :s], block)[:, 1:]
        logits = draft_logits(drafter, target, hidden)
        labels = ids[:, s + 1 : s + block_size]
        if hasattr(drafter, "d2t"):
            from .vllm_speculators import draft_ids

            labels = draft_ids(drafter, labels)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.reshape(-1))
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    drafter.requires_grad_(False)
    return loss.item()
