"""`inspect`: what a folder or file is, how large, how it is quantized, what memory it takes, which drafters fit.

Reads headers and configs; no weight is evaluated but a packed one's shape. Hashes that a conversion recorded are held
against the files.
"""

import json
import math
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import mlx.core as mx
from huggingface_hub import constants

from mlx_dflash import memory
from mlx_dflash.checkpoint import Checkpoint, open_checkpoint, read_json
from mlx_dflash.download import size_text
from mlx_dflash.drafters import check_pair
from mlx_dflash.drafters.formats import read_layout
from mlx_dflash.errors import DFlashError
from mlx_dflash.pair import DRAFT, TARGET, is_pair, part
from mlx_dflash.targets import Target, family_of
from mlx_dflash.targets.config import normalise

from .drafter import DrafterPort
from .gguf_file import GgufFile
from .gguf_target import FAMILIES
from .plan import Options, Plan, describe
from .source import RECORD, Source, find, open_folder
from .target import Port, build

KV_TOKENS = 8192  # the context that memory is told for


def report(name: str, drafters: list[str], as_json: bool = False) -> None:
    """Print what is known of it, for people or as one JSON object."""
    found = look(name, drafters)
    if as_json:
        print(json.dumps(found, ensure_ascii=False))
        return
    for key, value in found.items():
        if isinstance(value, dict):
            print(f"{key}:")
            for inner, text in value.items():
                print(f"  {inner}: {text}")
        else:
            print(f"{key}: {value}")


def look(name: str, drafters: list[str]) -> dict[str, Any]:
    path = Path(name).expanduser()
    if path.is_dir() and is_pair(path):
        halves = {half: look(str(part(path, half)), []) for half in (TARGET, DRAFT)}
        fits = fitting(open_target_shape(part(path, TARGET)), [str(part(path, DRAFT)), *drafters])
        whole = {"kind": "pair of target and drafter", "memory": add_sizes(halves)}
        return whole | {half: one_line_of(facts) for half, facts in halves.items()} | {"drafters that fit": fits}
    source = find(name)
    if source.is_gguf:
        return look_gguf(source, drafters)
    checkpoint, tensors = open_folder(source)
    if checkpoint.is_drafter:
        return facts_of_drafter(source, DrafterPort(checkpoint, tensors))
    target = Port(checkpoint, tensors)
    facts = facts_of_plan(target.plan(Options()))
    config = target.config
    facts = {"kind": f"target, {config['model_type']}, {config['num_hidden_layers']} layers"} | facts
    return facts | provenance(source) | facts_of_shape(target.shape(), drafters)


def open_target_shape(folder: Path) -> Target:
    return Port(*open_folder(Source(str(folder), folder))).shape()


def facts_of_plan(plan: Plan) -> dict[str, Any]:
    kinds = Counter(describe(settings) for settings in plan.quantization.values())
    dtypes = Counter(str(v.dtype).rpartition(".")[2] for n, v in plan.weights.items() if not packed(n, plan))
    return {
        "parameters": plan.parameters,
        "bits per weight": round(plan.bits_per_weight, 2),
        "memory": size_text(plan.bytes),
        "bytes": plan.bytes,
        "quantized": {kind: f"{count} modules" for kind, count in kinds.items()} or "no",
        "not packed": ", ".join(f"{count} {kind}" for kind, count in dtypes.items()),
        **({"notes": "; ".join(plan.notes)} if plan.notes else {}),
    }


def packed(name: str, plan: Plan) -> bool:
    return name.rpartition(".")[0] in plan.quantization


def facts_of_drafter(source: Source, port: DrafterPort) -> dict[str, Any]:
    config = port.layout.config
    facts: dict[str, Any] = {"kind": f"DFlash drafter ({port.layout.name}), {config.num_hidden_layers} layers"}
    facts |= facts_of_plan(port.plan(Options()))
    facts |= {
        "block size": config.block_size,
        "taps": list(config.target_layer_ids),
        "mask token": config.mask_token_id,
        "made for": f"hidden size {config.hidden_size}, {config.num_target_layers or 'unsaid'} layers"
        + (f", {config.verifier}" if config.verifier else ""),
    }
    return facts | provenance(source)


