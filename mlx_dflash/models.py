"""`python -m mlx_dflash.models`: the published pairs, what they take, and which is the best one for this machine."""

import argparse
import json
from collections.abc import Sequence
from typing import Any

from . import memory, registry
from .download import find_cached, size_text

SHORT, LONG = 8192, 131072  # contexts for which memory is told, tokens


def row(pair: registry.Pair) -> dict[str, Any]:
    """Sizes in bytes. cached: whether the drafter, and the target as named in `model`, are in the hub's cache."""
    short, long = memory.of_pair(pair, SHORT), memory.of_pair(pair, LONG)
    return {
        "model": pair.example,
        "target": pair.target,
        "drafter": pair.drafter,
        "revision": pair.revision,
        "download": memory.download_bytes(pair),
        "memory_8k": short.peak,
        "memory_128k": long.peak,
        "fits": (long.fits and "128k") or (short.fits and "8k") or "no",
        "cached": all(find_cached(name)[0] is not None for name in (pair.example, pair.drafter)),
    }


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m mlx_dflash.models", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print JSON")
    args = parser.parse_args(argv)
    rows = [row(pair) for pair in registry.pairs()]
    limit, limit_name = memory.machine_limit()
    best = memory.best_pair(registry.pairs())
    if args.json:
        summary = {"limit": limit, "limit_name": limit_name, "best": best.example if best else None, "pairs": rows}
        print(json.dumps(summary, indent=1))
        return
    print(f"{'model':<54}{'download':>10}{'8k':>12}{'128k':>12}  fits  cached")
    for r in sorted(rows, key=lambda r: r["memory_8k"]):
        sizes = f"{size_text(r['download']):>10}{memory.gib(r['memory_8k']):>12}{memory.gib(r['memory_128k']):>12}"
        print(f"{r['model']:<54}{sizes}  {r['fits']:<6}{'yes' if r['cached'] else 'no'}")
        print(f"  + {r['drafter']}")
    print(f"\nDownload at 4 bits; memory at 8k and 128k tokens; {limit_name} {memory.gib(limit)}.")
    print(f"Best for this machine: {best.example if best else 'none of these'}. Any quantization of a target works.")


if __name__ == "__main__":
    main()
