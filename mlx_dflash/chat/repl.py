"""The loop of the chat: read a line, run a command or stream a reply, say what it took."""

import argparse
import os
from collections.abc import Callable, Sequence
from typing import Any

from .. import __version__
from ..api import check_kv_quantization, load
from ..choice import choose_drafter
from ..cli import Interrupt, log_to_stderr, prompt_bar, rows, verbosity, wanted_rows
from ..command import Parser
from ..errors import CheckpointError, DFlashError
from ..hub import cache_folder
from ..sampling_flags import add_sampling_flags, wanted_sampling
from ..session import ContextFull, Session
from .commands import Commands
from .lines import line_reader
from .view import Reasoning, View, status


def build_parser() -> Parser:
    parser = Parser(
        prog="python -m mlx_dflash.chat", description="Chat with a model, with DFlash speculative decoding."
    )
    add = parser.add_argument
    add("--version", action="version", version=f"mlx_dflash {__version__}")
    add("--model", default=None, help="model folder, .gguf file or Hugging Face name (default: the demo pair)")
    add(
        "--draft-model",
        default=None,
        help="drafter folder, .gguf file or name; lookup (default: the model's known one)",
    )
    add("--draft-window", type=int, default=None, metavar="N", help="last tokens that a drafter without a window sees")
    add("--draft-sink", type=int, default=0, metavar="M", help="first tokens that it sees besides")
    add("--no-lookup", action="store_true", help="never draft from the text itself beside the drafter")
    add("--revision", default=None, help="branch, tag or commit of --model on the hub (default: what is cached)")
    add("--draft-revision", default=None, help="the same of --draft-model")
    add("--block-size", type=rows, default=None, metavar="N|auto", help="rows verified a round, anchor included")
    add("--num-draft-tokens", type=int, default=None, metavar="N", help="the same as --block-size N+1")
    add("--plain", action="store_true", help="decode without a drafter")
    add("--system-prompt", default=None, help="system message")
    add("--max-tokens", "-m", type=int, default=-1, help="most tokens a reply (default: until the context is full)")
    add("--max-context", type=int, default=None, metavar="N", help="tokens of context (default: what the model knows)")
    add("--kv-bits", type=int, default=None, metavar="4|8", help="quantize keys and values of full attention")
    add("--kv-group-size", type=int, default=None, metavar="64|32", help="values a scale (default: what fits)")
    add(
        "--prompt-cache-file",
        default=None,
        metavar="FILE",
        help="go on from this file if it is there; /exit saves to it",
    )
    add("--verbose", type=verbosity, default="warning", metavar="True|False|info|debug", help="log messages")
    add_sampling_flags(add)
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    args = build_parser().parse_args(argv)
    args.json = False  # a flag of generate's, which the sampling flags look at
    log_to_stderr(args.verbose)
    try:
        Chat(args).run()
    except DFlashError as e:
        Parser.fail(str(e))
    except BrokenPipeError:  # the reader of our stdout has gone
        raise SystemExit(0) from None


class Chat:
    """A session at a terminal, or between pipes."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.view = View()
        options = {
            **wanted_sampling(args),
            "block_size": wanted_rows(args),
            "max_tokens": args.max_tokens,
            "kv_bits": args.kv_bits,
            "kv_group_size": args.kv_group_size,
            "draft_window": args.draft_window,
            "draft_sink": args.draft_sink,
            "lookup": False if args.no_lookup else None,
        }
        for name in ("logprobs", "top_logprobs"):
            options.pop(name, None)
        check_kv_quantization(args.kv_bits, args.kv_group_size)
        model, tokenizer, drafter, pair = self.load(args.model or "demo")
        self.view.note(pair)
        session = Session(model, tokenizer, drafter, args.system_prompt, args.max_context, **options)
        self.commands = Commands(session, self.view, self.reply, self.load)
        if args.prompt_cache_file and os.path.exists(args.prompt_cache_file):
            self.commands.do_load(args.prompt_cache_file)

    def load(self, name: str) -> tuple[Any, Any, Any, str]:
        """Target, tokenizer, drafter, and a line about the pair."""
        if name != (self.args.model or "demo"):  # another model: its own drafter, unless plain
            self.args.draft_model = self.args.draft_revision = self.args.revision = None
            self.args.model = name
        model, tokenizer = load(name, self.args.revision)
        drafter, pair = choose_drafter(self.args, model)
        return model, tokenizer, drafter, pair

    def run(self) -> None:
        read, how = line_reader(Commands.names(), cache_folder() / "chat_history")
        self.view.note("/help lists the commands" + (f"; {how}" if how else ""))
        while True:
            try:
                line = read().strip()
            except KeyboardInterrupt:  # clears the line
                self.view.note("")
                continue
            except EOFError:
                break
            if line and not self.handle(line):
                break
        if self.args.prompt_cache_file:
            self.commands.do_save(self.args.prompt_cache_file)

    def handle(self, line: str) -> bool:
        """A message or a command; what goes wrong is said in a line. False: leave."""
        try:
            if line.startswith("/"):
                return self.commands.run(line)
            self.reply(self.commands.session.send, line)
        except ContextFull as full:
            self.view.note(
                f"the context is full: {full.needed:,} tokens of {full.limit:,}. /drop N forgets the oldest of "
                f"{full.messages} messages, /clear all of them"
            )
        except (DFlashError, CheckpointError) as error:
            self.view.note(f"error: {error}")
        except KeyboardInterrupt:
            self.view.note("stopped before the reply began; the message is not kept")
        return True

    def reply(self, start: Callable[..., Any], *text: str) -> None:
        """Stream a reply; Ctrl-C ends it after the round that is committed, and what was said stays."""
        session, view = self.commands.session, self.view
        with Interrupt() as interrupt:

            def progress(done: int, total: int) -> None:
                interrupt.check()
                prompt_bar(done, total)

            stream = start(*text, interrupted=interrupt.asked, prompt_progress_callback=progress)
            reasoning = Reasoning(*reasoning_marks(session))
            response = None
            for response in stream:
                for piece, thought in reasoning.feed(response.text, response.finish_reason is not None):
                    view.piece(piece, thought)
            view.out.write("\n")
            view.out.flush()
            if response is not None and response.stats is not None:
                self.commands.last = response.stats
                used = session.context_tokens
                view.note(status(response.stats, response.finish_reason, used, session.context_limit))
                if response.stats.width_reason and response.stats.rounds:
                    view.note(response.stats.width_reason)


def reasoning_marks(session: Session) -> tuple[str | None, str | None, bool]:
    """The marks around reasoning, and whether the template opens it; None where the tokenizer knows none."""
    tokenizer = session.tokenizer
    start, end = getattr(tokenizer, "think_start", None), getattr(tokenizer, "think_end", None)
    if not start or not end:
        return None, None, False
    ids = session.prompt_ids()
    tail = tokenizer.decode(ids[-8:])
    return start, end, tail.rstrip().endswith(start)
