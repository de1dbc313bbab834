"""The loop: whatever the drafter says, the tokens are plain decoding's; one host read a round; closing is safe."""

import threading
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from mlx_dflash import RequestError, generate, load, load_drafter, stream_generate
from mlx_dflash.accept import Sampler
from mlx_dflash.cache import STEP
from mlx_dflash.decode import Decoder, State
from mlx_dflash.drafters.dflash import MAX_PENDING
from mlx_dflash.stats import Observer
from mlx_dflash.width import fixed

GOLDEN = Path(__file__).parent / "golden"
LENGTH = 40


@pytest.fixture(scope="module", params=["qwen3", "llama"])
def pair(request):
    folder = GOLDEN / request.param
    target, tokenizer = load(folder / "target")
    return target, tokenizer, load_drafter(folder / "draft", target)


@pytest.fixture(scope="module")
def prompt(pair):
    """A prompt on which the tiny drafter gets some blocks right and some wrong."""
    golden = np.load(GOLDEN / pair[0].config["model_type"] / "golden.npz")
    return golden["p12_ids"].tolist()


@pytest.fixture(scope="module")
def plain(pair, prompt):
    """LENGTH greedy tokens, the long way: every token from a fresh cache."""
    target = pair[0]
    text = list(prompt)
    for _ in range(LENGTH):
        logits, _ = target.forward(mx.array([text]), target.make_cache(), last_logits_only=True)
        text.append(mx.argmax(logits[0, -1]).item())
    return text[len(prompt) :]


class Scripted:
    """A drafter whose drafts come from `script(position of the first draft, count)`; the rest is the real one."""

    def __init__(self, drafter, script):
        self.drafter, self.script = drafter, script
        self.target, self.taps, self.block_size = drafter.target, drafter.taps, drafter.block_size
        self.make_context, self.append, self.rows = drafter.make_context, drafter.append, drafter.rows
        self.starts = []

    def propose(self, anchor, rows, context, draw):
        self.starts.append(context.length)
        self.drafter.propose(anchor, rows, context, draw)
        ids = self.script(context.length + 1, rows - 1)
        assert len(ids) == rows - 1
        return mx.array(ids, mx.uint32)


def right_up_to(plain, prompt, count):
    """Drafts that are right for `count` tokens and wrong from there on."""

    def script(position, n):
        at = position - len(prompt)
        true = (plain + [0] * n)[at : at + n]
        return [t if i < count else (t + 1) % 290 for i, t in enumerate(true)]

    return script


@pytest.mark.parametrize("width", range(1, 9))
def test_every_width_equals_plain(pair, prompt, plain, width):
    target, tokenizer, drafter = pair
    run = generate(target, tokenizer, prompt, draft_model=drafter, block_size=width, max_tokens=LENGTH)
    assert run.tokens == plain
    if width > 1:
        assert run.stats.rounds > 0 and run.stats.accepted > 0 and run.stats.plain_rounds == 0
    else:
        assert run.stats.mode == "plain" and run.stats.plain_rounds == LENGTH - 1


@pytest.mark.parametrize("right", range(8))
def test_a_reject_forced_at_every_index(pair, prompt, plain, right):
    target, tokenizer, drafter = pair
    scripted = Scripted(drafter, right_up_to(plain, prompt, right))
    run = generate(target, tokenizer, prompt, draft_model=scripted, block_size=8, max_tokens=LENGTH)
    assert run.tokens == plain
    lengths = run.stats.acceptance_lengths
    assert set(lengths[:-1]) == {right + 1}
    assert sum(lengths) == LENGTH - 1
    assert run.stats.accepted >= (len(lengths) - 1) * right
    # At every draft the context holds exactly the committed tokens: all but the anchor.
    assert scripted.starts == [len(prompt) + i * (right + 1) for i in range(len(lengths))]


@pytest.mark.parametrize("limit", range(1, 11))  # to the block of 8 + 2; 0 is refused
@pytest.mark.parametrize("right", [0, 3, 7])
def test_max_tokens_is_never_exceeded(pair, prompt, plain, limit, right):
    target, tokenizer, drafter = pair
    scripted = Scripted(drafter, right_up_to(plain, prompt, right))
    run = generate(target, tokenizer, prompt, draft_model=scripted, block_size=8, max_tokens=limit)
    assert run.tokens == plain[:limit]
    assert run.finish_reason == "length"
    assert run.stats.generation_tokens == limit == 1 + sum(run.stats.acceptance_lengths)


def test_no_tokens_at_all_are_refused(pair, prompt):
    with pytest.raises(RequestError, match="max_tokens must be 1 or more"):
        generate(pair[0], pair[1], prompt, draft_model=pair[2], max_tokens=0)


