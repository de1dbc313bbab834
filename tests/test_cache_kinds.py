"""What is particular to a kind of cache: the window, moves of buffers, what a checkpoint owns, quantization."""

import json

import mlx.core as mx
import pytest
from kinds import FULL, SLIDING, VOCABULARY, WINDOW, kind, random_llama
from mlx_lm.models.base import create_causal_mask
from mlx_lm.models.cache import QuantizedKVCache, RotatingKVCache
from test_cache import text
from tiny import StubDrafter, byte_tokenizer, command_line

from mlx_dflash import generate, stream_generate
from mlx_dflash.cache import STEP, QuantizedKV, SlidingKV
from mlx_dflash.errors import RequestError, UnsupportedError

LENGTH = 3 * WINDOW


def rows(positions):
    """(1, 2, n, 4) keys that say which position they are of."""
    return mx.broadcast_to(mx.array(list(positions), mx.float32)[None, None, :, None], (1, 2, len(positions), 4))


def append(layer, n):
    """Append n rows; returns the positions that each of them sees."""
    mask = layer.make_mask(n, return_array=True)
    start = layer.offset
    keys, values = layer.update_and_fetch(rows(range(start, start + n)), -rows(range(start, start + n)))
    assert mx.array_equal(keys, -values)
    positions = keys[0, 0, :, 0].tolist()
    if mask is None:
        assert n == 1
        return [positions]
    assert mask.shape == (n, len(positions))
    return [[p for p, visible in zip(positions, row, strict=True) if visible] for row in mask.tolist()]


