"""Sampled requests: with any drafter tokens and log-probabilities are those without, and follow the distribution."""

import math
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_dflash.benchmarks.machine import rows_independent
from mlx_lm.generate import generate_step
from mlx_lm.sample_utils import make_logits_processors
from mlx_lm.utils import load_model
from stubs import SeenContext, StubDrafter, logits_of, truth
from test_decode import HostReads

from mlx_dflash import RequestError, filters, generate, load, load_drafter, stream_generate
from mlx_dflash.accept import Drawn, Sampler, Sampling
from mlx_dflash.decode import Decoder, State
from mlx_dflash.processors import Processors
from mlx_dflash.stats import Observer
from mlx_dflash.width import fixed

GOLDEN = Path(__file__).parent / "golden"
B = 8  # the tiny drafters' block
PENALTIES = {"repetition_penalty": 1.4, "presence_penalty": 0.6, "frequency_penalty": 0.4, "frequency_context_size": 7}


@pytest.fixture(scope="module")
def pair():
    target, tokenizer = load(GOLDEN / "llama" / "target")
    return target, tokenizer, load_drafter(GOLDEN / "llama" / "draft", target)


@pytest.fixture(scope="module")
def prompt():
    return np.load(GOLDEN / "llama" / "golden.npz")["p17_ids"].tolist()


def forbid_the_last(tokens, logits):
    """A user's processor, of tokens and logits alone: no token twice in a row."""
    return mx.put_along_axis(logits, tokens[-1:][None], mx.full((1, 1), -mx.inf, logits.dtype), axis=-1)


requests_ = st.fixed_dictionaries(
    {
        "temp": st.sampled_from([0.0, 0.4, 1.0, 1.7]),
        "top_p": st.sampled_from([1.0, 0.95, 0.4]),
        "top_k": st.sampled_from([0, 1, 30]),
        "min_p": st.sampled_from([0.0, 0.03]),
        "seed": st.integers(0, 2**32 - 1),
        "repetition_penalty": st.sampled_from([None, 1.5]),
        "repetition_context_size": st.sampled_from([3, 20]),
        "presence_penalty": st.sampled_from([0.0, 0.8]),
        "frequency_penalty": st.sampled_from([0.0, 0.5]),
        "logit_bias": st.sampled_from([None, {5: 4.0, 77: -9.0}]),
        "logits_processors": st.sampled_from([None, [forbid_the_last]]),
        "max_tokens": st.integers(1, 14),
    }
)


@given(
    request=requests_,
    width=st.integers(1, B),
    right=st.integers(0, B),
    stop_at=st.one_of(st.none(), st.integers(0, 13)),
)
@settings(max_examples=30, deadline=None, derandomize=True)
def test_tokens_and_logprobs_with_any_drafter_are_those_without(pair, prompt, request, width, right, stop_at):
    target, tokenizer, trained = pair
    request = {**request, "logprobs": True, "top_logprobs": 3}
    plain = generate(target, tokenizer, prompt, **request)
    if stop_at is not None:
        request["stop"] = plain.tokens[min(stop_at, len(plain.tokens) - 1)]
        plain = generate(target, tokenizer, prompt, **request)
        assert plain.finish_reason == "stop" and plain.tokens.index(request["stop"]) == len(plain.tokens) - 1
    scripted = StubDrafter(target, truth(prompt, plain.tokens, right))
    bad = StubDrafter(target, lambda position, count: [(position * 7 + i) % 290 for i in range(count)])
    for drafter in (scripted, trained, bad):
        run = generate(target, tokenizer, prompt, draft_model=drafter, block_size=width, **request)
        assert (run.tokens, run.finish_reason) == (plain.tokens, plain.finish_reason)
        assert close(run.logprobs, plain.logprobs)
        for ours, theirs in zip(run.top_logprobs, plain.top_logprobs, strict=True):
            assert close([value for _, value in ours], [value for _, value in theirs])
        if width > 1 and len(plain.tokens) > 1:
            assert run.stats.rounds > 0
        if drafter is scripted and width > 1 and right and len(plain.tokens) > 2:
            assert run.stats.accepted > 0


def close(ours, theirs):
    """Bit-equal where rows don't depend on how many there are."""
    return ours == theirs if rows_independent() else np.allclose(ours, theirs, atol=1e-4)


