"""From a hub name to files: against a hub on a local port, with redirects, ranges, cut connections and refusals."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import time

import huggingface_hub.constants as constants
import pytest
import tiny
from stub_hub import DRAFTER, TARGET

from mlx_dflash import CheckpointError, cli, download, hub, registry


@pytest.fixture
def no_network(monkeypatch):
    """Call it, and every further attempt to connect fails the test."""

    def block():
        def refuse(*_, **__):
            pytest.fail("a connection was attempted")

        monkeypatch.setattr(socket.socket, "connect", refuse)
        monkeypatch.setattr(socket, "getaddrinfo", refuse)

    return block


def refused(name, **options):
    with pytest.raises(CheckpointError) as error:
        hub.model_folder(name, **options)
    assert len(str(error.value).splitlines()) == 1
    return str(error.value)


def same_files(folder, source):
    for file in source.iterdir():
        assert (folder / file.name).read_bytes() == file.read_bytes(), file.name
    return True


# Download, then cache


def test_a_name_becomes_a_folder_through_redirects_and_then_needs_no_network(stub, capfd, no_network):
    folder = hub.model_folder(TARGET)
    assert same_files(folder, tiny.target_folder())
    assert stub.asked("/content/")  # the weights came by redirect
    err = capfd.readouterr().err
    assert "downloading someone/tiny" in err and "kB in 5 files" in err
    count = len(stub.requests)
    no_network()
    assert hub.model_folder(TARGET) == folder
    assert len(stub.requests) == count
    assert "downloading" not in capfd.readouterr().err


def test_a_renamed_repository_is_followed(stub):
    stub.renamed["old/name"] = TARGET
    assert same_files(hub.model_folder("old/name"), tiny.target_folder())


def test_two_loads_of_a_cached_pair_make_no_network_call(stub, no_network, capfd, monkeypatch):
    arguments = ["--model", TARGET, "--draft-model", DRAFTER, "--prompt", "w5 w9 w200", "--max-tokens", "8"]
    texts = []
    for run in range(3):
        if run == 1:
            no_network()
        with pytest.raises(SystemExit) as stop:
            cli.main(arguments)
        assert stop.value.code == 0
        out = capfd.readouterr()
        assert "dflash |" in out.err
        texts.append(out.out)
    assert texts[0] == texts[1] == texts[2] and texts[0].strip()


def test_from_a_target_name_alone_to_a_running_pair(stub, monkeypatch, capfd):
    """The registry's drafter, at its pinned commit, is found, fetched, checked and named."""
    pinned = stub.repositories[DRAFTER].main
    stub.repositories[DRAFTER].move({"config.json": b"{}"})  # main has gone on to something else
    pair = tiny_pair(revision=pinned)
    monkeypatch.setattr(registry, "pairs", lambda: (pair,))
    with pytest.raises(SystemExit) as stop:
        cli.main(["--model", TARGET, "--prompt", "w5 w9 w200", "--max-tokens", "8"])
    err = capfd.readouterr().err
    assert stop.value.code == 0, err
    assert f"{TARGET} + drafter {DRAFTER}" in err and "dflash |" in err


def tiny_pair(**changes):
    layout = {"hidden_size": 48, "num_hidden_layers": 3, "block_size": 8, "target_layer_ids": [1, 3, 5]}
    values = {
        "target": TARGET,
        "names": [],
        "drafter": DRAFTER,
        "revision": None,
        "parameters": 1,
        "bits": 4.5,
        "kv": [],
        "state_bytes": 0,
        "drafter_parameters": 1,
        "layouts": [{**layout, "mask_token_id": None}],
    }
    return registry.Pair(**(values | changes))


def test_a_registry_drafter_of_another_layout_is_refused_with_the_flag_that_takes_it(stub, monkeypatch, capfd):
    other = {"block_size": 16}
    monkeypatch.setattr(registry, "pairs", lambda: (tiny_pair(layouts=[other]),))
    with pytest.raises(SystemExit) as stop:
        cli.main(["--model", TARGET, "--prompt", "w5", "--max-tokens", "4"])
    err = capfd.readouterr().err
    assert stop.value.code == 2
    assert "block_size is 8, not 16" in err and f"--draft-model {DRAFTER}" in err


