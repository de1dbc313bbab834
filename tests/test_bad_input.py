"""What a user can get wrong ends with exit code 2, one line that names it and a remedy, and nothing on stdout."""

import io
import json
import re
import shutil
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
import tiny
from mlx_lm.generate import setup_arg_parser

command_line = tiny.command_line()
REFUSED = command_line.REFUSED
pytestmark = pytest.mark.usefixtures("offline")
TARGET, DRAFT = tiny.target_folder(), tiny.draft_folder()
REMEDY = r"give|use |drop|fuse|download|pass it|free|check|not supported|are supported|or more|or less|between|must be"
TEMPLATE = "{% for m in messages %}{{ m.content }} {% endfor %}"


def as_json(value: object) -> str:
    return json.dumps(value, default=lambda _: "removed")


class Command:
    """The command line in this process, with what it may print held against the rules."""

    def __init__(self, capfd: pytest.CaptureFixture[str]):
        self.capfd = capfd

    def refuses(self, *argv: object) -> str:
        """Run, expect a refusal, return its line."""
        self.capfd.readouterr()
        given = ["--max-tokens", "4", "--prompt", "w5 w6", *map(str, argv)]  # the last of a flag counts
        with pytest.raises(SystemExit) as exit_:
            command_line.main(given)
        out, err = self.capfd.readouterr()
        return one_line(exit_.value.code, out, err)


def one_line(code: object, out: str, err: str) -> str:
    assert (code, out) == (2, ""), err
    assert err.startswith("mlx-dflash: error: "), err
    assert err.endswith("\n") and len(err.splitlines()) == 1, err
    assert "Traceback" not in err
    return err


def names(line: str, *things: object, remedy: str = REMEDY) -> None:
    """`things` are all in the line, and one of the words that remedies are put in."""
    for thing in things:
        assert str(thing) in line, line
    assert any(word in line for word in remedy.split("|")), f"no remedy: {line}"


@pytest.fixture
def command(capfd: pytest.CaptureFixture[str]) -> Command:
    return Command(capfd)


@pytest.fixture
def target(tmp_path: Path) -> Path:
    """A golden target to break."""
    return tiny.copy_folder(TARGET, tmp_path / "target")


@pytest.fixture
def draft(tmp_path: Path) -> Path:
    """A golden drafter to break."""
    return tiny.copy_folder(DRAFT, tmp_path / "draft")


# Arguments


@pytest.mark.parametrize("text", ["", " ", "\n\t", "\\n"])
def test_an_empty_prompt_is_refused(command, text):
    names(command.refuses("--model", TARGET, "--prompt", text), "prompt is empty", "--prompt")


def test_an_empty_prompt_on_stdin_is_refused(command, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO(" \n"))
    names(command.refuses("--model", TARGET, "--prompt", "-"), "prompt is empty", "--prompt")


def test_a_prompt_that_is_no_text_is_refused(command, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"w5 \xff w6"), encoding="utf-8"))
    names(command.refuses("--model", TARGET, "--prompt", "-"), "prompt", "UTF-8", remedy="")
    names(command.refuses("--model", TARGET, "--prompt", "w5 \udcff w6"), "prompt", "UTF-8", remedy="")  # from argv


@pytest.mark.parametrize("flag", sorted(REFUSED))
@pytest.mark.parametrize("values", [[], ["4"]])
def test_flags_of_mlx_lm_that_can_not_be_served_are_refused_by_name(command, flag, values):
    names(command.refuses("--model", TARGET, f"--{flag}", *values), f"--{flag}", remedy="|".join(REFUSED.values()))


def test_the_remedy_for_an_adapter_is_to_fuse_it(command):
    names(command.refuses("--model", TARGET, "--adapter-path", "adapters"), "--adapter-path", "fuse")


def test_every_flag_of_mlx_lm_is_known():
    def flags(parser: Any) -> set[str]:
        return {flag for action in parser._actions for flag in action.option_strings}

    assert flags(setup_arg_parser()) <= flags(command_line.build_parser())


