"""A conversation in a file: one safetensors file of named arrays, with the rest as JSON in its metadata.

Written beside its place and moved there when whole. A file is for one target, by a fingerprint of its configuration
and weights; caches in it are for one drafter and one kind of cache.
"""

import contextlib
import hashlib
import json
import os
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten

from .cache import FullKV, QuantizedKV, RecurrentState, SlidingKV
from .cache.recurrent import Moment
from .cache.sliding import SavedWindow
from .decode import State
from .drafters import DFlashDrafter, DraftContext
from .drafters.context import SavedRows
from .errors import CheckpointError
from .lookup import Lookup
from .remembered import Memory
from .targets import Target

FORMAT, VERSION = "mlx_dflash conversation", 1


def write(path: Path, model: Target, memory: Memory, facts: dict[str, Any]) -> None:
    """Write facts and caches. Raises CheckpointError where the folder can't be written."""
    head: dict[str, Any] = {"target": fingerprint(model.model, model.config), "facts": facts}
    arrays: dict[str, mx.array] = {}
    if (state := memory.state) is not None and state.cache.length:
        _, kv_bits, group = memory.cache_key
        head |= {"tokens": state.tokens, "length": state.cache.length, "kv": [kv_bits, group]}
        for index, layer in enumerate(state.cache.layers):
            arrays |= {f"cache.{index}.{name}": value for name, value in pack_layer(layer).items()}
        if state.context is not None:
            drafter, *window = memory.context_key
            head |= {"drafter": fingerprint(drafter.model, repr(drafter.config)), "window": window}
            head["context"], packed = pack_context(state.context)
            arrays |= {f"context.{name}": value for name, value in packed.items()}
    metadata = {"format": FORMAT, "version": str(VERSION), "head": json.dumps(head)}
    arrays["none"] = mx.zeros(1)  # a file holds at least one array
    unfinished = path.with_name(f".{path.name}.part.safetensors")
    try:
        mx.save_safetensors(str(unfinished), arrays, metadata)
        os.replace(unfinished, path)
    except (OSError, RuntimeError) as error:
        raise CheckpointError(f"{path} can't be written: {error}") from error
    finally:
        with contextlib.suppress(OSError):
            unfinished.unlink(missing_ok=True)


def read(
    path: Path, model: Target, draft_model: DFlashDrafter | Lookup | None, options: dict[str, Any]
) -> tuple[dict[str, Any], Memory]:
    """Facts and memory of a file; the memory is empty where its caches are for other options or another drafter."""
    if not path.is_file():
        raise CheckpointError(f"{path} is no saved conversation: there is no such file")
    try:
        with path.open("rb") as file:  # mx.load goes by the name's ending, saved files may have any
            loaded: Any = mx.load(file, format="safetensors", return_metadata=True)
            arrays, metadata = loaded
            mx.eval(arrays)
        head = json.loads(metadata["head"]) if metadata.get("format") == FORMAT else None
    except (RuntimeError, ValueError, KeyError, OSError) as error:
        raise CheckpointError(f"{path} is no saved conversation, or is cut: {str(error).splitlines()[0]}") from error
    if head is None:
        raise CheckpointError(f"{path} is no saved conversation")
    if metadata["version"] != str(VERSION):
        raise CheckpointError(f"{path} has version {metadata['version']}; this package reads version {VERSION}")
    if head["target"] != fingerprint(model.model, model.config):
        raise CheckpointError(f"{path} was saved with another model than {model.asked_for or 'this one'}")
    return head["facts"], memory_of(head, arrays, model, draft_model, options)


def memory_of(
    head: dict[str, Any],
    arrays: dict[str, mx.array],
    model: Target,
    draft_model: DFlashDrafter | Lookup | None,
    options: dict[str, Any],
) -> Memory:
    memory = Memory()
    kv = [options.get("kv_bits"), options.get("kv_group_size")]
    if "tokens" not in head or head["kv"] != kv:
        return memory
    cache = model.make_cache(*kv)
    for index, layer in enumerate(cache.layers):
        unpack_layer(layer, head["length"], part(arrays, f"cache.{index}."))
    memory.state = State(head["tokens"], cache)
    memory.cache_key = (model, *kv)
    window = [options.get("draft_window"), options.get("draft_sink", 0)]
    if isinstance(draft_model, DFlashDrafter):
        if head.get("window") != window or head["drafter"] != fingerprint(draft_model.model, repr(draft_model.config)):
            return Memory()
        context = draft_model.make_context(*window)
        unpack_context(context, head["context"], part(arrays, "context."))
        memory.state.context, memory.context_key = context, (draft_model, *window)
    return memory


