"""Every published drafter layout: the same weights draft the same, whatever the file calls things.

What each format computes is held by tests/test_parity.py: z-lab v1, DFlash 2 and YaRN by z-lab's `dflash`, the Muse
assistant by transformers, speculators files by the `speculators` package. Here: layouts of one drafter, and what
changes its drafts. Configs alone are in tests/test_drafter_configs.py.
"""

import json
from functools import cache

import mlx.core as mx
import numpy as np
import pytest
import tiny

from mlx_dflash import load, load_drafter, stream_generate
from mlx_dflash.accept import greedy
from mlx_dflash.errors import PairError

FAMILIES = ("qwen3", "qwen3_sliding", "qwen3_bidir", "qwen3_dflash2", "qwen3_causal_yarn", "qwen3_speculators")
FAMILIES += ("muse_glimmer",)
LENGTH = 60  # a context well past the drafters' window of 12


@cache
def target_of(family):
    return load(tiny.target_folder(family))[0]


def first_block(folder, family, rows=8):
    """Drafts and draft logits after the golden prompt, from its golden taps."""
    golden = tiny.golden(family)
    drafter = load_drafter(folder, target_of(family))
    context = drafter.make_context()
    drafter.append(mx.array(golden[f"p{LENGTH}_taps"][None]), context)
    anchor = mx.array(golden[f"p{LENGTH}_tokens"][:1].astype(np.uint32))
    ids, logits = drafter.draft(anchor, rows, context, greedy)
    return ids.tolist(), np.array(logits[0])


@cache
def golden_block(family):
    return first_block(tiny.draft_folder(family), family)


def config_of(family):
    return json.loads((tiny.draft_folder(family) / "config.json").read_text())


def prefixed(weights):
    return {f"model.{name}": value for name, value in weights.items()}


def codebooks_with_suffix(weights):
    return {f"{name}.weight" if name.endswith("codebook") else name: value for name, value in weights.items()}


def flat(family):
    """All of `dflash_config` at top level."""
    return {**config_of(family)["dflash_config"], "dflash_config": tiny.REMOVE}


def nested(family):
    """block_size and the layer count in `dflash_config`, RoPE in `rope_parameters`."""
    config = config_of(family)
    moved = ("block_size", "num_target_layers")
    inner = config["dflash_config"] | {key: config[key] for key in moved}
    rope = (config["rope_scaling"] or {"rope_type": "default"}) | {"rope_theta": config["rope_theta"]}
    removed = dict.fromkeys((*moved, "rope_theta", "rope_scaling"), tiny.REMOVE)
    return {**removed, "dflash_config": inner, "rope_parameters": rope}


def with_verifier_tensors(weights):
    more = {"verifier_norm.weight": mx.ones(48), "verifier_lm_head.weight": mx.zeros((270, 48))}
    return {k: v for k, v in weights.items() if k != "t2d"} | more


LAYOUTS = [
    ("qwen3", flat, None),
    ("qwen3", nested, None),
    ("qwen3", lambda f: {"layer_types": tiny.REMOVE}, prefixed),
    ("qwen3_sliding", flat, prefixed),
    ("qwen3_sliding", nested, None),
    ("qwen3_sliding", lambda f: {"is_causal": None}, None),
    (
        "qwen3_bidir",
        lambda f: {"is_causal": None, "dflash_config": config_of(f)["dflash_config"] | {"causal": False}},
        None,
    ),
    ("qwen3_causal_yarn", nested, prefixed),
    ("qwen3_dflash2", flat, prefixed),
    ("qwen3_dflash2", nested, codebooks_with_suffix),
    ("qwen3_dflash2", lambda f: {"architectures": None}, lambda w: prefixed(codebooks_with_suffix(w))),
    ("muse_glimmer", lambda f: {"layer_types": tiny.REMOVE, "architectures": None}, prefixed),
    ("qwen3_speculators", lambda f: {"sliding_window_non_causal": tiny.REMOVE}, with_verifier_tensors),
    ("qwen3_speculators", lambda f: {"target_hidden_size": 48}, None),
]


@pytest.mark.parametrize(("family", "config", "tensors"), LAYOUTS)
def test_layouts_of_the_same_weights_draft_the_same(tmp_path, family, config, tensors):
    folder = tiny.copy_folder(tiny.draft_folder(family), tmp_path / "draft", config(family), tensors)
    ids, logits = first_block(folder, family)
    assert ids == golden_block(family)[0]
    assert np.array_equal(logits, golden_block(family)[1])


@pytest.mark.parametrize("family", FAMILIES)
def test_golden_blocks_are_the_references(family):
    golden = tiny.golden(family)
    ids, logits = golden_block(family)
    assert ids == golden[f"p{LENGTH}_drafts"][0].tolist()
    assert np.abs(logits - golden[f"p{LENGTH}_dlogits"][0]).max() < 1e-3


