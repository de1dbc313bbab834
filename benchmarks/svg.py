"""Small charts as SVG text, so that a report is one file that needs nothing else."""

import html
import math
from collections.abc import Mapping, Sequence

COLOURS = ("#2f6f9f", "#d1703c", "#4f9d69", "#8a5fa8", "#b5485d", "#7d7d7d")
WIDTH, HEIGHT, LEFT, BOTTOM, TOP, RIGHT = 640, 300, 56, 44, 34, 150


def bars(
    title: str,
    values: Mapping[str, float | None],
    intervals: Mapping[str, Sequence[float]] | None = None,
    unit: str = "",
    line: float | None = None,
) -> str:
    """Horizontal bars. intervals: by the same names, drawn as whiskers; line: a value marked across all bars."""
    known = {name: value for name, value in values.items() if value is not None}
    if not known:
        return ""
    spans = intervals or {}
    most = max([*known.values(), *(span[1] for span in spans.values()), line or 0]) * 1.08 or 1.0
    row, left = 24, 130
    height = TOP + row * len(known) + 26
    scale = (WIDTH - left - 90) / most
    parts = [text(8, 20, title, "title")]
    for i, (name, value) in enumerate(known.items()):
        y = TOP + i * row
        parts.append(text(left - 8, y + 15, name, "end"))
        parts.append(
            f'<rect x="{left}" y="{y + 3}" width="{value * scale:.1f}" height="{row - 8}" fill="{COLOURS[0]}"/>'
        )
        end = value
        if name in spans:
            low, high = spans[name]
            end = max(end, high)
            parts.append(
                stroke([(left + low * scale, y + row / 2 - 1), (left + high * scale, y + row / 2 - 1)], "#222")
            )
        parts.append(text(left + end * scale + 6, y + 15, f"{value:.3g}{unit}"))
    if line is not None:
        x = left + line * scale
        parts.append(stroke([(x, TOP), (x, height - 22)], "#b5485d", dashed=True))
        parts.append(text(x, height - 8, f"{line:g}{unit}", "middle"))
    return wrap(parts, height)


def curves(
    title: str, series: Mapping[str, Sequence[tuple[float, float]]], across: str, up: str, log_x: bool = False
) -> str:
    """Lines through (x, y) points, one a series, with their axes named."""
    series = {name: points for name, points in series.items() if points}
    if not series:
        return ""
    xs = sorted({x for points in series.values() for x, _ in points})
    ys = [y for points in series.values() for _, y in points]
    least, most = (math.log2(xs[0]), math.log2(xs[-1])) if log_x else (xs[0], xs[-1])
    top = max(ys) * 1.1 or 1.0

    def place(x: float, y: float) -> tuple[float, float]:
        share = ((math.log2(x) if log_x else x) - least) / ((most - least) or 1)
        return LEFT + share * (WIDTH - LEFT - RIGHT), HEIGHT - BOTTOM - y / top * (HEIGHT - BOTTOM - TOP)

    parts = [
        text(8, 20, title, "title"),
        text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 6, across, "middle"),
        text(8, 36, up),
    ]
    for tick in nice(top):
        _, y = place(xs[0], tick)
        parts.append(stroke([(LEFT, y), (WIDTH - RIGHT, y)], "#ddd"))
        parts.append(text(LEFT - 6, y + 4, f"{tick:g}", "end"))
    for x in xs if len(xs) <= 10 else xs[:: len(xs) // 8]:
        parts.append(text(place(x, 0)[0], HEIGHT - BOTTOM + 16, short(x), "middle"))
    for i, (name, points) in enumerate(series.items()):
        colour = COLOURS[i % len(COLOURS)]
        placed = [place(x, y) for x, y in sorted(points)]
        parts.append(stroke(placed, colour, width=2))
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in placed]
        y = TOP + 16 * i + 8
        parts.append(f'<rect x="{WIDTH - RIGHT + 10}" y="{y - 8}" width="10" height="10" fill="{colour}"/>')
        parts.append(text(WIDTH - RIGHT + 26, y + 1, name))
    return wrap(parts, HEIGHT)


def nice(top: float) -> list[float]:
    """Four or so round values from 0 up to `top`."""
    step = 10 ** math.floor(math.log10(top / 4))
    step *= next(n for n in (1, 2, 2.5, 5, 10) if top / (step * n) <= 5)
    return [i * step for i in range(int(top / step) + 1)]


def short(x: float) -> str:
    return f"{x / 1024:g}k" if x >= 1024 and x % 1024 == 0 else f"{x:g}"


def text(x: float, y: float, said: str, kind: str = "") -> str:
    anchors = {"end": ' text-anchor="end"', "middle": ' text-anchor="middle"', "title": ' font-weight="600"'}
    return f'<text x="{x:.1f}" y="{y:.1f}"{anchors.get(kind, "")}>{html.escape(said)}</text>'


def stroke(points: Sequence[tuple[float, float]], colour: str, width: float = 1, dashed: bool = False) -> str:
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    dash = ' stroke-dasharray="4 3"' if dashed else ""
    return f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="{width}"{dash}/>'


def wrap(parts: Sequence[str], height: float) -> str:
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:.0f}" role="img" font-size="12">'
    return head + "".join(parts) + "</svg>"
