"""Every error this package raises on purpose: one base, a kind for each thing a user can mend."""


class DFlashError(Exception):
    """Base of all deliberate errors; the message is one line that names the thing and the remedy."""


class CheckpointError(DFlashError):
    """A folder or file is missing, cut, inconsistent, or not the kind of thing it was given as."""


class PairError(DFlashError):
    """The drafter does not fit the target."""


class UnsupportedError(DFlashError):
    """A model family, drafter format or option that this version can't run exactly."""


class RequestError(DFlashError):
    """A generation request that can't be served: an empty prompt, a bad option, contradictory settings."""


class ContextFull(RequestError):
    """A conversation does not fit the context. needed, limit: tokens; messages: those before the last question."""

    def __init__(self, needed: int, limit: int, messages: int) -> None:
        super().__init__(f"the conversation takes {needed} tokens and the context holds {limit}; drop old messages")
        self.needed, self.limit, self.messages = needed, limit, messages
