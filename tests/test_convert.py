"""Conversion of targets and drafters from Hugging Face folders: every golden family, unquantized and quantized."""

import json
import shutil
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from mlx_dflash.convert.plan import Options
from mlx_dflash.convert.recipe import make_recipe
from mlx_dflash.convert.run import Request, convert_drafter, convert_target
from mlx_lm.utils import load_model
from tiny import GOLDEN, command_line, copy_folder, draft_folder, target_folder

from mlx_dflash import generate, load, load_drafter
from mlx_dflash.checkpoint import hold_in_fp32
from mlx_dflash.errors import RequestError, UnsupportedError

FAMILIES = sorted(p.name for p in GOLDEN.iterdir() if (p / "golden.npz").exists())
# mlx-lm 0.32 ignores `truncate: false` and `attention_factor` of YaRN, whatever config.json says.
WRONG_ROPE_IN_MLX_LM = ("gpt_oss_notrunc", "laguna")
FOUR = make_recipe("affine", 4, 32, skip_unfit=True)
IDS = mx.array([[5, 9, 200, 31, 7, 120]])


def convert(source, folder, recipe=None, kind=convert_target, **options):
    return kind(Request(str(source), folder, Options(recipe, **options)))


def logits(folder):
    target, _ = load(folder)
    return target.forward(IDS, target.make_cache())[0]


def written(folder):
    """Weights and config, byte for byte."""
    return (folder / "model.safetensors").read_bytes(), (folder / "config.json").read_text()


@pytest.mark.parametrize("recipe", [None, FOUR], ids=["as it is", "4-bit"])
@pytest.mark.parametrize("family", FAMILIES)
def test_converting_twice_changes_nothing_and_mlx_lm_agrees(family, recipe, tmp_path):
    convert(GOLDEN / family / "target", tmp_path / "once", recipe)
    convert(tmp_path / "once", tmp_path / "twice", recipe)
    assert written(tmp_path / "once") == written(tmp_path / "twice")
    mine = logits(tmp_path / "once")
    if recipe is None:
        assert mx.array_equal(mine, logits(GOLDEN / family / "target"))
    if family not in WRONG_ROPE_IN_MLX_LM:
        stock, _ = load_model(tmp_path / "once")
        hold_in_fp32(stock)
        assert mx.array_equal(mine, stock(IDS))


