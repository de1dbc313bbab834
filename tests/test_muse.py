"""Muse Glimmer: windows with RoPE, full layers without positions, normed embeddings, softcap, and a vision tower."""

import json
import shutil
from pathlib import Path

import mlx.core as mx
import pytest
from mlx_dflash.benchmarks.machine import rows_independent
from mlx_lm.convert import convert
from mlx_lm.models import muse_glimmer
from stubs import assert_width_equals_plain, greedy_from_scratch, in_another_thread, logits_of, mlx_lm_greedy

from mlx_dflash import generate, load
from mlx_dflash.cache import FullKV, QuantizedKV, SlidingKV
from mlx_dflash.errors import CheckpointError, UnsupportedError
from mlx_dflash.targets.config import normalise
from mlx_dflash.targets.muse_glimmer import MuseGlimmer

FOLDER = Path(__file__).parent / "golden" / "muse_glimmer_zlab" / "target"
WINDOW = 16
LENGTH = 30
PROMPT = [17, 230, 5, 88, 141, 9, 63, 254, 77, 12, 199]  # the run begins before the window's end and crosses it
TEXT = [(37 * i) % 287 + 3 for i in range(3 * WINDOW)]
S, F = "sliding_attention", "full_attention"


@pytest.fixture(scope="module")
def loaded():
    return load(FOLDER)


@pytest.fixture(scope="module")
def target(loaded):
    return loaded[0]


@pytest.fixture(scope="module")
def greedy(target):
    return greedy_from_scratch(target, PROMPT, LENGTH)


def published():
    return json.loads((FOLDER / "config.json").read_text())


def folder_with(folder, config):
    shutil.copytree(FOLDER, folder)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def flattened():
    """As mlx-lm's conversions write it: the text's keys at top level, with `rope_parameters` or without."""
    config = published()
    return {**config.pop("text_config"), **config}


def bare():
    config = flattened()
    config["rope_theta"] = config.pop("rope_parameters")["rope_theta"]
    del config["layer_types"], config["layer_rope_theta"]
    return config


@pytest.mark.parametrize("layout", [flattened, bare])
def test_nested_and_flat_configs_give_the_same_model(target, tmp_path, layout):
    assert "text_config" in published()
    flat = load(folder_with(tmp_path / "flat", layout()))[0]
    assert mx.array_equal(logits_of(target, TEXT), logits_of(flat, TEXT))


def test_settings_of_the_text_are_read_not_assumed(target, tmp_path):
    """Each of these has a default in mlx-lm that the tiny config differs from."""
    for key, value in {"output_multiplier": 0.3, "qk_scale_factor": 2.0, "post_norm_eps": 0.5}.items():
        config = published()
        config["text_config"][key] = value
        other = load(folder_with(tmp_path / key, config))[0]
        assert mx.abs(logits_of(target, TEXT) - logits_of(other, TEXT)).max() > 0.01


def test_the_vision_tower_is_dropped_and_nothing_else(tmp_path):
    weights = mx.load(str(FOLDER / "model.safetensors"))
    vision = {name.split(".")[1] for name in weights if name.startswith("model.vision")}
    assert vision == {"vision_tower", "vision_adapter", "vision_projection"}
    folder = folder_with(tmp_path / "more", published())
    mx.save_safetensors(str(folder / "model.safetensors"), {**weights, "model.visions.weight": mx.ones((2, 2))})
    with pytest.raises(CheckpointError, match="does not load as muse_glimmer"):
        load(folder)


def test_the_drafter_gets_raw_embedding_rows(target):
    table = mx.load(str(FOLDER / "model.safetensors"))["model.language_model.embed_tokens.weight"]
    rows = target.embed(mx.array([PROMPT]))
    assert mx.array_equal(rows[0], table[mx.array(PROMPT)])
    normed = mx.fast.rms_norm(rows, None, target.config["rms_norm_eps"])
    assert mx.array_equal(target.first(mx.array([PROMPT])), normed)
    assert mx.abs(rows - normed).max() > 0.1


def test_logits_are_multiplied_and_capped_and_the_head_is_bare(target):
    hidden = mx.random.normal((1, 3, target.hidden_size), key=mx.random.key(1)) * 50
    normed = target.norm(hidden)
    bare = normed @ mx.load(str(FOLDER / "model.safetensors"))["lm_head.weight"].T
    assert mx.allclose(target.head(normed), bare, atol=1e-5)
    expected = 20 * mx.tanh(bare * target.config["output_multiplier"] / 20)
    assert mx.allclose(target.logits(hidden), expected, atol=1e-5)
    assert mx.abs(bare).max() > 2 > target.config["output_multiplier"] != 1


