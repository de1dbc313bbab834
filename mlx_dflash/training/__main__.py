"""`python -m mlx_dflash.training {generate,train,evaluate,export}`: make a DFlash drafter for a dense target.

All commands share a work folder; each may be killed and run again. On Linux, preload OpenBLAS: MLX's wheel brings the
reference BLAS, with which this takes some twenty times longer.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..drafters.dflash import DFlashDrafter, DFlashModel
from ..errors import DFlashError
from ..loading import load, load_drafter
from .chart import draw_log
from .config import TrainingConfig, load_config
from .data import MOST_BYTES, generate_answers, load_answers, load_features, prompts_of, tap_scales, thinking_of
from .evaluate import evaluate
from .export import export_drafter, model_card
from .prompts import held_out_prompts, training_prompts
from .train import drafter_config, train, trained_weights
from .written import written_prompts


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m mlx_dflash.training", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, text in (
        ("generate", "let the target answer the built-in prompts"),
        ("train", "train a drafter on those answers, going on from the last checkpoint"),
        ("export", "write the trained drafter as a folder in z-lab's format"),
        ("evaluate", "decode held-out prompts with an exported drafter"),
    ):
        command = commands.add_parser(name, help=text)
        command.add_argument("--model", default="demo", help="target folder or name (default: demo)")
        command.add_argument("--work", type=Path, required=True, help="work folder of this training")
        if name == "generate":
            command.add_argument(
                "--prompts", type=int, default=10_000, help="how many of the built-in prompts, at most"
            )
            command.add_argument(
                "--written", type=int, default=0, help="prompts the target is to write itself, besides"
            )
            command.add_argument(
                "--openers-only",
                action="store_true",
                help="begin all of these with an opener of a task class, not half",
            )
            command.add_argument("--max-tokens", type=int, default=160, help="longest answer, tokens")
            command.add_argument(
                "--prompts-file", type=Path, default=None, help="JSON Lines of your own (prompt or messages) instead"
            )
            command.add_argument("--thinking", choices=("on", "off"), default=None, help="in the chat template")
            command.add_argument("--part", default="1/1", help="k/n: the k-th of n processes sharing the work")
        if name in ("generate", "train"):
            command.add_argument("--config", type=Path, default=None, help="training.json to use")
            command.add_argument(
                "--cache-gb", type=float, default=MOST_BYTES / 2**30, help="most disk for hidden states (default 20)"
            )
        if name == "train":
            command.add_argument("--steps", type=int, default=None, help="optimizer steps")
            command.add_argument(
                "--start",
                type=Path,
                default=None,
                help="a drafter's folder, or another training's checkpoint, to begin with",
            )
        if name in ("export", "evaluate"):
            command.add_argument("--drafter", type=Path, required=True, help="folder of the exported drafter")
        if name == "export":
            command.add_argument("--bits", type=int, default=8, help="affine quantization; 0 writes fp32")
        if name == "evaluate":
            command.add_argument("--per-class", type=int, default=10, help="held-out prompts of each task class")
            command.add_argument("--block-sizes", type=int, nargs="+", default=[5, 8])
            command.add_argument("--max-tokens", type=int, default=128)
    args = parser.parse_args(argv)
    try:
        COMMANDS[args.command](args)
    except DFlashError as e:
        print(f"mlx_dflash.training: error: {e}", file=sys.stderr)
        raise SystemExit(2) from e


def run_generate(args: argparse.Namespace) -> None:
    target, tokenizer = load(args.model)
    args.work.mkdir(parents=True, exist_ok=True)
    part, parts = (int(n) for n in args.part.split("/"))
    suffix = f"-{part}" if parts > 1 else ""
    if args.prompts_file is not None:
        prompts = prompts_of(args.prompts_file)[part - 1 :: parts]
    else:
        prompts = [*training_prompts(args.prompts, seed=0)[part - 1 :: parts]]
    if args.written:
        path = args.work / f"prompts{suffix}.jsonl"
        only = args.openers_only
        count = args.written // parts
        prompts += written_prompts(target, tokenizer, count, path, seed=part, openers_only=only, report=log)
    taps = (*stored_config(args).taps, target.num_layers - 1)
    generate_answers(
        target,
        tokenizer,
        prompts,
        args.work,
        taps,
        part=suffix,
        max_tokens=args.max_tokens,
        thinking={None: None, "on": True, "off": False}[args.thinking],
        most_bytes=int(args.cache_gb * 2**30),
        report=log,
    )


def stored_config(args: argparse.Namespace) -> TrainingConfig:
    """--config, else what the work folder was used with before, else the defaults."""
    stored = args.work / "training.json"
    return load_config(args.config or stored) if args.config or stored.exists() else TrainingConfig()


def run_train(args: argparse.Namespace) -> None:
    target, tokenizer = load(args.model)
    config = stored_config(args)
    if args.steps is not None:
        config = replace(config, steps=args.steps)

    def validate(drafter: DFlashDrafter) -> float:
        prompts = held_out_prompts(config.validation_prompts)
        tokens, quiet = config.validation_tokens, lambda line: None
        found = evaluate(target, tokenizer, drafter, prompts, config.block_size, tokens, report=quiet)
        return float(found["all"]["mean_accepted_length"])

    def report(line: str) -> None:
        log(("\r\x1b[K" if sys.stderr.isatty() else "") + line)
        draw_log(args.work / "log.jsonl", args.work / "log.png")

    most = int(args.cache_gb * 2**30)
    train(
        target,
        config,
        args.work,
        report=report,
        start=args.start,
        validate=validate if tokenizer.has_chat_template else None,
        most_bytes=most,
        progress=live,
    )
    if not draw_log(args.work / "log.jsonl", args.work / "log.png"):
        log("no picture of the log: pip install 'mlx-dflash[charts]'")


def run_export(args: argparse.Namespace) -> None:
    target, _ = load(args.model)
    config = load_config(args.work / "training.json")
    shape = drafter_config(config, target)
    model = DFlashModel(shape)
    model.load_weights(trained_weights(args.work))
    features = load_features(target, args.work, (*config.taps, target.num_layers - 1))
    scales = tap_scales(features, len(config.taps) + 1)[:-1]
    export_drafter(model, shape, scales, args.drafter, bits=args.bits or None)
    log(f"wrote {args.drafter}")


def run_evaluate(args: argparse.Namespace) -> None:
    """Prints and stores the results, and writes the drafter's model card from them."""
    target, tokenizer = load(args.model)
    drafter = load_drafter(args.drafter, target)
    assert isinstance(drafter, DFlashDrafter)
    prompts = held_out_prompts(args.per_class)
    results = {
        str(size): evaluate(target, tokenizer, drafter, prompts, size, args.max_tokens, report=log)
        for size in args.block_sizes
    }
    (args.work / "evaluation.json").write_text(json.dumps(results, indent=1) + "\n")
    config = load_config(args.work / "training.json")
    samples = load_answers(args.work)
    card = model_card(args.model, config, training_facts(config, samples, args), results)
    (args.drafter / "README.md").write_text(card)


def training_facts(config: TrainingConfig, samples: list[Any], args: argparse.Namespace) -> dict[str, Any]:
    return {
        "answers": f"{len(samples)}, greedy, by the target itself ({sum(len(s.answer) for s in samples)} tokens)",
        "prompts": "built in (`mlx_dflash/training/prompts.py`), six task classes",
        "steps": f"{config.steps} of {config.sequences} x {config.anchors} blocks of {sorted(set(config.widths))} rows",
        "optimizer": f"AdamW, peak {config.learning_rate}, {config.warmup} warm-up steps, cosine",
        "loss": f"against the target's {config.targets}, draft k weighted exp(-(k-1)/{config.gamma:g})",
        "noise on the features": config.feature_noise,
        "start": f"the target's last {config.layers} layers",
        "thinking": thinking_of(args.work),
        "seed": config.seed,
        "held-out prompts": f"{args.per_class} a class, {args.max_tokens} tokens each",
    }


def live(line: str) -> None:
    """One line that is written over, on a terminal only."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{line}", end="", file=sys.stderr, flush=True)


def log(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


COMMANDS = {"generate": run_generate, "train": run_train, "export": run_export, "evaluate": run_evaluate}

if __name__ == "__main__":
    main()