ABLATIONS = [
    ("qwen3", {"is_causal": True}),
    ("qwen3", {"dflash_config": {"mask_token_id": 299, "target_layer_ids": [1, 3, 5], "causal": True}}),
    ("qwen3", {"rope_theta": 1e4}),
    ("qwen3", {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}),
    ("qwen3", {"is_neox_style": False}),
    ("qwen3", {"dflash_config": {"mask_token_id": 298, "target_layer_ids": [1, 3, 5]}}),
    ("qwen3", {"input_embedding_scale": 2.0}),
    ("qwen3", {"output_multiplier": 0.5}),
    ("qwen3", {"final_logit_softcapping": 5.0}),
    ("qwen3_sliding", {"is_causal": False}),
    ("qwen3_sliding", {"sliding_window": 11}),
    ("qwen3_sliding", {"sliding_window": 13}),
    ("qwen3_sliding", {"layer_types": ["full_attention"] * 3, "use_sliding_window": False, "is_causal": True}),
    ("qwen3_bidir", {"is_causal": None}),
    ("qwen3_bidir", {"is_causal": True}),
    ("qwen3_bidir", {"sliding_window": 11}),
    ("qwen3_bidir", {"layer_types": ["sliding_attention"] * 3}),
    ("qwen3_causal_yarn", {"is_causal": None}),
    ("qwen3_causal_yarn", {"rope_scaling": None}),
    ("qwen3_dflash2", {"is_causal": True}),
    ("muse_glimmer", {"sliding_window": 11}),
    ("muse_glimmer", {"sliding_window": 13}),
    ("muse_glimmer", {"layer_types": ["full_attention"] * 3}),
    ("qwen3_speculators", {"sliding_window_non_causal": True}),
]


@pytest.mark.parametrize(("family", "change"), ABLATIONS, ids=str)
def test_every_rule_changes_the_draft_logits(tmp_path, family, change):
    """A wrong rule raises no error, so each must be seen to matter."""
    folder = tiny.copy_folder(tiny.draft_folder(family), tmp_path / "draft", change)
    assert np.abs(first_block(folder, family)[1] - golden_block(family)[1]).max() > 1e-2


def edit_layer_config(family, **changes):
    return {"transformer_layer_config": config_of(family)["transformer_layer_config"] | changes}


@pytest.mark.parametrize("window", [11, 13])
def test_the_window_of_a_speculators_file_matters(tmp_path, window):
    family = "qwen3_speculators"
    change = edit_layer_config(family, sliding_window=window)
    folder = tiny.copy_folder(tiny.draft_folder(family), tmp_path / "draft", change)
    assert np.abs(first_block(folder, family)[1] - golden_block(family)[1]).max() > 1e-2


def test_a_speculators_file_with_bidirectional_windows_equals_the_package(tmp_path):
    family = "qwen3_speculators"
    change = {"sliding_window_non_causal": True}
    folder = tiny.copy_folder(tiny.draft_folder(family), tmp_path / "draft", change)
    expected = tiny.golden(family)[f"p{LENGTH}_dlogits_non_causal"]
    assert np.abs(first_block(folder, family)[1] - expected).max() < 1e-3


def test_a_speculators_file_without_embedding_uses_the_targets(tmp_path):
    family = "qwen3_speculators"
    table = target_of(family).model.model.embed_tokens.weight

    def same(weights):
        return weights | {"embed_tokens.weight": table}

    def left_out(weights):
        return {k: v for k, v in weights.items() if k != "embed_tokens.weight"}

    own = first_block(tiny.copy_folder(tiny.draft_folder(family), tmp_path / "own", tensors=same), family)
    shared = first_block(tiny.copy_folder(tiny.draft_folder(family), tmp_path / "shared", tensors=left_out), family)
    assert np.array_equal(own[1], shared[1])
    assert np.abs(own[1] - golden_block(family)[1]).max() > 1e-2  # the file's own embedding is another


def as_speculators(family, kind):
    """A z-lab drafter's config in speculators layout."""
    config = config_of(family)
    inner = config["dflash_config"]
    keys = ("dflash_config", "block_size", "num_target_layers", "architectures", "is_causal")
    layers = {k: v for k, v in config.items() if k not in keys}
    parts = {
        k: inner[k] for k in ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k") if k in inner
    }
    removed = {k: tiny.REMOVE for k in config if k != "architectures"}
    return (
        removed
        | parts
        | {
            "architectures": ["DFlash2DraftModel"],
            "speculators_model_type": kind,
            "speculators_config": {"algorithm": kind, "verifier": {"name_or_path": "someone/target"}},
            "transformer_layer_config": layers,
            "draft_vocab_size": config["vocab_size"],
            "block_size": config.get("block_size", inner.get("block_size")),
            "mask_token_id": inner["mask_token_id"],
            "aux_hidden_state_layer_ids": [i + 1 for i in inner["target_layer_ids"]],
        }
    )


