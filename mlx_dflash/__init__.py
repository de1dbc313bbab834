"""DFlash speculative decoding for Apple silicon, on MLX: a model answers faster and says the same.

from mlx_dflash import load, load_drafter, generate
model, tokenizer = load("demo")
drafter = load_drafter("demo", model)
result = generate(model, tokenizer, [{"role": "user", "content": "Hello!"}], draft_model=drafter)
"""

from .api import (
    GenerationResponse,
    GenerationResult,
    generate,
    stream_generate,
)
from .errors import CheckpointError, ContextFull, DFlashError, PairError, RequestError, UnsupportedError
from .loading import load, load_drafter
from .session import Session
from .stats import Stats

__version__ = "0.1.0"

__all__ = [
    "CheckpointError",
    "ContextFull",
    "DFlashError",
    "GenerationResponse",
    "GenerationResult",
    "PairError",
    "RequestError",
    "Session",
    "Stats",
    "UnsupportedError",
    "__version__",
    "generate",
    "load",
    "load_drafter",
    "stream_generate",
]
