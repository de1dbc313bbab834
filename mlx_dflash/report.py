"""What the command line says of a run: the summary line, and how it compares with plain decoding."""

from typing import Any

import mlx.core as mx

from .api import GenerationResult
from .drafters import DFlashDrafter
from .facts import drafter_facts, target_facts
from .lookup import Lookup
from .stats import Stats
from .targets import Target


def summary(result: GenerationResult) -> str:
    """One line: mode, speed, mean accepted length, acceptance, block sizes."""
    s = result.stats
    parts = [s.mode, *speed(s)]
    if s.width_reason:
        parts.append(s.width_reason)
    if s.timing == "profiled" and s.draft_time is not None and s.verify_time is not None and s.host_time is not None:
        parts.append(f"draft {s.draft_time:.2f} s, verify {s.verify_time:.2f} s, host {s.host_time:.2f} s")
    parts.append(f"{s.generation_tokens} tokens, {result.finish_reason}")
    parts.append(f"prompt {s.prompt_tokens} tokens, first token after {s.ttft:.2f} s")
    parts.append(f"peak memory {s.peak_memory / 1e9:.2f} GB")
    return " | ".join(parts)


def speed(stats: Stats) -> list[str]:
    """Tokens a second, mean accepted length and acceptance where drafts were made, block sizes."""
    parts = [f"{stats.generation_tps:.1f} tokens/s"]
    if stats.mean_accepted_length is not None and stats.acceptance_rate is not None:
        parts.append(f"mean accepted length {stats.mean_accepted_length:.2f}")
        parts.append(f"acceptance {stats.acceptance_rate:.1%}")
    blocks = ", ".join(f"{n} x {size}" for size, n in sorted(stats.block_sizes.items(), reverse=True))
    return [*parts, f"block sizes {blocks or 'none'}"]


def sampling_line(stats: Stats) -> str:
    """Every sampling setting in force, grouped by where it comes from."""
    origins: dict[str, str] = stats.sampling["from"]
    groups: dict[str, list[str]] = {}
    for name, origin in origins.items():
        unused = name.endswith("_context_size") and not stats.sampling[name.replace("context_size", "penalty")]
        if (value := stats.sampling[name]) is not None and not unused:
            groups.setdefault(origin, []).append(f"{name} {value}")
    return "sampling | " + " | ".join(f"{origin}: {', '.join(values)}" for origin, values in groups.items())


def remarks(
    model: Target, drafter: DFlashDrafter | Lookup | None, stats: Stats, asked_to_think: bool | None
) -> list[str]:
    """What a user should know of this pair and request, from the facts that model cards state."""
    out = []
    if (name := trained_without_thinking(drafter)) is not None:
        if asked_to_think:
            out.append(thinks_badly(name))
        elif stats.sampling.get("thinking") is False and asked_to_think is None:
            turn_on = """--chat-template-config '{"enable_thinking": true}'"""
            out.append(f"thinking is off: {name} was trained without it; {turn_on} turns it on")
    known = target_facts(model.name)
    length = stats.prompt_tokens + stats.generation_tokens
    if known is not None and known.trained_context is not None and length > known.trained_context:
        out.append(f"warning: {length} tokens; {known.name} was trained on up to {known.trained_context}")
    return out


def trained_without_thinking(drafter: DFlashDrafter | Lookup | None) -> str | None:
    """The drafter's name on its card if that says so."""
    facts = None if drafter is None else drafter_facts(drafter.name)
    return facts.name if facts is not None and facts.thinking is False else None


def thinks_badly(name: str) -> str:
    return f"warning: {name} was trained without thinking; expect it to draft thinking badly"


def compare(
    model: Target,
    ids: list[int],
    result: GenerationResult,
    plain: GenerationResult,
    kv_bits: int | None = None,
    kv_group_size: int | None = None,
) -> dict[str, Any]:
    """Both speeds, whether the tokens are equal, else where they part and by what logit margin."""
    out: dict[str, Any] = {
        "tokens_per_second": result.stats.generation_tps,
        "plain_tokens_per_second": plain.stats.generation_tps,
        "speedup": result.stats.generation_tps / max(plain.stats.generation_tps, 1e-9),
        "equal": result.tokens == plain.tokens,
    }
    if (at := first_difference(plain.tokens, result.tokens)) is not None:
        out["first_difference"] = at
        margin = logit_margin(model, ids, plain.tokens, result.tokens, at, kv_bits, kv_group_size)
        if margin is not None:
            out["logit_margin"] = margin
    return out


def first_difference(first: list[int], second: list[int]) -> int | None:
    """Where two texts part, the end of the shorter one included; None: they are equal."""
    if first == second:
        return None
    pairs = enumerate(zip(first, second, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(first), len(second)))


def logit_margin(
    model: Target,
    ids: list[int],
    first: list[int],
    second: list[int],
    at: int,
    kv_bits: int | None = None,
    kv_group_size: int | None = None,
) -> float | None:
    """Between the two tokens where texts after `ids` part; near 0 is a tie that rounding decides. None: one ended."""
    if at >= min(len(first), len(second)):
        return None
    prefix = mx.array([ids + first[:at]], mx.uint32)
    logits, _ = model.forward(prefix, model.make_cache(kv_bits, kv_group_size), last_logits_only=True)
    return float(abs((logits[0, -1, first[at]] - logits[0, -1, second[at]]).item()))


def comparison(values: dict[str, Any]) -> str:
    speeds = "{tokens_per_second:.1f} against {plain_tokens_per_second:.1f} tokens/s plain, {speedup:.2f} x"
    if values["equal"]:
        return speeds.format(**values) + " | tokens equal"
    margin = f", logit margin {values['logit_margin']:.1e}" if "logit_margin" in values else ""
    return speeds.format(**values) + f" | tokens part at {values['first_difference']}{margin}"