@pytest.mark.parametrize(
    ("argv", "things"),
    [
        (["--plain", "--draft-model", DRAFT], ["--plain", "--draft-model", "drop"]),
        (["--plain", "--num-draft-tokens", "4"], ["--plain", "--num-draft-tokens", "drop"]),
        (["--plain", "--block-size", "4"], ["--plain", "--block-size", "drop"]),
        (["--plain", "--block-size", "auto"], ["--plain", "--block-size", "drop"]),
        (
            ["--draft-model", DRAFT, "--block-size", "4", "--num-draft-tokens", "3"],
            ["--block-size", "--num-draft-tokens"],
        ),
        (["--block-size", "4"], ["no drafter is known", TARGET, "--draft-model"]),
        (["--num-draft-tokens", "3"], ["no drafter is known", TARGET, "--draft-model"]),
        (["--draft-model", "auto"], ["no drafter is known", TARGET, "--draft-model"]),
    ],
)
def test_contradictory_or_impossible_speculation_is_refused(command, argv, things):
    names(command.refuses("--model", TARGET, *argv), *things)


@pytest.mark.parametrize(
    ("argv", "things"),
    [
        (["--kv-bits", "3"], ["kv_bits", "4 or 8", "3"]),
        (["--kv-bits", "8", "--kv-group-size", "128"], ["kv_group_size", "64 or 32", "128"]),
        (["--kv-bits", "8", "--quantized-kv-start", "5000"], ["--quantized-kv-start", "0"]),
        (["--kv-bits", "8"], ["kv_bits", "qwen3", "head_dim of 16", "64 or 32"]),
        (["--kv-bits", "4", "--kv-group-size", "32"], ["kv_bits", "qwen3", "head_dim of 16", "32"]),
    ],
)
def test_keys_and_values_that_can_not_be_quantized_so_are_refused(command, argv, things):
    names(command.refuses("--model", TARGET, *argv), *things)


@pytest.mark.parametrize("argv", [["--block-size", "9"], ["--num-draft-tokens", "8"]])
def test_a_block_above_the_trained_one_is_refused(command, argv):
    names(command.refuses("--model", TARGET, "--draft-model", DRAFT, *argv), "block size 9", "8")


@pytest.mark.parametrize(
    ("argv", "things"),
    [
        (["--block-size", "0"], ["block", "0"]),
        (["--block-size", "-3"], ["block", "-3"]),
        (["--num-draft-tokens", "-1"], ["num-draft-tokens", "-1"]),
    ],
)
@pytest.mark.parametrize("pair", [[], ["--draft-model", DRAFT]])
def test_a_block_of_no_rows_is_refused(command, argv, things, pair):
    names(command.refuses("--model", TARGET, *pair, *argv), *things, remedy="from 1 on|or more")


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("temp", "-0.5"),
        ("temp", "nan"),
        ("temp", "inf"),
        ("top-p", "1.5"),
        ("top-p", "-0.1"),
        ("top-p", "nan"),
        ("top-k", "-1"),
        ("min-p", "1.5"),
        ("min-p", "nan"),
        ("min-tokens-to-keep", "0"),
        ("seed", "-1"),
        ("seed", str(2**32)),
        ("max-tokens", "0"),
        ("max-tokens", "-2"),
        ("prefill-step-size", "0"),
    ],
)
def test_a_number_out_of_range_is_refused_with_the_range(command, flag, value):
    name = flag.replace("-", "_")
    line = command.refuses("--model", TARGET, f"--{flag}", value)
    assert name in line or flag in line
    names(line, value, remedy="or more|between|at least|below|from ")


@pytest.mark.parametrize("flag", ["temp", "top-p", "top-k", "seed", "max-tokens", "block-size", "num-draft-tokens"])
def test_what_is_no_number_is_refused(command, flag):
    names(command.refuses("--model", TARGET, f"--{flag}", "many"), f"--{flag}", "many", remedy="invalid")


def test_an_unknown_flag_is_refused(command):
    names(command.refuses("--model", TARGET, "--speculate-harder"), "--speculate-harder", remedy="unrecognized")


