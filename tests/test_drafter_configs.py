"""Drafter configs: what published files say is read strictly, anything else is refused by name; pairs that don't fit.

Config alone; what the weights compute is in tests/test_drafter_formats.py.
"""

import json
from types import SimpleNamespace

import pytest
import tiny
from mlx.utils import tree_flatten

from mlx_dflash import load, load_drafter
from mlx_dflash.drafters import check_pair
from mlx_dflash.drafters.config import DrafterConfig
from mlx_dflash.drafters.dflash import DFlashModel
from mlx_dflash.drafters.dflash2 import DFlash2Model
from mlx_dflash.drafters.formats import read_layout
from mlx_dflash.drafters.masks import Visibility
from mlx_dflash.errors import CheckpointError, PairError, UnsupportedError


def config_of(family):
    return json.loads((tiny.draft_folder(family) / "config.json").read_text())


def edit_layer_config(family, **changes):
    return {"transformer_layer_config": config_of(family)["transformer_layer_config"] | changes}


def parse(config, tensors=()):
    return read_layout(config, "config.json", tensors).config


@pytest.mark.parametrize(
    ("is_causal", "causal", "full", "sliding"),
    [
        (None, None, Visibility(), Visibility(11, 0)),
        (False, None, Visibility(), Visibility(11, 11)),
        (True, None, Visibility(None, 0), Visibility(11, 0)),
        (None, False, Visibility(), Visibility(11, 11)),
        (None, True, Visibility(None, 0), Visibility(11, 0)),
        (False, True, Visibility(), Visibility(11, 11)),
        (True, False, Visibility(None, 0), Visibility(11, 0)),
    ],
)
def test_causality_is_is_causal_then_causal_then_the_layer_type(is_causal, causal, full, sliding):
    config = config_of("qwen3_sliding")
    config |= {"is_causal": is_causal, "dflash_config": config["dflash_config"] | {"causal": causal}}
    assert parse(config).visibility == (sliding, sliding, full)


def test_windows_of_the_formats_differ_by_one_row():
    speculators = parse(config_of("qwen3_speculators"), ["d2t", "lm_head.weight"])
    assert parse(config_of("qwen3_sliding")).sees(0) == Visibility(11, 0)
    assert parse(config_of("muse_glimmer")).sees(0) == Visibility(12, 12)
    assert speculators.sees(0) == Visibility(12, 0, from_anchor=True)
    assert speculators.target_layer_ids == (1, 3, 5)  # the file says 2, 4, 6


