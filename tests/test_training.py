"""Training sees the same drafter as decoding: packed blocks, mask, start, checkpoints and export."""

import json
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten

from mlx_dflash import generate, load, load_drafter
from mlx_dflash.drafters.dflash import DFlashModel
from mlx_dflash.errors import RequestError
from mlx_dflash.training.config import TrainingConfig, load_config
from mlx_dflash.training.data import (
    Sample,
    append_samples,
    decode_batch,
    generate_answers,
    load_answers,
    load_features,
    prompts_of,
    tap_scales,
    thinking_of,
)
from mlx_dflash.training.export import export_drafter
from mlx_dflash.training.model import (
    block_mask,
    draft_hidden,
    fold_scales,
    quantize_linears,
    start_from_target,
    unquantized,
)
from mlx_dflash.training.prompts import OPENERS, held_out_prompts, split, training_prompts
from mlx_dflash.training.train import (
    Batch,
    as_drafter,
    candidates,
    drafter_config,
    loss_of,
    start_weights,
    train,
    trained_weights,
)
from mlx_dflash.training.written import written_prompts

GOLDEN = Path(__file__).parent / "golden"
TRAINING = Path(__file__).parent / "golden_training"
TINY = TrainingConfig(
    layers=2,
    taps=(1, 3, 5),
    mask_token_id=299,
    steps=20,
    sequences=2,
    anchors=8,
    widths=(8, 5),
    warmup=5,
    frequent=64,
    negatives=64,
)


@pytest.fixture(scope="module")
def llama():
    return load(GOLDEN / "llama" / "target")


@pytest.fixture(scope="module")
def samples(llama):
    """Greedy answers of the tiny target to a few random prompts."""
    target, tokenizer = llama
    rng = np.random.default_rng(3)
    out = []
    for size in (9, 14, 6):
        prompt = rng.integers(3, 290, size).tolist()
        out.append(Sample("chat", prompt, generate(target, tokenizer, prompt, max_tokens=40).tokens))
    return out


TEMPLATE = "{% for m in messages %}w20 {{ m.content }} w21{% endfor %}{% if add_generation_prompt %} w22{% endif %}"


@pytest.fixture
def chat(llama):
    """The tiny target with a chat template, put back afterwards."""
    target, tokenizer = llama
    before = tokenizer.chat_template
    tokenizer.chat_template = TEMPLATE
    yield target, tokenizer
    tokenizer.chat_template = before


def test_batched_answers_are_plain_answers_and_bring_their_features(chat, tmp_path):
    target, tokenizer = chat
    prompts = [("chat", "w5 w6"), ("code", "w7"), ("chat", "w8 w9"), ("chat", "w6 w5")]
    generate_answers(target, tokenizer, prompts, tmp_path, (1, 3), max_tokens=24, batch=2, report=lambda _: None)
    samples = load_answers(tmp_path)
    assert sorted(s.task for s in samples) == ["chat", "chat", "chat", "code"]
    features = load_features(target, tmp_path, (1, 3))
    for i, sample in enumerate(samples):
        assert sample.answer == generate(target, tokenizer, sample.prompt, max_tokens=24).tokens
        ids = mx.array([(sample.prompt + sample.answer)[:-1]])
        _, expected = target.forward(ids, target.make_cache(), (1, 3))
        assert np.abs(features.of(i) - np.array(expected[0])).max() < 1e-2 * np.abs(np.array(expected)).max()


def test_ended_answers_leave_the_batch(llama):
    target, _ = llama
    prompts = np.random.default_rng(5).integers(3, 290, (8, 7)).tolist()
    free, _ = decode_batch(target, prompts, [], 16)
    stops = [answer[i] for i, answer in enumerate(free)]  # answer i ends after i + 1 tokens at the latest
    answers, rows = decode_batch(target, prompts, stops, 16, taps=(0,))
    for whole, answer, r in zip(free, answers, rows, strict=True):
        end = next(i for i, token in enumerate(whole) if token in stops)
        assert answer == whole[: end + 1] and len(r) == len(prompts[0]) + len(answer) - 1
    assert len({len(answer) for answer in answers}) > 2