@pytest.mark.parametrize(("family", "kind"), [("qwen3", "dflash"), ("qwen3_dflash2", "dflash2")])
def test_a_full_vocabulary_speculators_file_drafts_as_the_zlab_file_it_was_made_from(tmp_path, family, kind):
    """All layers full: the formats' masks agree there. Files of package 0.9 hold neither embedding nor head then."""
    scales = {"input_embedding_scale": 1.0, "output_multiplier": 1.0, "final_logit_softcapping": None}
    plain = {"dflash_config": config_of(family)["dflash_config"] | scales}
    zlab = tiny.copy_folder(tiny.draft_folder(family), tmp_path / "zlab", plain)
    other = tiny.copy_folder(tiny.draft_folder(family), tmp_path / "other", as_speculators(family, kind))
    expected, got = first_block(zlab, family), first_block(other, family)
    assert got[0] == expected[0] and np.array_equal(got[1], expected[1])


def test_a_quantized_drafter_of_any_format_loads_as_mlx_lm_writes_it(tmp_path):
    """`down_proj` alone, by the folder's own map; on the CPU its exact values are held in fp32."""
    for family in ("qwen3_dflash2", "muse_glimmer", "qwen3_speculators"):

        def pack(weights):
            out = dict(weights)
            for name in [n for n in weights if n.endswith("down_proj.weight")]:
                base = name.removesuffix(".weight")
                w, scales, biases = mx.quantize(weights[name], 64, 8)
                out |= {name: w, f"{base}.scales": scales, f"{base}.biases": biases}
            return out

        layout = {"quantization": {"group_size": 64, "bits": 8}}
        folder = tiny.copy_folder(tiny.draft_folder(family), tmp_path / family, layout, pack)
        off = np.abs(first_block(folder, family)[1] - golden_block(family)[1]).max()
        assert 0 < off < 0.5


def test_a_vocabulary_map_out_of_the_targets_table_is_refused(tmp_path):
    family = "qwen3_speculators"
    folder = tiny.copy_folder(
        tiny.draft_folder(family), tmp_path / "draft", tensors=lambda w: w | {"d2t": w["d2t"] + 40}
    )
    with pytest.raises(PairError, match="d2t"):
        load_drafter(folder, target_of(family))


def test_drafts_of_a_reduced_vocabulary_are_target_ids():
    golden = tiny.golden("qwen3_speculators")
    drafts = golden[f"p{LENGTH}_drafts"]
    best = golden[f"p{LENGTH}_dlogits"][0].argmax(-1)
    assert golden[f"p{LENGTH}_dlogits"].shape[-1] == 270
    assert (drafts[0] != best).any()  # the parity tests hold the mapped ids; here: mapping is not the identity


@pytest.mark.parametrize(
    ("family", "width", "remaining", "rows"),
    [
        ("qwen3", 8, 20, 8),
        ("qwen3", 8, 3, 4),
        ("qwen3", 8, 1, 2),
        ("qwen3", 4, 20, 4),
        ("qwen3_speculators", 8, 3, 4),
        ("muse_glimmer", 8, 20, 8),
        ("muse_glimmer", 8, 2, 8),
        ("muse_glimmer", 8, 1, 1),
        ("muse_glimmer", 4, 2, 4),
    ],
)
def test_rows_of_a_round_near_the_last_token(family, width, remaining, rows):
    assert load_drafter(tiny.draft_folder(family), target_of(family)).rows(width, remaining) == rows


def test_two_targets_and_drafters_with_other_taps_live_side_by_side(tmp_path):
    """Four pairs, interleaved token by token, each as when it runs alone."""
    pairs = []
    for family in ("qwen3_sliding", "muse_glimmer"):
        target, tokenizer = load(tiny.target_folder(family))
        own = load_drafter(tiny.draft_folder(family), target)
        inner = config_of(family).get("dflash_config")
        taps = {"target_layer_ids": [0, 2, 7]}
        changed = {"dflash_config": inner | taps} if inner else taps
        other = load_drafter(tiny.copy_folder(tiny.draft_folder(family), tmp_path / family, changed), target)
        pairs += [(target, tokenizer, own), (target, tokenizer, other)]

    def start(target, tokenizer, drafter):
        prompt = list(range(20, 50))
        return stream_generate(target, tokenizer, prompt, draft_model=drafter, block_size=8, max_tokens=24)

    alone = [[(r.token, r.from_draft) for r in start(*p)] for p in pairs]
    together = [
        [(r.token, r.from_draft) for r in steps] for steps in zip(*map(start, *zip(*pairs, strict=True)), strict=True)
    ]
    assert [list(column) for column in zip(*together, strict=True)] == alone
    assert [t for t, _ in alone[0]] == [t for t, _ in alone[1]]
    assert [t for t, _ in alone[2]] == [t for t, _ in alone[3]]
