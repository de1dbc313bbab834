"""vLLM's `speculators` package as a reference: its own DFlash model and masks, one block at a time.

The package trains only, and has no generation loop: `record.run_exact` drives it. Needs a venv of its own (README.md).
"""

import torch
from safetensors.torch import load_file, save_file
from speculators.config import SpeculatorsConfig, VerifierConfig
from speculators.models.dflash import DFlashDraftModel, DFlashSpeculatorConfig
from speculators.proposals.greedy import GreedyTokenProposalConfig

from . import record

DROPPED = 7  # ids whose last decimal digit this is can't be drafted


def new_drafter(layer_config, vocab: int) -> DFlashDraftModel:
    """layer_config: a Qwen3Config with z-lab's extra keys."""
    extra = layer_config.dflash_config
    block = layer_config.block_size
    for name in ("dflash_config", "block_size", "num_target_layers"):
        delattr(layer_config, name)
    layer_config._attn_implementation = "eager"
    kept = [i for i in range(vocab) if i % 10 != DROPPED]
    config = DFlashSpeculatorConfig(
        transformer_layer_config=layer_config,
        draft_vocab_size=len(kept),
        block_size=block,
        mask_token_id=extra["mask_token_id"],
        aux_hidden_state_layer_ids=[i + 1 for i in extra["target_layer_ids"]],
        speculators_config=SpeculatorsConfig(
            algorithm="dflash",
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=block - 1)],
            default_proposal_method="greedy",
            verifier=VerifierConfig(name_or_path=None, architectures=["Qwen3ForCausalLM"]),
        ),
    )
    model = DFlashDraftModel(config)
    model.d2t.copy_(torch.tensor(kept) - torch.arange(len(kept)))
    model.t2d[kept] = True
    return model


def draft_ids(drafter, ids: torch.Tensor) -> torch.Tensor:
    """Target ids -> draft ids, -100 where the drafter has none."""
    place = torch.cumsum(drafter.t2d.long(), 0) - 1
    return torch.where(drafter.t2d[ids], place[ids], -100)


def block_states(drafter, taps: torch.Tensor, block: torch.Tensor) -> torch.Tensor:
    """The package's forward for one anchor: taps (1, s, taps * hidden) of all positions before it, block (1, rows) ids
    [anchor, mask, ...] -> normed states (1, rows, hidden)."""
    start, rows = taps.shape[1], block.shape[1]
    total = start + 1 + rows  # the package wants a block's room behind an anchor; those positions are hidden from it
    hidden = torch.cat([taps, torch.zeros(1, total - start, taps.shape[2])], 1)
    ids = torch.zeros(1, total, dtype=torch.long)
    ids[0, start] = block[0, 0]
    here = torch.zeros(1, total)
    here[0, start] = 1
    size, drafter.block_size = drafter.block_size, rows
    try:
        states, _, _, _, positions = drafter._backbone_forward(
            hidden,
            ids,
            here,
            torch.zeros(1, total, drafter.hidden_size),
            torch.zeros(1, total, dtype=torch.long),
            max_anchors=1,
        )
    finally:
        drafter.block_size = size
    if positions.tolist() != list(range(start, start + rows)):
        raise ValueError(f"unexpected block positions {positions.tolist()} at {start}")
    return states


def run(drafter, target, ids, n: int, stop: int | None = None) -> record.Run:
    return record.run_exact(drafter, target, ids, n, stop, draft, [])


def draft(drafter, target, taps, block, context: list[torch.Tensor], r: record.Round) -> None:
    """Fill `block[:, 1:]` with drafts in target ids and note them in `r`; its logits are over the draft vocabulary."""
    context.append(taps)
    hidden = block_states(drafter, torch.cat(context, 1), block)[:, 1:]
    logits = drafter.lm_head(hidden)
    ids = logits.argmax(-1)
    block[:, 1:] = ids + drafter.d2t[ids]
    r.drafts, r.taps, r.logits = block[0, 1:].tolist(), taps[0], logits[0]
    r.gap = record.draft_gap(drafter, hidden[0], logits[0], int(block[0, 0]), r.drafts)


@torch.no_grad()
def non_causal_logits(drafter, target, ids) -> torch.Tensor:
    """Draft logits (rows - 1, draft vocabulary) of a run's first block with `sliding_window_non_causal: true`."""
    logits, taps = record.forward_with_taps(target, ids, [i - 1 for i in drafter.target_layer_ids])
    block = torch.full((1, drafter.block_size), drafter.mask_token_id)
    block[0, 0] = logits[0, -1].argmax()
    drafter.sliding_window_non_causal = True
    try:
        return drafter.lm_head(block_states(drafter, taps, block)[0, 1:])
    finally:
        drafter.sliding_window_non_causal = False


def save_drafter(drafter, folder) -> None:
    """Embedding and head with the rest, as the package did before 0.9 and as files on the hub have it."""
    drafter.config.save_pretrained(folder)
    tensors = {k: v.contiguous() for k, v in drafter.state_dict().items() if not k.startswith("verifier_")}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def load_drafter(folder) -> DFlashDraftModel:
    config = DFlashSpeculatorConfig.from_pretrained(folder)
    config.transformer_layer_config._attn_implementation = "eager"
    model = DFlashDraftModel(config)
    missing, unexpected = model.load_state_dict(load_file(folder / "model.safetensors"), strict=False)
    if unexpected or any(not name.startswith("verifier_") for name in missing):
        raise ValueError(f"{folder} does not fit the package's model: {missing}, {unexpected}")
    return model.eval().float().requires_grad_(False)
