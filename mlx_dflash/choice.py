"""Which pair the command line's flags mean, and what it takes."""

import argparse
from pathlib import Path

from . import memory, registry
from .download import find_cached, size_text
from .drafters import DFlashDrafter, open_drafter
from .errors import RequestError
from .hub import target_folder
from .loading import drafter_folder, load_drafter
from .lookup import Lookup
from .pair import is_pair
from .targets import Target, open_target


def choose_drafter(args: argparse.Namespace, model: Target) -> tuple[DFlashDrafter | Lookup | None, str]:
    """The drafter to use and a line that names the pair."""
    name = args.model or "demo (SmolLM2-135M-Instruct)"
    if args.plain:
        return None, f"{name}, no drafter (--plain)"
    wanted = args.draft_model
    if wanted == Lookup.name:
        return load_drafter(wanted, model), f"{name}, drafts from the text itself (lookup)"
    if wanted in (None, "auto") and args.model in (None, "demo"):
        return load_drafter("demo", model), f"{name} + drafter demo{recommendation()}"
    if wanted in (None, "auto") and is_pair(Path(name).expanduser()):
        wanted = name
    if wanted in (None, "auto") and (known := registry.pair_of(args.model, model.folder)) is not None:
        return load_drafter("auto", model, args.draft_revision), f"{name} + drafter {known.drafter}"
    if wanted == "auto":
        raise RequestError(f"no drafter is known for {name}; give its folder or hub name with --draft-model")
    if wanted is None:
        if args.num_draft_tokens or args.block_size not in (None, 1, "auto"):
            raise RequestError(f"no drafter is known for {name}; give its folder or hub name with --draft-model")
        return None, (
            f"{name}, plain decoding: no drafter is known for it; give one with --draft-model "
            "(lookup drafts from the text itself)"
        )
    return load_drafter(wanted, model, args.draft_revision), f"{name} + drafter {wanted}"


def show_memory(args: argparse.Namespace) -> int:
    """--memory: what the pair needs, from headers or, of a pair that is not downloaded, from the registry."""
    name, context = args.model or "demo", max(args.max_tokens, memory.USUAL_CONTEXT)
    pair = registry.pair_of(name)
    if pair is not None and not Path(name).is_dir() and find_cached(name, args.revision)[0] is None:
        print(f"{pair.target} at 4 bits + {pair.drafter}, not downloaded: from the registry")
        found = memory.of_pair(pair, context)
    else:
        folder = target_folder(name, args.revision)
        target = open_target(folder)
        target.asked_for = name
        known = name == "demo" or registry.pair_of(name, folder) is not None
        wanted = (
            None if args.plain or args.draft_model == Lookup.name else args.draft_model or ("auto" if known else None)
        )
        drafter = None if wanted is None else open_drafter(drafter_folder(wanted, target, args.draft_revision), target)
        found = memory.estimate(target, drafter, context, args.prefill_step_size, args.kv_bits, args.kv_group_size)
    print("\n".join(found.lines()))
    return 0


def recommendation() -> str:
    """What to run instead of the demo on this machine."""
    best = memory.best_pair(registry.pairs())
    if best is None:
        return "; no published pair fits this machine (python -m mlx_dflash.models)"
    size = size_text(memory.download_bytes(best))
    return f"; the best real pair for this machine: {best.example} ({size}; python -m mlx_dflash.models)"
