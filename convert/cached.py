"""A .gguf file as an MLX folder in the cache: converted when it is first loaded, found there from then on.

Which conversion is a file's own is told by its place, size and time of change; the one of an older file at the same
place, or of another version of this package, is removed once the new one stands.
"""

import hashlib
import re
import shutil
import sys
from contextlib import redirect_stdout
from pathlib import Path

import mlx.core as mx

from mlx_dflash import __version__
from mlx_dflash.download import size_text

from .plan import Options
from .run import CACHE_BYTES, Request, convert_drafter, convert_target
from .source import find


def converted(name: str, revision: str | None, drafter: bool, cache: Path) -> Path:
    """The folder of `name`, a .gguf file or `owner/repository/file.gguf`, below `cache`.

    All that a conversion has to say goes to stderr. Raises CheckpointError or UnsupportedError as a conversion does.
    """
    source = find(name, revision, drafter)
    path = source.path.absolute()
    facts = path.stat()
    stem = re.sub(r"[^\w.-]", "_", path.stem)  # mlx-lm looks for weights with glob, to which [ is no letter
    place = f"{stem}-{'draft' if drafter else 'target'}-{digest(path)}"
    folder = cache / f"{place}-{digest(facts.st_size, facts.st_mtime_ns, __version__)}"
    if (folder / "config.json").exists():
        return folder
    print(
        f"converting {name} ({size_text(facts.st_size)}) once, into {folder}; mlx_dflash.convert also quantizes and "
        "changes its dtype",
        file=sys.stderr,
        flush=True,
    )
    convert = convert_drafter if drafter else convert_target
    request = Request(name, folder, Options(), revision, elsewhere="name another folder in MLX_DFLASH_CACHE")
    limit = mx.set_cache_limit(CACHE_BYTES)
    try:
        with redirect_stdout(sys.stderr):  # stdout is for the generated text
            convert(request)
    finally:
        mx.set_cache_limit(limit)
    for old in cache.glob(f"{place}-*"):
        if old != folder:
            shutil.rmtree(old, ignore_errors=True)
    return folder


def digest(*facts: object) -> str:
    return hashlib.sha256("\0".join(map(str, facts)).encode()).hexdigest()[:12]
