"""Every script of examples/ runs on a tiny pair, as a user runs it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import tiny

EXAMPLES = sorted((Path(__file__).parent.parent / "examples").glob("*.py"))
SAID = {"compare": "rounds for 24 tokens", "memory": "target cache at 131072 tokens", "stream": "mode dflash"}


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_runs(example):
    command = [sys.executable, str(example), str(tiny.target_folder()), str(tiny.draft_folder())]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr
    assert SAID[example.stem] in done.stdout
