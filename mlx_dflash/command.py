"""What command lines share: errors of one line and exit code 2, flags of a pair, Ctrl-C, a bar for long prompts."""

import argparse
import logging
import signal
import sys
from collections.abc import Callable
from typing import Any, ClassVar, NoReturn

from . import __version__
from .errors import RequestError

LONG_PROMPT = 4096  # tokens from which on a terminal shows how far the prompt is


class Parser(argparse.ArgumentParser):
    """argparse, with errors of one line under the command's own name."""

    command: ClassVar[str] = "mlx-dflash"

    def error(self, message: str) -> NoReturn:
        self.fail(message)

    @classmethod
    def fail(cls, message: str) -> NoReturn:
        print(f"{cls.command}: error: {' '.join(message.split())}", file=sys.stderr)
        raise SystemExit(2)


def add_pair_flags(add: Callable[..., Any]) -> None:
    """Flags of the target, the drafter, their rows and caches, and of log messages."""
    add("--version", action="version", version=f"mlx_dflash {__version__}")
    add("--model", default=None, help="model folder, .gguf file or Hugging Face name (default: the demo pair)")
    add(
        "--draft-model",
        default=None,
        help="drafter folder, .gguf file or name; lookup: from the text itself (default: the model's known one)",
    )
    add("--draft-window", type=int, default=None, metavar="N", help="last tokens that a drafter without a window sees")
    add(
        "--draft-sink", type=int, default=0, metavar="M", help="first tokens that it sees besides (with --draft-window)"
    )
    add("--no-lookup", action="store_true", help="never draft from the text itself beside the drafter")
    add("--revision", default=None, help="branch, tag or commit of --model on the hub (default: what is cached)")
    add("--draft-revision", default=None, help="the same of --draft-model")
    add("--block-size", type=rows, default=None, metavar="N|auto", help="rows verified a round, anchor included")
    add("--num-draft-tokens", type=int, default=None, metavar="N", help="the same as --block-size N+1")
    add("--plain", action="store_true", help="decode without a drafter")
    add("--kv-bits", type=int, default=None, metavar="4|8", help="quantize keys and values of full attention")
    add("--kv-group-size", type=int, default=None, metavar="64|32", help="values a scale (default: what fits)")
    add(
        "--verbose",
        type=verbosity,
        default="warning",
        metavar="True|False|info|debug",
        help="False prints the text only; info and debug also what is loaded from where",
    )


def rows(value: str) -> int | str:
    return value if value == "auto" else int(value)


def wanted_rows(args: argparse.Namespace) -> int | str:
    """The block size that the flags ask for, after refusing contradictions."""
    if args.plain and (args.draft_model or args.num_draft_tokens or args.block_size not in (None, 1)):
        raise RequestError("--plain contradicts --draft-model, --block-size and --num-draft-tokens; drop one of them")
    if args.block_size is not None and args.num_draft_tokens is not None:
        raise RequestError("--block-size and --num-draft-tokens set the same thing; give one of them")
    if args.num_draft_tokens is not None:
        if args.num_draft_tokens < 0:
            raise RequestError(f"--num-draft-tokens must be 0 (plain) or more, not {args.num_draft_tokens}")
        return int(args.num_draft_tokens) + 1
    if isinstance(args.block_size, int) and args.block_size < 1:
        raise RequestError(f'--block-size must be "auto" or 1 (plain) or more, not {args.block_size}')
    return "auto" if args.block_size is None else args.block_size


def verbosity(value: str) -> str:
    """The log level of a --verbose value, '' where only text is to be printed. True and False are mlx-lm's."""
    if value.lower() in ("false", "f", "0", "no"):
        return ""
    return value.lower() if value.lower() in ("info", "debug") else "warning"


def log_to_stderr(level: str) -> None:
    """This package's log messages to stderr, from `level` on; '' leaves errors only."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(name)s: %(message)s"))
    logger = logging.getLogger("mlx_dflash")
    logger.handlers[:] = [handler]
    logger.setLevel((level or "error").upper())


class Interrupt:
    """Ctrl-C once: stop after the tokens that are committed. Twice: at once."""

    def __init__(self) -> None:
        self.pressed = False

    def __enter__(self) -> "Interrupt":
        self.old = signal.signal(signal.SIGINT, self.press)
        return self

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGINT, self.old)

    def press(self, *_: object) -> None:
        if self.pressed:
            raise KeyboardInterrupt
        self.pressed = True

    def asked(self) -> bool:
        return self.pressed

    def check(self, *_: object) -> None:
        """Between chunks of a long prompt there is no text yet to end well."""
        if self.pressed:
            raise KeyboardInterrupt


def prompt_bar(done: int, total: int) -> None:
    """How far a long prompt is, on a terminal; the line goes when the first token comes."""
    if total < LONG_PROMPT or not sys.stderr.isatty():
        return
    text = f"prompt {bar(done, total)} {done:,} of {total:,} tokens"
    print("\r\x1b[K" + (text if done < total else ""), end="", file=sys.stderr, flush=True)


def bar(done: int, total: int) -> str:
    filled = "#" * (30 * done // max(total, 1))
    return f"[{filled:.<30}]"
