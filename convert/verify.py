"""What a conversion cost in quality: the converted model against its source, on a fixed set of prompts.

KL divergence of next-token distributions (nats, source against converted), top-1 agreement, perplexity of both, and,
with a drafter, the mean accepted length of both pairs in greedy decoding. Speed bought with quality is seen here.
"""

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_dflash.api import generate
from mlx_dflash.drafters import DFlashDrafter, load_drafter_folder
from mlx_dflash.targets import Target, load_target, tokenizer_of

from .drafter import DrafterPort
from .target import Port

TEXTS = (
    "The dinosaurs died out about 66 million years ago, when an asteroid roughly ten kilometres wide struck what is "
    "now Mexico. Dust and soot darkened the sky for months, plants stopped growing, and animals that fed on them "
    "starved.",
    'def reverse(text: str) -> str:\n    """Return the text backwards."""\n    out = []\n    for character in text:\n'
    '        out.insert(0, character)\n    return "".join(out)\n',
    "A train leaves at 9:40 and travels 210 km at 84 km/h. The journey takes 210 / 84 = 2.5 hours, so it arrives at "
    "12:10. If it were 10 km/h faster, it would need about 2 hours and 14 minutes.",
    "User: Write a short thank-you note to a colleague.\nAssistant: Dear Maria, thank you for staying late on Thursday "
    "to help me finish the report. It made all the difference, and I owe you a coffee.",
    "Der Zug hat heute zwanzig Minuten Verspätung. Quand le vent se lève, la mer devient grise. Mañana iremos al "
    "mercado a comprar pan, queso y aceitunas.",
    '{"name": "Ada", "born": 1815, "fields": ["mathematics", "computing"], "work": {"title": "Notes", "year": 1843}}',
)
LEAST_TOKENS = 8
DRAFT_TOKENS = 48  # generated a prompt when acceptance is measured


def prompts(tokenizer: Any, vocab: int) -> list[list[int]]:
    """Token ids of the texts. A tokenizer that has next to no words for one gets ids spread over its table instead."""
    out = []
    for number, text in enumerate(TEXTS):
        ids = list(tokenizer.encode(text))
        if len(ids) < LEAST_TOKENS or max(ids) >= vocab:
            ids = [(i * 7919 + number * 104729) % vocab for i in range(1, 33)]
        out.append(ids)
    return out


def measure(port: Port, folder: Path, draft: DrafterPort | None, draft_folder: Path | None) -> dict[str, Any]:
    """Compare the converted target in `folder` with its source `port`, one model in memory at a time.

    draft: the source's drafter; draft_folder: the converted one, None: the same one serves both.
    """
    tokenizer = tokenizer_of(folder)
    target = port.reference()
    texts = prompts(tokenizer, target.vocab_size)
    before = [log_probabilities(target, ids) for ids in texts]
    out: dict[str, Any] = {"prompts": len(texts), "tokens": sum(map(len, texts))}
    if draft is not None:
        drafter = draft.reference(target)
        out["block_size"] = drafter.block_size
        out["mean_accepted_length"] = {"source": accepted_length(target, tokenizer, drafter, texts)}
        del drafter
    del target
    mx.clear_cache()
    target, _ = load_target(folder)
    after = [log_probabilities(target, ids) for ids in texts]
    if draft is not None:
        drafter = draft.reference(target) if draft_folder is None else load_drafter_folder(draft_folder, target)
        out["mean_accepted_length"]["converted"] = accepted_length(target, tokenizer, drafter, texts)
    return out | compare(before, after, texts)


def log_probabilities(target: Target, ids: list[int]) -> np.ndarray:
    """(n, vocab) fp32 next-token log-probabilities at every position of a prompt."""
    logits, _ = target.forward(mx.array([ids]), target.make_cache())
    rows = logits[0].astype(mx.float32)
    return np.array(rows - mx.logsumexp(rows, axis=-1, keepdims=True))


def compare(before: list[np.ndarray], after: list[np.ndarray], texts: list[list[int]]) -> dict[str, Any]:
    kl = np.concatenate([(np.exp(a) * (a - b)).sum(-1) for a, b in zip(before, after, strict=True)])
    same = np.concatenate([a.argmax(-1) == b.argmax(-1) for a, b in zip(before, after, strict=True)])
    return {
        "kl_mean": float(kl.mean()),
        "kl_max": float(kl.max()),
        "top1_agreement": float(same.mean()),
        "perplexity": {"source": perplexity(before, texts), "converted": perplexity(after, texts)},
    }


def perplexity(rows: list[np.ndarray], texts: list[list[int]]) -> float:
    losses = [-p[np.arange(len(ids) - 1), ids[1:]] for p, ids in zip(rows, texts, strict=True)]
    return float(np.exp(np.concatenate(losses).mean()))


def accepted_length(target: Target, tokenizer: Any, drafter: DFlashDrafter, texts: list[list[int]]) -> float:
    """Tokens committed a drafting round, over all prompts, at the trained block size."""
    lengths: list[int] = []
    for ids in texts:
        run = generate(
            target,
            tokenizer,
            ids,
            draft_model=drafter,
            block_size=drafter.block_size,
            max_tokens=DRAFT_TOKENS,
        )
        lengths += run.stats.acceptance_lengths
    return float(np.mean(lengths)) if lengths else 0.0


def summary(measured: dict[str, Any]) -> list[str]:
    ppl = measured["perplexity"]
    lines = [
        f"quality on {measured['prompts']} prompts, {measured['tokens']} tokens: KL {measured['kl_mean']:.2e} (most "
        f"{measured['kl_max']:.2e}), top-1 agreement {measured['top1_agreement']:.1%}, perplexity "
        f"{ppl['source']:.3f} -> {ppl['converted']:.3f}"
    ]
    if (tau := measured.get("mean_accepted_length")) is not None:
        lines.append(
            f"mean accepted length at block {measured['block_size']}: {tau['source']:.2f} -> {tau['converted']:.2f}"
        )
    return lines