def test_a_killed_generation_goes_on_after_its_last_whole_batch(chat, tmp_path):
    target, tokenizer = chat
    prompts = [("chat", text) for text in ("w5", "w6 w7", "w8", "w9 w10 w11")]

    def run(folder, report):
        folder.mkdir(exist_ok=True)
        generate_answers(target, tokenizer, prompts, folder, (1,), max_tokens=8, batch=1, report=report)

    def kill(message):
        raise KeyboardInterrupt

    run(tmp_path / "whole", lambda _: None)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "parts", kill)
    with (tmp_path / "parts" / "features.f16").open("ab") as f:
        f.write(b"half a batch")
    run(tmp_path / "parts", lambda _: None)
    for name in ("answers.jsonl", "features.f16"):
        assert sorted((tmp_path / "whole" / name).read_bytes()) == sorted((tmp_path / "parts" / name).read_bytes())
    assert load_answers(tmp_path / "parts") and len(load_answers(tmp_path / "parts")) == 4
    with pytest.raises(RequestError, match="taps"):
        generate_answers(target, tokenizer, prompts, tmp_path / "parts", (2,))


def test_features_of_copied_answers_are_computed_and_parts_are_joined(llama, samples, tmp_path):
    target, _ = llama
    for suffix, part in (("-1", samples[:1]), ("-2", samples[1:])):
        append_samples(tmp_path / f"answers{suffix}.jsonl", part)
    features = load_features(target, tmp_path, (1, 3))
    assert features.samples == samples
    for i, sample in enumerate(samples):
        ids = mx.array([(sample.prompt + sample.answer)[:-1]])
        _, expected = target.forward(ids, target.make_cache(), (1, 3))
        assert np.array_equal(features.of(i), np.array(expected[0].astype(mx.float16)))


def test_written_prompts_are_sampled_once_and_kept(chat, tmp_path, monkeypatch):
    target, tokenizer = chat
    monkeypatch.setattr(tokenizer, "eos_token_ids", list(range(3, 40)))  # random text seldom says one certain token
    path = tmp_path / "prompts.jsonl"
    first = written_prompts(target, tokenizer, 6, path, batch=4, report=lambda _: None)
    assert len({prompt for _, prompt in first}) == 6
    begun = [(task, prompt) for task, prompt in first if task != "written"]
    assert 0 < len(begun) < 6
    assert all(any(prompt.startswith(o) for o in split(OPENERS[task])) for task, prompt in begun)
    again = written_prompts(target, tokenizer, 6, path, batch=4, report=lambda _: pytest.fail("sampled again"))
    other = written_prompts(target, tokenizer, 6, tmp_path / "other.jsonl", seed=1, batch=4, report=lambda _: None)
    assert first == again != other


@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_packed_blocks_equal_the_runtime_drafter(family):
    target, _ = load(GOLDEN / family / "target")
    drafter = load_drafter(GOLDEN / family / "draft", target)
    golden = np.load(GOLDEN / family / "golden.npz")
    text = golden["p60_ids"].tolist()
    short = text[:33]
    mask_id, width = drafter.config.mask_token_id, 6
    anchors = [[20, 40, 59], [5, 30, 32]]

    features, lengths = [], []
    for ids in (text, short):
        _, f = target.forward(mx.array([ids]), target.make_cache(), drafter.taps)
        features.append(mx.pad(f, [(0, 0), (0, len(text) - len(ids)), (0, 0)]))
        lengths.append(len(ids))
    blocks = [[[ids[a]] + [mask_id] * (width - 1) for a in at] for ids, at in zip((text, short), anchors, strict=True)]
    noise = target.embed(mx.array(blocks))
    packed = draft_hidden(
        drafter.model, drafter.config, mx.concatenate(features), mx.array(lengths), noise, mx.array(anchors)
    )
    for s, ids in enumerate((text, short)):
        for k, anchor in enumerate(anchors[s]):
            context = drafter.make_context()
            drafter.append(features[s][:, :anchor], context)
            expected = drafter.logits(mx.array([ids[anchor]]), width, context)
            got = target.head(packed[s : s + 1, k, 1:])
            assert mx.abs(got - expected).max().item() < 1e-4


