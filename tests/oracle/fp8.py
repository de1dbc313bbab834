"""fp8 as torch and transformers decode it: writes tests/oracle/fp8.npz (`python -m tests.oracle.fp8`).

table: torch's value of every E4M3 byte. For a block of 16 x 16, the whole tensor and a row: the bytes (32, 48), the
scales, and what transformers' own dequantizer makes of them in fp32 and, as bf16's bits, in bf16.
"""

from pathlib import Path

import numpy as np
import torch
from transformers.integrations.finegrained_fp8 import Fp8Dequantize

PATH = Path(__file__).with_suffix(".npz")
SHAPES = {"block": (2, 3), "tensor": (1, 1), "row": (32, 1)}


def main() -> None:
    generator = torch.Generator().manual_seed(0)
    out = {"table": torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().numpy()}
    for name, grid in SHAPES.items():
        weights = torch.randn(32, 48, generator=generator).to(torch.float8_e4m3fn)
        scales = torch.rand(grid, generator=generator) * 0.02 + 0.001
        out |= {f"{name}_bytes": weights.view(torch.uint8).numpy(), f"{name}_scales": scales.numpy()}
        decoded = Fp8Dequantize(None)._dequantize_one(weights, scales, torch.float32)
        out[f"{name}_fp32"] = decoded.numpy()
        out[f"{name}_bf16"] = decoded.to(torch.bfloat16).view(torch.uint16).numpy()
    np.savez_compressed(PATH, **out)


if __name__ == "__main__":
    main()