def provenance(source: Source) -> dict[str, Any]:
    if not source.path.is_dir() or not (source.path / RECORD).exists():
        return {}
    record = read_json(source.path / RECORD)
    origin = record.get("source") or {}
    facts: dict[str, Any] = {
        "converted from": f"{origin.get('name')} {origin.get('revision') or ''}".strip(),
        "hashes": "as recorded",
    }
    if (quality := record.get("quality")) is not None:
        facts["quality"] = quality
    return facts


def look_gguf(source: Source, drafters: list[str]) -> dict[str, Any]:
    file = GgufFile(source.path)
    tensors = file.tensors.values()
    kinds = Counter(tensor.tensor_type.name for tensor in tensors)
    count = sum(math.prod(int(n) for n in tensor.shape) for tensor in tensors)
    total = sum(int(tensor.n_bytes) for tensor in tensors)
    kind = "DFlash drafter" if "dflash" in file.architecture else "target"
    facts = {
        "kind": f"GGUF, {kind}, architecture {file.architecture}",
        "name": file.get("general.name"),
        "parameters": count,
        "bits per weight": round(8 * total / max(count, 1), 2),
        "memory": size_text(total),
        "bytes": total,
        "blocks": dict(kinds),
    }
    if file.architecture not in FAMILIES:
        return facts
    return facts | facts_of_shape(gguf_shape(file), drafters)


def gguf_shape(file: GgufFile) -> Target:
    """The target that a file's fields describe, without a weight."""
    config = FAMILIES[file.architecture](file).config("output.weight" not in file.tensors)
    family = family_of(Checkpoint(file.path, config, {}, []))
    config = family.prepare(normalise(config, str(file.path)))
    return family(build(family, config, file.path), config)


def facts_of_shape(target: Target, drafters: list[str]) -> dict[str, Any]:
    fits = fitting(target, [*drafters, *cached_drafters()])
    return {
        "context memory": f"{size_text(context_bytes(target))} for {KV_TOKENS} tokens, 16-bit",
        "drafters that fit": fits,
    }


def context_bytes(target: Target) -> int:
    """What the caches keep at KV_TOKENS, with the 16-bit activations of a GPU. `target` has no weights, and gets none:
    the pass is lazy."""
    target.model.set_dtype(mx.bfloat16)
    return sum(layer.held(KV_TOKENS) for layer in memory.layer_memory(memory.one_token(target)))


def fitting(target: Target, names: list[str]) -> dict[str, str] | str:
    """Each drafter by name -> "fits", with its block size, or why it does not."""
    out = {}
    for name in names:
        try:
            source = find(name, drafter=True)
            with tempfile.TemporaryDirectory(prefix="mlx_dflash-") as scratch:
                folder = source.path
                if source.is_gguf:
                    from .gguf_drafter import unpack_drafter

                    folder = unpack_drafter(source, Path(scratch)).folder
                checkpoint = open_checkpoint(folder, fp8=True)
                layout = read_layout(checkpoint.config, str(folder), checkpoint.shapes)
                check_pair(layout.config, target, name)
            out[name] = f"fits ({layout.name}, block {layout.config.block_size})"
        except DFlashError as e:
            out[name] = f"no: {e}"
    return out or "none here; name some with --draft-model"


def cached_drafters() -> list[str]:
    """Drafter folders in the Hugging Face cache."""
    out = []
    for config in sorted(Path(constants.HF_HUB_CACHE).glob("models--*/snapshots/*/config.json")):
        try:
            if open_checkpoint(config.parent, fp8=True).is_drafter:
                out.append(str(config.parent))
        except DFlashError:
            continue
    return out


def add_sizes(halves: dict[str, dict[str, Any]]) -> str:
    return size_text(sum(facts["bytes"] for facts in halves.values()))


def one_line_of(facts: dict[str, Any]) -> str:
    count = f"{facts['parameters'] / 1e6:.1f} M parameters"
    return f"{facts['kind']}; {count}, {facts['bits per weight']} bits, {facts['memory']}"
