"""Run one request through a torch reference and keep what every round saw and did.

Three loops: z-lab's `dflash_generate`, transformers' assisted generation with the Muse assistant, and an exact loop of
our own that never crops a target cache (for recurrent targets).  Knows nothing of families' configs or of files.
"""

import copy
import time
from dataclasses import dataclass, field

import dflash.model as zlab
import torch
from transformers import DynamicCache
from transformers.generation.candidate_generator import DFlashTokenCandidateGenerator

from .drafters import draft_logits, noise_rows, tap_ids

TIE = 1e-3  # a draft decided by less than this is not reproducible across float implementations


@dataclass
class Round:
    start: int  # absolute position of the anchor, the last committed token
    drafts: list[int]
    taps: torch.Tensor | None = None  # (ctx, taps * hidden) new context rows given to the drafter
    logits: torch.Tensor | None = None  # (drafts, vocab)
    gap: float = float("inf")  # smallest margin by which a draft was chosen
    accept: int = 0  # tokens committed: accepted drafts + the target's own, after the cut


@dataclass
class Run:
    tokens: list[int] = field(default_factory=list)
    rounds: list[Round] = field(default_factory=list)

    def outcome(self) -> tuple:
        ctx = [0 if r.taps is None else r.taps.shape[0] for r in self.rounds]
        return self.tokens, ctx, [(r.start, r.drafts, r.accept) for r in self.rounds]


def forward_with_taps(target, ids, layers, cache=None):
    """-> (logits (b, n, vocab), taps (b, n, taps * hidden))"""
    out = target(ids, past_key_values=cache, use_cache=cache is not None, output_hidden_states=True)
    return out.logits, torch.cat([out.hidden_states[i + 1] for i in layers], -1)


@torch.inference_mode()
def greedy(target, ids, n: int) -> tuple[torch.Tensor, float]:
    """Plain greedy decoding -> (tokens (b, n), smallest gap between the two best logits)."""
    cache = DynamicCache(config=target.config)
    gap, tokens, rows = float("inf"), [], ids
    for _ in range(n):
        logits = target(rows, past_key_values=cache, use_cache=True).logits[:, -1]
        gap = min(gap, _top2_gap(logits))
        rows = logits.argmax(-1, keepdim=True)
        tokens.append(rows)
    return torch.cat(tokens, 1), gap


def _top2_gap(logits: torch.Tensor) -> float:
    best = logits.topk(2, -1).values
    return (best[..., 0] - best[..., 1]).min().item()


def draft_gap(drafter, hidden, logits, anchor: int, drafts: list[int]) -> float:
    """Smallest margin of a choice.  With DFlash 2 that is the selector's score against every rival that is, or nearly
    is, among the top k, and how far inside the top k the choice lies.  hidden (n, hidden), logits (n, vocab)."""
    selector = getattr(drafter, "candidate_selector", None)
    if selector is None:
        return _top2_gap(logits)
    before = selector.predecessor_codebook.weight[[anchor, *drafts[:-1]]]  # (n, rank)
    scores = logits + (before * selector.hidden_projection(hidden)) @ selector.successor_codebook.weight.T
    edge = logits.topk(selector.top_k + 1, -1).values[:, -2:]  # (n, 2): the last candidate, the first one left out
    chosen = torch.tensor(drafts)[:, None]
    rivals = scores.masked_fill(logits < edge[:, :1] - TIE, -torch.inf).scatter(1, chosen, -torch.inf)
    margin = scores.gather(1, chosen)[:, 0] - rivals.max(-1).values
    inside = logits.gather(1, chosen)[:, 0] - edge[:, 1]
    return torch.minimum(margin, inside).min().item()


@torch.inference_mode()
def run_zlab(drafter, target, ids, n: int, stop: int | None = None) -> Run:
    """z-lab's own loop, observed through hooks."""
    fed, drafted, verified = [], [], []
    compute_logits = drafter.compute_logits

    def spy(hidden, head):
        logits = compute_logits(hidden, head)
        drafted.append((hidden[0].clone(), logits[0].clone()))
        return logits

    drafter.compute_logits = spy
    hooks = [
        drafter.register_forward_pre_hook(
            lambda _, a, k: fed.append((k["target_hidden"][0].clone(), k["position_ids"][0].clone())), with_kwargs=True
        ),
        target.register_forward_pre_hook(
            lambda _, a, k: verified.append((a[0] if a else k["input_ids"])[0].tolist()), with_kwargs=True
        ),
    ]
    clock, zlab._cuda_time = zlab._cuda_time, time.perf_counter  # the wheel's clock needs a GPU
    try:
        out = zlab.dflash_generate(drafter, target, ids, n, None if stop is None else [stop], return_stats=True)
    finally:
        zlab._cuda_time = clock
        del drafter.compute_logits
        for hook in hooks:
            hook.remove()
    run, start = Run(out.output_ids[0, ids.shape[1] :].tolist()), ids.shape[1]
    for block, accept in zip(verified[1:], out.acceptance_lengths, strict=True):
        r = Round(start, block[1:], accept=accept)
        if r.drafts:
            (r.taps, positions), (hidden, r.logits) = fed.pop(0), drafted.pop(0)
            if positions.tolist() != list(range(start - r.taps.shape[0], start + len(block))):
                raise ValueError(f"unexpected drafter positions {positions.tolist()} at {start}")
            r.gap = draft_gap(drafter, hidden, r.logits, block[0], r.drafts)
        run.rounds.append(r)
        start += accept
    return run