@pytest.mark.parametrize("kind", ["tokens", "distribution"])
def test_loss_and_gradient_of_a_step_equal_torch(llama, kind):
    """Against autograd over z-lab's drafter, block by block (tests/oracle/training.py)."""
    target, _ = llama
    reference = dict(np.load(TRAINING / "golden.npz"))
    drafter = load_drafter(GOLDEN / "llama" / "draft", target)
    golden = np.load(GOLDEN / "llama" / "golden.npz")
    longest = sorted(int(n) for n in golden["contexts"])[-2:]
    taps, width = drafter.taps, 8
    rows, anchors, ids, known, final = [], [], [], [], []
    for n in longest:
        prompt, answer = golden[f"p{n}_ids"].tolist(), golden[f"p{n}_greedy"].tolist()
        text = prompt + answer
        _, states = target.forward(mx.array([text]), target.make_cache(), (*taps, target.num_layers - 1))
        states = np.array(states[0])
        at = sorted(len(prompt) + (a if a >= 0 else len(answer) + a) for a in (0, 3, 11, -4))
        rows.append(states[:, : -target.hidden_size])
        anchors.append(at)
        ids.append([(text[a : a + width] + [0] * width)[:width] for a in at])
        known.append([[a + k < len(text) for k in range(1, width)] for a in at])
        chose = np.minimum(np.array(at)[:, None] + np.arange(width - 1), len(text) - 1)
        final.append(states[chose, -target.hidden_size :])
    most = max(map(len, rows))
    padded = np.stack([np.pad(r, ((0, most - len(r)), (0, 0))) for r in rows])
    lengths = mx.array([len(r) for r in rows])
    arrays = (mx.array(padded), lengths, mx.array(anchors), mx.array(ids), mx.array(known), mx.array(np.stack(final)))
    config = replace(TINY, layers=3, targets=kind, alignment=2.0, feature_noise=0.0, gamma=4.0)
    labels = np.array(ids)[..., 1:]
    everything = candidates(np.random.default_rng(0), config, labels, np.arange(target.vocab_size), target.vocab_size)

    def loss(model):
        return loss_of(model, drafter.config, target, Batch(*arrays), everything, config, mx.random.key(0))

    value, grads = nn.value_and_grad(drafter.model, loss)(drafter.model)
    grads = dict(tree_flatten(grads))
    assert value.item() == pytest.approx(float(reference[f"{kind}.loss"]), abs=1e-4)
    names = [key.removeprefix(f"{kind}.grad.") for key in reference if key.startswith(f"{kind}.grad.")]
    assert len(names) == 8
    for name in names:
        wanted = reference[f"{kind}.grad.{name}"]
        assert np.abs(wanted).max() > 1e-4  # a parameter that the loss reaches
        assert np.abs(np.array(grads[name]) - wanted).max() < 1e-4, name


def test_an_exported_folder_is_what_zlab_loads_and_drafts_the_same(llama, tmp_path):
    """`golden_training/exported` was loaded by z-lab's package, whose draft logits are recorded."""
    target, _ = llama
    golden = TRAINING / "exported"
    drafter = load_drafter(golden, target)
    scales = [0.5, 2.0, 4.0]
    model = load_drafter(GOLDEN / "llama" / "draft", target).model
    fold_scales(model, [1 / s for s in scales], target.hidden_size)
    export_drafter(model, drafter.config, scales, tmp_path / "again", bits=None)
    assert json.loads((tmp_path / "again" / "config.json").read_text()) == json.loads(
        (golden / "config.json").read_text()
    )
    again, kept = (mx.load(str(folder / "model.safetensors")) for folder in (tmp_path / "again", golden))
    assert again.keys() == kept.keys() and all(mx.allclose(again[n], kept[n], atol=1e-6) for n in kept)

    arrays = np.load(GOLDEN / "llama" / "golden.npz")
    n = sorted(int(n) for n in arrays["contexts"])[-2]
    _, features = target.forward(mx.array(arrays[f"p{n}_ids"])[None], target.make_cache(), drafter.taps)
    context = drafter.make_context()
    drafter.append(features, context)
    _, logits = drafter.draft(mx.array(arrays[f"p{n}_greedy"][:1]), 8, context, lambda scores, *_: scores.argmax(-1))
    wanted = np.load(TRAINING / "golden.npz")["export.logits"]
    assert np.abs(np.array(logits[0]) - wanted).max() < 1e-4


