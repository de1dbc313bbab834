"""A model folder written beside its name and renamed at the end, its tensors evaluated one at a time.

Knows files, bytes and disk space; nothing of what the tensors mean. Killed at any moment, there is nothing at the
folder's name, and what was left beside it is removed by the next run.
"""

import contextlib
import errno
import hashlib
import json
import os
import shutil
import struct
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import mlx.core as mx

from mlx_dflash.checkpoint import INDEX
from mlx_dflash.download import size_text
from mlx_dflash.errors import CheckpointError

SHARD_BYTES = 5_000_000_000  # mlx-lm's size of a shard
SLACK_BYTES = 64_000_000  # for config, tokenizer and the file system's own needs
MARKS = ("config.json", "pair.json")  # a folder with one of them may be overwritten with --force
# dtype -> its name in safetensors, and the unsigned type of its bytes
DTYPES: dict[Any, tuple[str, Any]] = {
    mx.float32: ("F32", mx.uint32),
    mx.float16: ("F16", mx.uint16),
    mx.bfloat16: ("BF16", mx.uint16),
    mx.uint32: ("U32", mx.uint32),
    mx.uint16: ("U16", mx.uint16),
    mx.uint8: ("U8", mx.uint8),
    mx.int8: ("I8", mx.uint8),
    mx.int32: ("I32", mx.uint32),
    mx.int64: ("I64", mx.uint64),
}


@contextlib.contextmanager
def staged(folder: Path, force: bool = False, elsewhere: str = "give another --mlx-path") -> Iterator[Path]:
    """A new folder beside `folder` to write into; renamed to `folder` at the end, removed if anything goes wrong.

    force: `folder` may exist and is replaced, if it is a model folder. elsewhere: what to do where there is no room.
    Raises CheckpointError where it may not be written, or the disk fills up.
    """
    folder = Path(os.path.abspath(folder.expanduser()))
    check_free_name(folder, force)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        remove_leftovers(folder)
        staging = folder.parent / f".{folder.name}.partial-{os.getpid()}"
        staging.mkdir()
    except OSError as e:
        raise CheckpointError(f"{folder} can't be written ({e.strerror or e}); {elsewhere}") from e
    try:
        yield staging
        old = None
        if folder.exists():
            old = folder.parent / f".{folder.name}.partial-{os.getpid()}-old"
            folder.replace(old)
        staging.replace(folder)
        if old is not None:
            shutil.rmtree(old)
    except OSError as e:
        shutil.rmtree(staging, ignore_errors=True)
        why = e.strerror or e
        raise CheckpointError(f"{folder} can't be written ({why}); free some space, or {elsewhere}") from e
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise


def check_free_name(folder: Path, force: bool) -> None:
    if not folder.exists() and not folder.is_symlink():
        return
    if not force:
        raise CheckpointError(f"{folder} exists; give another --mlx-path, or --force to replace it")
    if not folder.is_dir() or folder.is_symlink() or not any((folder / mark).exists() for mark in MARKS):
        raise CheckpointError(f"{folder} is not a model folder, so --force won't replace it; give another --mlx-path")


def remove_leftovers(folder: Path) -> None:
    """Staging folders of runs that were killed."""
    for left in folder.parent.glob(f".{folder.name}.partial-*"):
        pid = left.name.removesuffix("-old").rpartition("-")[2]
        if pid.isdigit() and not alive(int(pid)):
            shutil.rmtree(left, ignore_errors=True)


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def check_space(folder: Path, need: int) -> None:
    """Raise OSError unless the disk has room for `need` bytes and a little more."""
    free = shutil.disk_usage(folder).free
    if free < need + SLACK_BYTES:
        room = f"{size_text(free)} are free, {size_text(need + SLACK_BYTES)} are needed"
        raise OSError(errno.ENOSPC, room)


class Progress:
    """A bar with the time left on stderr; a line now and then where stderr is no terminal."""

    def __init__(self, total: int, what: str):
        self.total, self.what, self.done = max(total, 1), what, 0
        self.begun = self.shown = time.monotonic()
        self.bar = sys.stderr.isatty()

    def add(self, count: int) -> None:
        self.done += count
        now = time.monotonic()
        if self.done < self.total and now - self.shown < (0.2 if self.bar else 10.0):
            return
        self.shown = now
        spent = now - self.begun
        left = spent * (self.total - self.done) / max(self.done, 1)
        share = self.done / self.total
        text = f"{self.what} {share:4.0%}  {size_text(self.done)} of {size_text(self.total)}, {clock(left)} left"
        if self.bar:
            end = "\n" if self.done >= self.total else ""
            print(f"\r[{'#' * int(24 * share):<24}] {text} ", end=end, file=sys.stderr, flush=True)
        else:
            print(text, file=sys.stderr, flush=True)


def clock(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


def write_weights(
    folder: Path, weights: dict[str, mx.array], *, shard_bytes: int = SHARD_BYTES, stem: str = "model"
) -> dict[str, str]:
    """Write lazy arrays as safetensors shards and, if there is more than one, an index; `weights` is emptied.

    Each array is evaluated, written and let go before the next, in the order given. Returns file name -> sha256.
    """
    total = sum(value.nbytes for value in weights.values())
    check_space(folder, total)
    shards: list[list[str]] = [[]]
    room = shard_bytes
    for name, value in weights.items():
        if shards[-1] and value.nbytes > room:
            shards.append([])
            room = shard_bytes
        shards[-1].append(name)
        room -= value.nbytes
    hashes: dict[str, str] = {}
    where: dict[str, str] = {}
    progress = Progress(total, "writing")
    for index, names in enumerate(shards, 1):
        file = f"{stem}.safetensors" if len(shards) == 1 else f"{stem}-{index:05d}-of-{len(shards):05d}.safetensors"
        hashes[file] = write_shard(folder / file, names, weights, progress)
        where |= dict.fromkeys(names, file)
    if len(shards) > 1:
        write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))})
    return hashes


def write_shard(path: Path, names: list[str], weights: dict[str, mx.array], progress: Progress) -> str:
    header: dict[str, Any] = {"__metadata__": {"format": "mlx"}}
    at = 0
    for name in names:
        value = weights[name]
        kind, _ = DTYPES[value.dtype]
        header[name] = {"dtype": kind, "shape": list(value.shape), "data_offsets": [at, at + value.nbytes]}
        at += value.nbytes
    head = json.dumps(header, separators=(",", ":")).encode()
    head += b" " * (-len(head) % 8)
    digest = hashlib.sha256()
    with path.open("wb") as f:
        put(f, digest, struct.pack("<Q", len(head)) + head)
        for name in names:
            value = weights.pop(name)
            mx.eval(value)
            count = value.nbytes
            raw: Any = mx.contiguous(value.view(DTYPES[value.dtype][1]))
            put(f, digest, memoryview(raw).cast("B") if count else b"")
            del value, raw
            mx.clear_cache()
            progress.add(count)
    return digest.hexdigest()


def put(f: BinaryIO, digest: Any, data: Any) -> None:
    f.write(data)
    digest.update(data)


def write_json(path: Path, value: Any, sort: bool = False) -> None:
    path.write_text(json.dumps(value, ensure_ascii=False, indent=1, sort_keys=sort) + "\n", encoding="utf-8")
