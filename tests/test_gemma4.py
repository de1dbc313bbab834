"""Gemma 4's own ways: what its configs mean, K = V, shared keys and values, scaled embeddings.

That the three shapes compute what transformers computes is test_parity's.
"""

import dataclasses
import json
import random
import shutil
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from mlx_dflash.benchmarks.machine import rows_independent

from mlx_dflash import CheckpointError, UnsupportedError, generate, load, load_drafter
from mlx_dflash.cache import FullKV, QuantizedKV, SlidingKV

GOLDEN = Path(__file__).parent / "golden"
SHAPES = ("gemma4", "gemma4_e", "gemma4_moe")
WINDOW = 16
IDS = [random.Random(3).randrange(3, 290) for _ in range(40)]


@pytest.fixture(scope="module", params=SHAPES)
def shape(request):
    return request.param


@pytest.fixture(scope="module")
def target(shape):
    return load(GOLDEN / shape / "target")[0]


def copy_of(shape, folder, edit=lambda config: None, names=lambda name: name, more=None):
    """The golden target with its config edited in place, its tensors renamed (None: left out) and more added."""
    shutil.copytree(GOLDEN / shape / "target", folder)
    config = json.loads((folder / "config.json").read_text())
    edit(config)
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {names(k): v for k, v in mx.load(str(folder / "model.safetensors")).items()} | (more or {})
    mx.save_safetensors(str(folder / "model.safetensors"), {k: v for k, v in tensors.items() if k is not None})
    return folder


def logits(target, ids=IDS):
    return target.forward(mx.array([ids]), target.make_cache())[0]


def as_transformers_writes(config):
    """Undo what tests/oracle/targets.py changes for the hub's layout."""
    text = config["text_config"]
    full = {"head_dim": text.pop("global_head_dim"), "num_key_value_heads": text.pop("num_global_key_value_heads")}
    full = {k: v for k, v in full.items() if v is not None}
    text["per_layer_config"] = {str(i): full for i, k in enumerate(text["layer_types"]) if k == "full_attention"}
    del config["vocab_size"]


def as_text_only(config):
    text = config.pop("text_config")
    config.clear()
    config |= text  # with model_type gemma4_text


def text_name(name):
    return name.replace("model.language_model.", "model.") if "language_model" in name else None


def test_the_layout_of_transformers_5_gives_the_same_model(shape, target, tmp_path):
    nested = load(copy_of(shape, tmp_path / "nested", as_transformers_writes))[0]
    assert mx.array_equal(logits(nested), logits(target))


def test_a_flat_folder_of_the_text_model_alone_gives_the_same_model(shape, target, tmp_path):
    flat = load(copy_of(shape, tmp_path / "flat", as_text_only, text_name))[0]
    assert mx.array_equal(logits(flat), logits(target))
    assert (flat.hidden_size, flat.num_layers, flat.vocab_size) == (48, 8, 300)


def test_missing_keys_mean_what_they_mean_to_transformers(shape, target, tmp_path):
    """mlx-lm would take 20 layers to share keys and values, wide MLPs, a softcap of 30, every fifth layer full."""

    def shorten(config):
        text = config["text_config"]
        standard = {"num_kv_shared_layers": 0, "use_double_wide_mlp": False, "attention_k_eq_v": False}
        standard |= {"enable_moe_block": False, "num_global_key_value_heads": None, "rms_norm_eps": 1e-6}
        for key in [k for k, v in standard.items() if text[k] == v]:
            del text[key]
        del text["rope_parameters"], text["final_logit_softcapping"], text["tie_word_embeddings"]

    bare = load(copy_of(shape, tmp_path / "bare", shorten))[0]
    assert mx.allclose(mx.tanh(logits(bare) / 30) * 30, logits(target), atol=1e-6)


def test_layers_are_full_by_transformers_pattern_where_the_file_does_not_say(tmp_path):
    def unsaid(config):
        del config["text_config"]["layer_types"]

    with pytest.raises(CheckpointError):  # layer 3 of the tensors is full, the pattern's is not
        load(copy_of("gemma4", tmp_path / "unsaid", unsaid))
    kinds = load_config(unsaid)["layer_types"]
    assert kinds == ["sliding_attention"] * 5 + ["full_attention", "sliding_attention", "full_attention"]


def load_config(edit):
    """What the family makes of an edited golden config."""
    from mlx_dflash.targets.config import normalise
    from mlx_dflash.targets.gemma4 import Gemma4

    config = json.loads((GOLDEN / "gemma4" / "target" / "config.json").read_text())
    edit(config)
    return Gemma4.prepare(normalise(config))


