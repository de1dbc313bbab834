"""What a round costs on this machine, in seconds, by where its drafts come from and how many rows it verifies.

Knows rows, contexts and seconds, and carries how often drafts were kept; nothing of models or text. A table comes from
a measurement (`calibrate`) or from an earlier run, and every round that is timed corrects it: machines throttle, and a
curve measured at a short context says little about a long one.
"""

import json
import math
from dataclasses import dataclass, field
from pathlib import Path

from .acceptance import RUNS, Tally

Kind = tuple[str, int]  # who drafts a round, and the rows it verifies, the anchor included
PLAIN, DRAFTER = "plain", "drafter"
PLAIN_ROUND: Kind = (PLAIN, 1)
SHARED_GAIN = 0.15  # of a surprise goes to what all rounds share: the machine's pace, the context
OWN_GAIN = 0.1  # and to the kind of round it was, after its first few
SURPRISE = 0.4  # a log-ratio beyond this is cut: a hiccup must not rule, a change comes through in a few rounds
COLD = math.log(2)  # beyond this surprise a kind's first round in a process says nothing of the others
FEW = 3  # rounds of a kind until when a surprise says that its curve is wrong, not that the machine has changed
BUCKET = 1024  # tokens of context up to which one table serves; above, one table a doubling


@dataclass
class Curve:
    """Seconds of a round at one context: plain ones, and by source those of some numbers of rows."""

    plain: float
    sources: dict[str, dict[int, float]] = field(default_factory=dict)

    def seconds(self, source: str, rows: int) -> float:
        """Measured, or on the line between the nearest measured neighbours; beyond the last, on its slope."""
        if rows == 1:
            return self.plain
        if (measured := self.sources[source].get(rows)) is not None:
            return measured
        points = sorted({1: self.plain, **self.sources[source]}.items())
        above = next((i for i, (n, _) in enumerate(points) if n > rows), len(points) - 1)
        (a, low), (b, high) = points[max(above - 1, 0)], points[above]
        if rows > b:  # noise may let the last segment fall; more rows never cost less
            return high + max(high - low, 0.0) * (rows - b) / max(b - a, 1)
        return low + (high - low) * (rows - a) / (b - a)


@dataclass
class Costs:
    """Curves by context bucket, and the corrections of the run. Not for two runs at a time."""

    curves: dict[int, Curve]
    pace: float = 0.0  # log of what all rounds share
    own: dict[Kind, float] = field(default_factory=dict)  # log of what is one kind's alone
    seen: dict[Kind, int] = field(default_factory=dict)
    warm: set[Kind] = field(default_factory=set)  # kinds that have run in this process
    base: Curve | None = None  # what the corrections are of
    at: int = 0  # the bucket that it was last asked for
    outcomes: dict[str, Tally] = field(default_factory=dict)  # by source, of all runs with this pair
    path: Path | None = None  # the file that keeps the curves

    def curve(self, context: int) -> Curve:
        """The curve of this bucket, else the nearest below it, else the lowest; a change drops corrections."""
        wanted = bucket(context)
        if self.base is not None and wanted == self.at:
            return self.base
        curve = self.curves[max((b for b in self.curves if b <= wanted), default=min(self.curves))]
        if curve is not self.base:
            self.pace, self.own, self.seen, self.base = 0.0, {}, {}, curve
        self.at = wanted
        return curve

    def seconds(self, source: str, rows: int, context: int = 0) -> float:
        base = self.curve(context).seconds(source, rows)
        return base * math.exp(self.pace + self.correction(source, rows))

    def up_to(self, source: str, most: int, context: int = 0) -> list[float]:
        """`seconds` of 1 to `most` rows: what every round asks for, in one pass."""
        curve = self.curve(context)
        logs = self.corrections(source, most)
        return [curve.seconds(source, n) * math.exp(self.pace + log) for n, log in enumerate(logs, 1)]

    def correction(self, source: str, rows: int) -> float:
        """The kind's own log-correction."""
        known = self.own.get((source, rows))
        return self.corrections(source, rows)[-1] if known is None else known

    def corrections(self, source: str, most: int) -> list[float]:
        """Log-corrections of 1 to `most` rows; of those not yet run, on the line between neighbours that were.

        One row has none of its own: plain rounds correct the pace.
        """
        known = [(1, 0.0), *sorted((n, log) for (s, n), log in self.own.items() if s == source)]
        out, at = [], 0
        for rows in range(1, most + 1):
            while at + 1 < len(known) and known[at + 1][0] <= rows:
                at += 1
            below, log = known[at]
            if at + 1 < len(known):
                above, high = known[at + 1]
                log += (high - log) * (rows - below) / (above - below)
            out.append(log)
        return out

    def observe(self, source: str, rows: int, seconds: float, context: int = 0) -> bool:
        """Learn from one timed round; False for a kind's first one if it is far slower: it compiles for later ones."""
        kind = PLAIN_ROUND if rows == 1 else (source, rows)
        surprise = math.log(seconds / self.seconds(source, rows, context))
        if kind not in self.warm:
            self.warm.add(kind)
            if surprise > COLD:
                return False
        count = self.seen.get(kind, 0)
        self.seen[kind] = count + 1
        limit = SURPRISE if count >= FEW else 3 * SURPRISE  # a wrong curve must be found out at once
        surprise = max(-limit, min(limit, surprise))
        if rows == 1:
            self.pace += (SHARED_GAIN + OWN_GAIN) * surprise
            return True
        self.own[kind] = self.correction(*kind) + max(OWN_GAIN, 1 / (count + 1.2)) * surprise
        if count >= FEW:
            self.pace += SHARED_GAIN * surprise
        return True

    def settle(self, context: int) -> None:
        """Make the corrected curve that of this context's bucket."""
        sources = {
            source: {n: self.seconds(source, n, context) for n in points}
            for source, points in self.curve(context).sources.items()
        }
        self.curves[bucket(context)] = Curve(self.seconds(PLAIN, 1, context), sources)
        self.base = None  # the corrections are in it now


def bucket(context: int) -> int:
    """0 up to BUCKET tokens, then 1 up to twice that, and so on."""
    return max(0, math.ceil(math.log2(max(context, 1) / BUCKET)))


def save(costs: Costs, path: Path) -> None:
    """Write the curves and outcomes, beside the old file first."""
    values = {
        str(b): {"plain": c.plain, "sources": {s: {str(n): t for n, t in p.items()} for s, p in c.sources.items()}}
        for b, c in costs.curves.items()
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    outcomes = {s: {"kept": t.kept, "tried": t.tried} for s, t in costs.outcomes.items()}
    part.write_text(json.dumps({"version": 2, "curves": values, "outcomes": outcomes}, indent=1) + "\n")
    part.replace(path)


def load(path: Path) -> Costs | None:
    """The stored curves; None if there are none that this version can read."""
    try:
        stored = json.loads(path.read_text())
        curves = {
            int(b): Curve(
                float(c["plain"]),
                {s: {int(n): float(t) for n, t in p.items()} for s, p in c["sources"].items()},
            )
            for b, c in stored["curves"].items()
        }
        outcomes = {
            s: Tally(RUNS, *(list(map(float, t[n])) for n in ("kept", "tried"))) for s, t in stored["outcomes"].items()
        }
        sound = all(len(t.kept) == len(t.tried) for t in outcomes.values())
        return Costs(curves, outcomes=outcomes) if stored["version"] == 2 and curves and sound else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