@pytest.mark.parametrize("window", [1, 2, 5, WINDOW])
def test_a_query_sees_itself_and_the_window_minus_one_before_it(window):
    """mlx-lm's convention, at every width and through rejects."""
    for width in range(1, window + 3):
        for keep in range(1, width + 1):
            layer = SlidingKV(window)
            for _ in range(3 * window // keep + 2):
                layer.begin()
                start = layer.offset
                seen = append(layer, width)
                mask = create_causal_mask(width, start, window_size=window).tolist()
                assert seen == [[j for j, visible in enumerate(row) if visible] for row in mask]
                layer.commit(keep)


def test_masks_are_left_out_where_nothing_is_masked():
    """MLX is fastest without a mask, next with "causal"; one row always gets exactly the rows that it sees."""
    layer = SlidingKV(WINDOW)
    for position in range(3 * WINDOW):
        assert layer.make_mask(1) is None
        wraps = position + 4 > WINDOW
        assert isinstance(layer.make_mask(4), mx.array) == wraps and (wraps or layer.make_mask(4) == "causal")
        append(layer, 1)


@pytest.mark.parametrize("name", ["sliding", "quantized 4, sliding"])
def test_the_window_is_the_one_of_the_model_without_a_cache(name):
    target = kind(name).target
    ids = mx.array([text(4 * WINDOW)])
    assert mx.allclose(target.forward(ids, target.make_cache())[0], target.model(ids), rtol=1e-4, atol=1e-4)
    target.model.model.sliding_window = WINDOW + 1
    other = target.model(ids)
    target.model.model.sliding_window = WINDOW
    assert not mx.allclose(target.forward(ids, target.make_cache())[0], other, rtol=1e-2, atol=1e-2)


def test_one_row_at_a_time_equals_mlx_lms_rotating_cache():
    """The rotating cache rotates the rows of softmax's sum, so equal only within rounding."""
    target = kind("sliding").target
    theirs, ours = target.model.make_cache(), target.make_cache()
    assert any(isinstance(layer, RotatingKVCache) for layer in theirs)
    for token in text(4 * WINDOW):
        ids = mx.array([[token]])
        assert mx.allclose(target.forward(ids, ours)[0], target.model(ids, cache=theirs), rtol=1e-4, atol=1e-4)


def test_the_memory_of_a_window_is_bounded_and_seldom_moved():
    layer, chunk, moves = SlidingKV(WINDOW), 64, 0
    for n in [chunk] * 20 + [WINDOW] * (4 * STEP):
        layer.begin()
        base = layer.base
        append(layer, n)
        moves += layer.base != base
        mx.eval(layer.arrays())
        layer.commit(min(n, 1) if n == WINDOW else n)
        assert layer.keys.shape[2] <= WINDOW + chunk + 2 * STEP
    assert layer.offset == 20 * chunk + 4 * STEP
    assert 0 < moves <= layer.offset / STEP + 1


@pytest.mark.parametrize("keep", [0, 1, WINDOW, 2 * STEP])
def test_buffers_that_move_in_mid_transaction_keep_what_a_reject_needs(keep):
    layer = SlidingKV(WINDOW)
    append(layer, 3 * WINDOW)
    layer.begin()
    for _ in range(4):
        append(layer, STEP)
    assert layer.base > 0
    layer.commit(keep)
    end = 3 * WINDOW + keep
    assert append(layer, 1) == [list(range(end - WINDOW + 1, end + 1))]


def test_a_restored_checkpoint_keeps_its_rows():
    """Whatever is written after it was taken, and after it was restored."""
    layer = SlidingKV(WINDOW)
    append(layer, WINDOW + 5)
    mark = layer.checkpoint()
    saved = (mark.keys.tolist(), mark.values.tolist())
    for _ in range(3):
        for n in (1, WINDOW, STEP):
            layer.begin()
            append(layer, n)
            layer.commit(n)
        layer.restore(mark)
        assert append(layer, 1) == [list(range(6, WINDOW + 6))]
        assert (mark.keys.tolist(), mark.values.tolist()) == saved


def test_a_checkpoint_holds_no_more_than_its_window():
    layer = SlidingKV(WINDOW)
    layer.update_and_fetch(rows(range(4096)), rows(range(4096)))
    mx.eval(layer.arrays())
    before = mx.get_active_memory()
    mark = layer.checkpoint()
    mx.synchronize()
    assert mark.keys.shape == (1, 2, WINDOW - 1, 4)
    assert mx.get_active_memory() - before < 16384
    del layer
    assert mx.get_active_memory() < before


# Quantized keys and values


@pytest.mark.parametrize(("bits", "head_dim"), [(4, 64), (8, 32)])
def test_quantized_rows_equal_mlx_lms(bits, head_dim):
    """Both from token 0: the same packed rows and the same logits, one token at a time."""
    target = random_llama([FULL, FULL], head_dim)
    size = 64 if head_dim % 64 == 0 else 32
    ours, theirs = target.make_cache(bits), [QuantizedKVCache(size, bits) for _ in range(2)]
    plain = target.make_cache()
    apart = 0.0
    for token in text(2 * WINDOW):
        ids = mx.array([[token]])
        logits = target.forward(ids, ours)[0]
        assert mx.array_equal(logits, target.model(ids, cache=theirs))
        apart = max(apart, mx.abs(logits - target.forward(ids, plain)[0]).max().item())
    for a, b in zip(ours.layers, theirs, strict=True):
        for mine, other in ((a.keys, b.keys), (a.values, b.values)):
            for x, y in zip(mine, other, strict=True):
                assert mx.array_equal(x[..., : a.offset, :], y[..., : b.offset, :])
    assert apart > 1e-3  # they were quantized


def test_the_quantization_group_is_the_largest_that_fits():
    assert [layer.group_size for layer in random_llama([FULL], 64).make_cache(4).layers] == [64]
    assert [layer.group_size for layer in random_llama([FULL], 96).make_cache(4).layers] == [32]
    assert [layer.group_size for layer in random_llama([FULL], 64).make_cache(4, 32).layers] == [32]
    with pytest.raises(UnsupportedError, match="head_dim of 96 is no multiple of 64"):
        random_llama([FULL], 96).make_cache(4, 64)
    with pytest.raises(UnsupportedError, match="head_dim of 16 is no multiple of 64 or 32"):
        random_llama([FULL], 16).make_cache(8)


def test_a_family_can_refuse_quantized_keys_and_values():
    target = random_llama([FULL], 64)
    target.kv_bits_refusal = "it has sinks"
    assert target.make_cache().length == 0
    with pytest.raises(UnsupportedError, match="llama: it has sinks"):
        target.make_cache(4)


def test_only_full_attention_is_quantized():
    """A window is small, and mlx-lm has no quantized one."""
    cache = random_llama([SLIDING, FULL], 32).make_cache(4)
    assert [type(layer) for layer in cache.layers] == [SlidingKV, QuantizedKV]


def test_quantized_buffers_are_smaller():
    wide, narrow = (random_llama([FULL], 64).make_cache(bits) for bits in (8, 4))
    plain = random_llama([FULL], 64).make_cache()
    for cache in (wide, narrow, plain):
        cache.layers[0].update_and_fetch(mx.zeros((1, 2, 9, 64)), mx.zeros((1, 2, 9, 64)))
    sizes = [sum(array.nbytes for array in cache.arrays()) for cache in (narrow, wide, plain)]
    assert sizes[0] < 0.6 * sizes[1] and sizes[1] < 0.6 * sizes[2]


# Through the loop


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    tokenizer = byte_tokenizer(tmp_path_factory.mktemp("tokenizer"))
    tokenizer.eos_token_ids = []  # random targets say anything at any time
    return tokenizer


def script(plain, prompt, right):
    """Drafts that are right for `right` tokens and wrong from there on."""

    def drafts(position):
        true = (plain + [0] * 64)[position - len(prompt) :][:64]
        return [t if i < right else (t + 1) % VOCABULARY for i, t in enumerate(true)]

    return drafts


@pytest.mark.parametrize("start", [4, WINDOW - 2])
@pytest.mark.parametrize(
    ("layer_types", "head_dim", "options"),
    [
        ([SLIDING, FULL, SLIDING], 16, {}),
        ([FULL, FULL], 64, {"kv_bits": 4}),
        ([FULL, FULL], 64, {"kv_bits": 4, "kv_group_size": 32}),
        ([FULL, FULL], 32, {"kv_bits": 8}),
        ([SLIDING, FULL], 32, {"kv_bits": 8}),
    ],
    ids=str,
)
def test_tokens_with_a_drafter_equal_those_without(tokenizer, start, layer_types, head_dim, options):
    target, prompt = random_llama(layer_types, head_dim), text(start)
    options = {"max_tokens": LENGTH, "prefill_step_size": 5, **options}
    plain = generate(target, tokenizer, prompt, **options)
    assert len(plain.tokens) == LENGTH and len(set(plain.tokens)) > 8
    for right in (0, 2, 7):
        drafter = StubDrafter(target, script(plain.tokens, prompt, right))
        run = generate(target, tokenizer, prompt, draft_model=drafter, block_size=8, **options)
        assert run.tokens == plain.tokens
        assert set(run.stats.acceptance_lengths[:-1]) == {right + 1}


@pytest.mark.parametrize(
    ("option", "value"), [("kv_bits", 3), ("kv_bits", 16), ("kv_bits", 0), ("kv_group_size", 128), ("kv_group_size", 0)]
)
def test_other_quantization_settings_are_refused(tokenizer, option, value):
    with pytest.raises(RequestError, match=f"{option} must be .* not {value}"):
        stream_generate(kind("quantized 4").target, tokenizer, [5], **{option: value})


def test_a_target_that_can_not_be_quantized_refuses_before_anything_runs(tokenizer):
    with pytest.raises(UnsupportedError, match="head_dim of 16"):
        stream_generate(kind("full").target, tokenizer, [5], kv_bits=4)


@pytest.mark.parametrize("argv", [["--kv-bits", "4"], ["--kv-bits", "4", "--kv-group-size", "32"]])
def test_the_command_line_quantizes(tmp_path, capfd, argv):
    target, prompt = random_llama([FULL, FULL], head_dim=64), "a quantized cache"
    tokenizer = byte_tokenizer(tmp_path)
    target.model.save_weights(str(tmp_path / "model.safetensors"))
    (tmp_path / "config.json").write_text(json.dumps(target.config))
    with pytest.raises(SystemExit) as exit_:
        command_line().main(["--model", str(tmp_path), "--prompt", prompt, "--max-tokens", "12", "--json", *argv])
    out, err = capfd.readouterr()
    assert exit_.value.code == 0, err
    options = {"kv_bits": 4, "kv_group_size": 32 if "32" in argv else None, "max_tokens": 12}
    tokens = generate(target, tokenizer, prompt, **options).tokens
    assert json.loads(out)["tokens"] == tokens
    assert generate(target, tokenizer, prompt, max_tokens=12).tokens != tokens