def test_the_inner_vocabulary_counts(target, shape, tmp_path):
    """mlx-lm reads the outer one, and 262144 where there is none."""
    folder = copy_of(shape, tmp_path / "outer", lambda config: config.update(vocab_size=262144))
    assert mx.array_equal(logits(load(folder)[0]), logits(target))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"hidden_activation": "relu"}, "hidden_activation = 'relu'"),
        ({"attention_bias": True}, "attention_bias = True"),
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention = 'all'"),
        ({"rope_theta": 5000.0}, "rope_theta"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 5000.0}}, "rope_theta"),
        ({"rope_parameters": {"full_attention": {"rope_type": "yarn", "rope_theta": 5000.0}}}, "yarn"),
        (
            {"rope_parameters": {"sliding_attention": {"rope_theta": 5e3, "partial_rotary_factor": 0.5}}},
            "partial_rotary_factor in sliding_attention",
        ),
        ({"per_layer_config": {"3": {"head_dim": 32}}}, "per_layer_config"),
        ({"per_layer_config": {"3": {"head_dim": 32}, "7": {"head_dim": 16}}}, "per_layer_config"),
        ({"per_layer_config": {"3": {"intermediate_size": 3}, "7": {"intermediate_size": 3}}}, "per_layer_config"),
    ],
)
def test_what_mlx_lm_would_run_as_something_else_is_refused(change, words):
    with pytest.raises(UnsupportedError, match=words):
        load_config(lambda config: config["text_config"].update(change))


def test_attention_to_images_both_ways_is_no_matter_for_text():
    load_config(lambda config: config["text_config"].update(use_bidirectional_attention="vision"))


