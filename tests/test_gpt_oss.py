"""gpt-oss: packed experts, YaRN without rounding, sinks, and windows next to full attention."""

import json
import shutil
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.convert import convert
from mlx_lm.models.rope_utils import initialize_rope
from mlx_lm.models.switch_layers import SwitchLinear
from stubs import assert_width_equals_plain, greedy_from_scratch, in_another_thread, logits_of, mlx_lm_greedy

from mlx_dflash import generate, load
from mlx_dflash.cache import FullKV, SlidingKV
from mlx_dflash.errors import CheckpointError, UnsupportedError
from mlx_dflash.targets.gpt_oss import GptOss, rotation

GOLDEN = Path(__file__).parent / "golden"
WINDOW = 16
LENGTH = 30
PROMPT = [17, 230, 5, 88, 141, 9, 63, 254, 77, 12, 199]  # the run begins before the window's end and crosses it
TEXT = [(37 * i) % 287 + 3 for i in range(3 * WINDOW)]

# Inverse frequencies of gpt-oss's heads, dimensions 8 to 18 of 32 (the others are the same both ways), from
# transformers 5.24 `_compute_yarn_parameters`.
OPENAI = {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0}
OPENAI |= {"original_max_position_embeddings": 4096}
INVERSE = {
    False: "0.05081327 0.0317057 0.019335 0.01159205 0.006794959 0.003860359 0.002093793 0.001052602 0.0004564839 "
    "0.0001293187 3.830881e-05",
    True: "0.05081327 0.03162075 0.01945097 0.01179219 0.007015714 0.004069555 0.002277272 0.001206131 0.0005809475 "
    "0.0002279478 3.830881e-05",
}
SCALE = 1.3465735902799727


@pytest.fixture(scope="module", params=["gpt_oss", "gpt_oss_notrunc"])
def loaded(request):
    return load(GOLDEN / request.param / "target")


@pytest.fixture(scope="module")
def target(loaded):
    return loaded[0]


@pytest.fixture(scope="module")
def greedy(target):
    return greedy_from_scratch(target, PROMPT, LENGTH)


def copy(family, folder, change=lambda config: config):
    shutil.copytree(GOLDEN / family / "target", folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(change(config)))
    return folder


def nested(config):
    rope = {**config.pop("rope_scaling"), "rope_theta": config.pop("rope_theta")}
    return {**config, "rope_parameters": rope}


@pytest.mark.parametrize("truncate", [False, True])
def test_yarn_frequencies_are_those_of_the_reference(truncate):
    freqs, scale = rotation(64, 150000, {**OPENAI, "truncate": truncate})
    expected = np.array([float(x) for x in INVERSE[truncate].split()])
    assert freqs.shape == (32,) and freqs.dtype == mx.float32
    assert np.allclose(1 / np.array(freqs)[8:19], expected, rtol=1e-6, atol=0)
    assert scale == pytest.approx(SCALE)


@pytest.mark.parametrize(
    ("more", "scale"),
    [
        ({"mscale": 0.7, "mscale_all_dim": 0.4}, 1.0748738823909005),
        ({"mscale": 0.7}, 1.2772588722239782),
        ({"attention_factor": 1.1}, 1.1),
        ({"factor": 1.0}, 1.0),
    ],
)
def test_yarn_scales_as_the_reference(more, scale):
    settings = {"factor": 16.0, "truncate": False, "original_max_position_embeddings": 512, **more}
    freqs, found = rotation(16, 10000, settings)
    assert found == pytest.approx(scale)
    if settings["factor"] == 16:
        expected = [1.0, 0.2977012, 0.06299829, 0.0100735, 0.000625, 0.0001976424, 6.25e-05, 1.976424e-05]
        assert np.allclose(1 / np.array(freqs), expected, rtol=1e-6, atol=0)


def test_rounded_yarn_is_mlx_lms_and_the_other_is_far_from_it():
    theirs = np.array(initialize_rope(64, 150000, False, {**OPENAI, "truncate": False})._freqs)
    rounded, exact = (np.array(rotation(64, 150000, {**OPENAI, "truncate": t})[0]) for t in (True, False))
    assert np.allclose(rounded, theirs, rtol=1e-5)
    assert np.abs(theirs / exact - 1).max() > 0.4


