"""The selftest passes on a whole installation and fails when anything it stands for is off by one."""

import json
import zipfile

import mlx.core as mx
import numpy as np
import pack_selftest
import pytest

from mlx_dflash.drafters import DFlashDrafter
from mlx_dflash.selftest import __main__ as command
from mlx_dflash.selftest import pairs
from mlx_dflash.selftest.curve import measure_all
from mlx_dflash.selftest.quantized import check_quantized
from mlx_dflash.targets import FAMILIES, load_target


def test_every_pair_passes_and_speculation_ran(tmp_path):
    with pytest.raises(SystemExit) as stop:
        command.main(["--quick", "--out", str(tmp_path / "report.json")])
    report = json.loads((tmp_path / "report.json").read_text())
    assert stop.value.code == 0 and report["passed"] is True
    assert len(report["pairs"]) == len(pack_selftest.FAMILIES)
    for pair in report["pairs"]:
        assert pair["problems"] == [] and pair["rounds"] >= 8 and pair["accepted"] >= 20, pair["family"]
        assert 0 < pair["tap_error"] < pairs.TOLERANCE and [p["rows"] for p in pair["partings"]] == list(pairs.WIDTHS)
        if report["machine"]["rows_independent"]:
            assert all(p["tokens_equal"] for p in pair["partings"])
    kinds = {kind for pair in report["pairs"] for kind in pair["caches"]}
    assert kinds == {"FullKV", "SlidingKV", "RecurrentState"}
    assert report["quantized_kv"] == {"4": [], "8": []}


def test_the_shipped_pairs_are_those_of_the_goldens_and_cover_every_family():
    classes = set()
    assert pairs.families() == sorted(pack_selftest.FAMILIES)
    for family in pack_selftest.FAMILIES:
        with zipfile.ZipFile(pack_selftest.PACKED / f"{family}.zip") as archive:
            shipped = {name: archive.read(name) for name in archive.namelist()}
        ours = pack_selftest.files(family)
        assert shipped.keys() == ours.keys()
        for name in shipped:
            assert name == "golden.npz" or shipped[name] == ours[name], f"{family}/{name}: run tests.pack_selftest"
        with pairs.unpacked(family) as (folder, golden):
            classes.add(type(load_target(folder / "target")[0]))
            full = np.load(pack_selftest.GOLDEN / family / "golden.npz")
            longest = max(full["contexts"].tolist())
            for key in pack_selftest.KINDS:
                assert np.array_equal(golden[key], full[f"p{longest}_{key}"])
    assert classes == set(FAMILIES)


def edited(monkeypatch, family, **changes):
    """The shipped pair with other golden arrays."""
    real = pairs.unpacked

    class Edited:
        def __init__(self, name):
            self.inner = real(name)

        def __enter__(self):
            folder, golden = self.inner.__enter__()
            return folder, golden | {key: change(golden[key]) for key, change in changes.items()}

        def __exit__(self, *error):
            return self.inner.__exit__(*error)

    monkeypatch.setattr(pairs, "unpacked", Edited)


def one_more(index):
    def change(array):
        array = array.copy()
        array[index] += 1
        return array

    return change


@pytest.mark.parametrize(
    "key, index, said",
    [
        ("tokens", 20, "tokens part from the reference at 20"),
        ("accept", 1, "accepted lengths"),
        ("taps", (59, 100), "taps are off"),
        ("logits", 7, "logits are off"),
    ],
)
def test_a_golden_off_by_one_fails(monkeypatch, capsys, key, index, said):
    edited(monkeypatch, "qwen3_moe", **{key: one_more(index)})
    report = command.run(["qwen3_moe"], curve=False)
    assert report["passed"] is False
    assert any(said in problem for problem in report["pairs"][0]["problems"])
    assert "FAILED qwen3_moe" in capsys.readouterr().out


def test_a_tap_one_layer_off_fails(monkeypatch):
    monkeypatch.setattr(
        DFlashDrafter, "taps", property(lambda self: tuple(t - 1 for t in self.config.target_layer_ids))
    )
    result = pairs.check_family("llama")
    assert any("taps are off" in problem for problem in result.problems)
    assert any("accepted lengths" in problem for problem in result.problems)


@pytest.mark.parametrize("kernel", ["scaled_dot_product_attention", "rms_norm", "rope"])
def test_a_kernel_with_a_wrong_result_fails(monkeypatch, kernel):
    real = getattr(mx.fast, kernel)
    monkeypatch.setattr(mx.fast, kernel, lambda *a, **k: real(*a, **k) + 1)
    assert any("taps are off" in problem for problem in pairs.check_family("llama").problems)


def test_a_gated_delta_kernel_with_a_wrong_state_fails(monkeypatch):
    from mlx_dflash.cache import recurrent

    real = recurrent.gated_delta_update
    monkeypatch.setattr(recurrent, "gated_delta_update", lambda *a: (real(*a)[0], real(*a)[1] * 1.1))
    assert pairs.check_family("qwen3_next").problems


def test_a_quantized_matmul_with_a_wrong_result_fails(monkeypatch):
    assert check_quantized(8) == []
    real = mx.quantized_matmul
    monkeypatch.setattr(mx, "quantized_matmul", lambda *a, **k: real(*a, **k) * 1.05)
    assert check_quantized(8)


def test_a_pair_that_does_not_run_fails_and_the_others_go_on(monkeypatch):
    def broken(*_, **__):
        raise RuntimeError("no such kernel\non this device")

    monkeypatch.setattr(mx.fast, "rope", broken)
    report = command.run(["llama"], curve=False)
    assert report["passed"] is False
    assert report["pairs"][0]["problems"] == ["does not run: no such kernel on this device"]


def test_the_curve_has_every_width_at_every_precision():
    curve = measure_all(budget=0.0)
    for precision in ("4-bit", "8-bit", "bf16"):
        assert list(curve[precision]["milliseconds"]) == list(range(1, 17))
        assert curve[precision]["ratio"][1] == 1.0 and all(t > 0 for t in curve[precision]["milliseconds"].values())
    assert len(command.curve_lines(curve)) == 5


def test_an_unknown_pair_and_an_unwritable_report_are_refused(tmp_path, capsys):
    with pytest.raises(SystemExit) as stop:
        command.main(["--only", "nothing"])
    assert stop.value.code == 2 and "no pair nothing" in capsys.readouterr().err
    with pytest.raises(SystemExit) as stop:
        command.main(["--quick", "--only", "llama", "--out", str(tmp_path / "no" / "report.json")])
    assert stop.value.code == 2 and "--out" in capsys.readouterr().err
