"""Sources that other packages quantized, each held against its own definition: fp8, compressed-tensors, MXFP4."""

import json
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from mlx_dflash.convert.decode import decode
from mlx_dflash.convert.plan import Options
from mlx_dflash.convert.run import Request, convert_target
from mlx_lm.utils import load_model
from tiny import copy_folder, edit_json, target_folder

from mlx_dflash import CheckpointError, UnsupportedError, load
from mlx_dflash.checkpoint import hold_in_fp32

TORCH = Path(__file__).parent / "oracle" / "fp8.npz"
IDS = mx.array([[5, 9, 200, 31, 7, 120]])


def e4m3(byte):
    """The value of an OCP E4M3 byte: sign, 4 bits of exponent (bias 7), 3 of mantissa, no infinities."""
    sign, exponent, mantissa = -1 if byte & 128 else 1, byte >> 3 & 15, byte & 7
    if byte & 127 == 127:
        return float("nan")
    return sign * (mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7))


TABLE = np.array([e4m3(b) for b in range(256)], np.float32)
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


def to_e4m3(values):
    """The nearest E4M3 byte of each value."""
    codes = np.array([b for b in range(256) if b & 127 != 127], np.uint8)
    return codes[np.abs(values[..., None] - TABLE[codes]).argmin(-1)]


def write_safetensors(path, tensors):
    """name -> (dtype name, array); for dtypes that mlx has no array of."""
    header, data = {}, b""
    for name, (kind, array) in tensors.items():
        raw = np.ascontiguousarray(array).tobytes()
        header[name] = {"dtype": kind, "shape": list(array.shape), "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    head = json.dumps(header).encode()
    path.write_bytes(len(head).to_bytes(8, "little") + head + data)


def source_of(tmp_path, pack, quantization_config, family="llama"):
    """A golden target with its decoder matrices stored by `pack(name, values) -> (tensors, decoded values)`.

    Returns the folder, and another one with the decoded values in fp32.
    """
    golden = {k: np.array(v) for k, v in mx.load(str(target_folder(family) / "model.safetensors")).items()}
    stored, decoded = {}, {}
    for name, values in golden.items():
        if values.ndim == 2 and ".layers." in name:
            tensors, value = pack(name, values)
            stored |= tensors
            decoded[name] = mx.array(value)
        else:
            stored[name] = ("F32", values)
            decoded[name] = mx.array(values)
    folder = copy_folder(target_folder(family), tmp_path / "packed")
    write_safetensors(folder / "model.safetensors", stored)
    edit_json(folder / "config.json", {"quantization_config": quantization_config, "dtype": "float32"})
    return folder, copy_folder(target_folder(family), tmp_path / "decoded", tensors=lambda _: decoded)


def logits(folder):
    target, _ = load(folder)
    return target.forward(IDS, target.make_cache())[0]


def check(tmp_path, folder, decoded, tolerance=1e-4):
    record = convert_target(Request(str(folder), tmp_path / "out", Options()))
    assert mx.abs(logits(tmp_path / "out") - logits(decoded)).max() <= tolerance
    return record


def test_every_e4m3_byte():
    values = np.array(mx.from_fp8(mx.arange(256).astype(mx.uint8), mx.float32))
    finite = ~np.isnan(TABLE)
    assert np.array_equal(values[finite], TABLE[finite])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["block", "tensor", "row"])
def test_fp8_equals_what_torch_decodes(kind, dtype):
    """Bit for bit, against transformers' dequantizer (tests/oracle/fp8.py)."""
    golden = np.load(TORCH)
    block = {"block": [16, 16], "tensor": [32, 48], "row": [1, 48]}[kind]
    how = {"quant_method": "fp8", "weight_block_size": block}
    tensors = {"a.weight": mx.array(golden[f"{kind}_bytes"]), "a.weight_scale_inv": mx.array(golden[f"{kind}_scales"])}
    found = decode({"quantization_config": how, "dtype": dtype}, tensors, "x").tensors["a.weight"]
    if dtype == "float32":
        assert np.array_equal(np.array(found), golden[f"{kind}_fp32"])
    else:
        assert np.array_equal(np.array(found.view(mx.uint16)), golden[f"{kind}_bf16"])


