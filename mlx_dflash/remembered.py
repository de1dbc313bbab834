"""What a request leaves for the next one: the caches, and places in the text to go back to.

A new text goes on from the longest prefix of it that the caches can stand at. Caches that hold every position go back
to any length; windowed and recurrent ones only to where a checkpoint was taken. Knows tokens and lengths; nothing of
messages.
"""

from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from .cache import CacheCheckpoint
from .decode import State
from .drafters.context import ContextCheckpoint
from .text import TextStream

MARKS = 8  # checkpoints kept; each holds a window's rows or a state of every such layer


@dataclass(frozen=True)
class Mark:
    """A place to go back to. tokens: all that the caches held there."""

    tokens: tuple[int, ...]
    cache: CacheCheckpoint
    context: ContextCheckpoint | None


class Memory:
    """The state that the last request left, and its text. Serves one target, cache kind and drafter at a time."""

    def __init__(self) -> None:
        self.state: State | None = None
        self.marks: list[Mark] = []
        self.text: TextStream | None = None
        self.cache_key: Any = None
        self.context_key: Any = None

    @property
    def length(self) -> int:
        """Tokens in the cache."""
        return 0 if self.state is None else self.state.cache.length

    def resume(self, fresh: State, cache_key: Any, context_key: Any, text: TextStream) -> State:
        """The state to go on from with the tokens of `fresh`: what is remembered if any of it is usable, else `fresh`.

        text: of the answer that will be drawn. The keys say what cache and context were made for. A context that is no
        longer wanted is dropped; one that is wanted and not there means that all tokens must be forwarded again.
        """
        if self.state is not None and context_key is None and cache_key == self.cache_key:
            self.state.context, self.context_key = None, None
        same = (cache_key, context_key) == (self.cache_key, self.context_key)
        if self.state is not None and same and self.go_back(fresh.tokens):
            self.state.tokens = fresh.tokens
        else:
            self.state, self.marks = fresh, []
        self.cache_key, self.context_key = cache_key, context_key
        self.text = text
        return self.state

    def go_back(self, tokens: list[int]) -> bool:
        """Put the caches at the longest usable prefix of `tokens` that leaves one to forward; False: there is none."""
        assert self.state is not None
        cache, context, held = self.state.cache, self.state.context, self.state.tokens
        most = min(cache.length, len(tokens) - 1)
        common = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(held[:most], tokens, strict=False)))
        if self.state.rewindable:
            cache.rewind(common)
            if context is not None:
                context.rewind(common)
            return common > 0
        if common == cache.length:
            self.mark()  # a later text may part from this one behind here
            return True
        usable = [mark for mark in self.marks if tuple(tokens[: len(mark.tokens)]) == mark.tokens]
        usable = [m for m in usable if len(m.tokens) < len(tokens) and (m.context is None) == (context is None)]
        if not usable:
            return False
        mark = max(usable, key=lambda m: len(m.tokens))
        cache.restore(mark.cache)
        if context is not None and mark.context is not None:
            context.restore(mark.context)
        # What is newer stood on rows that will now be overwritten.
        self.marks = [m for m in self.marks if len(m.tokens) <= len(mark.tokens)]
        return True

    def mark(self) -> None:
        """Remember where the caches stand now, between rounds; the oldest of many marks is forgotten."""
        assert self.state is not None
        cache, context = self.state.cache, self.state.context
        tokens = tuple(self.state.tokens[: cache.length])
        self.marks = [m for m in self.marks if m.tokens != tokens][-MARKS + 1 :]
        self.marks.append(Mark(tokens, cache.checkpoint(), None if context is None else context.checkpoint()))
