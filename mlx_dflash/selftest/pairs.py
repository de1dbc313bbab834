"""Shipped tiny pairs, run on this machine's backend and compared with what the torch references recorded."""

import io
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from ..api import generate
from ..drafters import DFlashDrafter, load_drafter_folder
from ..targets import Target, load_target

TOLERANCE = 1e-3  # of taps and logits in fp32, over the golden values' root mean square
WIDTHS = (2, 4, 5, 8, 16)

Golden = dict[str, np.ndarray[Any, Any]]


@dataclass
class Parting:
    """How far logits of a row part between a pass of `rows` rows and passes of one, and how close the choice was.

    difference: largest over all logits. margin: the smallest lead of a best logit over the next, in those rows.
    tokens_equal: whether every row's best token is the same.
    """

    rows: int
    difference: float
    margin: float
    tokens_equal: bool


@dataclass
class PairResult:
    family: str
    caches: list[str]
    problems: list[str] = field(default_factory=list)
    tap_error: float = 0.0
    logit_error: float = 0.0
    rounds: int = 0
    accepted: int = 0
    partings: list[Parting] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def families() -> list[str]:
    folder = resources.files("mlx_dflash") / "data" / "selftest"
    return sorted(f.name.removesuffix(".zip") for f in folder.iterdir() if f.name.endswith(".zip"))


@contextmanager
def unpacked(family: str) -> Iterator[tuple[Path, Golden]]:
    """The pair as folders, weights in fp32, and its golden arrays."""
    data = (resources.files("mlx_dflash") / "data" / "selftest" / f"{family}.zip").read_bytes()
    with tempfile.TemporaryDirectory(prefix="mlx_dflash-") as scratch, zipfile.ZipFile(io.BytesIO(data)) as archive:
        archive.extractall(scratch)
        for path in Path(scratch).rglob("*.safetensors"):
            arrays: dict[str, mx.array] = mx.load(str(path))  # type: ignore[assignment]
            wide = {k: v.astype(mx.float32) if v.dtype == mx.bfloat16 else v for k, v in arrays.items()}
            mx.eval(wide)
            path.unlink()
            mx.save_safetensors(str(path), wide, {"format": "mlx"})
        with np.load(Path(scratch) / "golden.npz") as golden:
            arrays_of = dict(golden)
        yield Path(scratch), arrays_of


def check_family(family: str) -> PairResult:
    """Taps, logits, tokens and accepted lengths of one pair; everything that is off becomes a problem in words."""
    with unpacked(family) as (folder, golden):
        target, tokenizer = load_target(folder / "target")
        drafter = load_drafter_folder(folder / "draft", target)
    kinds = sorted({type(layer).__name__ for layer in target.make_cache().layers})
    result = PairResult(family, kinds)
    check_pass(result, target, drafter, golden)
    prompt, block = golden["ids"].tolist(), int(golden["block_size"])
    for chunk in (2048, 7):
        run = generate(
            target,
            tokenizer,
            prompt,
            draft_model=drafter,
            block_size=block,
            max_tokens=int(golden["new_tokens"]),
            prefill_step_size=chunk,
        )
        tokens, accepted = golden["tokens"].tolist(), golden["accept"][golden["vsize"] > 1].tolist()
        if run.tokens != tokens:
            at = next((i for i, (a, b) in enumerate(zip(run.tokens, tokens, strict=False)) if a != b), len(run.tokens))
            result.problems.append(f"tokens part from the reference at {at}, prompt in chunks of {chunk}")
        if run.stats.acceptance_lengths != accepted:
            result.problems.append(
                f"accepted lengths {run.stats.acceptance_lengths} are not the reference's {accepted}, prompt in "
                f"chunks of {chunk}"
            )
        result.rounds += run.stats.rounds
        result.accepted += run.stats.accepted
    if not result.rounds or not result.accepted:
        result.problems.append("no draft was accepted, so nothing was shown")
    text = prompt + golden["tokens"].tolist()
    result.partings = [parting(target, text, len(prompt), rows) for rows in WIDTHS]
    return result


def check_pass(result: PairResult, target: Target, drafter: DFlashDrafter, golden: Golden) -> None:
    ids = mx.array(golden["ids"][None])
    logits, features = target.forward(ids, target.make_cache(), drafter.taps)
    assert features is not None
    if features[0].shape != golden["taps"].shape:
        result.problems.append(f"taps have the shape {features[0].shape}, not {golden['taps'].shape}")
        return
    result.tap_error = error(features[0], golden["taps"])
    result.logit_error = error(logits[0, -1], golden["logits"])
    for name, found in (("taps", result.tap_error), ("logits", result.logit_error)):
        if not found <= TOLERANCE:
            result.problems.append(f"{name} are off by {found:.1e}, more than {TOLERANCE:.0e}")


def error(array: mx.array, golden: np.ndarray[Any, Any]) -> float:
    """The largest difference, over the root mean square of the golden values or 1."""
    scale = max(1.0, float(np.sqrt(np.mean(golden**2))))
    return float(np.abs(np.array(array.astype(mx.float32)) - golden).max()) / scale


def parting(target: Target, text: list[int], at: int, rows: int) -> Parting:
    """Rows at `at` on of one text, forwarded `rows` at a time and one at a time, after the same prompt."""
    block = mx.array(text[at : at + rows])[None]
    wide, narrow = target.make_cache(), target.make_cache()
    for cache in (wide, narrow):
        target.forward(mx.array(text[:at])[None], cache, last_logits_only=True)
    together = target.forward(block, wide)[0][0]
    apart = mx.concatenate([target.forward(block[:, i : i + 1], narrow)[0][0] for i in range(rows)])
    best_two = mx.sort(apart, axis=-1)[:, -2:]
    return Parting(
        rows,
        mx.abs(together - apart).max().item(),  # type: ignore[arg-type]
        (best_two[:, 1] - best_two[:, 0]).min().item(),  # type: ignore[arg-type]
        together.argmax(axis=-1).tolist() == apart.argmax(axis=-1).tolist(),
    )
