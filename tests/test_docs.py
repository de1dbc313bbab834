"""The documentation says what the package does."""

import re
from pathlib import Path

import api_pages
import pytest

import mlx_dflash
from mlx_dflash import cli

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def test_the_api_page_is_the_docstrings():
    assert api_pages.PAGE.read_text() == api_pages.page(), "run python -m tests.api_pages"
    assert set(mlx_dflash.__all__) - {"__version__"} <= set(api_pages.MODULES["mlx_dflash"])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_flags_modules_and_links_of_a_page_exist(page):
    text = page.read_text()
    for target in re.findall(r"\]\((?!http)([^)#]+)", text):
        assert (page.parent / target).exists(), target
    for module in set(re.findall(r"python -m (mlx_dflash[\w.]*)", text)):
        place = ROOT / module.replace(".", "/")
        top = ROOT / module.removeprefix("mlx_dflash.").replace(".", "/")  # convert/ and benchmarks/
        candidates = [place.with_suffix(".py"), place / "__main__.py", top.with_suffix(".py"), top / "__main__.py"]
        assert any(c.exists() for c in candidates), module
    known = cli.build_parser().format_help()
    for flag in set(re.findall(r"mlx_dflash\.generate[^\n`]*?(--[a-z-]+)", text)):
        assert flag in known, flag
