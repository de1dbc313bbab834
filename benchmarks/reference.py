"""Stock mlx-lm beside us: the same values in a folder that `mlx_lm.load` reads, and its own greedy decoding."""

import json
import shutil
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm import load as load_mlx_lm
from mlx_lm.generate import generate_step

from mlx_dflash.targets import Target


def write_fp32_folder(source: Path, target: Target, folder: Path) -> None:
    """Write the values that `target`, loaded from `source`, holds in memory as an unquantized fp32 MLX folder."""
    folder.mkdir(parents=True)
    for file in source.iterdir():
        if file.suffix != ".safetensors" and not file.name.endswith(".index.json"):
            shutil.copy(file, folder)
    config = json.loads((source / "config.json").read_text())
    config.pop("quantization", None)
    config.pop("quantization_config", None)
    (folder / "config.json").write_text(json.dumps(config))
    weights = {name: value.astype(mx.float32) for name, value in tree_flatten(target.model.parameters())}
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})


def mlx_lm_model(source: Path, target: Target, scratch: Path) -> Any:
    """mlx-lm's own model object with the target's values."""
    write_fp32_folder(source, target, scratch / "fp32")
    return load_mlx_lm(str(scratch / "fp32"))[0]


def mlx_lm_tokens(model: Any, prompt: list[int], max_tokens: int, stops: set[int]) -> list[int]:
    """Greedy tokens of mlx_lm.generate_step, up to and with the first stop id."""
    tokens = []
    for token, _ in generate_step(mx.array(prompt), model, max_tokens=max_tokens):
        tokens.append(int(token))
        if tokens[-1] in stops:
            break
    return tokens
