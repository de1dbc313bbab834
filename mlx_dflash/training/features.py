"""The target's tapped hidden states of every training sample, computed once and kept on disk as fp16."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from ..targets import Target
from .data import Sample


@dataclass
class Features:
    """rows: (tokens of all samples, taps * hidden) fp16, a memory map; starts: each sample's first row, and the end."""

    rows: Any
    starts: list[int]

    def of(self, index: int) -> np.ndarray:
        return np.asarray(self.rows[self.starts[index] : self.starts[index + 1]])


def cache_features(target: Target, samples: list[Sample], taps: tuple[int, ...], folder: Path) -> Features:
    """Compute, or open if already there for the same samples and taps, the features of prompt + answer."""
    starts = np.cumsum([0] + [len(s.prompt) + len(s.answer) for s in samples]).tolist()
    key = {"taps": list(taps), "starts": starts}
    path, done = folder / "features.npy", folder / "features.json"
    if not (done.exists() and json.loads(done.read_text()) == key):
        shape = (starts[-1], len(taps) * target.hidden_size)
        rows = np.lib.format.open_memmap(path, mode="w+", dtype=np.float16, shape=shape)
        for i, sample in enumerate(samples):
            ids = mx.array([sample.prompt + sample.answer], mx.uint32)
            _, features = target.forward(ids, target.make_cache(), taps, last_logits_only=True)
            assert features is not None
            rows[starts[i] : starts[i + 1]] = np.array(features[0].astype(mx.float16))
        rows.flush()
        done.write_text(json.dumps(key))
    return Features(np.load(path, mmap_mode="r"), starts)


def tap_scales(features: Features, taps: int, samples: int = 64) -> list[float]:
    """1 / the median rms of each tap over positions >= 1.

    Position 0 carries activations some hundred times larger; a mean over all positions would be ruled by them.
    """
    rms = []
    for i in range(min(samples, len(features.starts) - 1)):
        rows = features.of(i)[1:].astype(np.float32)
        rms.append(np.sqrt((rows.reshape(len(rows), taps, -1) ** 2).mean(-1)))
    return [float(1 / m) for m in np.median(np.concatenate(rms), axis=0)]
