"""Rotary positions of drafters: the numbers of transformers' rope init functions, and both layouts of pairs.

NUMBERS were computed once with transformers 5.24 and torch (ROPE_INIT_FUNCTIONS, head_dim 32, 40960 positions).
A YaRN drafter as a whole is held by the golden pair qwen3_causal_yarn. No reference package drafts with interleaved
pairs (`is_neox_style: false`, a key of vLLM's DFlash models), so that is held against numpy and against weights in
permuted order.
"""

import json

import mlx.core as mx
import numpy as np
import pytest
import tiny

from mlx_dflash import load, load_drafter
from mlx_dflash.accept import greedy
from mlx_dflash.drafters.formats.fields import Fields, rope
from mlx_dflash.drafters.rope import Rope, RopeScaling, frequencies

YARN = {"rope_type": "yarn", "beta_fast": 32.0, "beta_slow": 1.0, "original_max_position_embeddings": 4096}
GPT_OSS = YARN | {"rope_theta": 150000.0, "factor": 32.0}
# fmt: off
NUMBERS = {
    "gpt-oss": (GPT_OSS | {"truncate": False}, [
        1.0, 0.47478205, 0.225418, 0.10702442, 0.050813273, 0.019335002, 0.0067949593, 0.0020937927,
        0.00045648392, 3.8308812e-05, 1.8188337e-05, 8.6354958e-06, 4.0999785e-06, 1.9465963e-06, 9.2420896e-07,
        4.3879785e-07], 1.34657359),
    "truncated": (GPT_OSS | {"truncate": True}, [
        1.0, 0.47478205, 0.225418, 0.10702442, 0.050813273, 0.019450968, 0.007015714, 0.0022772721,
        0.0005809475, 3.8308812e-05, 1.8188337e-05, 8.6354958e-06, 4.0999785e-06, 1.9465963e-06, 9.2420896e-07,
        4.3879785e-07], 1.34657359),
    "mscale": (YARN | {"rope_theta": 50000.0, "factor": 64.0, "mscale": 1.0, "mscale_all_dim": 0.5}, [
        1.0, 0.50852746, 0.25860015, 0.13150527, 0.066874035, 0.028427958, 0.01161916, 0.0044658487, 0.0015372967,
        0.00040864607, 1.8070234e-05, 9.1892098e-06, 4.6729651e-06, 2.3763307e-06, 1.2084294e-06,
        6.1451948e-07], 1.172147159),
    "factor given": ({"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "attention_factor": 0.9,
                      "original_max_position_embeddings": 32768}, [
        1.0, 0.42169651, 0.17782794, 0.074989416, 0.031622779, 0.013335215, 0.0047799014, 0.0016599617, 0.00055,
        0.00016867858, 4.4456985e-05, 1.8747356e-05, 7.9056936e-06, 3.3338035e-06, 1.4058534e-06,
        5.9284343e-07], 0.9),
    "no length": ({"type": "yarn", "rope_theta": 1e6, "factor": 4.0}, [
        1.0, 0.42169651, 0.17782794, 0.074989416, 0.031622779, 0.013335215, 0.0056234132, 0.0020156677, 0.00070000003,
        0.00023193305, 7.1131173e-05, 1.8747356e-05, 7.9056936e-06, 3.3338035e-06, 1.4058534e-06,
        5.9284343e-07], 1.138629436),
    "linear": ({"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0}, [
        0.125, 0.052712064, 0.022228492, 0.009373677, 0.0039528473, 0.0016669019, 0.00070292666, 0.00029642173,
        0.00012500001, 5.2712061e-05, 2.2228493e-05, 9.373678e-06, 3.9528468e-06, 1.6669018e-06, 7.0292668e-07,
        2.9642172e-07], 1.0),
    "llama3": ({"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0,
                "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}, [
        1.0, 0.44036663, 0.19392276, 0.085397102, 0.037606031, 0.016560441, 0.0072926651, 0.0032114461, 0.00052484602,
        7.7846555e-05, 3.4281024e-05, 1.5096218e-05, 6.6478697e-06, 2.9274997e-06, 1.2891732e-06,
        5.6770881e-07], 1.0),
}
# fmt: on


def read(parameters, nested):
    """Through a config of either layout, as every format reads it."""
    config = {"max_position_embeddings": 40960}
    if nested:
        return rope(Fields(config | {"rope_parameters": parameters}, "config.json"))
    rest = {k: v for k, v in parameters.items() if k != "rope_theta"}
    return rope(Fields(config | {"rope_theta": parameters["rope_theta"], "rope_scaling": rest}, "config.json"))


