"""`inspect`: what it says of targets, drafters, pairs and GGUF files, and which drafters it finds fitting."""

import json

import pytest
from gguf_families import write_family
from mlx_dflash.convert.cli import main
from mlx_dflash.convert.inspect import look
from mlx_dflash.convert.plan import Options
from mlx_dflash.convert.recipe import make_recipe
from mlx_dflash.convert.run import Request, convert_pair, convert_target
from tiny import draft_folder, target_folder, write_gguf

from mlx_dflash.download import size_text

FOUR = Options(make_recipe("affine", 4, 32, skip_unfit=True))


@pytest.fixture(autouse=True)
def no_cache(offline, monkeypatch):
    monkeypatch.setattr("mlx_dflash.convert.inspect.cached_drafters", list)


def test_a_target_and_the_drafters_that_fit():
    others = [str(draft_folder("qwen3")), str(draft_folder("qwen3_next"))]
    facts = look(str(target_folder("qwen3")), others)
    assert facts["kind"] == "target, qwen3, 8 layers" and facts["bits per weight"] == 32.0
    fits = facts["drafters that fit"]
    assert fits[others[0]].startswith("fits") and fits[others[1]].startswith("no: ")


@pytest.mark.parametrize("family, rows", [("qwen3", [8192] * 8), ("muse_glimmer", None)])
def test_context_memory_counts_windows_as_windows(family, rows):
    """Keys and values in 16 bits; a sliding layer keeps its window and no more."""
    config = json.loads((target_folder(family) / "config.json").read_text())
    config |= config.get("text_config") or {}
    if rows is None:
        rows = [config["sliding_window"] if kind == "sliding_attention" else 8192 for kind in config["layer_types"]]
        assert len(set(rows)) == 2
    row = 2 * 2 * config["num_key_value_heads"] * config["head_dim"]
    said = look(str(target_folder(family)), [])["context memory"]
    assert said == f"{size_text(row * sum(rows))} for 8192 tokens, 16-bit"


def test_bits_and_parameters_of_a_quantized_target(tmp_path):
    convert_target(Request(str(target_folder("qwen3_5")), tmp_path / "q", FOUR))
    plain, packed = look(str(target_folder("qwen3_5")), []), look(str(tmp_path / "q"), [])
    assert packed["parameters"] == plain["parameters"]
    assert packed["bits per weight"] < plain["bits per weight"] / 2
    assert list(packed["quantized"]) == ["affine 4-bit, groups of 32"] and packed["hashes"] == "as recorded"


def test_a_drafter_says_its_block_and_taps(capsys):
    with pytest.raises(SystemExit) as end:
        main(["inspect", str(draft_folder()), "--json"])
    facts = json.loads(capsys.readouterr().out)
    assert end.value.code == 0 and facts["kind"] == "DFlash drafter (z-lab v1), 3 layers"
    assert facts["block size"] == 8 and facts["taps"] == [1, 3, 5]


def test_a_pair_and_its_halves(tmp_path):
    folder = tmp_path / "pair"
    convert_pair(Request(str(target_folder()), folder, Options()), Request(str(draft_folder()), folder, Options()))
    facts = look(str(folder), [])
    assert facts["kind"] == "pair of target and drafter" and "qwen3" in facts["target"]
    assert [text.startswith("fits") for text in facts["drafters that fit"].values()] == [True]


def test_a_gguf_file(tmp_path, capsys):
    write_gguf(tmp_path / "m.gguf")
    with pytest.raises(SystemExit):
        main(["inspect", str(tmp_path / "m.gguf")])
    text = capsys.readouterr().out
    assert "architecture llama" in text and "Q4_1: 7" in text and "context memory: 2 MB" in text


@pytest.mark.parametrize("family", ["gemma4_e", "qwen3_5_moe", "gpt_oss_notrunc"])
def test_a_gguf_file_says_what_its_folder_says(family, tmp_path):
    write_family(tmp_path / "m.gguf", family)
    drafters = [str(draft_folder(family)), str(draft_folder("llama"))]
    ours, theirs = look(str(tmp_path / "m.gguf"), drafters), look(str(target_folder(family)), drafters)
    assert ours["context memory"] == theirs["context memory"]
    fits = [[text.startswith("fits") for text in facts["drafters that fit"].values()] for facts in (ours, theirs)]
    assert fits[0] == fits[1] and fits[0][0]


def test_what_is_not_a_model(tmp_path, capsys):
    with pytest.raises(SystemExit) as end:
        main(["inspect", str(tmp_path)])
    assert end.value.code == 2 and "no config.json" in capsys.readouterr().err
