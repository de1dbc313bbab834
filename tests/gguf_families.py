"""Golden targets of gpt-oss, Qwen3.5 and Gemma 4 as .gguf files: names, orders and fields of llama.cpp's converter."""

import json
import re

import gguf
import mlx.core as mx
import numpy as np
from gguf_files import add_tokens, begin, finish
from tiny import target_folder

NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "post_attention_norm",
}
GPT_OSS = {"mlp.router": "ffn_gate_inp", "self_attn.sinks": "attn_sinks"}
QWEN = {f"linear_attn.in_proj_{a}": b for a, b in (("qkv", "attn_qkv"), ("z", "attn_gate"), ("b", "ssm_beta"))}
QWEN |= {"linear_attn.in_proj_a": "ssm_alpha", "linear_attn.norm": "ssm_norm", "linear_attn.out_proj": "ssm_out"}
QWEN |= {"mlp.gate": "ffn_gate_inp", "mlp.shared_expert_gate": "ffn_gate_inp_shexp"}
QWEN |= {f"mlp.shared_expert.{part}_proj": f"ffn_{part}_shexp" for part in ("gate", "up", "down")}
GEMMA = {
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
    "pre_feedforward_layernorm_2": "pre_ffw_norm_2",
    "post_feedforward_layernorm_1": "post_ffw_norm_1",
    "post_feedforward_layernorm_2": "post_ffw_norm_2",
    "router.proj": "ffn_gate_inp",
    "per_layer_input_gate": "inp_gate",
    "per_layer_projection": "proj",
    "post_per_layer_input_norm": "post_norm",
}
TOP = {"embed_tokens": "token_embd", "norm": "output_norm", "lm_head": "output"}
TOP |= {"embed_tokens_per_layer": "per_layer_token_embd", "per_layer_model_projection": "per_layer_model_proj"}
TOP |= {"per_layer_projection_norm": "per_layer_proj_norm"}


def write_family(path, family, kind=None):
    """kind: the block type of matrices whose width it divides; None: F32."""
    config = json.loads((target_folder(family) / "config.json").read_text())
    config |= config.get("text_config") or {}
    weights = {k: np.array(v) for k, v in mx.load(str(target_folder(family) / "model.safetensors")).items()}
    arch, add = {
        "gpt_oss_notrunc": ("gpt-oss", gpt_oss),
        "qwen3_5": ("qwen35", qwen35),
        "qwen3_5_moe": ("qwen35moe", qwen35),
        "gemma4": ("gemma4", gemma4),
        "gemma4_moe": ("gemma4", gemma4),
        "gemma4_e": ("gemma4", gemma4),
    }[family]
    rope = config.get("rope_parameters") or config
    w = begin(path, arch, config, rope.get("rope_theta") or rope["full_attention"]["rope_theta"])
    add_tokens(w, config["vocab_size"], config["bos_token_id"], config["eos_token_id"])
    tensors = {}
    for name, value in weights.items():
        short = re.sub(r"^(model\.)?(language_model\.)?", "", name)
        if short.startswith(("visual.", "vision_", "audio", "embed_vision", "embed_audio", "multi_modal")):
            continue  # a file of its own, mmproj
        if name.endswith("_scales"):
            continue  # beside their blocks
        if name.endswith("_blocks"):
            value = value, weights[name.replace("_blocks", "_scales")]
        match = re.fullmatch(r"layers\.(\d+)\.(.*)", short)
        if match is None:
            value = value + np.float32(1) if arch.startswith("qwen35") and short == "norm.weight" else value
            tensors[f"{TOP[short.removesuffix('.weight')]}.weight"] = value
        else:
            tensors |= {f"blk.{match[1]}.{own}": v for own, v in add(match[2], value, config).items()}
    fields(w, arch, config)
    if arch == "gemma4":
        share = config["rope_parameters"]["full_attention"]["partial_rotary_factor"]
        count = config["global_head_dim"] // 2
        tensors["rope_freqs.weight"] = np.where(np.arange(count) < share * count, 1, 1e30).astype(np.float32)
    for name, value in tensors.items():
        if isinstance(value, Blocks):
            w.add_tensor(name, value.data, raw_dtype=gguf.GGMLQuantizationType.MXFP4)
            continue
        packed = kind is not None and value.ndim == 2 and value.shape[-1] % 32 == 0 and "norm" not in name
        packed = packed and "conv" not in name
        w.add_tensor(name, gguf.quantize(value, kind) if packed else value, raw_dtype=kind if packed else None)
    finish(w)