@pytest.mark.parametrize("name", list(NUMBERS))
@pytest.mark.parametrize("nested", [False, True], ids=["flat", "nested"])
def test_frequencies_are_transformers(name, nested):
    parameters, expected, attention = NUMBERS[name]
    theta, scaling = read(parameters, nested)
    assert frequencies(32, theta, scaling) == pytest.approx(expected, rel=1e-5)
    assert scaling.attention == pytest.approx(attention, rel=1e-8)
    made = Rope(32, theta, scaling)
    assert (1 / np.array(made.periods)).tolist() == pytest.approx(expected, rel=1e-5)


def test_truncation_matters():
    whole, cut = NUMBERS["gpt-oss"][1], NUMBERS["truncated"][1]
    assert max(abs(a - b) / b for a, b in zip(whole, cut, strict=True)) > 0.2


def rotated(x, offset, freqs, attention, interleaved):
    """(heads, n, d) rotated pair by pair in double precision."""
    out = np.zeros(x.shape)
    half = x.shape[-1] // 2
    for i, frequency in enumerate(freqs):
        a, b = (2 * i, 2 * i + 1) if interleaved else (i, i + half)
        angle = (offset + np.arange(x.shape[1])) * frequency
        out[..., a] = attention * (x[..., a] * np.cos(angle) - x[..., b] * np.sin(angle))
        out[..., b] = attention * (x[..., a] * np.sin(angle) + x[..., b] * np.cos(angle))
    return out


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("name", [None, "gpt-oss", "factor given", "linear", "llama3"])
def test_rotation_equals_pairs_turned_one_by_one(name, interleaved):
    theta, scaling = read(NUMBERS[name][0], True) if name else (1e6, None)
    x = mx.random.normal((1, 2, 6, 32), key=mx.random.key(0))
    for offset in (0, 61, 900):
        got = Rope(32, theta, scaling, interleaved)(x, offset)
        attention = 1.0 if scaling is None else scaling.attention
        expected = rotated(np.array(x[0], np.float64), offset, frequencies(32, theta, scaling), attention, interleaved)
        assert np.abs(np.array(got[0]) - expected).max() < 2e-3


def test_scores_depend_on_distance_alone():
    made = Rope(32, 1e4, RopeScaling("yarn", 8.0, 32, truncate=False, attention=1.2), interleaved=True)
    q, k = (mx.random.normal((1, 1, 1, 32), key=mx.random.key(i)) for i in range(2))
    scores = [(made(q, 10 + shift) * made(k, 3 + shift)).sum().item() for shift in (0, 5, 50)]
    assert scores[1] == pytest.approx(scores[0], rel=1e-4) and scores[2] == pytest.approx(scores[0], rel=1e-4)


def test_an_interleaved_drafter_drafts_as_its_permuted_twin(tmp_path):
    """Head dimensions 0, d/2, 1, d/2 + 1, ... of queries, keys and norms: the same drafter, other pairs."""
    family, head_dim = "qwen3_sliding", 16
    order = [i + half for i in range(head_dim // 2) for half in (0, head_dim // 2)]

    def permute(weights):
        out = dict(weights)
        for name, value in weights.items():
            if name.endswith(("q_proj.weight", "k_proj.weight")):
                heads = value.reshape(-1, head_dim, value.shape[1])
                out[name] = mx.contiguous(heads[:, mx.array(order)].reshape(value.shape))
            elif name.endswith(("q_norm.weight", "k_norm.weight")):
                out[name] = value[mx.array(order)]
        return out

    target, _ = load(tiny.target_folder(family))
    golden = tiny.golden(family)

    def logits(folder):
        drafter = load_drafter(folder, target)
        context = drafter.make_context()
        drafter.append(mx.array(golden["p60_taps"][None]), context)
        anchor = mx.array(golden["p60_tokens"][:1].astype(np.uint32))
        ids, values = drafter.draft(anchor, 8, context, greedy)
        return ids.tolist(), np.array(values)

    source = tiny.draft_folder(family)
    expected = logits(source)
    twin = logits(tiny.copy_folder(source, tmp_path / "twin", {"is_neox_style": False}, permute))
    halves = logits(tiny.copy_folder(source, tmp_path / "halves", {"is_neox_style": True}, permute))
    assert twin[0] == expected[0] and np.abs(twin[1] - expected[1]).max() < 1e-4
    assert np.abs(halves[1] - expected[1]).max() > 1e-2
    assert "is_neox_style" not in json.loads((source / "config.json").read_text())  # halves are the default
