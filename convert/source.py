"""Where weights come from: a name -> a local folder or file, checked to be whole, its tensors as lazy arrays.

Knows names, files and hashes; what the tensors mean is decided elsewhere.
"""

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx
from huggingface_hub import hf_hub_download, try_to_load_from_cache
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from huggingface_hub.errors import HTTPError as TransportError  # type: ignore[attr-defined]

from mlx_dflash.checkpoint import Checkpoint, load_arrays, open_checkpoint, read_json, sha256
from mlx_dflash.download import COMMIT, fetch
from mlx_dflash.errors import CheckpointError, UnsupportedError
from mlx_dflash.hub import DEMO, demo_target_folder, drafter_folder
from mlx_dflash.pair import DRAFT, TARGET, part

RECORD = "conversion.json"
SHA256 = re.compile(r"[0-9a-f]{64}")
# Packages of other runtimes: suffix -> what it is.
FOREIGN = {
    ".pte": "an ExecuTorch program, whose weights are compiled in; give the Hugging Face folder that it was made from",
    ".bin": "a PyTorch pickle, which can run code; give the *.safetensors release",
    ".pt": "a PyTorch pickle, which can run code; give the *.safetensors release",
    ".pth": "a PyTorch pickle, which can run code; give the *.safetensors release",
    ".onnx": "an ONNX graph; give the Hugging Face folder that it was made from",
}


@dataclass
class Source:
    """Where a model comes from. path: a folder, or a .gguf file; revision: the hub's commit, where there is one.

    hashes: file name -> sha256 of every weight file and config.json.
    """

    name: str
    path: Path
    revision: str | None = None
    hashes: dict[str, str] = field(default_factory=dict)

    @property
    def is_gguf(self) -> bool:
        return self.path.suffix == ".gguf"

    def to_dict(self) -> dict[str, Any]:
        return {"name": self.name, "revision": self.revision, "sha256": self.hashes}


def find(name: str, revision: str | None = None, drafter: bool = False) -> Source:
    """The local files of a folder, a pair's half, a .gguf file, a hub name, `owner/repository/file.gguf`, or "demo".

    Raises CheckpointError or UnsupportedError where there are none that can be read.
    """
    if name == DEMO:
        return Source(name, drafter_folder(DEMO) if drafter else demo_target_folder())
    path = Path(name).expanduser()
    if path.exists():
        if revision is not None:
            raise CheckpointError(f"{name} is on this disk, where it has no revision {revision}; leave it out")
        half = part(path, DRAFT if drafter else TARGET) if path.is_dir() else path
        return local(name, half)
    parts = name.split("/")
    if path.is_absolute() or name.startswith((".", "~")) or len(parts) not in (2, 3) or not all(parts):
        raise CheckpointError(f"{name} does not exist; give a folder, a .gguf file or a hub name like Qwen/Qwen3-4B")
    try:
        path = fetch(name, revision) if len(parts) == 2 else gguf_of_hub("/".join(parts[:2]), parts[2], revision)
    except (TransportError, HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as e:
        reason = " ".join(str(e).split())[:200] or type(e).__name__
        raise CheckpointError(
            f"{name} is not there, and the hub could not give it: {reason}; check the name and the connection"
        ) from e
    source = local(name, path)
    commit = (path if path.is_dir() else path.parent).name
    source.revision = commit if COMMIT.fullmatch(commit) else revision
    return source


def gguf_of_hub(repository: str, file: str, revision: str | None) -> Path:
    """One file of a repository: the cached one, unless `revision` is a branch or tag, which may have moved."""
    if revision is None or COMMIT.fullmatch(revision):
        found = try_to_load_from_cache(repository, file, revision=revision)
        if isinstance(found, str):
            return Path(found)
    return Path(hf_hub_download(repository, file, revision=revision))


def local(name: str, path: Path) -> Source:
    if path.is_file():
        if path.suffix in FOREIGN:
            raise UnsupportedError(f"{path} is {FOREIGN[path.suffix]}")
        if path.suffix != ".gguf":
            raise CheckpointError(f"{path} is a file; give the folder that holds it, or a .gguf file")
        return Source(name, path)
    if not (path / "config.json").exists():
        found = sorted(path.iterdir())
        foreign = [f for f in found if f.suffix == ".pte"]
        if foreign:
            raise UnsupportedError(f"{foreign[0]} is {FOREIGN['.pte']}")
        ggufs = [f for f in found if f.suffix == ".gguf" and not f.name.startswith("mmproj")]
        if len(ggufs) == 1:
            return Source(name, ggufs[0])
        if ggufs:
            raise CheckpointError(f"{path} holds {len(ggufs)} .gguf files; give one of them, such as {ggufs[0]}")
    return Source(name, path)


def open_folder(source: Source) -> tuple[Checkpoint, dict[str, mx.array]]:
    """The checked folder and its tensors, lazy; fp8 ones come as bytes (uint8). Fills in `source.hashes`."""
    checkpoint = open_checkpoint(source.path, fp8=True)
    source.hashes = hash_files([*checkpoint.files, source.path / "config.json"])
    check_hashes(source)
    tensors: dict[str, mx.array] = {}
    for file in checkpoint.files:
        arrays, _ = load_arrays(file)
        if twice := sorted(tensors.keys() & arrays.keys()):
            raise CheckpointError(f"{source.path} holds {twice[0]} twice, once in {file.name}; download it again")
        tensors |= arrays
    return checkpoint, tensors


def hash_files(files: list[Path]) -> dict[str, str]:
    hashes = {}
    for file in files:
        hashes[file.name] = sha256(file)
        blob = file.resolve().name  # the hub's cache names a large file by its sha256
        if file.is_symlink() and SHA256.fullmatch(blob) and blob != hashes[file.name]:
            raise CheckpointError(f"{file} does not have the sha256 that the hub gave for it; download it again")
    return hashes


def check_hashes(source: Source) -> None:
    """Hold a folder that this converter wrote against what it wrote."""
    if not (source.path / RECORD).exists():
        return
    written = read_json(source.path / RECORD).get("files") or {}
    for name, expected in written.items():
        if source.hashes.get(name, expected) != expected:
            raise CheckpointError(
                f"{source.path / name} does not have the sha256 that {RECORD} records; convert or download it again"
            )
