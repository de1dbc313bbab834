"""GGUF target -> MLX folder, without changing a value.

Q4_1 blocks (32 weights of 4 bits, one fp16 scale, one fp16 minimum) are exactly MLX's affine 4-bit, group size 32,
and Q8_0 blocks (the embedding of such files) its 8-bit: `mx.load` repacks the integers and this module keeps scales
and minima, widened to fp32. Widening is what keeps the values exact: ``scale * q + minimum`` evaluated in fp16 would
round. Files of other block types are refused here.

Two things a GGUF file stores its own way are undone: llama.cpp permutes the rows of q and k for its rotary layout,
and the tokenizer lives in the metadata.
"""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx

from mlx_dflash.errors import CheckpointError, UnsupportedError

from .writer import staged, write_json

# llama.cpp's tensor names -> Hugging Face's, inside one decoder layer
ATTENTION = {"attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj"}
ATTENTION |= {"attn_output": "self_attn.o_proj"}
MLP = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
QK_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}  # not in Llama
NORMS = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
LAYER_NAMES = ATTENTION | MLP | NORMS
TOP_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
BLOCK = 32  # weights that share a scale in all blocks that MLX's affine holds
Q4_1 = 3  # general.file_type of a file whose matrices are Q4_1
CONTROL_TOKEN, USER_TOKEN = 3, 4  # tokenizer.ggml.token_type of special tokens, and of plain ones that stay whole


def convert_gguf(gguf: Path, folder: Path) -> None:
    """Write the MLX folder of a Llama-architecture Q4_1 GGUF; the folder appears whole or not at all.

    Raises CheckpointError for an unreadable file, UnsupportedError for another architecture or block type.
    """
    try:
        loaded: Any = mx.load(str(gguf), format="gguf", return_metadata=True)
    except (RuntimeError, ValueError) as e:
        raise CheckpointError(f"{gguf} can't be read as GGUF ({e}); download it again") from e
    tensors, fields = loaded[0], Metadata(loaded[1])
    if (architecture := fields.text("general.architecture")) != "llama":
        raise UnsupportedError(f"{gguf} has GGUF architecture {architecture!r}; only 'llama' is supported")
    if (kind := fields.integer("general.file_type")) != Q4_1:
        raise UnsupportedError(f"{gguf} has GGUF file type {kind}; only Q4_1 (3) maps onto MLX without loss")
    weights = convert_tensors(tensors, fields)
    config = convert_config(fields, tied="lm_head.weight" not in weights) | {"quantization": quantization_of(weights)}

    shutil.rmtree(folder, ignore_errors=True)  # what another version left half done
    with staged(folder, elsewhere="name another folder in MLX_DFLASH_CACHE") as staging:
        mx.save_safetensors(str(staging / "model.safetensors"), weights, {"format": "mlx"})
        write_json(staging / "config.json", config)
        write_json(staging / "tokenizer.json", convert_tokenizer(fields))
        write_json(staging / "tokenizer_config.json", convert_tokenizer_config(fields))


class Metadata:
    """The GGUF header's key-value pairs, read with the type the caller expects."""

    def __init__(self, fields: dict[str, Any]):
        self.fields = fields

    def __getitem__(self, key: str) -> Any:
        if key not in self.fields:
            raise CheckpointError(f"the GGUF file has no field {key!r}")
        return self.fields[key]

    def integer(self, key: str) -> int:
        return int(self[key].item())

    def number(self, key: str) -> float:
        return float(self[key].item())

    def text(self, key: str) -> str:
        return str(self[key])


def convert_tensors(tensors: dict[str, mx.array], fields: Metadata) -> dict[str, mx.array]:
    """Hugging Face names, un-permuted q and k, floats widened to fp32; packed weights stay as they are."""
    heads = {
        "attn_q": fields.integer("llama.attention.head_count"),
        "attn_k": fields.integer("llama.attention.head_count_kv"),
    }
    out = {}
    for name, value in tensors.items():
        parts = name.split(".")
        if parts[0] == "blk":
            _, layer, module, leaf = parts
            if module not in LAYER_NAMES:
                raise UnsupportedError(f"the GGUF tensor {name!r} has no place in a Llama model")
            if module in heads:
                value = unpermute(value, heads[module])
            target = f"model.layers.{layer}.{LAYER_NAMES[module]}.{leaf}"
        elif parts[0] in TOP_NAMES:
            target = f"{TOP_NAMES[parts[0]]}.{parts[1]}"
        else:
            raise UnsupportedError(f"the GGUF tensor {name!r} has no place in a Llama model")
        out[target] = value if value.dtype == mx.uint32 else value.astype(mx.float32)
    return out


