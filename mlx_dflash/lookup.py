"""Drafts without a drafter: what followed the last tokens where they stood before, in the prompt or in the answer.

Prompt lookup (Saxena 2023), exact like any other draft, since the target verifies it. Knows token ids and nothing else.
"""

from .errors import RequestError
from .targets import Target

SHORTEST, LONGEST = 2, 16  # tokens of a match: fewer say too little, more say nothing new
PLACES = 4  # latest places of a pair that are compared
MOST_ROWS = 16  # a continuation is drafted so far, the anchor included
GRADES = (8, 4, 2)  # lengths of match that are told apart when acceptance is estimated


class Lookup:
    """A source of drafts for `target`; holds no state of a request."""

    name = "lookup"
    block_size = MOST_ROWS

    def __init__(self, target: Target) -> None:
        self.target = target


class History:
    """The tokens of one request, which grow outside, and where each pair of them stood."""

    def __init__(self, tokens: list[int]) -> None:
        self.tokens = tokens
        self.places: dict[tuple[int, int], list[int]] = {}  # pair -> positions after it, latest last
        self.indexed = SHORTEST  # positions below have been taken in

    def match(self) -> tuple[int, int] | None:
        """(position that followed, tokens that agree) of the longest, latest match of the text's end; None if none."""
        tokens, end = self.tokens, len(self.tokens)
        if end <= SHORTEST:
            return None
        for at in range(self.indexed, end):
            places = self.places.setdefault((tokens[at - 2], tokens[at - 1]), [])
            places.append(at)
            del places[:-PLACES]
        self.indexed = end
        best = None
        for at in reversed(self.places.get((tokens[-2], tokens[-1]), ())):
            length = SHORTEST
            while length < LONGEST and length < at and tokens[at - 1 - length] == tokens[end - 1 - length]:
                length += 1
            if best is None or length > best[1]:
                best = (at, length)
        return best

    def offer(self, left: int) -> tuple[str, int]:
        """The source's name, by how long the match is, and the rows it can fill with `left` tokens to emit; 1: none."""
        found = self.match()
        if found is None or left < 2:
            return Lookup.name, 1
        grade = next(g for g in GRADES if found[1] >= g)
        return f"{Lookup.name}/{grade}", min(MOST_ROWS, left + 1)

    def drafts(self, count: int) -> list[int]:
        """`count` ids that followed the match; where it runs into the end, the text is taken to repeat."""
        found = self.match()
        if found is None:
            raise RequestError("nothing in this text matches its end; ask `offer` first")
        at = found[0]
        period = len(self.tokens) - at
        return [self.tokens[at + k % period] for k in range(count)]