# Cut connections and kills


def test_a_connection_dropped_in_mid_file_goes_on_where_it_was(stub):
    stub.drop_after = [50_000]
    assert same_files(hub.model_folder(TARGET), tiny.target_folder())
    ranges = [wanted for _, path, wanted in stub.requests if "/content/" in path]
    assert "bytes=50000-" in ranges


def test_a_killed_download_is_resumed(stub, tmp_path, capfd):
    """A process is killed in the middle of a file; the next one asks for the rest only."""
    stub.slow = 0.05
    code = "from huggingface_hub import constants; constants.DOWNLOAD_CHUNK_SIZE = 10000; import sys; "
    code += "from mlx_dflash import download; download.LARGE = 20000; download.fetch(sys.argv[1])"
    environment = {**os.environ, "HF_ENDPOINT": stub.url, "HF_HUB_CACHE": str(tmp_path / "hub"), "HF_HUB_OFFLINE": "0"}
    process = subprocess.Popen([sys.executable, "-c", code, TARGET], env=environment, stderr=subprocess.DEVNULL)
    parts = tmp_path / "hub" / "models--someone--tiny" / "blobs"
    deadline = time.monotonic() + 60
    while not (size := sum(p.stat().st_size for p in parts.glob("*.part"))):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    size = sum(p.stat().st_size for p in parts.glob("*.part"))
    stub.slow, stub.requests[:] = 0.0, []
    assert same_files(hub.model_folder(TARGET), tiny.target_folder())
    assert f"bytes={size}-" in [wanted for _, _, wanted in stub.requests]
    assert "going on with model.safetensors" in capfd.readouterr().err
    assert not list(parts.glob("*.part"))


def test_a_file_that_arrives_damaged_is_refused_and_fetched_anew(stub, tmp_path):
    source = tiny.target_folder() / "model.safetensors"
    import hashlib

    key = hashlib.sha256(source.read_bytes()).hexdigest()
    part = tmp_path / "hub" / "models--someone--tiny" / "blobs" / f"{key}.mlx_dflash.part"
    part.parent.mkdir(parents=True)
    part.write_bytes(bytes(1000))
    assert "arrived damaged" in refused(TARGET)
    assert same_files(hub.model_folder(TARGET), tiny.target_folder())


def test_a_half_downloaded_snapshot_is_not_taken_for_a_model(stub, no_network):
    folder = hub.model_folder(TARGET)
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer_config.json").unlink()
    assert same_files(hub.model_folder(TARGET), tiny.target_folder())


# Refusals


@pytest.mark.parametrize("status", [401, 404])
def test_a_mistyped_name_says_where_it_was_looked_for(stub, status):
    """Without a login the hub does not tell a private repository from none; with one it says 404."""
    stub.missing = status
    line = refused("someone/tinny")
    assert line.startswith(
        f"someone/tinny is not a folder, not in the cache, and the hub said {status}, no such repository"
    )
    assert "check the name" in line


@pytest.mark.parametrize("status", [401, 403])
@pytest.mark.parametrize("large", [20_000, 1 << 30])  # large files are fetched by this package, others by the hub's
def test_a_gated_repository_names_licence_page_and_login(stub, monkeypatch, status, large):
    monkeypatch.setattr(download, "LARGE", large)
    stub.gated[TARGET] = status
    line = refused(TARGET)
    assert line.startswith(f"{TARGET} is not a folder, ") and f"the hub said {status}, no access" in line
    assert f"accept the licence at {stub.url}/{TARGET}, then log in with `hf auth login`" in line


def test_a_gated_repository_is_one_line_and_exit_2_on_the_command_line(stub, capfd):
    stub.gated[TARGET] = 403
    with pytest.raises(SystemExit) as stop:
        cli.main(["--model", TARGET, "--prompt", "w5"])
    out = capfd.readouterr()
    last = [line for line in out.err.splitlines() if "error" in line]
    assert stop.value.code == 2 and out.out == "" and len(last) == 1 and "accept the licence at" in last[0]


