"""The cache transaction: after any sequence of steps the cache equals one built from the committed tokens.

Bit for bit where a matmul's rows don't depend on how many there are (the reference BLAS), within rounding elsewhere.
"""

import random
from pathlib import Path

import mlx.core as mx
import pytest
from mlx_dflash.benchmarks.machine import rows_independent

from mlx_dflash import load
from mlx_dflash.cache import STEP, FullKV, TargetCache

GOLDEN = Path(__file__).parent / "golden"

WIDTHS = range(1, 9)


@pytest.fixture(scope="module", params=["qwen3", "llama"])
def target(request):
    return load(GOLDEN / request.param / "target")[0]


def feed(target, cache, ids, chunk=None):
    for at in range(0, len(ids), chunk or len(ids) or 1):
        cache.begin()
        part = ids[at : at + (chunk or len(ids))]
        target.forward(mx.array([part]), cache)
        cache.commit(len(part))


def assert_equal(cache, other, target):
    """Same length, same rows, and the same logits for what follows."""
    assert cache.length == other.length
    for a, b in zip(cache.layers, other.layers, strict=True):
        assert a.offset == b.offset == cache.length
        if cache.length:
            assert same(a.keys[..., : a.offset, :], b.keys[..., : b.offset, :])
            assert same(a.values[..., : a.offset, :], b.values[..., : b.offset, :])
    logits = []
    for c in (cache, other):
        c.begin()
        logits.append(target.forward(mx.array([[7, 8]]), c)[0])
        c.abort()
    assert same(*logits)


def same(a, b):
    return mx.array_equal(a, b) if rows_independent() else mx.allclose(a, b, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("start", [0, 1, 13])
def test_every_width_and_every_kept_length(target, start):
    rng = random.Random(start)
    text = [rng.randrange(3, 290) for _ in range(start)]
    for width in WIDTHS:
        for keep in range(width + 1):
            block = [rng.randrange(3, 290) for _ in range(width)]
            cache, expected = target.make_cache(), target.make_cache()
            feed(target, cache, text)
            cache.begin()
            target.forward(mx.array([block]), cache)
            cache.commit(keep)
            feed(target, expected, text + block[:keep])
            assert_equal(cache, expected, target)


@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_prefill_chunks_leave_the_same_cache(target, chunk):
    text = [random.Random(1).randrange(3, 290) for _ in range(100)]
    cache, expected = target.make_cache(), target.make_cache()
    feed(target, cache, text, chunk)
    feed(target, expected, text)
    assert_equal(cache, expected, target)


def test_random_sequences_of_transactions(target):
    """Rejects one after another, aborts, checkpoints and restores, across the buffer's growth."""
    rng = random.Random(5)
    text = [rng.randrange(3, 290) for _ in range(STEP - 3)]
    cache = target.make_cache()
    feed(target, cache, text)
    marks = [(cache.checkpoint(), list(text))]
    longest = 0
    for step in range(60):
        block = [rng.randrange(3, 290) for _ in range(rng.randint(1, 8))]
        cache.begin()
        target.forward(mx.array([block]), cache)
        action = rng.choice(["commit", "commit", "abort", "mark", "restore"])
        if action == "abort":
            cache.abort()
        elif action == "restore":
            mark, kept = rng.choice(marks)
            cache.restore(mark)
            text = list(kept)
            marks = [m for m in marks if len(m[1]) <= len(kept)]
        else:
            keep = rng.randint(0, len(block))
            cache.commit(keep)
            text += block[:keep]
            if action == "mark":
                marks.append((cache.checkpoint(), list(text)))
        longest = max(longest, len(text))
        if step % 10 == 9:
            expected = target.make_cache()
            feed(target, expected, text)
            assert_equal(cache, expected, target)
    assert longest > STEP


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


def test_a_checkpoint_overwritten_after_a_restore_is_refused():
    cache = TargetCache([FullKV()])

    def grow(n):
        cache.begin()
        cache.layers[0].update_and_fetch(rows(n), rows(n))
        cache.commit(n)

    grow(4)
    early = cache.checkpoint()
    grow(4)
    late = cache.checkpoint()
    cache.restore(early)
    grow(8)
    with pytest.raises(RuntimeError, match="overwritten"):
        cache.restore(late)
    cache.restore(early)
    assert cache.length == 4


def test_mlx_lm_takes_an_empty_cache_for_true():
    """mlx-lm asks `if cache and hasattr(cache, "make_mask")`: a falsy empty cache would lose its mask."""
    assert bool(FullKV()) and not hasattr(FullKV, "__len__")