# The shape of real repositories' config.json; z-lab's names and transformers' Muse Glimmer assistant.
QWEN3 = {"model_type": "qwen3", "hidden_act": "silu", "attention_bias": False, "rms_norm_eps": 1e-6, "head_dim": 128}
REAL = {
    "z-lab, old": {
        **QWEN3,
        "architectures": ["DFlashDraftModel"],
        "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
        "block_size": 16,
        "dflash_config": {"mask_token_id": 151669, "target_layer_ids": [1, 9, 17, 25, 33]},
        "hidden_size": 2560,
        "intermediate_size": 9728,
        "layer_types": ["full_attention"] * 5,
        "max_window_layers": 5,
        "num_attention_heads": 32,
        "num_hidden_layers": 5,
        "num_key_value_heads": 8,
        "num_target_layers": 36,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "sliding_window": None,
        "use_sliding_window": False,
        "vocab_size": 151936,
    },
    "z-lab, new": {
        **QWEN3,
        "architectures": ["DFlashDraftModel"],
        "dflash_config": {"block_size": 16, "mask_token_id": 248077, "target_layer_ids": [1, 5, 9, 13, 17, 21, 25, 29]},
        "hidden_size": 2560,
        "intermediate_size": 9216,
        "layer_types": ["sliding_attention"] * 5 + ["full_attention"],
        "num_attention_heads": 32,
        "num_hidden_layers": 6,
        "num_key_value_heads": 8,
        "num_target_layers": 32,
        "rope_parameters": {"rope_theta": 10000000, "rope_type": "default"},
        "sliding_window": 4096,
        "use_sliding_window": True,
        "vocab_size": 248320,
    },
    "gpt-oss": {
        **QWEN3,
        "architectures": ["DFlashDraftModel"],
        "model_type": "gpt_oss",
        "attention_bias": True,
        "experts_per_token": 4,
        "initial_context_length": 4096,
        "num_local_experts": 32,
        "swiglu_limit": 7.0,
        "sliding_window": 128,
        "block_size": 8,
        "dflash_config": {"mask_token_id": 200000, "target_layer_ids": [1, 6, 11, 16, 21]},
        "head_dim": 64,
        "hidden_size": 2880,
        "intermediate_size": 7680,
        "num_attention_heads": 64,
        "num_hidden_layers": 8,
        "num_key_value_heads": 8,
        "num_target_layers": 24,
        "rope_scaling": {
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "factor": 32.0,
            "original_max_position_embeddings": 4096,
            "rope_type": "yarn",
            "truncate": False,
        },
        "rope_theta": 150000,
        "vocab_size": 201088,
    },
    "DFlash 2": {
        **QWEN3,
        "architectures": ["DFlash2DraftModel"],
        "dflash_config": {
            "block_size": 16,
            "conv_group_size": 16,
            "conv_kernel_size": 2,
            "final_logit_softcapping": 20.0,
            "mask_token_id": 201818,
            "output_multiplier": 0.19611613513818404,
            "selector_rank": 256,
            "selector_top_k": 16,
            "target_layer_ids": [1, 13, 25, 37, 49],
        },
        "hidden_size": 6656,
        "intermediate_size": 19968,
        "is_causal": False,
        "layer_types": ["sliding_attention"] * 5,
        "num_attention_heads": 32,
        "num_hidden_layers": 5,
        "num_key_value_heads": 8,
        "num_target_layers": 52,
        "rope_parameters": {"rope_theta": 500000.0, "rope_type": "default"},
        "sliding_window": 2048,
        "use_sliding_window": True,
        "vocab_size": 202048,
    },
    "Muse assistant": {
        "architectures": ["MuseGlimmerAssistantModel"],
        "attention_dropout": 0,
        "block_size": 16,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 6656,
        "intermediate_size": 19968,
        "layer_types": ["sliding_attention"] * 5,
        "mask_token_id": 201818,
        "max_position_embeddings": 131072,
        "model_type": "muse_glimmer_assistant",
        "num_attention_heads": 32,
        "num_hidden_layers": 5,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-05,
        "rope_parameters": {"rope_theta": 500000.0, "rope_type": "default"},
        "sliding_window": 2048,
        "target_layer_ids": [1, 13, 25, 37, 49],
    },
}


@pytest.mark.parametrize("name", list(REAL))
def test_published_configs_are_read(name):
    config = parse(REAL[name])
    facts = REAL[name] | REAL[name].get("dflash_config", {})
    assert isinstance(config, DrafterConfig)
    assert (config.block_size, config.mask_token_id) == (facts["block_size"], facts["mask_token_id"])
    assert config.target_layer_ids == tuple(facts["target_layer_ids"])
    assert config.hidden_size == facts["hidden_size"] and config.vocab_size == facts.get("vocab_size")
    reaches = [None if rule.behind is None else rule.behind + (name != "Muse assistant") for rule in config.visibility]
    windows = [2048 if "2" in name or "Muse" in name else 4096] * 5
    assert reaches == {"z-lab, old": [None] * 5, "gpt-oss": [None] * 8, "z-lab, new": [*windows, None]}.get(
        name, windows
    )
    assert (config.rope_scaling is not None) == (name == "gpt-oss")
    assert config.attention_bias == (name == "gpt-oss")
    assert config.whole_block == (name == "Muse assistant")


