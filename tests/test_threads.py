"""Threads and errors, for every family: what one thread begins another can go on with, and an error breaks nothing."""

import threading
from pathlib import Path

import numpy as np
import pytest

from mlx_dflash import generate, load, load_drafter, stream_generate

GOLDEN = Path(__file__).parent / "golden"
FAMILIES = sorted(p.name for p in GOLDEN.iterdir() if (p / "golden.npz").exists())


def in_thread(function):
    """The function's result from a new thread; its exception is raised here."""
    out = {}

    def run():
        try:
            out["value"] = function()
        except BaseException as e:
            out["error"] = e

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if "error" in out:
        raise out["error"]
    return out["value"]


@pytest.fixture(scope="module", params=FAMILIES)
def case(request):
    """target, tokenizer, drafter, prompt, greedy tokens; nothing has been computed with the weights yet."""
    folder = GOLDEN / request.param
    target, tokenizer = load(folder / "target")
    golden = np.load(folder / "golden.npz")
    return (
        target,
        tokenizer,
        load_drafter(folder / "draft", target),
        golden["p17_ids"].tolist(),
        golden["p17_greedy"].tolist(),
    )


def test_the_first_forward_may_run_in_a_new_thread(case):
    target, tokenizer, drafter, prompt, greedy = case
    run = in_thread(lambda: generate(target, tokenizer, prompt, draft_model=drafter, block_size=8, max_tokens=32))
    assert run.tokens == greedy
    assert run.stats.rounds > 0 and run.stats.accepted > 0


def test_a_generator_goes_on_in_another_thread(case):
    target, tokenizer, drafter, prompt, greedy = case
    for block_size in (1, 8):
        stream = stream_generate(target, tokenizer, prompt, draft_model=drafter, block_size=block_size, max_tokens=32)
        tokens = [next(stream).token for _ in range(5)]
        tokens += in_thread(lambda stream=stream: [next(stream).token for _ in range(9)])
        tokens += [r.token for r in stream]
        assert tokens == greedy


def test_an_error_in_mid_round_is_followed_by_a_right_answer(case, monkeypatch):
    target, tokenizer, drafter, prompt, greedy = case
    for broken, owner in (("head", target), ("propose", drafter), ("append", drafter)):
        original, calls = getattr(owner, broken), []

        def fail(*args, original=original, calls=calls, **kwargs):
            calls.append(1)
            if len(calls) == 4:
                raise InterruptedError
            return original(*args, **kwargs)

        with monkeypatch.context() as patch:
            patch.setattr(owner, broken, fail)
            with pytest.raises(InterruptedError):
                generate(target, tokenizer, prompt, draft_model=drafter, block_size=8, max_tokens=32)
        run = generate(target, tokenizer, prompt, draft_model=drafter, block_size=8, max_tokens=32)
        assert run.tokens == greedy and run.stats.rounds > 0
