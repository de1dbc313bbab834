"""Weights held in fp32 on the CPU backend: every kind of quantized module keeps its file's exact values."""

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.models.mla import MultiLinear
from mlx_lm.models.switch_layers import SwitchLinear

from mlx_dflash.checkpoint import hold_in_fp32
from mlx_dflash.errors import UnsupportedError

MODES = [("affine", 32, bits) for bits in (2, 3, 4, 5, 6, 8)] + [("affine", 64, 4), ("affine", 128, 8)]
MODES += [("mxfp4", 32, 4), ("mxfp8", 32, 8), ("nvfp4", 16, 4)]
EXPERTS, OUT, IN = 3, 24, 128
INDICES = mx.array([[0, 2], [1, 1]])


class Model(nn.Module):
    def __init__(self, dtype):
        super().__init__()
        self.table = nn.Embedding(OUT, IN)
        self.plain = nn.Linear(IN, OUT)
        self.experts = SwitchLinear(IN, OUT, EXPERTS)
        self.experts.bias = mx.random.normal((EXPERTS, OUT))
        self.norm = nn.RMSNorm(IN)
        self.sinks = mx.random.normal((4,))
        self.set_dtype(dtype)

    def __call__(self, x):
        """(2, IN) -> what each module makes of it"""
        ids = mx.arange(OUT)
        routed = self.experts(x[:, None, None], INDICES)
        return [self.plain(x), routed, self.table.as_linear(x), self.table(ids), self.norm(x), self.sinks]


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16, mx.float32])
@pytest.mark.parametrize(("mode", "group_size", "bits"), MODES)
def test_quantized_modules_compute_the_same_in_fp32(mode, group_size, bits, dtype):
    mx.random.seed(bits)
    model = Model(dtype)
    nn.quantize(model, group_size, bits, mode=mode)
    x = mx.random.normal((2, IN))
    quantized = [y.astype(mx.float32) for y in model(x)]
    if dtype != mx.float32:
        quantized[3] = None  # looked up rows are rounded to 16 bits by MLX; ours are not
    hold_in_fp32(model)
    assert [type(m) for m in (model.table, model.plain, model.experts)] == [nn.Embedding, nn.Linear, SwitchLinear]
    for before, after in zip(quantized, model(x), strict=True):
        assert after.dtype == mx.float32
        assert before is None or mx.allclose(before, after, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16])
def test_affine_values_are_not_rounded_to_the_scales_16_bits(dtype):
    model = Model(dtype)
    nn.quantize(model, 32, 8)
    q = model.experts
    levels = np.array(q.weight).view(np.uint8).reshape(EXPERTS, OUT, IN // 32, 32).astype(np.float64)
    scales, biases = (np.array(a.astype(mx.float32), np.float64)[..., None] for a in (q.scales, q.biases))
    expected = (levels * scales + biases).reshape(EXPERTS, OUT, IN)
    hold_in_fp32(model)
    assert np.array_equal(np.array(model.experts.weight), expected.astype(np.float32))
    assert not np.array_equal(np.array(mx.array(expected).astype(dtype).astype(mx.float32)), expected)


def test_nvfp4_experts_keep_their_tensor_scales():
    """One fp32 scale for every expert beside the blocks' scales: experts of very different size."""
    model = Model(mx.bfloat16)
    weights = model.experts.weight * mx.array([1.0, 100.0, 0.01])[:, None, None]
    model.experts.weight = weights
    model.experts = model.experts.to_quantized(16, 4, mode="nvfp4", global_scale=True)
    assert model.experts.global_scale.shape == (EXPERTS,)
    hold_in_fp32(model)
    off = mx.abs(model.experts.weight - weights).max((1, 2)) / mx.abs(weights).max((1, 2))
    assert off.max() < 0.17  # half the step from 4 to 6


def unknown_modules():
    class Subclass(nn.QuantizedLinear):
        """Computes something else with the same arrays."""

    binary = nn.Linear(IN, OUT)
    binary.weight = mx.zeros((OUT, IN // 4), mx.uint8)  # as BitNet packs it, with weight_scale
    activations = nn.QQLinear(IN, OUT, mode="nvfp4")
    activations.eval()
    return [Subclass(IN, OUT), MultiLinear(IN, OUT, 2).to_quantized(32, 4), activations, binary]


@pytest.mark.parametrize("module", unknown_modules(), ids=lambda module: type(module).__name__)
def test_unknown_packed_modules_are_refused_by_name(module):
    model = Model(mx.bfloat16)
    model.odd = module
    with pytest.raises(UnsupportedError, match=f"odd is a {type(module).__name__}"):
        hold_in_fp32(model)