def test_a_rope_base_that_is_not_there_is_not_guessed():
    rope = {"full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25}}
    with pytest.raises(CheckpointError, match="rope_theta"):
        load_config(lambda config: config["text_config"].update(rope_parameters=rope))


def test_towers_are_dropped_and_any_other_tensor_is_refused(tmp_path):
    towers = [f"model.{n}.x.weight" for n in ("vision_tower", "embed_vision", "audio_tower", "embed_audio")]
    load(copy_of("gemma4_e", tmp_path / "towers", more={name: mx.zeros((2, 2)) for name in towers}))
    extra = {"model.language_model.layers.0.extra.weight": mx.zeros((2, 2))}
    with pytest.raises(CheckpointError, match=r"layers\.0\.extra"):
        load(copy_of("gemma4_e", tmp_path / "extra", more=extra))


def test_keys_are_values_on_full_layers():
    """Their values are the key projection under a norm without weights and without rotation."""
    target = load(GOLDEN / "gemma4" / "target")[0]
    cache = target.make_cache()
    _, before = target.forward(mx.array([IDS]), cache, taps=(2,))  # what layer 3 gets
    layer, held = target.text.layers[3], cache.layers[3]
    projected = layer.self_attn.k_proj(layer.input_layernorm(before))  # (1, n, one head of 32)
    values = mx.fast.rms_norm(projected[:, None], None, 1e-6)
    assert mx.allclose(held.values[..., : len(IDS), :], values, atol=1e-5)
    assert not mx.allclose(held.keys[..., : len(IDS), :], values, atol=1e-1)
    assert target.text.layers[2].self_attn.v_proj is not None and "v_proj" not in layer.self_attn


def test_shared_layers_have_no_cache():
    target = load(GOLDEN / "gemma4_e" / "target")[0]
    assert [type(c) for c in target.make_cache().layers] == [SlidingKV, SlidingKV, SlidingKV, FullKV]
    assert len(target.text.layers) == target.num_layers == 8


def test_shared_layers_attend_to_the_last_layer_of_their_kind():
    """Each of layers 4 to 7 changes its output with the source's values, and with no other layer's."""
    target = load(GOLDEN / "gemma4_e" / "target")[0]
    seen = {}

    def spy(index, attention):
        class Spy:
            def __call__(self, x, mask, cache, shared_kv=None, offset=None):
                out, keys_values, offset = attention(x, mask, cache, shared_kv=shared_kv, offset=offset)
                seen[index] = (shared_kv, keys_values, offset)
                return out, keys_values, offset

        return Spy()

    for index, layer in enumerate(target.text.layers):
        layer.self_attn = spy(index, layer.self_attn)
    cache = target.make_cache()
    for at in (0, 30):
        target.forward(mx.array([IDS[at : at + 30]]), cache)
        for index, source in {4: 2, 5: 2, 6: 2, 7: 3}.items():
            assert all(a is b for a, b in zip(seen[index][0], seen[source][1], strict=True))
            assert seen[index][2].item() == at
        assert all(seen[index][0] is None for index in range(4))


@pytest.mark.parametrize("start", [0, WINDOW - 1, WINDOW, 3 * WINDOW])
def test_rejects_leave_what_the_committed_tokens_would(target, start):
    """Two partial rejects in a row before, on and past the window, up to blocks wider than it."""
    rng = random.Random(start)
    text = [rng.randrange(3, 290) for _ in range(start)]
    for width in (2, 5, WINDOW + 2):
        for keep in sorted({0, 1, width // 2, width}):
            cache, kept = fed(target, text), list(text)
            for _ in range(2):
                block = [rng.randrange(3, 290) for _ in range(width)]
                cache.begin()
                target.forward(mx.array([block]), cache)
                cache.commit(keep)
                kept += block[:keep]
            after = [target.forward(mx.array([[7, 8]]), c)[0] for c in (cache, fed(target, kept))]
            same = mx.array_equal(*after) if rows_independent() else mx.allclose(*after, rtol=1e-4, atol=1e-4)
            assert same, (width, keep)


def fed(target, ids):
    """A cache that got `ids` in one pass."""
    cache = target.make_cache()
    cache.begin()
    if ids:
        target.forward(mx.array([ids]), cache)
    cache.commit(len(ids))
    return cache


class Pair:
    def __init__(self, shape):
        self.golden = dict(np.load(GOLDEN / shape / "golden.npz"))
        self.target, self.tokenizer = load(GOLDEN / shape / "target")
        self.drafter = load_drafter(GOLDEN / shape / "draft", self.target)

    def scale(self, factor):
        self.drafter.config = dataclasses.replace(self.drafter.config, input_embedding_scale=factor)

    def first_draft_error(self, length=60):
        """Largest difference to the reference in the draft logits of the first round."""
        ids = self.golden[f"p{length}_ids"].tolist()
        _, features = self.target.forward(mx.array([ids]), self.target.make_cache(), self.drafter.taps)
        context = self.drafter.make_context()
        self.drafter.append(features, context)
        anchor = mx.array(self.golden[f"p{length}_tokens"][:1], mx.uint32)
        return np.abs(np.array(self.drafter.logits(anchor, 8, context)[0]) - self.golden[f"p{length}_dlogits"][0]).max()

    def accepted(self):
        options = {"draft_model": self.drafter, "block_size": 8, "max_tokens": 32}
        found = 0
        for length in self.golden["contexts"]:
            result = generate(self.target, self.tokenizer, self.golden[f"p{length}_ids"].tolist(), **options)
            assert result.tokens == self.golden[f"p{length}_tokens"].tolist()
            found += result.stats.accepted
        return found


def test_the_drafter_sees_embeddings_scaled_once(shape):
    """Raw rows move the draft logits far off the reference's, rows scaled twice cost drafts; the text stays."""
    pair = Pair(shape)
    raw = pair.target.text.embed_tokens(mx.array(IDS))
    assert mx.allclose(pair.target.embed(mx.array(IDS)), raw * 48**0.5)
    assert pair.first_draft_error() < 1e-3
    accepted = pair.accepted()
    pair.scale(48**-0.5)
    assert pair.first_draft_error() > 0.1
    pair.scale(48**0.5)
    assert pair.accepted() < 0.75 * accepted


def test_quantized_keys_and_values_on_full_layers_only():
    target = load(GOLDEN / "gemma4" / "target")[0]
    kinds = [type(c) for c in target.make_cache(kv_bits=8).layers]
    assert kinds == ([SlidingKV] * 3 + [QuantizedKV]) * 2
    cache = target.make_cache(kv_bits=8)
    close = target.forward(mx.array([IDS]), cache)[0]
    assert 0 < mx.abs(close - logits(target)).max().item() < 0.2


def test_quantized_keys_and_values_are_refused_where_layers_share_them():
    target = load(GOLDEN / "gemma4_e" / "target")[0]
    with pytest.raises(UnsupportedError, match="gemma4: its last layers share keys and values"):
        target.make_cache(kv_bits=8)
    assert load(GOLDEN / "gemma4" / "target")[0].kv_bits_refusal is None  # the other shapes are not told so
