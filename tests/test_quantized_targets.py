"""Folders that mlx-lm quantized load as they are, and decode as mlx-lm decodes them, for every family with goldens."""

import json
import shutil
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.generate import generate_step
from mlx_lm.utils import load_config, load_model, quantize_model, save_config, save_model

from mlx_dflash import generate, load, load_drafter
from mlx_dflash.checkpoint import hold_in_fp32

GOLDEN = Path(__file__).parent / "golden"
CONTEXT, LENGTH = 17, 24
MODES = {"4-bit": ("affine", 32, 4), "8-bit": ("affine", 32, 8), "mxfp4": ("mxfp4", 32, 4), "nvfp4": ("nvfp4", 16, 4)}
# mlx-lm 0.32 ignores `truncate: false` and `attention_factor` of YaRN, so it is corrected before it is asked.
WRONG_ROPE_IN_MLX_LM = ("gpt_oss_notrunc", "laguna")


def families():
    """One family for every config among the goldens: some differ in their drafters alone."""
    configs = {}
    for folder in sorted(GOLDEN.iterdir()):
        config = json.loads((folder / "target" / "config.json").read_text())
        for part in (config, config.get("text_config", {})):
            part.pop("eos_token_id", None)
        configs.setdefault(json.dumps(config, sort_keys=True), folder.name)
    return list(configs.values())


def quantize(source, folder, mode, group_size, bits):
    """Quantize a golden target with mlx-lm's own functions, some layers otherwise than the rest.

    The module is the one that we loaded, since mlx-lm can't read every family's files; its names are mlx-lm's.
    """
    kinds = {}

    def predicate(path, module):
        kinds[path] = True
        if "layers.0." in path and module.weight.shape[-1] % 32 == 0:
            kinds[path] = {"group_size": 32, "bits": 8 if bits == 4 else 4, "mode": "affine"}
        return kinds[path]

    model, config = quantize_model(
        load(source)[0].model, load_config(source), group_size, bits, mode=mode, quant_predicate=predicate
    )
    assert any(isinstance(kind, dict) for kind in kinds.values()) and True in kinds.values()
    save_model(folder, model)
    save_config(config, folder / "config.json")
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(source / file, folder)


def mlx_lm_greedy(folder, target, family, prompt):
    """Greedy tokens of mlx-lm's own model and loop, on the folder's values held in fp32 as ours are."""
    model, _ = load_model(folder)
    hold_in_fp32(model)
    if family in WRONG_ROPE_IN_MLX_LM:
        for theirs, ours in zip(model.layers, target.model.layers, strict=True):
            theirs.self_attn.rope = ours.self_attn.rope
    return [token for token, _ in generate_step(mx.array(prompt), model, max_tokens=LENGTH)]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("family", families())
def test_tokens_are_mlx_lms_with_and_without_a_drafter(family, mode, tmp_path):
    quantize(GOLDEN / family / "target", tmp_path / mode, *MODES[mode])
    golden = np.load(GOLDEN / family / "golden.npz")
    prompt = golden[f"p{CONTEXT}_ids"].tolist()
    target, tokenizer = load(tmp_path / mode)
    expected = mlx_lm_greedy(tmp_path / mode, target, family, prompt)
    options = {"max_tokens": LENGTH, "stop": []}
    plain = generate(target, tokenizer, prompt, **options)
    assert plain.tokens == expected
    drafter = load_drafter(GOLDEN / family / "draft", target)
    run = generate(target, tokenizer, prompt, draft_model=drafter, block_size=int(golden["block_size"]), **options)
    assert run.tokens == expected and run.stats.rounds > 0


@pytest.mark.parametrize("bits", [2, 3, 5, 6])
def test_other_widths_of_affine_quantization(bits, tmp_path):
    source = GOLDEN / "qwen3_5" / "target"
    quantize(source, tmp_path / "q", "affine", 32, bits)
    target = load(tmp_path / "q")[0]
    reference, _ = load_model(tmp_path / "q")
    hold_in_fp32(reference)
    ids = mx.array([[5, 9, 200, 31, 7]])
    logits = target.forward(ids, target.make_cache())[0]
    assert mx.array_equal(logits, reference(ids))
    original = load(source)[0]
    assert not mx.allclose(logits, original.forward(ids, original.make_cache())[0], atol=1e-3)
