"""The arrays of golden.npz: which requests are recorded, and under which keys (README.md lists them).

Takes a finished pair; knows nothing of how it was built or where arrays are stored.
"""

from dataclasses import dataclass, field

import numpy as np
import torch

from . import record
from .drafters import is_muse_assistant, is_speculators, tap_ids
from .record import Run
from .targets import MASK

HYBRIDS = ("qwen3_next", "qwen3_5", "qwen3_5_moe")
TRUNCATIONS = (1, 2, 3, 9, 10)  # max_new_tokens of the short runs
LOGIT_ROUNDS = 3  # rounds of the longest context whose draft logits and taps are kept; the others keep one


@dataclass
class Goldens:
    arrays: dict[str, np.ndarray] = field(default_factory=dict)
    target_gap: float = float("inf")
    draft_gap: float = float("inf")
    tokens_seen: set[int] = field(default_factory=set)

    def accept_lists(self) -> dict[int, list[int]]:
        return {int(n): self.arrays[f"p{n}_accept"].tolist() for n in self.arrays["contexts"]}


def reference_loop(family: str):
    if is_muse_assistant(family):
        return record.run_muse
    if is_speculators(family):
        from .vllm_speculators import run

        return run
    return record.run_exact if family in HYBRIDS else record.run_zlab


def record_all(family: str, target, drafter, prompts: dict[int, torch.Tensor], n: int, block: int) -> Goldens:
    """prompts: context length L -> ids (1, L)."""
    loop = reference_loop(family)
    out, runs = Goldens(), {}
    out.arrays |= {
        "contexts": ints(prompts),
        "new_tokens": ints(n),
        "block_size": ints(block),
        "mask_token_id": ints(MASK),
        "target_layer_ids": ints(tap_ids(drafter)),
    }
    for length, ids in prompts.items():
        runs[length] = run = loop(drafter, target, ids, n)
        _note(out, run)
        if loop is record.run_zlab:
            require(
                record.run_exact(drafter, target, ids, n).outcome() == run.outcome(), "the exact loop differs", length
            )
        out.arrays |= _target_arrays(out, target, drafter, ids, run, n)
        out.arrays |= _run_arrays(length, run, block, LOGIT_ROUNDS if length == max(prompts) else 1)
    longest = max(prompts)
    for i, r in enumerate(runs[longest].rounds[1 : LOGIT_ROUNDS + 1], 1):
        if r.taps is not None:
            out.arrays[f"p{longest}_round_taps_{i}"] = r.taps.numpy()
    if is_speculators(family):
        from .vllm_speculators import non_causal_logits

        out.arrays[f"p{longest}_dlogits_non_causal"] = non_causal_logits(drafter, target, prompts[longest]).numpy()
    cut = sorted(prompts)[-2]
    for m in TRUNCATIONS:
        run = loop(drafter, target, prompts[cut], m)
        _note(out, run)
        out.arrays |= _short_arrays(f"trunc_{cut}_{m}_", run)
    stopped = max(prompts, key=lambda length: max(r.accept for r in runs[length].rounds))
    stop = choose_stop(runs[stopped])
    out.arrays[f"stop_{stopped}_id"] = ints(stop)
    out.arrays |= _short_arrays(f"stop_{stopped}_", loop(drafter, target, prompts[stopped], n, stop))
    return out


def choose_stop(run: Run) -> int:
    """A token whose first occurrence lies inside a committed block, if possible in one of three tokens or more."""
    best, at = (0, 0), 1  # the prefill's token is run.tokens[0], in no round
    for r in run.rounds:
        for i in range(at, at + r.accept - 1):
            if run.tokens.index(run.tokens[i]) == i:
                best = max(best, (min(r.accept, 3), i))
        at += r.accept
    return run.tokens[best[1]] if best[0] else run.tokens[-1]


def _note(out: Goldens, run: Run) -> None:
    out.tokens_seen |= set(run.tokens)
    out.draft_gap = min([out.draft_gap, *(r.gap for r in run.rounds)])


@torch.inference_mode()
def _target_arrays(out: Goldens, target, drafter, ids, run: Run, n: int) -> dict[str, np.ndarray]:
    logits, taps = record.forward_with_taps(target, ids, tap_ids(drafter))
    greedy, gap = record.greedy(target, ids, n)
    out.target_gap = min(out.target_gap, gap)
    require(run.tokens == greedy[0].tolist(), "speculation changed the text", ids.shape[1])
    k = f"p{ids.shape[1]}_"
    return {
        k + "ids": ints(ids[0]),
        k + "taps": taps[0].numpy(),
        k + "logits": logits[0, -1].numpy(),
        k + "greedy": ints(greedy[0]),
    }


def _run_arrays(length: int, run: Run, block: int, logit_rounds: int) -> dict[str, np.ndarray]:
    k, rounds = f"p{length}_", run.rounds
    arrays = {
        k + "tokens": ints(run.tokens),
        k + "accept": ints([r.accept for r in rounds]),
        k + "start": ints([r.start for r in rounds]),
        k + "ctx": ints([0 if r.taps is None else r.taps.shape[0] for r in rounds]),
        k + "vsize": ints([1 + len(r.drafts) for r in rounds]),
        k + "drafts": ints([r.drafts + [-1] * (block - 1 - len(r.drafts)) for r in rounds]),
    }
    full = [i for i, r in enumerate(rounds) if r.logits is not None and r.logits.shape[0] == block - 1]
    arrays[k + "dlogits"] = np.stack([rounds[i].logits.numpy() for i in full[:logit_rounds]])
    arrays[k + "dlogits_last"] = rounds[full[-1]].logits.numpy()
    arrays[k + "dlogits_last_round"] = ints(full[-1])
    return arrays


def _short_arrays(k: str, run: Run) -> dict[str, np.ndarray]:
    return {
        k + "tokens": ints(run.tokens),
        k + "accept": ints([r.accept for r in run.rounds]),
        k + "vsize": ints([1 + len(r.drafts) for r in run.rounds]),
    }


def ints(values) -> np.ndarray:
    return np.array(values if isinstance(values, int | list) else [int(v) for v in values], np.int32)


def require(ok: bool, what: str, length: int) -> None:
    if not ok:
        raise ValueError(f"{what} (context {length})")
