"""The chat's commands: a method of Commands each, its docstring the help."""

import json
from collections.abc import Callable
from typing import Any

from ..drafters import DFlashDrafter
from ..errors import RequestError
from ..facts import has_thinking_switch
from ..lookup import Lookup
from ..report import thinks_badly, trained_without_thinking
from ..session import Session
from ..stats import Stats
from ..width import check_block_size
from .view import View

SETTINGS = (
    "temp", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "seed",
    "max_tokens",
)  # fmt: skip
Loader = Callable[[str], tuple[Any, Any, DFlashDrafter | Lookup | None, str]]


class Commands:
    """Acts on a session. reply: draws a reply from a stream of responses and prints it.

    max_context: what the user allows, for a session with another model too; None: what that one was trained for.
    """

    def __init__(
        self, session: Session, view: View, reply: Callable[..., None], loader: Loader, max_context: int | None = None
    ) -> None:
        self.session, self.view, self.reply, self.loader = session, view, reply, loader
        self.max_context = max_context
        self.drafter = session.draft_model
        self.last: Stats | None = None

    @classmethod
    def names(cls) -> dict[str, str]:
        """Commands and their help."""
        found = {f"/{n[3:]}": (getattr(cls, n).__doc__ or "").strip() for n in dir(cls) if n.startswith("do_")}
        return {**found, "/exit": "leave (so does Ctrl-D)"}

    def run(self, line: str) -> bool:
        """Run a command line; False: leave. Raises RequestError for one that is unknown or wrong."""
        name, _, rest = line.partition(" ")
        if name in ("/exit", "/quit"):
            return False
        method = getattr(self, f"do_{name[1:]}", None)
        if method is None:
            raise RequestError(f"there is no command {name}; /help lists them")
        method(rest.strip())
        return True

    def do_help(self, _: str) -> None:
        """this list"""
        for name, text in sorted(self.names().items()):
            self.view.note(f"{name:9} {text}")

    def do_clear(self, _: str) -> None:
        """forget the conversation; the system prompt stays"""
        self.session.clear()
        self.view.note("forgotten")

    def do_undo(self, _: str) -> None:
        """forget the last message and its reply"""
        self.session.undo()
        self.view.note(f"{len(self.session.turns)} messages left")

    def do_retry(self, _: str) -> None:
        """another reply to the last message, with a new seed"""
        self.reply(self.session.retry)

    def do_drop(self, rest: str) -> None:
        """/drop N: forget the oldest N messages, where the context is full"""
        self.session.drop(whole(rest))
        self.view.note(f"{len(self.session.turns)} messages left")

    def do_system(self, rest: str) -> None:
        """/system TEXT: the system prompt from the next message on; without a text, show it; - removes it"""
        if rest:
            self.session.system = None if rest == "-" else rest
        self.view.note(f"system prompt: {self.session.system or 'none'}")

    def do_set(self, rest: str) -> None:
        """/set temp=0.7 top_p=0.9 ...: sampling and max_tokens from the next message on; without any, show them"""
        changes: dict[str, Any] = {}
        for item in rest.split():
            name, found, value = item.partition("=")
            if not found or name not in SETTINGS:
                raise RequestError(f"/set takes NAME=VALUE of {', '.join(SETTINGS)}, not {item}")
            try:
                changes[name] = None if value == "default" else json.loads(value)
            except ValueError as error:
                raise RequestError(f"{name} must be a number, or default, not {value}") from error
        self.session.set(**changes)
        values = {name: self.session.options.get(name) for name in SETTINGS}
        self.view.note(
            ", ".join(f"{n} {v}" for n, v in values.items() if v is not None) or "all as the model's default"
        )

    def do_stats(self, _: str) -> None:
        """all figures of the last reply"""
        if self.last is None:
            raise RequestError("no reply yet")
        self.view.note(json.dumps(self.last.to_dict(), indent=1))

    def do_block(self, rest: str) -> None:
        """/block N|auto: rows verified a round"""
        size = rest if rest == "auto" else whole(rest)
        check_block_size(size, self.session.draft_model)
        self.session.options["block_size"] = size
        self.view.note(f"block size {size}")

    def do_plain(self, rest: str) -> None:
        """/plain on|off: decode without the drafter"""
        on = choice(rest or "on", "on", "off") == "on"
        if not on and self.drafter is None:
            raise RequestError("there is no drafter")
        if on:
            self.session.options["block_size"] = "auto"
        self.session.draft_model = None if on else self.drafter
        self.view.note("without the drafter" if on else "with the drafter; the next message forwards the text again")

    def do_think(self, rest: str) -> None:
        """/think on|off: thinking in the model's template; show|hide: reasoning in replies"""
        what = choice(rest, "on", "off", "show", "hide")
        if what in ("show", "hide"):
            self.view.show_reasoning = what == "show"
        else:
            if not has_thinking_switch(self.session.tokenizer):
                raise RequestError("the chat template has no switch for thinking")
            self.session.options["thinking"] = what == "on"
            if what == "on" and (name := trained_without_thinking(self.session.draft_model)) is not None:
                self.view.note(thinks_badly(name))
        self.view.note(f"thinking: {what}")

    def do_save(self, rest: str) -> None:
        """/save FILE: conversation and caches"""
        self.session.save(named(rest))
        self.view.note(f"saved to {rest}")

    def do_load(self, rest: str) -> None:
        """/load FILE: go on from a saved conversation"""
        self.session.restore(named(rest))
        count, tokens = len(self.session.turns), self.session.context_tokens
        self.view.note(f"{count} messages, {tokens:,} tokens of them in the cache")

    def do_model(self, rest: str) -> None:
        """/model NAME: go on with another model and its drafter; without a name, say which"""
        if rest:
            old = self.session
            model, tokenizer, self.drafter, pair = self.loader(rest)
            options = {**old.options, "block_size": "auto"}
            self.session = Session(model, tokenizer, self.drafter, old.system, self.max_context, **options)
            self.session.turns = old.turns
            self.view.note(pair)
        else:
            self.view.note(self.session.model.asked_for or self.session.model.name)


def whole(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise RequestError(f"a whole number is wanted, not {text or 'nothing'}") from None


def choice(text: str, *options: str) -> str:
    if text not in options:
        raise RequestError(f"{' or '.join(options)} is wanted, not {text or 'nothing'}")
    return text


def named(text: str) -> str:
    if not text:
        raise RequestError("a file name is wanted")
    return text