@pytest.mark.parametrize("text", ["{", "{'a': 1}", "enable_thinking=false", "[1]", '"x"', "1", "null"])
@pytest.mark.parametrize("template", [False, True])
def test_a_chat_template_config_that_is_no_json_object_is_refused(command, tmp_path, text, template):
    overrides = {"chat_template": TEMPLATE} if template else {}
    folder = tiny.copy_folder(TARGET, tmp_path / "target", tokenizer_config=overrides)
    names(command.refuses("--model", folder, "--chat-template-config", text), "--chat-template-config", remedy="JSON")


def test_a_message_that_the_chat_template_refuses_is_refused(command, tmp_path):
    template = "{{ raise_exception('System role is not supported') }}"
    folder = tiny.copy_folder(TARGET, tmp_path / "target", tokenizer_config={"chat_template": template})
    names(command.refuses("--model", folder, "--system-prompt", "w9"), "System role is not supported", "template")


def test_an_extra_eos_token_that_the_tokenizer_lacks_is_refused(command):
    names(
        command.refuses("--model", TARGET, "--extra-eos-token", "<|none|>"), "--extra-eos-token", "<|none|>", remedy=""
    )


def test_an_empty_stop_string_is_refused(command):
    names(command.refuses("--model", TARGET, "--stop", ""), "stop", remedy="non-empty")


# Model folders


@pytest.mark.parametrize("flag", ["--model", "--draft-model"])
@pytest.mark.parametrize("name", ["/nowhere/model", "./modle", "../modle", "~/no/such/model", "modle", "a/b/c", ""])
def test_a_folder_that_does_not_exist_is_refused(command, flag, name):
    pair = ["--model", TARGET] if flag == "--draft-model" else []
    line = command.refuses(*pair, flag, name)
    names(line, name or flag, remedy="give a")


@pytest.mark.parametrize("name", ["models/Qwen3-4b-4bti", "two words/model"])
def test_a_mistyped_folder_that_looks_like_a_hub_name_is_refused_as_both(command, monkeypatch, tmp_path, name):
    monkeypatch.chdir(tmp_path)
    names(command.refuses("--model", name), name, "not a folder", "hub")


def test_a_file_given_as_model_is_refused(command):
    file = TARGET / "config.json"
    names(command.refuses("--model", file), file, "is a file", "folder")
    names(command.refuses("--model", TARGET, "--draft-model", file), file, "is a file", "folder")


def test_a_folder_without_config_is_refused(command, target, draft):
    for folder, argv in ((target, []), (draft, ["--model", TARGET])):
        (folder / "config.json").unlink()
        names(command.refuses(*argv, "--draft-model" if argv else "--model", folder), folder, "config.json")


@pytest.mark.parametrize("text", [b"", b"{", b'{"model_type": "qwen3"', b"[]", b"null", b"\xff\xfe{}", b"# config\n"])
@pytest.mark.parametrize("which", ["target", "draft"])
def test_a_broken_config_is_refused(command, request, which, text):
    folder = request.getfixturevalue(which)
    (folder / "config.json").write_bytes(text)
    argv = ["--model", folder] if which == "target" else ["--model", TARGET, "--draft-model", folder]
    names(command.refuses(*argv), folder / "config.json", "JSON", "download it again")


def header_length(file: Path) -> int:
    return int(struct.unpack("<Q", file.read_bytes()[:8])[0])


