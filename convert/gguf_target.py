"""A target's GGUF file -> a folder in Hugging Face's names: tensors, config, tokenizer and chat template.

Undone here: llama.cpp's row order of q and k (Llama, Muse Glimmer), Muse's norms with 1 added and its constant q and k
norms, Llama 3's frequencies stored as a tensor. Known architectures: llama, qwen3, qwen3moe, muse-glimmer.
"""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_dflash.errors import CheckpointError, UnsupportedError

from .decode import Tensors
from .gguf import ATTENTION, MLP, NORMS, QK_NORMS, TOP_NAMES, Metadata, convert_tokenizer, quantization_of, unpermute
from .gguf_file import GgufFile, Unpacked, groups, unpack_tensor
from .source import Source, hash_files
from .writer import write_json, write_weights

PART_BYTES = 1_000_000_000  # tensors unpacked at a time, as fp32
EXPERTS = {f"ffn_{part}_exps": f"mlp.switch_mlp.{part}_proj" for part in ("gate", "up", "down")}
EXPERTS |= {"ffn_gate_inp": "mlp.gate"}
MUSE = {"attn_gate": "self_attn.gate_proj", "attn_norm": "input_layernorm", "ffn_norm": "pre_feedforward_layernorm"}
MUSE |= {"post_attention_norm": "post_attention_layernorm", "post_ffw_norm": "post_feedforward_layernorm"}
LAYERS = {
    "llama": ATTENTION | QK_NORMS | MLP | NORMS,
    "qwen3": ATTENTION | QK_NORMS | MLP | NORMS,
    "qwen3moe": ATTENTION | QK_NORMS | MLP | NORMS | EXPERTS,
    "muse-glimmer": ATTENTION | QK_NORMS | MLP | MUSE,
}
PERMUTED = ("llama", "muse-glimmer")


def unpack_target(source: Source, scratch: Path) -> Unpacked:
    """Write the folder into `scratch`. Raises UnsupportedError for another architecture or an unknown tensor."""
    file = GgufFile(source.path)
    arch = file.architecture
    if "dflash" in arch:
        raise CheckpointError(f"{source.path} is a DFlash drafter, not a target; convert it as a drafter")
    if arch == "clip":
        raise UnsupportedError(f"{source.path} is a vision tower (mmproj); give the text model's .gguf file")
    if arch not in LAYERS:
        raise UnsupportedError(
            f"{source.path} has GGUF architecture {arch!r}; known are {', '.join(LAYERS)}; give another release"
        )
    source.hashes = hash_files([source.path])
    scratch.mkdir(parents=True, exist_ok=True)
    unpacked = Unpacked(scratch)
    shapes = write_tensors(file, scratch, unpacked, lambda name, part: place(file, name, part))
    config = target_config(file, "lm_head.weight" not in shapes)
    if (layout := quantization_of(shapes)) is not None:
        config["quantization"] = layout
    write_json(scratch / "config.json", config)
    write_tokenizer(file, scratch)
    return unpacked


def write_tensors(
    file: GgufFile, folder: Path, unpacked: Unpacked, place: Callable[[str, Tensors], Tensors]
) -> dict[str, mx.array]:
    """Unpack and write all tensors, part by part; returns name -> array without its data kept.

    place: (GGUF name, its parts) -> the same under the folder's names.
    """
    kinds: dict[str, int] = {}

    def note(kind: str) -> None:
        kinds[kind] = kinds.get(kind, 0) + 1

    shapes: dict[str, Any] = {}
    for number, part in enumerate(groups(list(file.tensors.items()), PART_BYTES)):
        tensors: Tensors = {}
        for name, tensor in part:
            found = place(name, unpack_tensor(tensor, note))
            if not found:
                unpacked.dropped[name] = "held by the config instead"
            tensors |= found
        shapes |= {name: Shape(value.shape) for name, value in tensors.items()}
        write_weights(folder, tensors, shard_bytes=2**62, stem=f"model-{number:05d}")
    for kind, count in kinds.items():
        unpacked.notes.append(
            f"{count} {kind} tensors are decoded and packed anew as affine 8-bit, groups of 32; MLX has no {kind}"
        )
    if len(kinds) == 0:
        unpacked.notes.append("every GGUF block is held exactly")
    return shapes


class Shape:
    """What is remembered of a written array."""

    def __init__(self, shape: tuple[int, ...]):
        self.shape = shape


