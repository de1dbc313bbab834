"""docs/support.md says what the tests' own pairs are."""

import support


def test_the_page_is_not_stale():
    assert support.PAGE.read_text() == support.page(), "run `python -m tests.support`"


def test_every_target_class_has_a_pair():
    from mlx_dflash.targets import FAMILIES

    page = support.PAGE.read_text()
    missing = [family.__name__ for family in FAMILIES if not any(f"`{t}`" in page for t in family.model_types)]
    assert not missing, f"no golden pair proves {missing}"
