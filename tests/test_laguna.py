"""Poolside's Laguna and its drafters: what their configs mean, and what is refused.

That the pair computes what the references compute is test_parity's.
"""

import json
import shutil
from pathlib import Path

import mlx.core as mx
import pytest

from mlx_dflash import CheckpointError, PairError, UnsupportedError, load, load_drafter
from mlx_dflash.cache import FullKV, SlidingKV
from mlx_dflash.drafters.dflash import Attention, DFlashModel, Layer
from mlx_dflash.drafters.formats import read_layout
from mlx_dflash.drafters.laguna import GatedAttention, LagunaLayer, LagunaModel
from mlx_dflash.drafters.masks import Visibility
from mlx_dflash.targets.config import normalise
from mlx_dflash.targets.laguna import Laguna

GOLDEN = Path(__file__).parent / "golden" / "laguna"
IDS = [(37 * i) % 287 + 3 for i in range(40)]
# poolside/Laguna-XS-2.1-DFlash, config.json
PUBLISHED = {
    "architectures": ["DFlashLagunaForCausalLM"],
    "attention_bias": False,
    "dflash_config": {
        "block_size": 16,
        "causal": True,
        "mask_token_id": 12,
        "num_target_layers": 40,
        "target_layer_ids": [1, 13, 25, 33, 39],
    },
    "draft_vocab_size": 100352,
    "eagle_aux_hidden_state_layer_ids": [2, 14, 26, 34, 40],
    "gating": "per-head",
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "layer_types": ["sliding_attention"] * 5,
    "max_position_embeddings": 262144,
    "model_type": "laguna",
    "num_attention_heads": 64,
    "num_experts": 0,
    "num_hidden_layers": 5,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_theta": 500000.0,
    "sliding_window": 512,
    "torch_dtype": "bfloat16",
    "vocab_size": 100352,
}


@pytest.fixture(scope="module")
def target():
    return load(GOLDEN / "target")[0]


def prepared(**changes):
    """What the family makes of the golden target's config with some keys changed; None drops one."""
    config = json.loads((GOLDEN / "target" / "config.json").read_text()) | changes
    return Laguna.prepare(normalise({k: v for k, v in config.items() if v is not None}))


def rope(**full):
    """The golden target's RoPE settings with those of full layers changed."""
    settings = json.loads((GOLDEN / "target" / "config.json").read_text())["rope_parameters"]
    return settings | {
        "full_attention": {k: v for k, v in (settings["full_attention"] | full).items() if v is not None}
    }


def test_layers_slide_by_layer_types(target):
    kinds = [type(c) for c in target.make_cache().layers]
    assert kinds == ([FullKV] + [SlidingKV] * 3) * 2
    assert all(c.window == 16 for c in target.make_cache().layers if isinstance(c, SlidingKV))


def test_the_attention_factor_of_yarn_is_the_files(target):
    """mlx-lm would compute 0.1 ln(8) + 1 = 1.21."""
    assert target.model.layers[0].self_attn.rope.mscale == 1.25


def test_missing_rope_settings_mean_what_they_mean_to_transformers():
    """mlx-lm would rotate all layers by a base of 10000, and full ones whole."""
    full, sliding = (prepared(rope_parameters=None)["rope_parameters"][f"{k}_attention"] for k in ("full", "sliding"))
    assert (full["rope_theta"], full["partial_rotary_factor"]) == (500000.0, 0.5)
    assert (sliding["rope_theta"], sliding["partial_rotary_factor"]) == (10000.0, 1.0)


def test_a_length_beside_the_kinds_of_layers_may_only_repeat_theirs():
    again = rope() | {"original_max_position_embeddings": 32}
    assert prepared(rope_parameters=again)["rope_parameters"] == prepared()["rope_parameters"]
    with pytest.raises(UnsupportedError, match="original_max_position_embeddings = 64"):
        prepared(rope_parameters=rope() | {"original_max_position_embeddings": 64})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"gating": "per-element"}, "gating 'per-element'"),
        ({"gating": False}, "gating False"),
        ({"attention_bias": True}, "attention_bias = True"),
        ({"norm_topk_prob": False}, "norm_topk_prob = False"),
        ({"moe_router_score_func": "softmax"}, "moe_router_score_func = 'softmax'"),
        ({"moe_apply_router_weight_on_input": True}, "moe_apply_router_weight_on_input = True"),
        ({"swa_rope_parameters": {"rope_theta": 1e4}}, "swa_rope_parameters"),
        ({"rope_theta": 1e4}, "rope_theta"),
        ({"rope_parameters": rope(rope_type="llama3")}, "llama3"),
        ({"rope_parameters": rope(partial_rotary_factor=None), "partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    ],
)
def test_targets_that_mlx_lm_would_run_as_something_else_are_refused(changes, words):
    with pytest.raises(UnsupportedError, match=words):
        prepared(**changes)


@pytest.mark.parametrize("missing", ["rope_theta", "factor", "original_max_position_embeddings"])
def test_rope_settings_are_not_guessed(missing):
    with pytest.raises(CheckpointError, match=missing):
        prepared(rope_parameters=rope(**{missing: None}))


def test_the_published_drafter_config():
    layout = read_layout(PUBLISHED, "config.json")
    config = layout.config
    assert layout.name == "Laguna" and config.laguna and not config.rope_interleaved
    assert config.target_layer_ids == (1, 13, 25, 33, 39) and config.num_target_layers == 40
    assert (config.block_size, config.mask_token_id, config.rope_theta) == (16, 12, 500000.0)
    assert config.visibility == (Visibility(511, 0),) * 5


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"gating": "per-element"}, "gating 'per-element'"),
        ({"num_experts": 4}, "experts"),
        ({"attention_bias": True}, "attention_bias"),
        ({"draft_vocab_size": 32000}, "draft_vocab_size 32000"),
        ({"sliding_windows": [512, 512, 512, 512, 1024]}, "sliding_windows"),
        ({"rope_parameters": {"sliding_attention": {"rope_theta": 1e4}}}, "rope_parameters a layer type"),
        ({"dflash_config": PUBLISHED["dflash_config"] | {"causal": False}}, "causal false"),
        ({"dflash_config": PUBLISHED["dflash_config"] | {"sample_from_anchor": True}}, "sample_from_anchor"),
        ({"swa_rope_parameters": {"rope_theta": 1e4}}, "swa_rope_parameters"),
    ],
)
def test_drafters_of_unknown_kinds_are_refused(changes, words):
    with pytest.raises(UnsupportedError, match=words):
        read_layout(PUBLISHED | changes, "config.json")


