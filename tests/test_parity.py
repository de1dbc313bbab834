"""Parity with the torch references, from the golden arrays of tiny pairs (tests/oracle says which proves what)."""

from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from mlx_dflash import generate, load, load_drafter
from mlx_dflash.accept import greedy

GOLDEN = Path(__file__).parent / "golden"
FAMILIES = sorted(p.name for p in GOLDEN.iterdir() if (p / "golden.npz").exists())
TOLERANCE = 1e-3
# torch goes through the delta rule in chunks, mlx-lm row by row, and the state carries the difference on
TOLERANCES = {"qwen3_5_moe": 2e-3}


class Pair:
    def __init__(self, family):
        self.tolerance = TOLERANCES.get(family, TOLERANCE)
        self.golden = dict(np.load(GOLDEN / family / "golden.npz"))
        self.target, self.tokenizer = load(GOLDEN / family / "target")
        self.drafter = load_drafter(GOLDEN / family / "draft", self.target)
        self.block = int(self.golden["block_size"])
        self.new_tokens = int(self.golden["new_tokens"])
        self.contexts = self.golden["contexts"].tolist()

    def drafted(self, run):
        """Tokens committed by each round that drafted; the Muse assistant ends with one that doesn't."""
        lengths, rows = self.golden[f"{run}_accept"], self.golden[f"{run}_vsize"]
        return lengths[rows > 1].tolist()

    def run(self, context, max_tokens, **options):
        prompt = self.golden[f"p{context}_ids"].tolist()
        return generate(
            self.target,
            self.tokenizer,
            prompt,
            draft_model=self.drafter,
            block_size=self.block,
            max_tokens=max_tokens,
            **options,
        )


@pytest.fixture(scope="module", params=FAMILIES)
def pair(request):
    return Pair(request.param)


def difference(array, golden):
    return np.abs(np.array(array.astype(mx.float32)) - golden).max()


def test_the_goldens_cover_the_dense_families():
    assert {"llama", "qwen3"} <= set(FAMILIES)


def test_taps_and_target_logits(pair):
    for context in pair.contexts:
        ids = mx.array(pair.golden[f"p{context}_ids"][None])
        logits, features = pair.target.forward(ids, pair.target.make_cache(), pair.drafter.taps)
        assert difference(features[0], pair.golden[f"p{context}_taps"]) < pair.tolerance
        assert difference(logits[0, -1], pair.golden[f"p{context}_logits"]) < pair.tolerance


@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_draft_logits_of_every_recorded_round(pair, chunk):
    """Replays each run from the recorded drafts and acceptance, with the prompt's taps fed in chunks."""
    seen = 0
    for context in pair.contexts:
        g = {k.removeprefix(f"p{context}_"): v for k, v in pair.golden.items() if k.startswith(f"p{context}_")}
        text = g["ids"].tolist() + g["tokens"].tolist()
        expected = dict(enumerate(g["dlogits"])) | {int(g["dlogits_last_round"]): g["dlogits_last"]}
        draft = pair.drafter.make_context()
        cache = pair.target.make_cache()
        known = 0
        full = [r for r in range(len(g["start"])) if g["vsize"][r] == pair.block]
        by_round = {full[i] if i < len(g["dlogits"]) else i: v for i, v in expected.items()}
        for r, start in enumerate(g["start"].tolist()):
            step = chunk if known == 0 else start - known
            for at in range(known, start, step):
                ids = mx.array([text[at : min(at + step, start)]])
                _, features = pair.target.forward(ids, cache, pair.drafter.taps)
                if f"round_taps_{r}" in g and known:
                    assert difference(features[0], g[f"round_taps_{r}"]) < pair.tolerance
                pair.drafter.append(features, draft)
            known = start
            rows = int(g["vsize"][r])
            if rows == 1:  # the Muse assistant drafts nothing for the last token
                continue
            drafts, logits = pair.drafter.draft(mx.array(text[start : start + 1], mx.uint32), rows, draft, greedy)
            assert drafts.tolist() == g["drafts"][r][: rows - 1].tolist()
            if r in by_round:
                assert difference(logits[0], by_round[r]) < pair.tolerance
                seen += 1
            assert draft.length == start
    assert seen >= 6


def test_tokens_and_accepted_lengths(pair):
    rounds = accepted = 0
    for context in pair.contexts:
        result = pair.run(context, pair.new_tokens)
        g = pair.golden
        assert result.tokens == g[f"p{context}_tokens"].tolist() == g[f"p{context}_greedy"].tolist()
        assert result.stats.acceptance_lengths == pair.drafted(f"p{context}")
        rows = [int(v) for v in g[f"p{context}_vsize"]]
        assert result.stats.block_sizes == {v: rows.count(v) for v in dict.fromkeys(rows)}
        rounds += result.stats.rounds
        accepted += result.stats.accepted
    assert rounds > 50 and accepted > 50


def test_truncated_runs(pair):
    keys = [k.split("_") for k in pair.golden if k.startswith("trunc_") and k.endswith("_tokens")]
    assert keys
    for _, context, limit, _ in keys:
        name = f"trunc_{context}_{limit}"
        result = pair.run(int(context), int(limit))
        assert result.tokens == pair.golden[f"{name}_tokens"].tolist()
        assert result.stats.acceptance_lengths == pair.drafted(name)
        assert sum(result.stats.block_sizes.values()) == len(pair.golden[f"{name}_vsize"])
        assert result.finish_reason == "length"


def test_stopped_runs(pair):
    key = next(k for k in pair.golden if k.startswith("stop_") and k.endswith("_id"))
    context = int(key.split("_")[1])
    result = pair.run(context, pair.new_tokens, stop=int(pair.golden[key]))
    assert result.tokens == pair.golden[f"stop_{context}_tokens"].tolist()
    assert result.stats.acceptance_lengths == pair.drafted(f"stop_{context}")
    assert result.finish_reason == "stop"


def test_nested_and_flat_rope_settings_give_the_same_llama(tmp_path):
    """transformers 5 nests `rope_parameters`; mlx-lm would silently use a default base."""
    import json
    import shutil

    source = GOLDEN / "llama" / "target"
    shutil.copytree(source, tmp_path / "nested")
    config = json.loads((source / "config.json").read_text())
    config["rope_parameters"] = {**config.pop("rope_scaling"), "rope_theta": config.pop("rope_theta")}
    (tmp_path / "nested" / "config.json").write_text(json.dumps(config))
    ids = mx.array([[5, 9, 200, 31, 7] * 10])
    flat, nested = load(source)[0], load(tmp_path / "nested")[0]
    assert mx.array_equal(flat.forward(ids, flat.make_cache())[0], nested.forward(ids, nested.make_cache())[0])