def test_mask_equals_brute_force():
    lengths, anchors, context, block = [7, 5], [[2, 6], [1, 4]], 7, 3
    mask = np.array(block_mask(mx.array(lengths), mx.array(anchors), context, block))
    for s in range(2):
        for row in range(2 * block):
            for column in range(context + 2 * block):
                if column < context:
                    visible = column < lengths[s] and column < anchors[s][row // block]
                else:
                    visible = (column - context) // block == row // block
                assert mask[s, 0, row, column] == visible


def test_softmax_candidates_hold_every_label_and_estimate_the_full_sum():
    rng, vocab = np.random.default_rng(0), 300
    logits = rng.normal(size=vocab)
    labels = np.array([[3, 7], [7, 250]])
    sums = []
    for seed in range(200):
        tokens, shift, place = candidates(np.random.default_rng(seed), TINY, labels, np.arange(20), vocab)
        assert (np.array(tokens)[np.array(place)] == labels).all()
        assert len(set(tokens.tolist())) == len(tokens)
        sums.append(np.exp(logits[np.array(tokens)] + np.array(shift)).sum())
    assert np.mean(sums) == pytest.approx(np.exp(logits).sum(), rel=0.02)


def work_folder(folder, samples):
    folder.mkdir()
    append_samples(folder / "answers.jsonl", samples)
    return folder


def test_a_folder_without_answers_is_refused(llama, tmp_path):
    with pytest.raises(RequestError, match="holds no answers"):
        train(llama[0], TINY, tmp_path)


def test_a_killed_run_resumes_to_the_same_weights(llama, samples, tmp_path):
    target, _ = llama
    unbroken, parts = work_folder(tmp_path / "whole", samples), work_folder(tmp_path / "parts", samples)
    whole, _, _ = train(target, TINY, unbroken, report=lambda _: None, save_every=10)

    class Killed(Exception):
        pass

    def kill(message):
        raise Killed

    with pytest.raises(Killed):
        train(target, TINY, parts, report=kill, save_every=10)
    resumed, _, _ = train(target, TINY, parts, report=lambda _: None, save_every=10)
    assert mx.array_equal(whole.fc.weight, resumed.fc.weight)
    assert mx.array_equal(whole.layers[1].mlp.up_proj.weight, resumed.layers[1].mlp.up_proj.weight)
    assert load_config(parts / "training.json") == TINY


def test_validation_keeps_the_best_and_ends_a_training_that_gets_no_better(llama, samples, tmp_path):
    target, _ = llama
    config = replace(TINY, steps=40, validate_every=4, patience=2)
    heard, seen = [], []

    def validate(drafter):
        run = generate(target, llama[1], samples[0].prompt, draft_model=drafter, block_size=8, max_tokens=8)
        assert run.stats.rounds > 0 and run.tokens == samples[0].answer[:8]
        seen.append(drafter.model.fc.weight)
        return [2.0, 2.5, 2.5, 1.0][len(seen) - 1]

    whole = work_folder(tmp_path / "whole", samples)
    model, _, scales = train(target, config, whole, report=heard.append, validate=validate)
    assert len(seen) == 4 and "stopped at step 16: no better than 2.500 for 2 validations" in heard[-1]
    best = dict(trained_weights(whole))
    columns = mx.repeat(mx.array(scales), target.hidden_size)
    assert mx.allclose(best["fc.weight"] * columns, seen[1], rtol=1e-5)
    assert not mx.array_equal(best["fc.weight"], model.fc.weight)
    rows = [json.loads(line) for line in (whole / "log.jsonl").read_text().splitlines()]
    assert [r["mean_accepted_length"] for r in rows] == [2.0, 2.5, 2.5, 1.0]

    parts, calls = work_folder(tmp_path / "parts", samples), len(seen)

    class Killed(Exception):
        pass

    def killed(message):
        raise Killed

    seen.clear()
    for _ in range(3):  # killed after every validation, and run again
        with pytest.raises(Killed):
            train(target, config, parts, report=killed, validate=validate)
    again, _, _ = train(target, config, parts, report=heard.append, validate=validate)
    assert len(seen) == calls and mx.array_equal(again.fc.weight, model.fc.weight)
    assert mx.array_equal(dict(trained_weights(parts))["fc.weight"], best["fc.weight"])


def test_a_drafter_overfits_a_few_answers_of_a_random_target(llama, samples, tmp_path):
    """Mean accepted length of at least 0.9 x block, by the real loop."""
    target, tokenizer = llama
    config = replace(TINY, steps=300, learning_rate=4e-3, feature_noise=0.0, widths=(8,), targets="tokens", gamma=7.0)
    model, shape, scales = train(target, config, work_folder(tmp_path / "work", samples), report=lambda _: None)
    drafter = as_drafter(model, shape, scales, target)
    lengths, short = [], 0
    for sample in samples:
        run = generate(
            target, tokenizer, sample.prompt, draft_model=drafter, block_size=8, max_tokens=len(sample.answer)
        )
        assert run.tokens == sample.answer
        short += sum(n for rows, n in run.stats.block_sizes.items() if rows < 8)  # cut by the end of the text
        lengths += run.stats.acceptance_lengths
    assert len(lengths) >= 12 and short <= len(samples)
    assert sum(lengths) / len(lengths) >= 0.9 * 8


def test_hidden_states_beyond_the_bound_are_computed_when_they_are_drawn(chat, samples, tmp_path):
    target, tokenizer = chat
    taps = (1, 3, 5, target.num_layers - 1)
    width = len(taps) * target.hidden_size * 2
    bound = (samples[0].rows + samples[1].rows + 1) * width
    whole = load_features(target, work_folder(tmp_path / "whole", samples), taps)
    some = load_features(target, work_folder(tmp_path / "some", samples), taps, bound)
    assert [place is None for place in some.places] == [False, False, True]
    assert (tmp_path / "some" / "features.f16").stat().st_size <= bound
    for i in range(3):
        assert np.array_equal(whole.of(i), some.of(i))

    prompts = [("chat", f"w{30 + i} w{40 + i}") for i in range(6)]
    for name, most in (("a", 10**9), ("b", 20 * width)):
        (tmp_path / name).mkdir()
        generate_answers(target, tokenizer, prompts, tmp_path / name, taps, max_tokens=5, most_bytes=most, report=print)
    assert (tmp_path / "b" / "features.f16").stat().st_size <= 20 * width
    kept, bounded = (load_features(target, tmp_path / name, taps, 0) for name in "ab")
    assert None not in kept.places and None in bounded.places and bounded.places[0] is not None
    for i in range(6):
        assert np.abs(kept.of(i).astype(np.float32) - bounded.of(i)).max() < 1e-2


def test_own_prompts_and_whether_they_think_are_recorded(chat, tmp_path):
    target, tokenizer = chat
    before = tokenizer.chat_template
    tokenizer.chat_template = TEMPLATE + "{% if enable_thinking is defined and not enable_thinking %} w23{% endif %}"
    path = tmp_path / "own.jsonl"
    talk = [
        {"role": "user", "content": "w30"},
        {"role": "assistant", "content": "w31"},
        {"role": "user", "content": "w32"},
    ]
    path.write_text(json.dumps({"prompt": "w40 w41", "task": "mine"}) + "\n\n" + json.dumps({"messages": talk}) + "\n")
    prompts = prompts_of(path)
    assert prompts == [("mine", "w40 w41"), ("own", talk)]
    work = tmp_path / "work"
    work.mkdir()
    generate_answers(target, tokenizer, prompts, work, (1,), max_tokens=3, thinking=False, report=print)
    found = {s.task: s.prompt for s in load_answers(work)}
    for name, messages in (("mine", [{"role": "user", "content": "w40 w41"}]), ("own", talk)):
        off, on = (
            list(tokenizer.apply_chat_template(messages, add_generation_prompt=True, enable_thinking=thinks))
            for thinks in (False, True)
        )
        assert found[name] == off != on
    assert thinking_of(work) == "off"
    with pytest.raises(RequestError, match="thinking off, not on"):
        generate_answers(target, tokenizer, prompts, work, (1,), max_tokens=3, thinking=True, report=print)
    tokenizer.chat_template = before
    for line in ("{", "[]", '{"messages": []}', '{"messages": [{"role": "assistant", "content": "x"}]}', "{}"):
        path.write_text('{"prompt": "w40"}\n' + line + "\n")
        with pytest.raises(RequestError, match="line 2"):
            prompts_of(path)


def test_a_trained_drafter_is_exported_and_drafts_better_than_its_start(llama, samples, tmp_path):
    target, tokenizer = llama
    config = replace(TINY, steps=250, learning_rate=4e-3, feature_noise=0.0)

    def taken(model, shape, scales, name):
        export_drafter(model, shape, scales, tmp_path / name, bits=None)
        drafter = load_drafter(tmp_path / name, target)
        rounds = accepted = 0
        for sample in samples:
            run = generate(target, tokenizer, sample.prompt, draft_model=drafter, block_size=8, max_tokens=40)
            assert run.tokens == sample.answer
            rounds += run.stats.rounds
            accepted += run.stats.accepted
        return rounds, accepted

    shape = drafter_config(config, target)
    start = DFlashModel(shape)
    start_from_target(start, shape, target, mx.array([samples[0].prompt]))
    work = work_folder(tmp_path / "work", samples)
    scales = tap_scales(load_features(target, work, (*config.taps, target.num_layers - 1)), 4)[:-1]
    rounds_before, _ = taken(start, shape, scales, "start")
    model, shape, scales = train(target, config, work, report=lambda _: None)
    rounds, accepted = taken(model, shape, scales, "trained")
    assert 0 < rounds < 0.6 * rounds_before
    assert accepted > 0


def test_training_goes_on_from_a_drafter_of_the_same_shape_only(llama, samples, tmp_path):
    target, _ = llama
    work = work_folder(tmp_path / "work", samples)
    trained, shape, scales = train(target, replace(TINY, steps=3), work, report=lambda _: None)
    weights = dict(tree_flatten(trained.parameters()))
    export_drafter(trained, shape, scales, tmp_path / "drafter", bits=None)
    for start in (tmp_path / "drafter", work / "checkpoint.safetensors"):
        again = dict(start_weights(start, shape, target, scales))
        assert again.keys() == weights.keys()
        assert all(mx.allclose(again[name], weights[name], atol=1e-6) for name in weights)
    assert mx.array_equal(again["fc.weight"], weights["fc.weight"])
    with pytest.raises(RequestError, match="makes one of"):
        start_weights(tmp_path / "drafter", replace(shape, mask_token_id=9), target, scales)


def test_a_quantized_drafter_comes_back_as_the_matrices_it_stands_for(llama):
    shape = replace(drafter_config(TINY, llama[0]), hidden_size=64, intermediate_size=64, head_dim=32)
    model = DFlashModel(shape)
    plain = dict(tree_flatten(model.parameters()))
    quantize_linears(model, 8, 64)
    again = unquantized(model)
    assert again.keys() == plain.keys()
    assert all(mx.abs(again[name] - plain[name]).max() <= mx.abs(plain[name]).max() / 100 for name in plain)
    assert not mx.array_equal(again["layers.0.mlp.up_proj.weight"], plain["layers.0.mlp.up_proj.weight"])


def test_an_8_bit_export_loads_and_keeps_fc_and_norms_unquantized(llama, samples, tmp_path):
    target, _ = llama
    shape = replace(drafter_config(TINY, target), hidden_size=64, intermediate_size=64, head_dim=32)
    model = DFlashModel(shape)
    export_drafter(model, shape, [1.0, 2.0, 3.0], tmp_path / "q", bits=8)
    config = json.loads((tmp_path / "q" / "config.json").read_text())
    names = set(mx.load(str(tmp_path / "q" / "model.safetensors")))
    assert config["quantization"] == {"group_size": 64, "bits": 8}
    assert "layers.0.self_attn.q_proj.scales" in names
    assert "fc.scales" not in names and "norm.scales" not in names


def test_held_out_prompts_are_not_training_prompts():
    training = {prompt.lower() for _, prompt in training_prompts(10**9, seed=0)}
    held_out = held_out_prompts()
    assert len(training) > 1000 and len(held_out) == 60
    assert not training & {prompt.lower() for _, prompt in held_out}
    subjects = " ".join(training)
    assert not any(prompt.lower().rstrip("?.") in subjects for _, prompt in held_out)
