"""Drafts from the text itself: what matches, what is offered, and that the tokens stay the target's own."""

import pytest

from mlx_dflash import generate, load, load_drafter
from mlx_dflash.errors import RequestError
from mlx_dflash.lookup import MOST_ROWS, History, Lookup
from tests.tiny import GOLDEN

FEW = dict.fromkeys(range(40, 46), 60.0)  # logit biases that leave six tokens, so that pairs come again
TEXT = [5, 6, 7, 8, 9, 10, 11, 12, 13, 14]


def test_the_longest_of_several_matches_is_followed_and_of_equals_the_latest():
    #        0  1  2  3  4  5  6  7  8  9  10 11 12 13 14
    tokens = [1, 2, 3, 4, 9, 2, 3, 5, 0, 8, 2, 3, 1, 2, 3]
    assert History(tokens).match() == (3, 3)  # 1 2 3 -> 4, not 2 3 -> 1
    assert History([2, 3, 4, 0, 2, 3, 5, 1, 2, 3]).match() == (6, 2)


def test_it_grows_with_the_text_and_equals_one_made_at_once():
    tokens, text = [], [1, 2, 3, 1, 2, 4, 1, 2, 3, 1, 2, 4, 4, 4, 4, 1, 2, 3]
    growing = History(tokens)
    for i, token in enumerate(text):
        tokens += [token]
        assert growing.match() == History(text[: i + 1]).match()


def test_a_match_that_runs_into_the_end_is_taken_to_repeat():
    assert History([7, 1, 2, 3, 1, 2, 3]).drafts(7) == [1, 2, 3, 1, 2, 3, 1]


def test_offers_name_the_grade_and_leave_room_for_what_may_still_be_emitted():
    history = History(TEXT + TEXT)
    assert history.offer(100) == ("lookup/8", MOST_ROWS)
    assert history.offer(3) == ("lookup/8", 4)
    assert history.offer(1)[1] == 1
    assert History([1, 2, 3, 4, 5, 3, 4]).offer(9) == ("lookup/2", 10)
    assert History(TEXT).offer(9) == ("lookup", 1)
    assert History([1, 2]).offer(9) == ("lookup", 1)


@pytest.mark.parametrize("family", ["qwen3", "qwen3_5", "muse_glimmer", "gpt_oss"])
@pytest.mark.parametrize("temp", [0.0, 0.3])
@pytest.mark.parametrize("rows", [2, 7, MOST_ROWS, "auto"])
def test_tokens_equal_plain_ones_of_every_cache_kind(family, temp, rows):
    target, tokenizer = load(GOLDEN / family / "target")
    options = {"max_tokens": 40, "temp": temp, "seed": 3, "logit_bias": FEW}
    text = [40, 41, 42, 43, 44, 45] * 3
    plain = generate(target, tokenizer, text, **options)
    run = generate(target, tokenizer, text, draft_model=load_drafter("lookup", target), block_size=rows, **options)
    assert run.tokens == plain.tokens
    assert run.stats.mode == "lookup" and run.stats.rounds == run.stats.lookup_rounds > 0
    assert run.stats.drafted > run.stats.accepted


def test_it_accepts_what_it_copies():
    target, tokenizer = load(GOLDEN / "qwen3" / "target")
    first = generate(target, tokenizer, [40, 41, 42], max_tokens=30)
    text = [40, 41, 42, *first.tokens, 40, 41, 42, *first.tokens[:3]]
    plain = generate(target, tokenizer, text, max_tokens=20)
    run = generate(target, tokenizer, text, draft_model=Lookup(target), max_tokens=20)
    assert run.tokens == plain.tokens and run.stats.lookup_rounds > 0


def test_beside_a_drafter_both_draft_and_the_tokens_stay():
    target, tokenizer = load(GOLDEN / "qwen3" / "target")
    drafter = load_drafter(GOLDEN / "qwen3" / "draft", target)
    text = [40, 41, 42, 43, 44, 45] * 3
    options = {"max_tokens": 80, "logit_bias": FEW, "temp": 1.0, "seed": 1}
    plain = generate(target, tokenizer, text, **options)
    run = generate(target, tokenizer, text, draft_model=drafter, **options)
    assert run.tokens == plain.tokens
    assert 0 < run.stats.lookup_rounds < run.stats.rounds and run.stats.mode == "dflash"
    alone = generate(target, tokenizer, text, draft_model=drafter, lookup=False, **options)
    assert alone.tokens == plain.tokens and alone.stats.lookup_rounds == 0 < alone.stats.rounds


def test_more_rows_than_lookup_fills_are_refused():
    target, tokenizer = load(GOLDEN / "qwen3" / "target")
    with pytest.raises(RequestError, match="above the rows that lookup fills; use 16"):
        generate(target, tokenizer, [1, 2], draft_model=Lookup(target), block_size=17)
