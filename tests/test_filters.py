"""The filters keep what mlx-lm's keep, among a few candidates or in the whole row, and say when candidates don't do."""

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.sample_utils import apply_min_p, apply_top_k, apply_top_p

from mlx_dflash.accept import Sampler, Sampling
from mlx_dflash.filters import BLOCK, Filters, Pool, likeliest

rows_ = st.tuples(
    st.integers(1, 4), st.sampled_from([40, 300, 5000, 20000]), st.floats(0.2, 6.0), st.integers(0, 2**31 - 1)
)
filters_ = st.builds(
    Filters,
    top_p=st.sampled_from([1.0, 0.99, 0.9, 0.5, 0.1, 0.0]),
    min_p=st.sampled_from([0.0, 0.001, 0.05, 0.5, 1.0]),
    top_k=st.sampled_from([0, 1, 5, 64, 300]),
    min_tokens_to_keep=st.sampled_from([1, 3]),
)


def logits_of(rows):
    n, vocab, spread, seed = rows
    return spread * mx.random.normal((n, vocab), key=mx.random.key(seed))


def by_mlx_lm(logits, f):
    """What mlx-lm's sampler would draw from, before the temperature."""
    logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    if 0 < f.top_p < 1:
        logprobs = apply_top_p(logprobs, f.top_p)
    if f.min_p:
        logprobs = apply_min_p(logprobs, f.min_p, f.min_tokens_to_keep)
    if 0 < f.top_k < logits.shape[-1]:
        logprobs = apply_top_k(logprobs, f.top_k)
    return logprobs


def kept_by(logits, f, pool):
    """The kept tokens as a mask over the vocabulary, and which rows are sure."""
    kept = f.keep(pool, mx.logsumexp(logits, axis=-1, keepdims=True))
    sure = f.sure(pool, kept)
    mask = np.zeros(logits.shape, bool)
    ids = np.broadcast_to(np.arange(logits.shape[-1]), logits.shape) if pool.ids is None else np.array(pool.ids)
    np.put_along_axis(mask, ids.astype(np.int64), np.array(kept), axis=-1)
    return mask, np.ones(len(mask), bool) if sure is None else np.array(sure)


def near_an_edge(logits, f):
    """True if rounding can decide what top_p or min_p keep."""
    probs = np.sort(np.array(mx.softmax(logits, axis=-1), np.float64), axis=-1)[:, ::-1]
    above = np.cumsum(probs, axis=-1) - probs
    close = np.abs(above - f.top_p) < 1e-5
    ratio = np.abs(probs / probs[:, :1] / max(f.min_p, 1e-9) - 1) < 1e-5
    return bool((close & (probs > 1e-9)).any() or ratio[:, 1:].any())


@given(rows=rows_, f=filters_)
@settings(max_examples=60, deadline=None, derandomize=True)
def test_the_kept_set_is_mlx_lms_by_candidates_and_by_whole_rows(rows, f):
    logits = logits_of(rows)
    if near_an_edge(logits, f):
        return
    expected = ~np.isinf(np.array(by_mlx_lm(logits, f)))
    if f.top_k and f.min_p and f.top_k < f.min_tokens_to_keep:
        return  # contradictory, refused by Sampling
    whole, _ = kept_by(logits, f, Pool(logits, None, None))
    assert np.array_equal(whole, expected)
    if f.ranked:
        fast, sure = kept_by(logits, f, f.pool(logits))
        assert np.array_equal(fast[sure], expected[sure])
        assert sure.all() or f.nucleus


@pytest.mark.parametrize(("vocab", "count"), [(300, 64), (5000, 40), (5000, 512), (20000, 64), (8191, 100)])
def test_the_pool_holds_the_likeliest_and_knows_what_is_outside(vocab, count):
    """Counts and vocabularies on both sides of where blocks of neighbours are looked at first."""
    logits = mx.random.normal((3, vocab), key=mx.random.key(1))
    pool = likeliest(logits, count)
    ids, values = np.array(pool.ids), np.array(logits)
    for row in range(3):
        assert list(ids[row]) == sorted(np.argsort(values[row])[-count:])
        assert np.array_equal(np.array(pool.values)[row], values[row][ids[row]])
        assert np.array(pool.edge)[row, 0] == np.sort(values[row])[-count]


