"""The registry of pairs: what a name resolves to, and above all what it does not."""

import pytest
import tiny

from mlx_dflash import PairError, registry
from mlx_dflash.drafters.formats import OTHER_METHODS


@pytest.mark.parametrize(
    "name, drafter",
    [
        ("Qwen/Qwen3-4B", "z-lab/Qwen3-4B-DFlash-b16"),
        ("mlx-community/Qwen3-4B-4bit", "z-lab/Qwen3-4B-DFlash-b16"),
        ("mlx-community/Qwen3-8B-4bit-DWQ-053125", "z-lab/Qwen3-8B-DFlash-b16"),
        ("mlx-community/Qwen3.6-27B-4bit", "z-lab/Qwen3.6-27B-DFlash"),
        ("mlx-community/Qwen3.5-4B-MLX-8bit", "z-lab/Qwen3.5-4B-DFlash"),
        ("mlx-community/Qwen3.6-35B-A3B-mxfp4", "z-lab/Qwen3.6-35B-A3B-DFlash"),
        ("mlx-community/gemma-4-31b-it-4bit", "z-lab/gemma-4-31B-it-DFlash"),
        ("mlx-community/gpt-oss-20b-MXFP4-Q8", "z-lab/gpt-oss-20b-DFlash"),
        ("mlx-community/Meta-Llama-3.1-8B-Instruct-bf16", "z-lab/LLaMA3.1-8B-Instruct-DFlash-UltraChat"),
        ("mlx-community/Muse-Glimmer-30B-OptiQ-4bit", "meta-models/Muse-Glimmer-30B-assistant"),
    ],
)
def test_a_target_resolves_at_any_quantization(name, drafter):
    assert registry.pair_of(name).drafter == drafter


@pytest.mark.parametrize(
    "name",
    [
        "Qwen/Qwen3-4B-Base",
        "Qwen/Qwen3-4B-Instruct-2507",
        "mlx-community/Qwen3-4B-Instruct-2507-4bit",
        "mlx-community/Qwen3-4B-Thinking-2507-4bit",
        "mlx-community/Qwen3-4B",
        "mlx-community/gpt-oss-20b-reasoning-4bit",
        "mlx-community/Qwen3-4B-4bit-abliterated",
        "mlx-community/Qwen3.6-27B-12bit",
        "mlx-community/Llama-3.1-8B-4bit",
        "someone/Qwen3-4B-4bit",
        "Qwen3-4B",
        "",
    ],
)
def test_a_similar_name_is_another_model(name):
    assert registry.pair_of(name) is None


@pytest.mark.parametrize(
    "card, known",
    [
        ("library_name: mlx\nbase_model: Qwen/Qwen3-4B", True),
        ("library_name: mlx\nbase_model:\n- Qwen/Qwen3-4B", True),
        ("base_model: Qwen/Qwen3-4B\nbase_model_relation: quantized", True),
        ("library_name: mlx\nbase_model: Qwen/Qwen3-4B\nbase_model_relation: finetune", False),
        ("library_name: transformers\nbase_model: Qwen/Qwen3-4B", False),
        ("library_name: mlx\nbase_model:\n- Qwen/Qwen3-4B\n- Qwen/Qwen3-8B", False),
        ("library_name: mlx\nbase_model: someone/fine-tune", False),
        ("- no\n- mapping", False),
        ("base_model: [", False),
    ],
)
def test_a_local_quantization_is_told_by_its_card(tmp_path, card, known):
    (tmp_path / "README.md").write_text(f"---\n{card}\n---\n# A model\n")
    assert (registry.pair_of(str(tmp_path), tmp_path) is not None) is known


def test_a_folder_of_the_hubs_cache_is_told_by_its_path(tmp_path):
    folder = tmp_path / "models--mlx-community--Qwen3-8B-4bit" / "snapshots" / ("0" * 40)
    assert registry.pair_of(str(folder), folder).target == "Qwen/Qwen3-8B"


def test_every_pair_is_complete_and_no_name_means_two():
    names = [n.casefold() for pair in registry.pairs() for n in (pair.target, *pair.names)]
    assert len(names) == len(set(names)) and len(registry.pairs()) >= 17
    for pair in registry.pairs():
        assert pair.revision is None or registry.re.fullmatch("[0-9a-f]{40}", pair.revision)
        assert pair.layouts and pair.kv and pair.parameters > 1e9 and 1e8 < pair.drafter_parameters < 4e9
        assert not any(method in pair.drafter.lower() for method in OTHER_METHODS)
        for layout in pair.layouts:
            assert len(layout["target_layer_ids"]) in (5, 6, 8) and layout["block_size"] in (8, 10, 16)


def pair(**layout):
    known = registry.pairs()[0]
    return registry.Pair(**{**known.__dict__, "layouts": [layout]})


def test_the_drafters_config_is_checked():
    right = {"hidden_size": 48, "block_size": 8, "target_layer_ids": [1, 3, 5], "mask_token_id": None}
    registry.check_drafter(pair(**right), tiny.draft_folder())
    for key, value in (("target_layer_ids", [1, 3, 4]), ("mask_token_id", 298), ("block_size", 16)):
        with pytest.raises(PairError, match=f"{key} is .*, not .*--draft-model"):
            registry.check_drafter(pair(**{**right, key: value}), tiny.draft_folder())
