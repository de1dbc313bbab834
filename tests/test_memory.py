"""Memory told before loading: formulas, measured peaks, the machine's limit, the wired limit."""

import logging
from pathlib import Path

import mlx.core as mx
import pytest
import tiny

from mlx_dflash import api, cli, generate, load, load_drafter, loading, memory, registry
from mlx_dflash.drafters import open_drafter
from mlx_dflash.targets import open_target
from mlx_dflash.targets.muse_glimmer import MuseGlimmer

GIB = 2**30


def muse(**changes):
    """Muse Glimmer 30B as built, none of whose weights is ever computed."""
    config = {
        "model_type": "muse_glimmer",
        "hidden_size": 6656,
        "intermediate_size": 19968,
        "num_hidden_layers": 52,
        "num_attention_heads": 32,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "vocab_size": 1000,
        "rope_theta": 500000.0,
        "sliding_window": 2048,
        "rms_norm_eps": 1e-5,
    }
    config = MuseGlimmer.prepare({**config, **changes})
    text_model, arguments = MuseGlimmer.model_classes(config)
    model = text_model(arguments.from_dict(config))
    model.set_dtype(mx.bfloat16)
    return MuseGlimmer(model, config)


def kv(target, context):
    return sum(layer.held(context) for layer in memory.layer_memory(memory.one_token(target)))


def test_muse_glimmers_keys_and_values():
    before = mx.get_active_memory()
    assert kv(muse(), 131072) / GIB == pytest.approx(1.70, abs=0.005)
    full = muse(num_key_value_heads=32, layer_types=["full_attention"] * 52, layer_rope_theta=[500000.0] * 52)
    assert kv(full, 131072) / GIB == pytest.approx(104, abs=0.005)
    assert mx.get_active_memory() - before < 2**20  # nothing was computed


def test_the_registrys_figures_give_the_same():
    pair = registry.pair_of("meta-models/Muse-Glimmer-30B")
    layers = [memory.LayerMemory(4 * heads * dim, window) for n, heads, dim, window in pair.kv for _ in range(n)]
    assert sum(layer.held(131072) for layer in layers) == kv(muse(), 131072)


def measured(target, tokenizer, drafter, prompt, **options):
    """The peak of a generation, in bytes, over what other tests hold."""
    others = mx.get_active_memory() - memory.weight_bytes(target.model) - memory.weight_bytes(drafter.model)
    mx.clear_cache()
    mx.reset_peak_memory()
    result = generate(target, tokenizer, prompt, draft_model=drafter, max_tokens=4, **options)
    assert result.stats.rounds > 0
    return mx.get_peak_memory() - others


@pytest.mark.skipif(mx.default_device() != mx.Device(mx.cpu), reason="the tiny pair's peak is Metal's buffers")
@pytest.mark.parametrize(
    "family, tokens",
    [
        ("qwen3", 200),
        ("qwen3", 2600),  # in two chunks
        ("qwen3_moe", 1000),
        ("qwen3_next", 200),
        ("qwen3_5", 200),  # the peak is in the gated-delta rule,
        ("qwen3_5", 700),  # and here in attention
        ("qwen3_5_moe", 200),
        ("gemma4", 1000),
        ("gemma4_e", 200),
        ("muse_glimmer", 200),
        ("gpt_oss_notrunc", 1000),
        ("laguna", 1000),
    ],
)
def test_a_tiny_pairs_peak_is_as_told(family, tokens):
    """Every family and so every kind of cache."""
    as_told(family, tokens)


@pytest.mark.skipif(mx.default_device() != mx.Device(mx.cpu), reason="the tiny pair's peak is Metal's buffers")
def test_a_tiny_pairs_peak_is_as_told_with_quantized_keys_and_values():
    as_told("qwen3_5", 400, kv_bits=8)


