"""What the chat prints: replies as they are committed, reasoning dimmed or hidden, a line of figures after each.

Knows text, terminals and figures; nothing of models.
"""

import os
import sys
from typing import TextIO

from ..report import speed
from ..stats import Stats

DIM, PLAIN = "\x1b[2m", "\x1b[0m"


class Reasoning:
    """Splits a streamed reply at the marks around reasoning, which may come in pieces.

    begun: the template already opened the reasoning, so that the reply starts inside.
    """

    def __init__(self, start: str | None, end: str | None, begun: bool = False) -> None:
        self.start, self.end = start, end
        self.inside = begun and end is not None
        self.held = ""  # text that may be the beginning of a mark

    def feed(self, text: str, last: bool = False) -> list[tuple[str, bool]]:
        """Pieces (text, is reasoning), the marks themselves left out."""
        pieces: list[tuple[str, bool]] = []
        rest = self.held + text
        self.held = ""
        while rest:
            mark = self.end if self.inside else self.start
            if not mark:
                pieces.append((rest, self.inside))
                break
            before, found, after = rest.partition(mark)
            if found:
                pieces.append((before, self.inside))
                self.inside, rest = not self.inside, after
                continue
            keep = 0 if last else next((n for n in range(len(mark) - 1, 0, -1) if rest.endswith(mark[:n])), 0)
            pieces.append((rest[: len(rest) - keep], self.inside))
            self.held = rest[len(rest) - keep :]
            break
        return [piece for piece in pieces if piece[0]]


class View:
    """Where replies and notes go. Colour only on a terminal, and not with NO_COLOR (no-color.org)."""

    def __init__(self, out: TextIO | None = None, notes: TextIO | None = None) -> None:
        self.out = out or sys.stdout
        self.tty = self.out.isatty()
        self.notes = notes or (self.out if self.tty else sys.stderr)  # piped text stays clean
        self.colour = self.tty and not os.environ.get("NO_COLOR")
        self.show_reasoning = True

    def dim(self, text: str) -> str:
        return f"{DIM}{text}{PLAIN}" if self.colour else text

    def note(self, text: str) -> None:
        print(self.dim(text) if self.notes is self.out else text, file=self.notes, flush=True)

    def piece(self, text: str, reasoning: bool) -> None:
        if reasoning and not self.show_reasoning:
            return
        self.out.write(self.dim(text) if reasoning else text)
        self.out.flush()


def status(stats: Stats, finish_reason: str | None, used: int, limit: int) -> str:
    """One line after a reply. used, limit: tokens of context."""
    parts = [stats.mode, *speed(stats)]
    of = f" of {limit:,}" if limit < 2**31 else ""
    parts.append(f"context {used:,}{of} tokens, {stats.cached_tokens:,} found in the cache")
    parts.append(f"first token after {stats.ttft:.2f} s")
    if finish_reason != "stop":
        ends = {"length": "cut at the most tokens allowed", "interrupted": "stopped by you"}
        parts.append(ends.get(finish_reason or "", str(finish_reason)))
    return " | ".join(parts)
