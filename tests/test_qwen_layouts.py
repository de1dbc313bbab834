"""Every layout in which Qwen's MoE and hybrid families are published gives the same model, bit for bit.

Configs: as the hub has them, as transformers 5 writes them, with and without `text_config`. Weights: one tensor an
expert or all in one, as Hugging Face's files have them or as mlx-lm converts them.
"""

import json
import shutil
from pathlib import Path

import mlx.core as mx
import mlx_lm.convert
import mlx_lm.utils
import pytest

from mlx_dflash import load
from mlx_dflash.errors import UnsupportedError
from mlx_dflash.targets.experts import stack_experts

GOLDEN = Path(__file__).parent / "golden"
FAMILIES = ("qwen3_moe", "qwen3_next", "qwen3_5", "qwen3_5_moe")
WITH_EXPERTS = ("qwen3_moe", "qwen3_next", "qwen3_5_moe")
HYBRIDS = ("qwen3_next", "qwen3_5", "qwen3_5_moe")
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
IDS = mx.array([[5, 9, 200, 31, 7, 44, 8, 150] * 4])


def logits(folder):
    target = load(folder)[0]
    return target.forward(IDS, target.make_cache())[0]


@pytest.fixture(scope="module", params=FAMILIES)
def family(request):
    return request.param


@pytest.fixture(scope="module")
def expected(family):
    return logits(GOLDEN / family / "target")


@pytest.fixture
def folder(family, tmp_path):
    """A copy of the target's folder to write in."""
    shutil.copytree(GOLDEN / family / "target", tmp_path / "copy")
    return tmp_path / "copy"


def change_config(folder, change):
    path = folder / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(change(config)))


def change_weights(folder, change):
    path = folder / "model.safetensors"
    weights = dict(mx.load(str(path)))
    mx.eval(weights)
    mx.save_safetensors(str(path), change(weights))