V1 = ["input_layernorm", "post_attention_layernorm", "self_attn.q_norm", "self_attn.k_norm", "self_attn.q_proj"]
V1 += ["self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]
PUBLISHED = {  # the tensor names of published files
    "qwen3": [
        "fc.weight",
        "hidden_norm.weight",
        "norm.weight",
        *(f"layers.{i}.{n}.weight" for i in range(3) for n in V1),
    ],
    "muse_glimmer": [
        *("encoder.fc.weight", "encoder.output_norm_enc.weight", "norm.weight"),
        *(f"layers.{i}.{n}.weight" for i in range(3) for n in V1),
    ],
    "qwen3_dflash2": [
        *("fc.weight", "hidden_norm.weight", "norm.weight", "candidate_selector.hidden_projection.weight"),
        *("candidate_selector.predecessor_codebook", "candidate_selector.successor_codebook"),
        *(f"layers.{i}.{n}.weight" for i in range(3) for n in V1),
        *(f"layers.{i}.{c}_conv.base_kernel" for i in range(3) for c in ("attention", "mlp")),
        *(f"layers.{i}.{c}_conv.kernel_projection.weight" for i in range(3) for c in ("attention", "mlp")),
    ],
}


@pytest.mark.parametrize("family", list(PUBLISHED))
def test_published_tensor_names_are_exactly_the_modules(family):
    layout = read_layout(config_of(family), "config.json")
    module = (DFlashModel if layout.config.dflash2 is None else DFlash2Model)(layout.config)
    assert sorted(map(layout.rename, PUBLISHED[family])) == sorted(
        name for name, _ in tree_flatten(module.parameters())
    )


REFUSED = [
    ("qwen3", {"architectures": ["Qwen3DSparkModel"]}, "Qwen3DSparkModel"),
    ("qwen3", {"architectures": ["DFlyDraftModel"]}, "DFlyDraftModel"),
    ("qwen3", {"architectures": ["DominoDraftModel"]}, "DominoDraftModel"),
    ("qwen3", {"model_type": "qwen3_mtp"}, "qwen3_mtp"),
    ("qwen3", {"model_type": "glm4", "architectures": ["Glm4ForCausalLM"]}, "glm4"),
    ("qwen3", {"model_type": "glm4", "architectures": None}, "glm4"),
    ("qwen3", {"markov_rank": 256}, "markov_rank"),
    ("qwen3", {"logit_scale": 0.5}, "logit_scale"),
    ("qwen3", {"add_swa_attention_sink_bias": True}, "add_swa_attention_sink_bias"),
    ("qwen3", {"dflash_config": {"use_swa": True}}, "use_swa"),
    ("qwen3", {"layer_types": ["full_attention", "chunked_attention", "full_attention"]}, "chunked_attention"),
    ("qwen3", {"hidden_act": "gelu"}, "gelu"),
    ("qwen3", {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "dynamic"),
    ("qwen3", {"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "rope_parameters"),
    ("qwen3_sliding", {"use_sliding_window": False}, "use_sliding_window"),
    ("qwen3_sliding", {"use_sliding_window": None}, "use_sliding_window"),
    ("muse_glimmer", {"output_multiplier": 0.2}, "output_multiplier"),
    ("qwen3_speculators", {"sample_from_anchor": True}, "sample_from_anchor"),
    ("qwen3_speculators", {"speculators_model_type": "eagle3"}, "eagle3"),
    ("qwen3_speculators", {"speculators_model_type": "independent"}, "independent"),
    ("qwen3_speculators", {"target_hidden_size": 96}, "target_hidden_size"),
    ("qwen3_speculators", {"markov_rank": 256}, "markov_rank"),
]


@pytest.mark.parametrize(("family", "change", "named"), REFUSED, ids=str)
def test_what_is_not_understood_is_refused_by_name(family, change, named):
    with pytest.raises(UnsupportedError, match=rf"config\.json.*{named}"):
        parse(config_of(family) | change, ["d2t", "lm_head.weight"])


def test_a_speculators_layer_config_is_as_strict():
    family = "qwen3_speculators"
    for change, named in (({"partial_rotary_factor": 0.25}, "partial_rotary"), ({"moe_layers": 8}, "moe_layers")):
        with pytest.raises(UnsupportedError, match=named):
            parse(config_of(family) | edit_layer_config(family, **change), ["d2t", "lm_head.weight"])
    with pytest.raises(CheckpointError, match="d2t"):
        parse(config_of(family), ["lm_head.weight"])
    with pytest.raises(CheckpointError, match="aux_hidden_state_layer_ids"):  # 0 would be the embedding
        parse(config_of(family) | {"aux_hidden_state_layer_ids": [0, 2, 4]}, ["d2t", "lm_head.weight"])


def test_values_given_twice_must_agree():
    config = config_of("qwen3")
    twice = config | {"dflash_config": config["dflash_config"] | {"block_size": 8}}
    assert parse(twice) == parse(config)
    with pytest.raises(CheckpointError, match="block_size twice"):
        parse(twice | {"block_size": 16})


def pair(**facts):
    config = {"model_type": "qwen3", "bos_token_id": 1} | facts.pop("config", {})
    return SimpleNamespace(config=config, hidden_size=48, num_layers=8, vocab_size=300, **facts)


@pytest.mark.parametrize(
    ("change", "both"),
    [
        ({"hidden_size": 64}, ["64", "48"]),
        ({"num_target_layers": 36}, ["36", "8"]),
        ({"vocab_size": 320}, ["320", "300"]),
        ({"bos_token_id": 7}, ["7", "token 1"]),
        (
            {"dflash_config": {"mask_token_id": 299, "target_layer_ids": [1, 3, 9]}, "num_target_layers": None},
            ["10", "8"],
        ),
        ({"dflash_config": {"mask_token_id": 310, "target_layer_ids": [1, 3, 5]}}, ["310", "300"]),
    ],
)
def test_a_pair_that_does_not_fit_is_refused_naming_both_sides(change, both):
    config = config_of("qwen3")
    check_pair(parse(config), pair(), "the drafter")
    with pytest.raises(PairError) as caught:
        check_pair(parse(config | change), pair(), "the drafter")
    assert all(word in str(caught.value) for word in ["the drafter", "this qwen3", *both])


@pytest.mark.parametrize("change", [None, "more", "swapped", "foreign"])
def test_a_drafter_that_brings_another_tokenizer_is_refused_before_its_weights_load(change, tmp_path):
    target, _ = load(tiny.target_folder("qwen3"))
    folder = tiny.copy_folder(tiny.draft_folder("qwen3"), tmp_path / "drafter")
    content = json.loads((target.folder / "tokenizer.json").read_text())
    ids = content["model"]["vocab"]
    if change == "more":
        content["added_tokens"] = [{"id": 5000, "content": "<m>"}]
    if change == "swapped":
        ids["w5"], ids["w6"] = ids["w6"], ids["w5"]
    if change == "foreign":
        content["model"]["vocab"] = {f"x{i}": i for i in range(len(ids))}
    (folder / "tokenizer.json").write_text(json.dumps(content))
    if change in (None, "more"):
        assert load_drafter(folder, target).config.hidden_size == target.hidden_size
        return
    with pytest.raises(PairError, match="another tokenizer") as caught:
        load_drafter(folder, target)
    assert str(folder) in str(caught.value) and str(target.folder) in str(caught.value)


def test_bare_embedding_rows_are_refused_where_the_target_scales_its_own():
    config = config_of("qwen3_speculators")
    gemma = pair(config={"model_type": "gemma4_text"})
    check_pair(parse(config, ["d2t", "lm_head.weight", "embed_tokens.weight"]), gemma, "the drafter")
    with pytest.raises(UnsupportedError, match="gemma4_text"):
        check_pair(parse(config, ["d2t", "lm_head.weight"]), gemma, "the drafter")