def place(file: GgufFile, name: str, parts: Tensors) -> Tensors:
    """One tensor's parts under Hugging Face's name; {} for what the config says instead."""
    arch, pieces = file.architecture, name.split(".")
    if name == "rope_freqs.weight":
        return {}
    if pieces[0] != "blk":
        if pieces[0] not in TOP_NAMES or len(pieces) != 2:
            raise UnsupportedError(f"{file.path}: the tensor {name!r} has no place in a {arch} model")
        return {f"{TOP_NAMES[pieces[0]]}.{leaf}": value for leaf, value in parts.items()}
    _, layer, module, kind = pieces
    if module not in LAYERS[arch] or kind not in ("weight", "bias"):
        raise UnsupportedError(f"{file.path}: the tensor {name!r} has no place in a {arch} model")
    if arch == "muse-glimmer":
        if module in ("attn_q_norm", "attn_k_norm"):
            check_constant(file, name, parts["weight"], muse_scale(file) if module == "attn_q_norm" else 1.0)
            return {}
        if module.endswith("norm"):
            parts = {"weight": parts["weight"] - 1.0}
    if arch in PERMUTED and module in ("attn_q", "attn_k"):
        heads = int(file.need_own("attention.head_count" + ("_kv" if module == "attn_k" else "")))
        parts = {leaf: unpermute(value, heads) for leaf, value in parts.items()}
    path = f"model.layers.{layer}.{LAYERS[arch][module]}"
    if kind == "bias":
        return {f"{path}.bias": parts["weight"]}
    return {f"{path}.{leaf}": value for leaf, value in parts.items()}


def check_constant(file: GgufFile, name: str, values: mx.array, expected: float) -> None:
    if not bool(mx.all(values == expected)):
        raise UnsupportedError(f"{file.path}: {name} is not the constant {expected}, so it is another variant")


def muse_scale(file: GgufFile) -> float:
    """`qk_scale_factor`, which llama.cpp keeps as a constant q norm: fp32's shortest decimal."""
    values = np.asarray(file.tensors["blk.0.attn_q_norm.weight"].data).view(np.float32)
    return float(str(values[0]))