def as_told(family, tokens, **options):
    opened = open_target(tiny.target_folder(family))
    told = memory.estimate(opened, open_drafter(tiny.draft_folder(family), opened), tokens + 4, **options)
    target, tokenizer = load(tiny.target_folder(family))
    drafter = load_drafter(tiny.draft_folder(family), target)
    prompt = [(7 * i * i + 3 * i) % 280 + 3 for i in range(tokens)]
    assert told.peak == pytest.approx(measured(target, tokenizer, drafter, prompt, **options), rel=0.1)


def test_the_limit_is_held_against_the_peak_before_a_weight_is_read(monkeypatch, caplog):
    monkeypatch.setattr(memory, "machine_limit", lambda: (1_000_000, "recommended working set"))

    def not_yet(*_):
        raise AssertionError("a weight was read")

    monkeypatch.setattr(loading, "evaluate", not_yet)
    with caplog.at_level(logging.WARNING, "mlx_dflash"), pytest.raises(AssertionError):
        load(tiny.target_folder())
    line = caplog.records[0].getMessage()
    assert "more than 90% of the recommended working set of 0.00 GiB" in line and "quantized model" in line


def test_a_pair_that_fits_says_nothing(caplog):
    with caplog.at_level(logging.WARNING, "mlx_dflash"):
        target, _ = load(tiny.target_folder())
        load_drafter(tiny.draft_folder(), target)
    assert caplog.records == []


@pytest.mark.parametrize("limit, fits", [(10_000_000, False), (12_000_000, True)])
def test_ninety_percent_of_the_limit_is_the_border(limit, fits):
    found = memory.Estimate(8192, 5_000_000, 1_000_000, 2_000_000, 1_000_000, 500_000, limit, "limit")
    assert found.peak == 9_500_000 and found.fits is fits


def test_the_memory_flag_prints_and_loads_nothing(capsys, monkeypatch):
    monkeypatch.setattr(cli, "load", None)
    with pytest.raises(SystemExit) as stop:
        cli.main(["--model", str(tiny.target_folder()), "--draft-model", str(tiny.draft_folder()), "--memory"])
    out = capsys.readouterr().out
    assert stop.value.code == 0
    assert [line.split("  ")[0] for line in out.splitlines()[:2]] == ["target weights", "drafter weights"]
    assert "target cache at 8192 tokens" in out and out.splitlines()[-1] == "fits"


def test_the_memory_flag_knows_pairs_that_are_not_downloaded(capsys, offline, monkeypatch, tmp_path):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(memory, "machine_limit", lambda: (8 * GIB, "recommended working set"))
    with pytest.raises(SystemExit) as stop:
        cli.main(["--model", "mlx-community/Qwen3.6-27B-4bit", "--memory"])
    out = capsys.readouterr().out
    assert stop.value.code == 0 and "not downloaded" in out and "does not fit" in out


def test_the_best_pair_is_the_largest_that_fits(monkeypatch):
    def best(limit):
        monkeypatch.setattr(memory, "machine_limit", lambda: (limit * GIB, "limit"))
        return memory.best_pair(registry.pairs())

    assert best(1) is None
    sizes = [best(limit).parameters for limit in (40, 60, 200, 1000)]
    assert sizes == sorted(sizes) and sizes[-1] == max(p.parameters for p in registry.pairs())


def test_the_wired_limit_is_held_while_generating_and_restored(monkeypatch):
    """Metal's own calls stand in here: a CPU has no wired memory."""
    calls = []
    monkeypatch.setattr(api, "maybe_set_recommended_wired_limit", lambda: calls.append("held") or 123)
    monkeypatch.setattr(mx, "set_wired_limit", lambda value: calls.append(value))
    target, tokenizer = load(tiny.target_folder())
    drafter = load_drafter(tiny.draft_folder(), target)
    stream = api.stream_generate(target, tokenizer, [5, 9, 200], draft_model=drafter, max_tokens=20)
    next(stream)
    assert calls == ["held"]
    stream.close()
    assert calls == ["held", 123]
    assert Path(str(target.folder)) == tiny.target_folder()
