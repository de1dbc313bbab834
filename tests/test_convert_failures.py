"""What can go wrong in a conversion: each ends in one clear line, exit code 2, and nothing at the result's name."""

import json
import os
import shutil
import signal
import subprocess
import sys

import mlx.core as mx
import pytest
from mlx_dflash.convert import writer
from mlx_dflash.convert.cli import main
from mlx_dflash.convert.plan import Options
from mlx_dflash.convert.run import Request, convert_target
from tiny import REMOVE, copy_folder, draft_folder, edit_json, target_folder

from mlx_dflash import load


def run(*arguments):
    with pytest.raises(SystemExit) as end:
        main([str(a) for a in arguments])
    return end.value.code


def refused(capsys, out, *arguments):
    """The one line of a conversion that fails; nothing may be left at its name or beside it."""
    assert run(*arguments, "--mlx-path", out) == 2
    error = [line for line in capsys.readouterr().err.splitlines() if "error:" in line]
    assert len(error) == 1 and not out.exists() and not list(out.parent.glob(f".{out.name}*"))
    return error[0]


def edited(tmp_path, config=None, tensors=None, family="qwen3"):
    return copy_folder(target_folder(family), tmp_path / "source", config=config, tensors=tensors)


def without(name):
    return lambda weights: {k: v for k, v in weights.items() if k != name}


def test_an_unknown_tensor(tmp_path, capsys):
    source = edited(tmp_path, tensors=lambda w: w | {"model.layers.0.self_attn.extra.weight": mx.zeros((2, 2))})
    assert "self_attn.extra.weight, which has no place" in refused(
        capsys, tmp_path / "out", "target", "--hf-path", source
    )


def test_a_missing_tensor(tmp_path, capsys):
    source = edited(tmp_path, tensors=without("model.layers.3.mlp.up_proj.weight"))
    assert "lacks model.layers.3.mlp.up_proj.weight" in refused(capsys, tmp_path / "out", "target", "--hf-path", source)


def test_a_tensor_of_another_shape(tmp_path, capsys):
    source = edited(tmp_path, tensors=lambda w: w | {"model.norm.weight": mx.zeros((7,))})
    assert "model.norm.weight of shape (7,)" in refused(capsys, tmp_path / "out", "target", "--hf-path", source)


def test_a_truncated_shard(tmp_path, capsys):
    source = edited(tmp_path)
    data = (source / "model.safetensors").read_bytes()
    (source / "model.safetensors").write_bytes(data[:-100])
    assert "its header promises" in refused(capsys, tmp_path / "out", "target", "--hf-path", source)


def test_a_missing_shard(tmp_path, capsys):
    source = edited(tmp_path)
    index = {"weight_map": {"a": "model.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (source / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "lacks the shard model-00002" in refused(capsys, tmp_path / "out", "target", "--hf-path", source)


def test_a_wrong_hash_of_a_converted_folder(tmp_path, capsys):
    convert_target(Request(str(target_folder()), tmp_path / "first", Options()))
    file = tmp_path / "first" / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-5] ^= 1
    file.write_bytes(bytes(data))
    error = refused(capsys, tmp_path / "out", "target", "--hf-path", tmp_path / "first")
    assert "does not have the sha256 that conversion.json records" in error


def test_a_wrong_hash_in_the_hubs_cache(tmp_path, capsys):
    source = edited(tmp_path)
    blob = tmp_path / ("0" * 64)
    (source / "model.safetensors").rename(blob)
    (source / "model.safetensors").symlink_to(blob)
    assert "sha256 that the hub gave" in refused(capsys, tmp_path / "out", "target", "--hf-path", source)


def test_a_width_that_the_group_does_not_divide(tmp_path, capsys):
    error = refused(capsys, tmp_path / "out", "target", "--hf-path", target_folder(), "-q")
    assert "48 wide, which the group size 64 does not divide" in error and "--skip-unfit" in error


def test_tied_without_the_flag(tmp_path, capsys):
    source = edited(tmp_path, tensors=without("lm_head.weight"), family="qwen3_moe")
    assert "tie_word_embeddings" in refused(capsys, tmp_path / "out", "target", "--hf-path", source)


def test_the_flag_with_a_head_of_its_own(tmp_path, capsys):
    source = edited(tmp_path, config={"tie_word_embeddings": True}, family="qwen3_moe")
    assert "which is not the embedding" in refused(capsys, tmp_path / "out", "target", "--hf-path", source)


def test_the_flag_with_a_copy_of_the_embedding_is_dropped_and_named(tmp_path):
    same = {"tie_word_embeddings": True}
    source = edited(tmp_path, same, lambda w: w | {"lm_head.weight": w["model.embed_tokens.weight"]})
    record = convert_target(Request(str(source), tmp_path / "out", Options()))
    assert list(record["dropped"]) == ["lm_head.weight"]
    load(tmp_path / "out")


def test_no_overwriting_without_force(tmp_path, capsys):
    arguments = ("target", "--hf-path", target_folder(), "--mlx-path", tmp_path / "out")
    assert run(*arguments) == 0
    before = (tmp_path / "out" / "conversion.json").read_text()
    assert run(*arguments) == 2 and "exists" in capsys.readouterr().err
    assert (tmp_path / "out" / "conversion.json").read_text() == before
    assert run(*arguments, "--dtype", "bfloat16", "--force") == 0
    assert json.loads((tmp_path / "out" / "conversion.json").read_text())["dtype"] == "bfloat16"
    assert not list(tmp_path.glob(".out*"))


def test_force_does_not_remove_what_is_no_model(tmp_path, capsys):
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "letter.txt").write_text("dear")
    assert run("target", "--hf-path", target_folder(), "--mlx-path", tmp_path / "home", "--force") == 2
    assert "not a model folder" in capsys.readouterr().err and (tmp_path / "home" / "letter.txt").exists()