@torch.no_grad()
def run_muse(drafter, target, ids, n: int, stop: int | None = None) -> Run:
    """transformers' `generate(speculation_type="dflash")`, observed through its candidate generator."""
    run, committed, fed = Run(), [], []
    generator = DFlashTokenCandidateGenerator
    get_candidates, update = generator.get_candidates, generator.__dict__.get("update_candidate_strategy")

    def spy_candidates(self, input_ids, **kw):
        candidates, logits = get_candidates(self, input_ids, **kw)
        if not kw["is_first_iteration"]:
            length = input_ids.shape[1]
            r = Round(length - 1, candidates[0, length:].tolist())
            if logits is not None:
                r.taps, r.logits, r.gap = fed.pop(0), logits[0].clone(), _top2_gap(logits[0])
            run.rounds.append(r)
        return candidates, logits

    def spy_update(self, input_ids, scores, num_matches):
        committed.append(int(num_matches) + 1)

    hook = drafter.register_forward_pre_hook(
        lambda _, a, k: fed.append(k["context_hidden_states"][0].clone()), with_kwargs=True
    )
    generator.get_candidates, generator.update_candidate_strategy = spy_candidates, spy_update
    try:
        out = target.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            assistant_model=drafter,
            speculation_type="dflash",
            do_sample=False,
            max_new_tokens=n,
            eos_token_id=stop,
            pad_token_id=0,
        )
    finally:
        hook.remove()
        generator.get_candidates = get_candidates
        if update is None:
            del generator.update_candidate_strategy
        else:
            generator.update_candidate_strategy = update
    run.tokens = out[0, ids.shape[1] :].tolist()
    for r, accept in zip(run.rounds, committed[1:], strict=True):  # the first pass is the prefill
        r.accept = accept
    return run


@torch.no_grad()
def run_exact(drafter, target, ids, n: int, stop: int | None = None, draft=None, context=None) -> Run:
    """DFlash with a z-lab drafter on any target: each block is verified on a copy of the committed cache, which then
    advances by the committed tokens only.  (`crop()` in transformers does not rewind recurrent states, so on
    gated-delta targets z-lab's loop silently keeps rejected tokens in them.)  draft, context: how another drafter
    drafts, and what it remembers."""
    layers, prompt = tap_ids(drafter), ids.shape[1]
    cache, draft = DynamicCache(config=target.config), draft or _draft
    if context is None:
        context = DynamicCache(config=drafter.config)
        context.activate_past_recording()
    logits, taps = forward_with_taps(target, ids, layers, cache)
    run = Run([int(logits[0, -1].argmax())])
    while len(run.tokens) < n and stop not in run.tokens:
        r = Round(prompt + len(run.tokens) - 1, [])
        left = n - len(run.tokens)
        width = min(drafter.block_size, left + 1)
        block = torch.tensor([[run.tokens[-1]] + [drafter.mask_token_id] * (width - 1)])
        if width > 1:
            draft(drafter, target, taps, block, context, r)
        trial = copy.deepcopy(cache)
        logits, taps = forward_with_taps(target, block, layers, trial)
        choice = logits[0].argmax(-1).tolist()
        kept = next((i for i, t in enumerate(r.drafts) if t != choice[i]), len(r.drafts))
        new = choice[: min(kept + 1, left)]
        if stop in new:
            new = new[: new.index(stop) + 1]
        r.accept = len(new)
        taps = taps[:, : r.accept]
        if r.accept == width:
            cache = trial
        else:
            target(block[:, : r.accept], past_key_values=cache, use_cache=True)
        run.tokens += new
        run.rounds.append(r)
    return run


def _draft(drafter, target, taps, block, context, r: Round) -> None:
    """Fill `block[:, 1:]` with drafts and note them in `r`; the context keeps no noise rows."""
    positions = torch.arange(r.start - taps.shape[1], r.start + block.shape[1])[None]
    noise = noise_rows(drafter, target, block)
    hidden = drafter(
        target_hidden=taps, noise_embedding=noise, position_ids=positions, past_key_values=context, use_cache=True
    )[:, 1:]
    context.crop(r.start - context.get_seq_length())
    logits = draft_logits(drafter, target, hidden)
    if hasattr(drafter, "propose"):
        block[:, 1:] = drafter.propose(hidden, block[:, 0], target.get_output_embeddings(), 0.0)[0]
    else:
        block[:, 1:] = logits.argmax(-1)
    r.drafts, r.taps, r.logits = block[0, 1:].tolist(), taps[0], logits[0]
    r.gap = draft_gap(drafter, hidden[0], logits[0], int(block[0, 0]), r.drafts)