@pytest.mark.parametrize("right", [0, 1, 2, 7])
def test_a_stop_string_across_two_blocks_ends_the_text_before_it(pair, prompt, plain, right):
    """Over any two neighbouring tokens: of one block, or the last of one and the first of the next."""
    target, tokenizer, drafter = pair
    scripted = Scripted(drafter, right_up_to(plain, prompt, right))
    words = [f"w{token}" for token in plain]
    text = " ".join(words)
    for i in range(0, 12):
        stop = f"{words[i][-1]} {words[i + 1][:2]}"
        run = generate(target, tokenizer, prompt, draft_model=scripted, block_size=8, max_tokens=LENGTH, stop=stop)
        alone = generate(target, tokenizer, prompt, max_tokens=LENGTH, stop=stop)
        assert run.text == alone.text == text[: text.index(stop)]
        assert run.tokens == alone.tokens and run.finish_reason == "stop"


@pytest.mark.parametrize("right", [None, 0, 2, 7])
def test_any_token_named_as_stop_ends_the_run_there(pair, prompt, plain, right):
    target, tokenizer, drafter = pair
    scripted = None if right is None else Scripted(drafter, right_up_to(plain, prompt, right))
    for token in dict.fromkeys(plain):
        run = generate(target, tokenizer, prompt, draft_model=scripted, max_tokens=LENGTH, stop=token)
        assert run.tokens == plain[: plain.index(token) + 1]
        assert run.finish_reason == "stop"
        assert run.stats.generation_tokens == len(run.tokens)


@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_prefill_chunks_change_neither_drafts_nor_tokens(pair, prompt, plain, chunk):
    target, tokenizer, drafter = pair
    one = generate(target, tokenizer, prompt, draft_model=drafter, block_size=8, max_tokens=LENGTH)
    run = generate(
        target, tokenizer, prompt, draft_model=drafter, block_size=8, max_tokens=LENGTH, prefill_step_size=chunk
    )
    assert run.tokens == plain
    assert run.stats.acceptance_lengths == one.stats.acceptance_lengths


def decoder_on(pair, state, width, cut=lambda tokens: None):
    target, _, drafter = pair
    return Decoder(target, drafter, state, fixed(width), Sampler(), cut, Observer())


@pytest.mark.parametrize("width", [1, 4, 8])
def test_closing_at_every_yield_and_going_on_equals_an_unbroken_run(pair, prompt, plain, width):
    target, _, drafter = pair
    length = 24
    for stop_at in range(1, length):
        state = State(list(prompt), target.make_cache(), drafter.make_context())
        run = decoder_on(pair, state, width).run(length)
        for _ in range(stop_at):
            next(run)
        run.close()
        done = len(state.tokens) - len(prompt)
        assert done >= stop_at
        assert state.cache.length == state.context.length == len(state.tokens) - 1
        if done < length:
            again = decoder_on(pair, state, width)
            assert [e.token for e in again.run(length - done)] == plain[done:length]
        assert state.tokens == prompt + plain[:length]


@pytest.mark.parametrize("width", [1, 8])
def test_an_error_in_mid_round_leaves_a_state_to_go_on_from(pair, prompt, plain, width, monkeypatch):
    target, _, drafter = pair
    for broken in ("forward", "read", "cut"):
        state = State(list(prompt), target.make_cache(), drafter.make_context())
        calls = {"n": 0}

        def fail_at_the_sixth(original, calls=calls):
            def wrapped(*args, **kwargs):
                calls["n"] += 1
                if calls["n"] == 6:
                    raise InterruptedError
                return original(*args, **kwargs)

            return wrapped

        decoder = decoder_on(pair, state, width)
        with monkeypatch.context() as patch:
            if broken == "forward":
                patch.setattr(target, "forward", fail_at_the_sixth(target.forward))
            else:
                patch.setattr(decoder, broken, fail_at_the_sixth(getattr(decoder, broken)))
            with pytest.raises(InterruptedError):
                list(decoder.run(LENGTH))
        assert state.cache.length == state.context.length == len(state.tokens) - 1
        done = len(state.tokens) - len(prompt)
        assert 0 < done < LENGTH
        assert [e.token for e in decoder_on(pair, state, width).run(LENGTH - done)] == plain[done:]


class HostReads:
    """Counts everything that makes the host wait for the device."""

    def __init__(self, monkeypatch):
        self.count = 0
        self.inside = False
        for name in ("tolist", "item", "__int__", "__float__", "__bool__", "__index__", "__array__", "__iter__"):
            if hasattr(mx.array, name):
                monkeypatch.setattr(mx.array, name, self.counted(getattr(mx.array, name)))
        for name in ("eval", "synchronize"):
            monkeypatch.setattr(mx, name, self.counted(getattr(mx, name)))

    def counted(self, original):
        def wrapped(*args, **kwargs):
            self.count += 1
            return original(*args, **kwargs)

        return wrapped


