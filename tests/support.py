"""The table of what is supported, from the pairs that the parity test runs; `python -m tests.support` writes the page.

A row stands for a folder of tests/golden. Target, drafter and caches are those of the loaded pair, the reference is
what meta.json says it was recorded with, so the page can't claim what no test holds.
"""

import json
from collections import Counter
from pathlib import Path

from mlx_dflash import load, load_drafter
from mlx_dflash.drafters import DFlashDrafter
from mlx_dflash.drafters.masks import Visibility

GOLDEN = Path(__file__).parent / "golden"
PAGE = Path(__file__).parent.parent / "docs" / "support.md"
HEAD = """# What is supported, and what proves it

Written by `python -m tests.support` from the pairs of `tests/golden/`; `tests/test_support.py` fails if it is stale.
Each row is a tiny pair whose taps, logits, drafts, accepted lengths and tokens equal those of the reference, at
contexts before, on and past both windows (`tests/test_parity.py`). `--kv-bits` has no reference: with it, tokens with
the drafter equal those without (`tests/test_support.py`), or it is refused by name.

| pair | target (`model_type`) | layer caches | `--kv-bits` | drafter | draft layers | reference |
|---|---|---|---|---|---|---|
"""


def row(family: str) -> str:
    folder = GOLDEN / family
    target, _ = load(folder / "target")
    drafter = load_drafter(folder / "draft", target)
    meta = json.loads((folder / "meta.json").read_text())
    kinds = Counter(type(layer).__name__ for layer in target.make_cache().layers)
    shared = target.num_layers - sum(kinds.values())
    caches = ", ".join(f"{n} {kind}" for kind, n in sorted(kinds.items())) + (f", {shared} shared" if shared else "")
    bits = "refused" if target.kv_bits_refusal else "4, 8"
    cells = [family, f"`{target.config['model_type']}`", caches, bits, kind_of(drafter), layers_of(drafter)]
    cells.append(reference(meta["reference"], meta["versions"]))
    return "| " + " | ".join(cells) + " |\n"


def reference(name: str, versions: dict[str, str]) -> str:
    """meta.json's name of what drove the loop, with the versions of what computed it; the target is transformers'."""
    target = f"transformers {versions['transformers']}"
    if name.startswith("transformers."):
        return f"{target}: target, drafter and loop"
    package = "speculators" if "speculators" in versions else "dflash"
    drafter = f"{package} {versions[package]}"
    own = {
        "dflash.model": f"{target}, {drafter}",
        "exact loop": f"{target}, {drafter}; loop of `tests/oracle`",
        "speculators.models.dflash.core": f"{target}, {drafter}; loop of `tests/oracle`",
        "tests.oracle.laguna": f"{target}, {drafter}'s loop; drafter written after vLLM's `laguna_dflash.py`",
    }
    return own.get(name, f"{target}, {name}")


def kind_of(drafter: DFlashDrafter) -> str:
    config = drafter.config
    if config.vocabulary is not None:
        return "speculators"
    if config.laguna:
        return "Poolside's for Laguna"
    if config.dflash2 is not None:
        return "z-lab DFlash 2"
    return "Transformers assistant" if config.whole_block else "z-lab v1"


def layers_of(drafter: DFlashDrafter) -> str:
    rules = Counter(drafter.config.sees(i) for i in range(drafter.config.num_hidden_layers))
    return ", ".join(f"{n} {describe(rule)}" for rule, n in rules.items())


def describe(rule: Visibility) -> str:
    """A mask rule in a few words; `behind` and `ahead` count positions."""
    window = "full" if rule.behind is None else f"{rule.behind} behind" + (" the anchor" if rule.from_anchor else "")
    ahead = {None: "both ways", 0: "causal"}.get(rule.ahead, f"{rule.ahead} ahead")
    return f"{window}, {ahead}"


def page() -> str:
    families = sorted(p.name for p in GOLDEN.iterdir() if (p / "golden.npz").exists())
    return HEAD + "".join(row(family) for family in families)


if __name__ == "__main__":
    PAGE.write_text(page())
    print(f"wrote {PAGE.name}")
