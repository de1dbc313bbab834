"""Carry out conversions: open, plan, write beside, record, rename. One function for each thing that is converted."""

import shutil
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import mlx.core as mx

from mlx_dflash import __version__, registry
from mlx_dflash.checkpoint import has_tokenizer
from mlx_dflash.download import size_text
from mlx_dflash.errors import CheckpointError, RequestError
from mlx_dflash.pair import DRAFT, PAIR, TARGET

from .drafter import DrafterPort
from .gguf_file import Unpacked
from .plan import Options, Plan
from .source import RECORD, Source, find, open_folder
from .target import COPIED, Port
from .verify import measure, summary
from .writer import check_free_name, staged, write_json, write_weights

P = TypeVar("P", Port, DrafterPort)

CACHE_BYTES = 256_000_000  # what MLX may keep of freed buffers while converting


@dataclass
class Request:
    """One conversion. name: folder, .gguf file or hub name; folder: where the result goes.

    elsewhere: what a user can do where that has no room.
    """

    name: str
    folder: Path
    options: Options
    revision: str | None = None
    force: bool = False
    copy_code: bool = False
    elsewhere: str = "give another --mlx-path"

    def staged(self) -> AbstractContextManager[Path]:
        return staged(self.folder, self.force, self.elsewhere)


def say(line: str) -> None:
    print(line, flush=True)


def open_target(source: Source, scratch: Path) -> Port:
    if not source.is_gguf:
        return Port(*open_folder(source))
    from .gguf_target import unpack_target

    return open_unpacked(Port, unpack_target(source, scratch))


def open_drafter(source: Source, scratch: Path) -> DrafterPort:
    if not source.is_gguf:
        return DrafterPort(*open_folder(source))
    from .gguf_drafter import unpack_drafter

    return open_unpacked(DrafterPort, unpack_drafter(source, scratch))


def open_unpacked(kind: type[P], unpacked: Unpacked) -> P:
    """What was unpacked from a GGUF file, with all that is to be said of it."""
    port = kind(*open_folder(Source(str(unpacked.folder), unpacked.folder)))
    port.notes += unpacked.notes
    port.dropped |= unpacked.dropped
    return port


def convert_target(request: Request, verify: bool = False, draft_model: str | None = None) -> dict[str, Any]:
    """Write an MLX folder of a target. verify: measure it against its source, with `draft_model` if one is given."""
    limit_cache()
    check_free_name(request.folder, request.force)
    source = find(request.name, request.revision)
    with request.staged() as staging, scratch_of(staging) as scratch:
        port = open_target(source, scratch)
        draft = None
        if draft_model is not None:
            draft = open_drafter(find(draft_model, drafter=True), scratch)
            draft.check(port.shape())
        plan = port.plan(request.options)
        if not verify:
            port.tensors.clear()  # a tensor that is read stays in memory as long as anything refers to it
        record = write_model("target", plan, staging, source, request)
        copy_texts(port.checkpoint.folder, staging, request.copy_code)
        write_card(source, staging)
        if verify:
            measured = measure(port, staging, draft, None)
            finish_verify(record, measured)
        write_json(staging / RECORD, record)
    say(f"wrote {request.folder}")
    return record


def convert_drafter(request: Request, target: str | None = None) -> dict[str, Any]:
    """Write an MLX folder of a drafter; `target` is what it must fit, if one is given."""
    limit_cache()
    check_free_name(request.folder, request.force)
    source = find(request.name, request.revision, drafter=True)
    with request.staged() as staging, scratch_of(staging) as scratch:
        port = open_drafter(source, scratch)
        if target is not None:
            port.check(open_target(find(target), scratch / "target").shape())
        plan = port.plan(request.options)
        port.tensors.clear()
        record = write_model("drafter", plan, staging, source, request)
        write_json(staging / RECORD, record)
    say(f"wrote {request.folder}")
    return record


def convert_pair(target: Request, drafter: Request, verify: bool = False) -> dict[str, Any]:
    """Write a folder with both, that `--model` takes alone; both requests name that folder."""
    limit_cache()
    folder = target.folder
    check_free_name(folder, target.force)
    sources = find(target.name, target.revision), find(drafter.name, drafter.revision, drafter=True)
    with target.staged() as staging, scratch_of(staging) as scratch:
        port = open_target(sources[0], scratch / TARGET)
        draft = open_drafter(sources[1], scratch / DRAFT)
        draft.check(port.shape())
        (staging / TARGET).mkdir()
        (staging / DRAFT).mkdir()
        record: dict[str, Any] = {"format": 1, "mlx_dflash": __version__}
        plans = port.plan(target.options), draft.plan(drafter.options)
        if not verify:
            port.tensors.clear()
            draft.tensors.clear()
        record["target"] = write_model("target", plans[0], staging / TARGET, sources[0], target)
        copy_texts(port.checkpoint.folder, staging / TARGET, target.copy_code)
        write_card(sources[0], staging / TARGET)
        record["drafter"] = write_model("drafter", plans[1], staging / DRAFT, sources[1], drafter)
        config = draft.layout.config
        record |= {
            "block_size": config.block_size,
            "target_layer_ids": list(config.target_layer_ids),
            "mask_token_id": config.mask_token_id,
        }
        halves = [Source(str(staging / half), staging / half) for half in (TARGET, DRAFT)]
        DrafterPort(*open_folder(halves[1])).check(Port(*open_folder(halves[0])).shape())  # what was written fits
        if verify:
            finish_verify(record, measure(port, staging / TARGET, draft, staging / DRAFT))
        write_json(staging / TARGET / RECORD, record["target"])
        write_json(staging / DRAFT / RECORD, record["drafter"])
        write_json(staging / PAIR, record)
    say(f"wrote {folder}; run it with: python -m mlx_dflash.generate --model {folder}")
    return record