@pytest.mark.parametrize("width", [1, 5])
@pytest.mark.parametrize("temp", [0.0, 0.9])
def test_logprobs_are_those_of_a_forward_over_the_whole_text(pair, prompt, width, temp):
    """After processors, before filters and temperature; of the row that verified the token."""
    target, tokenizer, _ = pair
    options = {"temp": temp, "top_p": 0.8, "seed": 4, "max_tokens": 20, **PENALTIES}
    drafter = StubDrafter(target, truth(prompt, generate(target, tokenizer, prompt, **options).tokens, 3))
    stream = stream_generate(
        target, tokenizer, prompt, draft_model=drafter, block_size=width, logprobs=True, top_logprobs=4, **options
    )
    responses = list(stream)
    assert responses[-1].stats.accepted > 0 or width == 1
    text = prompt + [r.token for r in responses]
    logits = logits_of(target, text[:-1])[len(prompt) - 1 :]
    processed = Processors(**PENALTIES).apply(logits, mx.array(text[len(prompt) - 1 : -1]), text, len(prompt) - 1)
    expected = np.array(processed - mx.logsumexp(processed, axis=-1, keepdims=True))
    for r, row in zip(responses, expected, strict=True):
        assert np.allclose(np.array(r.logprobs), row, atol=1e-4)
        assert r.logprob == r.logprobs[r.token].item()
        best = sorted(row, reverse=True)[:4]
        assert np.allclose([value for _, value in r.top_logprobs], best, atol=1e-4)
        assert all(math.isclose(row[token], value, abs_tol=1e-4) for token, value in r.top_logprobs)
        assert [value for _, value in r.top_logprobs] == sorted((v for _, v in r.top_logprobs), reverse=True)
    again = generate(target, tokenizer, prompt, **options)
    assert again.tokens == text[len(prompt) :] and again.logprobs is None and again.top_logprobs is None


def test_greedy_tokens_with_penalties_are_mlx_lms(pair, prompt):
    target, tokenizer, drafter = pair
    options = {**PENALTIES, "logit_bias": {9: 1.5}}
    model, _ = load_model(GOLDEN / "llama" / "target")
    steps = generate_step(mx.array(prompt), model, max_tokens=24, logits_processors=make_logits_processors(**options))
    theirs = [token for token, _ in steps]
    for draft_model in (None, drafter):
        run = generate(target, tokenizer, prompt, draft_model=draft_model, max_tokens=24, **options)
        assert run.tokens == theirs[: len(run.tokens)] and (len(run.tokens) == 24 or run.finish_reason == "stop")
    assert run.stats.accepted > 0
    assert generate(target, tokenizer, prompt, max_tokens=24).tokens != run.tokens


# The distribution: a Markov chain over 8 tokens, so that every probability is known


class Table:
    """A target whose logits are a table's row for the last token."""

    hidden_size = 1

    def __init__(self, seed=0):
        self.table = 1.5 * mx.random.normal((8, 8), key=mx.random.key(seed))

    def forward(self, ids, cache, taps=(), last_logits_only=False):
        cache.open += ids.shape[1]
        return self.table[ids], mx.zeros((1, ids.shape[1], len(taps)))


class Length:
    """A cache that holds nothing but how long it is."""

    def __init__(self):
        self.length = self.open = 0

    def begin(self):
        self.open = 0

    def commit(self, keep):
        self.length += keep

    def abort(self):
        self.open = 0

    def arrays(self):
        return []


class AcceptIfArgmax(Sampler):
    """The wrong rule that some ship: a draft is right if it is the target's likeliest token."""

    def draw(self, logits, ids, tokens, before):
        drawn = super().draw(logits, ids, tokens, before)
        if len(ids) == 1:
            return drawn
        best = mx.argmax(logits, axis=-1)[:-1]
        kept = mx.where(ids[1:] == best, ids[1:], drawn.tokens[:-1])
        return Drawn(mx.concatenate([kept, drawn.tokens[-1:]]))


def chi_square(target, sampler, width, count=1200):
    """The chain's transitions in `count` tokens against the exact probabilities: statistic, and its 0.1% point."""
    drafter = None
    if width > 1:
        chain = np.array(mx.argmax(target.table, axis=-1))

        def propose(anchor, rows, context, draw):
            token, out = int(anchor.item()), []
            for i in range(rows - 1):
                token = int(chain[token]) if i % 3 < 2 else (token + 1) % 8
                out.append(token)
            return mx.array(out, mx.uint32)

        drafter = StubDrafter(target, None, taps=(0,))
        drafter.propose = propose
    state = State([3], Length(), SeenContext() if drafter else None)
    observer = Observer()
    decoder = Decoder(target, drafter, state, fixed(width), sampler, lambda tokens: None, observer)
    for _ in decoder.run(count):
        pass
    assert width == 1 or 0 < observer.stats.accepted < observer.stats.drafted
    seen = np.zeros((8, 8))
    np.add.at(seen, (state.tokens[:-1], state.tokens[1:]), 1)
    f, temp = sampler.sampling.filters, sampler.sampling.temp
    pool = filters.Pool(target.table, None, None)
    kept = f.keep(pool, mx.logsumexp(target.table, axis=-1, keepdims=True))
    probs = np.array(mx.softmax(mx.where(kept, target.table / temp, -mx.inf), axis=-1), np.float64)
    expected = seen.sum(axis=1, keepdims=True) * probs
    assert not seen[probs == 0].any()
    cells = expected > 0
    statistic = float(((seen - expected)[cells] ** 2 / expected[cells]).sum())
    degrees = sum(int(row.sum()) - 1 for row in cells if row.any())
    # Wilson and Hilferty; 3.09 is the normal's 0.1% point.
    return statistic, degrees * (1 - 2 / (9 * degrees) + 3.09 * math.sqrt(2 / (9 * degrees))) ** 3


