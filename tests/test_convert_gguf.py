"""GGUF: every block type against the `gguf` package, whole targets and drafters written by its writer."""

import json
from types import SimpleNamespace

import gguf
import mlx.core as mx
import numpy as np
import pytest
from gguf_families import write_family
from gguf_files import LLAMA3, finish, write_drafter, write_target
from mlx_dflash.convert.gguf import convert_gguf
from mlx_dflash.convert.gguf_file import EXACT, unpack_tensor
from mlx_dflash.convert.gguf_target import FAMILIES
from mlx_dflash.convert.plan import Options
from mlx_dflash.convert.run import Request, convert_drafter, convert_target
from tiny import copy_folder, draft_folder, target_folder, write_gguf

from mlx_dflash import CheckpointError, UnsupportedError, generate, load, load_drafter

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


def logits(folder):
    target, _ = load(folder)
    return target.forward(IDS, target.make_cache())[0]


ARCHITECTURES = {"llama": "llama", "qwen3": "qwen3", "qwen3_moe": "qwen3moe", "muse_glimmer": "muse-glimmer"}


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


FURTHER = ("gpt_oss_notrunc", "qwen3_5", "qwen3_5_moe", "gemma4", "gemma4_e", "gemma4_moe")


@pytest.mark.parametrize("family", FURTHER)
def test_a_target_of_a_further_family_comes_back_from_gguf(family, tmp_path):
    write_family(tmp_path / "m.gguf", family)
    record = convert_target(Request(str(tmp_path / "m.gguf"), tmp_path / "out", Options()))
    assert mx.abs(logits(tmp_path / "out") - logits(target_folder(family))).max() < 1e-4
    assert set(record["dropped"].values()) <= {"held by the config instead", "mlx-lm's model does not use it"}
    if family == "gpt_oss_notrunc":
        layout = json.loads((tmp_path / "out" / "config.json").read_text())["quantization"]
        assert layout["mode"] == "mxfp4" and record["quantized_modules"] == 18  # three of experts in six layers
    again = convert_target(Request(str(tmp_path / "out"), tmp_path / "again", Options()))
    assert again["files"] == record["files"]


def rounded(weights):
    """What Q8_0 makes of every matrix whose rows have whole blocks."""

    def block(name, value):
        if value.ndim != 2 or value.shape[-1] % 32 or "visual" in name:
            return value
        return mx.array(gguf.dequantize(gguf.quantize(np.array(value), Kind.Q8_0), Kind.Q8_0))

    return {name: block(name, value) for name, value in weights.items()}


@pytest.mark.parametrize("family", ["qwen3_5", "gemma4_moe"])
def test_packed_rows_and_columns_go_where_the_values_go(family, tmp_path):
    write_family(tmp_path / "m.gguf", family, Kind.Q8_0)
    record = convert_target(Request(str(tmp_path / "m.gguf"), tmp_path / "out", Options()))
    assert record["quantized_modules"] > 0 and "every GGUF block is held exactly" in record["notes"]
    expected = copy_folder(target_folder(family), tmp_path / "rounded", tensors=rounded)
    assert mx.abs(logits(tmp_path / "out") - logits(expected)).max() < 1e-4


def test_mxfp4_blocks_are_exact():
    raw = np.random.default_rng(0).integers(0, 256, (6, 16, 17), np.uint8)
    raw[..., 0] = raw[..., 0] % 40 + 100  # exponents that fp32 holds with every code
    raw = raw.reshape(6, -1)
    parts = unpack_tensor(tensor_of(Kind.MXFP4, raw, (6, 512)), note=pytest.fail)
    values = mx.dequantize(parts["weight"], parts["scales"], group_size=32, bits=4, mode="mxfp4", dtype=mx.float32)
    assert np.array_equal(np.array(values), gguf.dequantize(raw, Kind.MXFP4))


PACKAGE = {name: arch for arch, name in gguf.MODEL_ARCH_NAMES.items()}
# Listed by the package for variants that are no target here, or held by the config.
LEFT_OUT = {"rope_freqs", "attn_rot_embd", "ffn_gate_up_exps"}
LEFT_OUT_OF_LLAMA = {"ffn_gate_inp", "ffn_gate_exps", "ffn_up_exps", "ffn_down_exps"}


@pytest.mark.parametrize("arch", sorted(FAMILIES.keys() & PACKAGE.keys()))
def test_names_are_those_of_the_gguf_package(arch):
    """Its map from Hugging Face's names to GGUF's is the inverse of ours, and none of its tensors is forgotten."""
    family, names = FAMILIES[arch], gguf.get_tensor_name_map(PACKAGE[arch], 1)
    listed = {gguf.TENSOR_NAMES[t].removeprefix("blk.{bid}.") for t in gguf.MODEL_TENSORS[PACKAGE[arch]]}
    for module, path in family.layers.items():
        hub_name = path.replace("switch_mlp", "experts").replace("experts.switch_glu", "experts")
        found = names.get_name(f"model.layers.0.{hub_name}")
        assert found == f"blk.0.{module}" or (found is None and module not in listed)
    assert all(names.get_name(path) == name for name, path in family.top.items())
    bare = {name.partition(".")[0] for name in family.bare}
    left_out = LEFT_OUT | (LEFT_OUT_OF_LLAMA if arch == "llama" else set())
    assert listed - family.layers.keys() - family.top.keys() - bare <= left_out


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


def test_a_file_in_parts_is_read_whole(tmp_path):
    write_target(tmp_path / "m.gguf", "qwen3", "qwen3")
    write_target(tmp_path / "p.gguf", "qwen3", "qwen3", shard_tensors=40)
    parts = sorted(tmp_path.glob("p-*.gguf"))
    assert len(parts) > 1
    records = {
        name: convert_target(Request(str(source), tmp_path / name, Options()))
        for name, source in (("whole", tmp_path / "m.gguf"), ("parts", parts[0]), ("last", parts[-1]))
    }
    assert records["whole"]["files"] == records["parts"]["files"] == records["last"]["files"]
    assert list(records["last"]["source"]["sha256"]) == [part.name for part in parts]
    parts[1].unlink()
    with pytest.raises(CheckpointError, match=parts[1].name):
        convert_target(Request(str(parts[0]), tmp_path / "out", Options()))


def test_an_adapter_is_refused_by_name(tmp_path):
    w = gguf.GGUFWriter(str(tmp_path / "a.gguf"), "llama")
    w.add_type("adapter")
    w.add_tensor("blk.0.attn_q.weight.lora_a", np.zeros((4, 8), np.float32))
    finish(w)
    with pytest.raises(UnsupportedError, match="LoRA adapter"):
        convert_target(Request(str(tmp_path / "a.gguf"), tmp_path / "out", Options()))


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
