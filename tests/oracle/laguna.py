"""Poolside's drafter for Laguna in torch, written after vLLM's `laguna_dflash.py`, which runs on GPUs only.

To z-lab's block with causal windows it adds a norm for every tap, a softplus gate on every head, and each layer's own
norm on the context rows. So this is the wheel's model with those three, under the wheel's loop.
"""

import json
from pathlib import Path

import torch
from dflash.model import DFlashDraftModel, Qwen3DFlashAttention, Qwen3DFlashDecoderLayer, Qwen3RMSNorm
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import Qwen3Config


class LagunaAttention(Qwen3DFlashAttention):
    def __init__(self, config: Qwen3Config, layer_idx: int):
        super().__init__(config, layer_idx)
        self.g_proj = nn.Linear(config.hidden_size, config.num_attention_heads, bias=False)

    def forward(self, hidden_states, **kwargs):
        gate = nn.functional.softplus(self.g_proj(hidden_states))  # (b, rows, heads)

        def gated(_, args):
            return (args[0].view(*gate.shape, -1) * gate[..., None]).flatten(-2)

        hook = self.o_proj.register_forward_pre_hook(gated)
        try:
            return super().forward(hidden_states, **kwargs)
        finally:
            hook.remove()


class LagunaLayer(Qwen3DFlashDecoderLayer):
    def __init__(self, config: Qwen3Config, layer_idx: int):
        super().__init__(config, layer_idx)
        self.self_attn = LagunaAttention(config, layer_idx)

    def forward(self, target_hidden, **kwargs):
        return super().forward(target_hidden=self.input_layernorm(target_hidden), **kwargs)


class LagunaDraftModel(DFlashDraftModel):
    def __init__(self, config: Qwen3Config):
        super().__init__(config)
        width, eps = config.hidden_size, config.rms_norm_eps
        self.layers = nn.ModuleList([LagunaLayer(config, i) for i in range(config.num_hidden_layers)])
        self.aux_hidden_norms = nn.ModuleList([Qwen3RMSNorm(width, eps=eps) for _ in self.target_layer_ids])

    def forward(self, position_ids, target_hidden, **kwargs):
        taps = target_hidden.chunk(len(self.aux_hidden_norms), -1)
        normed = torch.cat([norm(tap) for norm, tap in zip(self.aux_hidden_norms, taps, strict=True)], -1)
        return super().forward(position_ids, target_hidden=normed, **kwargs)


SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
SIZES += ("head_dim", "rms_norm_eps", "vocab_size", "sliding_window", "layer_types", "max_position_embeddings")


def save_drafter(drafter: LagunaDraftModel, folder: Path) -> None:
    """As poolside/Laguna-XS-2.1-DFlash is laid out: flat RoPE, fused q, k and v, nothing before `layers.`."""
    config = drafter.config
    taps = list(drafter.target_layer_ids)
    out = {
        "architectures": ["DFlashLagunaForCausalLM"],
        "model_type": "laguna",
        **{name: getattr(config, name) for name in SIZES},
        "attention_bias": False,
        "draft_vocab_size": config.vocab_size,
        "eagle_aux_hidden_state_layer_ids": [i + 1 for i in taps],
        "gating": "per-head",
        "hidden_act": "silu",
        "num_experts": 0,
        "rope_theta": config.rope_parameters["rope_theta"],
        "torch_dtype": "float32",
        "dflash_config": {
            "block_size": drafter.block_size,
            "causal": True,
            "mask_token_id": drafter.mask_token_id,
            "num_target_layers": config.num_target_layers,
            "target_layer_ids": taps,
        },
    }
    (folder / "config.json").write_text(json.dumps(out, indent=1) + "\n")
    tensors = drafter.state_dict()
    for i in range(config.num_hidden_layers):
        attention = f"layers.{i}.self_attn"
        parts = [tensors.pop(f"{attention}.{part}_proj.weight") for part in "qkv"]
        tensors[f"{attention}.qkv_proj.weight"] = torch.cat(parts)
    tensors = {name: value.contiguous() for name, value in tensors.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def load_drafter(folder: Path) -> LagunaDraftModel:
    saved = json.loads((folder / "config.json").read_text())
    config = Qwen3Config(
        **{name: saved[name] for name in SIZES},
        use_sliding_window=True,
        max_window_layers=saved["num_hidden_layers"],
        rope_parameters={"rope_type": "default", "rope_theta": saved["rope_theta"]},
    )
    extra = saved["dflash_config"]
    config.block_size, config.num_target_layers = extra["block_size"], extra["num_target_layers"]
    config.dflash_config = {name: extra[name] for name in ("mask_token_id", "target_layer_ids")}
    config._attn_implementation = "sdpa"
    drafter = LagunaDraftModel(config)
    tensors = load_file(folder / "model.safetensors")
    heads = [config.num_attention_heads, config.num_key_value_heads, config.num_key_value_heads]
    for i in range(config.num_hidden_layers):
        attention = f"layers.{i}.self_attn"
        fused = tensors.pop(f"{attention}.qkv_proj.weight").split([n * config.head_dim for n in heads])
        for part, value in zip("qkv", fused, strict=True):
            tensors[f"{attention}.{part}_proj.weight"] = value
    drafter.load_state_dict(tensors)
    return drafter.eval().requires_grad_(False)
