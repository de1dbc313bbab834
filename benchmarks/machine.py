"""What a result ran on."""

import platform
from functools import cache
from importlib.metadata import version
from typing import Any

import mlx.core as mx
import numpy as np


def describe() -> dict[str, Any]:
    """Device, versions, and whether a matmul's rows depend on how many there are (not so on the reference BLAS)."""
    return {
        "platform": platform.platform(),
        "processor": processor(),
        "device": str(mx.default_device()),
        "blas": loaded_blas(),
        "rows_independent": rows_independent(),
        "python": platform.python_version(),
        **{name: version(name) for name in ("mlx", "mlx-lm", "mlx-dflash")},
    }


@cache
def rows_independent() -> bool:
    """True if each row of a matrix product is bit-equal to that row computed alone."""
    x = mx.random.normal((16, 576), key=mx.random.key(0))
    w = mx.random.normal((576, 576), key=mx.random.key(1))
    block = np.array(x @ w)
    return all(np.array_equal(block[i : i + 1], np.array(x[i : i + 1] @ w)) for i in range(16))


def loaded_blas() -> str:
    """The BLAS library mapped into this process for MLX, on Linux (not NumPy's own); elsewhere the backend's own."""
    try:
        with open("/proc/self/maps") as f:
            names = {
                line.split("/")[-1].strip() for line in f if "blas" in line and ".so" in line and "scipy_" not in line
            }
    except OSError:
        return "backend"
    return ", ".join(sorted(n for n in names if "openblas" in n.lower())) or ", ".join(sorted(names)) or "none"


def processor() -> str:
    try:
        with open("/proc/cpuinfo") as f:
            return next((line.split(":")[1].strip() for line in f if line.startswith("model name")), platform.machine())
    except OSError:
        return platform.processor() or platform.machine()