@pytest.mark.parametrize("revision", ["v9", "0" * 40])
def test_an_unknown_revision_is_refused(stub, revision):
    line = refused(TARGET, revision=revision)
    assert line.startswith(f"{TARGET} is not a folder, not in the cache, and the hub said that it has no such revision")
    assert "check --revision" in line


@pytest.mark.parametrize("file", ["config.json", "model.safetensors"])
def test_a_file_that_is_listed_and_not_there_is_named(stub, file):
    stub.lost.add(file)
    line = refused(TARGET)
    assert f"the hub said 404, no such file: {file}" in line and "no such repository" not in line


def test_a_repository_without_weights_is_refused_before_anything_is_fetched(stub):
    repository = stub.repositories[TARGET]
    repository.move({"README.md": b"moved"})
    assert f"{TARGET} has no config.json" in refused(TARGET)
    assert not stub.asked("/resolve/")


def test_a_hub_that_does_not_answer_is_refused(stub, monkeypatch):
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    assert "not in the cache, and the hub could not give it" in refused(TARGET)


def test_offline_is_honoured_and_named(stub, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert "HF_HUB_OFFLINE is set" in refused(TARGET)
    assert stub.requests == []


def test_a_full_disk_is_told_before_anything_is_fetched(stub, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10**12, 10**12, 1000))
    line = refused(TARGET)
    assert "1 kB are free" in line and "HF_HOME" in line
    assert not stub.asked("/resolve/")


def test_a_local_folder_has_no_revision():
    assert "which has no revision main" in refused(str(tiny.target_folder()), revision="main")


# Revisions


def test_a_moved_branch_changes_nothing_until_it_is_asked_for(stub):
    first = hub.model_folder(TARGET)
    repository = stub.repositories[TARGET]
    old = repository.main
    new = repository.move({**repository.files, "generation_config.json": b'{"eos_token_id": 3}'})
    assert hub.model_folder(TARGET) == first
    moved = hub.model_folder(TARGET, revision="main")
    assert moved.name == new and (moved / "generation_config.json").read_bytes() == b'{"eos_token_id": 3}'
    assert hub.model_folder(TARGET) == moved
    count = len(stub.requests)
    assert hub.model_folder(TARGET, revision=old) == first
    assert len(stub.requests) == count


# What is fetched, and other tools' folders


def test_copies_in_subfolders_and_code_are_left_out(stub, tmp_path):
    """gpt-oss repositories hold all weights once more under original/ and metal/."""
    source = tiny.copy_folder(tiny.target_folder(), tmp_path / "source")
    for name in ("original/model.safetensors", "metal/model.bin", "modeling_tiny.py", "consolidated.safetensors"):
        (source / name).parent.mkdir(exist_ok=True)
        (source / name).write_bytes(b"x" * 30_000)
    (source / "README.md").write_text("---\nbase_model: someone/else\n---\n")
    stub.add("someone/more", source)
    folder = hub.model_folder("someone/more")
    names = sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if not p.is_dir())
    assert names == sorted([*(p.name for p in tiny.target_folder().iterdir()), "README.md"])


def test_other_tools_folders_are_used_only_when_asked(stub, monkeypatch, tmp_path):
    theirs = tiny.copy_folder(tiny.target_folder(), tmp_path / "models" / "someone" / "tiny")
    monkeypatch.setenv("MLX_DFLASH_MODELS", str(tmp_path / "models"))
    assert hub.model_folder(TARGET) == theirs
    assert stub.requests == []
    monkeypatch.delenv("MLX_DFLASH_MODELS")
    assert hub.model_folder(TARGET) != theirs


def test_lm_studios_folder_is_known_by_name(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    theirs = tiny.copy_folder(tiny.target_folder(), tmp_path / ".lmstudio" / "models" / "someone" / "tiny")
    monkeypatch.setenv("MLX_DFLASH_MODELS", "lmstudio")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    assert hub.model_folder(TARGET) == theirs