@pytest.mark.parametrize("width", [1, 5, 8])
def test_one_host_read_a_round(pair, prompt, plain, width, monkeypatch):
    target, tokenizer, drafter = pair
    run = stream_generate(target, tokenizer, prompt, draft_model=drafter, block_size=width, max_tokens=LENGTH)
    first = next(run)
    reads = HostReads(monkeypatch)
    responses = list(run)
    monkeypatch.undo()
    stats = responses[-1].stats
    assert [first.token] + [r.token for r in responses] == plain
    # Plain rounds are launched a round ahead; all reads but the first token's come after it either way.
    assert reads.count == stats.rounds + stats.plain_rounds == stats.host_reads - 1 > 0


def test_the_counter_of_host_reads_can_fail(monkeypatch):
    reads = HostReads(monkeypatch)
    x = mx.arange(3)
    x.tolist(), x[0].item(), int(x[1]), bool(x[2]), float(x[1]), mx.eval(x), mx.synchronize(), np.array(x)
    monkeypatch.undo()
    assert reads.count >= 7


def test_no_softmax_and_no_sort_in_greedy_rounds(pair, prompt, monkeypatch):
    target, tokenizer, drafter = pair

    def forbidden(*args, **kwargs):
        raise AssertionError("a greedy round needs only argmax")

    for name in ("softmax", "logsumexp", "sort", "argsort", "topk"):
        monkeypatch.setattr(mx, name, forbidden)
    run = generate(target, tokenizer, prompt, draft_model=drafter, block_size=8, max_tokens=8)
    assert run.stats.rounds > 0


def test_memory_does_not_grow_with_rounds(pair, prompt):
    """A lazy chain from round to round would pin every round's arrays."""
    target, _, drafter = pair
    waiting = MAX_PENDING * len(drafter.taps) * target.hidden_size * 4  # bytes of features not yet projected, at most
    for width in (1, 8):
        state = State(list(prompt), target.make_cache(), drafter.make_context())
        sizes = [mx.get_active_memory() for _ in decoder_on(pair, state, width).run(490)]
        assert len(prompt) + 260 > STEP and len(prompt) + 490 < 2 * STEP  # the buffers don't grow in between
        assert sizes[-1] - sizes[260] <= waiting + 16384


def test_a_target_loaded_in_one_thread_runs_in_another(pair, prompt, plain):
    target, tokenizer, drafter = pair
    out = []
    thread = threading.Thread(
        target=lambda: out.append(generate(target, tokenizer, prompt, draft_model=drafter, max_tokens=LENGTH))
    )
    thread.start()
    thread.join()
    assert out[0].tokens == plain and out[0].stats.rounds > 0


def test_two_drafters_on_one_target_keep_their_own_taps(pair, prompt, plain):
    target, tokenizer, drafter = pair
    other = load_drafter(GOLDEN / ("qwen3" if target.config["model_type"] == "qwen3" else "llama") / "draft", target)
    other.config = type(other.config)(**{**vars(other.config), "target_layer_ids": (0, 2, 7)})
    alone = generate(target, tokenizer, prompt, draft_model=drafter, block_size=5, max_tokens=LENGTH).stats
    alone = alone.acceptance_lengths
    runs = [
        stream_generate(target, tokenizer, prompt, draft_model=d, block_size=5, max_tokens=LENGTH)
        for d in (drafter, other)
    ]
    tokens = [[], []]
    last = [None, None]
    for responses in zip(*runs, strict=True):
        for i, r in enumerate(responses):
            tokens[i].append(r.token)
            last[i] = r
    assert tokens[0] == tokens[1] == plain
    assert last[0].stats.acceptance_lengths == alone
    assert last[1].stats.mean_accepted_length < last[0].stats.mean_accepted_length


@pytest.mark.parametrize("change", ["zeroed", "shifted"])
def test_tapped_features_reach_the_drafter_and_matter(pair, prompt, change):
    target, tokenizer, drafter = pair
    golden = np.load(GOLDEN / target.config["model_type"] / "golden.npz")
    taus = []
    for wrong in (False, True):
        scripted = Scripted(drafter, None)
        scripted.propose = drafter.propose

        def append(features, context, wrong=wrong):
            if wrong:
                features = features * 0 if change == "zeroed" else mx.roll(features, 48, axis=-1)
            drafter.append(features, context)

        scripted.append = append
        rounds = tokens = 0
        for context in (1, 12, 17, 60):
            ids = golden[f"p{context}_ids"].tolist()
            run = generate(target, tokenizer, ids, draft_model=scripted, block_size=8, max_tokens=32)
            assert run.tokens == golden[f"p{context}_greedy"].tolist()
            rounds += run.stats.rounds
            tokens += sum(run.stats.acceptance_lengths)
        taus.append(tokens / rounds)
    assert taus[1] < 0.7 * taus[0]