@pytest.mark.parametrize("which", ["target", "draft"])
@pytest.mark.parametrize("cut", ["empty", "length", "after length", "header", "no data", "data", "last byte"])
def test_weights_that_are_cut_short_are_refused(command, request, which, cut):
    folder = request.getfixturevalue(which)
    file = folder / "model.safetensors"
    raw, head = file.read_bytes(), header_length(file)
    sizes = {"empty": 0, "length": 5, "after length": 8, "header": 8 + head // 2, "no data": 8 + head}
    sizes |= {"data": (8 + head + len(raw)) // 2, "last byte": len(raw) - 1}
    file.write_bytes(raw[: sizes[cut]])
    argv = ["--model", folder] if which == "target" else ["--model", TARGET, "--draft-model", folder]
    names(command.refuses(*argv), file, "download it again")


def test_weights_with_bytes_too_many_are_refused(command, target):
    file = target / "model.safetensors"
    file.write_bytes(file.read_bytes() + b"\0")
    names(command.refuses("--model", target), file, "download it again")


def with_header(file: Path, header: object) -> None:
    """Replace the header; the data stays as long as it was."""
    text = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + file.read_bytes()[8 + header_length(file) :])


def header_of(file: Path) -> dict[str, Any]:
    return dict(json.loads(file.read_bytes()[8 : 8 + header_length(file)]))


@pytest.mark.parametrize("which", ["target", "draft"])
@pytest.mark.parametrize(
    "damage",
    [
        lambda _: [],
        lambda _: "text",
        lambda header: header | {"norm.weight": 1},
        lambda header: header | {"norm.weight": {"dtype": "F32"}},
        lambda header: header | {"norm.weight": {"dtype": "F32", "shape": 48, "data_offsets": [0, 192]}},
        lambda header: header | {"norm.weight": {"dtype": "F32", "shape": [48], "data_offsets": []}},
        lambda header: header | {"norm.weight": {"dtype": "F32", "shape": [48], "data_offsets": ["a", "b"]}},
    ],
    ids=["list", "text", "number entry", "no offsets", "scalar shape", "empty offsets", "text offsets"],
)
def test_a_damaged_header_is_refused(command, request, which, damage):
    folder = request.getfixturevalue(which)
    file = folder / "model.safetensors"
    with_header(file, damage(header_of(file)))
    argv = ["--model", folder] if which == "target" else ["--model", TARGET, "--draft-model", folder]
    names(command.refuses(*argv), file, "download it again")


@pytest.mark.parametrize(
    ("which", "name"), [("target", "model.norm.weight"), ("draft", "norm.weight")], ids=["target", "draft"]
)
@pytest.mark.parametrize("change", [{"dtype": "F99"}, {"shape": [49]}], ids=["unknown dtype", "shape beyond the data"])
def test_a_tensor_that_can_not_be_read_is_refused(command, request, which, name, change):
    folder = request.getfixturevalue(which)
    file = folder / "model.safetensors"
    header = header_of(file)
    with_header(file, header | {name: header[name] | change})
    argv = ["--model", folder] if which == "target" else ["--model", TARGET, "--draft-model", folder]
    names(command.refuses(*argv), folder, remedy="")


def shard(folder: Path, parts: int = 2) -> list[Path]:
    """Split a folder's weights into shards with an index."""
    weights = mx.load(str(folder / "model.safetensors"))
    mx.eval(weights)
    (folder / "model.safetensors").unlink()
    files = [f"model-{i + 1:05}-of-{parts:05}.safetensors" for i in range(parts)]
    place = {name: files[i % parts] for i, name in enumerate(sorted(weights))}
    for file in files:
        mx.save_safetensors(str(folder / file), {n: w for n, w in weights.items() if place[n] == file})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": place}))
    return [folder / file for file in files]


@pytest.mark.parametrize("damage", [Path.unlink, lambda file: file.write_bytes(file.read_bytes()[:-64])])
def test_a_shard_that_is_missing_or_cut_is_refused(command, target, damage):
    file = shard(target)[1]
    damage(file)
    names(command.refuses("--model", target), file.name, "download it again")


def test_a_shard_whose_link_leads_nowhere_is_refused(command, target):
    file = target / "model.safetensors"
    file.unlink()
    file.symlink_to("../blobs/gone")  # a hub cache that was cleaned by hand
    names(command.refuses("--model", target), file)


@pytest.mark.parametrize("weight_map", [tiny.REMOVE, None, [], {}, {"norm.weight": 1}], ids=as_json)
def test_an_index_without_a_weight_map_is_refused(command, target, weight_map):
    shard(target)
    tiny.edit_json(target / "model.safetensors.index.json", {"weight_map": weight_map})
    names(command.refuses("--model", target), target, "index", "download it again")


def test_a_folder_without_weights_is_refused(command, target, draft):
    for folder, argv in ((target, []), (draft, ["--model", TARGET])):
        (folder / "model.safetensors").unlink()
        line = command.refuses(*argv, "--draft-model" if argv else "--model", folder)
        names(line, folder, "safetensors")


@pytest.mark.parametrize("weights", ["adapters.safetensors", "adapter_model.safetensors"], ids=["mlx-lm", "peft"])
@pytest.mark.parametrize("config", [False, True], ids=["no config.json", "config.json"])
@pytest.mark.parametrize("flag", ["--model", "--draft-model"])
def test_a_lora_adapter_given_as_model_is_refused_as_what_it_is(command, tmp_path, weights, config, flag):
    folder = tmp_path / "adapters"
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps({"fine_tune_type": "lora", "num_layers": 4}))
    mx.save_safetensors(str(folder / weights), {"layers.0.lora_a": mx.zeros((4, 4))})
    if config:
        shutil.copy(TARGET / "config.json", folder)
    pair = ["--model", TARGET] if flag == "--draft-model" else []
    names(command.refuses(*pair, flag, folder), folder, "LoRA adapter", "fuse")


