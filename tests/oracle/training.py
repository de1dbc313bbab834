"""One training step's loss and gradient by torch, and the draft logits of a folder that `export` wrote.

    python -m tests.oracle.training            # check tests/golden_training/golden.npz against a new recording
    python -m tests.oracle.training --write    # record it anew

The step is one of `mlx_dflash.training`: anchors in the golden Llama pair's own greedy text, blocks one by one instead
of packed, the whole vocabulary as softmax, autograd. The exported folder is `tests/golden_training/exported`.
"""

import argparse
from pathlib import Path

import numpy as np
import torch
from torch.nn import functional

from .checkpoints import load_drafter, load_target
from .drafters import draft_logits, noise_rows, tap_ids
from .record import forward_with_taps
from .rederive import differences

GOLDEN = Path(__file__).parents[1] / "golden"
TRAINING = GOLDEN.with_name("golden_training")
PATH = TRAINING / "golden.npz"
WIDTH, GAMMA, ALIGNMENT = 8, 4.0, 2.0
ANCHORS = (0, 3, 11, -4)  # in the answer; the last block passes the text's end
KEPT = ("fc.weight", "hidden_norm.weight", "norm.weight", "layers.0.self_attn.q_proj.weight",
        "layers.0.self_attn.k_norm.weight", "layers.1.self_attn.o_proj.weight", "layers.2.mlp.down_proj.weight",
        "layers.2.input_layernorm.weight")  # fmt: skip


def texts() -> list[tuple[list[int], list[int]]]:
    """(prompt, answer) of the two longest golden contexts."""
    with np.load(GOLDEN / "llama" / "golden.npz") as golden:
        longest = sorted(int(n) for n in golden["contexts"])[-2:]
        return [(golden[f"p{n}_ids"].tolist(), golden[f"p{n}_greedy"].tolist()) for n in longest]


def anchors_of(prompt: list[int], answer: list[int]) -> list[int]:
    return sorted(len(prompt) + (a if a >= 0 else len(answer) + a) for a in ANCHORS)


def step(kind: str) -> dict[str, np.ndarray]:
    """Loss and gradients; kind: what the drafts are fitted to, "tokens" or "distribution"."""
    target, drafter = (
        load_target("llama", GOLDEN / "llama" / "target"),
        load_drafter("llama", GOLDEN / "llama" / "draft"),
    )
    drafter.train(False).requires_grad_(True)
    target.requires_grad_(False)
    total, weight = torch.zeros(()), torch.zeros(())
    for prompt, answer in texts():
        text = prompt + answer
        with torch.no_grad():
            out = target(torch.tensor([text]), output_hidden_states=True)
            _, taps = forward_with_taps(target, torch.tensor([text]), tap_ids(drafter))
        for anchor in anchors_of(prompt, answer):
            block = torch.tensor([[text[anchor]] + [drafter.mask_token_id] * (WIDTH - 1)])
            hidden = drafter(
                target_hidden=taps[:, :anchor],
                noise_embedding=noise_rows(drafter, target, block),
                position_ids=torch.arange(anchor + WIDTH)[None],
            )[0, 1:]
            logits = draft_logits(drafter, target, hidden)
            for k in range(1, min(WIDTH, len(text) - anchor)):
                w = torch.exp(torch.tensor(-(k - 1) / GAMMA))
                if kind == "tokens":
                    loss = functional.cross_entropy(logits[k - 1], torch.tensor(text[anchor + k]))
                else:
                    chose = anchor + k - 1
                    loss = functional.cross_entropy(logits[k - 1], out.logits[0, chose].softmax(-1))
                    cosine = functional.cosine_similarity(hidden[k - 1], out.hidden_states[-1][0, chose], dim=-1)
                    loss = loss + ALIGNMENT * (1 - cosine)
                total, weight = total + w * loss, weight + w
    loss = total / weight
    loss.backward()
    grads = dict(drafter.named_parameters())
    found = {f"{kind}.grad.{name}": grads[name].grad.numpy() for name in KEPT}
    return {f"{kind}.loss": np.array(loss.item(), np.float32), **found}


def exported() -> dict[str, np.ndarray]:
    """Draft logits of the exported folder, loaded by z-lab's package, after the shorter text's prompt."""
    target, drafter = (
        load_target("llama", GOLDEN / "llama" / "target"),
        load_drafter("llama", TRAINING / "exported"),
    )
    prompt, answer = texts()[0]
    with torch.no_grad():
        _, taps = forward_with_taps(target, torch.tensor([prompt]), tap_ids(drafter))
        block = torch.tensor([[answer[0]] + [drafter.mask_token_id] * (WIDTH - 1)])
        positions = torch.arange(len(prompt) + WIDTH)[None]
        noise = noise_rows(drafter, target, block)
        hidden = drafter(target_hidden=taps, noise_embedding=noise, position_ids=positions)[:, 1:]
        return {"export.logits": draft_logits(drafter, target, hidden)[0].numpy()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    arrays = step("tokens") | step("distribution") | exported()
    if args.write:
        np.savez_compressed(PATH, **arrays)
        return 0
    with np.load(PATH) as stored:
        found = differences(dict(stored), arrays)
    print("training: " + ("differs" if found else "as recorded"), *found, sep="\n  ")
    return 1 if found else 0


if __name__ == "__main__":
    raise SystemExit(main())
