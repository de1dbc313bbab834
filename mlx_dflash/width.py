"""How many rows a round verifies, the anchor included, and who drafts them; 1 row is plain decoding.

A round is worth the tokens it can be expected to commit over the seconds it is expected to take. Both are estimates
that every round corrects: the seconds in `costs`, the tokens here, from how often each draft was kept of late. Where
plain decoding is worth most, a round that drafts is tried now and then, and only while all such losses together stay
under a fixed share of the time.
"""

from collections.abc import Mapping

from .acceptance import RUNS, Acceptance, Tally
from .costs import DRAFTER, PLAIN_ROUND, Costs, Kind
from .decode import Width
from .drafters import DFlashDrafter
from .errors import RequestError
from .lookup import Lookup

START_ROWS = 5  # stock Metal kernels read the weights once per matmul for a tile of at most 5 rows
PLAIN_FADE = 0.995  # weight of what was learned of drafts, a plain round later
HOPE = 0.97  # a text on which drafts are kept as often as this; where even it would lose, probes are rare
LOSS_SHARE, GRACE = 0.012, 1.5  # of the time, and plain rounds beside it, for all drafting that lost against plain
FIRST_GAP, LAST_GAP, HOPELESS_GAP = 8, 64, 384  # plain rounds between two probes, doubling
REFRESH, NEAR = 40, 0.85  # rounds between two looks at another width, which must be worth this much of the best
CATCH_UP = 8  # plain rounds whose features make the next draft slower than others
PLAIN_MARGIN = 1.02  # drafting must promise this much more than plain decoding, whose worth is better known
LOST_MARGIN = 0.06  # and this much more yet after promises that were not kept
MARGIN = 1.01  # a change of width must promise this much


