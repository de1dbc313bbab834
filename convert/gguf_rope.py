"""RoPE's scaling from a GGUF file's fields, or from the factors that it holds as a tensor."""

import math
from typing import Any

import numpy as np

from mlx_dflash.errors import UnsupportedError

from .gguf_file import GgufFile, shortest


def rope_scaling(file: GgufFile) -> dict[str, Any] | None:
    kind = file.own("rope.scaling.type", "none")
    if (tensor := file.tensors.get("rope_freqs.weight")) is not None:
        return llama3_scaling(file, np.asarray(tensor.data).view(np.float32).reshape(-1))
    if kind == "none":
        return None
    factor, length = file.own("rope.scaling.factor"), file.own("rope.scaling.original_context_length")
    if kind == "linear" and factor:
        return {"rope_type": "linear", "factor": shortest(factor)}
    if kind == "yarn" and factor and length:
        return {
            "rope_type": "yarn",
            "factor": shortest(factor),
            "original_max_position_embeddings": int(length),
        }
    raise UnsupportedError(f"{file.path} has RoPE scaling {kind!r} ({factor}, {length}), which is not supported")


def llama3_scaling(file: GgufFile, factors: np.ndarray) -> dict[str, Any]:
    """Llama 3's settings whose factors on the periods are those of `rope_freqs` (llama.cpp, conversion/llama.py)."""
    dims, base = 2 * len(factors), float(file.own("rope.freq_base", 10000.0))
    factor = shortest(factors.max())
    scaling = {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    expected = []
    for i in range(0, dims, 2):
        length = 2 * math.pi * base ** (i / dims)
        if length < 8192 / 4.0:
            expected.append(1.0)
        elif length > 8192 / 1.0:
            expected.append(factor)
        else:
            smooth = (8192 / length - 1.0) / (4.0 - 1.0)
            expected.append(1 / ((1 - smooth) / factor + smooth))
    if not np.allclose(factors, np.array(expected, np.float32), rtol=1e-4):
        raise UnsupportedError(f"{file.path} has rope_freqs that are not Llama 3's; give the Hugging Face release")
    return scaling