@pytest.mark.parametrize("model_type", ["mamba", "gpt2", None, 7, ["qwen3"]])
def test_an_unknown_model_type_is_refused(command, tmp_path, model_type):
    folder = tiny.copy_folder(TARGET, tmp_path / "target", {"model_type": model_type})
    names(command.refuses("--model", folder), folder, repr(model_type), "supported families", "qwen3", remedy="")


@pytest.mark.parametrize(
    "overrides",
    [
        {"hidden_size": tiny.REMOVE},
        {"hidden_size": tiny.REMOVE, "head_dim": tiny.REMOVE},
        {"hidden_size": "48"},
        {"num_attention_heads": None, "head_dim": None},
        {"num_hidden_layers": tiny.REMOVE},
        {"vocab_size": None},
        {"rope_parameters": "yarn"},
        {"rope_scaling": {"rope_type": "spiral", "factor": 2.0}},
        {"quantization": {"group_size": 64}},
        {"quantization": True},
        {"eos_token_id": "w2"},
    ],
    ids=as_json,
)
def test_a_target_config_with_a_wrong_or_missing_value_is_refused(command, tmp_path, overrides):
    folder = tiny.copy_folder(TARGET, tmp_path / "target", overrides)
    names(command.refuses("--model", folder), folder, remedy="")


@pytest.mark.parametrize(
    "overrides",
    [{"num_hidden_layers": 9}, {"num_hidden_layers": 7}, {"hidden_size": 64}, {"vocab_size": 310}],
    ids=as_json,
)
def test_target_weights_of_another_size_than_the_config_says_are_refused(command, tmp_path, overrides):
    folder = tiny.copy_folder(TARGET, tmp_path / "target", overrides)
    names(command.refuses("--model", folder), folder, remedy="")


PROJECTION = "model.layers.3.mlp.up_proj.weight"


@pytest.mark.parametrize(
    "edit",
    [
        lambda w: {k: v for k, v in w.items() if k != PROJECTION},
        lambda w: w | {"model.layers.3.mlp.middle_proj.weight": mx.zeros((4, 4))},
        lambda w: w | {PROJECTION: mx.zeros((4, 4))},
    ],
    ids=["missing", "extra", "other shape"],
)
def test_target_tensors_that_do_not_match_the_model_are_named(command, tmp_path, edit):
    folder = tiny.copy_folder(TARGET, tmp_path / "target", tensors=edit)
    names(command.refuses("--model", folder), folder, "layers.3.mlp.", remedy="")