def unpermute(rows: mx.array, heads: int) -> mx.array:
    """Undo llama.cpp's reordering of q/k output rows: (heads, d/2, 2) pairs back to (heads, 2, d/2) halves.

    Rows move whole, so it is exact on packed weights and their scales alike (llama.cpp, convert_hf_to_gguf.py).
    """
    n, *rest = rows.shape
    return rows.reshape(heads, n // heads // 2, 2, *rest).swapaxes(1, 2).reshape(n, *rest)


def convert_config(fields: Metadata, tied: bool) -> dict[str, Any]:
    heads, width = fields.integer("llama.attention.head_count"), fields.integer("llama.embedding_length")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "float32",
        "hidden_size": width,
        "intermediate_size": fields.integer("llama.feed_forward_length"),
        "num_hidden_layers": fields.integer("llama.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": fields.integer("llama.attention.head_count_kv"),
        "head_dim": width // heads,
        "rms_norm_eps": round(fields.number("llama.attention.layer_norm_rms_epsilon"), 12),
        "rope_theta": fields.number("llama.rope.freq_base"),
        "rope_scaling": None,
        "max_position_embeddings": fields.integer("llama.context_length"),
        "vocab_size": fields.integer("llama.vocab_size"),
        "tie_word_embeddings": tied,
        "bos_token_id": fields.integer("tokenizer.ggml.bos_token_id"),
        "eos_token_id": fields.integer("tokenizer.ggml.eos_token_id"),
        "pad_token_id": fields.integer("tokenizer.ggml.padding_token_id"),
    }


def quantization_of(weights: Mapping[str, Any]) -> dict[str, Any] | None:
    """mlx-lm's map for packed tensors of groups of 32, from the shapes of their weight and scales; None without any.

    Without biases it is mxfp4.
    """
    found: dict[str, dict[str, Any]] = {}
    for name, value in weights.items():
        if name.endswith(".scales"):
            path = name.removesuffix(".scales")
            bits = weights[f"{path}.weight"].shape[-1] * 32 // (value.shape[-1] * BLOCK)
            mode = {} if f"{path}.biases" in weights else {"mode": "mxfp4"}
            found[path] = {"group_size": BLOCK, "bits": bits, **mode}
    if not found:
        return None
    kinds = list(found.values())
    usual = max(kinds, key=kinds.count)
    return usual | {path: {"mode": "affine", **how} for path, how in found.items() if how != usual}


def convert_tokenizer(fields: Metadata) -> dict[str, Any]:
    """tokenizer.json of a byte-level BPE with the 'smollm' pre-tokenizer: single digits, then GPT-2's split."""
    if (kind := (fields.text("tokenizer.ggml.model"), fields.text("tokenizer.ggml.pre"))) != ("gpt2", "smollm"):
        raise UnsupportedError(f"the GGUF tokenizer {kind} is not supported; only ('gpt2', 'smollm') is")
    tokens = fields["tokenizer.ggml.tokens"]
    types = fields["tokenizer.ggml.token_type"].tolist()
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    whole = [(i, t == CONTROL_TOKEN) for i, t in enumerate(types) if t in (CONTROL_TOKEN, USER_TOKEN)]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": i, "content": tokens[i], **flags, "special": special} for i, special in whole],
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [{"type": "Digits", "individual_digits": True}, byte_level],
        },
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {token: i for i, token in enumerate(tokens)},
            "merges": fields["tokenizer.ggml.merges"],
        },
    }


def convert_tokenizer_config(fields: Metadata) -> dict[str, Any]:
    tokens = fields["tokenizer.ggml.tokens"]
    names = {"bos_token": "bos", "eos_token": "eos", "pad_token": "padding", "unk_token": "unknown"}
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **{key: tokens[fields.integer(f"tokenizer.ggml.{name}_token_id")] for key, name in names.items()},
        "chat_template": fields.text("tokenizer.chat_template"),
        "model_max_length": fields.integer("llama.context_length"),
        "clean_up_tokenization_spaces": False,
    }
