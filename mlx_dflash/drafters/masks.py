"""Who sees whom in a draft layer.

Formats differ here and nowhere fails aloud: a wrong rule only lowers acceptance. So each rule is a value that a format
states and a test holds.
"""

from dataclasses import dataclass

import mlx.core as mx


@dataclass(frozen=True)
class Visibility:
    """Which keys a noise row at position q sees; keys lie at k, the block's anchor at s, its rows from s on.

    behind: k >= q - behind, or k >= s - behind for all rows alike where `from_anchor`; None: the whole context.
    ahead: k <= q + ahead; 0 is causal, None the whole block. Context rows lie before the anchor, never ahead.
    """

    behind: int | None = None
    ahead: int | None = None
    from_anchor: bool = False

    def mask(self, context: int, rows: int) -> mx.array | None:
        """(rows, context + rows), True = visible, for keys [context; noise] that end with the block's last row.

        `context` rows must not reach back further than `behind` rows before the anchor. None if nothing is hidden.
        """
        behind = None if self.from_anchor else self.behind
        if (behind is None or context + rows - 1 <= behind) and (self.ahead is None or rows - 1 <= self.ahead):
            return None
        distance = (context + mx.arange(rows))[:, None] - mx.arange(context + rows)[None]  # q - k
        visible = mx.ones(distance.shape, mx.bool_)
        if behind is not None:
            visible = visible & (distance <= behind)
        if self.ahead is not None:
            visible = visible & (distance >= -self.ahead)
        return visible
