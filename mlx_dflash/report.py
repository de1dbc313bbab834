"""What the command line says of a run: the summary line, and how it compares with plain decoding."""

from typing import Any

import mlx.core as mx

from .api import GenerationResult
from .targets import Target


def summary(result: GenerationResult) -> str:
    """One line: mode, speed, mean accepted length, acceptance, block sizes."""
    s = result.stats
    parts = [s.mode, f"{s.generation_tps:.1f} tokens/s"]
    if s.mean_accepted_length is not None and s.acceptance_rate is not None:
        parts.append(f"mean accepted length {s.mean_accepted_length:.2f}")
        parts.append(f"acceptance {s.acceptance_rate:.1%}")
    blocks = ", ".join(f"{n} x {size}" for size, n in sorted(s.block_sizes.items(), reverse=True))
    parts.append(f"block sizes {blocks or 'none'}")
    if s.timing == "profiled" and s.draft_time is not None and s.verify_time is not None and s.host_time is not None:
        parts.append(f"draft {s.draft_time:.2f} s, verify {s.verify_time:.2f} s, host {s.host_time:.2f} s")
    parts.append(f"{s.generation_tokens} tokens, {result.finish_reason}")
    parts.append(f"prompt {s.prompt_tokens} tokens, first token after {s.ttft:.2f} s")
    parts.append(f"peak memory {s.peak_memory / 1e9:.2f} GB")
    if s.sampling.get("temp"):
        parts.append(f"seed {s.sampling['seed']}")
    return " | ".join(parts)


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
    if not out["equal"]:
        pairs = enumerate(zip(result.tokens, plain.tokens, strict=False))
        at = next((i for i, (a, b) in pairs if a != b), min(len(result.tokens), len(plain.tokens)))
        out["first_difference"] = at
        if at < min(len(result.tokens), len(plain.tokens)):
            prefix = mx.array([ids + plain.tokens[:at]], mx.uint32)
            logits, _ = model.forward(prefix, model.make_cache(kv_bits, kv_group_size), last_logits_only=True)
            out["logit_margin"] = abs((logits[0, -1, result.tokens[at]] - logits[0, -1, plain.tokens[at]]).item())
    return out


def comparison(values: dict[str, Any]) -> str:
    speeds = "{tokens_per_second:.1f} against {plain_tokens_per_second:.1f} tokens/s plain, {speedup:.2f} x"
    if values["equal"]:
        return speeds.format(**values) + " | tokens equal"
    margin = f", logit margin {values['logit_margin']:.1e}" if "logit_margin" in values else ""
    return speeds.format(**values) + f" | tokens part at {values['first_difference']}{margin}"
