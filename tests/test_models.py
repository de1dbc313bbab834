"""The list of published pairs: sizes, what fits, and the one that is named for this machine."""

import argparse
import json
import re

import pytest

from mlx_dflash import choice, memory, models, registry
from mlx_dflash.download import size_text

GIB = 2**30


@pytest.fixture
def machine(monkeypatch, offline, tmp_path):
    """Call it with GiB: a Mac with that working set, whose activations take 2 bytes, and an empty cache."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(memory.mx, "default_device", lambda: memory.mx.Device(memory.mx.gpu))

    def of(gib):
        monkeypatch.setattr(memory, "machine_limit", lambda: (gib * GIB, "recommended working set"))

    return of


def listed(capsys, *flags):
    models.main(flags)
    return capsys.readouterr().out


def test_the_table_has_every_pair_with_sizes_that_are_right(machine, capsys):
    machine(27)
    rows = {r["model"]: r for r in json.loads(listed(capsys, "--json"))["pairs"]}
    assert len(rows) == len(registry.pairs())
    found = rows["mlx-community/Qwen3-4B-4bit"]
    # By hand. Keys and values: 36 layers, 8 heads of 128, and 5 such layers of the drafter, 2 bytes each.
    assert found["download"] / 1e9 == pytest.approx(4.02 * 4.5 / 8 + 2 * 0.54, rel=0.02)
    cache = 2 * 8 * 128 * 2 * (36 + 5)
    assert found["memory_128k"] - found["memory_8k"] == pytest.approx(cache * (131072 - 8192), rel=0.01)
    weights, work = found["download"], found["memory_8k"] - found["download"] - cache * 8192
    assert weights + cache * 8192 < found["memory_8k"] and work < GIB
    for row in rows.values():
        assert row["download"] < row["memory_8k"] < row["memory_128k"] and row["cached"] is False


def test_a_long_context_costs_what_the_layers_that_see_all_of_it_keep(machine, capsys):
    """Sliding and recurrent layers keep the same at 8k as at 128k."""
    machine(27)
    rows = {r["target"]: r for r in json.loads(listed(capsys, "--json"))["pairs"]}
    for pair in registry.pairs():
        grows = sum(n * 2 * heads * dim * 2 for n, heads, dim, window in pair.kv if window is None)
        draft = max(2 * 2 * d["num_hidden_layers"] * d["num_key_value_heads"] * d["head_dim"] for d in pair.layouts)
        found = rows[pair.target]["memory_128k"] - rows[pair.target]["memory_8k"]
        assert found == pytest.approx((grows + draft) * (131072 - 8192), rel=0.01), pair.target


# Metal recommends about 3/4 of a Mac's memory.
@pytest.mark.parametrize(
    "mac, best",
    [
        (8, "mlx-community/Qwen3.5-4B-4bit"),
        (16, "mlx-community/Qwen3.5-9B-4bit"),
        (24, "mlx-community/gemma-4-26b-a4b-it-4bit"),
        (64, "mlx-community/Qwen3.6-35B-A3B-4bit"),  # of two that take the same, the later release
        (128, "mlx-community/gpt-oss-120b-MXFP4-Q8"),
    ],
)
def test_the_best_pair_for_a_mac(machine, capsys, mac, best):
    machine(mac * 0.75)
    assert json.loads(listed(capsys, "--json"))["best"] == best
    assert f"Best for this machine: {best}." in listed(capsys)
    named = memory.best_pair(registry.pairs())
    line = choice.recommendation()
    assert f"the best real pair for this machine: {best} ({size_text(memory.download_bytes(named))};" in line


def test_a_machine_too_small_for_all_is_told_so(machine, capsys):
    machine(1)
    assert "Best for this machine: none of these." in listed(capsys)
    assert "no published pair fits this machine" in choice.recommendation()


def test_fit_is_told_for_both_contexts(machine, capsys):
    machine(7)
    table = listed(capsys)
    lines = {line.split()[0]: line for line in table.splitlines() if line.startswith("mlx-community/")}
    assert len(lines) == len(registry.pairs())
    for line in lines.values():
        short, long = (float(n) for n in re.findall(r"([\d.]+) GiB", line))
        fits = line.split()[-2]
        assert fits == ("128k" if long <= 6.3 else "8k" if short <= 6.3 else "no"), line
        assert line.split()[-1] == "no"
    assert {line.split()[-2] for line in lines.values()} >= {"8k", "no"}
    assert "recommended working set 7.00 GiB" in table


def test_the_demos_summary_names_the_best_real_pair(machine, monkeypatch):
    machine(48)
    monkeypatch.setattr(choice, "load_drafter", lambda name, model: name)
    args = argparse.Namespace(model=None, draft_model=None, plain=False)
    drafter, line = choice.choose_drafter(args, None)
    assert drafter == "demo" and line.startswith("demo (SmolLM2-135M-Instruct) + drafter demo; the best real pair")
    assert memory.best_pair(registry.pairs()).example in line