def test_too_little_room_is_seen_first(tmp_path, capsys, monkeypatch):
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(writer.shutil, "disk_usage", lambda _: usage)
    assert "free some space" in refused(capsys, tmp_path / "out", "target", "--hf-path", target_folder())


# The check beforehand is told of much room: the disk fills up afterwards, as when another program writes too.
FULL = """
import resource, shutil, signal, sys
if sys.argv.pop(1) == "limit":
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))
from mlx_dflash.convert import writer
usage = shutil.disk_usage("/")._replace(free=10**15)
writer.shutil.disk_usage = lambda _: usage
from mlx_dflash.convert.cli import main
main(sys.argv[1:])
"""
# A disk of 300 kB at $0, seen by this process alone; what is on it at the end goes to stdout.
SMALL_DISK = 'mount -t tmpfs -o size=300k small "$0" || exit 99; "$@"; code=$?; echo left:; ls -A "$0"; exit $code'


def test_a_disk_that_fills_up_while_writing(tmp_path):
    """On a disk of 300 kB; where none can be mounted, a limit on the size of files stands for it."""
    arguments = ["target", "--hf-path", str(target_folder()), "--mlx-path", str(tmp_path / "out")]
    small = ["unshare", "-rm", "sh", "-c", SMALL_DISK, str(tmp_path)]
    mounts = shutil.which("unshare") and subprocess.run([*small, "true"], capture_output=True).returncode == 0
    begin = [*small, sys.executable, "-c", FULL, "disk"] if mounts else [sys.executable, "-c", FULL, "limit"]
    done = subprocess.run([*begin, *arguments], capture_output=True, text=True)
    errors = [line for line in done.stderr.splitlines() if "error:" in line]
    why = "No space left on device" if mounts else "File too large"
    assert done.returncode == 2 and len(errors) == 1 and "can't be written" in errors[0] and why in errors[0]
    assert done.stdout.partition("left:\n")[2] == ""
    assert list(tmp_path.iterdir()) == []


KILLED = """
import sys, time
from mlx_dflash.convert import writer
shown = writer.Progress.add
def slow(self, count):
    shown(self, count)
    print("step", flush=True)
    time.sleep(0.05)
writer.Progress.add = slow
from mlx_dflash.convert.cli import main
main(sys.argv[1:])
"""


@pytest.mark.parametrize("steps", [1, 20])
def test_a_killed_conversion_leaves_nothing_and_runs_again(steps, tmp_path):
    arguments = ["target", "--hf-path", str(target_folder()), "--mlx-path", str(tmp_path / "out")]
    with subprocess.Popen([sys.executable, "-c", KILLED, *arguments], stdout=subprocess.PIPE, text=True) as process:
        while steps and process.stdout.readline():
            steps -= 1
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert not (tmp_path / "out").exists() and list(tmp_path.glob(".out.partial-*"))
    assert run(*arguments) == 0
    assert [p.name for p in tmp_path.iterdir()] == ["out"]
    load(tmp_path / "out")


def test_another_live_run_is_left_alone(tmp_path):
    other = tmp_path / f".out.partial-{os.getppid()}"
    other.mkdir()
    assert run("target", "--hf-path", target_folder(), "--mlx-path", tmp_path / "out") == 0
    assert other.exists()


def test_packages_of_other_runtimes(tmp_path, capsys):
    (tmp_path / "model.pte").write_bytes(b"x")
    assert "ExecuTorch" in refused(capsys, tmp_path / "out", "target", "--hf-path", tmp_path / "model.pte")
    source = edited(tmp_path)
    (source / "adapter_config.json").write_text("{}")
    assert "LoRA" in refused(capsys, tmp_path / "out", "target", "--hf-path", source)


def test_a_drafter_as_target_and_the_other_way_round(tmp_path, capsys):
    assert "DFlash drafter" in refused(capsys, tmp_path / "out", "target", "--hf-path", draft_folder())
    assert "full model" in refused(capsys, tmp_path / "out", "drafter", "--hf-path", target_folder())


def test_unknown_quantization_is_refused_by_name(tmp_path, capsys):
    source = edited(tmp_path, config={"quantization_config": {"quant_method": "exl3"}})
    assert "'exl3'" in refused(capsys, tmp_path / "out", "target", "--hf-path", source)


def test_flags_that_mean_nothing_alone(tmp_path, capsys):
    assert "need --quantize" in refused(
        capsys, tmp_path / "out", "target", "--hf-path", target_folder(), "--q-bits", "8"
    )
    both = ("target", "--hf-path", target_folder(), "-q", "-d")
    assert "contradict" in refused(capsys, tmp_path / "out", *both)


def test_source_and_result_must_differ(tmp_path, capsys):
    source = edited(tmp_path)
    assert run("target", "--hf-path", source, "--mlx-path", source, "--force") == 2
    assert "source and result at once" in capsys.readouterr().err and (source / "model.safetensors").exists()


def test_a_folder_without_tokenizer(tmp_path, capsys):
    source = edited(tmp_path)
    for file in source.glob("tokenizer*"):
        file.unlink()
    assert "no tokenizer files" in refused(capsys, tmp_path / "out", "target", "--hf-path", source)


def test_a_config_that_lacks_a_key(tmp_path, capsys):
    source = edited(tmp_path)
    edit_json(source / "config.json", {"num_hidden_layers": REMOVE})
    assert "num_hidden_layers" in refused(capsys, tmp_path / "out", "target", "--hf-path", source)
