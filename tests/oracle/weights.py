"""Random weights for a target: spread out enough that greedy paths differ and have few near-ties.

Every value is representable in bfloat16, so files compress and a bf16 copy of a checkpoint loses nothing.
Knows only parameter names; knows nothing of drafters or files.
"""

import math

import torch
from torch import nn

FP4 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def round_to_bf16(model: nn.Module) -> None:
    """In place, parameters and Gemma's `layer_scalar` buffers; computed buffers such as RoPE frequencies stay exact."""
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(p.to(torch.bfloat16).to(p.dtype))
        for name, b in model.named_buffers():
            if name.endswith("layer_scalar"):
                b.copy_(b.to(torch.bfloat16).to(b.dtype))


def randomise(model: nn.Module, seed: int, embed_std: float) -> None:
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(_draw(name, p, g, embed_std))
            if not torch.isfinite(p).all():
                raise ValueError(f"{name} is not finite")
        for name, b in model.named_buffers():
            if name.endswith("layer_scalar"):
                b.copy_(1.0 + 0.2 * torch.randn(b.shape, generator=g))
    round_to_bf16(model)


def _draw(name: str, p: torch.Tensor, g: torch.Generator, embed_std: float) -> torch.Tensor:
    leaf = name.split(".")[-1]
    noise = torch.randn(p.shape, generator=g)
    if leaf == "A_log":
        return torch.log(torch.rand(p.shape, generator=g) * 4 + 0.05)
    if leaf == "sinks":
        return noise
    if "embed" in name and p.ndim == 2 and "norm" not in name and "proj" not in name:
        return embed_std * noise
    if "router" in name or name.endswith("mlp.gate.weight"):
        if p.ndim == 2:
            return 3 / math.sqrt(p.shape[-1]) * noise
        return 1.0 + 0.2 * noise if "scale" in leaf else 0.3 * noise
    if "conv1d" in name:
        return 0.5 * noise
    if p.ndim >= 2:
        return 1.4 / math.sqrt(p.shape[-1]) * noise
    # norms, biases, dt_bias: keep the centre that the architecture starts from
    centre = 0.0 if "bias" in leaf and "dt_bias" not in leaf else p.mean().item()
    return (centre if math.isfinite(centre) else 0.0) + 0.25 * noise


def unpack_mxfp4(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """(E, out, in/32, 16) bytes of two nibbles (low first), and (E, out, in/32) exponents, bias 127 -> (E, in, out)"""
    low, high = FP4[(blocks & 15).long()], FP4[(blocks >> 4).long()]
    values = torch.stack([low, high], -1).flatten(-2)  # (E, out, in/32, 32)
    return (values * torch.exp2(scales.float() - 127)[..., None]).flatten(-2).transpose(1, 2)


def randomise_mxfp4(model: nn.Module, seed: int) -> dict[str, torch.Tensor]:
    """gpt-oss ships its experts as MXFP4: draw packed values, give the model their exact meaning, return the packed
    tensors under their hub names."""
    g = torch.Generator().manual_seed(seed)
    packed = {}
    for i, layer in enumerate(model.model.layers):
        for name in ("gate_up_proj", "down_proj"):
            weight = getattr(layer.mlp.experts, name)
            experts, n_in, n_out = weight.shape
            groups = (experts, n_out, n_in // 32)
            blocks = torch.randint(0, 256, (*groups, 16), generator=g, dtype=torch.uint8)
            scales = torch.randint(122, 125, groups, generator=g, dtype=torch.uint8)
            weight.data.copy_(unpack_mxfp4(blocks, scales))
            packed[f"model.layers.{i}.mlp.experts.{name}_blocks"] = blocks
            packed[f"model.layers.{i}.mlp.experts.{name}_scales"] = scales
    return packed
