"""The cache transaction: after any sequence of steps the cache equals one built from the committed tokens.

For every kind of cache (tests/kinds.py), bit for bit where a matmul's rows don't depend on how many there are (the
reference BLAS), within rounding elsewhere. Starts lie before, on and past the wrap of the sliding kind's window of 16.
"""

import random
from itertools import product

import mlx.core as mx
import pytest
from kinds import KINDS, VOCABULARY, WINDOW, Marks, clone, kind

from mlx_dflash.cache import STEP, FullKV, TargetCache

WIDTHS = range(1, WINDOW + 3)


@pytest.fixture(params=KINDS)
def cached(request):
    return kind(request.param)


def text(n, seed=0):
    rng = random.Random(seed)
    return [rng.randrange(3, VOCABULARY - 10) for _ in range(n)]


@pytest.mark.parametrize("start", [0, WINDOW - 9, WINDOW - 1, WINDOW, 3 * WINDOW + 1])
def test_every_width_and_every_kept_length(cached, start):
    prompt, block = text(start), text(WIDTHS[-1], seed=1)
    base = cached.built(prompt)
    growing = clone(base)
    expected = [cached.contents(growing), *(cached.contents(cached.feed(growing, [token])) for token in block)]
    for width in WIDTHS:
        verified = clone(base)
        verified.begin()
        cached.forward(verified, block[:width])
        for keep in range(width + 1):
            cache = clone(verified)
            cache.commit(keep)
            cached.assert_equal(cache, expected[keep])


def test_a_block_gives_the_logits_of_its_rows_one_by_one(cached):
    ids = text(4 * WINDOW)
    one = cached.make_cache()
    rows = mx.concatenate([one_row(cached, one, token) for token in ids], axis=1)
    for start in (0, 1, WINDOW - 9, WINDOW - 1, WINDOW, 2 * WINDOW + 5):
        base = cached.built(ids[:start])
        for width in WIDTHS:
            cache = clone(base)
            cache.begin()
            assert cached.same(cached.forward(cache, ids[start : start + width]), rows[:, start : start + width])


def one_row(cached, cache, token):
    cache.begin()
    logits = cached.forward(cache, [token])
    cache.commit(1)
    return logits


@pytest.mark.parametrize("start", [WINDOW - 4, 3 * WINDOW])
def test_two_partial_rejects_in_a_row(cached, start):
    prompt, first, second = text(start), text(4, seed=1), text(4, seed=2)
    base = cached.built(prompt)
    for a, b in product(range(4), range(4)):
        cache = clone(base)
        for block, keep in ((first, a), (second, b)):
            cache.begin()
            cached.forward(cache, block)
            cache.commit(keep)
        cached.assert_equal(cache, cached.built(prompt + first[:a] + second[:b]))


@pytest.mark.parametrize("start", [0, WINDOW - 2, 3 * WINDOW])
def test_abort_leaves_what_there_was_before(cached, start):
    cache = cached.built(text(start))
    expected = cached.contents(cached.built(text(start)))
    for width in (1, WINDOW // 2, WINDOW + 2, 4 * WINDOW):
        cache.begin()
        cached.forward(cache, text(width, seed=width))
        cache.abort()
        cached.assert_equal(cache, expected)
    cache.abort()
    assert cache.length == start


def test_one_transaction_may_have_several_forward_passes(cached):
    prompt, block = text(WINDOW - 3), text(WINDOW + 5, seed=1)
    base = cached.built(prompt)
    verified = clone(base)
    verified.begin()
    for part in (block[:4], block[4:5], block[5:]):
        cached.forward(verified, part)
    for keep, token in enumerate([*block, None]):
        cache = clone(verified)
        cache.commit(keep)
        cached.assert_equal(cache, base)
        if token is not None:
            cached.feed(base, [token])


@pytest.mark.parametrize("at", [0, 5, WINDOW - 1, 2 * WINDOW + 3])
def test_a_checkpoint_can_be_restored_again_and_again(cached, at):
    """Far past the window, from inside a transaction, and after the restored cache was written to."""
    prompt = text(at)
    cache = cached.built(prompt)
    mark, expected = cache.checkpoint(), cached.contents(cached.built(prompt))
    for seed, more in ((1, 3), (2, 2 * WINDOW), (3, WINDOW)):
        cached.feed(cache, text(more, seed), chunk=5)
        cache.begin()
        cached.forward(cache, text(4, seed))
        cache.restore(mark)
        cached.assert_equal(cache, expected)
    after = text(7, seed=4)
    cached.assert_equal(cached.feed(cache, after), cached.built(prompt + after))


@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_prefill_chunks_leave_the_same_cache(cached, chunk):
    prompt = text(100)
    cached.assert_equal(cached.feed(cached.make_cache(), prompt, chunk), cached.built(prompt))


@pytest.mark.parametrize("seed", [5, 6])
def test_random_sequences_of_transactions(cached, seed):
    """Rejects one after another, aborts, checkpoints and restores, across the growth and the moves of buffers."""
    rng = random.Random(seed)
    committed = text(STEP - 3, seed)
    marks = Marks(cached.built(committed), committed)
    for step in range(60):
        block = text(rng.randint(1, WINDOW + 2), seed=100 * seed + step)
        marks.cache.begin()
        cached.forward(marks.cache, block)
        marks.end(rng, block)
        if step % 15 == 14:
            cached.assert_equal(marks.cache, cached.built(marks.text))
    assert marks.longest > STEP and marks.lost > 0


def rows(n):
    return mx.ones((1, 2, n, 4))


def test_commit_refuses_what_was_not_appended():
    cache = TargetCache([FullKV(), FullKV()])
    with pytest.raises(RuntimeError, match="without begin"):
        cache.commit(0)
    cache.begin()
    for layer in cache.layers:
        layer.update_and_fetch(rows(3), rows(3))
    with pytest.raises(RuntimeError, match="can't keep 4 of 3"):
        cache.commit(4)
    with pytest.raises(RuntimeError, match="open cache transaction"):
        cache.begin()
    with pytest.raises(RuntimeError, match="open cache transaction"):
        cache.checkpoint()
    cache.commit(2)
    assert cache.length == 2


def test_commit_refuses_layers_that_disagree():
    cache = TargetCache([FullKV(), FullKV()])
    cache.begin()
    cache.layers[0].update_and_fetch(rows(3), rows(3))
    cache.layers[1].update_and_fetch(rows(2), rows(2))
    with pytest.raises(RuntimeError):
        cache.commit(3)


def test_a_checkpoint_overwritten_after_a_restore_is_refused(cached):
    cache = cached.built(text(4))
    early = cache.checkpoint()
    cached.feed(cache, text(4, seed=1))
    late = cache.checkpoint()
    cache.restore(early)
    cached.feed(cache, text(8, seed=2))
    with pytest.raises(RuntimeError, match="overwritten"):
        cache.restore(late)
    cache.restore(early)
    cached.assert_equal(cache, cached.built(text(4)))


def test_mlx_lm_takes_an_empty_cache_for_true(cached):
    """mlx-lm asks `if cache and hasattr(cache, "make_mask")`: a falsy empty cache would lose its mask."""
    assert all(bool(layer) and not hasattr(layer, "__len__") for layer in cached.make_cache().layers)
