"""Targets and drafters as folders in the hub's layout, and back into the torch references.

Knows the places where transformers writes something else than the hub holds.  Knows nothing of how weights came to be.
"""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import Mxfp4Config
from transformers.utils import logging

from .drafters import drafter_class, is_laguna, is_muse_assistant, is_speculators, wheel_embedding_scale
from .targets import TINY, VOCAB, TargetSpec, attention_kind, hub_rope, target_spec

logging.disable_progress_bar()


def save_target(target, spec: TargetSpec, folder: Path, eos: int, packed: dict[str, torch.Tensor]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    target.config.eos_token_id = target.config.get_text_config().eos_token_id = eos
    target.generation_config.eos_token_id = eos
    target.save_pretrained(folder)
    weights = folder / "model.safetensors"
    if type(target).__name__ == "Qwen3_5MoeForConditionalGeneration":
        # transformers 5 un-fuses the experts on save; the hub ships them fused, (E, 2I, H) and (E, H, I)
        fused = {k: v.contiguous() for k, v in target.state_dict().items() if ".mlp.experts." in k}
        tensors = {k: v for k, v in load_file(weights).items() if ".mlp.experts." not in k}
        save_file(tensors | fused, weights, metadata={"format": "pt"})
    if packed:
        plain = ("experts.gate_up_proj", "experts.down_proj")
        tensors = {k: v for k, v in load_file(weights).items() if not k.endswith(plain)}
        save_file(tensors | packed, weights, metadata={"format": "pt"})
    config = folder / "config.json"
    write_json(config, spec.hub(json.loads(config.read_text())))
    write_tokenizer(folder, eos)


def save_drafter(family: str, drafter, folder: Path, eos: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    drafter.config.eos_token_id = eos
    if is_muse_assistant(family):
        drafter.save_pretrained(folder)
        return
    if is_laguna(family):
        from .laguna import save_drafter

        save_drafter(drafter, folder)
        return
    if is_speculators(family):
        from .vllm_speculators import save_drafter

        save_drafter(drafter, folder)
        return
    config = hub_rope(drafter.config.to_dict())
    config |= {"architectures": [type(drafter).__name__], "dtype": "float32"}
    private = wheel_embedding_scale(family, config["hidden_size"])
    config["dflash_config"] = {k: v for k, v in config["dflash_config"].items() if k not in private}
    write_json(folder / "config.json", config)
    tensors = {k: v.contiguous() for k, v in drafter.state_dict().items()}
    for name in ("predecessor_codebook", "successor_codebook"):  # bare parameters in published files
        if (table := tensors.pop(f"candidate_selector.{name}.weight", None)) is not None:
            tensors[f"candidate_selector.{name}"] = table
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def write_tokenizer(folder: Path, eos: int) -> None:
    """One word a token: `w17` is 17."""
    words = {f"w{i}": i for i in range(2, VOCAB)}
    tokenizer = Tokenizer(models.WordLevel({"<pad>": 0, "<s>": 1, **words}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": f"w{eos}",
        "pad_token": "<pad>",
        "model_max_length": 4096,
        "clean_up_tokenization_spaces": False,
    }
    write_json(folder / "tokenizer_config.json", config)


def write_json(path: Path, value: dict) -> None:
    path.write_text(json.dumps(value, indent=1) + "\n")


def load_target(family: str, folder: Path):
    """The class comes from the family, everything else from the folder."""
    more = {"quantization_config": Mxfp4Config(dequantize=True)} if family.startswith("gpt_oss") else {}
    return _load(target_spec(family, TINY).model_class, folder, attention_kind(family), **more)


def load_drafter(family: str, folder: Path):
    if is_laguna(family):
        from .laguna import load_drafter

        return load_drafter(folder)
    if is_speculators(family):
        from .vllm_speculators import load_drafter

        return load_drafter(folder)
    drafter = _load(drafter_class(family), folder, "sdpa")
    if not is_muse_assistant(family):
        drafter.config.dflash_config |= wheel_embedding_scale(family, drafter.config.hidden_size)
    return drafter


def _load(model_class: type, folder: Path, attention: str, **more):
    model, info = model_class.from_pretrained(
        folder,
        dtype=torch.float32,
        attn_implementation=attention,
        local_files_only=True,
        output_loading_info=True,
        **more,
    )
    if info["missing_keys"] or info["unexpected_keys"] or info["mismatched_keys"]:
        raise ValueError(f"{folder} does not fit {model_class.__name__}: {info}")  # transformers only warns
    return model.eval().float().requires_grad_(False)
