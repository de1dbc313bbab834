"""The calibrate command: ceilings and predictions by hand, scaling by depth, and tiny random pairs end to end."""

import json
import math

import mlx.core as mx
import pytest
import tiny
from mlx_dflash.benchmarks import __main__ as benchmarks
from mlx_dflash.benchmarks import calibrate, roofline, schema, shapes
from mlx_dflash.benchmarks.calibrate import Samples, Times

from mlx_dflash import RequestError, memory

CPU = mx.default_device() == mx.Device(mx.cpu)
ITEM = 4 if CPU else 2  # bytes of a value that is not quantized
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 192,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e4,
}
QWEN3 = SIZES | {"model_type": "qwen3", "num_hidden_layers": 4, "tie_word_embeddings": False}
QWEN3 |= {"max_position_embeddings": 512}
MOE = QWEN3 | {"model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
HYBRID = QWEN3 | {
    "model_type": "qwen3_5",
    "num_hidden_layers": 12,
    "full_attention_interval": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
}
MUSE = SIZES | {"model_type": "muse_glimmer", "num_hidden_layers": 12, "sliding_window": 16, "post_norm_eps": 1e-8}
MUSE |= {"tie_word_embeddings": False, "qk_scale_factor": 3.87}
DRAFTER = SIZES | {
    "model_type": "qwen3",
    "architectures": ["DFlashDraftModel"],
    "num_hidden_layers": 2,
    "block_size": 4,
    "mask_token_id": 191,
    "target_layer_ids": [0, 2, 3],
}
LAYER = 64 * 128 + 2 * 64 * 64 + 128 * 64 + 2 * 64 + 2 * 32  # attention's matrices and all norms
MLP = 3 * 64 * 128
ROWS = ["--rows", 2, 3, 4, 6, "--repeats", 1, "--context", 32]


@pytest.fixture(autouse=True)
def tiny_shapes(monkeypatch):
    known = {
        "tiny": shapes.Shape(QWEN3, DRAFTER),
        "tiny-moe": shapes.Shape(MOE, DRAFTER),
        "tiny-hybrid": shapes.Shape(HYBRID, DRAFTER, period=4),
        "tiny-muse": shapes.Shape(MUSE, DRAFTER, period=4),
    }
    monkeypatch.setattr(shapes, "SHAPES", shapes.SHAPES | known)
    monkeypatch.setattr(roofline, "ARRAY", 2**20)
    monkeypatch.setattr(roofline, "cache_bytes", lambda: 2**16)


def command(*words):
    """Run a command of the package; its exit code."""
    with pytest.raises(SystemExit) as left:
        benchmarks.main([str(word) for word in words])
    return left.value.code


def target_of(config):
    return shapes.open_target(shapes.Shape(config, DRAFTER), config["num_hidden_layers"], 16)


def test_bytes_of_a_plain_token_by_hand():
    kv = 4 * 2 * 2 * 32 * 100  # layers, keys and values, heads, head_dim, tokens
    read = 4 * (LAYER + MLP) + 64 + 192 * 64 + 64  # one row of the embedding, the whole head, the last norm
    assert roofline.token_bytes(target_of(QWEN3), 100) == ITEM * (read + kv)


def test_a_table_that_is_the_head_too_is_read_whole():
    tied = target_of(QWEN3 | {"tie_word_embeddings": True})
    assert roofline.weights_read(tied) == memory.weight_bytes(tied.model) == ITEM * (4 * (LAYER + MLP) + 192 * 64 + 64)


def test_of_experts_the_chosen_ones_are_read():
    read = 4 * (LAYER + 2 * 3 * 64 * 64 + 8 * 64) + 64 + 192 * 64 + 64
    assert roofline.weights_read(target_of(MOE)) == ITEM * read


def test_bytes_of_a_draft_pass_by_hand():
    drafter = shapes.open_pair("tiny", 4, 16)
    weights = 2 * (LAYER + MLP) + 3 * 64 * 64 + 2 * 64  # layers, the projection of three taps, two norms
    assert roofline.draft_bytes(drafter, 100) == ITEM * (weights + 192 * 64 + 2 * 2 * 2 * 32 * 100)


def test_ceilings_by_hand():
    found = roofline.ceilings(speed=600.0, target=100, drafter=20, plain=0.25)
    assert found["plain_ceiling_tps"] == 6.0 and found["plain_tps"] == 4.0
    assert found["share_reached"] == pytest.approx(2 / 3)
    assert found["dflash_ceiling_tps"][3] == 15.0 and found["dflash_ceiling_tps"][8] == 40.0


@pytest.mark.parametrize(
    ("name", "floor"), [("muse-30b", "Muse 30B"), ("qwen3.5-27b", "Qwen3.5-27B"), ("qwen3.5-35b-a3b", "35B-A3B")]
)
def test_published_shapes_have_the_published_floors(monkeypatch, name, floor):
    """Sizes at 4 bits as on Metal, over the bandwidth of an M4 Max, beside what others say of it."""
    monkeypatch.setattr(shapes, "hold_in_fp32", lambda model: None)
    whole = shapes.open_pair(name, shapes.SHAPES[name].layers, 4)
    machine = roofline.PUBLISHED["machines"][0]
    milliseconds = roofline.token_bytes(whole.target, 48) / machine["bandwidth_gb_s"] / 1e6
    assert milliseconds == pytest.approx(machine["floor_ms"][floor], rel=0.08)


def test_predicted_speed_ups_by_hand():
    found = roofline.predicted(0.1, {2: 0.125, 5: 0.2, 16: 0.4})
    assert found["speed_up"][2] == pytest.approx({1.5: 1.2, 2: 1.6})  # no more tokens than rows
    assert found["speed_up"][5] == pytest.approx({1.5: 0.75, 2: 1.0, 3: 1.5, 4: 2.0, 5: 2.5})
    assert found["speed_up"][16][8] == pytest.approx(2.0) and list(found["speed_up"][16]) == list(roofline.TAUS)
    assert found["break_even_tau"] == pytest.approx({2: 1.25, 5: 2.0, 16: 4.0})
    assert list(found["recommended"]) == [0.5, 0.55, 0.6, 0.65, 0.7, 0.75, 0.8, 0.85, 0.9, 0.95]


@pytest.mark.parametrize("slope", [0.0, 0.05, 0.15, 0.4, 1.2])
def test_recommended_rows_are_the_best_of_all(slope):
    """Against the mean over every way a round can end."""
    plain = 0.05
    rounds = {n: plain * (1.2 + slope * n) for n in range(2, 17)}
    for chance in roofline.CHANCES:
        speeds = {1: 1 / plain}
        for n, seconds in rounds.items():
            ends = [(k + 1) * chance**k * (1 - chance) for k in range(n - 1)] + [n * chance ** (n - 1)]
            speeds[n] = math.fsum(ends) / seconds
        found = roofline.recommended(plain, rounds, chance)
        assert found["rows"] == max(speeds, key=speeds.get)
        assert found["speed_up"] == pytest.approx(max(speeds.values()) * plain)


def scripted(layers, context):
    """Times in which every layer costs the same beside a rest: sums of powers of two, so that nothing is rounded."""
    rows = (1, 2, 4)
    return Times(
        plain=0.25 + layers / 64,
        rounds={n: 0.5 + layers * n / 128 for n in rows if n > 1},
        draft={2: 0.125, 4: 0.125},
        verify={n: 0.25 + layers * n / 128 + context / 1024 for n in rows},
        host=dict.fromkeys(rows, 0.0625 + layers / 1024),
    )


def as_samples(times):
    phases = {n: [(times.draft.get(n, 0.0), t, times.host[n])] for n, t in times.verify.items()}
    return Samples([times.plain], {n: [t] for n, t in times.rounds.items()}, phases)


@pytest.mark.parametrize("layers", [2, 3])
def test_scaling_by_the_difference_of_two_depths_is_exact(monkeypatch, tmp_path, layers):
    asked = []

    def measure(by_depth, context, rows, repeats, into):
        asked.append(list(by_depth))
        into |= {depth: as_samples(scripted(d.target.num_layers, context)) for depth, d in by_depth.items()}

    monkeypatch.setattr(calibrate, "measure", measure)
    assert command("calibrate", "--shape", "tiny", "--layers", layers, *ROWS, "--output", tmp_path / "r.json") == 0
    result = schema.read(tmp_path / "r.json")
    assert asked == [[layers, 1], [layers, 1]]
    assert f"measured with {layers} of 4 layers, scaled" in result["marks"]
    for context in (32, 48):
        found, want = result["summary"]["curves"][str(context)], scripted(4, context)
        assert found["plain"] == want.plain
        for name in ("rounds", "draft", "verify", "host"):
            assert found[name] == {str(n): t for n, t in getattr(want, name).items()}, name


@pytest.mark.parametrize("name", ["tiny", "tiny-moe", "tiny-hybrid", "tiny-muse"])
def test_a_shallower_pair_is_the_first_layers_of_the_deeper(name):
    deep, low = shapes.depths(shapes.SHAPES[name], 2 * shapes.SHAPES[name].period)
    drafter = shapes.open_pair(name, deep, 4)
    shapes.evaluate(drafter)
    less = shapes.shallower(drafter, name, low, 4)
    assert less.target.num_layers == low and less.model is drafter.model and max(less.taps) < low
    ids = mx.array([[5, 17, 80]])
    wanted, found = (d.target.forward(ids, d.target.make_cache(), taps=tuple(range(low)))[1] for d in (drafter, less))
    assert mx.array_equal(wanted, found) and mx.isfinite(found).all()


@pytest.mark.parametrize("bits", [4, 16])
@pytest.mark.parametrize("name", ["tiny", "tiny-moe"])
def test_a_random_pair_is_measured_end_to_end(tmp_path, capsys, name, bits):
    path = tmp_path / "result.json"
    assert command("calibrate", "--shape", name, "--q-bits", bits, *ROWS, "--output", path) == 0
    result = schema.read(path)
    assert result["finished"] and result["command"] == "calibrate" and result["requests"] == []
    setup, summary = result["setup"], result["summary"]
    assert setup["contexts"] == [32, 48] and setup["layers"] == 4 and setup["measured_layers"] == [4]
    assert setup["quantization"] == ("affine 4-bit, group 64" if bits == 4 else "none")
    for context in ("32", "48"):
        curve = summary["curves"][context]
        assert list(curve["verify"]) == ["1", "2", "3", "4", "6"] and list(curve["rounds"]) == ["2", "3", "4"]
        assert curve["plain"] > 0 and curve["verify_ratio"]["1"] == 1.0
        assert all(0 < share < 1 for name in ("draft_share", "host_share") for share in curve[name].values())
        assert summary["roofline"][context]["plain_tps"] == pytest.approx(1 / curve["plain"])
        assert set(summary["predicted"][context]["recommended"]) == {f"{c:g}" for c in roofline.CHANCES}
    whole = shapes.open_pair(name, 4, bits)
    weights = memory.weight_bytes(whole.target.model) + memory.weight_bytes(whole.model)
    fills = summary["memory"]["fills"]
    assert list(fills) == ["2048", "8192", "32768"] and fills["2048"]["target"] + fills["2048"]["drafter"] == weights
    assert weights <= summary["memory"]["weights_held"] < 1.2 * weights + 2**20
    out = capsys.readouterr().out
    assert "a plain step takes" in out and "what the bandwidth allows" in out
    assert "other people's figures (published measurements" in out and "M5 Max: 614 GB/s" in out


def test_a_loaded_pair_is_measured(tmp_path):
    folders = ["--model", tiny.target_folder(), "--draft-model", tiny.draft_folder()]
    path = tmp_path / "result.json"
    assert command("calibrate", *folders, "--repeats", 1, "--context", 64, "--output", path) == 0
    result = schema.read(path)
    assert [int(n) for n in result["summary"]["curves"]["64"]["verify"]] == list(range(1, 17))
    assert [int(n) for n in result["summary"]["curves"]["64"]["rounds"]] == list(range(2, 9))  # the trained block
    assert result["setup"]["trained_block"] == 8 and not any("scaled" in mark for mark in result["marks"])


@pytest.mark.parametrize("calls", [0, 5, 20])
def test_ctrl_c_keeps_what_was_measured(monkeypatch, tmp_path, capsys, calls):
    left, real = [calls], calibrate.Loop.apart

    def apart(self, rows):
        if left[0] == 0:
            raise KeyboardInterrupt
        left[0] -= 1
        return real(self, rows)

    monkeypatch.setattr(calibrate.Loop, "apart", apart)
    path = tmp_path / "result.json"
    assert command("calibrate", "--shape", "tiny", "--layers", 2, *ROWS, "--output", path) == 130
    result = schema.read(path)
    assert not result["finished"] and "stopped before its end" in result["marks"]
    assert result["summary"]["bandwidth"]["bytes_per_second"] > 0
    rows = {context: list(curve["verify"]) for context, curve in result["summary"]["curves"].items()}
    every = ["1", "2", "3", "4", "6"]
    # five rows, two depths and two turns are 20 calls at one context
    assert rows == {0: {}, 5: {"32": ["1", "2"]}, 20: {"32": every}}[calls]
    assert "other people's figures" in capsys.readouterr().out


def test_bandwidth_is_read_from_more_than_the_caches_hold(monkeypatch):
    monkeypatch.setattr(roofline, "cache_bytes", lambda: 3 * 2**20)
    found = roofline.bandwidth(repeats=1)
    assert found["array_bytes"] >= 12 * 2**20 and found["bytes_per_second"] == max(found["ways"].values()) > 0


def test_an_unknown_shape_is_refused_with_the_known_ones(capsys):
    assert command("calibrate", "--shape", "qwen3-9b") == 2
    error = capsys.readouterr().err
    assert "qwen3-9b" in error and all(name in error for name in ("qwen3-8b", "qwen3.5-27b", "muse-30b"))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--layers", 2], "--layers goes with --shape"),
        (["--shape", "tiny", "--model", "demo"], "drop --model"),
        (["--shape", "tiny", "--layers", 1], "from 2 to 4"),
        (["--shape", "tiny", "--layers", 5], "from 2 to 4"),
        (["--shape", "tiny-hybrid", "--layers", 6], "a multiple of 4 from 8 to 12"),
        (["--shape", "tiny", "--rows", 0], "--rows 1 or more"),
        (["--shape", "tiny", "--repeats", 0], "--repeats and"),
        (["--model", tiny.target_folder()], "--draft-model"),
    ],
)
def test_what_cannot_be_measured_is_refused(capsys, words, message):
    assert command("calibrate", *words) == 2
    assert message in capsys.readouterr().err


def test_a_shape_without_room_is_refused_before_it_is_made(monkeypatch):
    monkeypatch.setattr(memory, "machine_limit", lambda: (2**30, "machine's memory"))
    with pytest.raises(RequestError, match=r"qwen3-8b with 2 layers needs .* GiB, more than 90% .* fewer --layers"):
        shapes.random_bench("qwen3-8b", 2, 4, 1024)


def test_published_figures_are_those_that_were_published():
    m4, m5 = roofline.PUBLISHED["machines"]
    assert (m4["bandwidth_gb_s"], m5["bandwidth_gb_s"]) == (546, 614)
    assert json.loads(json.dumps(roofline.PUBLISHED))["verify_ratio"][0]["rows"]["8"] == [2.2]
    assert "not measured with this package" in roofline.published_lines()[0]
