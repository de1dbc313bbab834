"""The public functions: load a target and a drafter, generate text.

Ties names, text, sampling, the loop and its stats together; holds no algorithm of its own.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.utils import maybe_set_recommended_wired_limit

from . import hub, memory, registry
from .accept import Sampling
from .decode import Decoder, State
from .drafters import DFlashDrafter, evaluate_drafter, open_drafter
from .errors import RequestError, UnsupportedError
from .stats import Observer, Profiler, Stats
from .targets import Target, evaluate, open_target
from .text import TextStream, encode_prompt
from .width import make_width

Prompt = str | Sequence[int] | Sequence[dict[str, Any]]
Progress = Callable[[int, int], None]  # prompt tokens done, prompt tokens in all


@dataclass
class GenerationResponse:
    """One emitted token (the fields of mlx-lm's GenerationResponse, and stats on the last one).

    text: what this token added, perhaps nothing. from_draft: the drafter proposed it and the target chose it too.
    prompt_tps, generation_tps: tokens/s so far. peak_memory: GB. finish_reason: 'stop', 'length' or
    'interrupted', None before the last. logprobs: None; they are not computed yet.
    """

    text: str
    token: int
    from_draft: bool
    prompt_tokens: int
    prompt_tps: float
    generation_tokens: int
    generation_tps: float
    peak_memory: float
    finish_reason: str | None = None
    logprobs: mx.array | None = None
    stats: Stats | None = None


@dataclass
class GenerationResult:
    """A finished generation. tokens include the stop token; text does not include it, nor a stop string."""

    text: str
    tokens: list[int]
    finish_reason: str
    stats: Stats = field(repr=False)


def load(path_or_name: str | Path = "demo", revision: str | None = None) -> tuple[Target, TokenizerWrapper]:
    """Load a target: a local folder, a Hugging Face name, or "demo" (SmolLM2-135M-Instruct).

    revision: branch, tag or commit of a Hugging Face name; None: what the cache has, else the newest. Raises
    CheckpointError (missing, cut or wrong files), UnsupportedError (another model family).
    """
    folder = hub.target_folder(str(path_or_name), revision)
    target = open_target(folder)
    target.name, target.folder = str(path_or_name), folder
    memory.warn(memory.estimate(target), str(path_or_name))
    return target, evaluate(target, folder)


def load_drafter(path_or_name: str | Path, model: Target, revision: str | None = None) -> DFlashDrafter:
    """Load a drafter, a local folder, a Hugging Face name, "demo" or "auto", and bind it to `model`.

    "auto" is the drafter that the registry knows for the target that `load` loaded, at its pinned revision. Raises
    CheckpointError, UnsupportedError, RequestError where "auto" finds none, or PairError where it does not fit.
    """
    folder = drafter_folder(path_or_name, model, revision)
    drafter = open_drafter(folder, model)
    memory.warn(memory.estimate(model, drafter), f"{model.name or 'this model'} with {path_or_name}")
    return evaluate_drafter(drafter, str(folder))


def drafter_folder(path_or_name: str | Path, model: Target, revision: str | None = None) -> Path:
    """The local folder of a drafter for an opened target, as `load_drafter` finds it."""
    if path_or_name != "auto":
        return hub.drafter_folder(str(path_or_name), revision)
    if model.name == "demo":
        return hub.drafter_folder("demo")
    pair = registry.pair_of(model.name, model.folder)
    if pair is None:
        raise RequestError(
            f"no drafter is known for {model.name or 'this model'}; give its folder or hub name with --draft-model"
        )
    folder = hub.drafter_folder(pair.drafter, revision or pair.revision)
    registry.check_drafter(pair, folder)
    return folder


def stream_generate(
    model: Target,
    tokenizer: TokenizerWrapper,
    prompt: Prompt,
    *,
    draft_model: DFlashDrafter | None = None,
    max_tokens: int = 256,
    temp: float = 0.0,
    top_p: float = 1.0,
    top_k: int = 0,
    min_p: float = 0.0,
    min_tokens_to_keep: int = 1,
    seed: int | None = None,
    stop: str | int | Sequence[str | int] | None = None,
    block_size: int | str = "auto",
    kv_bits: int | None = None,
    kv_group_size: int | None = None,
    profile: bool = False,
    prefill_step_size: int = 2048,
    prompt_progress_callback: Progress | None = None,
    interrupted: Callable[[], bool] = lambda: False,
    **unsupported: Any,
) -> Iterator[GenerationResponse]:
    """Generate from a prompt (text as is, token ids, or chat messages), one response a token.

    draft_model None decodes plainly. block_size: rows verified in a round, anchor included (1 = plain), or "auto".
    max_tokens -1 means no limit. stop: strings or token ids, beside the model's own stop ids. interrupted: asked after
    every round; True ends the text there. kv_bits (4 or 8) quantizes the keys and values of full attention from the
    first token on, in groups of kv_group_size (64 or 32; None: the larger that fits). profile times draft and verify
    apart, at a cost. Raises, before anything runs, RequestError for a bad option and UnsupportedError for one of
    mlx-lm's that this version or this model does not have.
    """
    for name, value in unsupported.items():
        refuse_option(name, value)
    sampling = Sampling(temp, top_p, top_k, min_p, min_tokens_to_keep, seed)
    if max_tokens == 0 or max_tokens < -1:
        raise RequestError(f"max_tokens must be 1 or more (-1: no limit), not {max_tokens}")
    if prefill_step_size < 1:
        raise RequestError(f"prefill_step_size must be 1 or more, not {prefill_step_size}")
    if draft_model is not None and draft_model.target is not model:
        raise RequestError("draft_model is bound to another target; load it with load_drafter(path, model)")
    check_kv_quantization(kv_bits, kv_group_size)
    width = make_width(block_size, draft_model)
    if block_size == 1:
        draft_model = None
    ids = encode_prompt(tokenizer, prompt)
    if max(ids) >= model.vocab_size or min(ids) < 0:
        raise RequestError(f"the prompt has token ids outside the model's table of {model.vocab_size} rows")

    observer = (Profiler if profile else Observer)(prompt_progress_callback)
    observer.stats.sampling = sampling.to_dict()
    text = TextStream(tokenizer, stop, interrupted)
    context = draft_model.make_context() if draft_model is not None else None
    state = State(ids, model.make_cache(kv_bits, kv_group_size), context)
    decoder = Decoder(model, draft_model, state, width, sampling.draw, text.cut, observer)
    limit = max_tokens if max_tokens > 0 else 2**62
    return respond(decoder, text, observer, limit, prefill_step_size)


def generate(model: Target, tokenizer: TokenizerWrapper, prompt: Prompt, **options: Any) -> GenerationResult:
    """Run `stream_generate` to the end, with the same options."""
    text, tokens = "", []
    last = None
    for last in stream_generate(model, tokenizer, prompt, **options):
        text += last.text
        tokens.append(last.token)
    assert last is not None and last.stats is not None and last.finish_reason is not None
    return GenerationResult(text, tokens, last.finish_reason, last.stats)


def respond(
    decoder: Decoder, text: TextStream, observer: Observer, max_tokens: int, prefill_step: int
) -> Iterator[GenerationResponse]:
    stats = observer.stats
    with wired_limit(), contextlib.closing(decoder.run(max_tokens, prefill_step)) as run:
        for count, emitted in enumerate(run, 1):
            response = GenerationResponse(
                text="",
                token=emitted.token,
                from_draft=emitted.from_draft,
                prompt_tokens=stats.prompt_tokens,
                prompt_tps=stats.prompt_tokens / stats.ttft,
                generation_tokens=count,
                generation_tps=observer.generation_tps(),
                peak_memory=mx.get_peak_memory() / 1e9,
            )
            if emitted.last:
                text.finish("length")
                response.text = "".join(text.segments)
                response.finish_reason = text.finish_reason
                response.stats = observer.finish()
            else:
                response.text = text.segments.popleft()
            yield response


@contextlib.contextmanager
def wired_limit() -> Iterator[None]:
    """Hold mlx-lm's recommended wired limit while generating, and put the old one back; nothing without Metal."""
    old = maybe_set_recommended_wired_limit()
    try:
        yield
    finally:
        if old is not None:
            mx.synchronize()
            mx.set_wired_limit(old)


# Options of mlx-lm that users may pass and that this version can't serve: name -> the value that means "not used".
LATER_OPTIONS: dict[str, Any] = {
    "repetition_penalty": None,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "logit_bias": None,
    "logits_processors": None,
    "logprobs": False,
    "top_logprobs": 0,
    "quantized_kv_start": 0,
    "max_kv_size": None,
    "prompt_cache": None,
    "sampler": None,
    "input_embeddings": None,
    "xtc_probability": 0.0,
}


def check_kv_quantization(kv_bits: int | None, kv_group_size: int | None) -> None:
    if kv_bits not in (None, 4, 8):
        raise RequestError(f"kv_bits must be 4 or 8, not {kv_bits}")
    if kv_group_size not in (None, 32, 64):
        raise RequestError(f"kv_group_size must be 64 or 32, not {kv_group_size}")


def refuse_option(name: str, value: Any) -> None:
    if name not in LATER_OPTIONS:
        raise RequestError(f"unknown option {name!r}")
    if value is not None and value != LATER_OPTIONS[name]:
        raise UnsupportedError(f"the option {name!r} is not supported yet")
