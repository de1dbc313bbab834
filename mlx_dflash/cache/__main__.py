"""`python -m mlx_dflash.cache list|clear`: the files that this package keeps on disk, not the caches of attention.

Models of the Hugging Face hub are its own affair (`hf cache`); only what a cut download left there is cleared.
"""

import argparse
import shutil
from collections.abc import Sequence
from pathlib import Path

from huggingface_hub import constants

from ..doctor import size_of
from ..download import clear_parts, cut_parts, size_text
from ..hub import cache_folder


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m mlx_dflash.cache", description=__doc__)
    parser.add_argument("what", choices=("list", "clear"))
    args = parser.parse_args(argv)
    folder, hub = cache_folder(), Path(constants.HF_HUB_CACHE).expanduser()
    entries = sorted(folder.iterdir()) if folder.is_dir() else []
    if args.what == "list":
        for entry in entries:
            print(f"{size_text(size_of(entry) if entry.is_dir() else entry.lstat().st_size):>10}  {entry}")
        for part in cut_parts(hub):
            print(f"{size_text(part.stat().st_size):>10}  {part} (a cut download)")
        return
    freed = size_of(folder)
    for entry in entries:
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink()
    print(f"removed {size_text(freed + clear_parts(hub))} from {folder}")


if __name__ == "__main__":
    main()