@pytest.mark.parametrize("recipe", [None, FOUR], ids=["as it is", "4-bit"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_converted_drafter_drafts_and_is_a_fixed_point(family, recipe, tmp_path):
    convert(GOLDEN / family / "draft", tmp_path / "once", recipe, convert_drafter)
    convert(tmp_path / "once", tmp_path / "twice", recipe, convert_drafter)
    assert written(tmp_path / "once") == written(tmp_path / "twice")
    target, tokenizer = load(GOLDEN / family / "target")
    prompt = np.load(GOLDEN / family / "golden.npz")["p17_ids"].tolist()
    runs = []
    for folder in (GOLDEN / family / "draft", tmp_path / "once"):
        drafter = load_drafter(folder, target)
        runs.append(generate(target, tokenizer, prompt, draft_model=drafter, block_size=5, max_tokens=16, stop=[]))
    assert runs[0].tokens == runs[1].tokens
    assert runs[1].stats.rounds > 0 and runs[1].stats.drafted > 0
    if recipe is None:
        assert runs[0].stats.acceptance_lengths == runs[1].stats.acceptance_lengths


def test_a_drafter_keeps_fc_norms_and_convolutions_and_has_no_head(tmp_path):
    record = convert(draft_folder("qwen3_dflash2"), tmp_path / "d", FOUR, convert_drafter)
    weights = mx.load(str(tmp_path / "d" / "model.safetensors"))
    packed = {name.removesuffix(".scales") for name in weights if name.endswith(".scales")}
    assert packed and all(".self_attn." in name or ".mlp." in name for name in packed)
    assert "fc" in record["not_quantized"] and any("conv" in name for name in record["not_quantized"])
    assert not any("lm_head" in name or "embed" in name for name in weights)


@pytest.mark.parametrize("mode", ["mxfp4", "mxfp8", "nvfp4"])
def test_modes_of_micro_scales(mode, tmp_path):
    convert(target_folder("qwen3_5"), tmp_path / "q", make_recipe(mode, skip_unfit=True))
    config = json.loads((tmp_path / "q" / "config.json").read_text())
    assert config["quantization"]["mode"] == mode
    stock, _ = load_model(tmp_path / "q")
    hold_in_fp32(stock)
    mine = logits(tmp_path / "q")
    assert mx.array_equal(mine, stock(IDS))
    assert not mx.allclose(mine, logits(target_folder("qwen3_5")), atol=1e-3)


@pytest.mark.parametrize("bits", [2, 3, 5, 6, 8])
def test_affine_widths_get_nearer_to_the_source(bits, tmp_path):
    convert(target_folder("qwen3_5"), tmp_path / "q", make_recipe("affine", bits, 32, skip_unfit=True))
    weights = mx.load(str(tmp_path / "q" / "model.safetensors"))
    name = "language_model.model.embed_tokens"
    values = mx.dequantize(*(weights[f"{name}.{p}"] for p in ("weight", "scales", "biases")), group_size=32, bits=bits)
    source = mx.load(str(target_folder("qwen3_5") / "model.safetensors"))["model.language_model.embed_tokens.weight"]
    step = (source.max() - source.min()) / (2**bits - 1)
    assert mx.abs(values - source).max() <= step


@pytest.mark.parametrize("mixed", ["mixed_4_6", "wide_ends"])
def test_mixed_recipes_widen_sensitive_layers(mixed, tmp_path):
    convert(target_folder("qwen3_5"), tmp_path / "q", make_recipe("affine", None, 32, mixed, skip_unfit=True))
    layout = json.loads((tmp_path / "q" / "config.json").read_text())["quantization"]
    wide = {path: s["bits"] for path, s in layout.items() if isinstance(s, dict) and s["bits"] > 4}
    assert layout["bits"] == 4 and any("lm_head" in path for path in wide)
    if mixed == "wide_ends":
        assert any("embed_tokens" in path for path in wide) and any("layers.0." in path for path in wide)
    logits(tmp_path / "q")


def test_dtype_changes_only_when_asked_and_is_said(tmp_path, capsys):
    as_it_is = convert(target_folder(), tmp_path / "a")
    cast = convert(target_folder(), tmp_path / "b", dtype="bfloat16")
    assert as_it_is["casts"] == {} and sum(cast["casts"].values()) > 0
    assert "cast from float32 to bfloat16" in capsys.readouterr().out
    kinds = {v.dtype for v in mx.load(str(tmp_path / "b" / "model.safetensors")).values()}
    assert kinds == {mx.bfloat16}


def test_dequantizing_gives_the_packed_values(tmp_path):
    convert(target_folder("qwen3_5"), tmp_path / "q", FOUR)
    convert(tmp_path / "q", tmp_path / "f", dequantize=True)
    assert "quantization" not in json.loads((tmp_path / "f" / "config.json").read_text())
    assert mx.array_equal(logits(tmp_path / "f"), logits(tmp_path / "q"))


def test_a_quantized_source_is_not_quantized_again(tmp_path):
    convert(target_folder("qwen3_5"), tmp_path / "q", FOUR)
    with pytest.raises(UnsupportedError, match="quantized already"):
        convert(tmp_path / "q", tmp_path / "z", make_recipe("affine", 8, 32, skip_unfit=True))
    assert not (tmp_path / "z").exists()


def test_shards_and_their_index(tmp_path, monkeypatch):
    from mlx_dflash.convert import run, writer

    def small(folder, weights, **options):
        return writer.write_weights(folder, weights, shard_bytes=100_000, **options)

    monkeypatch.setattr(run, "write_weights", small)
    convert(target_folder(), tmp_path / "sharded")
    assert len(list((tmp_path / "sharded").glob("model-*.safetensors"))) > 2
    assert mx.array_equal(logits(tmp_path / "sharded"), logits(target_folder()))
    monkeypatch.undo()
    convert(tmp_path / "sharded", tmp_path / "whole")
    assert mx.array_equal(logits(tmp_path / "whole"), logits(target_folder()))


FLOATS = {"float16": mx.float16, "bfloat16": mx.bfloat16, "float32": mx.float32}


def narrow_source(family, kind, folder, sharded):
    """A golden target in 16 bits, in one file or in three shards with an index. Its values need all of them."""
    source = copy_folder(target_folder(family), folder, {"dtype": kind}, lambda w: cast_all(w, kind, 1.001))
    if sharded:
        arrays = mx.load(str(source / "model.safetensors"))
        mx.eval(arrays)
        (source / "model.safetensors").unlink()
        where = {name: f"model-{i % 3 + 1:05d}-of-00003.safetensors" for i, name in enumerate(arrays)}
        for shard in set(where.values()):
            mx.save_safetensors(str(source / shard), {n: a for n, a in arrays.items() if where[n] == shard})
        (source / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    return source


def cast_all(weights, kind, factor=1.0):
    return {name: (value * factor).astype(FLOATS[kind]) for name, value in weights.items()}


@pytest.mark.parametrize("sharded", [False, True], ids=["one file", "shards"])
@pytest.mark.parametrize("kind", ["float16", "bfloat16"])
@pytest.mark.parametrize("family", ["qwen3", "qwen3_5", "gemma4_moe"])
def test_sources_in_16_bits_keep_dtype_and_values(family, kind, sharded, tmp_path, capsys):
    """Widths of 16 bits stay unless another is asked for; then a line says which became which."""
    source = narrow_source(family, kind, tmp_path / "source", sharded)
    same = convert(source, tmp_path / "same")
    weights = mx.load(str(tmp_path / "same" / "model.safetensors"))
    assert {v.dtype for v in weights.values()} == {FLOATS[kind]} and same["casts"] == {}
    assert "cast from" not in capsys.readouterr().out
    expected = logits(source)
    assert mx.array_equal(logits(tmp_path / "same"), expected)
    if family != "qwen3_5":  # whose norms get 1 added, in 16 bits as in mlx-lm
        widened = copy_folder(
            target_folder(family), tmp_path / "w", tensors=lambda w: cast_all(cast_all(w, kind, 1.001), "float32")
        )
        assert mx.array_equal(logits(widened), expected)

    wide = convert(source, tmp_path / "wide", dtype="float32")
    changed = [n for n, v in mx.load(str(tmp_path / "wide" / "model.safetensors")).items() if v.dtype == mx.float32]
    assert len(weights) - len(changed) == (6 if family == "qwen3_5" else 0)  # A_log, which mlx-lm's rule keeps
    assert wide["casts"] == {f"{kind} to float32": len(changed)}
    assert f"{len(changed)} tensors cast from {kind} to float32" in capsys.readouterr().out
    assert mx.array_equal(logits(tmp_path / "wide"), expected)


@pytest.mark.parametrize("kind", ["float16", "bfloat16"])
def test_a_drafter_in_16_bits_keeps_them(kind, tmp_path):
    source = copy_folder(draft_folder(), tmp_path / "source", tensors=lambda w: cast_all(w, kind))
    assert convert(source, tmp_path / "same", kind=convert_drafter)["casts"] == {}
    ours, theirs = (mx.load(str(tmp_path / f / "model.safetensors")) for f in ("same", "source"))
    assert ours.keys() == theirs.keys()
    assert all(ours[n].dtype == FLOATS[kind] and mx.array_equal(ours[n], theirs[n]) for n in ours)


def test_what_is_left_out_is_named_with_the_reason(tmp_path, capsys):
    record = convert(target_folder("muse_glimmer"), tmp_path / "out")
    source = mx.load(str(target_folder("muse_glimmer") / "model.safetensors"))
    vision = {name for name in source if name.startswith("model.vision_")}
    assert vision and record["dropped"] == dict.fromkeys(vision, "not part of the text model")
    assert "left out, not part of the text model: model.vision_" in capsys.readouterr().out


def pair_arguments(folder, *more):
    return [
        "pair",
        "--hf-path",
        str(target_folder()),
        "--draft-model",
        str(draft_folder()),
        "--mlx-path",
        str(folder),
        *more,
    ]


def main(arguments):
    from mlx_dflash.convert.cli import main as convert_main

    with pytest.raises(SystemExit) as end:
        convert_main(arguments)
    return end.value.code


def test_a_pair_folder_is_all_that_generate_needs(tmp_path, capsys, offline):
    assert main(pair_arguments(tmp_path / "pair")) == 0
    record = json.loads((tmp_path / "pair" / "pair.json").read_text())
    assert record["block_size"] == 8 and record["target_layer_ids"] == [1, 3, 5]
    assert record["target"]["source"]["sha256"]["model.safetensors"] and record["drafter"]["files"]
    capsys.readouterr()
    arguments = ["--model", str(tmp_path / "pair"), "--prompt", "w5 w9 w20", "--max-tokens", "12", "--json"]
    with pytest.raises(SystemExit) as end:
        command_line().main(arguments)
    assert end.value.code == 0
    result = json.loads(capsys.readouterr().out)
    assert result["stats"]["mode"] == "dflash" and result["stats"]["rounds"] > 0
    target, _ = load(tmp_path / "pair")
    assert load_drafter(tmp_path / "pair", target).block_size == 8


def test_verify_shows_what_quantizing_cost(tmp_path, capsys):
    assert main(pair_arguments(tmp_path / "same", "--verify")) == 0
    same = json.loads((tmp_path / "same" / "pair.json").read_text())["quality"]
    assert same["kl_mean"] < 1e-6 and same["top1_agreement"] == 1.0
    assert same["mean_accepted_length"]["source"] == same["mean_accepted_length"]["converted"] >= 1
    narrow = ("-q", "--q-bits", "2", "--q-group-size", "32", "--skip-unfit", "--verify")
    assert main(pair_arguments(tmp_path / "narrow", *narrow)) == 0
    quality = json.loads((tmp_path / "narrow" / "pair.json").read_text())["quality"]
    assert quality["kl_mean"] > 1e-3 and quality["perplexity"]["source"] == same["perplexity"]["source"]
    assert "top-1 agreement" in capsys.readouterr().out


def test_a_drafter_of_another_target_is_refused(tmp_path, capsys):
    arguments = pair_arguments(tmp_path / "pair")
    arguments[2] = str(target_folder("qwen3_next"))
    assert main(arguments) == 2
    assert "use the drafter made for it" in capsys.readouterr().err and not (tmp_path / "pair").exists()


def test_settings_that_mlx_cannot_pack_are_refused():
    for bad in ({"bits": 7}, {"group_size": 16}, {"mode": "mxfp4", "bits": 8}, {"mode": "nvfp4", "mixed": "mixed_4_6"}):
        with pytest.raises(RequestError):
            make_recipe(**bad)


def test_code_is_copied_only_when_trusted(tmp_path):
    shutil.copytree(target_folder(), tmp_path / "source")
    (tmp_path / "source" / "modeling_x.py").write_text("raise SystemExit('run')")
    convert(tmp_path / "source", tmp_path / "plain")
    convert_target(Request(str(tmp_path / "source"), tmp_path / "trusted", Options(), copy_code=True))
    assert not list(Path(tmp_path / "plain").glob("*.py")) and list(Path(tmp_path / "trusted").glob("*.py"))
