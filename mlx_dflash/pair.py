"""A pair folder: target and drafter under one name, as `mlx_dflash.convert pair` writes it.

`pair.json` says what they were made of; `target/` and `draft/` are model folders like any other.
"""

from pathlib import Path

from .checkpoint import read_json
from .errors import CheckpointError

PAIR, TARGET, DRAFT = "pair.json", "target", "draft"


def is_pair(folder: Path) -> bool:
    return (folder / PAIR).is_file()


def part(folder: Path, name: str) -> Path:
    """The folder of one half of a pair; any other folder as it is. Raises CheckpointError for a broken pair."""
    if not is_pair(folder):
        return folder
    if (form := read_json(folder / PAIR).get("format")) != 1:
        raise CheckpointError(f"{folder / PAIR} has format {form!r}; 1 is known: convert the pair again, or upgrade")
    if not (folder / name).is_dir():
        raise CheckpointError(f"{folder} is a pair without its {name} folder; convert or download it again")
    return folder / name
