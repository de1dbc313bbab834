"""What the commands that load a pair share: its flags, the loaded pair, and what a result says of both."""

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_dflash.benchmarks.metrics import record_hash
from mlx_dflash.convert.source import RECORD

from mlx_dflash import load, memory
from mlx_dflash.api import check_kv_quantization
from mlx_dflash.choice import choose_drafter
from mlx_dflash.command import add_pair_flags, log_to_stderr, wanted_rows
from mlx_dflash.drafters import DFlashDrafter
from mlx_dflash.errors import RequestError
from mlx_dflash.facts import decide_thinking
from mlx_dflash.lookup import Lookup
from mlx_dflash.sampling_flags import add_sampling_flags, wanted_sampling
from mlx_dflash.saved import fingerprint
from mlx_dflash.settings import DEFAULTS, resolve
from mlx_dflash.targets import Target

SEED = 0  # of sampled runs, so that all arms draw the same noise


@dataclass(frozen=True)
class Pair:
    target: Target
    tokenizer: Any
    drafter: DFlashDrafter | Lookup
    name: str


def add_arguments(parser: argparse.ArgumentParser, max_tokens: int) -> None:
    """The pair's flags, sampling and the length of answers."""
    add_pair_flags(parser.add_argument)
    add_sampling_flags(parser.add_argument)
    parser.set_defaults(json=False)
    parser.add_argument("--max-tokens", "-m", type=int, default=max_tokens, help=f"a request (default {max_tokens})")
    parser.add_argument("--output", type=Path, default=None, metavar="FILE", help="result; a run that stopped goes on")


def load_pair(args: argparse.Namespace) -> Pair:
    """Raises RequestError for a target without a drafter: there would be nothing to compare."""
    log_to_stderr(args.verbose)
    if args.plain:
        raise RequestError("--plain leaves nothing to compare: the plain arm is always run; drop it")
    if args.max_tokens < 2:
        raise RequestError(f"--max-tokens must be 2 or more, not {args.max_tokens}")
    wanted_rows(args)
    target, tokenizer = load(args.model or "demo", args.revision)
    drafter, name = choose_drafter(args, target)
    if drafter is None:
        raise RequestError(f"no drafter is known for {args.model}; give one with --draft-model")
    return Pair(target, tokenizer, drafter, name)


def options_of(args: argparse.Namespace, pair: Pair) -> dict[str, Any]:
    """Options of `stream_generate` for every arm: sampling with a fixed seed, the caches' kind, and whether the chat
    template is to think."""
    options = {**wanted_sampling(args), "kv_bits": args.kv_bits, "kv_group_size": args.kv_group_size}
    check_kv_quantization(args.kv_bits, args.kv_group_size)
    if options["seed"] is None:
        options["seed"] = SEED
    options["thinking"], _ = decide_thinking(None, pair.tokenizer, getattr(pair.drafter, "name", None))
    return options


def drafting_of(args: argparse.Namespace) -> dict[str, Any]:
    """Options of `stream_generate` that say how the drafter is used, the block size left out."""
    lookup = False if args.no_lookup else None
    return {"lookup": lookup, "draft_window": args.draft_window, "draft_sink": args.draft_sink}


def describe(args: argparse.Namespace, pair: Pair, options: dict[str, Any]) -> dict[str, Any]:
    """The part of a result's setup that every command with a pair has."""
    settings = resolve(
        {name: options[name] for name in DEFAULTS},
        options["sampling_defaults"],
        pair.target.name,
        pair.target.generation_config,
        options["thinking"],
    )
    report = settings.report(settings.sampler(None, False, 0, pair.target.vocab_size))
    origins = report.pop("from")
    return {
        "model": args.model or "demo",
        "model_hash": fingerprint(pair.target.model, pair.target.config)[:16],
        "quantization": quantization(pair.target.config),
        "quality": quality(pair.target.folder),
        "draft_model": pair.drafter.name,
        "draft_model_hash": drafter_hash(pair.drafter),
        "trained_block": pair.drafter.block_size,
        "draft": drafting_of(args),
        "kv_bits": args.kv_bits,
        "sampling": report | {"thinking": options["thinking"]},
        "sampling_from": origins | ({"seed": "benchmark"} if args.seed is None else {}),
        "batch_size": 1,
        "concurrency": 1,
        "max_tokens": args.max_tokens,
    }


def mode_of(setup: dict[str, Any]) -> str:
    return "greedy" if setup["sampling"]["temp"] == 0 else "sampled"


def memory_of(pair: Pair) -> dict[str, Any]:
    """Bytes of weights; what else a request took is in its record."""
    drafter = memory.weight_bytes(pair.drafter.model) if isinstance(pair.drafter, DFlashDrafter) else 0
    target = memory.weight_bytes(pair.target.model)
    return {"target": target, "drafter": drafter, "device": str(mx.default_device())}


def drafter_hash(drafter: DFlashDrafter | Lookup) -> str | None:
    return fingerprint(drafter.model, repr(drafter.config))[:16] if isinstance(drafter, DFlashDrafter) else None


def quantization(config: dict[str, Any]) -> str:
    """Of the checkpoint, e.g. "affine 4-bit, group 64, 12 modules apart"."""
    found = config.get("quantization") or config.get("quantization_config")
    if not isinstance(found, dict) or "bits" not in found:
        return "none" if not found else record_hash(found)
    apart = sum(isinstance(value, dict) for value in found.values())
    text = f"{found.get('mode', 'affine')} {found['bits']}-bit, group {found.get('group_size')}"
    return text + (f", {apart} modules apart" if apart else "")


def quality(folder: Path | None) -> dict[str, Any] | None:
    """What `convert --verify` measured of this quantization against its source; None where it was not asked to."""
    try:
        record = json.loads(((folder or Path()) / RECORD).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return record.get("quality")
