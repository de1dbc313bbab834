"""The public functions that generate text.

Ties names, text, sampling, the loop and its stats together; holds no algorithm of its own.
"""

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.utils import maybe_set_recommended_wired_limit

from . import calibrate
from .decode import Decoder, State
from .drafters import DFlashDrafter
from .errors import ContextFull, RequestError
from .facts import decide_thinking, has_thinking_switch
from .lookup import History, Lookup
from .processors import LogitsProcessor, is_whole
from .remembered import Memory
from .settings import refuse_option, resolve
from .stats import Observer, Profiler, Stats
from .targets import Target
from .text import TextStream, encode_prompt, message_end
from .width import Controller, check_block_size, fixed

Prompt = str | Sequence[int] | Sequence[dict[str, Any]]
Progress = Callable[[int, int], None]  # prompt tokens done, prompt tokens in all


@dataclass
class GenerationResponse:
    """One emitted token (the fields of mlx-lm's GenerationResponse, and stats on the last one).

    text: what this token added, perhaps nothing. from_draft: the drafter proposed it and the target chose it too.
    prompt_tps, generation_tps: tokens/s so far. peak_memory: GB. finish_reason: 'stop', 'length' or
    'interrupted', None before the last. With logprobs=True, from the pass that verified the token, after processors and
    before filters and temperature: logprobs, log-probabilities of all tokens (vocab,); logprob, the token's own;
    top_logprobs, the likeliest (id, log-probability).
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
    logprob: float | None = None
    top_logprobs: list[tuple[int, float]] | None = None
    stats: Stats | None = None


@dataclass
class GenerationResult:
    """A finished generation. tokens include the stop token; text does not include it, nor a stop string.

    logprobs, top_logprobs: one entry a token, as in GenerationResponse; None if they were not asked for.
    """

    text: str
    tokens: list[int]
    finish_reason: str
    stats: Stats = field(repr=False)
    logprobs: list[float] | None = field(default=None, repr=False)
    top_logprobs: list[list[tuple[int, float]]] | None = field(default=None, repr=False)


def stream_generate(
    model: Target,
    tokenizer: TokenizerWrapper,
    prompt: Prompt,
    *,
    draft_model: DFlashDrafter | Lookup | None = None,
    max_tokens: int = 256,
    temp: float | None = None,
    top_p: float | None = None,
    top_k: int | None = None,
    min_p: float | None = None,
    min_tokens_to_keep: int | None = None,
    repetition_penalty: float | None = None,
    repetition_context_size: int | None = None,
    presence_penalty: float | None = None,
    presence_context_size: int | None = None,
    frequency_penalty: float | None = None,
    frequency_context_size: int | None = None,
    logit_bias: Mapping[int, float] | None = None,
    logits_processors: Sequence[LogitsProcessor] | None = None,
    seed: int | None = None,
    sampling_defaults: str | None = None,
    thinking: bool | None = None,
    draft_window: int | None = None,
    draft_sink: int = 0,
    proposals: str | None = None,
    draft_temp: float | None = None,
    stop: str | int | Sequence[str | int] | None = None,
    block_size: int | str = "auto",
    lookup: bool | None = None,
    logprobs: bool = False,
    top_logprobs: int = 0,
    kv_bits: int | None = None,
    kv_group_size: int | None = None,
    profile: bool = False,
    prefill_step_size: int = 2048,
    prompt_progress_callback: Progress | None = None,
    interrupted: Callable[[], bool] = lambda: False,
    context_limit: int | None = None,
    remembered: Memory | None = None,
    **unsupported: Any,
) -> Iterator[GenerationResponse]:
    """Generate from a prompt (text as is, token ids, or chat messages), one response a token.

    draft_model None decodes plainly. block_size: rows verified in a round, anchor included (1 = plain), or "auto": what
    is measured to be fastest, round by round, plain decoding included. lookup: may a round take its drafts from the
    text itself, beside the drafter; None: yes with "auto".
    max_tokens -1 means no limit. stop: strings or token ids, beside the model's own stop ids. interrupted: asked after
    every round; True ends the text there. kv_bits (4 or 8) quantizes the keys and values of full attention from the
    first token on, in groups of kv_group_size (64 or 32; None: the larger that fits). profile times draft and verify
    apart, at a cost.

    A sampling setting left None has mlx-lm's default (temp 0.0, top_p 1.0, top_k 0, min_p 0.0, no penalties, windows of
    20 tokens), or the value of `sampling_defaults`: "recommended" (the model card's) or "generation_config" (the
    model's file). seed None draws a fresh one. All values in force and their origins are in `stats.sampling`.
    logits_processors: pure functions of (tokens, logits (1, vocab)), as in mlx-lm. thinking: on or off in the chat
    template; None leaves it to the template, but off with a drafter known to be trained without. proposals: "argmax" or
    "coupled" drafts (at draft_temp; None: temp; the default from temp 0.5 on); they change the speed, never the tokens.
    context_limit: tokens that prompt and answer may take together; the answer ends there, 'length'.
    remembered: what an earlier request left; the run goes on from the longest usable prefix and leaves its own there.
    draft_window: the last rows of context that a drafter without a window of its own sees, draft_sink the first ones
    that it sees besides.

    Raises, before anything runs, RequestError for a bad option, UnsupportedError for one of mlx-lm's that this version
    or this model does not have, and ContextFull for a prompt that leaves no room.
    """
    for name, value in unsupported.items():
        refuse_option(name, value)
    check_max_tokens(max_tokens)
    if not is_whole(prefill_step_size) or prefill_step_size < 1:
        raise RequestError(f"prefill_step_size must be 1 or more, not {prefill_step_size}")
    if draft_model is not None and draft_model.target is not model:
        raise RequestError("draft_model is bound to another target; load it with load_drafter(path, model)")
    if proposals == "coupled" and draft_model is None:
        raise RequestError("coupled proposals need a draft model; give one, or drop proposals")
    check_kv_quantization(kv_bits, kv_group_size)
    check_block_size(block_size, draft_model)
    check_draft_window(draft_window, draft_sink, draft_model)
    drafter, from_text = who_drafts(draft_model, block_size, lookup)
    chat = isinstance(prompt, Sequence) and len(prompt) > 0 and isinstance(prompt[0], dict)
    drafter_name = getattr(drafter, "name", None) if chat else None
    thinking, decider = decide_thinking(thinking, tokenizer, drafter_name)
    given = {
        "temp": temp,
        "top_p": top_p,
        "top_k": top_k,
        "min_p": min_p,
        "min_tokens_to_keep": min_tokens_to_keep,
        "repetition_penalty": repetition_penalty,
        "repetition_context_size": repetition_context_size,
        "presence_penalty": presence_penalty,
        "presence_context_size": presence_context_size,
        "frequency_penalty": frequency_penalty,
        "frequency_context_size": frequency_context_size,
        "logit_bias": logit_bias,
        "seed": seed,
        "proposals": proposals,
        "draft_temp": draft_temp,
    }
    settings = resolve(given, sampling_defaults, model.name, model.generation_config, thinking)
    sampler = settings.sampler(logits_processors, logprobs, top_logprobs, model.vocab_size)
    template = {} if thinking is None or not chat else thinking_option(tokenizer, thinking)
    ids = encode_prompt(tokenizer, prompt, **template)
    if max(ids) >= model.vocab_size or min(ids) < 0:
        raise RequestError(f"the prompt has token ids outside the model's table of {model.vocab_size} rows")
    limit = max_tokens if max_tokens > 0 else 2**62
    if context_limit is not None:
        limit = min(limit, room_for(ids, prompt, context_limit))

    controller = None
    if block_size == "auto" and (drafter or from_text):
        controller = Controller(calibrate.costs_of(model, drafter, from_text))
    learn = None if controller is None else controller.observe
    observer = (Profiler if profile else Observer)(prompt_progress_callback, learn)
    observer.stats.sampling = settings.report(sampler)
    if thinking is not None:
        observer.stats.sampling["thinking"] = thinking
        observer.stats.sampling["from"]["thinking"] = decider
    text = TextStream(tokenizer, stop, interrupted)
    window = (draft_window, draft_sink)
    context = drafter.make_context(*window) if drafter is not None else None
    state = State(ids, model.make_cache(kv_bits, kv_group_size), context)
    mark = None
    if remembered is not None:
        keys = (model, kv_bits, kv_group_size), None if drafter is None else (drafter, *window)
        state = remembered.resume(state, *keys, text)
        observer.stats.cached_tokens = state.cache.length
        if chat and not state.rewindable:
            mark = message_end(tokenizer, prompt, ids, **template), remembered.mark
    width = fixed(block_size) if isinstance(block_size, int) else fixed(1) if controller is None else controller.choose
    history = None if from_text is None else History(state.tokens)
    decoder = Decoder(model, drafter, state, width, sampler, text.cut, observer, history)
    return respond(decoder, text, observer, limit, prefill_step_size, controller, mark)


def generate(model: Target, tokenizer: TokenizerWrapper, prompt: Prompt, **options: Any) -> GenerationResult:
    """Run `stream_generate` to the end, with the same options."""
    return collect(stream_generate(model, tokenizer, prompt, **options))


def collect(stream: Iterable[GenerationResponse]) -> GenerationResult:
    """All responses of a request as one result."""
    text, tokens, logprobs, top = "", [], [], []
    last = None
    for last in stream:
        text += last.text
        tokens.append(last.token)
        if last.logprob is not None and last.top_logprobs is not None:
            logprobs.append(last.logprob)
            top.append(last.top_logprobs)
    assert last is not None and last.stats is not None and last.finish_reason is not None
    scored = (logprobs, top) if logprobs else (None, None)
    return GenerationResult(text, tokens, last.finish_reason, last.stats, *scored)


def respond(
    decoder: Decoder,
    text: TextStream,
    observer: Observer,
    max_tokens: int,
    prefill_step: int,
    controller: Controller | None,
    mark: tuple[int, Callable[[], None]] | None = None,
) -> Iterator[GenerationResponse]:
    """Run a decoder to its end. mark: a length of the prompt, and what is called when the caches stand there."""
    stats = observer.stats
    with wired_limit(), contextlib.closing(decoder.run(max_tokens, prefill_step)) as run:
        if mark is not None and decoder.state.cache.length < mark[0]:
            decoder.prefill(prefill_step, mark[0])
            mark[1]()
        for count, emitted in enumerate(run, 1):
            response = GenerationResponse(
                text="",
                token=emitted.token,
                from_draft=emitted.from_draft,
                prompt_tokens=stats.prompt_tokens,
                prompt_tps=(stats.prompt_tokens - stats.cached_tokens) / stats.ttft,
                generation_tokens=count,
                generation_tps=observer.generation_tps(),
                peak_memory=mx.get_peak_memory() / 1e9,
            )
            if (score := emitted.score) is not None:
                response.logprobs, response.logprob, response.top_logprobs = score.vector, score.chosen, score.top
            if emitted.last:
                text.finish("length")
                response.text = "".join(text.segments)
                response.finish_reason = text.finish_reason
                response.stats = observer.finish()
                if controller is not None:
                    stats.width_reason = controller.why(decoder.state.cache.length)
                    calibrate.remember(controller.costs, decoder.state.cache.length)
            else:
                response.text = text.segments.popleft()
            left = time.perf_counter()
            yield response
            observer.away += time.perf_counter() - left


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


def thinking_option(tokenizer: TokenizerWrapper, thinking: bool) -> dict[str, bool]:
    """What turns thinking on or off in the chat template; refused where the template has no such switch."""
    if not has_thinking_switch(tokenizer):
        raise RequestError("the chat template has no enable_thinking switch; drop thinking")
    return {"enable_thinking": thinking}


def who_drafts(
    draft_model: DFlashDrafter | Lookup | None, block_size: int | str, lookup: bool | None
) -> tuple[DFlashDrafter | None, Lookup | None]:
    """The drafter of a request, and lookup if it may draft, alone or beside it."""
    if draft_model is None or block_size == 1:
        return None, None
    if isinstance(draft_model, Lookup):
        return None, draft_model
    beside = block_size == "auto" if lookup is None else lookup
    return draft_model, Lookup(draft_model.target) if beside else None


def check_max_tokens(max_tokens: int) -> None:
    if not is_whole(max_tokens) or max_tokens == 0 or max_tokens < -1:
        raise RequestError(f"max_tokens must be 1 or more (-1: no limit), not {max_tokens}")


def room_for(ids: list[int], prompt: Prompt, limit: int) -> int:
    """Tokens that an answer to the prompt may take. Raises ContextFull where there is no room."""
    if len(ids) >= limit:
        asked = [m for m in prompt if isinstance(m, dict) and m["role"] != "system"]
        raise ContextFull(len(ids), limit, max(len(asked) - 1, 0))
    return limit - len(ids)


def check_draft_window(window: int | None, sink: int, draft_model: DFlashDrafter | Lookup | None) -> None:
    if window is None and sink == 0:
        return
    if draft_model is None or isinstance(draft_model, Lookup):
        raise RequestError("draft_window needs a draft model; give one, or drop draft_window and draft_sink")
    if window is None or not is_whole(window) or window < 1:
        raise RequestError(f"draft_window must be 1 or more tokens, not {window}")
    if not is_whole(sink) or sink < 0:
        raise RequestError(f"draft_sink must be 0 or more tokens, not {sink}")


def check_kv_quantization(kv_bits: int | None, kv_group_size: int | None) -> None:
    if kv_bits not in (None, 4, 8):
        raise RequestError(f"kv_bits must be 4 or 8, not {kv_bits}")
    if kv_group_size not in (None, 32, 64):
        raise RequestError(f"kv_group_size must be 64 or 32, not {kv_group_size}")