def test_a_target_with_sliding_layers_is_refused(command, tmp_path):
    layers = ["sliding_attention", "full_attention"] * 4
    folder = tiny.copy_folder(TARGET, tmp_path / "target", {"layer_types": layers, "sliding_window": 16})
    names(command.refuses("--model", folder), "sliding", "not supported")


@pytest.mark.parametrize("text", [b"", b"{", b"{}", b"[]", b'{"model": {"type": "Spells"}}', b"\xff"])
def test_a_broken_tokenizer_is_refused(command, target, text):
    (target / "tokenizer.json").write_bytes(text)
    names(command.refuses("--model", target), target, "tokenizer", remedy="")


@pytest.mark.parametrize("missing", [["tokenizer.json"], ["tokenizer.json", "tokenizer_config.json"]])
def test_a_folder_without_tokenizer_is_refused(command, target, missing):
    for name in missing:
        (target / name).unlink()
    names(command.refuses("--model", target), target, "tokenizer", remedy="")


@pytest.mark.parametrize("text", ["{", "[]", '{"eos_token_id": "w2"}'])
def test_a_broken_generation_config_is_refused(command, target, text):
    (target / "generation_config.json").write_text(text)
    names(command.refuses("--model", target), target / "generation_config.json", remedy="")


def test_a_prompt_with_tokens_beyond_the_models_table_is_refused(command, tmp_path):
    def crop(weights: tiny.Tensors) -> tiny.Tensors:
        return weights | {"model.embed_tokens.weight": weights["model.embed_tokens.weight"][:100]}

    folder = tiny.copy_folder(TARGET, tmp_path / "target", {"vocab_size": 100}, crop)
    names(command.refuses("--model", folder, "--prompt", "w5 w150"), "100", remedy="outside")


# Drafters and pairs


def test_a_drafter_given_as_target_is_refused(command):
    names(command.refuses("--model", DRAFT), DRAFT, "DFlash drafter", "--draft-model")


def test_a_full_model_given_as_drafter_is_refused(command):
    names(
        command.refuses("--model", TARGET, "--draft-model", TARGET), TARGET, "full model", "DFlash drafter", remedy=""
    )


@pytest.mark.parametrize(
    ("overrides", "things"),
    [
        ({"num_target_layers": 36}, ["36", "8"]),
        ({"num_target_layers": 6}, ["6", "8"]),
        ({"dflash_config": {"mask_token_id": 299, "target_layer_ids": [1, 3, 8]}}, ["[1, 3, 8]", "8"]),
        (
            {"dflash_config": {"mask_token_id": 299, "target_layer_ids": [1, 3, 33]}, "num_target_layers": tiny.REMOVE},
            ["[1, 3, 33]", "34", "8"],
        ),
        ({"hidden_size": 64}, ["64", "48"]),
        ({"dflash_config": {"mask_token_id": 300, "target_layer_ids": [1, 3, 5]}}, ["mask token 300", "300 rows"]),
        ({"dflash_config": {"mask_token_id": -1, "target_layer_ids": [1, 3, 5]}}, ["mask token -1", "300 rows"]),
    ],
    ids=["more layers", "fewer layers", "tap above", "tap above, no count", "hidden size", "mask id", "negative mask"],
)
def test_a_drafter_that_does_not_fit_is_refused_naming_both_sides(command, tmp_path, overrides, things):
    folder = tiny.copy_folder(DRAFT, tmp_path / "draft", overrides)
    line = command.refuses("--model", TARGET, "--draft-model", folder)
    names(line, folder, "qwen3", *things, remedy="use the drafter made for it")


def test_a_target_with_too_few_layers_is_refused(command, tmp_path):
    def crop(weights: tiny.Tensors) -> tiny.Tensors:
        return {k: v for k, v in weights.items() if not re.match(r"model\.layers\.[567]\.", k)}

    short = {"num_hidden_layers": 5, "layer_types": ["full_attention"] * 5}
    folder = tiny.copy_folder(TARGET, tmp_path / "target", short, crop)
    line = command.refuses("--model", folder, "--draft-model", DRAFT)
    names(line, DRAFT, "[1, 3, 5]", "8 layers", "5", remedy="use the drafter made for it")


