"""What a drafter remembers: masks, windows that keep memory bounded, checkpoints; and DFlash 2's parts.

No torch reference knows every mask rule, so rules are held against a mask written out in numpy; the golden pairs of
test_parity.py cover each format's own.
"""

import random
from functools import cache

import mlx.core as mx
import numpy as np
import pytest
import tiny
from mlx_dflash.benchmarks.machine import rows_independent

from mlx_dflash import load, load_drafter
from mlx_dflash.accept import greedy
from mlx_dflash.cache import STEP
from mlx_dflash.drafters.config import DFlash2
from mlx_dflash.drafters.context import ContextKV, DraftContext
from mlx_dflash.drafters.dflash import MAX_PENDING
from mlx_dflash.drafters.dflash2 import BlockConv
from mlx_dflash.drafters.masks import Visibility

WINDOW = 12
FAMILIES = ("qwen3", "qwen3_sliding", "qwen3_allsliding", "qwen3_bidir", "qwen3_causal_yarn")
FAMILIES += ("qwen3_dflash2", "qwen3_speculators", "muse_glimmer")


@cache
def drafter_of(family):
    return load_drafter(tiny.draft_folder(family), load(tiny.target_folder(family))[0])


def features_of(drafter, count, seed=0):
    width = len(drafter.taps) * drafter.target.hidden_size
    return mx.random.normal((1, count, width), key=mx.random.key(seed))


def block(drafter, context, rows=8):
    ids, logits = drafter.draft(mx.array([17], mx.uint32), rows, context, greedy)
    return ids.tolist(), np.array(logits)


def fresh(drafter, features):
    context = drafter.make_context()
    drafter.append(features, context)
    return context


def assert_same_block(got, expected):
    """Bit for bit where a matmul's rows don't depend on how many there are."""
    assert got[0] == expected[0]
    if rows_independent():
        assert np.array_equal(got[1], expected[1])
    else:
        assert np.abs(got[1] - expected[1]).max() < 1e-4


RULES = {
    "full": Visibility(),
    "is_causal true, full": Visibility(None, 0),
    "sliding, causal": Visibility(WINDOW - 1, 0),
    "is_causal false, sliding": Visibility(WINDOW - 1, WINDOW - 1),
    "narrower than the block": Visibility(2, 2),
    "Muse": Visibility(WINDOW, WINDOW),
    "speculators, causal": Visibility(WINDOW, 0, from_anchor=True),
    "speculators, non-causal": Visibility(WINDOW, None, from_anchor=True),
}


@pytest.mark.parametrize("name", list(RULES))
def test_masks_equal_brute_force(name):
    rule = RULES[name]
    seen_partial = False
    for anchor in (0, 1, WINDOW - 1, WINDOW, WINDOW + 1, 30):
        for rows in range(1, 9):
            expected = np.zeros((rows, anchor + rows), bool)
            for q in range(anchor, anchor + rows):
                for k in range(anchor + rows):
                    back = anchor if rule.from_anchor else q
                    behind = rule.behind is None or k >= back - rule.behind
                    ahead = rule.ahead is None or k <= q + rule.ahead
                    expected[q - anchor, k] = behind and ahead
            kept = anchor if rule.behind is None else min(anchor, rule.behind)
            assert not expected[:, : anchor - kept].any()  # what a bounded context drops was hidden anyway
            mask = rule.mask(kept, rows)
            got = np.ones((rows, kept + rows), bool) if mask is None else np.array(mask)
            assert np.array_equal(got, expected[:, anchor - kept :])
            seen_partial |= not got.all()
    assert seen_partial == (name not in ("full", "speculators, non-causal"))


