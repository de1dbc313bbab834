"""Conversations: warm turns equal cold ones, only the rest is forwarded, files are whole or refused."""

import os
import random

import mlx.core as mx
import pytest
import tiny
from mlx_dflash.benchmarks.machine import rows_independent

from mlx_dflash import CheckpointError, ContextFull, RequestError, Session, generate, load, load_drafter
from mlx_dflash.remembered import MARKS, Memory
from mlx_dflash.text import encode_prompt

# w8 opens a reply and w9 ends a message. Of a reply only the last words come back, as with thinking that is dropped.
TEMPLATE = (
    "{% for m in messages %}{{ 'w5 ' if m.role == 'system' else 'w6 ' if m.role == 'user' else 'w8 ' }}"
    "{{ m.content if m.role != 'assistant' else m.content.split()[-KEPT:] | join(' ') }} w9 {% endfor %}"
    "{% if add_generation_prompt %}w8 {% endif %}"
)
LAYOUTS = {  # what each cache and each drafter is like
    "full": "qwen3",
    "windowed drafter": "qwen3_allsliding",
    "windowed target": "gpt_oss_notrunc",
    "windowed and shared": "gemma4",
    "hybrid": "qwen3_next",
}


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    """(layout, words of a reply that come back) -> target, tokenizer, drafter."""
    made = {}

    def pair(layout, kept=99):
        if (layout, kept) not in made:
            family, folder = LAYOUTS[layout], tmp_path_factory.mktemp("target") / "target"
            overrides = {"chat_template": TEMPLATE.replace("KEPT", str(kept)), "eos_token": tiny.REMOVE}
            tiny.copy_folder(tiny.target_folder(family), folder, tokenizer_config=overrides)
            target, tokenizer = load(folder)
            made[layout, kept] = target, tokenizer, load_drafter(tiny.draft_folder(family), target)
        return made[layout, kept]

    return pair


def said(stream):
    responses = list(stream)
    return [r.token for r in responses], responses[-1].stats


def question(rng, most=12):
    return " ".join(f"w{rng.randrange(20, 290)}" for _ in range(rng.randint(1, most)))


