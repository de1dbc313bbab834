"""How often drafts are kept: estimates that follow a text, and what earlier runs of the pair say before it begins.

Draft k counts only in rounds that kept all drafts before it, so every chance here is that of draft k after those.
"""

from collections.abc import Sequence

LONG, SHORT = 0.995, 0.95  # weight of a round's outcome, a round later: memories of some 200 and 20 rounds
RUNS = 0.998  # the same over all runs of a pair, some 500 rounds
TURN = 2.5  # standard deviations by which the short memory must part from the long one to replace it
PRIOR, PRIOR_WEIGHT = 0.75, 1.5  # chance that the first draft is kept before any was seen, in rounds of evidence
CHAIN_WEIGHT = 2.0  # a later draft's chance begins at that of the one before it
EARLIER_WEIGHT = 5.0  # rounds of evidence that earlier runs are worth: enough to begin well, soon outweighed


class Tally:
    """How often draft k was kept when all before it were, over rounds that fade."""

    def __init__(self, fade: float, kept: Sequence[float] = (), tried: Sequence[float] = ()) -> None:
        self.fading = fade
        self.kept = [*kept]
        self.tried = [*tried]

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
    """The chance of each draft: from a long memory while the text goes on as it was, from a short one after a turn.

    earlier: of the pair's runs before; the long memory begins with some of it.
    """

    def __init__(self, earlier: Tally | None = None) -> None:
        self.long, self.short = Tally(LONG), Tally(SHORT)
        if earlier is not None and earlier.tried:
            share = min(1.0, EARLIER_WEIGHT / max(earlier.tried[0], 1.0))
            self.long = Tally(LONG, [share * v for v in earlier.kept], [share * v for v in earlier.tried])

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
