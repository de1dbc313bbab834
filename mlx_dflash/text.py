"""From a request's tokens to its text: one streaming detokenizer, stop ids and stop strings.

Knows ids and characters; nothing of rounds, though it is fed a round's tokens at a time and says where to cut.
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from jinja2 import TemplateError

from .errors import RequestError


class TextStream:
    """Text of the tokens that are emitted, a segment a token.

    Text that may be the beginning of a stop string is held back until the next token decides. Text from a stop string
    on, and that of a stop token, is never given out.
    """

    def __init__(
        self,
        tokenizer: Any,
        stop: str | int | Sequence[str | int] | None = None,
        interrupted: Callable[[], bool] = lambda: False,
    ):
        wanted = list(stop) if isinstance(stop, (list, tuple, set)) else [] if stop is None else [stop]
        if not all(isinstance(s, (str, int)) and not isinstance(s, bool) and s != "" for s in wanted):
            raise RequestError(f"stop must be token ids or non-empty strings, not {stop!r}")
        self.stop_ids = set(tokenizer.eos_token_ids) | {s for s in wanted if isinstance(s, int)}
        self.stop_strings = [s for s in wanted if isinstance(s, str)]
        self.detokenizer = tokenizer.detokenizer
        self.text = ""  # all text so far
        self.given = 0  # characters of it in segments
        self.segments: deque[str] = deque()
        self.interrupted = interrupted
        self.finish_reason: str | None = None

    def cut(self, tokens: list[int]) -> int | None:
        """Take a round's tokens up to the first stop; returns how many that are, or None if there is no stop."""
        for count, token in enumerate(tokens, 1):
            if token in self.stop_ids:
                self.finish("stop")
                return count
            self.detokenizer.add_token(token)
            self.text += self.detokenizer.last_segment
            if self._cut_at_stop_string():
                return count
            self._give(len(self.text) - self._held_back())
        if self.interrupted():
            self.finish("interrupted")
            return len(tokens)
        return None

    def finish(self, reason: str) -> None:
        """No more tokens follow: give out what the detokenizer and the stop strings held back. Once is enough."""
        if self.finish_reason is None:
            self.detokenizer.finalize()
            self.text += self.detokenizer.last_segment
            if not self._cut_at_stop_string():
                self._give(len(self.text))
                self.finish_reason = reason

    def _give(self, end: int) -> None:
        self.segments.append(self.text[self.given : end])
        self.given = end

    def _cut_at_stop_string(self) -> bool:
        longest = max(map(len, self.stop_strings), default=0)
        start = max(self.given - longest, 0)
        places = [at for s in self.stop_strings if (at := self.text.find(s, start)) >= 0]
        if not places:
            return False
        self.text = self.text[: min(places)]
        self._give(len(self.text))
        self.finish_reason = "stop"
        return True

    def _held_back(self) -> int:
        """Length of the longest end of the text that a stop string begins with."""
        for size in range(max(map(len, self.stop_strings), default=1) - 1, 0, -1):
            tail = self.text[-size:]
            if len(tail) == size and any(s.startswith(tail) for s in self.stop_strings):
                return size
        return 0


def apply_template(tokenizer: Any, messages: list[dict[str, Any]], **options: Any) -> Any:
    """The tokenizer's chat template; what it rejects becomes a RequestError."""
    try:
        return tokenizer.apply_chat_template(messages, **options)
    except (TemplateError, ValueError, TypeError) as e:
        raise RequestError(f"the chat template rejects this conversation: {' '.join(str(e).split())}") from e


def message_end(tokenizer: Any, messages: Any, ids: list[int], **template: Any) -> int:
    """How many of the prompt's `ids` belong to the messages themselves, the generation prompt left out.

    0 where the template does not simply add the generation prompt at the end.
    """
    base = [int(i) for i in apply_template(tokenizer, list(messages), add_generation_prompt=False, **template)]
    return len(base) if len(base) < len(ids) and ids[: len(base)] == base else 0


def encode_prompt(tokenizer: Any, prompt: str | Sequence[int] | Sequence[dict[str, Any]], **template: Any) -> list[int]:
    """Token ids of a prompt: text as it is, ids, or chat messages through the tokenizer's template.

    Text gets the tokenizer's special tokens unless it begins with the BOS token, as in mlx-lm. Raises RequestError.
    """
    if isinstance(prompt, str):
        special = tokenizer.bos_token is None or not prompt.startswith(tokenizer.bos_token)
        ids: Iterable[int] = tokenizer.encode(prompt, add_special_tokens=special)
    elif len(prompt) and isinstance(prompt[0], dict):
        if not tokenizer.has_chat_template:
            raise RequestError("the tokenizer has no chat template; give the prompt as text or token ids")
        messages: list[Any] = list(prompt)
        ids = apply_template(tokenizer, messages, add_generation_prompt=True, **template)
    else:
        ids = prompt  # type: ignore[assignment]
    out = [int(i) for i in ids]
    if not out:
        raise RequestError("the prompt is empty; give at least one token")
    return out