class Controller:
    """Chooses each round's kind from costs and outcomes. Times are seconds; nothing here reads a clock."""

    def __init__(self, costs: Costs) -> None:
        self.costs = costs
        self.acceptance = {source: Acceptance(tally) for source, tally in costs.outcomes.items()}
        self.current: Kind = PLAIN_ROUND
        self.rounds = 0
        self.elapsed = self.lost = 0.0
        self.plain_since = 0  # plain rounds since the last one that drafted
        self.gap = FIRST_GAP
        self.last_run: dict[Kind, int] = {}
        self.taken: dict[Kind, int] = {}

    def choose(self, offers: Mapping[str, int], context: int = 0) -> Kind:
        """The next round's kind. offers: by source, the most rows that it can fill now."""
        worth = self.worth(offers, context)
        if len(worth) == 1:
            return PLAIN_ROUND
        best = max(worth, key=lambda kind: worth[kind] * (MARGIN if kind == self.current else 1.0))
        if best != PLAIN_ROUND:
            return self.refresh(best, worth)
        drafting = max((k for k in worth if k != PLAIN_ROUND), key=worth.__getitem__)
        return drafting if self.may_probe(drafting, offers, context) else PLAIN_ROUND

    def candidates(self, source: str, most: int) -> range:
        """Rows to choose from: all that the source fills, but not above the first width until one round has run."""
        first = min(START_ROWS, most)
        return range(2, most + 1) if source in self.acceptance else range(first, first + 1)

    def seconds(self, kind: Kind, context: int) -> float:
        """What a round of a kind costs; "lookup/4" costs what "lookup" costs."""
        return self.costs.seconds(cost_of(kind[0]), kind[1], context)

    def expected(self, source: str, rows: int) -> list[float]:
        """Tokens of a round by its rows, from 1 to `rows`."""
        return self.acceptance.get(source, NOTHING).expected(rows)

    def worth(self, offers: Mapping[str, int], context: int) -> dict[Kind, float]:
        """Tokens a second of every kind that may be chosen."""
        plain = self.seconds(PLAIN_ROUND, context)
        margin = PLAIN_MARGIN + LOST_MARGIN * (self.lost > self.allowance(plain))
        worth = {PLAIN_ROUND: margin / plain}
        for source, most in offers.items():
            tokens, seconds = self.expected(source, most), self.costs.up_to(cost_of(source), most, context)
            for rows in self.candidates(source, most):
                worth[source, rows] = tokens[rows - 1] / seconds[rows - 1]
        return worth

    def may_probe(self, kind: Kind, offers: Mapping[str, int], context: int) -> bool:
        """Plain decoding is worth most: may this round try drafts all the same?"""
        plain = self.seconds(PLAIN_ROUND, context)
        loss = self.seconds(kind, context) - plain * self.expected(*kind)[-1]
        hopeless = all(
            hoped(rows) * plain < self.seconds((source, rows), context)
            for source, most in offers.items()
            for rows in range(2, most + 1)
        )
        gap = HOPELESS_GAP if hopeless else self.gap
        return self.plain_since >= gap and self.lost + max(loss, 0.0) <= self.allowance(plain)

    def allowance(self, plain: float) -> float:
        """Seconds that drafting may have lost by now."""
        return LOSS_SHARE * self.elapsed + GRACE * plain

    def refresh(self, best: Kind, worth: dict[Kind, float]) -> Kind:
        """Now and then another kind that is nearly as good, so that its cost is not believed for ever."""
        if self.rounds % REFRESH or self.rounds == 0:
            return best
        near = [k for k in worth if k != best and worth[k] > NEAR * worth[best]]
        return min(near, key=lambda k: self.last_run.get(k, -1), default=best)

    def observe(self, kind: Kind, tokens: int, seconds: float | None, context: int = 0) -> None:
        """A round's outcome: the tokens it committed, those cut off included, and its time; None: unknown."""
        source, rows = kind
        plain = self.seconds(PLAIN_ROUND, context)
        caught_up = rows > 1 and source == DRAFTER and self.plain_since > CATCH_UP  # features waited to be projected
        spent = self.seconds(kind, context)
        if seconds is not None and not caught_up and self.costs.observe(cost_of(source), rows, seconds, context):
            spent = seconds
        self.elapsed += spent
        self.rounds += 1
        self.last_run[kind] = self.rounds
        self.taken[kind] = self.taken.get(kind, 0) + 1
        if rows == 1:
            self.plain_since += 1
            for acceptance in self.acceptance.values():
                acceptance.fade(PLAIN_FADE)
        else:
            self.acceptance.setdefault(source, Acceptance()).observe(rows, tokens - 1)
            self.costs.outcomes.setdefault(source, Tally(RUNS)).observe(rows, tokens - 1)
            lost = spent - tokens * plain
            self.lost = max(self.lost + lost, 0.0)
            if self.plain_since:
                self.gap = min(2 * self.gap, LAST_GAP) if lost > 0 else FIRST_GAP
            self.plain_since = 0
        self.current = kind

    def why(self, context: int) -> str:
        """One line: how many rounds drafted, and what the commonest kind of them costs and brings."""
        drafting = {kind: count for kind, count in self.taken.items() if kind != PLAIN_ROUND}
        drafted = sum(drafting.values())
        if not self.rounds:
            return ""
        untried = ((source, START_ROWS) for source in self.costs.curve(context).sources)
        kind = max(drafting, key=drafting.__getitem__) if drafting else next(untried)
        ratio = self.seconds(kind, context) / self.seconds(PLAIN_ROUND, context)
        then = ", then plain" if drafted and self.current == PLAIN_ROUND else ""
        return (
            f"{drafted} of {self.rounds} rounds speculated{then}: {kind[1]} rows cost {ratio:.1f} x one row here and "
            f"commit about {self.expected(*kind)[-1]:.1f} tokens"
        )


NOTHING = Acceptance()


def cost_of(source: str) -> str:
    """The curve that serves a source, whatever its grade."""
    return source.partition("/")[0]


def hoped(rows: int) -> float:
    return sum(HOPE**k for k in range(rows))


def fixed(rows: int) -> Width:
    """Always `rows` rows, or as many as the first source that offers drafts can fill."""

    def width(offers: Mapping[str, int], context: int) -> Kind:
        source, most = next(iter(offers.items()))
        return (source, min(rows, most)) if rows > 1 else PLAIN_ROUND

    return width


def check_block_size(block_size: int | str, draft_model: DFlashDrafter | Lookup | None) -> None:
    """Raise RequestError for a block size that can't be."""
    if block_size == "auto":
        return
    if not isinstance(block_size, int) or isinstance(block_size, bool) or block_size < 1:
        raise RequestError(f'block_size must be "auto" or a whole number of rows, 1 or more, not {block_size!r}')
    if draft_model is None and block_size > 1:
        raise RequestError(f"block_size {block_size} needs a draft model; without one only 1 (plain) is possible")
    if draft_model is not None and block_size > draft_model.block_size:
        what = "the rows that lookup fills" if isinstance(draft_model, Lookup) else "the drafter's trained block"
        raise RequestError(f"block size {block_size} is above {what}; use {draft_model.block_size} or less")