def nested(config):
    """As transformers 5.24 writes it: RoPE nested, kinds of layers listed, experts counted under another name."""
    text = config.get("text_config", config)
    if "rope_theta" in text:
        rope = {"rope_type": "default", "rope_theta": text.pop("rope_theta")}
        if "partial_rotary_factor" in text:
            rope["partial_rotary_factor"] = text.pop("partial_rotary_factor")
        assert text.pop("rope_scaling") is None
        text["rope_parameters"] = rope
    if interval := text.pop("full_attention_interval", None):
        kinds = ["linear_attention"] * (interval - 1) + ["full_attention"]
        text["layer_types"] = kinds * (text["num_hidden_layers"] // interval)
    if config["model_type"] == "qwen3_moe":
        text["num_local_experts"] = text.pop("num_experts")
    return config


def flat(config):
    """As the hub's first files had it: RoPE at top level, an interval instead of a list of layers."""
    text = config.get("text_config", config)
    if rope := text.pop("rope_parameters", None):
        text |= {"rope_theta": rope["rope_theta"], "rope_scaling": None}
        if "partial_rotary_factor" in rope:
            text["partial_rotary_factor"] = rope["partial_rotary_factor"]
    if text.pop("layer_types", None):
        text["full_attention_interval"] = 4
    if config["model_type"] == "qwen3_moe":
        text["num_experts"] = text.pop("num_local_experts", None) or text["num_experts"]
    return config


def text_only(config):
    """As a text model of its own is saved: everything at top level, model_type with a suffix."""
    text = config.pop("text_config", None)
    return config if text is None else {**config, **text}


@pytest.mark.parametrize("changes", [(nested,), (flat,), (text_only,), (text_only, flat), (nested, text_only)])
def test_every_layout_of_the_config(family, expected, folder, changes):
    for change in changes:
        change_config(folder, change)
    assert mx.array_equal(logits(folder), expected)


def test_keys_left_out_mean_what_transformers_means_by_them(family, expected, folder):
    """mlx-lm would take other values for these, or refuse."""
    huggingface = {
        "partial_rotary_factor": 0.25,
        "linear_conv_kernel_dim": 4,
        "rms_norm_eps": 1e-6,
        "attention_bias": False,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "full_attention_interval": 4,
    }
    if family == "qwen3_next":
        huggingface["norm_topk_prob"] = True

    def drop(config):
        text = config.get("text_config", config)
        for key, value in huggingface.items():
            if key in text:
                assert text.pop(key) == value
        text.pop("layer_types", None)
        return config

    change_config(folder, flat)
    change_config(folder, drop)
    assert mx.array_equal(logits(folder), expected)


@pytest.mark.parametrize("key", ["rope_theta", "partial_rotary_factor", "norm_topk_prob"])
def test_keys_that_differ_give_another_model(key, tmp_path):
    """So that the equalities above mean something."""
    shutil.copytree(GOLDEN / "qwen3_next" / "target", tmp_path / "copy")
    other = {"rope_theta": 1e4, "partial_rotary_factor": 0.5, "norm_topk_prob": False}[key]
    change_config(tmp_path / "copy", lambda c: {**c, key: other})
    assert not mx.allclose(logits(tmp_path / "copy"), logits(GOLDEN / "qwen3_next" / "target"), atol=1e-2)


@pytest.mark.parametrize("family", HYBRIDS, indirect=True, scope="module")
def test_rope_settings_that_are_not_the_defaults(family, expected, folder, tmp_path):
    """The goldens' rotated share of a head is what a missing key means, so another one is tried in both layouts."""

    def changed(config):
        text = config.get("text_config", config)
        return config | {"text_config": text | change} if "text_config" in config else text | change

    change = {"rope_theta": 5e5, "partial_rotary_factor": 0.5}
    change_config(folder, flat)
    change_config(folder, changed)
    shutil.copytree(folder, tmp_path / "nested")
    change_config(tmp_path / "nested", nested)
    result = logits(folder)
    assert mx.array_equal(result, logits(tmp_path / "nested"))
    assert not mx.allclose(result, expected, atol=1e-2)


def joined_experts(weights):
    """All experts of a layer in one tensor, gate and up joined."""
    out = {}
    for name, value in stack_experts(weights).items():
        if ".switch_mlp." not in name:
            out[name] = value
        elif ".down_proj" in name:
            out[name.replace(".switch_mlp.down_proj.weight", ".experts.down_proj")] = value
        elif ".gate_proj" in name:
            up = stack_experts(weights)[name.replace("gate_proj", "up_proj")]
            key = name.replace(".switch_mlp.gate_proj.weight", ".experts.gate_up_proj")
            out[key] = mx.concatenate([value, up], axis=1)
    return out


def single_experts(weights):
    out = {}
    for name, value in stack_experts(weights).items():
        if ".switch_mlp." in name:
            for i, expert in enumerate(value):
                out[name.replace(".switch_mlp.", f".experts.{i}.")] = expert
        else:
            out[name] = value
    return out


@pytest.mark.parametrize("layout", [joined_experts, single_experts])
@pytest.mark.parametrize("family", WITH_EXPERTS, indirect=True, scope="module")
def test_every_layout_of_the_experts(family, expected, folder, layout):
    change_weights(folder, layout)
    names = list(mx.load(str(folder / "model.safetensors")))
    assert any(".experts.gate_up_proj" in n for n in names) == (layout is joined_experts)
    assert mx.array_equal(logits(folder), expected)


@pytest.mark.parametrize("family", HYBRIDS, indirect=True, scope="module")
def test_files_with_layers_for_other_uses(family, expected, folder):
    """Multi-token prediction layers and a vision tower beside the text model, as the hub's files have them."""

    def more(weights):
        layer = next(n for n in weights if n.endswith("layers.0.input_layernorm.weight"))
        weights |= {"mtp.layers.0.input_layernorm.weight": weights[layer], "mtp.norm.weight": weights[layer]}
        if family.startswith("qwen3_5"):
            weights["model.visual.blocks.7.norm1.weight"] = weights[layer]
        return weights

    change_weights(folder, more)
    assert mx.array_equal(logits(folder), expected)


def test_what_mlx_lm_converted_and_converted_again(family, expected, folder, tmp_path):
    """Norms are shifted once, convolutions turned once, however often a folder is converted."""
    source = folder
    for step in ("once", "twice"):
        target = load(source)[0]
        mlx_lm.utils.save_model(tmp_path / step, target.model)
        for file in ("config.json", "tokenizer.json", "tokenizer_config.json"):
            shutil.copy(folder / file, tmp_path / step)
        assert mx.array_equal(logits(tmp_path / step), expected)
        source = tmp_path / step


def test_what_mlx_lm_convert_writes(family, expected, tmp_path):
    """The command itself, from the folder as the hub has it."""
    mlx_lm.convert(str(GOLDEN / family / "target"), str(tmp_path / "mlx"), dtype="float32")
    assert mx.array_equal(logits(tmp_path / "mlx"), expected)


def test_tied_embeddings_stated_outside_of_the_text_config(tmp_path):
    shutil.copytree(GOLDEN / "qwen3_5" / "target", tmp_path / "copy")

    def tied(config):
        config["text_config"].pop("tie_word_embeddings")
        return {**config, "tie_word_embeddings": True}

    change_config(tmp_path / "copy", tied)
    target = load(tmp_path / "copy")[0]
    hidden = mx.random.normal((1, 2, target.hidden_size))
    assert mx.array_equal(target.head(hidden), hidden @ target.embed(mx.arange(target.vocab_size)).T)


def test_ends_stated_inside_of_the_text_config(tmp_path):
    shutil.copytree(GOLDEN / "qwen3_5" / "target", tmp_path / "copy")

    def ends(config):
        config["text_config"]["eos_token_id"] = [77, 78]
        return config

    change_config(tmp_path / "copy", ends)
    outer = json.loads((tmp_path / "copy" / "config.json").read_text())["eos_token_id"]
    assert {77, 78, outer} <= set(load(tmp_path / "copy")[1].eos_token_ids)


def test_long_context_scaling_reaches_qwen3_moe(tmp_path):
    """mlx-lm's attention of this family ignores `rope_scaling`; qwen3's does not, and is the same otherwise."""
    ropes = []
    for family in ("qwen3", "qwen3_moe"):
        shutil.copytree(GOLDEN / family / "target", tmp_path / family)
        change_config(tmp_path / family, lambda c: {**c, "rope_scaling": YARN})
        target = load(tmp_path / family)[0]
        assert target.config["head_dim"] == 16
        ropes.append(target.model.layers[-1].self_attn.rope)
    x = mx.random.normal((1, 2, 5, 16))
    assert mx.array_equal(ropes[0](x, offset=40), ropes[1](x, offset=40))
    plain = load(GOLDEN / "qwen3_moe" / "target")[0].model.layers[-1].self_attn.rope
    assert not mx.allclose(ropes[1](x, offset=40), plain(x, offset=40), atol=1e-2)


@pytest.mark.parametrize(
    ("family", "change", "named"),
    [
        ("qwen3_next", {"layer_types": ["full_attention"] * 2 + ["linear_attention"] * 6}, "layer_types"),
        ("qwen3_5", {"attn_output_gate": False}, "attn_output_gate"),
        ("qwen3_next", {"hidden_act": "gelu"}, "hidden_act"),
        ("qwen3_moe", {"use_sliding_window": True}, "sliding"),
        ("qwen3_moe", {"rope_scaling": {**YARN, "truncate": False}}, "truncate"),
        ("qwen3_next", {"rope_scaling": {**YARN, "attention_factor": 1.0}}, "attention_factor"),
    ],
)
def test_what_mlx_lm_would_run_as_something_else_is_refused(tmp_path, family, change, named):
    shutil.copytree(GOLDEN / family / "target", tmp_path / "copy")

    def changed(config):
        config.get("text_config", config).update(change)
        return config

    change_config(tmp_path / "copy", changed)
    with pytest.raises(UnsupportedError, match=named):
        load(tmp_path / "copy")