def test_every_layer_rotates_as_the_config_says(target):
    config = target.config
    freqs, scale = rotation(config["head_dim"], config["rope_theta"], config["rope_scaling"])
    for layer in target.model.layers:
        assert mx.array_equal(layer.self_attn.rope._freqs, freqs)
        assert layer.self_attn.rope.mscale == scale


@pytest.mark.parametrize("family", ["gpt_oss", "gpt_oss_notrunc"])
def test_nested_and_flat_configs_give_the_same_model(family, tmp_path):
    """mlx-lm would take transformers 5's `rope_parameters` for no scaling at all."""
    flat = load(GOLDEN / family / "target")[0]
    other = load(copy(family, tmp_path / "nested", nested))[0]
    assert flat.config["rope_scaling"] == other.config["rope_scaling"]
    assert mx.array_equal(logits_of(flat, TEXT), logits_of(other, TEXT))


def test_truncate_changes_the_model(tmp_path):
    """Or else the test before this one would hold with `truncate` ignored in both layouts."""

    def rounded(config):
        config["rope_scaling"]["truncate"] = True
        return config

    exact = load(GOLDEN / "gpt_oss_notrunc" / "target")[0]
    other = load(copy("gpt_oss_notrunc", tmp_path / "rounded", rounded))[0]
    assert mx.abs(logits_of(exact, TEXT) - logits_of(other, TEXT)).max() > 0.01


def packed_experts(folder):
    """Yields layer, projection, fp32 values (E, out, in) and biases (E, out), from the file's bytes as MXFP4 says."""
    tensors = {k: np.array(v) for k, v in mx.load(str(folder / "model.safetensors")).items() if v.dtype != mx.bfloat16}
    grid = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
    grid = np.concatenate([grid, -grid])  # E2M1: the high bit is the sign
    for name in [k for k in tensors if k.endswith("_blocks")]:
        blocks, scales = tensors[name], tensors[name.replace("_blocks", "_scales")]  # (E, out, in / 32, 16), without 16
        values = grid[np.stack([blocks & 15, blocks >> 4], -1)].reshape(*blocks.shape[:3], 32)  # low nibble first
        values = values * np.exp2(scales.astype(np.float32) - 127)[..., None]  # E8M0
        layer, kind = int(name.split(".")[2]), name.split(".")[-1].removesuffix("_blocks")
        yield layer, kind, values.reshape(*blocks.shape[:2], -1), tensors[name.replace("_blocks", "_bias")]


def test_packed_experts_are_held_exactly(loaded, request):
    target = loaded[0]
    seen = 0
    for layer, kind, weight, bias in packed_experts(GOLDEN / request.node.callspec.params["loaded"] / "target"):
        experts = target.model.layers[layer].mlp.experts
        if kind == "down_proj":
            parts = {"down_proj": slice(None)}
        else:
            parts = {"gate_proj": slice(0, None, 2), "up_proj": slice(1, None, 2)}
        for name, rows in parts.items():
            module = experts[name]
            assert type(module) is SwitchLinear and module.weight.dtype == module.bias.dtype == mx.float32
            assert np.array_equal(np.array(module.weight), weight[:, rows])
            assert np.array_equal(np.array(module.bias), bias[:, rows]) and np.abs(bias).max() > 0.1
            seen += 1
    assert seen == 3 * target.num_layers


def test_unpacked_experts_give_the_same_model(tmp_path):
    """Fine-tunes come with experts as (E, in, out), gate and up interleaved."""

    def unpacked(config):
        return {key: value for key, value in config.items() if key != "quantization_config"}

    folder = copy("gpt_oss", tmp_path / "unpacked", unpacked)
    tensors = dict(mx.load(str(folder / "model.safetensors")))
    for layer, kind, weight, _ in packed_experts(folder):
        name = f"model.layers.{layer}.mlp.experts.{kind}"
        del tensors[f"{name}_blocks"], tensors[f"{name}_scales"]
        tensors[name] = mx.array(weight.swapaxes(1, 2)).astype(mx.bfloat16)
    mx.save_safetensors(str(folder / "model.safetensors"), tensors)
    packed = load(GOLDEN / "gpt_oss" / "target")[0]
    assert mx.array_equal(logits_of(packed, TEXT), logits_of(load(folder)[0], TEXT))


