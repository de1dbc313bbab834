"""Charts of results, drawn with matplotlib (the `charts` extra)."""

from pathlib import Path
from typing import Any


def draw_growth(result: dict[str, Any], path: Path) -> None:
    """Time of a round against context, and memory and time to first token against the prompt's length; a PNG."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise SystemExit("charts need matplotlib: pip install 'mlx-dflash[charts]'") from None
    rows = result["rows"]
    lengths = [row["prompt_tokens"] for row in rows]
    figure = Figure(figsize=(13, 4), layout="constrained")
    rounds, memory, first = figure.subplots(1, 3)
    for width in rows[0]["round_seconds"]:
        times = [row["round_seconds"][width] * 1e3 for row in rows]
        rounds.plot(lengths, times, marker="o", label=f"{width} row{'s' if int(width) > 1 else ''}")
    for name in ("plain", "drafter"):
        label = "plain" if name == "plain" else "with the drafter"
        memory.plot(lengths, [row["held_bytes"][name] / 1e6 for row in rows], marker="o", label=f"held, {label}")
        peaks = [row["peak_bytes"][name] / 1e6 for row in rows]
        memory.plot(lengths, peaks, marker="o", linestyle="--", label=f"peak, {label}")
        first.plot(lengths, [row["ttft"][name] for row in rows], marker="o", label=label)
    rounds.set(title="time of a round", ylabel="ms")
    memory.set(title="memory beyond the weights", ylabel="MB")
    first.set(title="time to first token", ylabel="s", yscale="log")
    for axes in (rounds, memory, first):
        axes.set(xscale="log", xlabel="tokens of context")
        axes.set_xticks(lengths, [str(n) if n < 1024 else f"{n // 1024}k" for n in lengths], minor=False)
        axes.minorticks_off()
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
