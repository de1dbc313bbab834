"""Pack pairs of tests/golden/ for `python -m mlx_dflash.selftest`: `python -m tests.pack_selftest` writes the archives.

A pair becomes one zip: its folders, weights in bfloat16 (which holds them exactly, tests/oracle/weights.py), and of the
golden arrays what the selftest compares.
"""

import io
import tempfile
import zipfile
from pathlib import Path

import mlx.core as mx
import numpy as np

GOLDEN = Path(__file__).parent / "golden"
PACKED = Path(__file__).parent.parent / "mlx_dflash" / "data" / "selftest"
# Every target family, every kind of cache, every kind of drafter.
FAMILIES = (
    "gemma4",
    "gemma4_e",
    "gemma4_moe",
    "gpt_oss_notrunc",
    "laguna",
    "llama",
    "muse_glimmer",
    "qwen3_5",
    "qwen3_5_moe",
    "qwen3_dflash2",
    "qwen3_moe",
    "qwen3_next",
    "qwen3_speculators",
)
KINDS = ("ids", "taps", "logits", "tokens", "accept", "vsize")


def files(family: str) -> dict[str, bytes]:
    """Archive member -> content."""
    source = GOLDEN / family
    out = {}
    for path in sorted(p for part in ("target", "draft") for p in (source / part).iterdir()):
        name = str(path.relative_to(source))
        out[name] = packed(path) if path.suffix == ".safetensors" else path.read_bytes()
    golden = dict(np.load(source / "golden.npz"))
    longest = max(golden["contexts"].tolist())
    keep = {k: golden[k] for k in ("new_tokens", "block_size", "target_layer_ids")}
    keep |= {k: golden[f"p{longest}_{k}"] for k in KINDS}
    buffer = io.BytesIO()
    np.savez(buffer, **keep)
    return out | {"golden.npz": buffer.getvalue()}


def packed(path: Path) -> bytes:
    """A safetensors file with its floats in bfloat16; refuses values that this would change."""
    arrays = mx.load(str(path))
    for name, value in arrays.items():
        if value.dtype == mx.float32:
            arrays[name] = value.astype(mx.bfloat16)
            assert mx.array_equal(arrays[name].astype(mx.float32), value), f"{path}: {name}"
    with tempfile.TemporaryDirectory() as folder:
        mx.save_safetensors(f"{folder}/model.safetensors", dict(sorted(arrays.items())), {"format": "mlx"})
        return Path(folder, "model.safetensors").read_bytes()


def write(family: str) -> None:
    with zipfile.ZipFile(PACKED / f"{family}.zip", "w", zipfile.ZIP_LZMA) as archive:
        for name, data in files(family).items():
            archive.writestr(zipfile.ZipInfo(name), data, zipfile.ZIP_LZMA)


if __name__ == "__main__":
    PACKED.mkdir(exist_ok=True)
    for family in FAMILIES:
        write(family)
    print(f"wrote {len(FAMILIES)} pairs, {sum(p.stat().st_size for p in PACKED.iterdir())} bytes")
