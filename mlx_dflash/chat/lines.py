"""Where the chat's lines come from: prompt_toolkit on a terminal (the `chat` extra), else plain lines."""

import sys
from collections.abc import Callable, Iterable
from pathlib import Path


def line_reader(words: Iterable[str], history: Path, prompt: str = "> ") -> tuple[Callable[[], str], str]:
    """What reads a message, raising EOFError at the end, and what it is, in a few words.

    Several lines: end one with a backslash, or press Esc and Enter with prompt_toolkit.
    """
    if sys.stdin.isatty() and sys.stdout.isatty():
        try:
            return toolkit_reader(words, history, prompt), "history and completion; Esc Enter begins a new line"
        except ImportError:
            how = "no history or completion: pip install 'mlx-dflash[chat]'"
            return lambda: joined(lambda: input(prompt)), how
    return lambda: joined(lambda: input()), ""


def toolkit_reader(words: Iterable[str], history: Path, prompt: str) -> Callable[[], str]:
    from prompt_toolkit import PromptSession
    from prompt_toolkit.completion import WordCompleter
    from prompt_toolkit.history import FileHistory
    from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

    keys = KeyBindings()

    @keys.add("escape", "enter")
    def newline(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    history.parent.mkdir(parents=True, exist_ok=True)
    session: PromptSession[str] = PromptSession(
        history=FileHistory(str(history)),
        completer=WordCompleter(sorted(words), sentence=True),
        complete_while_typing=False,
        key_bindings=keys,
    )
    return lambda: joined(lambda: session.prompt(prompt))


def joined(read: Callable[[], str]) -> str:
    """Lines up to one that does not end with a backslash."""
    lines = [read()]
    while lines[-1].endswith("\\"):
        lines[-1] = lines[-1][:-1]
        lines.append(read())
    return "\n".join(lines)