@pytest.mark.parametrize(
    "options", [{"temp": 0.8}, {"temp": 1.2, "top_p": 0.9}, {"temp": 1.0, "top_k": 5, "min_p": 0.05}]
)
@pytest.mark.parametrize("width", [1, 4, 8])
def test_tokens_follow_the_exact_distribution(options, width):
    statistic, limit = chi_square(Table(), Sampler(Sampling(seed=21, **options)), width)
    assert statistic < limit


def test_the_chi_square_tells_the_wrong_rule():
    statistic, limit = chi_square(Table(), AcceptIfArgmax(Sampling(temp=0.8, seed=21)), 4)
    assert statistic > 2 * limit


# Candidates that do not do


@pytest.mark.parametrize("width", [1, 5])
def test_rounds_whose_nucleus_is_larger_are_drawn_again(pair, prompt, width, monkeypatch):
    target, tokenizer, drafter = pair
    options = {"temp": 1.3, "top_p": 0.9, "max_tokens": 24, "draft_model": drafter, "block_size": width}
    for seed in range(2):
        whole = generate(target, tokenizer, prompt, seed=seed, **options)
        assert whole.stats.redraws == 0  # 300 tokens: all are looked at
        with monkeypatch.context() as patch:
            patch.setattr(filters, "CANDIDATES", 20)
            few = generate(target, tokenizer, prompt, seed=seed, **options)
        assert few.tokens == whole.tokens
        assert few.stats.redraws > 0
        rounds = few.stats.rounds + few.stats.plain_rounds
        assert few.stats.host_reads == 1 + rounds + few.stats.redraws


@pytest.mark.parametrize("width", [1, 5])
def test_one_host_read_a_round_with_everything_on(pair, prompt, width, monkeypatch):
    target, tokenizer, drafter = pair
    run = stream_generate(
        target,
        tokenizer,
        prompt,
        draft_model=drafter,
        block_size=width,
        max_tokens=30,
        temp=0.8,
        top_p=0.9,
        min_p=0.01,
        seed=3,
        logprobs=True,
        top_logprobs=5,
        logits_processors=[forbid_the_last],
        proposals="coupled",
        **PENALTIES,
    )
    next(run)
    reads = HostReads(monkeypatch)
    stats = list(run)[-1].stats
    monkeypatch.undo()
    assert reads.count == stats.rounds + stats.plain_rounds == stats.host_reads - 1 > 0


def test_closing_a_sampled_run_whose_round_ahead_was_wrong_leaves_a_state_to_go_on_from(pair, prompt, monkeypatch):
    target = pair[0]
    monkeypatch.setattr(filters, "CANDIDATES", 20)
    sampling = Sampling(temp=1.3, top_p=0.9, seed=1)

    def decoder_on(state):
        return Decoder(target, None, state, fixed(1), Sampler(sampling), lambda tokens: None, Observer())

    whole = State(list(prompt), target.make_cache())
    tokens = [e.token for e in decoder_on(whole).run(10)]
    for stop_at in range(1, 10):
        state = State(list(prompt), target.make_cache())
        run = decoder_on(state).run(10)
        for _ in range(stop_at):
            next(run)
        run.close()
        done = len(state.tokens) - len(prompt)
        assert state.cache.length == len(state.tokens) - 1 and done >= stop_at
        rest = [e.token for e in decoder_on(state).run(10 - done)] if done < 10 else []
        assert state.tokens[len(prompt) :] == tokens and rest == tokens[done:]


# Proposals


