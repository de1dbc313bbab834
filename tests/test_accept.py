"""Acceptance and sampling: the target's draw rules, and noise belongs to a position, not to a round."""

from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_dflash import RequestError, generate, load, load_drafter
from mlx_dflash.accept import Sampler, Sampling, count_accepted, greedy, gumbel

GOLDEN = Path(__file__).parent / "golden"


@pytest.fixture(scope="module")
def pair():
    target, tokenizer = load(GOLDEN / "llama" / "target")
    return target, tokenizer, load_drafter(GOLDEN / "llama" / "draft", target)


@given(st.lists(st.integers(0, 3), min_size=1, max_size=9), st.lists(st.integers(0, 3), min_size=10, max_size=10))
@settings(max_examples=60, deadline=None)
def test_the_accepted_count_is_the_common_prefix(drafts, draws):
    expected = next((i for i, d in enumerate(drafts) if d != draws[i]), len(drafts))
    assert count_accepted(mx.array(drafts), mx.array(draws[: len(drafts) + 1])).item() == expected


def test_greedy_takes_the_lowest_of_equal_ids():
    assert greedy(mx.array([[1.0, 3.0, 3.0], [2.0, 2.0, 0.0]])).tolist() == [1, 0]


def test_noise_depends_on_seed_and_position_alone():
    block = gumbel(7, 100, (8, 50))
    for i in range(8):
        assert mx.array_equal(block[i], gumbel(7, 100 + i, (1, 50))[0])
    assert not mx.array_equal(block[0], block[1])
    assert not mx.array_equal(block[0], gumbel(8, 100, (1, 50))[0])


def test_the_global_random_state_is_not_touched():
    mx.random.seed(5)
    before = [mx.array(s) for s in mx.random.state]
    logits = mx.random.normal((4, 30), key=mx.random.key(0))
    Sampler(Sampling(temp=0.8, top_p=0.9, seed=1)).draw(logits, mx.zeros(4, mx.uint32), [], 2).tokens.tolist()
    assert all(mx.array_equal(a, b) for a, b in zip(before, mx.random.state, strict=True))


def test_draws_follow_the_distribution():
    """Chi-square with 7 degrees of freedom; 24.3 is exceeded once in a thousand by a right sampler."""
    logits = mx.array([0.3, -1.0, 2.0, 0.0, 1.0, -0.5, 0.7, -2.0])
    probs = np.array(mx.softmax(logits / 0.7))
    n = 4000
    sampler = Sampler(Sampling(temp=0.7, seed=11))
    draws = sampler.draw(mx.broadcast_to(logits, (n, 8)), mx.zeros(n, mx.uint32), [], 0).tokens
    counts = np.bincount(np.array(draws), minlength=8)
    assert ((counts - n * probs) ** 2 / (n * probs)).sum() < 24.3


@pytest.mark.parametrize(
    "options", [{"temp": 0.6}, {"temp": 1.0, "top_p": 0.9}, {"temp": 1.3, "top_k": 40, "min_p": 0.02}]
)
def test_with_a_drafter_equals_without_at_every_temperature(pair, options):
    target, tokenizer, drafter = pair
    prompt = np.load(GOLDEN / "llama" / "golden.npz")["p17_ids"].tolist()
    accepted = 0
    for seed in range(4):
        plain = generate(target, tokenizer, prompt, max_tokens=40, seed=seed, **options)
        for block_size in (3, 8):
            run = generate(
                target,
                tokenizer,
                prompt,
                draft_model=drafter,
                block_size=block_size,
                max_tokens=40,
                seed=seed,
                **options,
            )
            assert run.tokens == plain.tokens
            assert run.stats.rounds > 0
            accepted += run.stats.accepted
    assert accepted > 0


def test_no_seed_draws_a_fresh_one_and_reports_it(pair):
    target, tokenizer, _ = pair
    first, second = (generate(target, tokenizer, [5, 6, 7], max_tokens=8, temp=1.0) for _ in range(2))
    seed = first.stats.sampling["seed"]
    assert seed != second.stats.sampling["seed"]
    again = generate(target, tokenizer, [5, 6, 7], max_tokens=8, temp=1.0, seed=seed)
    assert again.tokens == first.tokens


@pytest.mark.parametrize(
    "wrong",
    [
        {"temp": -0.1},
        {"temp": float("nan")},
        {"top_p": 1.5},
        {"top_k": -1},
        {"min_p": 2.0},
        {"seed": -1},
        {"seed": 2**32},
        {"seed": 1.5},
        {"temp": 1e-9},
        {"temp": "1"},
        {"top_k": 2.5},
        {"top_k": True},
        {"min_tokens_to_keep": 0},
        {"min_tokens_to_keep": 5, "top_k": 3, "min_p": 0.1},
    ],
)
def test_settings_out_of_range_are_refused_before_anything_runs(pair, wrong):
    with pytest.raises(RequestError, match=next(iter(wrong))):
        generate(pair[0], pair[1], [5], **wrong)
