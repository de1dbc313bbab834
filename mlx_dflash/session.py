"""A conversation of many turns whose caches go on from one to the next.

Holds messages and options; what is forwarded again is decided in `remembered`, files are written in `saved`.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mlx_lm.tokenizer_utils import TokenizerWrapper

from . import saved
from .api import GenerationResponse, check_max_tokens, stream_generate
from .drafters import DFlashDrafter
from .errors import RequestError
from .facts import target_facts
from .lookup import Lookup
from .remembered import Memory
from .settings import DEFAULTS, resolve
from .targets import Target

Message = dict[str, Any]


class Session:
    """A chat with a target, with a drafter or without.

    options: those of `stream_generate`. A new turn forwards only what comes after the longest prefix that the caches
    can stand at; its text is that of a fresh run. context_limit: tokens; None: what the model was trained for.
    """

    def __init__(
        self,
        model: Target,
        tokenizer: TokenizerWrapper,
        draft_model: DFlashDrafter | Lookup | None = None,
        system: str | None = None,
        context_limit: int | None = None,
        **options: Any,
    ) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.draft_model = draft_model
        self.system = system
        self.context_limit = context_limit or limit_of(model)
        self.options = options
        self.turns: list[Message] = []
        self.memory = Memory()
        self.forwarded = self.reused = 0  # prompt tokens of the last turn: computed, and found in the cache
        if not tokenizer.has_chat_template:
            raise RequestError("the tokenizer has no chat template; a conversation needs one")

    @property
    def messages(self) -> list[Message]:
        """The system prompt, if any, and all messages so far."""
        return self._templated(self.turns)

    @property
    def context_tokens(self) -> int:
        """Tokens in the cache."""
        return self.memory.length

    def set(self, **changes: Any) -> None:
        """Change options from the next turn on; None: the default. Raises RequestError for a bad one, changing none."""
        resolve({**{k: v for k, v in {**self.options, **changes}.items() if k in DEFAULTS}, "seed": 0}).sampler()
        if (most := changes.get("max_tokens")) is not None:
            check_max_tokens(most)
        self.options |= changes
        self.options = {k: v for k, v in self.options.items() if k != "max_tokens" or v is not None}

    def send(self, text: str, **overrides: Any) -> Iterator[GenerationResponse]:
        """A user message, and the reply as it is committed. overrides: options for this turn alone.

        A reply that is closed or interrupted stays in the history as far as it was committed. Raises ContextFull, or
        RequestError for a bad option, before anything changes.
        """
        return self._reply([*self.turns, {"role": "user", "content": text}], overrides)

    def retry(self, **overrides: Any) -> Iterator[GenerationResponse]:
        """The last reply drawn again, with a fresh seed unless `seed` is given. Raises RequestError without one."""
        return self._reply(self.turns[: self._last_question() + 1], {"seed": None, **overrides})

    def undo(self) -> None:
        """Forget the last user message and its reply. Raises RequestError where there is none."""
        self.turns = self.turns[: self._last_question()]

    def clear(self) -> None:
        """Forget all messages; the system prompt stays."""
        self.turns = []

    def drop(self, count: int) -> None:
        """Forget the oldest `count` messages; the system prompt stays."""
        if not 0 < count <= len(self.turns):
            raise RequestError(f"there are {len(self.turns)} messages; drop 1 to {len(self.turns)}")
        self.turns = self.turns[count:]

    def save(self, path: str | Path) -> None:
        """Write conversation and caches to one file; a file of that name is replaced only by a whole one."""
        facts = {"turns": self.turns, "system": self.system}
        saved.write(Path(path), self.model, self.memory, facts)

    def restore(self, path: str | Path) -> None:
        """Go on from a saved file. Raises CheckpointError for a cut or foreign one, and leaves all as it was.

        Caches that were made with another drafter or other cache options are left aside: the text is forwarded again.
        """
        facts, memory = saved.read(Path(path), self.model, self.draft_model, self.options)
        self.turns, self.system, self.memory = facts["turns"], facts["system"], memory

    @classmethod
    def load(
        cls,
        path: str | Path,
        model: Target,
        tokenizer: TokenizerWrapper,
        draft_model: DFlashDrafter | Lookup | None = None,
        **options: Any,
    ) -> "Session":
        """A session from a file that `save` wrote."""
        session = cls(model, tokenizer, draft_model, **options)
        session.restore(path)
        return session

    def _templated(self, turns: list[Message]) -> list[Message]:
        return [*([{"role": "system", "content": self.system}] if self.system else []), *turns]

    def _last_question(self) -> int:
        asked = [i for i, message in enumerate(self.turns) if message["role"] == "user"]
        if not asked:
            raise RequestError("there is no message to go back to")
        return asked[-1]

    def _reply(self, turns: list[Message], overrides: dict[str, Any]) -> Iterator[GenerationResponse]:
        options = {**self.options, **overrides}
        stream = stream_generate(
            self.model,
            self.tokenizer,
            self._templated(turns),
            draft_model=self.draft_model,
            context_limit=self.context_limit,
            remembered=self.memory,
            **options,
        )
        return self._follow(stream, turns)

    def _follow(self, stream: Iterator[GenerationResponse], turns: list[Message]) -> Iterator[GenerationResponse]:
        before, self.turns, begun = self.turns, turns, False
        text, self.reused = self.memory.text, self.memory.length
        assert text is not None
        try:
            for response in stream:
                begun = True
                self.forwarded = response.prompt_tokens - self.reused
                yield response
        finally:
            stream.close()  # type: ignore[attr-defined]
            text.finish("interrupted")
            self.turns = [*turns, {"role": "assistant", "content": text.text}] if begun else before


def limit_of(model: Target) -> int:
    """Tokens that a model was trained for, by its card or its config."""
    facts = target_facts(model.name)
    trained = None if facts is None else facts.trained_context
    return trained or int(model.config.get("max_position_embeddings") or 2**31)