def part(arrays: dict[str, mx.array], prefix: str) -> dict[str, mx.array]:
    return {name.removeprefix(prefix): value for name, value in arrays.items() if name.startswith(prefix)}


def pack_layer(layer: Any) -> dict[str, mx.array]:
    """What decides how a layer goes on, by name."""
    if isinstance(layer, FullKV) and layer.keys is not None and layer.values is not None:
        rows = slice(0, layer.offset)
        return {"keys": layer.keys[..., rows, :], "values": layer.values[..., rows, :]}
    if isinstance(layer, QuantizedKV) and layer.keys is not None and layer.values is not None:
        sides = {"keys": layer.keys, "values": layer.values}
        return {f"{s}.{i}": x[..., : layer.offset, :] for s, side in sides.items() for i, x in enumerate(side)}
    if isinstance(layer, SlidingKV):
        held = layer.checkpoint()
        return {} if held.keys is None or held.values is None else {"keys": held.keys, "values": held.values}
    if isinstance(layer, RecurrentState):
        named = {"conv": layer.now.conv, "state": layer.now.state}
        return {name: value for name, value in named.items() if value is not None}
    return {}


def unpack_layer(layer: Any, length: int, found: dict[str, mx.array]) -> None:
    if isinstance(layer, SlidingKV):
        layer.restore(SavedWindow(length, found.get("keys"), found.get("values")))
    elif isinstance(layer, RecurrentState):
        layer.restore(Moment(length, found.get("conv"), found.get("state")))
    elif isinstance(layer, QuantizedKV):
        keys, values = (tuple(found[f"{side}.{i}"] for i in range(3)) for side in ("keys", "values"))
        layer.keys, layer.values, layer.offset = keys, values, length  # type: ignore[assignment]
    else:
        layer.keys, layer.values, layer.offset = found["keys"], found["values"], length


def pack_context(context: DraftContext) -> tuple[dict[str, Any], dict[str, mx.array]]:
    """Lengths and the like, and arrays."""
    facts: dict[str, Any] = {"length": context.length, "ends": [layer.end for layer in context.layers], "bases": []}
    arrays: dict[str, mx.array] = {}
    for index, layer in enumerate(context.layers):
        base = max(layer.oldest(layer.end), layer.base)
        facts["bases"].append(base)
        if layer.keys is not None and layer.values is not None:
            rows = slice(base - layer.base, layer.end - layer.base)
            arrays |= {f"{index}.keys": layer.keys[..., rows, :], f"{index}.values": layer.values[..., rows, :]}
        if layer.first is not None:
            arrays |= {f"{index}.first_keys": layer.first[0], f"{index}.first_values": layer.first[1]}
    if context.pending:
        arrays["pending"] = mx.concatenate(context.pending, axis=1)
    return facts, arrays


def unpack_context(context: DraftContext, facts: dict[str, Any], found: dict[str, mx.array]) -> None:
    for index, layer in enumerate(context.layers):
        keys, values = found.get(f"{index}.keys"), found.get(f"{index}.values")
        layer.restore(SavedRows(facts["ends"][index], keys, values))
        layer.keys, layer.values, layer.base = keys, values, facts["bases"][index]
        if (first := found.get(f"{index}.first_keys")) is not None:
            layer.first = first, found[f"{index}.first_values"]
    context.pending = [found["pending"]] if "pending" in found else []
    context.length = facts["length"]


def fingerprint(module: Any, config: Any) -> str:
    """Of a model: its configuration, and of every parameter the name, shape, type and first 32 values."""
    digest = hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode())
    for name, value in sorted(tree_flatten(module.parameters())):
        first = np.array(value.reshape(-1)[:32].astype(mx.float32))
        digest.update(f"{name} {value.shape} {value.dtype}".encode() + first.tobytes())
    return digest.hexdigest()
