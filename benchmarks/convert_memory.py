"""Peak memory of a conversion that streams: a synthetic checkpoint of several GB, quantized to 4 bits.

`python -m mlx_dflash.benchmarks.convert_memory --work FOLDER` writes an untrained Llama in bf16 (default 8 GB, zeros on
disk but for a few values), converts it in a process of its own, and prints the process's peak beside the largest
tensor's needs. The promise is: peak <= the largest tensor's needs + 1 GB.
"""

import argparse
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

HIDDEN, INNER, VOCAB, HEADS = 4096, 14336, 128256, 32
CONVERT = """
import json, resource, sys
from mlx_dflash.convert.cli import main
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
try:
    main(sys.argv[1:])
finally:
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print("PEAK", json.dumps([before, after]), flush=True)
"""


def shapes(layers: int) -> dict[str, tuple[int, ...]]:
    out: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCAB, HIDDEN), "model.norm.weight": (HIDDEN,)}
    out["lm_head.weight"] = (VOCAB, HIDDEN)
    for i in range(layers):
        path = f"model.layers.{i}"
        out |= {f"{path}.self_attn.{x}_proj.weight": (HIDDEN, HIDDEN) for x in "qo"}
        out |= {f"{path}.self_attn.{x}_proj.weight": (HIDDEN // 4, HIDDEN) for x in "kv"}
        out |= {f"{path}.mlp.{x}_proj.weight": (INNER, HIDDEN) for x in ("gate", "up")}
        out |= {f"{path}.mlp.down_proj.weight": (HIDDEN, INNER)}
        out |= {f"{path}.{x}_layernorm.weight": (HIDDEN,) for x in ("input", "post_attention")}
    return out


def write_checkpoint(folder: Path, gigabytes: float) -> tuple[float, float]:
    """A folder of at least so many GB in bf16; returns its size and that of its largest tensor, GB."""
    folder.mkdir(parents=True)
    layers = 1
    while total(shapes(layers)) < gigabytes * 1e9:
        layers += 1
    tensors, header, at = shapes(layers), {}, 0
    for name, shape in tensors.items():
        count = 2 * int(np.prod(shape))
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [at, at + count]}
        at += count
    head = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as f:
        f.write(len(head).to_bytes(8, "little") + head)
        row = np.full(2**24, 0x3C00, np.uint16)
        row[::7] = 0xBC40
        block = row.tobytes()
        for begin in range(0, at, len(block)):
            f.write(block[: at - begin])
    config = {"model_type": "llama", "hidden_size": HIDDEN, "intermediate_size": INNER, "vocab_size": VOCAB}
    config |= {"num_hidden_layers": layers, "num_attention_heads": HEADS, "num_key_value_heads": HEADS // 4}
    config |= {"rms_norm_eps": 1e-5, "rope_theta": 5e5, "tie_word_embeddings": False, "dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer_config.json").write_text("{}")
    return at / 1e9, max(2 * int(np.prod(s)) for s in tensors.values()) / 1e9


def total(tensors: dict[str, tuple[int, ...]]) -> int:
    return sum(2 * int(np.prod(shape)) for shape in tensors.values())


def main() -> None:
    parser = argparse.ArgumentParser(description="Peak memory of a streaming conversion.")
    parser.add_argument("--work", type=Path, required=True, help="a folder for source and result, removed at the end")
    parser.add_argument("--gigabytes", type=float, default=8.0, help="size of the source (default 8)")
    args = parser.parse_args()
    source, out = args.work / "source", args.work / "out"
    for folder in (source, out):
        shutil.rmtree(folder, ignore_errors=True)
    try:
        size, largest = write_checkpoint(source, args.gigabytes)
        begun = time.monotonic()
        arguments = ["target", "--hf-path", str(source), "--mlx-path", str(out), "-q"]
        done = subprocess.run(
            [sys.executable, "-c", CONVERT, *arguments], stdout=subprocess.PIPE, text=True, check=True
        )
        seconds = time.monotonic() - begun
        peaks = next(line for line in done.stdout.splitlines() if line.startswith("PEAK"))
        unit = 1 if sys.platform == "darwin" else 1024
        before, after = (n * unit / 1e9 for n in json.loads(peaks.removeprefix("PEAK")))
    finally:
        for folder in (source, out):
            shutil.rmtree(folder, ignore_errors=True)
    needs = largest * (1 + 4.5 / 16)  # the tensor itself and its 4-bit form
    print(f"source {size:.2f} GB, largest tensor {largest:.2f} GB (with its 4-bit form {needs:.2f} GB)")
    print(f"process before converting {before:.2f} GB, peak {after:.2f} GB, {seconds:.0f} s")
    print(f"peak <= largest tensor's needs + 1 GB: {after <= needs + 1}")


if __name__ == "__main__":
    main()
