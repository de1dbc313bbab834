"""Sources that other packages quantized, each held against its own definition: fp8, compressed-tensors, MXFP4."""

import json

import mlx.core as mx
import numpy as np
import pytest
from mlx_dflash.convert.plan import Options
from mlx_dflash.convert.run import Request, convert_target
from tiny import copy_folder, edit_json, target_folder

from mlx_dflash import CheckpointError, UnsupportedError, load

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


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("per_row", [False, True])
def test_compressed_tensors_integers_are_held_exactly(bits, per_row, tmp_path):
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

    weights = {"num_bits": bits, "type": "int", "symmetric": True, "strategy": "group"}
    config = {"quant_method": "compressed-tensors", "format": "pack-quantized"}
    folder, decoded = source_of(
        tmp_path, pack, config | {"config_groups": {"group_0": {"weights": weights}}}, "qwen3_5"
    )
    record = check(tmp_path, folder, decoded)
    assert record["quantized_modules"] > 0 and "exactly" in record["notes"][0]


def test_nvfp4_is_decoded_and_says_so(tmp_path):
    def pack(name, values):
        rows, width = values.shape
        whole = np.float32(448 * 6 / np.abs(values).max())
        grouped = values.reshape(rows, -1, 16)
        scale = to_e4m3(np.abs(grouped).max(-1) / 6 * whole)
        step = TABLE[scale][..., None] / whole
        codes = np.abs(grouped[..., None] / np.where(step == 0, 1, step)[..., None] - E2M1).argmin(-1).astype(np.uint8)
        out = (E2M1[codes] * step).reshape(rows, width)
        flat = codes.reshape(rows, width)
        path = name.removesuffix("weight")
        tensors = {f"{path}weight_packed": ("U8", flat[:, ::2] | (flat[:, 1::2] << 4))}
        tensors[f"{path}weight_scale"] = ("F8_E4M3", scale)
        tensors[f"{path}weight_global_scale"] = ("F32", np.array([whole], np.float32))
        return tensors, out.astype(np.float32)

    config = {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"}
    folder, decoded = source_of(tmp_path, pack, config)
    record = check(tmp_path, folder, decoded)
    assert "nvfp4 tensors are decoded" in record["notes"][0]


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
