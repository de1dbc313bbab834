"""The doctor on a healthy and on broken installations, and what `cache list` and `clear` touch."""

import json

import huggingface_hub.constants as constants
import pytest

from mlx_dflash import doctor, memory
from mlx_dflash.cache import __main__ as cache_command
from mlx_dflash.hub import DEMO_FOLDER


@pytest.fixture(autouse=True)
def places(monkeypatch, tmp_path):
    monkeypatch.setenv("MLX_DFLASH_CACHE", str(tmp_path / "own"))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    return tmp_path


def found(subject):
    return next(f for f in doctor.examine() if f.subject == subject)


def test_a_healthy_installation_passes_and_names_versions_and_device(capsys):
    with pytest.raises(SystemExit) as stop:
        doctor.main([])
    out = capsys.readouterr().out
    assert stop.value.code == 0 and "WRONG" not in out
    for word in ("python", "mlx-lm", "device", "memory", "own cache", "hub cache", "hub login"):
        assert word in out
    with pytest.raises(SystemExit):
        doctor.main(["--json"])
    assert {f["status"] for f in json.loads(capsys.readouterr().out)} <= {"ok", "note"}


def broken(monkeypatch, tmp_path, what):
    if what == "mlx-lm":
        monkeypatch.setattr(doctor, "version", lambda name: "0.33.1" if name == "mlx-lm" else "2.0.0")
    elif what == "device":
        monkeypatch.setattr(doctor.mx, "ones", lambda shape: doctor.mx.zeros(shape))
    elif what == "own cache":
        (tmp_path / "own" / DEMO_FOLDER).mkdir(parents=True)
    elif what == "hub cache":
        snapshot = tmp_path / "hub" / "models--a--b" / "snapshots" / "0"
        snapshot.mkdir(parents=True)
        (snapshot / "model.safetensors").symlink_to("../../blobs/gone")


@pytest.mark.parametrize(
    "what, said, remedy",
    [
        ("mlx-lm", "0.33.1, needs >=0.32.0,<0.33", "pip install 'mlx-lm>=0.32.0,<0.33'"),
        ("device", "multiplies wrongly", "reinstall mlx"),
        ("own cache", "is incomplete", "mlx_dflash.cache clear"),
        ("hub cache", "a link to a missing file", "run again"),
    ],
)
def test_what_is_broken_is_named_with_the_remedy(monkeypatch, places, capsys, what, said, remedy):
    assert found(what).status == "ok"
    broken(monkeypatch, places, what)
    with pytest.raises(SystemExit) as stop:
        doctor.main([])
    assert stop.value.code == 1
    finding = found(what)
    assert finding.status == "WRONG" and remedy in finding.remedy
    assert said in finding.found
    assert f"WRONG  {what}" in capsys.readouterr().out


def test_a_package_that_is_missing_is_named(monkeypatch):
    def gone(name):
        raise doctor.PackageNotFoundError(name)

    monkeypatch.setattr(doctor, "version", gone)
    finding = doctor.package("mlx-lm")
    assert finding.status == "WRONG" and finding.found == "not installed"
    assert finding.remedy == "python -m pip install 'mlx-lm>=0.32.0,<0.33'"
    assert "pip install 'mlx" in doctor.package("mlx").remedy


def test_too_little_memory_is_noted(monkeypatch):
    monkeypatch.setattr(memory, "machine_limit", lambda: (2**30, "machine's memory"))
    assert found("memory").remedy == "no published pair fits; the demo does"


def test_the_cache_command_lists_and_clears_our_own_files_only(places, capsys):
    blobs = places / "hub" / "models--a--b" / "blobs"
    blobs.mkdir(parents=True)
    (blobs / "whole").write_bytes(b"x" * 10)
    (blobs / "cut.mlx_dflash.part").write_bytes(b"x" * 2000)
    (places / "own" / DEMO_FOLDER).mkdir(parents=True)
    (places / "own" / DEMO_FOLDER / "model.safetensors").write_bytes(b"x" * 5000)
    cache_command.main(["list"])
    out = capsys.readouterr().out
    assert f"5 kB  {places / 'own' / DEMO_FOLDER}" in out and "2 kB" in out and "whole" not in out
    cache_command.main(["clear"])
    assert "removed 7 kB" in capsys.readouterr().out
    assert list((places / "own").iterdir()) == [] and [p.name for p in blobs.iterdir()] == ["whole"]
    cache_command.main(["list"])
    assert capsys.readouterr().out == ""
