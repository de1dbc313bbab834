"""Files of a Hugging Face repository: looked up in the hub's cache first, else downloaded into it.

Knows repositories, sizes and the layout of the hub's cache; nothing of what the files mean, beyond whether they are
whole. `huggingface_hub` keeps whole files after a kill, but starts a file that was cut anew; large ones are therefore
fetched here, to a part file that the next run goes on with.
"""

import logging
import re
import shutil
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, constants, hf_hub_url, snapshot_download
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.errors import HTTPError as TransportError  # type: ignore[attr-defined]
from huggingface_hub.file_download import http_get, repo_folder_name
from huggingface_hub.utils import build_hf_headers, filter_repo_objects  # type: ignore[attr-defined]

from .checkpoint import has_tokenizer, open_checkpoint, sha256
from .errors import CheckpointError, DFlashError

log = logging.getLogger(__name__)

WANTED = ["*.json", "*.safetensors", "*.jinja", "*.txt", "tokenizer.model", "README.md"]
# Folders hold the same weights once more (gpt-oss: original/ and metal/), as consolidated* does. No code is fetched.
UNWANTED = ["*/*", "consolidated*"]
COMMIT = re.compile(r"[0-9a-f]{40}")
LARGE = 64 << 20  # bytes from which on a file is fetched in a way that can be resumed
SPARE = 1 << 30  # bytes that must stay free on the disk
LOG_IN = "log in with `hf auth login`"


@dataclass(frozen=True)
class Remote:
    """A file of a repository. key: its name in the cache, the sha256 of a large file, else git's hash."""

    name: str
    size: int
    key: str
    sha256: str | None


def say(message: str) -> None:
    """What takes long and why, on stderr; not where the package's log level leaves warnings out (--verbose False)."""
    if logging.getLogger("mlx_dflash").isEnabledFor(logging.WARNING):
        print(message, file=sys.stderr, flush=True)


def size_text(count: float) -> str:
    """Bytes in the decimal units in which the hub and disks are labelled."""
    for unit in ("bytes", "kB", "MB"):
        if count < 1000:
            return f"{count:.0f} {unit}"
        count /= 1000
    return f"{count:.1f} GB"


def repository_folder(name: str) -> Path:
    """Where the hub's cache keeps a repository, whether or not it is there."""
    return Path(constants.HF_HUB_CACHE).expanduser() / repo_folder_name(repo_id=name, repo_type="model")


def find_cached(name: str, revision: str | None = None) -> tuple[Path | None, str]:
    """A whole snapshot in the hub's cache, or None and why not; never touches the network."""
    try:
        folder = Path(
            snapshot_download(
                name,
                revision=revision,
                cache_dir=constants.HF_HUB_CACHE,
                local_files_only=True,
                allow_patterns=WANTED,
                ignore_patterns=UNWANTED,
            )
        )
    except LocalEntryNotFoundError as e:
        return None, "only in part in the cache" if type(e) is not LocalEntryNotFoundError else "not in the cache"
    except (HFValidationError, OSError):
        return None, "not in the cache"
    try:
        checkpoint = open_checkpoint(folder)
    except DFlashError as e:
        return (None, "only in part in the cache") if isinstance(e, CheckpointError) else (folder, "")
    if not checkpoint.is_drafter and not has_tokenizer(folder):
        return None, "only in part in the cache"
    return folder, ""


def fetch(name: str, revision: str | None = None) -> Path:
    """The local folder of a repository's files.

    What is in the cache is used as it is, without asking the hub, unless `revision` names a branch or tag: such a name
    may have moved. revision: branch, tag or commit (40 hex digits); None: the commit in the cache, else the newest.
    Raises CheckpointError, in one line, with what the hub said.
    """
    folder, missing = find_cached(name, revision)
    moving = revision is not None and not COMMIT.fullmatch(revision)
    if folder is not None and not moving:
        log.info("%s: %s, from the cache", name, folder)
        return folder
    try:
        return download(name, revision)
    except (TransportError, HFValidationError, OSError) as e:
        if folder is not None and isinstance(e, OfflineModeIsEnabled):
            log.warning("%s at %s: offline, so what the cache had before is used", name, revision)
            return folder
        raise CheckpointError(f"{name} is not a folder, {missing or 'only in the cache'}, {refusal(name, e)}") from e