def limit_cache() -> None:
    mx.set_cache_limit(CACHE_BYTES)


class scratch_of:
    """A folder inside the staging one for unpacked GGUF files; gone before the result gets its name."""

    def __init__(self, staging: Path):
        self.path = staging / ".unpacked"

    def __enter__(self) -> Path:
        return self.path

    def __exit__(self, *_: object) -> None:
        shutil.rmtree(self.path, ignore_errors=True)


def write_model(kind: str, plan: Plan, folder: Path, source: Source, request: Request) -> dict[str, Any]:
    """Weights and config.json; returns the record that `conversion.json` holds."""
    facts = (plan.parameters, plan.bits_per_weight)
    packed = len(plan.quantization)
    options = request.options
    count, bits = f"{facts[0] / 1e6:.1f} M parameters", f"{facts[1]:.2f} bits a weight"
    say(f"{kind} {source.name}: {count}, {size_text(plan.bytes)}, {bits}")
    tell(plan)
    hashes = write_weights(folder, plan.weights)
    write_json(folder / "config.json", plan.config, sort=True)
    return {
        "kind": kind,
        "mlx_dflash": __version__,
        "source": source.to_dict(),
        "recipe": options.recipe.to_dict() if options.recipe else None,
        "dtype": options.dtype or "as in the source",
        "dequantized": options.dequantize,
        "parameters": facts[0],
        "bits_per_weight": round(facts[1], 3),
        "quantized_modules": packed,
        "not_quantized": plan.kept,
        "dropped": plan.dropped,
        "casts": plan.casts,
        "notes": plan.notes,
        "files": hashes,
    }


def tell(plan: Plan) -> None:
    """Every line that a user should see: notes, casts, what stayed unquantized, what was left out."""
    for note in plan.notes:
        say(f"  {note}")
    for change, count in plan.casts.items():
        say(f"  {count} tensors cast from {change}")
    for why, names in grouped(plan.kept).items():
        say(f"  not quantized, {why}: {listed(names)}")
    for why, names in grouped(plan.dropped).items():
        say(f"  left out, {why}: {listed(names)}")


def grouped(reasons: dict[str, str]) -> dict[str, list[str]]:
    out: dict[str, list[str]] = {}
    for name, why in reasons.items():
        out.setdefault(why, []).append(name)
    return out


def listed(names: list[str], most: int = 4) -> str:
    return ", ".join(names[:most]) + (
        f" and {len(names) - most} more ({RECORD} names all)" if len(names) > most else ""
    )


def copy_texts(source: Path, folder: Path, code: bool) -> None:
    """Tokenizer, chat template and generation defaults, as they are."""
    for pattern in (*COPIED, *(["*.py"] if code else [])):
        for file in sorted(source.glob(pattern)):
            shutil.copyfile(file, folder / file.name)
    if code and not list(folder.glob("*.py")):
        say(f"  no *.py files in {source} to copy (none is fetched from the hub)")
    if not has_tokenizer(folder):
        raise CheckpointError(f"{source} has no tokenizer files; give a complete model folder")


def write_card(source: Source, folder: Path) -> None:
    """README.md with what the target was made of, as mlx-lm's converter writes it: by it the registry knows the target
    again, and finds its drafter. Nothing where the source has no name on the hub."""
    is_name = source.revision is not None and not source.is_gguf
    base = source.name if is_name else registry.base_model(source.path) if source.path.is_dir() else None
    if base is not None:
        said = f"Converted from {base} by mlx_dflash {__version__}; see {RECORD}.\n"
        (folder / "README.md").write_text(f"---\nlibrary_name: mlx\nbase_model: {base}\n---\n\n{said}", "utf-8")


def finish_verify(record: dict[str, Any], measured: dict[str, Any]) -> None:
    record["quality"] = measured
    for line in summary(measured):
        say(f"  {line}")


def refuse_same(source: str, folder: Path) -> None:
    if Path(source).expanduser().exists() and Path(source).expanduser().resolve() == folder.expanduser().resolve():
        raise RequestError(f"{folder} is source and result at once; give another --mlx-path")