@pytest.mark.parametrize("family", ["llama", "qwen3_dflash2", "qwen3_speculators"])
def test_coupled_proposals_never_change_the_tokens(family):
    """The plain drafter, the selector's, and one with a vocabulary of its own, whose tokens take the target's noise."""
    target, tokenizer = load(GOLDEN / family / "target")
    drafter = load_drafter(GOLDEN / family / "draft", target)
    prompt = np.load(GOLDEN / family / "golden.npz")["p12_ids"].tolist()
    accepted = {"argmax": 0, "coupled": 0}
    for seed in range(3):
        options = {"temp": 0.4, "top_k": 40, "seed": seed, "max_tokens": 12}
        plain = generate(target, tokenizer, prompt, **options)
        for kind in accepted:
            run = generate(target, tokenizer, prompt, draft_model=drafter, block_size=B, proposals=kind, **options)
            assert run.tokens == plain.tokens and run.stats.rounds > 0
            accepted[kind] += run.stats.accepted
    assert accepted["coupled"] > 0


@pytest.mark.parametrize(("temp", "kind"), [(0.0, "argmax"), (0.49, "argmax"), (0.5, "coupled"), (1.0, "coupled")])
def test_drafts_are_coupled_by_default_from_temperature_one_half_on(pair, prompt, temp, kind):
    target, tokenizer, drafter = pair
    options = {"draft_model": drafter, "block_size": B, "temp": temp, "seed": 5, "max_tokens": 24}
    run = generate(target, tokenizer, prompt, **options)
    assert run.stats.sampling["proposals"] == kind and run.stats.sampling["from"]["proposals"] == "default"
    asked = generate(target, tokenizer, prompt, proposals=kind, **options)
    assert asked.stats.acceptance_lengths == run.stats.acceptance_lengths and run.stats.rounds > 0
    other = generate(target, tokenizer, prompt, proposals="argmax", **options)
    assert other.tokens == run.tokens and other.stats.sampling["from"]["proposals"] == "request"


class Knowing(StubDrafter):
    """Knows the target's logits, and chooses as it is told to."""

    def __init__(self, target, text):
        super().__init__(target, None)
        self.text = text

    def propose(self, anchor, rows, context, draw):
        logits = logits_of(self.target, self.text[: context.length + rows])[context.length :]
        return draw(logits[: rows - 1]).astype(anchor.dtype)


def test_coupled_proposals_of_a_perfect_drafter_are_all_accepted(pair, prompt):
    """The same logits, temperature and noise: the same tokens. Off by a position or a token, hardly any would be."""
    target, tokenizer, _ = pair
    options = {"temp": 1.2, "seed": 8, "max_tokens": 25}
    plain = generate(target, tokenizer, prompt, **options).tokens
    options |= {"draft_model": Knowing(target, prompt + plain), "block_size": 5}
    run = generate(target, tokenizer, prompt, proposals="coupled", **options)
    assert run.tokens == plain and run.stats.accepted == run.stats.drafted > 10
    argmax = generate(target, tokenizer, prompt, proposals="argmax", **options)
    assert argmax.stats.accepted < argmax.stats.drafted


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"top_logprobs": 2}, "top_logprobs needs logprobs"),
        ({"logprobs": True, "top_logprobs": -1}, "top_logprobs must be"),
        ({"logprobs": True, "top_logprobs": 101}, "top_logprobs must be"),
        ({"draft_temp": 0.5}, "draft_temp needs coupled"),
        ({"proposals": "coupled"}, "need a draft model"),
        ({"proposals": "best"}, "proposals must be one of"),
        ({"sampling_defaults": "mine"}, "sampling_defaults must be one of"),
        ({"logits_processors": forbid_the_last}, "must be a list of functions"),
        ({"logits_processors": [1]}, r"logits_processors\[0\]"),
        ({"logit_bias": {300: 1.0}}, "token 300"),
        ({"repetition_penalty": -2.0}, "repetition_penalty"),
        ({"presence_context_size": 0}, "presence_context_size"),
        ({"thinking": True}, None),
        ({"temperature": 1.0}, "unknown option 'temperature'"),
        ({"sampler": forbid_the_last}, "'sampler' is not supported"),
        ({"max_tokens": 2.5}, "max_tokens must be"),
    ],
)
def test_unknown_and_contradictory_settings_are_refused_before_anything_runs(pair, options, words):
    target, tokenizer, _ = pair
    if words is None:  # ids need no template: thinking only says which recommended values count
        assert generate(target, tokenizer, [5], max_tokens=1, **options).stats.sampling["thinking"] is True
        return
    with pytest.raises(Exception, match=words) as error:
        stream_generate(target, tokenizer, [5], **options)
    assert "\n" not in str(error.value)
    assert isinstance(error.value, RequestError) or "sampler" in options
