"""Check the committed goldens: load the committed checkpoints with the torch references, record again, compare.

    python -m tests.oracle.rederive [--golden tests/golden] qwen3 llama

Prints the differences and exits 1 if there are any.  Nothing is written; how the checkpoints were made is not asked.
"""

import argparse
from pathlib import Path

import numpy as np
import torch

from .checkpoints import load_drafter, load_target
from .goldens import record_all
from .targets import FAMILIES

TOLERANCE = 1e-4


def rederive(family: str, golden_dir: str | Path) -> list[str]:
    """Differences between golden_dir/golden.npz and a new recording of golden_dir/{target,draft}; tokens, drafts and
    counts must be equal, floats within TOLERANCE."""
    torch.set_num_threads(1)
    folder = Path(golden_dir)
    with np.load(folder / "golden.npz") as stored:
        golden = dict(stored)
    target, drafter = load_target(family, folder / "target"), load_drafter(family, folder / "draft")
    prompts = {int(n): torch.tensor(golden[f"p{n}_ids"], dtype=torch.long)[None] for n in golden["contexts"]}
    again = record_all(family, target, drafter, prompts, int(golden["new_tokens"]), int(golden["block_size"]))
    return differences(golden, again.arrays)


def differences(golden: dict[str, np.ndarray], again: dict[str, np.ndarray]) -> list[str]:
    found = [f"{k}: only in golden.npz" for k in golden.keys() - again.keys()]
    found += [f"{k}: only in the new recording" for k in again.keys() - golden.keys()]
    for k in golden.keys() & again.keys():
        a, b = golden[k], again[k]
        if a.shape != b.shape or a.dtype != b.dtype:
            found.append(f"{k}: {a.dtype}{a.shape} became {b.dtype}{b.shape}")
        elif not np.issubdtype(a.dtype, np.floating):
            if not np.array_equal(a, b):
                found.append(f"{k}: {a.tolist()} became {b.tolist()}")
        elif a.size and not np.abs(a - b).max() <= TOLERANCE:  # also true for nan
            found.append(f"{k}: off by {np.abs(a - b).max():.1e}")
    return sorted(found)


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("families", nargs="+", choices=FAMILIES, metavar="FAMILY")
    p.add_argument("--golden", type=Path, default=Path(__file__).parents[1] / "golden")
    a = p.parse_args()
    bad = 0
    for family in a.families:
        found = rederive(family, a.golden / family)
        print(f"{family}: {'differs' if found else 'as recorded'}", *found, sep="\n  ")
        bad += bool(found)
    return 1 if bad else 0


if __name__ == "__main__":
    raise SystemExit(main())
