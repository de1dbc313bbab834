"""Recurrent states that rewind: after any sequence of steps they have the bits of one built from the committed tokens.

Bit for bit where a matmul's rows don't depend on how many there are (the reference BLAS), within rounding elsewhere.
The recurrence itself goes row by row, so a layer's own state is bit-equal everywhere.
"""

import random
from pathlib import Path

import mlx.core as mx
import pytest
from kinds import Kind, Marks

from mlx_dflash import load
from mlx_dflash.cache import DeltaRows, QuantizedKV, RecurrentState, TargetCache, recurrent

GOLDEN = Path(__file__).parent / "golden"
KERNEL = 4
HEADS, DIM, CHANNELS = 2, 32, 6


def delta_rows(n, seed=0, dtype=mx.float32):
    """n rows for one layer, with what its convolution gets beside them."""
    keys = iter(mx.random.split(mx.random.key(seed), 8))
    q, k, v = (0.3 * mx.random.normal((1, n, HEADS, DIM), dtype, key=next(keys)) for _ in range(3))
    decay, beta = (mx.random.normal((1, n, HEADS), dtype, key=next(keys)) for _ in range(2))
    A_log, dt_bias = (mx.random.normal((HEADS,), key=next(keys)) for _ in range(2))
    return mx.random.normal((1, n, CHANNELS), dtype, key=next(keys)), DeltaRows(q, k, v, decay, beta, A_log, dt_bias)


def rows_from(inputs, rows, start, stop):
    part = [x[:, start:stop] for x in rows[:5]]
    return inputs[:, start:stop], DeltaRows(*part, rows.A_log, rows.dt_bias)


def append(state, inputs, rows):
    return state.append(state.conv_inputs(inputs, KERNEL), rows)


def one_by_one(inputs, rows, n):
    state = RecurrentState()
    for i in range(n):
        append(state, *rows_from(inputs, rows, i, i + 1))
    return state


