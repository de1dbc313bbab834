"""Gemma 4 as mlx_lm.convert quantizes it: every matrix, and the routers at the 8 bits that mlx-lm chooses for them.

The golden targets are too narrow for that; test_quantized_targets has what they allow, and the other widths.
"""

import json
import shutil
from pathlib import Path

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from mlx_lm.convert import convert
from mlx_lm.models import gemma4
from stubs import mlx_lm_greedy

from mlx_dflash import generate, load

GOLDEN = Path(__file__).parent / "golden"
IDS = [(37 * i) % 287 + 3 for i in range(40)]


def wide(shape, folder):
    """A random target of the same shape with inner sizes that groups of 32 divide, in the layout of mlx-lm's files."""
    shutil.copytree(GOLDEN / shape / "target", folder)
    config = json.loads((folder / "config.json").read_text())
    text = config["text_config"]
    text |= {"hidden_size": 64, "intermediate_size": 128}
    text |= {k: 32 for k in ("hidden_size_per_layer_input", "moe_intermediate_size") if text[k]}
    (folder / "config.json").write_text(json.dumps(config))
    model = gemma4.Model(gemma4.ModelArgs.from_dict(config))
    parameters = tree_flatten(model.parameters())
    keys = mx.random.split(mx.random.key(1), len(parameters))
    mx.save_safetensors(
        str(folder / "model.safetensors"),
        {
            name: mx.random.normal(value.shape, key=key) * 1.4 / value.shape[-1] ** 0.5 if value.ndim > 1 else value
            for (name, value), key in zip(parameters, keys, strict=True)
        },
    )
    return folder


@pytest.mark.parametrize("shape", ["gemma4", "gemma4_e", "gemma4_moe"])
@pytest.mark.parametrize(
    "how",
    [
        {"q_bits": 2, "q_group_size": 32},
        {"q_mode": "nvfp4"},
    ],
    ids=lambda how: "-".join(map(str, how.values())),
)
def test_folders_quantized_by_mlx_lm_give_its_tokens(shape, how, tmp_path):
    folder = tmp_path / "quantized"
    convert(str(wide(shape, tmp_path / "wide")), str(folder), quantize=True, **how)
    names = [name for name in mx.load(str(folder / "model.safetensors")) if name.endswith(".weight")]
    matrices = [name for name in names if "norm" not in name]
    packed = mx.load(str(folder / "model.safetensors")).keys() & {n.replace(".weight", ".scales") for n in matrices}
    assert len(packed) == len(matrices) > 40
    by_path = json.loads((folder / "config.json").read_text())["quantization"]
    routers = [how["bits"] for path, how in by_path.items() if path.endswith("router.proj")]
    assert routers == ([8] * 8 if shape == "gemma4_moe" else [])
    expected, lead = mlx_lm_greedy(folder, IDS, 24)
    assert lead > 1e-3
    target, tokenizer = load(folder)
    assert generate(target, tokenizer, IDS, max_tokens=24).tokens == expected