OTHERS = ["Qwen3DSparkModel", "LlamaForCausalLMEagle3", "DFlyDraftModel", "Qwen3MTPModel", "MedusaModel"]
# What such folders hold beside, or instead of, a DFlash drafter's tensors.
PARTS: dict[str, Any] = {
    "as DFlash": lambda w: w,
    "own embedding": lambda w: w | {"embed_tokens.weight": mx.zeros((300, 48))},
    "no hidden_norm": lambda w: {k: v for k, v in w.items() if k != "hidden_norm.weight"},
}


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("parts", list(PARTS))
def test_a_drafter_of_another_method_is_refused_by_name(command, tmp_path, name, parts):
    folder = tiny.copy_folder(DRAFT, tmp_path / "draft", {"architectures": [name]}, PARTS[parts])
    line = command.refuses("--model", TARGET, "--draft-model", folder)
    names(line, folder, name, "DFlash")


@pytest.mark.parametrize("model_type", ["eagle3", "dspark"])
def test_a_drafter_of_another_model_type_is_refused_by_name(command, tmp_path, model_type):
    folder = tiny.copy_folder(DRAFT, tmp_path / "draft", {"model_type": model_type, "architectures": None})
    names(command.refuses("--model", TARGET, "--draft-model", folder), folder, model_type, "DFlash")


@pytest.mark.parametrize("parts", list(PARTS))
@pytest.mark.parametrize("method", ["eagle3", "mtp", "independent"])
def test_a_speculators_file_of_another_method_is_refused_by_name(command, tmp_path, parts, method):
    verifier = {"algorithm": method, "verifier": {"name_or_path": "someone/target"}}
    config = {"speculators_config": verifier, "speculators_model_type": method}
    folder = tiny.copy_folder(DRAFT, tmp_path / "draft", config, PARTS[parts])
    names(command.refuses("--model", TARGET, "--draft-model", folder), folder, method, remedy="")


def test_an_unknown_assistant_is_refused_by_name(command, tmp_path):
    config = {"model_type": "gemma4_assistant", "architectures": ["Gemma4AssistantForCausalLM"]}
    folder = tiny.copy_folder(DRAFT, tmp_path / "draft", config)
    names(command.refuses("--model", TARGET, "--draft-model", folder), folder, "gemma4_assistant", "not supported")


DFLASH = {"mask_token_id": 299, "target_layer_ids": [1, 3, 5]}


@pytest.mark.parametrize(
    ("overrides", "things"),
    [
        ({"layer_types": ["sliding_attention"] * 3, "sliding_window": 16}, ["sliding", "use_sliding_window"]),
        ({"layer_types": ["full_attention", "full_attention", "chunked"]}, ["chunked"]),
        ({"use_sliding_window": True, "sliding_window": 16}, ["sliding"]),
        ({"dflash_config": DFLASH | {"draft_temperature": 0.5}}, ["dflash_config", "draft_temperature"]),
        ({"dflash_config": DFLASH | {"fc_layernorm": True}}, ["dflash_config", "fc_layernorm"]),
        ({"causal": True}, ["causal"]),
        ({"markov_rank": 64}, ["markov_rank"]),
        ({"partial_rotary_factor": 0.5}, ["partial_rotary_factor"]),
        ({"model_type": "glm4", "architectures": None}, ["glm4"]),
        ({"hidden_act": "gelu"}, ["hidden_act", "gelu"]),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 4.0}}, ["longrope"]),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "mrope_section": [4, 4]}}, ["mrope_section"]),
        ({"quantization_config": {"quant_method": "fp8"}}, ["fp8"]),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, dict) else "",
)
def test_a_drafter_option_that_can_not_be_run_is_refused_by_name(command, tmp_path, overrides, things):
    folder = tiny.copy_folder(DRAFT, tmp_path / "draft", overrides)
    line = command.refuses("--model", TARGET, "--draft-model", folder)
    names(line, folder / "config.json", *things, remedy="not supported|known|unknown|only")