@pytest.mark.parametrize("drafting", [True, False], ids=["drafter", "plain"])
@pytest.mark.parametrize("kept", [99, 3], ids=["whole replies", "thinking dropped"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_twenty_warm_turns_equal_cold_ones(pairs, layout, kept, drafting):
    target, tokenizer, drafter = pairs(layout, kept)
    draft_model = drafter if drafting else None
    rng = random.Random(f"{layout} {kept}")
    session = Session(target, tokenizer, draft_model, system="w40 w41", context_limit=10_000)
    rounds = reused = parted = 0
    for turn in range(20):
        action = rng.choice(["send", "send", "send", "retry", "undo", "stop"]) if session.turns else "send"
        options = {"max_tokens": rng.randint(2, 14), "temp": rng.choice([0.0, 0.8]), "seed": turn}
        options |= {"block_size": rng.choice([3, 8, "auto"])} if drafting else {}
        if action == "undo":
            session.undo()
        if action == "stop":
            stream = session.send(question(rng), **options)
            taken = [next(stream).token for _ in range(min(2, options["max_tokens"]))]
            stream.close()
            assert encode_prompt(tokenizer, session.turns[-1]["content"])[: len(taken)] == taken
            continue
        stream = session.retry(**options) if action == "retry" else session.send(question(rng), **options)
        warm, stats = said(stream)
        cold = generate(target, tokenizer, session.messages[:-1], draft_model=draft_model, **options)
        parted += warm != cold.tokens
        rounds += stats.rounds
        reused += stats.cached_tokens
        assert stats.cached_tokens == session.reused and session.forwarded + session.reused == stats.prompt_tokens
        assert cold.stats.prompt_tokens == stats.prompt_tokens
    assert parted <= (0 if rows_independent() else 1)  # elsewhere near-ties may part
    assert reused > 100 and (rounds > 20) == drafting
    assert len(session.memory.marks) <= MARKS


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_second_turn_forwards_only_what_is_new(pairs, layout):
    target, tokenizer, drafter = pairs(layout)
    session = Session(target, tokenizer, drafter, max_tokens=7, block_size=3, context_limit=10_000)
    said(session.send("w50 w51 w52"))
    assert (session.reused, session.forwarded) == (0, 6)  # w6, three words, w9, w8
    said(session.send("w60 w61"))
    # The cache lacks the reply's last token; then w9, w6, two words, w9, w8.
    assert (session.reused, session.forwarded) == (6 + 7 - 1, 1 + 6)
    assert session.context_tokens == 12 + 7 + 7 - 1


@pytest.mark.parametrize("layout", LAYOUTS)
def test_dropped_thinking_and_retries_go_on_from_the_end_of_the_question(pairs, layout):
    target, tokenizer, drafter = pairs(layout, 3)
    session = Session(target, tokenizer, drafter, max_tokens=9, block_size=3, context_limit=10_000)
    said(session.send("w50 w51 w52"))
    said(session.retry())
    assert session.reused >= 5  # the question without the opening of the reply
    said(session.send("w60"))
    assert session.reused >= 5


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_same_prompt_a_shorter_one_and_a_prefix_give_what_fresh_runs_give(pairs, layout):
    target, tokenizer, drafter = pairs(layout)
    ids = [30 + i for i in range(60)]
    memory = Memory()
    for prompt in (ids, ids, ids[:35], [*ids[:20], 7, 8], ids, ids[:1]):
        options = {"draft_model": drafter, "block_size": 3, "max_tokens": 8}
        warm = generate(target, tokenizer, prompt, remembered=memory, **options)
        assert warm.tokens == generate(target, tokenizer, prompt, **options).tokens
        assert warm.stats.rounds > 0 and memory.length == len(prompt) + 8 - 1
    assert warm.stats.cached_tokens == 0  # of one token none can be spared: it gives the logits


def test_a_drafter_that_comes_later_gets_its_context_and_one_that_goes_costs_nothing(pairs):
    target, tokenizer, drafter = pairs("full")
    session = Session(target, tokenizer, drafter, max_tokens=6, context_limit=10_000)
    said(session.send("w50 w51 w52"))
    session.draft_model = None
    tokens, stats = said(session.send("w60"))
    assert session.reused > 0 and stats.mode == "plain"
    session.draft_model = drafter
    tokens, stats = said(session.send("w61", block_size=3))
    assert session.reused == 0 and stats.rounds > 0
    assert tokens == generate(target, tokenizer, session.messages[:-1], max_tokens=6).tokens


def test_an_interrupted_reply_keeps_the_committed_rounds(pairs):
    target, tokenizer, drafter = pairs("full")
    session = Session(target, tokenizer, drafter, max_tokens=40, block_size=4, context_limit=10_000)
    seen = []
    for response in session.send("w50 w51", interrupted=lambda: len(seen) >= 5):
        seen.append(response.token)
    assert response.finish_reason == "interrupted" and 5 <= len(seen) < 40
    assert session.turns[-1] == {"role": "assistant", "content": tiny.words(seen)}


def test_undo_clear_and_drop(pairs):
    target, tokenizer, _ = pairs("full")
    session = Session(target, tokenizer, system="w40", max_tokens=3, context_limit=10_000)
    for text in ("w50", "w51", "w52"):
        said(session.send(text))
    session.undo()
    assert [m["content"] for m in session.messages if m["role"] != "assistant"] == ["w40", "w50", "w51"]
    session.drop(2)
    assert [m["content"] for m in session.messages if m["role"] != "assistant"] == ["w40", "w51"]
    session.clear()
    assert session.messages == [{"role": "system", "content": "w40"}]
    for impossible in (session.undo, session.retry, lambda: session.drop(1)):
        with pytest.raises(RequestError):
            impossible()


def test_a_full_context_is_said_before_anything_runs(pairs):
    target, tokenizer, _ = pairs("full")
    session = Session(target, tokenizer, max_tokens=50, context_limit=30)
    tokens, _ = said(session.send("w50 w51 w52"))
    assert len(tokens) == 30 - 6  # up to the limit
    before = list(session.turns)
    with pytest.raises(ContextFull) as full:
        session.send("w60")
    assert full.value.limit == 30 and full.value.needed >= 30 and full.value.messages == 2
    assert session.turns == before
    session.drop(2)
    said(session.send("w60"))


def test_a_bad_option_changes_nothing(pairs):
    target, tokenizer, _ = pairs("full")
    session = Session(target, tokenizer)
    with pytest.raises(RequestError):
        session.send("w50", temp=-1.0)
    assert session.turns == []


# Files


@pytest.mark.parametrize("drafting", [True, False], ids=["drafter", "plain"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_loaded_session_goes_on_as_the_saved_one_would(pairs, tmp_path, layout, drafting):
    target, tokenizer, drafter = pairs(layout)
    draft_model = drafter if drafting else None
    options = {"max_tokens": 20, "context_limit": 10_000} | ({"block_size": 3} if drafting else {})
    session = Session(target, tokenizer, draft_model, system="w40", **options)
    said(session.send("w50 w51 w52"))
    said(session.send("w60"))
    session.save(tmp_path / "talk")
    loaded = Session.load(tmp_path / "talk", target, tokenizer, draft_model, **options)
    assert loaded.messages == session.messages and loaded.context_tokens == session.context_tokens
    for text in ("w70 w71", "w72"):
        (ours, stats), (theirs, _) = said(loaded.send(text)), said(session.send(text))
        assert ours == theirs and loaded.reused == session.reused > 0
        assert (stats.rounds > 0) == drafting


def test_quantized_keys_and_values_are_saved_too(pairs, tmp_path):
    target, tokenizer, drafter = pairs("hybrid")
    options = {"max_tokens": 6, "kv_bits": 8, "block_size": 3, "context_limit": 10_000}
    session = Session(target, tokenizer, drafter, **options)
    said(session.send("w50 w51"))
    session.save(tmp_path / "talk")
    loaded = Session.load(tmp_path / "talk", target, tokenizer, drafter, **options)
    assert said(loaded.send("w60"))[0] == said(session.send("w60"))[0] and loaded.reused > 0
    other = Session.load(tmp_path / "talk", target, tokenizer, drafter, **{**options, "kv_bits": 4})
    said(other.send("w60"))
    assert other.reused == 0  # they are of another kind


def test_another_drafter_or_cache_leaves_the_saved_caches_aside(pairs, tmp_path):
    target, tokenizer, drafter = pairs("full")
    session = Session(target, tokenizer, max_tokens=6, context_limit=10_000)
    said(session.send("w50 w51"))
    session.save(tmp_path / "talk")
    loaded = Session.load(tmp_path / "talk", target, tokenizer, drafter, max_tokens=6, context_limit=10_000)
    said(loaded.send("w60"))
    assert loaded.reused == 0 and len(loaded.turns) == 4


def test_a_killed_save_leaves_the_old_file(pairs, tmp_path, monkeypatch):
    target, tokenizer, _ = pairs("full")
    session = Session(target, tokenizer, max_tokens=4, context_limit=10_000)
    said(session.send("w50"))
    session.save(tmp_path / "talk")
    old = (tmp_path / "talk").read_bytes()
    said(session.send("w51"))

    def killed(*_):
        raise OSError("killed")

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", killed)
        with pytest.raises(CheckpointError, match="killed"):
            session.save(tmp_path / "talk")
    with monkeypatch.context() as patch:
        patch.setattr(mx, "save_safetensors", killed)
        with pytest.raises(CheckpointError, match="killed"):
            session.save(tmp_path / "talk")
    assert (tmp_path / "talk").read_bytes() == old
    assert [p.name for p in tmp_path.iterdir()] == ["talk"]
    assert len(Session.load(tmp_path / "talk", target, tokenizer).turns) == 2


def test_a_corrupt_or_foreign_file_is_refused_in_one_line_and_changes_nothing(pairs, tmp_path):
    target, tokenizer, _ = pairs("full")
    session = Session(target, tokenizer, max_tokens=4, context_limit=10_000)
    said(session.send("w50"))
    session.save(tmp_path / "talk")
    whole = (tmp_path / "talk").read_bytes()
    (tmp_path / "cut").write_bytes(whole[:-100])
    (tmp_path / "text").write_text("hello")
    (tmp_path / "empty").write_bytes(b"")
    mx.save_safetensors(str(tmp_path / "foreign.safetensors"), {"a": mx.zeros(3)})
    newer = whole.replace(b'"version":"1"', b'"version":"9"')
    (tmp_path / "newer").write_bytes(newer)
    assert newer != whole
    for name in ("cut", "text", "empty", "foreign.safetensors", "newer", "missing"):
        with pytest.raises(CheckpointError) as refused:
            session.restore(tmp_path / name)
        assert name in str(refused.value) and "\n" not in str(refused.value)
    other, other_tokenizer, _ = pairs("hybrid")
    with pytest.raises(CheckpointError, match="another model"):
        Session.load(tmp_path / "talk", other, other_tokenizer)
    assert len(session.turns) == 2 and said(session.send("w51"))[1].cached_tokens > 0
