"""docs/support.md says what the tests' own pairs are."""

import mlx.core as mx
import numpy as np
import pytest
import support
from mlx_lm.utils import _get_classes
from stubs import StubDrafter, truth

from mlx_dflash import UnsupportedError, generate, load, load_drafter
from mlx_dflash.cache import FullKV, QuantizedKV
from mlx_dflash.targets import FAMILIES


def test_the_page_is_not_stale():
    assert support.PAGE.read_text() == support.page(), "run `python -m tests.support`"


def test_every_target_class_has_a_pair():
    page = support.PAGE.read_text()
    missing = [family.__name__ for family in FAMILIES if not any(f"`{t}`" in page for t in family.model_types)]
    assert not missing, f"no golden pair proves {missing}"


def with_wide_heads(family):
    """The golden target, or where its heads are too narrow to be quantized, random weights with heads of 32."""
    target, tokenizer = load(support.GOLDEN / family / "target")
    if target.full_head_dim % 32 == 0 or target.kv_bits_refusal:
        return target, tokenizer
    config = {**target.config, "head_dim": 32}
    model_class, args_class = (target.model_classes or _get_classes)(config)
    mx.random.seed(0)
    wide = type(target)(model_class(args_class.from_dict(config)), config)
    mx.eval(wide.model.parameters())
    return wide, tokenizer


@pytest.mark.parametrize("family", sorted(folder.name for folder in support.GOLDEN.iterdir()))
def test_quantized_keys_and_values_leave_the_tokens_or_are_refused(family):
    target, tokenizer = with_wide_heads(family)
    drafter = load_drafter(support.GOLDEN / family / "draft", target)
    golden = np.load(support.GOLDEN / family / "golden.npz")
    prompt, options = golden["p17_ids"].tolist(), {"max_tokens": 24, "stop": []}
    if target.kv_bits_refusal:
        with pytest.raises(UnsupportedError, match=f"kv_bits .*{target.config['model_type']}"):
            generate(target, tokenizer, prompt, kv_bits=4, **options)
        return
    full = sum(isinstance(layer, FullKV) for layer in target.make_cache().layers)
    assert sum(isinstance(layer, QuantizedKV) for layer in target.make_cache(4).layers) == full > 0
    for bits in (4, 8):
        plain = generate(target, tokenizer, prompt, kv_bits=bits, **options).tokens
        for draft_model in (drafter, StubDrafter(target, truth(prompt, plain, right=2))):
            run = generate(target, tokenizer, prompt, draft_model=draft_model, block_size=5, kv_bits=bits, **options)
            assert run.tokens == plain and run.stats.rounds > 0
        assert run.stats.accepted > 0
