"""A picture of a training's log: loss and mean accepted length by step (matplotlib, the `charts` extra)."""

import json
from pathlib import Path


def draw_log(log: Path, picture: Path) -> bool:
    """Draw a log.jsonl as a PNG; False where matplotlib is missing."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    rows = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
    figure = Figure(figsize=(8, 4), layout="constrained")
    loss = figure.subplots()
    loss.plot([r["step"] for r in rows], [r["loss"] for r in rows], color="#2f6f9f", label="loss")
    loss.set(xlabel="step", ylabel="loss")
    loss.grid(alpha=0.3)
    validated = [(r["step"], r["mean_accepted_length"]) for r in rows if "mean_accepted_length" in r]
    if validated:
        length = loss.twinx()
        length.plot(*zip(*validated, strict=True), color="#d1703c", marker="o", label="mean accepted length")
        length.set(ylabel="mean accepted length on held-out prompts")
    figure.legend(loc="outside upper center", ncols=2)
    figure.savefig(picture, dpi=110)
    return True
