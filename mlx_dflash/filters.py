"""top-p, min-p and top-k, exactly, without sorting a whole vocabulary.

All three keep the tokens above an edge, so what they keep is a beginning of the row sorted from the likeliest down. It
is looked for among the row's likeliest few hundred; a row whose kept tokens might reach beyond those says so (`sure`),
and is then filtered whole. Knows logits; nothing of noise, temperature or rounds.
"""

import math
from dataclasses import dataclass

import mlx.core as mx

# Tokens of a row that are sorted. A nucleus of 0.95 of a language model's distribution rarely has as many.
CANDIDATES = 512
BLOCK = 64  # neighbours whose maximum stands for them; on GPUs a partition is a sort, so fewer values go through it


@dataclass(frozen=True)
class Pool:
    """The likeliest tokens of each row. values (n, k) in the order of ids; ids (n, k) ascending, None: the whole row.

    edge (n, 1): no token outside is above it.
    """

    values: mx.array
    ids: mx.array | None
    edge: mx.array | None

    def of(self, rows: mx.array) -> mx.array:
        """The pool's columns of `rows` (n, vocab)."""
        return rows if self.ids is None else mx.take_along_axis(rows, self.ids, axis=-1)


def likeliest(logits: mx.array, count: int) -> Pool:
    """The `count` largest values of each row (n, vocab)."""
    vocab = logits.shape[-1]
    if 2 * count > vocab:
        return Pool(logits, None, None)
    values, ids = logits, None
    if 2 * count * BLOCK <= vocab:
        # The largest `count` values lie in the `count` blocks with the largest maxima.
        blocks = mx.pad(logits, [(0, 0), (0, -vocab % BLOCK)], constant_values=-mx.inf).reshape(len(logits), -1, BLOCK)
        chosen = mx.sort(mx.argpartition(mx.max(blocks, axis=-1), -count, axis=-1)[:, -count:], axis=-1)
        values = mx.take_along_axis(blocks, chosen[..., None], axis=1).flatten(1)  # (n, count * BLOCK)
        ids = (chosen[..., None] * BLOCK + mx.arange(BLOCK, dtype=chosen.dtype)).flatten(1)
    places = mx.sort(mx.argpartition(values, -count, axis=-1)[:, -count:], axis=-1)
    values = mx.take_along_axis(values, places, axis=-1)
    ids = places if ids is None else mx.take_along_axis(ids, places, axis=-1)
    return Pool(values, ids, mx.min(values, axis=-1, keepdims=True))


@dataclass(frozen=True)
class Filters:
    """mlx-lm's filters in its order, over untempered probabilities: top_p, then min_p, then top_k.

    Ties: top_p and min_p keep or drop equal values together, as mlx-lm does; of values that tie at the edge of top_k
    (and of min_tokens_to_keep) the lowest ids are kept, where mlx-lm keeps what its partition happens to leave.
    """

    top_p: float = 1.0
    min_p: float = 0.0
    top_k: int = 0
    min_tokens_to_keep: int = 1

    @property
    def nucleus(self) -> bool:
        return 0 < self.top_p < 1  # 0 means off, as in mlx-lm

    @property
    def ranked(self) -> bool:
        """True if a row has to be sorted to know what is kept."""
        return self.nucleus or self.top_k > 0 or (self.min_p > 0 and self.min_tokens_to_keep > 1)

    def pool(self, logits: mx.array) -> Pool:
        """Candidates enough for these filters on most rows (n, vocab)."""
        most = max(self.top_k, self.min_tokens_to_keep if self.min_p > 0 else 0)
        # With top_k no more than k are ever kept; without it the nucleus may have any size.
        return likeliest(logits, max(2 * most, CANDIDATES if not self.top_k and self.nucleus else BLOCK))

    def keep(self, pool: Pool, normaliser: mx.array | None = None) -> mx.array:
        """(n, k) bool: which tokens of the pool are kept. normaliser (n, 1): logsumexp of the whole rows, for top_p."""
        values = pool.values
        kept = values > -mx.inf
        descending = -mx.sort(-values, axis=-1) if self.ranked else None
        if self.nucleus and descending is not None and normaliser is not None:
            # A token is kept while the mass above it is short of top_p; as in mlx-lm, equal values go together.
            probs = mx.exp(descending - normaliser)
            last = (mx.cumsum(probs, axis=-1, inclusive=False) < self.top_p).sum(axis=-1, keepdims=True) - 1
            kept = kept & (values >= mx.take_along_axis(descending, last, axis=-1))
        if self.min_p > 0:
            likely = values >= mx.max(values, axis=-1, keepdims=True) + math.log(self.min_p)
            if descending is not None and self.min_tokens_to_keep > 1:
                likely = likely | first(values, descending, self.min_tokens_to_keep)
            kept = kept & likely
        if descending is not None and 0 < self.top_k < values.shape[-1]:
            kept = kept & first(values, descending, self.top_k)
        return kept

    def sure(self, pool: Pool, kept: mx.array) -> mx.array | None:
        """(n,) bool: no token outside the pool can be kept. None if the pool is the whole row."""
        if pool.edge is None:
            return None
        lowest = mx.min(mx.where(kept, pool.values, mx.inf), axis=-1, keepdims=True)
        return (lowest > pool.edge)[:, 0]


def first(values: mx.array, descending: mx.array, count: int) -> mx.array:
    """(n, k) bool: the `count` largest of each row, of equal ones the first."""
    count = min(count, values.shape[-1])
    edge = descending[:, count - 1 : count]
    above = values > edge
    equal = values == edge
    place = mx.cumsum(equal.astype(mx.int32), axis=-1)
    return above | (equal & (place <= count - above.sum(axis=-1, keepdims=True)))
