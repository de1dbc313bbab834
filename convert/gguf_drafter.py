"""A drafter's GGUF file -> a folder in z-lab's or Transformers' names, for both GGUF architectures.

`dflash` is llama.cpp's: `dflash.target_layers` counts one above the layer whose output is tapped, and the mask token is
the tokenizer's. `dflash-draft` (and `qwen35-dflash-draft`) is that of forks: its own keys under `.dflash.`, taps as in
z-lab's config. They name tensors differently and are not interchangeable.
"""

from pathlib import Path
from typing import Any

from mlx_dflash.errors import CheckpointError, UnsupportedError

from .decode import Tensors
from .gguf import ATTENTION, MLP, NORMS, QK_NORMS, quantization_of
from .gguf_file import GgufFile, Unpacked, shortest
from .gguf_target import write_tensors
from .source import Source, hash_files
from .writer import write_json

TOP = {
    "fc": "fc",
    "dflash_fc": "fc",
    "dflash.fc": "fc",
    "enc.output_norm": "hidden_norm",
    "dflash_hidden_norm": "hidden_norm",
    "dflash.hidden_norm": "hidden_norm",
    "output_norm": "norm",
    "selector_hidden": "candidate_selector.hidden_projection",
}
CODEBOOKS = {"selector_predecessor", "selector_successor"}
LAYER = ATTENTION | QK_NORMS | MLP | NORMS
LAYER |= {"post_attention_norm": "post_attention_layernorm"}
LAYER |= {"attn_conv_proj": "attention_conv.kernel_projection", "ffn_conv_proj": "mlp_conv.kernel_projection"}
BASES = {"attn_conv_base": "attention_conv.base_kernel", "ffn_conv_base": "mlp_conv.base_kernel"}
FORKS = ("dflash-draft", "qwen35-dflash-draft")
MUSE_VOCABULARY = 202048
GEOMETRY = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
SCALES = ("input_embedding_scale", "output_multiplier", "final_logit_softcapping")


def unpack_drafter(source: Source, scratch: Path) -> Unpacked:
    """Write the folder into `scratch`. Raises UnsupportedError for another architecture, method or tensor."""
    file = GgufFile(source.path)
    if file.architecture not in ("dflash", *FORKS):
        raise UnsupportedError(
            f"{source.path} has GGUF architecture {file.architecture!r}, which is no DFlash drafter; known are dflash, "
            f"{', '.join(FORKS)}"
        )
    other = ("dspark", "markov", "confidence", "log_snr")
    if foreign := [key for key in file.reader.fields if any(word in key for word in other)]:
        raise UnsupportedError(f"{source.path} has {foreign[0]}, which belongs to DSpark; only DFlash is supported")
    source.hashes = hash_files(file.paths)
    scratch.mkdir(parents=True, exist_ok=True)
    unpacked = Unpacked(scratch)
    shapes = write_tensors(file, scratch, unpacked, lambda name, parts: place(file, name, parts))
    config = drafter_config(file, unpacked)
    if (layout := quantization_of(shapes)) is not None:
        config["quantization"] = layout
    write_json(scratch / "config.json", config)
    return unpacked


def place(file: GgufFile, name: str, parts: Tensors) -> Tensors:
    path, _, leaf = name.rpartition(".")
    if path in CODEBOOKS:
        return {f"candidate_selector.{path.removeprefix('selector_')}_codebook": whole(parts)}
    if path in TOP and leaf == "weight":
        module = TOP[path]
    else:
        pieces = name.split(".")
        if pieces[0] != "blk" or len(pieces) not in (3, 4):
            raise UnsupportedError(f"{file.path}: the tensor {name!r} has no place in a DFlash drafter")
        if pieces[2] in BASES:
            return {f"layers.{pieces[1]}.{BASES[pieces[2]]}": whole(parts)}
        if pieces[2] not in LAYER or pieces[-1] != "weight":
            raise UnsupportedError(f"{file.path}: the tensor {name!r} has no place in a DFlash drafter")
        module = f"layers.{pieces[1]}.{LAYER[pieces[2]]}"
    return {f"{module}.{leaf}": value for leaf, value in parts.items()}


def whole(parts: Tensors) -> Any:
    """A parameter that is no module's weight can't be packed: unpack it."""
    if "scales" not in parts:
        return parts["weight"]
    import mlx.core as mx

    bits = parts["weight"].shape[-1] // parts["scales"].shape[-1]
    return mx.dequantize(parts["weight"], parts["scales"], parts["biases"], group_size=32, bits=bits)


def drafter_config(file: GgufFile, unpacked: Unpacked) -> dict[str, Any]:
    need, own = file.need_own, file.own
    fork = file.architecture in FORKS
    if fork:
        taps = [int(i) for i in need("dflash.target_layer_ids")]
        block, mask = int(need("dflash.block_size")), int(need("dflash.mask_token_id"))
    else:
        taps = [int(i) - 1 for i in need("target_layers")]
        block, mask = int(need("block_size")), int(file.need("tokenizer.ggml.mask_token_id"))
    layers, heads = int(need("block_count")), int(need("attention.head_count"))
    vocab = own("vocab_size") or len(file.get("tokenizer.ggml.tokens") or [])
    if not vocab:
        raise CheckpointError(f"{file.path} has neither a vocab_size nor a tokenizer; give the Hugging Face release")
    config: dict[str, Any] = {
        "hidden_size": int(need("embedding_length")),
        "intermediate_size": int(need("feed_forward_length")),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": int(own("attention.head_count_kv", heads)),
        "head_dim": int(need("attention.key_length")),
        "rms_norm_eps": shortest(need("attention.layer_norm_rms_epsilon")),
        "rope_theta": shortest(need("rope.freq_base")),
        "max_position_embeddings": int(own("context_length", 4096)),
        "vocab_size": int(vocab),
        "block_size": block,
        "layer_types": layer_types(file, layers),
    }
    if (window := own("attention.sliding_window")) is not None:
        config |= {"sliding_window": int(window), "use_sliding_window": True}
    if (kind := own("rope.scaling.type", "none")) != "none":
        raise UnsupportedError(
            f"{file.path} has RoPE scaling {kind!r} of which it says too little; give another release"
        )
    config |= {key: int(own(key)) for key in GEOMETRY if own(key) is not None}
    config |= {key: shortest(own(key)) for key in SCALES if own(key) is not None}
    causal = own("attention.causal")
    all_slide = set(config["layer_types"]) == {"sliding_attention"}
    if not fork and causal is None and vocab == MUSE_VOCABULARY and all_slide:
        unpacked.notes.append("written as Transformers' Muse assistant, by its vocabulary and windows")
        config.pop("use_sliding_window")
        return config | {"model_type": "muse_glimmer_assistant", "mask_token_id": mask, "target_layer_ids": taps}
    if causal is not None:
        config["is_causal"] = bool(causal)
    dflash2 = any(key in config for key in GEOMETRY)
    return config | {
        "model_type": "qwen3",
        "architectures": ["DFlash2DraftModel" if dflash2 else "DFlashDraftModel"],
        "dflash_config": {"mask_token_id": mask, "target_layer_ids": taps},
    }


def layer_types(file: GgufFile, layers: int) -> list[str]:
    if file.own("attention.sliding_window") is None:
        return ["full_attention"] * layers
    pattern = file.own("attention.sliding_window_pattern")
    if not isinstance(pattern, list) or len(pattern) != layers:
        raise CheckpointError(f"{file.path} has a sliding window and no pattern that says which layers; give another")
    return ["sliding_attention" if slides else "full_attention" for slides in pattern]