def test_the_table_of_fp8_here_is_torchs():
    assert np.array_equal(TABLE, np.load(TORCH)["table"], equal_nan=True)


@pytest.mark.parametrize("scale_name", ["weight_scale_inv", "weight_scale"])
def test_fp8_with_a_scale_a_block(scale_name, tmp_path):
    """DeepSeek's and Qwen's layout: blocks at the edges are smaller than the others."""
    block = 32

    def pack(name, values):
        rows, width = (-(-n // block) for n in values.shape)
        scales = np.zeros((rows, width), np.float32)
        codes = np.zeros(values.shape, np.uint8)
        out = np.zeros_like(values)
        for i in range(rows):
            for j in range(width):
                tile = np.s_[i * block : (i + 1) * block, j * block : (j + 1) * block]
                scales[i, j] = np.abs(values[tile]).max() / 448
                codes[tile] = to_e4m3(values[tile] / scales[i, j])
                out[tile] = TABLE[codes[tile]] * scales[i, j]
        return {name: ("F8_E4M3", codes), name.replace("weight", scale_name): ("F32", scales)}, out

    config = {"quant_method": "fp8", "weight_block_size": [block, block], "activation_scheme": "dynamic"}
    folder, decoded = source_of(tmp_path, pack, config)
    record = check(tmp_path, folder, decoded)
    assert "decoded to float32" in record["notes"][0]


def test_fp8_with_a_scale_a_tensor(tmp_path):
    def pack(name, values):
        scale = np.array(np.abs(values).max() / 448, np.float32)
        codes = to_e4m3(values / scale)
        extra = {name.replace("weight", "input_scale"): ("F32", np.array(1.0, np.float32))}
        return {name: ("F8_E4M3", codes), name.replace("weight", "weight_scale"): ("F32", scale)} | extra, TABLE[
            codes
        ] * scale

    folder, decoded = source_of(tmp_path, pack, {"quant_method": "modelopt", "quant_algo": "FP8"})
    record = check(tmp_path, folder, decoded)
    assert any("input_scale" in name for name in record["dropped"])


def test_fp8_without_its_scales_is_refused(tmp_path):
    def pack(name, values):
        return {name: ("F8_E4M3", to_e4m3(values))}, values

    folder, _ = source_of(tmp_path, pack, {"quant_method": "fp8", "weight_block_size": [32, 32]})
    with pytest.raises(CheckpointError, match="scale_inv"):
        convert_target(Request(str(folder), tmp_path / "out", Options()))


def pack_fp8_by_row(name, values):
    scale = (np.abs(values).max(-1, keepdims=True) / 448).astype(np.float32)
    codes = to_e4m3(values / scale)
    return {name: ("F8_E4M3", codes), name.replace("weight", "weight_scale"): ("F32", scale)}, TABLE[codes] * scale


def test_compressed_tensors_fp8_with_a_scale_a_row(tmp_path):
    config = {"quant_method": "compressed-tensors", "format": "float-quantized"}
    folder, decoded = source_of(tmp_path, pack_fp8_by_row, config, "qwen3_moe")
    assert "fp8 tensors are decoded to float32" in check(tmp_path, folder, decoded)["notes"][0]


def integers(bits, per_row):
    """pack-quantized: unsigned words of `q + 2^(bits - 1)`, the lowest bits first; a scale a group or a row."""

    def pack(name, values):
        rows, width = values.shape
        if width % 32:
            return {name: ("F32", values)}, values
        group = width if per_row else 32
        values = values.reshape(rows, -1, group)
        scale = (np.abs(values).max(-1, keepdims=True) / (2 ** (bits - 1) - 1)).astype(np.float16)
        scale = scale.astype(np.float32)
        q = np.clip(np.round(values / scale), -(2 ** (bits - 1)), 2 ** (bits - 1) - 1).astype(np.int64)
        unsigned = (q + 2 ** (bits - 1)).reshape(rows, -1, 32 // bits).astype(np.uint64)
        words = (unsigned << (np.arange(32 // bits, dtype=np.uint64) * np.uint64(bits))).sum(-1)
        path = name.removesuffix("weight")
        tensors = {f"{path}weight_packed": ("I32", words.astype(np.uint32).view(np.int32))}
        tensors[f"{path}weight_scale"] = ("F16", scale[..., 0].astype(np.float16))
        tensors[f"{path}weight_shape"] = ("I64", np.array([rows, width]))
        return tensors, (q * scale).reshape(rows, width).astype(np.float32)

    return pack


def integer_config(bits):
    weights = {"num_bits": bits, "type": "int", "symmetric": True, "strategy": "group"}
    config = {"quant_method": "compressed-tensors", "format": "pack-quantized"}
    return config | {"config_groups": {"group_0": {"weights": weights}}}


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("per_row", [False, True])
def test_compressed_tensors_integers_are_held_exactly(bits, per_row, tmp_path):
    folder, decoded = source_of(tmp_path, integers(bits, per_row), integer_config(bits), "qwen3_5")
    record = check(tmp_path, folder, decoded)
    assert record["quantized_modules"] > 0 and "exactly" in record["notes"][0]


def nibbles(codes):
    """Two codes a byte, the first in the low half."""
    return codes[:, ::2] | (codes[:, 1::2] << 4)


def nearest(values, step):
    return np.abs(values[..., None] - E2M1 * np.where(step == 0, 1, step)[..., None]).argmin(-1).astype(np.uint8)


def mxfp4(name, values):
    """mxfp4-pack-quantized: a power of two for 32 weights, as its biased exponent."""
    rows, width = values.shape
    if width % 32:
        return {name: ("F32", values)}, values
    grouped = values.reshape(rows, -1, 32)
    exponent = np.floor(np.log2(np.abs(grouped).max(-1, keepdims=True))) - 2
    step = np.exp2(exponent).astype(np.float32)
    codes = nearest(grouped, step)
    tensors = {f"{name}_packed": ("U8", nibbles(codes.reshape(rows, width)))}
    tensors[f"{name}_scale"] = ("U8", (exponent[..., 0] + 127).astype(np.uint8))
    return tensors, (E2M1[codes] * step).reshape(rows, width)


def nvfp4(modelopt):
    """E4M3 scales for 16 weights; the scale of the tensor divides in compressed-tensors, multiplies in ModelOpt."""

    def pack(name, values):
        rows, width = values.shape
        whole = np.float32(448 * 6 / np.abs(values).max())
        grouped = values.reshape(rows, -1, 16)
        scale = to_e4m3(np.abs(grouped).max(-1) / 6 * whole)
        step = TABLE[scale][..., None] / whole
        codes = nearest(grouped, step)
        out = (E2M1[codes] * step).reshape(rows, width).astype(np.float32)
        packed, second = ("", "_scale_2") if modelopt else ("_packed", "_global_scale")
        tensors = {f"{name}{packed}": ("U8", nibbles(codes.reshape(rows, width)))}
        tensors[f"{name}_scale"] = ("F8_E4M3", scale)
        tensors[f"{name}{second}"] = ("F32", np.array(1 / whole if modelopt else [whole], np.float32))
        if modelopt:
            tensors[name.replace("weight", "input_scale")] = ("F32", np.array(0.5, np.float32))
        return tensors, out

    return pack


def nvfp4_config(modelopt):
    if modelopt:
        return {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]}
    return {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"}


@pytest.mark.parametrize("modelopt", [False, True], ids=["compressed-tensors", "ModelOpt"])
def test_nvfp4_is_decoded_and_says_so(modelopt, tmp_path):
    folder, decoded = source_of(tmp_path, nvfp4(modelopt), nvfp4_config(modelopt))
    record = check(tmp_path, folder, decoded)
    assert "nvfp4 tensors are decoded to float32" in record["notes"][0] and record["quantized_modules"] == 0


def test_modelopts_own_file_says_how_too(tmp_path):
    """hf_quant_config.json beside a config.json that says nothing of quantization."""
    folder, decoded = source_of(tmp_path, nvfp4(True), None)
    how = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP4", "group_size": 16}}
    (folder / "hf_quant_config.json").write_text(json.dumps(how))
    assert "nvfp4 tensors are decoded" in check(tmp_path, folder, decoded)["notes"][0]


def test_mxfp4_is_held_exactly(tmp_path):
    config = {"quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized"}
    folder, decoded = source_of(tmp_path, mxfp4, config, "qwen3_5")
    record = check(tmp_path, folder, decoded)
    assert "mxfp4 tensors are kept exactly" in record["notes"][0] and record["quantized_modules"] > 0


EXPERTS = {
    "int4": (integers(4, False), integer_config(4)),
    "mxfp4": (mxfp4, {"quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized"}),
    "nvfp4": (nvfp4(False), nvfp4_config(False)),
    "nvfp4 of ModelOpt": (nvfp4(True), nvfp4_config(True)),
}


WIDE = [(family, kind) for family in ("qwen3_moe", "qwen3_next") for kind in EXPERTS]


@pytest.mark.parametrize("family, kind", [*WIDE, ("laguna", "nvfp4"), ("laguna", "nvfp4 of ModelOpt")])
def test_packed_experts_are_held_exactly(family, kind, tmp_path):
    """One tensor an expert in the file, one for all in MLX; nvfp4 keeps each expert's scale of the tensor there."""
    packer, config = EXPERTS[kind]

    def pack(name, values):
        whole = values.shape[-1] % (16 if "nvfp4" in kind else 32) == 0
        return packer(name, values) if whole and ".experts." in name else ({name: ("F32", values)}, values)

    folder, decoded = source_of(tmp_path, pack, config, family)
    record = check(tmp_path, folder, decoded)
    weights = mx.load(str(tmp_path / "out" / "model.safetensors"))
    packed = [name for name in weights if name.endswith(".scales")]
    assert packed and all("switch_mlp" in name for name in packed) and "exactly" in record["notes"][0]
    stock, _ = load_model(tmp_path / "out")
    hold_in_fp32(stock)
    if family != "laguna":  # whose YaRN mlx-lm reads in part
        assert mx.array_equal(stock(IDS), logits(tmp_path / "out"))
    again = convert_target(Request(str(tmp_path / "out"), tmp_path / "again", Options()))
    assert again["files"] == record["files"]
    convert_target(Request(str(tmp_path / "out"), tmp_path / "plain", Options(dequantize=True, dtype="float32")))
    assert mx.abs(logits(tmp_path / "plain") - logits(decoded)).max() <= 1e-4


def test_gpt_oss_experts_stay_in_mxfp4(tmp_path):
    convert_target(Request(str(target_folder("gpt_oss")), tmp_path / "out", Options()))
    layout = json.loads((tmp_path / "out" / "config.json").read_text())["quantization"]
    assert layout["mode"] == "mxfp4"
    assert mx.array_equal(logits(tmp_path / "out"), logits(target_folder("gpt_oss")))


def test_asymmetric_integers_are_refused(tmp_path):
    weights = {"num_bits": 4, "type": "int", "symmetric": False}
    config = {"quant_method": "compressed-tensors", "format": "pack-quantized"}
    config["config_groups"] = {"group_0": {"weights": weights}}
    folder = copy_folder(target_folder(), tmp_path / "source", config={"quantization_config": config})
    with pytest.raises(UnsupportedError, match="symmetric"):
        convert_target(Request(str(folder), tmp_path / "out", Options()))
