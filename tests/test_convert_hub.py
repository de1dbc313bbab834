"""Hub names and revisions as sources, against a hub on a local port: which commit is converted and recorded."""

import json

import mlx.core as mx
import pytest
from mlx_dflash.convert.cli import main
from stub_hub import DRAFTER, TARGET
from tiny import draft_folder, target_folder, write_gguf

from mlx_dflash import download, load, load_drafter, registry

TAG = "v1"


def run(*arguments):
    with pytest.raises(SystemExit) as end:
        main([str(a) for a in arguments])
    return end.value.code


def record(folder, name="conversion.json"):
    return json.loads((folder / name).read_text())


def weights(folder):
    return mx.load(str(folder / "model.safetensors"))


@pytest.fixture
def moved(stub):
    """The target's repository went on after its tag: other values in the norm, on branch main."""
    repository = stub.repositories[TARGET]
    repository.tags[TAG] = old = repository.main
    arrays = weights(target_folder())
    arrays["model.norm.weight"] = arrays["model.norm.weight"] + 1
    file = download.repository_folder(TARGET).parent / "moved.safetensors"
    file.parent.mkdir(parents=True, exist_ok=True)
    mx.save_safetensors(str(file), arrays)
    return old, repository.move(repository.files | {"model.safetensors": file.read_bytes()})


@pytest.mark.parametrize(
    "kind, name, source", [("target", TARGET, target_folder()), ("drafter", DRAFTER, draft_folder())]
)
def test_a_hub_name_gives_what_its_folder_gives(kind, name, source, stub, tmp_path, capsys):
    assert run(kind, "--hf-path", name, "--mlx-path", tmp_path / "hub-made") == 0
    assert f"{kind} {name}: " in capsys.readouterr().out
    assert run(kind, "--hf-path", source, "--mlx-path", tmp_path / "local") == 0
    ours, theirs = weights(tmp_path / "hub-made"), weights(tmp_path / "local")
    assert ours.keys() == theirs.keys() and all(mx.array_equal(ours[k], theirs[k]) for k in ours)
    assert record(tmp_path / "hub-made")["source"]["revision"] == stub.repositories[name].main
    assert record(tmp_path / "local")["source"]["revision"] is None


def test_a_revision_names_the_commit_that_is_converted(stub, moved, tmp_path):
    norms = []
    for number, asked in enumerate((TAG, "main", moved[0], None)):
        more = () if asked is None else ("--revision", asked)
        assert run("target", "--hf-path", TARGET, "--mlx-path", tmp_path / str(number), *more) == 0
        assert record(tmp_path / str(number))["source"]["revision"] == moved[number in (1, 3)]
        norms.append(weights(tmp_path / str(number))["model.norm.weight"])
    assert mx.array_equal(norms[0], norms[2]) and mx.array_equal(norms[1], norms[3])
    assert mx.array_equal(norms[0] + 1, norms[1])


def test_a_pair_records_both_commits(stub, moved, tmp_path):
    names = ("--hf-path", TARGET, "--revision", TAG, "--draft-model", DRAFTER, "--draft-revision", "main")
    assert run("pair", *names, "--mlx-path", tmp_path / "pair") == 0
    found = record(tmp_path / "pair", "pair.json")
    assert found["target"]["source"]["name"] == TARGET and found["target"]["source"]["revision"] == moved[0]
    assert found["drafter"]["source"]["revision"] == stub.repositories[DRAFTER].main
    target, _ = load(tmp_path / "pair")
    assert load_drafter(tmp_path / "pair", target).block_size == 8
    assert mx.array_equal(target.model.model.norm.weight, weights(target_folder())["model.norm.weight"])


def test_the_registry_knows_a_converted_target_again(stub, tmp_path):
    """By the name that it came from, also after a second conversion; a folder without a name stays unknown."""
    stub.add("Qwen/Qwen3-4B", target_folder())
    assert run("target", "--hf-path", "Qwen/Qwen3-4B", "--mlx-path", tmp_path / "once") == 0
    assert run("target", "--hf-path", tmp_path / "once", "--mlx-path", tmp_path / "twice") == 0
    for folder in (tmp_path / "once", tmp_path / "twice"):
        assert registry.pair_of(str(folder), folder).drafter == "z-lab/Qwen3-4B-DFlash-b16"
    assert run("target", "--hf-path", target_folder(), "--mlx-path", tmp_path / "local") == 0
    assert registry.pair_of(str(tmp_path / "local"), tmp_path / "local") is None


def test_a_gguf_file_of_a_repository(stub, tmp_path):
    (tmp_path / "files").mkdir()
    write_gguf(tmp_path / "files" / "tiny-Q4_1.gguf")
    repository = stub.add("someone/tiny-GGUF", tmp_path / "files")
    assert run("target", "--hf-path", "someone/tiny-GGUF/tiny-Q4_1.gguf", "--mlx-path", tmp_path / "out") == 0
    source = record(tmp_path / "out")["source"]
    assert source["revision"] == repository.main and list(source["sha256"]) == ["tiny-Q4_1.gguf"]


@pytest.mark.parametrize(
    "name, more, said",
    [
        ("someone/none", (), "no such repository"),
        (TARGET, ("--revision", "v9"), "no such revision"),
        ("someone/tiny-GGUF/other.gguf", (), "other.gguf"),
        (target_folder(), ("--revision", TAG), "has no revision"),
    ],
)
def test_names_that_the_hub_does_not_know(name, more, said, stub, tmp_path, capsys):
    stub.add("someone/tiny-GGUF", target_folder())
    assert run("target", "--hf-path", name, "--mlx-path", tmp_path / "out", *more) == 2
    error = [line for line in capsys.readouterr().err.splitlines() if "error:" in line]
    assert len(error) == 1 and said in error[0] and not (tmp_path / "out").exists()