def test_a_folder_quantized_by_mlx_lm_gives_its_tokens(tmp_path):
    """As on the hub: experts stay MXFP4, all other layers are affine, and the map in the config names each."""

    def all_but_routers(path, *_):  # which are too narrow here for the groups of 64 that mlx-lm has for them
        return not path.endswith("router")

    source, folder = str(GOLDEN / "gpt_oss" / "target"), str(tmp_path / "quantized")
    convert(source, folder, quantize=True, q_bits=4, q_group_size=32, quant_predicate=all_but_routers)
    modes = json.loads((tmp_path / "quantized" / "config.json").read_text())["quantization"]
    assert modes["mode"] == "mxfp4" and modes["model.layers.0.self_attn.q_proj"]["mode"] == "affine"
    expected, lead = mlx_lm_greedy(folder, PROMPT, LENGTH)
    assert lead > 1e-3
    target, tokenizer = load(folder)
    assert generate(target, tokenizer, PROMPT, max_tokens=LENGTH).tokens == expected
    assert greedy_from_scratch(load(source)[0], PROMPT, LENGTH) != expected


def test_the_first_forward_may_come_in_another_thread():
    target, _ = load(GOLDEN / "gpt_oss_notrunc" / "target")
    logits = in_another_thread(lambda: logits_of(target, TEXT).tolist())
    assert logits == logits_of(load(GOLDEN / "gpt_oss_notrunc" / "target")[0], TEXT).tolist()


def test_caches_are_windowed_where_the_config_says(target):
    kinds = [type(layer) for layer in target.make_cache().layers]
    assert kinds == [SlidingKV, FullKV] * (target.num_layers // 2)
    assert {c.window for c in target.make_cache().layers[::2]} == {WINDOW}


@pytest.mark.parametrize("width", range(1, WINDOW + 3))
def test_every_width_equals_plain_across_the_window(loaded, greedy, width):
    assert len(greedy) == LENGTH
    assert_width_equals_plain(*loaded, PROMPT, greedy, width)


def test_quantized_keys_and_values_are_refused_by_name(target):
    with pytest.raises(UnsupportedError, match=r"gpt_oss.*sinks"):
        target.make_cache(kv_bits=8)


@pytest.mark.parametrize(
    ("change", "error", "named"),
    [
        ({"rope_scaling": None}, UnsupportedError, "RoPE scaling None"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 2}}, UnsupportedError, "'llama3'"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, CheckpointError, "original_max_position_embeddings"),
        ({"rope_scaling": {**OPENAI, "factor": "32"}}, CheckpointError, "'factor' as a number"),
        ({"rope_scaling": {**OPENAI, "beta_fast": -1}}, CheckpointError, "'beta_fast' as a number"),
        ({"swiglu_limit": 5.0}, UnsupportedError, "swiglu_limit = 5.0"),
        ({"swiglu_alpha": 1.0}, UnsupportedError, "swiglu_alpha = 1.0"),
        ({"tie_word_embeddings": True}, UnsupportedError, "tie_word_embeddings"),
        ({"layer_types": ["full_attention"]}, CheckpointError, "6 layer_types"),
        ({"layer_types": ["chunked_attention"] * 6}, CheckpointError, "chunked_attention"),
        ({"sliding_window": None}, CheckpointError, "sliding_window None"),
    ],
)
def test_what_it_can_not_run_exactly_is_refused_by_name(tmp_path, change, error, named):
    folder = copy("gpt_oss", tmp_path / "odd", lambda config: {**config, **change})
    with pytest.raises(error, match=named):
        load(folder)


def test_layers_alternate_where_the_config_does_not_say():
    config = json.loads((GOLDEN / "gpt_oss" / "target" / "config.json").read_text())
    flat = GptOss.prepare({**config, "layer_types": None, "num_hidden_layers": 3})
    assert flat["layer_types"] == ["sliding_attention", "full_attention", "sliding_attention"]