@pytest.mark.parametrize("nested", [False, True])
def test_full_layers_are_counted_from_the_last_one(nested):
    """mlx-lm counts from the first, which is another model where the number of layers is no multiple of 4."""
    config = published() if nested else bare()
    (config["text_config"] if nested else config).update(num_hidden_layers=6, layer_types=None, layer_rope_theta=None)
    args = muse_glimmer.ModelArgs.from_dict(MuseGlimmer.prepare(normalise(config)))
    assert args.layer_types == [S, F, S, S, S, F]
    assert args.layer_rope_theta == [500000.0, 0, 500000.0, 500000.0, 500000.0, 0]


def test_full_layers_have_no_positions(target):
    assert ["rope" in layer.self_attn for layer in target.model.layers] == [True, True, True, False] * 2


def metas_names(weights):
    """Hugging Face's names -> those of Meta's own files, which are what mlx-lm converts."""
    for name, value in weights.items():
        if name.startswith("model.vision"):
            yield name.removeprefix("model."), value
        else:
            head, tail = ("model.", "model.language_model.") if name.startswith("model.") else ("", "")
            yield f"language_model.{head}{name.removeprefix(tail)}", value


def test_a_folder_quantized_by_mlx_lm_gives_its_tokens(target, tmp_path):
    source, folder = folder_with(tmp_path / "metas", published()), str(tmp_path / "quantized")
    weights = mx.load(str(FOLDER / "model.safetensors"))
    mx.save_safetensors(str(source / "model.safetensors"), dict(metas_names(weights)), metadata={"format": "pt"})
    assert mx.array_equal(logits_of(target, TEXT), logits_of(load(source)[0], TEXT))

    def all_but_embedding(path, *_):  # MLX can't look up a single nvfp4 row of 48
        return not path.endswith("embed_tokens")

    convert(str(source), folder, quantize=True, q_bits=4, q_mode="nvfp4", quant_predicate=all_but_embedding)
    expected, lead = mlx_lm_greedy(folder, PROMPT, LENGTH)
    assert lead > 1e-3
    quantized, tokenizer = load(folder)
    assert generate(quantized, tokenizer, PROMPT, max_tokens=LENGTH).tokens == expected
    assert greedy_from_scratch(target, PROMPT, LENGTH) != expected


def test_the_first_forward_may_come_in_another_thread(target):
    fresh = load(FOLDER)[0]
    assert in_another_thread(lambda: logits_of(fresh, TEXT).tolist()) == logits_of(target, TEXT).tolist()


def test_caches_are_windowed_where_the_config_says(target):
    caches = target.make_cache().layers
    assert [type(c) for c in caches] == [SlidingKV, SlidingKV, SlidingKV, FullKV] * 2
    assert {c.window for c in caches if isinstance(c, SlidingKV)} == {WINDOW}


@pytest.mark.parametrize("width", range(1, WINDOW + 3))
def test_every_width_equals_plain_across_the_window(loaded, greedy, width):
    assert len(greedy) == LENGTH
    assert_width_equals_plain(*loaded, PROMPT, greedy, width)


def test_keys_and_values_of_full_layers_can_be_quantized():
    """On a random model with heads that are wide enough; blocks and single rows agree past the window."""
    config = MuseGlimmer.prepare(normalise({**bare(), "head_dim": 32}))
    mx.random.seed(3)
    target = MuseGlimmer(muse_glimmer.Model(muse_glimmer.ModelArgs.from_dict(config)), config)
    one, block, exact = target.make_cache(kv_bits=8), target.make_cache(kv_bits=8), target.make_cache()
    assert [type(c) for c in block.layers] == [SlidingKV, SlidingKV, SlidingKV, QuantizedKV] * 2
    rows = mx.concatenate([target.forward(mx.array([[token]]), one)[0] for token in TEXT], axis=1)
    logits = target.forward(mx.array([TEXT]), block)[0]
    assert mx.array_equal(rows, logits) if rows_independent() else mx.allclose(rows, logits, atol=1e-3)
    away = mx.abs(logits - target.forward(mx.array([TEXT]), exact)[0]).max()
    assert 0 < away < 0.1


@pytest.mark.parametrize(
    ("change", "error", "named"),
    [
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 5e5}}, UnsupportedError, "rope_scaling"),
        ({"rope_parameters": {}}, CheckpointError, "rope_theta"),
        ({"layer_rope_theta": [10000.0] * 8}, UnsupportedError, "layer_rope_theta"),
        ({"hidden_activation": "gelu"}, UnsupportedError, "hidden_activation = 'gelu'"),
        ({"attention_bias": True}, UnsupportedError, "attention_bias"),
        ({"layer_types": [S] * 7}, CheckpointError, "8 layer_types"),
        ({"sliding_window": None}, CheckpointError, "sliding_window None"),
    ],
)
def test_what_it_can_not_run_exactly_is_refused_by_name(tmp_path, change, error, named):
    config = published()
    config["text_config"] |= change
    with pytest.raises(error, match=named):
        load(folder_with(tmp_path / "odd", config))