def target_config(file: GgufFile, tied: bool) -> dict[str, Any]:
    arch, need, own = file.architecture, file.need_own, file.own
    heads, width = int(need("attention.head_count")), int(need("embedding_length"))
    tokens = file.need("tokenizer.ggml.tokens")
    config: dict[str, Any] = {
        "model_type": {"qwen3moe": "qwen3_moe", "muse-glimmer": "muse_glimmer"}.get(arch, arch),
        "hidden_size": width,
        "intermediate_size": int(need("feed_forward_length")),
        "num_hidden_layers": int(need("block_count")),
        "num_attention_heads": heads,
        "num_key_value_heads": int(own("attention.head_count_kv", heads)),
        "head_dim": int(own("attention.key_length", width // heads)),
        "rms_norm_eps": shortest(need("attention.layer_norm_rms_epsilon")),
        "rope_theta": shortest(own("rope.freq_base", 10000.0)),
        "rope_scaling": rope_scaling(file),
        "max_position_embeddings": int(need("context_length")),
        "vocab_size": len(tokens),
        "tie_word_embeddings": tied,
    }
    for key, name in (("bos", "bos"), ("eos", "eos"), ("pad", "padding")):
        if (value := file.get(f"tokenizer.ggml.{name}_token_id")) is not None:
            config[f"{key}_token_id"] = int(value)
    if (turn := file.get("tokenizer.ggml.eot_token_id")) not in (None, config.get("eos_token_id")):
        config["eos_token_id"] = [config["eos_token_id"], int(turn)]
    if arch == "qwen3moe":
        config |= {
            "num_experts": int(need("expert_count")),
            "num_experts_per_tok": int(need("expert_used_count")),
            "moe_intermediate_size": int(need("expert_feed_forward_length")),
            "norm_topk_prob": True,  # what llama.cpp computes for this architecture
        }
    if arch == "muse-glimmer":
        pattern = need("attention.sliding_window_pattern")
        config |= {
            "layer_types": ["sliding_attention" if slides else "full_attention" for slides in pattern],
            "sliding_window": int(need("attention.sliding_window")),
            "final_logit_softcapping": shortest(need("final_logit_softcapping")),
            "output_multiplier": shortest(need("logit_scale")),
            "qk_scale_factor": muse_scale(file),
            "post_norm_eps": 1e-8,
        }
    return config


def shortest(value: Any) -> float:
    """A float32 field as the decimal that was written into it."""
    return float(str(np.float32(value)))


def rope_scaling(file: GgufFile) -> dict[str, Any] | None:
    kind = file.own("rope.scaling.type", "none")
    if (tensor := file.tensors.get("rope_freqs.weight")) is not None:
        return llama3_scaling(file, np.asarray(tensor.data).view(np.float32).reshape(-1))
    if kind == "none":
        return None
    factor, length = file.own("rope.scaling.factor"), file.own("rope.scaling.original_context_length")
    if kind == "linear" and factor:
        return {"rope_type": "linear", "factor": shortest(factor)}
    if kind == "yarn" and factor and length:
        return {
            "rope_type": "yarn",
            "factor": shortest(factor),
            "original_max_position_embeddings": int(length),
        }
    raise UnsupportedError(f"{file.path} has RoPE scaling {kind!r} ({factor}, {length}), which is not supported")


def llama3_scaling(file: GgufFile, factors: np.ndarray) -> dict[str, Any]:
    """Llama 3's settings whose factors on the periods are those of `rope_freqs` (llama.cpp, conversion/llama.py)."""
    dims, base = 2 * len(factors), float(file.own("rope.freq_base", 10000.0))
    factor = shortest(factors.max())
    scaling = {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    expected = []
    for i in range(0, dims, 2):
        length = 2 * math.pi * base ** (i / dims)
        if length < 8192 / 4.0:
            expected.append(1.0)
        elif length > 8192 / 1.0:
            expected.append(factor)
        else:
            smooth = (8192 / length - 1.0) / (4.0 - 1.0)
            expected.append(1 / ((1 - smooth) / factor + smooth))
    if not np.allclose(factors, np.array(expected, np.float32), rtol=1e-4):
        raise UnsupportedError(f"{file.path} has rope_freqs that are not Llama 3's; give the Hugging Face release")
    return scaling


def write_tokenizer(file: GgufFile, folder: Path) -> None:
    """tokenizer.json and tokenizer_config.json with the chat template, from the metadata.

    Byte-level vocabularies of SmolLM2 are ours (`gguf.py`); all others are built by transformers.
    """
    tokens = file.need("tokenizer.ggml.tokens")
    if (file.get("tokenizer.ggml.model"), file.get("tokenizer.ggml.pre")) == ("gpt2", "smollm"):
        fields = {k: file.get(f"tokenizer.ggml.{k}") for k in ("model", "pre", "tokens", "merges")}
        fields["token_type"] = np.array(file.need("tokenizer.ggml.token_type"))
        write_json(
            folder / "tokenizer.json",
            convert_tokenizer(Metadata({f"tokenizer.ggml.{k}": v for k, v in fields.items()})),
        )
    else:
        build_tokenizer(file).save(str(folder / "tokenizer.json"))
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    for key, name in {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown"}.items():
        if (index := file.get(f"tokenizer.ggml.{name}_token_id")) is not None:
            config[f"{key}_token"] = tokens[int(index)]
    for key in ("add_bos_token", "add_eos_token"):
        if (value := file.get(f"tokenizer.ggml.{key}")) is not None:
            config[key] = bool(value)
    if (template := file.get("tokenizer.chat_template")) is not None:
        config["chat_template"] = template
    config["model_max_length"] = int(file.need_own("context_length"))
    write_json(folder / "tokenizer_config.json", config)


def build_tokenizer(file: GgufFile) -> Any:
    try:
        from transformers.integrations.gguf.gguf_tokenizer_mapping import convert_gguf_tokenizer, get_gguf_tokenizer

        architecture, fields, _ = get_gguf_tokenizer(str(file.path))
        return convert_gguf_tokenizer(architecture, fields)[0]
    except (ImportError, ValueError, LookupError, TypeError, AttributeError, NotImplementedError) as e:
        kind = (file.get("tokenizer.ggml.model"), file.get("tokenizer.ggml.pre"))
        raise UnsupportedError(
            f"{file.path} has the tokenizer {kind}, which transformers can't rebuild ("
            f"{' '.join(str(e).split())[:120]}); give the Hugging Face release"
        ) from e
