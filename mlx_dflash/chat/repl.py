"""The loop of the chat: read a line, run a command or stream a reply, say what it took."""

import argparse
import os
from collections.abc import Callable, Sequence
from typing import Any

from ..api import check_kv_quantization
from ..choice import choose_drafter
from ..command import Interrupt, Parser, add_pair_flags, log_to_stderr, prompt_bar, wanted_rows
from ..errors import ContextFull, DFlashError
from ..hub import cache_folder
from ..loading import load
from ..sampling_flags import add_sampling_flags, wanted_sampling
from ..session import Session
from .commands import Commands
from .lines import line_reader
from .view import Reasoning, View, status


def build_parser() -> Parser:
    parser = Parser(
        prog="python -m mlx_dflash.chat", description="Chat with a model, with DFlash speculative decoding."
    )
    add = parser.add_argument
    add_pair_flags(add)
    add("--system-prompt", default=None, help="system message")
    add("--max-tokens", "-m", type=int, default=-1, help="most tokens a reply (default: until the context is full)")
    add("--max-context", type=int, default=None, metavar="N", help="tokens of context (default: what the model knows)")
    add(
        "--prompt-cache-file",
        default=None,
        metavar="FILE",
        help="go on from this file if it is there; /exit saves to it",
    )
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
        self.replied = False  # has the last reply begun?
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
        self.commands = Commands(session, self.view, self.reply, self.load, args.max_context)
        if args.prompt_cache_file and os.path.exists(args.prompt_cache_file):
            self.commands.do_load(args.prompt_cache_file)

    def load(self, name: str) -> tuple[Any, Any, Any, str]:
        """Target, tokenizer, drafter, and a line about the pair."""
        args = argparse.Namespace(**vars(self.args))
        if name != (args.model or "demo"):  # another model: its own drafter, unless plain
            args.draft_model = args.draft_revision = args.revision = None
            args.model = name
        model, tokenizer = load(name, args.revision)
        drafter, pair = choose_drafter(args, model)
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
        except DFlashError as error:
            self.view.note(f"error: {error}")
        except KeyboardInterrupt:
            said = "the reply is kept as far as it came" if self.replied else "the message is not kept"
            self.view.note(f"stopped at once; {said}")
        return True

    def reply(self, start: Callable[..., Any], *text: str) -> None:
        """Stream a reply; Ctrl-C ends it after the round that is committed, and what was said stays."""
        session, view = self.commands.session, self.view
        with Interrupt() as interrupt:

            def progress(done: int, total: int) -> None:
                interrupt.check()
                prompt_bar(done, total)

            self.replied = False
            stream = start(*text, interrupted=interrupt.asked, prompt_progress_callback=progress)
            reasoning = Reasoning(*reasoning_marks(session))
            response = None
            for response in stream:
                self.replied = True
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
    """The marks around reasoning, and whether the template opened it for the reply that is about to be drawn.

    None where the tokenizer knows none.
    """
    tokenizer = session.tokenizer
    start, end = getattr(tokenizer, "think_start", None), getattr(tokenizer, "think_end", None)
    if not start or not end:
        return None, None, False
    state = session.memory.state
    assert state is not None  # the reply's prompt is in it
    tail = tokenizer.decode(state.tokens[-8:])
    return start, end, tail.rstrip().endswith(start)
