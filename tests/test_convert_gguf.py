"""GGUF: every block type against the `gguf` package, whole targets and drafters written by its writer."""

import json
from types import SimpleNamespace

import mlx.core as mx
import numpy as np
import pytest
from mlx_dflash.convert.gguf import convert_gguf
from mlx_dflash.convert.gguf_file import EXACT, unpack_tensor
from mlx_dflash.convert.plan import Options
from mlx_dflash.convert.run import Request, convert_drafter, convert_target
from mlx_lm.models.rope_utils import Llama3RoPE
from tiny import byte_characters, copy_folder, draft_folder, target_folder, write_gguf

from mlx_dflash import CheckpointError, UnsupportedError, generate, load, load_drafter
from mlx_dflash.drafters.formats import read_layout

gguf = pytest.importorskip("gguf")
IDS = mx.array([[5, 9, 200, 31, 7, 120]])
Kind = gguf.GGMLQuantizationType


def raw_blocks(kind, rows=6, width=512):
    """Random bytes with scales that are numbers."""
    rng = np.random.default_rng(0)
    count, size = gguf.GGML_QUANT_SIZES[kind]
    blocks = rng.integers(0, 256, (rows * width // count, size), dtype=np.uint8)
    halves = {"Q4_1": [0, 2], "Q5_1": [0, 2], "Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208], "Q3_K": [108]}.get(
        kind.name, [0]
    )
    for at in halves:
        blocks[:, at : at + 2] = (rng.random((len(blocks), 1)) * 0.02).astype("<f2").view(np.uint8)
    return blocks.reshape(rows, -1)


def tensor_of(kind, raw, shape):
    return SimpleNamespace(tensor_type=kind, shape=list(reversed(shape)), data=raw, name="blk.0.x.weight")


@pytest.mark.parametrize("name", sorted(EXACT))
def test_blocks_that_affine_holds_are_exact(name):
    raw = raw_blocks(Kind[name])
    parts = unpack_tensor(tensor_of(Kind[name], raw, (6, 512)), note=pytest.fail)
    bits = parts["weight"].shape[-1] // parts["scales"].shape[-1]
    values = mx.dequantize(parts["weight"], parts["scales"], parts["biases"], group_size=32, bits=bits)
    assert np.array_equal(np.array(values), gguf.dequantize(raw, Kind[name]))


@pytest.mark.parametrize("name", ["Q6_K", "Q3_K"])
def test_other_blocks_are_packed_anew_and_named(name):
    raw, said = raw_blocks(Kind[name]), []
    parts = unpack_tensor(tensor_of(Kind[name], raw, (6, 512)), said.append)
    values = np.array(mx.dequantize(parts["weight"], parts["scales"], parts["biases"], group_size=32, bits=8))
    reference = gguf.dequantize(raw, Kind[name])
    steps = np.ptp(reference.reshape(-1, 32), axis=-1) / 255
    assert said == [name] and (np.abs(values - reference).reshape(-1, 32).max(-1) <= steps).all()


def test_a_demo_like_file_equals_the_demos_own_loader(tmp_path):
    write_gguf(tmp_path / "m.gguf")
    convert_gguf(tmp_path / "m.gguf", tmp_path / "demo")
    record = convert_target(Request(str(tmp_path / "m.gguf"), tmp_path / "out", Options()))
    ours, demo = (mx.load(str(tmp_path / f / "model.safetensors")) for f in ("out", "demo"))
    assert ours.keys() == demo.keys()
    assert all(ours[k].dtype == demo[k].dtype and mx.array_equal(ours[k], demo[k]) for k in demo)
    texts = [(tmp_path / f / "tokenizer.json").read_text() for f in ("out", "demo")]
    assert texts[0] == texts[1] and "every GGUF block is held exactly" in record["notes"]
    template = json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())["chat_template"]
    assert "<|im_start|>" in template


def permute(rows, heads):
    """llama.cpp's order of q and k rows (conversion/llama.py)."""
    return rows.reshape(heads, 2, rows.shape[0] // heads // 2, -1).swapaxes(1, 2).reshape(rows.shape)


def begin(path, arch, config, rope_theta):
    """A writer that knows what all architectures say of a model's shape."""
    w = gguf.GGUFWriter(str(path), arch)
    w.add_block_count(config["num_hidden_layers"])
    w.add_context_length(256)
    w.add_embedding_length(config["hidden_size"])
    w.add_feed_forward_length(config["intermediate_size"])
    w.add_head_count(config["num_attention_heads"])
    w.add_head_count_kv(config["num_key_value_heads"])
    w.add_key_length(config["head_dim"])
    w.add_layer_norm_rms_eps(config["rms_norm_eps"])
    w.add_rope_freq_base(rope_theta)
    return w


def write_target(path, family, arch, kind=None):
    """A golden target as llama.cpp's converter writes it, with a byte-level vocabulary of 300 tokens."""
    config = json.loads((target_folder(family) / "config.json").read_text())
    config |= config.get("text_config") or {}
    weights = {k: np.array(v) for k, v in mx.load(str(target_folder(family) / "model.safetensors")).items()}
    w = begin(path, arch, config, (config.get("rope_parameters") or config)["rope_theta"])
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
    tokens = [*byte_characters(), *(f"<{i}>" for i in range(43)), "ab"]
    w.add_tokenizer_model("gpt2")
    w.add_tokenizer_pre("smollm")
    w.add_token_list(tokens)
    w.add_token_types([1] * 256 + [3] * 43 + [1])
    w.add_token_merges(["a b"])
    w.add_eos_token_id(257)
    w.add_bos_token_id(256)
    for name, value in renamed(weights, config, arch).items():
        matrix = value.ndim == 2 and value.shape[-1] % 32 == 0 and kind is not None
        w.add_tensor(name, gguf.quantize(value, kind) if matrix else value, raw_dtype=kind if matrix else None)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()


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


def logits(folder):
    target, _ = load(folder)
    return target.forward(IDS, target.make_cache())[0]


ARCHITECTURES = {"llama": "llama", "qwen3": "qwen3", "qwen3_moe": "qwen3moe", "muse_glimmer": "muse-glimmer"}


LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 8192}


def reference(family, tmp_path):
    """The golden target; Llama's with the RoPE scaling of the released models, which GGUF holds as a tensor."""
    if family != "llama":
        return target_folder(family)
    return copy_folder(target_folder(family), tmp_path / "reference", config={"rope_scaling": LLAMA3})


@pytest.mark.parametrize("family", ARCHITECTURES)
def test_a_target_comes_back_from_gguf(family, tmp_path):
    source = reference(family, tmp_path)
    write_target(tmp_path / "m.gguf", family, ARCHITECTURES[family])
    convert_target(Request(str(tmp_path / "m.gguf"), tmp_path / "out", Options()))
    assert mx.abs(logits(tmp_path / "out") - logits(source)).max() < 1e-4
    if family == "llama":
        assert json.loads((tmp_path / "out" / "config.json").read_text())["rope_scaling"] == LLAMA3


def test_a_quantized_file_gives_the_packages_values(tmp_path):
    """Widths of a golden are no multiples of 32 but for attention's output: those matrices are Q8_0."""
    write_target(tmp_path / "m.gguf", "llama", "llama", Kind.Q8_0)
    convert_target(Request(str(tmp_path / "m.gguf"), tmp_path / "out", Options()))
    weights = mx.load(str(tmp_path / "out" / "model.safetensors"))
    path = "model.layers.0.self_attn.o_proj"
    got = mx.dequantize(*(weights[f"{path}.{p}"] for p in ("weight", "scales", "biases")), group_size=32, bits=8)
    source = np.array(mx.load(str(target_folder("llama") / "model.safetensors"))[f"{path}.weight"])
    assert np.array_equal(np.array(got), gguf.dequantize(gguf.quantize(source, Kind.Q8_0), Kind.Q8_0))
    assert mx.abs(logits(tmp_path / "out") - logits(reference("llama", tmp_path))).max() < 0.2


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
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()


@pytest.mark.parametrize("family, fork", [("qwen3", False), ("qwen3", True), ("qwen3_dflash2", False)])
def test_a_drafter_comes_back_from_gguf(family, fork, tmp_path):
    write_drafter(tmp_path / "d.gguf", family, fork)
    convert_drafter(Request(str(tmp_path / "d.gguf"), tmp_path / "out", Options()))
    target, tokenizer = load(target_folder(family))
    options = {"block_size": 8, "max_tokens": 16, "stop": []}
    runs = [
        generate(target, tokenizer, [5, 9, 200], draft_model=load_drafter(folder, target), **options)
        for folder in (draft_folder(family), tmp_path / "out")
    ]
    assert runs[0].stats.acceptance_lengths == runs[1].stats.acceptance_lengths and runs[1].stats.rounds > 0


def test_files_that_are_refused(tmp_path):
    def convert(path, kind=convert_target):
        kind(Request(str(path), tmp_path / "out", Options()))

    write_target(tmp_path / "m.gguf", "qwen3", "qwen3")
    whole = (tmp_path / "m.gguf").read_bytes()
    (tmp_path / "cut.gguf").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(CheckpointError, match="download it again"):
        convert(tmp_path / "cut.gguf")
    (tmp_path / "text.gguf").write_text("not a GGUF file")
    with pytest.raises(CheckpointError, match="no GGUF file"):
        convert(tmp_path / "text.gguf")
    write_target(tmp_path / "other.gguf", "qwen3", "mamba")
    with pytest.raises(UnsupportedError, match="'mamba'"):
        convert(tmp_path / "other.gguf")
    with pytest.raises(UnsupportedError, match="no DFlash drafter"):
        convert(tmp_path / "m.gguf", convert_drafter)
    write_drafter(tmp_path / "d.gguf", "qwen3", False)
    with pytest.raises(CheckpointError, match="convert it as a drafter"):
        convert(tmp_path / "d.gguf")
    assert not (tmp_path / "out").exists()
