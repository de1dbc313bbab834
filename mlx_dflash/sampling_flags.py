"""The command line's sampling flags, and the options of `stream_generate` that they ask for."""

import argparse
import json
from collections.abc import Callable
from typing import Any

from .errors import RequestError
from .processors import WINDOW
from .settings import DEFAULTS, PROPOSALS, resolve


def add_sampling_flags(add: Callable[..., Any]) -> None:
    """mlx-lm's sampling flags and ours; None means not given, so that the source of a value can be told."""
    add("--temp", type=float, default=None, help="sampling temperature; 0 (default) is greedy")
    add("--top-p", type=float, default=None)
    add("--top-k", type=int, default=None)
    add("--min-p", type=float, default=None)
    add("--min-tokens-to-keep", type=int, default=None)
    for name in ("repetition", "presence", "frequency"):
        add(f"--{name}-penalty", type=float, default=None, metavar="X", help="mlx-lm's, over a window of tokens")
        add(f"--{name}-context-size", type=int, default=None, metavar="N", help=f"its window (default {WINDOW})")
    add("--logit-bias", default=None, metavar="JSON", help='added to logits, by token id: {"42": -5}')
    add("--seed", type=int, default=None, help="seed of the sampling noise (default: a fresh one, reported)")
    add("--recommended", action="store_true", help="sampling as the model card recommends, where flags say nothing")
    add("--generation-config", action="store_true", help="the same from the model's generation_config.json")
    add("--proposals", choices=PROPOSALS, default=None, help="how the drafter chooses; never changes the text")
    add(
        "--draft-temp", type=float, default=None, metavar="X", help="temperature of coupled proposals (default: --temp)"
    )
    add("--logprobs", action="store_true", help="with --json: each token's log-probability")
    add("--top-logprobs", type=int, default=0, metavar="N", help="with --logprobs: those of the N likeliest tokens")


def wanted_sampling(args: argparse.Namespace) -> dict[str, Any]:
    """The options of stream_generate that the sampling flags ask for; bad ones are refused before a model is loaded."""
    given = {key: getattr(args, key) for key in DEFAULTS}
    if args.logit_bias is not None:
        given["logit_bias"] = bias_of(args.logit_bias)
    if args.recommended and args.generation_config:
        raise RequestError("--recommended contradicts --generation-config; drop one of them")
    if args.logprobs and not args.json:
        raise RequestError("--logprobs needs --json, which prints them; give both, or drop --logprobs")
    resolve({**given, "seed": given["seed"] or 0}).sampler(None, args.logprobs, args.top_logprobs)
    if args.proposals == "coupled" and args.plain:
        raise RequestError("--proposals coupled needs a drafter; drop it or --plain")
    source = "recommended" if args.recommended else "generation_config" if args.generation_config else None
    return {**given, "sampling_defaults": source}


def bias_of(value: str) -> dict[int, float]:
    try:
        return {int(token): bias for token, bias in json.loads(value).items()}
    except (ValueError, AttributeError) as e:
        raise RequestError(f"--logit-bias must be a JSON object of token ids and numbers, not {value}") from e