def assert_same(state, other):
    assert state.offset == other.offset
    for a, b in zip(state.arrays(), other.arrays(), strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype and mx.array_equal(a, b)


@pytest.mark.parametrize("start", [0, 1, 2, 3, 9])
def test_every_width_and_every_kept_length(start):
    inputs, rows = delta_rows(start + 18)
    expected = [one_by_one(inputs, rows, start + keep) for keep in range(19)]
    for width in range(1, 19):
        for keep in range(width + 1):
            state = RecurrentState()
            state.begin()
            if start:
                append(state, *rows_from(inputs, rows, 0, start))
            state.commit(start)
            state.begin()
            append(state, *rows_from(inputs, rows, start, start + width))
            state.commit(keep)
            assert_same(state, expected[keep])


@pytest.mark.parametrize("splits", [(3, 6), (1, 2, 3), (5, 8), (1, 2, 3, 4, 5, 6, 7, 8)])
def test_a_transaction_of_several_passes_keeps_any_number_of_rows(splits):
    inputs, rows = delta_rows(9)
    for keep in range(10):
        state = RecurrentState()
        state.begin()
        for a, b in zip((0, *splits), (*splits, 9), strict=True):
            append(state, *rows_from(inputs, rows, a, b))
        assert state.offset == 9
        state.commit(keep)
        assert_same(state, one_by_one(inputs, rows, keep))


def test_rejects_one_after_another_and_rows_that_differ_from_the_rejected_ones():
    inputs, rows = delta_rows(12)
    wrong = delta_rows(12, seed=1)
    state = RecurrentState()
    at = 0
    for keep, width in [(2, 6), (1, 8), (0, 3), (3, 4), (5, 5), (1, 9)]:
        state.begin()
        right = rows_from(inputs, rows, at, at + keep)
        false = rows_from(*wrong, 0, width - keep)
        both = [mx.concatenate(pair, axis=1) for pair in zip(right[1][:5], false[1][:5], strict=True)]
        append(state, mx.concatenate([right[0], false[0]], axis=1), DeltaRows(*both, rows.A_log, rows.dt_bias))
        state.commit(keep)
        at += keep
        assert_same(state, one_by_one(inputs, rows, at))


def test_the_recurrence_runs_again_only_for_partial_rejects(monkeypatch):
    inputs, rows = delta_rows(6)
    state = RecurrentState()
    calls = []
    update = recurrent.gated_delta_update
    monkeypatch.setattr(recurrent, "gated_delta_update", lambda *a: calls.append(a[0].shape[1]) or update(*a))
    for keep, expected in [(6, [6]), (0, [6]), (4, [6, 4])]:
        state.begin()
        append(state, inputs, rows)
        state.commit(keep)
        assert calls == expected
        calls.clear()


def test_states_are_fp32_whatever_the_rows_are():
    inputs, rows = delta_rows(5, dtype=mx.bfloat16)
    state = RecurrentState()
    state.begin()
    out = append(state, inputs, rows)
    state.commit(3)
    conv, matrix = state.arrays()
    assert matrix.dtype == mx.float32
    assert conv.dtype == out.dtype == mx.bfloat16


def test_checkpoints_are_not_touched_by_what_follows():
    inputs, rows = delta_rows(30)
    state = RecurrentState()
    marks = []
    for at in range(0, 30, 5):
        marks.append(state.checkpoint())
        state.begin()
        append(state, *rows_from(inputs, rows, at, at + 5))
        mx.eval(state.arrays())
        state.commit(5)
    for at, mark in reversed(list(enumerate(marks))):
        state.restore(mark)
        assert_same(state, one_by_one(inputs, rows, 5 * at))
    state.restore(marks[5])
    assert_same(state, one_by_one(inputs, rows, 25))


def test_recorded_rows_are_dropped_with_the_transaction():
    inputs, rows = delta_rows(2048)
    mx.eval(inputs, *rows)
    state = RecurrentState()
    before = mx.get_active_memory()
    for keep in (3, 2048, 0):
        state.begin()
        copies = DeltaRows(*(x + 0 for x in rows))  # held by nothing but the record
        append(state, inputs + 0, copies)
        mx.eval(copies)
        del copies
        state.commit(keep)
        mx.eval(state.arrays())
        kept = sum(x.nbytes for x in state.arrays())
        assert mx.get_active_memory() - before <= 4 * kept + 2**16 < rows.queries.nbytes


# The same through whole targets; tests/test_cache.py has more of it for one of them.


@pytest.fixture(scope="module", params=["qwen3_next", "qwen3_5", "qwen3_5_moe"])
def hybrid(request):
    return Kind(load(GOLDEN / request.param / "target")[0], tolerance=1e-3)


def some_ids(n, seed):
    rng = random.Random(seed)
    return [rng.randrange(3, 290) for _ in range(n)]


def test_most_layers_of_the_tiny_targets_are_recurrent(hybrid):
    kinds = [type(layer).__name__ for layer in hybrid.make_cache().layers]
    assert kinds == ["RecurrentState"] * 3 + ["FullKV"] + ["RecurrentState"] * 3 + ["FullKV"]


def test_logits_are_those_of_mlx_lm_with_its_own_cache(hybrid):
    ids = some_ids(23, 0)
    model = hybrid.target.model
    theirs, ours = model.make_cache(), hybrid.make_cache()
    for part in (ids[:9], ids[9:10], ids[10:11], ids[11:]):
        ours.begin()
        logits = hybrid.forward(ours, part)
        ours.commit(len(part))
        assert mx.array_equal(logits, model(mx.array([part]), cache=theirs))


@pytest.mark.parametrize("chunk", [1, 7])
def test_prefill_chunks_leave_the_same_cache(hybrid, chunk):
    ids = some_ids(40, 3)
    hybrid.assert_equal(hybrid.feed(hybrid.make_cache(), ids, chunk), hybrid.built(ids))


def test_random_sequences_of_transactions(hybrid):
    """Rejects, transactions of two passes, aborts, checkpoints and restores."""
    rng = random.Random(5)
    text = some_ids(5, 4)
    marks = Marks(hybrid.built(text), text)
    for step in range(30):
        block = some_ids(rng.randint(1, 8), step)
        cut = rng.randint(0, len(block))
        marks.cache.begin()
        for part in (block[:cut], block[cut:]):
            if part:
                hybrid.forward(marks.cache, part)
        marks.end(rng, block)
        if step % 6 == 5:
            fed = hybrid.feed(hybrid.make_cache(), marks.text, rng.choice([None, 1, 3]))
            hybrid.assert_equal(marks.cache, fed)
    assert marks.longest > 25


def test_states_beside_quantized_keys_and_values(hybrid):
    kind = Kind(hybrid.target, kv_bits=8, tolerance=0.05)
    assert any(isinstance(layer, QuantizedKV) for layer in kind.make_cache().layers)
    ids = some_ids(9, 6)
    cache = kind.built(ids[:4])
    for keep, rows in ((2, ids[4:]), (3, ids[6:])):
        cache.begin()
        kind.forward(cache, rows)
        cache.commit(keep)
    kind.assert_equal(cache, kind.built(ids))


def test_commit_refuses_a_recurrent_layer_that_got_too_few_rows():
    cache = TargetCache([RecurrentState(), RecurrentState()])
    cache.begin()
    inputs, rows = delta_rows(3)
    append(cache.layers[0], inputs, rows)
    append(cache.layers[1], *rows_from(inputs, rows, 0, 2))
    with pytest.raises(RuntimeError, match="can't keep 3 of 2"):
        cache.commit(3)
    cache.abort()
    assert cache.length == 0


def test_mlx_lm_takes_an_empty_state_for_true():
    assert bool(RecurrentState()) and not hasattr(RecurrentState, "__len__")