@pytest.mark.parametrize(
    "overrides",
    [
        {"hidden_size": tiny.REMOVE},
        {"hidden_size": "48"},
        {"num_key_value_heads": None},
        {"rms_norm_eps": "small"},
        {"rope_theta": tiny.REMOVE},
        {"rope_theta": "1e6"},
        {"rope_scaling": "yarn"},
        {"block_size": tiny.REMOVE},
        {"block_size": 1},
        {"block_size": True},
        {"num_target_layers": "8"},
        {"num_hidden_layers": 0},
        {"layer_types": 3},
        {"dflash_config": tiny.REMOVE},
        {"dflash_config": [1]},
        {"dflash_config": "v1"},
        {"dflash_config": {"target_layer_ids": [1, 3, 5]}},
        {"dflash_config": {"mask_token_id": 299}},
        {"dflash_config": DFLASH | {"target_layer_ids": []}},
        {"dflash_config": DFLASH | {"target_layer_ids": [1, "3", 5]}},
        {"dflash_config": DFLASH | {"target_layer_ids": [1, -3, 5]}},
        {"dflash_config": DFLASH | {"mask_token_id": "<mask>"}},
        {"dflash_config": DFLASH | {"final_logit_softcapping": "hard"}},
        {"dflash_config": DFLASH | {"output_multiplier": [2]}},
        {"dflash_config": DFLASH | {"selector_rank": 4}},
        {"dflash_config": DFLASH | {"block_size": 16}},
        {"conv_kernel_size": 4, "conv_group_size": 8},
        {"is_causal": "no"},
        {"attention_bias": True},
        {"rope_scaling": {"rope_type": "yarn"}},
        {"speculators_config": {"algorithm": "dflash"}},
        {"quantization": True},
        {"quantization": {"bits": 4}},
    ],
    ids=as_json,
)
def test_a_drafter_config_with_a_wrong_or_missing_value_is_refused(command, tmp_path, overrides):
    folder = tiny.copy_folder(DRAFT, tmp_path / "draft", overrides)
    line = command.refuses("--model", TARGET, "--draft-model", folder)
    names(line, folder, remedy="")


LEAF = "layers.1.mlp.up_proj.weight"


@pytest.mark.parametrize(
    "edit",
    [
        lambda w: {k: v for k, v in w.items() if k != LEAF},
        lambda w: w | {"layers.1.mlp.middle_proj.weight": mx.zeros((4, 4))},
        lambda w: w | {LEAF: mx.zeros((4, 4))},
    ],
    ids=["missing", "extra", "other shape"],
)
def test_drafter_tensors_that_do_not_match_the_format_are_named(command, tmp_path, edit):
    folder = tiny.copy_folder(DRAFT, tmp_path / "draft", tensors=edit)
    names(command.refuses("--model", TARGET, "--draft-model", folder), folder, "layers.1.mlp.", remedy="")


@pytest.mark.parametrize("which", ["target", "draft"])
def test_bytes_in_place_of_weights_are_refused(command, tmp_path, which):
    """MLX loads fp8 as bytes; read as numbers they would only spoil the text, or acceptance."""
    source, leaf = (TARGET, PROJECTION) if which == "target" else (DRAFT, LEAF)
    folder = tiny.copy_folder(source, tmp_path / which, tensors=lambda w: w | {leaf: w[leaf].astype(mx.uint8)})
    argv = ["--model", folder] if which == "target" else ["--model", TARGET, "--draft-model", folder]
    names(command.refuses(*argv), folder, leaf.removeprefix("model."), remedy="")


# Real processes


@pytest.mark.parametrize(
    "argv",
    [
        ["--model", "models/modle"],
        ["--model", str(TARGET), "--draft-model", str(TARGET)],
    ],
    ids=["missing model", "no drafter"],
)
def test_a_process_ends_with_code_2_and_one_line(tmp_path, argv):
    command = [sys.executable, "-m", "mlx_dflash.generate", *argv]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=60)
    one_line(done.returncode, done.stdout, done.stderr)