def fields(w, arch, config):
    if arch == "gpt-oss":
        scaling = config["rope_scaling"]
        w.add_sliding_window(config["sliding_window"])
        w.add_expert_feed_forward_length(config["intermediate_size"])
        w.add_expert_count(config["num_local_experts"])
        w.add_expert_used_count(config["num_experts_per_tok"])
        w.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        w.add_rope_scaling_factor(scaling["factor"])
        w.add_rope_scaling_orig_ctx_len(scaling["original_max_position_embeddings"])
    elif arch == "gemma4":
        slides = [kind == "sliding_attention" for kind in config["layer_types"]]
        w.add_shared_kv_layers(config["num_kv_shared_layers"])
        w.add_embedding_length_per_layer_input(config["hidden_size_per_layer_input"])
        w.add_sliding_window(config["sliding_window"])
        w.add_sliding_window_pattern(slides)
        w.add_key_length_swa(config["head_dim"])
        w.add_final_logit_softcapping(config["final_logit_softcapping"])
        w.add_float32("gemma4.rope.freq_base_swa", config["rope_parameters"]["sliding_attention"]["rope_theta"])
        if config["num_experts"]:
            w.add_expert_count(config["num_experts"])
            w.add_expert_used_count(config["top_k_experts"])
            w.add_expert_feed_forward_length(config["moe_intermediate_size"])
    else:
        w.add_ssm_conv_kernel(config["linear_conv_kernel_dim"])
        w.add_ssm_state_size(config["linear_key_head_dim"])
        w.add_ssm_group_count(config["linear_num_key_heads"])
        w.add_ssm_time_step_rank(config["linear_num_value_heads"])
        w.add_ssm_inner_size(config["linear_value_head_dim"] * config["linear_num_value_heads"])
        w.add_full_attention_interval(4)
        w.add_rope_dimension_count(int(config["head_dim"] * config["rope_parameters"]["partial_rotary_factor"]))
        if "num_experts" in config:
            w.add_expert_count(config["num_experts"])
            w.add_expert_used_count(config["num_experts_per_tok"])
            w.add_expert_feed_forward_length(config["moe_intermediate_size"])
            w.add_expert_shared_feed_forward_length(config["shared_expert_intermediate_size"])


class Blocks:
    """MXFP4 blocks: a byte of exponent, then 16 of codes, low halves first."""

    def __init__(self, blocks, scales):
        codes = np.stack([blocks & 15, blocks >> 4], -1)  # in the order of the weights
        codes = codes.reshape(*blocks.shape[:-1], 32)
        halves = codes[..., :16] | (codes[..., 16:] << 4)
        rows = np.concatenate([scales[..., None], halves], -1)
        self.data = rows.reshape(*rows.shape[:-2], -1)


def gpt_oss(name, value, config):
    if name.endswith("_blocks"):
        blocks, scales = value
        if "down" in name:
            return {"ffn_down_exps.weight": Blocks(blocks, scales)}
        parts = {part: (blocks[:, i::2], scales[:, i::2]) for i, part in enumerate(("gate", "up"))}
        return {f"ffn_{part}_exps.weight": Blocks(*both) for part, both in parts.items()}
    if name == "mlp.experts.gate_up_proj_bias":
        return {"ffn_gate_exps.bias": value[..., ::2], "ffn_up_exps.bias": value[..., 1::2]}
    if name == "mlp.experts.down_proj_bias":
        return {"ffn_down_exps.bias": value}
    if name == "self_attn.sinks":
        return {"attn_sinks.weight": value}
    module, _, leaf = name.rpartition(".")
    return {f"{(NAMES | GPT_OSS)[module]}.{leaf}": value}


def tiled(value, config, dim, axis=0):
    """Value heads grouped by key head -> the first of every key head, then the second."""
    keys, values = config["linear_num_key_heads"], config["linear_num_value_heads"]
    shape = value.shape
    split = value.reshape(*shape[:axis], keys, values // keys, dim, *shape[axis + 1 :])
    return np.ascontiguousarray(split.swapaxes(axis, axis + 1)).reshape(shape)


def qwen35(name, value, config):
    dim, first = config["linear_value_head_dim"], 2 * config["linear_num_key_heads"] * config["linear_key_head_dim"]
    if name == "linear_attn.A_log":
        return {"ssm_a": tiled(-np.exp(value), config, 1)}
    if name == "linear_attn.dt_bias":
        return {"ssm_dt.bias": tiled(value, config, 1)}
    if name == "linear_attn.conv1d.weight":
        value = value.squeeze(1)
        return {"ssm_conv1d.weight": np.concatenate([value[:first], tiled(value[first:], config, dim)])}
    if name == "mlp.experts.down_proj":
        return {"ffn_down_exps.weight": value}
    if name == "mlp.experts.gate_up_proj":
        gate, up = np.split(value, 2, axis=1)
        return {"ffn_gate_exps.weight": gate, "ffn_up_exps.weight": up}
    module = name.removesuffix(".weight")
    if module == "linear_attn.in_proj_qkv":
        value = np.concatenate([value[:first], tiled(value[first:], config, dim)])
    elif module == "linear_attn.in_proj_z":
        value = tiled(value, config, dim)
    elif module in ("linear_attn.in_proj_a", "linear_attn.in_proj_b"):
        value = tiled(value, config, 1)
    elif module == "linear_attn.out_proj":
        value = tiled(value, config, dim, axis=1)
    elif module.endswith("norm") and module != "linear_attn.norm":
        value = value + np.float32(1)
    elif module == "mlp.shared_expert_gate":
        value = value.squeeze(0)
    return {f"{(NAMES | QWEN)[module]}.weight": value}


def gemma4(name, value, config):
    bare = {"layer_scalar": "layer_output_scale.weight", "router.scale": "ffn_gate_inp.scale"}
    bare |= {"router.per_expert_scale": "ffn_down_exps.scale", "experts.down_proj": "ffn_down_exps.weight"}
    bare |= {"experts.gate_up_proj": "ffn_gate_up_exps.weight"}
    if name in bare:
        return {bare[name]: value}
    return {f"{(NAMES | GEMMA)[name.removesuffix('.weight')]}.weight": value}
