"""Penalties, bias and a user's processors: mlx-lm's results at every row, drafts included."""

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.sample_utils import make_logits_processors

from mlx_dflash import RequestError
from mlx_dflash.processors import Processors

VOCAB = 12
penalties_ = st.one_of(st.none(), st.sampled_from([0.0, 1.0, 1.3, 0.7]))
settings_ = st.fixed_dictionaries(
    {
        "repetition_penalty": penalties_,
        "repetition_context_size": st.integers(1, 9),
        "presence_penalty": st.one_of(penalties_, st.just(-0.5)),
        "presence_context_size": st.integers(1, 9),
        "frequency_penalty": st.one_of(penalties_, st.just(-0.5)),
        "frequency_context_size": st.integers(1, 9),
        "logit_bias": st.one_of(st.none(), st.dictionaries(st.integers(0, VOCAB - 1), st.floats(-5, 5), max_size=3)),
    }
)


@given(options=settings_, text=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=14), rows=st.integers(1, 8))
@settings(max_examples=150, deadline=None)
def test_every_row_is_what_mlx_lm_makes_of_the_text_up_to_it(options, text, rows):
    rows = min(rows, len(text))
    before = len(text) - rows
    logits = mx.random.normal((rows, VOCAB), key=mx.random.key(len(text)))
    ours = Processors(**options).apply(logits, mx.array(text[before:], mx.uint32), [*text[:before], 3, 4], before)
    for i in range(rows):
        row = mx.array(logits[i : i + 1])
        for processor in make_logits_processors(**options):
            row = processor(mx.array(text[: before + i + 1]), row)
        assert np.array_equal(np.array(ours[i]), np.array(row[0]))


def test_own_processors_see_the_whole_text_and_may_write_into_their_row():
    seen = []

    def record(tokens, logits):
        seen.append(tokens.tolist())
        logits[:, tokens[-1].item()] = -9.0
        return logits

    logits = mx.zeros((3, VOCAB))
    out = Processors(own=[record, lambda tokens, row: row + 1]).apply(logits, mx.array([5, 6, 7]), [1, 2, 9], 2)
    assert seen == [[1, 2, 5], [1, 2, 5, 6], [1, 2, 5, 6, 7]]
    assert mx.all(logits == 0).item()
    for i, token in enumerate((5, 6, 7)):
        assert out[i, token].item() == -8.0 and out[i].sum().item() == -8.0 + VOCAB - 1


@pytest.mark.parametrize("result", [None, mx.zeros((VOCAB,)), mx.zeros((1, VOCAB + 1)), 1.0])
def test_what_an_own_processor_returns_is_checked(result):
    processors = Processors(own=[lambda tokens, row: row, lambda tokens, row: result])
    with pytest.raises(RequestError, match=r"logits_processors\[1\] returned"):
        processors.apply(mx.zeros((1, VOCAB)), mx.array([1]), [], 0)


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"repetition_penalty": -1.0}, "repetition_penalty"),
        ({"repetition_penalty": "2"}, "repetition_penalty"),
        ({"presence_penalty": float("nan")}, "presence_penalty"),
        ({"frequency_penalty": float("inf")}, "frequency_penalty"),
        ({"repetition_context_size": 0}, "repetition_context_size"),
        ({"presence_context_size": 2.5}, "presence_context_size"),
        ({"logit_bias": [1]}, "logit_bias"),
        ({"logit_bias": {"1": 2.0}}, "logit_bias"),
        ({"logit_bias": {-1: 2.0}}, "logit_bias"),
        ({"logit_bias": {1: float("nan")}}, "logit_bias"),
        ({"logit_bias": {1: float("inf")}}, "logit_bias"),
        ({"own": [3]}, r"logits_processors\[0\]"),
    ],
)
def test_bad_settings_are_refused(options, name):
    with pytest.raises(RequestError, match=name):
        Processors(**options)


def test_a_bias_must_name_the_models_tokens_and_leave_one():
    with pytest.raises(RequestError, match="token 12"):
        Processors(logit_bias={12: 1.0}).check_vocabulary(VOCAB)
    with pytest.raises(RequestError, match="forbids every token"):
        Processors(logit_bias=dict.fromkeys(range(VOCAB), -float("inf"))).check_vocabulary(VOCAB)
    Processors(logit_bias={11: -float("inf")}).check_vocabulary(VOCAB)
