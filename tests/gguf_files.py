"""Golden targets and drafters as .gguf files, laid out as llama.cpp's converter lays them out."""

import json

import gguf
import mlx.core as mx
import numpy as np
from mlx_lm.models.rope_utils import Llama3RoPE
from tiny import byte_characters, draft_folder, target_folder

from mlx_dflash.drafters.formats import read_layout

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 8192}


def permute(rows, heads):
    """llama.cpp's order of q and k rows (conversion/llama.py)."""
    return rows.reshape(heads, 2, rows.shape[0] // heads // 2, -1).swapaxes(1, 2).reshape(rows.shape)


def begin(path, arch, config, rope_theta, shard_tensors=0):
    """A writer that knows what all architectures say of a model's shape."""
    w = gguf.GGUFWriter(str(path), arch, split_max_tensors=shard_tensors)
    count = config["num_hidden_layers"]
    kinds = config.get("layer_types") or ["full_attention"] * count
    w.add_block_count(count)
    w.add_context_length(256)
    w.add_embedding_length(config["hidden_size"])
    inner = config.get("intermediate_size")
    if config.get("use_double_wide_mlp"):
        inner = [inner if i < count - config["num_kv_shared_layers"] else 2 * inner for i in range(count)]
    if inner is not None:
        w.add_feed_forward_length(inner)
    w.add_head_count(config["num_attention_heads"])
    full = config.get("num_global_key_value_heads")
    heads = config["num_key_value_heads"]
    w.add_head_count_kv(heads if full is None else [full if kind == "full_attention" else heads for kind in kinds])
    w.add_key_length(config.get("global_head_dim") or config["head_dim"])
    w.add_layer_norm_rms_eps(config["rms_norm_eps"])
    w.add_rope_freq_base(rope_theta)
    return w


def add_tokens(w, size=300, bos=256, eos=257):
    """A byte-level vocabulary with one merge."""
    w.add_tokenizer_model("gpt2")
    w.add_tokenizer_pre("smollm")
    w.add_token_list([*byte_characters(), *(f"<{i}>" for i in range(size - 257)), "ab"])
    w.add_token_types([1] * 256 + [3] * (size - 257) + [1])
    w.add_token_merges(["a b"])
    w.add_eos_token_id(eos)
    w.add_bos_token_id(bos)


def finish(w):
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()


def write_target(path, family, arch, kind=None, shard_tensors=0):
    """A golden target as llama.cpp's converter writes it, with a byte-level vocabulary of 300 tokens."""
    config = json.loads((target_folder(family) / "config.json").read_text())
    config |= config.get("text_config") or {}
    weights = {k: np.array(v) for k, v in mx.load(str(target_folder(family) / "model.safetensors")).items()}
    w = begin(path, arch, config, (config.get("rope_parameters") or config)["rope_theta"], shard_tensors)
    if arch == "muse-glimmer":
        w.add_sliding_window(config["sliding_window"])
        w.add_array(
            "muse-glimmer.attention.sliding_window_pattern", [k == "sliding_attention" for k in config["layer_types"]]
        )
        w.add_final_logit_softcapping(config["final_logit_softcapping"])
        w.add_logit_scale(config["output_multiplier"])
    if arch == "qwen3moe":
        w.add_expert_count(config.get("num_experts") or config["num_local_experts"])
        w.add_expert_used_count(config["num_experts_per_tok"])
        w.add_expert_feed_forward_length(config["moe_intermediate_size"])
    add_tokens(w)
    for name, value in renamed(weights, config, arch).items():
        matrix = value.ndim == 2 and value.shape[-1] % 32 == 0 and kind is not None
        w.add_tensor(name, gguf.quantize(value, kind) if matrix else value, raw_dtype=kind if matrix else None)
    finish(w)


LAYER = {"self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v"}
LAYER |= {"self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm"}
LAYER |= {
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
}
LAYER |= {"post_attention_layernorm": "ffn_norm", "mlp.gate": "ffn_gate_inp"}
MUSE = {"self_attn.gate_proj": "attn_gate", "post_attention_layernorm": "post_attention_norm"}
MUSE |= {"pre_feedforward_layernorm": "ffn_norm", "post_feedforward_layernorm": "post_ffw_norm"}


def llama3_factors(dims, base):
    """How much longer each period gets (mlx-lm's own module, as transformers')."""
    scaled = Llama3RoPE(dims, 4096, False, base, LLAMA3)._freqs
    return np.array(scaled, np.float32) / np.array([base ** (i / dims) for i in range(0, dims, 2)], np.float32)


def renamed(weights, config, arch):
    names = LAYER | (MUSE if arch == "muse-glimmer" else {})
    top = {"embed_tokens": "token_embd", "norm": "output_norm", "lm_head": "output"}
    out, experts = {}, {}
    for name, value in weights.items():
        path = name.removeprefix("model.").removeprefix("language_model.").removesuffix(".weight")
        if path.startswith("vision_"):
            continue  # a file of its own, mmproj
        if not path.startswith("layers."):
            out[f"{top[path]}.weight"] = value
            continue
        layer, module = path.removeprefix("layers.").split(".", 1)
        if module.startswith("mlp.experts."):
            _, _, expert, part = module.split(".")
            experts.setdefault(f"blk.{layer}.ffn_{part.removesuffix('_proj')}_exps.weight", {})[int(expert)] = value
            continue
        if module in ("self_attn.q_proj", "self_attn.k_proj") and arch in ("llama", "muse-glimmer"):
            value = permute(value, config["num_attention_heads" if "q_" in module else "num_key_value_heads"])
        if arch == "muse-glimmer" and module.endswith("layernorm"):
            value = value + np.float32(1)
        out[f"blk.{layer}.{names[module]}.weight"] = value
        if arch == "muse-glimmer" and module == "self_attn.q_proj":
            size = config["head_dim"]
            out[f"blk.{layer}.attn_q_norm.weight"] = np.full(size, config["qk_scale_factor"], np.float32)
            out[f"blk.{layer}.attn_k_norm.weight"] = np.ones(size, np.float32)
    if arch == "llama":
        out["rope_freqs.weight"] = llama3_factors(config["head_dim"], config["rope_theta"])
    return out | {name: np.stack([found[i] for i in range(len(found))]) for name, found in experts.items()}


def write_drafter(path, family, fork):
    """A golden z-lab drafter in either GGUF architecture."""
    config = json.loads((draft_folder(family) / "config.json").read_text())
    arch = "dflash-draft" if fork else "dflash"
    layout = read_layout(config, "config.json")
    w = begin(path, arch, config, layout.config.rope_theta)
    w.add_uint32(f"{arch}.vocab_size", 300)
    taps, mask = list(layout.config.target_layer_ids), layout.config.mask_token_id
    if fork:
        w.add_uint32(f"{arch}.dflash.block_size", layout.config.block_size)
        w.add_uint32(f"{arch}.dflash.mask_token_id", mask)
        w.add_array(f"{arch}.dflash.target_layer_ids", taps)
    else:
        w.add_uint32("dflash.block_size", layout.config.block_size)
        w.add_uint32("tokenizer.ggml.mask_token_id", mask)
        w.add_array("dflash.target_layers", [tap + 1 for tap in taps])
    if layout.config.dflash2 is not None:
        nested = config | (config.get("dflash_config") or {})
        for key in ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k"):
            w.add_uint32(f"dflash.{key}", nested[key])
    layer = LAYER | {
        "attention_conv.kernel_projection": "attn_conv_proj",
        "mlp_conv.kernel_projection": "ffn_conv_proj",
    }
    if fork:
        layer |= {"post_attention_layernorm": "post_attention_norm"}
    top = {"fc": "fc", "hidden_norm": "enc.output_norm", "norm": "output_norm"}
    top |= {"fc": "dflash_fc", "hidden_norm": "dflash_hidden_norm"} if fork else {}
    selector = {"hidden_projection": "selector_hidden", "predecessor_codebook": "selector_predecessor"}
    selector |= {"successor_codebook": "selector_successor"}
    for name, value in mx.load(str(draft_folder(family) / "model.safetensors")).items():
        path_ = layout.rename(name).removesuffix(".weight")
        if path_.endswith("base_kernel"):
            _, index, module, _ = path_.split(".")
            new = f"blk.{index}." + {"attention_conv": "attn_conv_base", "mlp_conv": "ffn_conv_base"}[module]
        elif path_.startswith("layers."):
            _, index, module = path_.split(".", 2)
            new = f"blk.{index}.{layer[module]}.weight"
        else:
            leaf = path_.removeprefix("candidate_selector.")
            new = (selector[leaf] if leaf != path_ else top[path_]) + ".weight"
        w.add_tensor(new, np.array(value))
    finish(w)
