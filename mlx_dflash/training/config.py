"""Everything that defines a training run, in one small file that is stored beside its checkpoints."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class TrainingConfig:
    """layers, block_size, taps: the drafter's shape; mask_token_id: a token the target never emits.

    A step takes `sequences` answers with `anchors` blocks each, all of one width drawn from `widths`. The loss of draft
    k is weighted exp(-(k - 1) / gamma). `targets` is what the drafts are fitted to: the target's "tokens" (cross
    entropy) or its "distribution" (cross entropy against its softmax, plus `alignment` x (1 - cosine) between the
    drafter's and the target's final hidden states). The softmax is over the step's own labels, the `frequent` most
    common tokens and `negatives` drawn ones, whose logits carry the log of their sampling rate. `feature_noise`:
    standard deviation of Gaussian noise on the scaled features, against learning the answers by heart.

    Every `validate_every` steps (0: never) held-out prompts, `validation_prompts` of each task class, are decoded up to
    `validation_tokens` tokens with the drafter as it is, by the real loop at the whole block; training stops when their
    mean accepted length has not risen for `patience` times.
    """

    layers: int = 2
    block_size: int = 8
    taps: tuple[int, ...] = (1, 8, 14, 20, 27)
    mask_token_id: int = 4
    steps: int = 2000
    sequences: int = 4
    anchors: int = 24
    widths: tuple[int, ...] = (8, 8, 8, 5, 6, 4)
    gamma: float = 4.0
    targets: str = "distribution"
    alignment: float = 2.0
    feature_noise: float = 0.3
    learning_rate: float = 1e-3
    warmup: int = 100
    weight_decay: float = 0.1
    frequent: int = 2048
    negatives: int = 2048
    seed: int = 0
    validate_every: int = 500
    validation_prompts: int = 2
    validation_tokens: int = 48
    patience: int = 6

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self), indent=1) + "\n")


def load_config(path: Path) -> TrainingConfig:
    values: dict[str, Any] = json.loads(path.read_text())
    lists = {k: tuple(v) for k, v in values.items() if isinstance(v, list)}
    return TrainingConfig(**(values | lists))
