"""How many rows a round verifies, the anchor included, and who drafts them; 1 row is plain decoding.

A round is worth the tokens it can be expected to commit over the seconds it is expected to take. Both are estimates
that every round corrects: the seconds in `costs`, the tokens here, from how often each draft was kept of late. Where
plain decoding is worth most, a round that drafts is tried now and then, and only while all such losses together stay
under a fixed share of the time.
"""

from collections.abc import Mapping

from .costs import DRAFTER, PLAIN_ROUND, Costs, Kind
from .decode import Width
from .drafters import DFlashDrafter
from .errors import RequestError
from .lookup import Lookup

START_ROWS = 5  # stock Metal kernels read the weights once per matmul for a tile of at most 5 rows
LONG, SHORT = 0.995, 0.95  # weight of a round's outcome, a round later: memories of some 200 and 20 rounds
TURN = 2.5  # standard deviations by which the short memory must part from the long one to replace it
PLAIN_FADE = 0.995  # weight of what was learned of drafts, a plain round later
PRIOR, PRIOR_WEIGHT = 0.75, 1.5  # chance that the first draft is kept before any was seen, in rounds of evidence
CHAIN_WEIGHT = 2.0  # a later draft's chance begins at that of the one before it
HOPE = 0.97  # a text on which drafts are kept as often as this; where even it would lose, probes are rare
LOSS_SHARE, GRACE = 0.012, 3.0  # of the time, and plain rounds beside it, for all drafting that lost against plain
FIRST_GAP, LAST_GAP, HOPELESS_GAP = 8, 64, 384  # plain rounds between two probes, doubling
REFRESH, NEAR = 40, 0.85  # rounds between two looks at another width, which must be worth this much of the best
CATCH_UP = 8  # plain rounds whose features make the next draft slower than others
PLAIN_MARGIN = 1.02  # drafting must promise this much more than plain decoding, whose worth is better known
LOST_MARGIN = 0.06  # and this much more yet after promises that were not kept
MARGIN = 1.01  # a change of width must promise this much


class Tally:
    """How often draft k was kept when all before it were, over rounds that fade."""

    def __init__(self, fade: float) -> None:
        self.fading = fade
        self.kept: list[float] = []
        self.tried: list[float] = []

    def observe(self, rows: int, accepted: int) -> None:
        missing = rows - 1 - len(self.tried)
        self.kept += [0.0] * missing
        self.tried += [0.0] * missing
        self.fade(self.fading)
        for k in range(min(accepted + 1, rows - 1)):
            self.tried[k] += 1
            self.kept[k] += k < accepted

    def fade(self, factor: float) -> None:
        self.kept = [v * factor for v in self.kept]
        self.tried = [v * factor for v in self.tried]

    def chances(self, drafts: int) -> list[float]:
        """Of each draft to be kept if all before it are; where little was seen, near that of the one before."""
        chances, before, weight = [], PRIOR, PRIOR_WEIGHT
        for k in range(drafts):
            if k < len(self.tried):
                before = (self.kept[k] + weight * before) / (self.tried[k] + weight)
            chances.append(before)
            weight = CHAIN_WEIGHT
        return chances


class Acceptance:
    """The chance of each draft: from a long memory while the text goes on as it was, from a short one after a turn."""

    def __init__(self) -> None:
        self.long, self.short = Tally(LONG), Tally(SHORT)

    def observe(self, rows: int, accepted: int) -> None:
        self.long.observe(rows, accepted)
        self.short.observe(rows, accepted)
        tried = self.short.tried
        chances = self.long.chances(len(tried))
        expected = sum(n * p for n, p in zip(tried, chances, strict=True))
        spread = sum(n * p * (1 - p) for n, p in zip(tried, chances, strict=True)) ** 0.5
        if abs(sum(self.short.kept) - expected) > TURN * spread + 0.5:
            self.long.kept, self.long.tried = [*self.short.kept], [*self.short.tried]

    def fade(self, factor: float) -> None:
        self.long.fade(factor)
        self.short.fade(factor)

    def expected(self, rows: int) -> list[float]:
        """Tokens that a round commits, on average, by its rows from 1 to `rows`."""
        tokens, all_kept = [1.0], 1.0
        for chance in self.long.chances(rows - 1):
            all_kept *= chance
            tokens.append(tokens[-1] + all_kept)
        return tokens


class Controller:
    """Chooses each round's kind from costs and outcomes. Times are seconds; nothing here reads a clock."""

    def __init__(self, costs: Costs) -> None:
        self.costs = costs
        self.acceptance: dict[str, Acceptance] = {}
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
            tokens = self.expected(source, most)
            for rows in self.candidates(source, most):
                worth[source, rows] = tokens[rows - 1] / self.seconds((source, rows), context)
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
