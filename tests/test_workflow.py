"""The GitHub workflow names what exists: it can't be run here, so it is read."""

import re
import shlex
from itertools import pairwise
from pathlib import Path

import pytest
import yaml

from mlx_dflash.selftest import __main__ as selftest

ROOT = Path(__file__).parent.parent
WORKFLOW = ROOT / ".github" / "workflows" / "ci.yml"
RUNNERS = {"macos": {"macos-14", "macos-15", "macos-26", "macos-latest"}, "linux": {"ubuntu-22.04", "ubuntu-24.04"}}
INPUTS = {  # of each action, in the major release that is used
    "actions/checkout@v4": {"fetch-depth"},
    "actions/setup-python@v5": {"python-version", "cache"},
    "actions/upload-artifact@v4": {"name", "path"},
}


@pytest.fixture(scope="module")
def workflow():
    return yaml.safe_load(WORKFLOW.read_text())


def commands(job):
    """The words of every command of a job, without grouping."""
    lines = "\n".join(step["run"] for step in job["steps"] if "run" in step).splitlines()
    return [shlex.split(line.strip().strip("()").replace("&&", ";"), comments=True) for line in lines]


def test_both_platforms_run_the_tests_and_the_selftest(workflow):
    assert set(workflow[True]) == {"push", "pull_request", "workflow_dispatch"}  # YAML 1.1 reads `on` as true
    assert set(workflow["jobs"]) == set(RUNNERS)
    for name, job in workflow["jobs"].items():
        assert job["runs-on"] in RUNNERS[name]
        assert 30 <= job["timeout-minutes"] <= 120
        text = " ".join(step.get("run", "") for step in job["steps"])
        assert "mlx_dflash.selftest" in text and "mlx_dflash.doctor" in text
        assert "pytest" in text or ".ci/run" in text


def test_steps_use_known_actions_and_the_python_that_the_package_needs(workflow):
    needed = re.search(r'requires-python = ">=([\d.]+)"', (ROOT / "pyproject.toml").read_text())[1]
    for job in workflow["jobs"].values():
        for step in job["steps"]:
            assert ("uses" in step) != ("run" in step)
            if "uses" in step:
                assert set(step.get("with", {})) <= INPUTS[step["uses"]]
            if "python-version" in step.get("with", {}):
                assert step["with"]["python-version"] == needed


def test_what_the_steps_run_exists(workflow):
    for job in workflow["jobs"].values():
        for words in commands(job):
            for module in (b for a, b in pairwise(words) if a == "-m" and "mlx_dflash" in b):
                place = ROOT / module.replace(".", "/")
                assert place.with_suffix(".py").exists() or (place / "__main__.py").exists(), module
            for script in (w.lstrip("$(") for w in words if re.search(r"\.ci/|\.sh\b", w)):
                assert (ROOT / re.split(r"[\s)]", script)[0]).stat().st_mode & 0o100, script


def test_the_package_is_installed_so_that_the_checkout_can_run_it(workflow):
    """The checkout's mlx_dflash/ lacks convert and benchmarks, and hides an installed copy: it needs -e."""
    extras = re.findall(r"^(\w+) = \[", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    for job in workflow["jobs"].values():
        installs = [words[words.index("install") :] for words in commands(job) if "install" in words]
        assert installs
        for install in installs:
            assert install[1] == "-e"
            assert set(re.findall(r"\w+", install[2].removeprefix("."))) <= set(extras)


def test_uploaded_reports_are_those_that_the_selftest_writes(workflow, monkeypatch):
    monkeypatch.setattr(selftest, "run", lambda only, curve: {"passed": True, "seconds": 0.0})
    monkeypatch.setattr(Path, "write_text", lambda self, text: written.append(str(self)))
    for job in workflow["jobs"].values():
        written: list[str] = []
        for words in commands(job):
            if "mlx_dflash.selftest" in words:
                with pytest.raises(SystemExit) as stop:
                    selftest.main(words[words.index("mlx_dflash.selftest") + 1 :])
                assert stop.value.code == 0
        uploads = [s["with"]["path"] for s in job["steps"] if s.get("uses", "").startswith("actions/upload-artifact")]
        assert len(uploads) == 1 and written
        assert all(Path(name).match(uploads[0]) for name in written)
