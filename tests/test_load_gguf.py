"""A .gguf file where a model folder is asked for: converted into the cache once, told so, and found there again."""

import json
import os

import mlx.core as mx
import pytest
from gguf_files import write_drafter
from mlx_dflash.convert.plan import Options
from mlx_dflash.convert.run import Request, convert_target
from tiny import command_line, draft_folder, target_folder, write_gguf

from mlx_dflash import CheckpointError, UnsupportedError, generate, hub, load, load_drafter

pytestmark = pytest.mark.usefixtures("offline")
IDS = mx.array([[5, 9, 200]])


@pytest.fixture
def cache(monkeypatch, tmp_path):
    monkeypatch.setenv("MLX_DFLASH_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def file(tmp_path):
    write_gguf(tmp_path / "tiny-[1].gguf")
    return tmp_path / "tiny-[1].gguf"


def test_it_loads_as_its_conversion_does_and_only_the_first_load_converts(cache, file, tmp_path, capfd):
    limit = mx.set_cache_limit(123_456_789)
    target, tokenizer = load(file)
    assert mx.set_cache_limit(limit) == 123_456_789
    first = capfd.readouterr()
    [folder] = cache.iterdir()
    assert first.out == "" and f"converting {file}" in first.err and str(folder) in first.err
    convert_target(Request(str(file), tmp_path / "out", Options()))
    expected, _ = load(tmp_path / "out")
    logits = [t.forward(IDS, t.make_cache())[0] for t in (target, expected)]
    assert mx.array_equal(*logits)
    chat = generate(target, tokenizer, [{"role": "user", "content": "hi"}], max_tokens=4)
    assert chat.tokens
    capfd.readouterr()
    load(file)
    assert capfd.readouterr().err == "" and list(cache.iterdir()) == [folder]


def test_a_changed_file_is_converted_anew_and_the_old_folder_goes(cache, file):
    load(file)
    [old] = cache.iterdir()
    (cache / "other").mkdir()
    write_gguf(file, seed=1)
    os.utime(file, ns=(1, 1))
    changed, _ = load(file)
    assert not old.exists() and len(list(cache.iterdir())) == 2
    write_gguf(file.with_name("same.gguf"), seed=1)
    same, _ = load(file.with_name("same.gguf"))
    assert mx.array_equal(*(t.forward(IDS, t.make_cache())[0] for t in (changed, same)))
    assert len(list(cache.iterdir())) == 3


def test_a_drafter_file_drafts_as_its_folder_does(cache, tmp_path):
    write_drafter(tmp_path / "d.gguf", "qwen3", fork=False)
    target, tokenizer = load(target_folder())
    options = {"block_size": 8, "max_tokens": 16, "stop": []}
    drafters = [load_drafter(folder, target) for folder in (tmp_path / "d.gguf", draft_folder())]
    runs = [generate(target, tokenizer, [5, 9, 200], draft_model=d, **options) for d in drafters]
    assert runs[0].stats.acceptance_lengths == runs[1].stats.acceptance_lengths and runs[0].stats.rounds > 0


def test_the_command_line_keeps_stdout_to_the_result(cache, file, capfd):
    with pytest.raises(SystemExit) as end:
        command_line().main(["--model", str(file), "--prompt", "hi", "--max-tokens", "4", "--json"])
    out, err = capfd.readouterr()
    assert end.value.code == 0 and json.loads(out)["stats"]["mode"] == "plain"
    assert "converting" in err and "every GGUF block is held exactly" in err


def test_a_cut_file_and_a_missing_one_leave_no_folder(cache, file):
    file.write_bytes(file.read_bytes()[:-1000])
    with pytest.raises(CheckpointError, match="download it again"):
        load(file)
    with pytest.raises(CheckpointError, match="does not exist"):
        load(file.with_name("none.gguf"))
    with pytest.raises(UnsupportedError, match="no DFlash drafter"):
        write_gguf(file)
        load_drafter(file, load(target_folder())[0])
    assert not cache.exists() or list(cache.iterdir()) == []


def test_a_cache_that_can_not_be_written_names_its_variable(file, monkeypatch, tmp_path):
    (tmp_path / "taken").write_text("")
    monkeypatch.setenv("MLX_DFLASH_CACHE", str(tmp_path / "taken" / "cache"))
    with pytest.raises(CheckpointError, match="MLX_DFLASH_CACHE"):
        hub.target_folder(str(file))