def test_a_nucleus_beyond_the_candidates_is_not_sure_and_a_small_one_is():
    flat = mx.zeros((1, 4000)) + 0.001 * mx.random.normal((1, 4000), key=mx.random.key(0))
    steep = mx.where(mx.arange(4000) < 20, 8.0, 0.0)[None] + flat
    f = Filters(top_p=0.9)
    pool = f.pool(mx.concatenate([flat, steep]))
    kept = f.keep(pool, mx.logsumexp(mx.concatenate([flat, steep]), axis=-1, keepdims=True))
    assert f.sure(pool, kept).tolist() == [False, True]


def test_top_k_keeps_exactly_k_of_equal_values_the_lowest_ids():
    """Half-precision logits tie often. mlx-lm also keeps k, of the ties whichever its partition leaves."""
    logits = mx.array([[1.0, 2.0, 2.0, 2.0, 3.0, 2.0]])
    kept = Filters(top_k=3).keep(Pool(logits, None, None))
    assert kept.tolist() == [[False, True, True, False, True, False]]
    many = mx.concatenate([mx.zeros((1, 5000)), mx.ones((1, 40))], axis=-1)  # more ties than candidates
    f = Filters(top_k=45)
    pool = f.pool(many)
    assert f.sure(pool, f.keep(pool)).tolist() == [False]
    assert kept_by(many, f, Pool(many, None, None))[0].sum() == 45


def test_forbidden_tokens_are_never_kept():
    logits = mx.full((1, 3000), -mx.inf)
    logits[0, 7], logits[0, 2990] = 1.0, 0.0
    for f in (Filters(top_k=20), Filters(top_p=0.999), Filters(min_p=0.01, min_tokens_to_keep=9), Filters(min_p=0.01)):
        mask, sure = kept_by(logits, f, f.pool(logits) if f.ranked else Pool(logits, None, None))
        assert np.flatnonzero(mask[0]).tolist() == [7, 2990] and sure.all()


@given(rows=rows_, f=filters_, temp=st.sampled_from([0.3, 1.0, 2.0]))
@settings(max_examples=40, deadline=None, derandomize=True)
def test_draws_among_candidates_are_the_draws_of_whole_rows(rows, f, temp):
    logits = logits_of(rows)
    if f.top_k and f.min_p and f.top_k < f.min_tokens_to_keep:
        return
    sampler = Sampler(Sampling(temp, f.top_p, f.top_k, f.min_p, f.min_tokens_to_keep, seed=3))
    noise, normaliser = sampler.noise(9, *logits.shape), mx.logsumexp(logits, axis=-1, keepdims=True)
    fast, sure = sampler.choose(logits, noise, normaliser)
    whole, _ = sampler.choose(logits, noise, normaliser, whole=True)
    ok = np.ones(len(logits), bool) if sure is None else np.array(sure)
    assert np.array_equal(np.array(fast)[ok], np.array(whole)[ok])
    drawn = sampler.draw(logits, mx.zeros(len(logits), mx.uint32), [], 8)
    final = drawn.again().tokens if drawn.exactly else drawn.tokens
    assert np.array_equal(np.array(final), np.array(whole))


def test_a_row_draws_the_same_alone_and_among_others():
    logits = 3 * mx.random.normal((BLOCK, 3000), key=mx.random.key(4))
    for f in ({"top_p": 0.9}, {"top_k": 30}, {"min_p": 0.02}, {"top_p": 0.95, "top_k": 50, "min_p": 0.01}, {}):
        sampler = Sampler(Sampling(temp=0.8, seed=5, **f))
        block = sampler.draw(logits[:8], mx.zeros(8, mx.uint32), [], 99).tokens.tolist()
        alone = [sampler.draw(logits[i : i + 1], mx.zeros(1, mx.uint32), [], 99 + i).tokens.item() for i in range(8)]
        assert block == alone