@pytest.mark.parametrize("family", FAMILIES)
def test_attention_equals_softmax_over_the_visible_rows(family):
    """Each layer's attention in numpy, over all context rows ever given, with the rule's mask in brute force."""
    drafter = drafter_of(family)
    layers, width = drafter.model.layers, drafter.config.hidden_size
    noise = mx.random.normal((1, 8, width), key=mx.random.key(1))
    context = mx.random.normal((1, 40, width), key=mx.random.key(2))
    for layer in layers:
        attention = layer.self_attn
        kv = ContextKV(attention.sees.behind)
        for at in range(0, 35, 7):
            attention.remember(context[:, at : at + 7], kv, at + 7)
        got = attention(noise, context[:, 35:], kv, 40)
        q = np.array(attention.queries(noise, 40))[0]
        k, v = (np.array(a)[0] for a in attention.keys_values(mx.concatenate([context, noise], axis=1), 0))
        q_at, k_at = 40 + np.arange(8)[:, None], np.arange(48)[None]
        rule = attention.sees
        visible = np.ones((8, 48), bool)
        if rule.behind is not None:
            visible &= k_at >= (40 if rule.from_anchor else q_at) - rule.behind
        if rule.ahead is not None:
            visible &= k_at <= q_at + rule.ahead
        k, v = (np.repeat(a, q.shape[0] // a.shape[0], axis=0) for a in (k, v))
        scores = np.where(visible, q @ k.transpose(0, 2, 1) * attention.scale, -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        out = (weights / weights.sum(-1, keepdims=True)) @ v
        expected = attention.o_proj(mx.array(out.transpose(1, 0, 2).reshape(1, 8, -1).astype(np.float32)))
        assert mx.abs(got - expected).max().item() < 1e-4


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("total", [1, WINDOW - 1, WINDOW, WINDOW + 1, 100, 2 * MAX_PENDING + 5])
def test_chunks_of_any_size_leave_the_same_context(family, total):
    drafter = drafter_of(family)
    features = features_of(drafter, total)
    expected = block(drafter, fresh(drafter, features))
    for chunk in (1, 7, 64):
        context = drafter.make_context()
        for at in range(0, total, chunk):
            drafter.append(features[:, at : at + chunk], context)
            assert context.length == min(at + chunk, total)
        assert_same_block(block(drafter, context), expected)


@pytest.mark.parametrize("family", FAMILIES)
def test_random_histories_draft_as_a_fresh_context_does(family):
    """Appends of any size, blocks in between, checkpoints and restores, past the window and past a buffer."""
    drafter = drafter_of(family)
    rng = random.Random(3)
    features = features_of(drafter, 0)
    context = drafter.make_context()
    marks = [(context.checkpoint(), features)]
    longest = 0
    for step in range(60):
        more = features_of(drafter, rng.choice([1, 1, 3, 8, 30, 90]), seed=step + 1)
        drafter.append(more, context)
        features = mx.concatenate([features, more], axis=1)
        action = rng.choice(["draft", "draft", "mark", "restore", "nothing"])
        if action == "mark":
            marks.append((context.checkpoint(), features))
        elif action == "restore":
            mark, features = rng.choice(marks[-3:])
            context.restore(mark)
            marks = [m for m in marks if m[1].shape[1] <= features.shape[1]]
        elif action == "draft":
            block(drafter, context, rng.randint(2, 8))
        assert context.length == features.shape[1]
        longest = max(longest, context.length)
        if step % 10 == 9 and context.length:
            assert_same_block(block(drafter, context), block(drafter, fresh(drafter, features)))
    assert longest > STEP + WINDOW


def test_a_checkpoint_overwritten_after_a_restore_is_refused():
    drafter = drafter_of("qwen3_sliding")
    context = fresh(drafter, features_of(drafter, 20))
    block(drafter, context)
    early = context.checkpoint()
    drafter.append(features_of(drafter, 20), context)
    block(drafter, context)
    late = context.checkpoint()
    context.restore(early)
    drafter.append(features_of(drafter, 40), context)
    with pytest.raises(RuntimeError, match="overwritten"):
        context.restore(late)
    context.restore(early)
    assert context.length == 20


def size(arrays):
    return sum(a.nbytes for a in arrays)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("plain", [False, True], ids=["drafting", "plain rounds"])
def test_windowed_layers_hold_their_window_and_no_more(family, plain):
    drafter = drafter_of(family)
    context = drafter.make_context()
    features = features_of(drafter, 500)
    largest = 0
    for at in range(600):
        drafter.append(features[:, at % 400 : at % 400 + 3], context)
        if not plain and at % 10 == 0:
            mx.eval(drafter.logits(mx.array([5], mx.uint32), 8, context))
        for layer in context.layers:
            rows = layer.keys.shape[2] if layer.keys is not None else 0
            assert layer.reach is None or rows <= layer.reach + MAX_PENDING + 8 + STEP
        if context.reach is not None:
            assert context.pending_rows < context.reach + 3
            largest = max(largest, size(context.arrays()))
        assert context.pending_rows <= MAX_PENDING
    assert context.length == 1800
    reaches = [layer.reach for layer in context.layers]
    assert reaches == [rule.behind for rule in (drafter.config.sees(i) for i in range(len(reaches)))]
    if context.reach is not None:
        assert largest < 2 * 2**20
    for layer in context.layers:
        if layer.reach is None:
            assert layer.end + context.pending_rows == 1800
        elif layer.keys is not None and not plain:
            assert layer.end - layer.base >= layer.reach


def test_a_long_prompt_leaves_a_windowed_drafter_its_window():
    """One chunk of 3000 rows: only what a block can see is projected or kept."""
    drafter = drafter_of("qwen3_allsliding")
    features = features_of(drafter, 3000)
    context = fresh(drafter, features)
    assert context.length == 3000 and context.pending_rows == WINDOW - 1
    expected = drafter.make_context()
    for at in range(0, 3000, 250):
        drafter.append(features[:, at : at + 250], expected)
        block(drafter, expected)
    assert_same_block(block(drafter, context), block(drafter, expected))
    assert context.layers[0].keys.shape[2] <= STEP


@pytest.mark.parametrize("gap", [0, 40])
def test_a_windowed_buffer_stays_small_and_in_order(gap):
    """Rows of 3 and 5 of noise, 2,000 times; with a gap, rows in between that no block will see."""
    kv, reach, at = ContextKV(WINDOW), WINDOW, 0
    for step in range(2000):
        new = WINDOW if gap else 3
        at += gap if step else 0
        rows = mx.arange(at, at + new + 5, dtype=mx.float32)[None, None, :, None]
        keys, values = kv.update(rows, -rows, at, new)
        at += new
        assert kv.keys.shape[2] <= reach + STEP and kv.end == at
        if step % 50 == 49:
            first = max(at - reach, 0)
            assert keys.flatten().tolist() == list(range(first, at + 5))
            assert mx.array_equal(keys, -values)


def test_a_saved_window_is_a_copy():
    """What follows a checkpoint must not reach its arrays."""
    kv = ContextKV(4)
    rows = mx.arange(64, dtype=mx.float32).reshape(1, 1, 64, 1)
    kv.update(rows[:, :, :10], rows[:, :, :10], 0, 10)
    saved = kv.checkpoint()
    kv.update(rows[:, :, 20:23], rows[:, :, 20:23], 10, 3)
    kv.restore(saved)
    keys, _ = kv.update(rows[:, :, 50:52], rows[:, :, 50:52], 10, 1)
    assert keys.flatten().tolist() == [7, 8, 9, 50, 51]
    assert saved.keys.flatten().tolist() == [6, 7, 8, 9]
    assert kv.end == 11


def test_contexts_of_one_drafter_are_independent():
    drafter = drafter_of("qwen3_sliding")
    one, two = features_of(drafter, 30, seed=1), features_of(drafter, 45, seed=2)
    first, second = drafter.make_context(), drafter.make_context()
    drafter.append(one[:, :20], first)
    drafter.append(two, second)
    block(drafter, second)
    drafter.append(one[:, 20:], first)
    assert_same_block(block(drafter, first), block(drafter, fresh(drafter, one)))


def test_reach_is_the_widest_layers():
    assert DraftContext([11, None]).reach is None and DraftContext([11, 4]).reach == 11


# DFlash 2


def test_convolutions_see_block_rows_only_and_start_from_zero():
    width, groups, taps = 12, 4, 3
    conv = BlockConv(width, DFlash2(taps, width // groups, 2, 2))
    conv.base_kernel = mx.random.normal(conv.base_kernel.shape, key=mx.random.key(0))
    x = mx.random.normal((1, 5, width), key=mx.random.key(1))
    rows, kernel = conv.before(x)
    dynamic = np.array(conv.kernel_projection(x)).reshape(5, 2, taps, groups)
    base, inputs = np.array(conv.base_kernel), np.array(x[0])
    for which, got in ((0, rows), (1, conv.after(x, kernel))):
        expected = np.zeros((5, width))
        for t in range(5):
            for channel in range(width):
                for tap in range(min(taps, t + 1)):
                    weight = base[which, tap, channel] + dynamic[t, which, tap, channel // (width // groups)]
                    expected[t, channel] += weight * inputs[t - tap, channel]
        assert np.abs(np.array(got[0]) - expected).max() < 1e-5


@pytest.mark.parametrize("rows", [2, 3, 8])
def test_the_selector_walks_left_to_right_as_a_loop_does(rows):
    drafter = drafter_of("qwen3_dflash2")
    context = fresh(drafter, features_of(drafter, 30))
    hidden = drafter.hidden(mx.array([17], mx.uint32), rows, context)
    logits = np.array(drafter.head(hidden)[0])
    selector = drafter.model.candidate_selector
    before, after = np.array(selector.predecessor_codebook), np.array(selector.successor_codebook)
    projected = np.array(selector.hidden_projection(hidden)[0])
    previous, path = 17, []
    for slot in range(rows - 1):
        best = np.argsort(-logits[slot])[: selector.top_k]
        scores = logits[slot, best] + (before[previous] * projected[slot] * after[best]).sum(-1)
        previous = int(best[scores.argmax()])
        path.append(previous)
    ids, _ = drafter.draft(mx.array([17], mx.uint32), rows, context, greedy)
    assert ids.tolist() == path
    assert rows < 8 or path != logits.argmax(-1).tolist()  # the selector changes something


@pytest.mark.parametrize("family", FAMILIES)
def test_drafting_reads_nothing_on_the_host(family, monkeypatch):
    drafter = drafter_of(family)
    context = fresh(drafter, features_of(drafter, 30))

    def forbidden(*args, **kwargs):
        raise AssertionError("a host read while drafting")

    for name in ("tolist", "item", "__bool__", "__int__", "__float__", "__index__", "__array__"):
        if hasattr(mx.array, name):
            monkeypatch.setattr(mx.array, name, forbidden)
    monkeypatch.setattr(mx, "eval", forbidden)
    ids = drafter.propose(mx.array([17], mx.uint32), 8, context, greedy)
    monkeypatch.undo()
    assert ids.shape == (7,) and ids.dtype == mx.uint32 and len(ids.tolist()) == 7


@pytest.mark.parametrize("chunk", [1, 6, 40, 1000])
@pytest.mark.parametrize(("window", "sink"), [(8, 0), (8, 4), (1, 3), (30, 7)])
def test_a_draft_window_sees_the_last_rows_and_the_sink(window, sink, chunk):
    """Against the same rows picked by hand out of a context that holds all, through drafts and a restore."""
    drafter = drafter_of("qwen3")
    features = features_of(drafter, 100)
    context = drafter.make_context(window=window, sink=sink)
    mark, drafted = None, False
    for at in range(0, 100, chunk):
        drafter.append(features[:, at : at + chunk], context)
        if context.length in (6, 40):
            mark = mark or context.checkpoint()
        drafted = drafted or bool(block(drafter, context))
        assert_same_block(block(drafter, context), windowed_block(drafter, features[:, : at + chunk], window, sink))
    assert drafted and all(layer.keys.shape[2] <= window + STEP + chunk for layer in context.layers)
    if mark is not None:
        context.restore(mark)
        at = context.length
        drafter.append(features[:, at : at + 9], context)
        assert_same_block(block(drafter, context), windowed_block(drafter, features[:, : at + 9], window, sink))


def windowed_block(drafter, features, window, sink):
    """The block that a drafter with all rows drafts if every layer shows it only the window and the sink."""
    context = fresh(drafter, features)
    block(drafter, context)
    at = context.length
    picked = [*range(min(sink, max(at - window, 0))), *range(max(at - window, 0), at)]
    for kv in context.layers:
        whole = kv.update

        def update(keys, values, start, new, whole=whole):
            all_keys, all_values = whole(keys, values, start, new)
            rows = mx.array([*picked, *range(at, all_keys.shape[2])])
            return all_keys[:, :, rows], all_values[:, :, rows]

        kv.update = update
    return block(drafter, context)