def refusal(name: str, error: Exception) -> str:
    """What the hub said, and the remedy."""
    page, said = f"{constants.ENDPOINT}/{name}", " ".join(str(error).split())[:200] or type(error).__name__
    if isinstance(error, OfflineModeIsEnabled) or constants.HF_HUB_OFFLINE:
        return "and the hub was not asked because HF_HUB_OFFLINE is set; unset it, or give a local folder"
    if isinstance(error, RevisionNotFoundError):
        return "and the hub said that it has no such revision; check --revision"
    status = error.response.status_code if isinstance(error, HfHubHTTPError) else None
    if isinstance(error, GatedRepoError) or status == 403:
        return f"and the hub said {status}, no access: accept the licence at {page}, then {LOG_IN}"
    if isinstance(error, HfHubHTTPError) and isinstance(error, EntryNotFoundError):
        file = error.response.url.path.rpartition("/")[2]
        return (
            f"and the hub said 404, no such file: {file}; the repository is incomplete, or changed just now: try again"
        )
    if isinstance(error, RepositoryNotFoundError) or status in (401, 404):
        return (
            f"and the hub said {status}, no such repository; check the name, or if it is private or needs a licence, "
            f"accept it at {page} and {LOG_IN}"
        )
    if isinstance(error, HFValidationError):
        return f"and no name that the hub could have: {said}; check the name"
    if status is not None:
        return f"and the hub said {status}: {said}; try again later"
    return f"and the hub could not give it: {said}; check the name and the connection, then run again to go on"


def download(name: str, revision: str | None) -> Path:
    """Fetch what is missing, after telling its size and holding it against the free disk."""
    info = HfApi(endpoint=constants.ENDPOINT).model_info(name, revision=revision, files_metadata=True)
    folder, commit = repository_folder(name), str(info.sha)
    siblings = {s.rfilename: s for s in info.siblings or []}
    files = [
        remote(siblings[n]) for n in filter_repo_objects(siblings, allow_patterns=WANTED, ignore_patterns=UNWANTED)
    ]
    if not any(f.name == "config.json" for f in files):
        raise CheckpointError(f"{name} has no config.json at {constants.ENDPOINT}; give a repository with MLX weights")
    lacking = [f for f in files if not (folder / "blobs" / f.key).exists()]
    check_disk(name, sum(f.size - part_of(folder, f).size for f in lacking), folder)
    if lacking:
        total = size_text(sum(f.size for f in lacking))
        say(f"downloading {name} ({commit[:8]}): {total} in {len(lacking)} files to {folder}")
    for file in lacking:
        if file.size >= LARGE and file.sha256 is not None:
            fetch_blob(name, commit, file, folder)
    # Finds the fetched blobs, brings the small files, links all into a snapshot and notes which commit the branch is.
    return Path(
        snapshot_download(
            name,
            revision=revision,
            cache_dir=constants.HF_HUB_CACHE,
            endpoint=constants.ENDPOINT,
            allow_patterns=WANTED,
            ignore_patterns=UNWANTED,
        )
    )


def remote(sibling: Any) -> Remote:
    sha256 = sibling.lfs.sha256 if sibling.lfs is not None else None
    return Remote(sibling.rfilename, sibling.size or 0, sha256 or str(sibling.blob_id), sha256)


@dataclass(frozen=True)
class Part:
    path: Path
    size: int


def part_of(folder: Path, file: Remote) -> Part:
    """What an earlier run has left of a file."""
    path = folder / "blobs" / f"{file.key}.mlx_dflash.part"
    return Part(path, path.stat().st_size if path.exists() else 0)


def fetch_blob(name: str, commit: str, file: Remote, folder: Path) -> None:
    """Fetch one large file into the cache, from where an earlier run was stopped; its hash is checked."""
    part = part_of(folder, file)
    part.path.parent.mkdir(parents=True, exist_ok=True)
    if part.size:
        say(f"going on with {file.name} at {size_text(part.size)} of {size_text(file.size)}")
    url = hf_hub_url(name, file.name, revision=commit, endpoint=constants.ENDPOINT)
    with part.path.open("ab") as f:
        http_get(
            url,
            f,
            resume_size=part.size,
            headers=build_hf_headers(),
            expected_size=file.size,
            displayed_filename=file.name,
        )
    if (found := sha256(part.path)) != file.sha256:
        part.path.unlink()
        raise CheckpointError(f"{name}: {file.name} arrived damaged (sha256 {found[:12]}); run again to fetch it anew")
    part.path.replace(folder / "blobs" / file.key)


def check_disk(name: str, needed: int, folder: Path) -> None:
    """Raise CheckpointError where `needed` bytes and some spare ones do not fit the disk of the hub's cache."""
    place = next(p for p in (folder, *folder.parents) if p.exists())
    free = shutil.disk_usage(place).free
    if needed and needed + SPARE > free:
        raise CheckpointError(
            f"{name} needs {size_text(needed)} more, and {size_text(free)} are free at {place}; free some space, or "
            "name a cache on another disk in HF_HOME"
        )


def cut_parts(folder: Path) -> list[Path]:
    """What cut downloads have left in the hub's cache."""
    return sorted(folder.glob("models--*/blobs/*.mlx_dflash.part"))


def clear_parts(folder: Path) -> int:
    """Remove them; returns the bytes."""
    removed = 0
    for path in cut_parts(folder):
        with suppress(OSError):
            removed += path.stat().st_size
            path.unlink()
    return removed