def test_two_lists_of_taps_must_agree():
    with pytest.raises(CheckpointError, match="one above"):
        read_layout(PUBLISHED | {"eagle_aux_hidden_state_layer_ids": [1, 13, 25, 33, 39]}, "config.json")


def edited_drafter(folder, names=lambda name: name, **changes):
    shutil.copytree(GOLDEN / "draft", folder)
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(config))
    tensors = mx.load(str(folder / "model.safetensors"))
    mx.save_safetensors(str(folder / "model.safetensors"), {names(k): v for k, v in tensors.items()})
    return folder


def draft_logits(drafter):
    _, features = drafter.target.forward(mx.array([IDS]), drafter.target.make_cache(), drafter.taps)
    context = drafter.make_context()
    drafter.append(features, context)
    return drafter.logits(mx.array([5], mx.uint32), 8, context)


def test_a_model_prefix_changes_nothing(target, tmp_path):
    folder = edited_drafter(tmp_path / "prefixed", lambda name: f"model.{name}")
    same = draft_logits(load_drafter(folder, target))
    assert mx.array_equal(same, draft_logits(load_drafter(GOLDEN / "draft", target)))


def test_a_tensor_too_many_is_refused(target, tmp_path):
    folder = edited_drafter(tmp_path / "extra", lambda name: name.replace("layers.2.self_attn.g_proj", "g_proj"))
    with pytest.raises(CheckpointError, match="Laguna drafter"):
        load_drafter(folder, target)


def test_a_drafter_for_more_layers_is_refused(target, tmp_path):
    extra = json.loads((GOLDEN / "draft" / "config.json").read_text())["dflash_config"]
    folder = edited_drafter(tmp_path / "deep", dflash_config=extra | {"num_target_layers": 40})
    with pytest.raises(PairError, match="40 layers"):
        load_drafter(folder, target)


def test_a_quantization_map_may_name_the_fused_module(target, tmp_path):
    """The module holds `qkv_proj` in three parts, packed as they were."""
    folder = edited_drafter(tmp_path / "quantized")
    file, path = str(folder / "model.safetensors"), "layers.1.self_attn.qkv_proj"
    how = {"group_size": 16, "bits": 4, "mode": "nvfp4"}
    tensors = dict(mx.load(file))
    tensors[f"{path}.weight"], tensors[f"{path}.scales"] = mx.quantize(tensors[f"{path}.weight"], **how)
    mx.save_safetensors(file, tensors)
    config = json.loads((folder / "config.json").read_text())
    layout = {"group_size": 64, "bits": 4, path: how}
    (folder / "config.json").write_text(json.dumps(config | {"quantization": layout}))
    drafter, exact = load_drafter(folder, target), load_drafter(GOLDEN / "draft", target)
    for part in ("q_proj", "k_proj", "v_proj"):
        packed, plain = (d.model.layers[1].self_attn[part].weight for d in (drafter, exact))
        assert packed.shape == plain.shape and 0 < mx.abs(packed - plain).mean() < 0.1 * mx.abs(plain).mean()


def without_gate(monkeypatch):
    monkeypatch.setattr(GatedAttention, "output", Attention.output)


def without_tap_norms(monkeypatch):
    monkeypatch.setattr(LagunaModel, "context", DFlashModel.context)


def without_context_norm(monkeypatch):
    monkeypatch.setattr(LagunaLayer, "__call__", Layer.__call__)


@pytest.mark.parametrize("change", [without_gate, without_tap_norms, without_context_norm])
def test_each_part_that_poolside_adds_reaches_the_drafts(change, target, monkeypatch):
    drafter = load_drafter(GOLDEN / "draft", target)
    exact = draft_logits(drafter)
    change(monkeypatch)
    assert mx.abs(draft_logits(drafter) - exact).max().item() > 0.1


def test_context_rows_projected_without_a_draft_pass_the_same_norms(target, tmp_path):
    """With full attention, features that have waited for long are projected before the next draft."""
    drafter = load_drafter(edited_drafter(tmp_path / "full", layer_types=["full_attention"] * 3), target)
    _, features = target.forward(mx.array([IDS]), target.make_cache(), drafter.taps)
    features = mx.concatenate([features] * 8, axis=1)
    waiting, drafting = drafter.make_context(), drafter.make_context()
    drafter.append(features, waiting)
    assert not waiting.pending
    for at in range(0, features.shape[1], 64):
        drafter.append(features[:, at : at + 64], drafting)
        drafter.logits(mx.array([9], mx.uint32), 3, drafting)
    after = [drafter.logits(mx.array([5], mx.uint32), 8, context) for context in (waiting, drafting)]
    assert mx.allclose(*after, atol=1e-4)
