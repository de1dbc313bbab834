"""`python -m mlx_dflash.benchmarks.peers`: this package and others on the same weights, in one run.

Every decoder runs in a process of its own, by the Python that `--peer NAME=PYTHON` names (its own virtual environment);
they take turns, one at a time, in an order and then in its reverse. Compared is decoding from the first token's arrival
to the last one's: plain tokens/s, and rounds/s at equal width, which no drafter's luck can change. Ratios are ours over
theirs, of the same prompt and pass; "ahead" where the lower 95 % bound of their median is above 1, "behind" where the
upper one is below.

`--random qwen3` makes an unquantized pair of random weights, for peers that do not know the demo pair's family; its
drafts are all wrong, so that a round commits one token.
"""

import argparse
import json
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_dflash.benchmarks.machine import describe
from mlx_dflash.benchmarks.output import write_result
from mlx_dflash.benchmarks.plain import bootstrap

from mlx_dflash import hub, load
from mlx_dflash.targets import Target
from mlx_dflash.training.prompts import held_out_prompts

WORKER = Path(__file__).with_name("peer_worker.py")
OURS = "mlx_dflash"


class Worker:
    """A decoder's process. error: why it can't go on, None while it can."""

    def __init__(self, name: str, python: str, model: Path, drafter: Path) -> None:
        self.name = name
        self.error: str | None = None
        self.version = installed(name, python)
        command = [python, str(WORKER), name, str(model), str(drafter)]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        self.read()

    def decode(self, prompt: list[int], max_tokens: int, block_size: int) -> dict[str, Any] | None:
        """What the worker measured; None if it can't go on, or has no such arm."""
        if self.error is not None:
            return None
        assert self.process.stdin is not None
        job = {"prompt": prompt, "max_tokens": max_tokens, "block_size": block_size}
        self.process.stdin.write(json.dumps(job) + "\n")
        self.process.stdin.flush()
        return self.read()

    def read(self) -> dict[str, Any] | None:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        answer: dict[str, Any] = json.loads(line) if line else {"error": "ended without an answer"}
        if (error := answer.get("error")) is not None:
            self.error = str(error)
            print(f"{self.name}: {error}", file=sys.stderr, flush=True)
            return None
        return answer


def installed(name: str, python: str) -> dict[str, str]:
    """Versions of a peer and of what it stands on, as its environment knows them."""
    packages = [name.replace("_", "-").removeprefix("z-lab "), "mlx", "mlx-lm"]
    code = (
        "import json, importlib.metadata as m, sys\n"
        "has = {d.metadata['Name']: d.version for d in m.distributions()}\n"
        "print(json.dumps({n: has[n] for n in sys.argv[1:] if n in has}))"
    )
    found: dict[str, str] = json.loads(subprocess.check_output([python, "-c", code, *packages], text=True))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m mlx_dflash.benchmarks.peers", description=__doc__)
    add = parser.add_argument
    add("--peer", action="append", default=[], metavar="NAME=PYTHON", help="mlx-lm, z-lab dflash, mlx-dspark, ...")
    add("--model", default="demo")
    add("--draft-model", default="demo")
    add("--random", choices=["qwen3"], default=None, help="random weights of this family instead")
    add("--block-sizes", type=int, nargs="+", default=[1, 5, 8], help="1: plain decoding")
    add("--prompts", type=int, default=6)
    add("--max-tokens", type=int, default=48)
    add("--output", type=Path, default=None)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        write_result(run(args, Path(folder)), args.output)


def run(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    model = hub.target_folder(args.model)
    target, tokenizer = load(str(model))
    if args.random is None:
        model = single_precision(target, model, folder / "target")
        drafter = plain_drafter(hub.drafter_folder(args.draft_model), folder / "drafter")
    else:
        model, drafter = random_qwen3(model, folder)
    asked = [[{"role": "user", "content": text}] for _, text in held_out_prompts(-(-args.prompts // 6))]
    prompts = [tokenizer.apply_chat_template(messages, add_generation_prompt=True) for messages in asked]
    pythons = {OURS: sys.executable, **dict(peer.split("=", 1) for peer in args.peer)}
    workers = [Worker(name, python, model, drafter) for name, python in pythons.items()]
    runs: list[dict[str, Any]] = []
    for rows in args.block_sizes:
        arms = [w for w in workers if w.error is None and has_arm(w.name, rows)]
        for arm in arms:
            arm.decode(prompts[0], 8, rows)  # warms up
        for number, prompt in enumerate(prompts[: args.prompts]):
            for turn, order in enumerate((arms, arms[::-1])):
                for arm in order:
                    found = arm.decode(prompt, args.max_tokens, rows)
                    if found is not None:
                        runs.append({"peer": arm.name, "rows": rows, "prompt": number, "turn": turn, **found})
        for name, row in compare(runs, rows).items():
            print(f"{rows} rows, {name}: {row}", flush=True)
    return {
        "machine": describe(),
        "weights": args.random or args.model,
        "max_tokens": args.max_tokens,
        "peers": {w.name: {"versions": w.version, "error": w.error} for w in workers},
        "summary": {rows: compare(runs, rows) for rows in args.block_sizes},
        "runs": runs,
    }


def has_arm(name: str, rows: int) -> bool:
    """Plain decoding is mlx-lm's only arm; z-lab's and dflash-mlx's loops have none of their own."""
    return rows > 1 if name in ("z-lab dflash", "dflash-mlx") else name != "mlx-lm" or rows == 1


def compare(runs: list[dict[str, Any]], rows: int) -> dict[str, dict[str, Any]]:
    """By peer: its median speed, and ours over its, median and interval. Plain: tokens/s; else rounds/s."""
    unit = "tokens/s" if rows == 1 else "rounds/s"
    speeds: dict[str, dict[tuple[int, int], float]] = {}
    texts: dict[tuple[str, int], list[int]] = {}
    for run in runs:
        if run["rows"] == rows and run["seconds"] > 0:
            count = len(run["tokens"]) - 1 if rows == 1 else run["rounds"]
            speeds.setdefault(run["peer"], {})[run["prompt"], run["turn"]] = count / run["seconds"]
            texts[run["peer"], run["prompt"]] = run["tokens"]
    found: dict[str, dict[str, Any]] = {}
    for name, values in speeds.items():
        row: dict[str, Any] = {unit: statistics.median(values.values())}
        if name != OURS:
            ratios = [ours / values[key] for key, ours in speeds.get(OURS, {}).items() if key in values]
            low, high = bootstrap(ratios)
            row["ours / theirs"] = [statistics.median(ratios), low, high]
            row["we are"] = "ahead" if low > 1 else "behind" if high < 1 else "level"
            pairs = [(texts[OURS, p], tokens) for (peer, p), tokens in texts.items() if peer == name]
            row["same tokens"] = f"{sum(a == b for a, b in pairs)} of {len(pairs)} prompts"
        found[name] = row
    return found


def plain_drafter(source: Path, folder: Path) -> Path:
    """The drafter unquantized, since most peers load no quantized one."""
    config = json.loads((source / "config.json").read_text())
    weights = dict(mx.load(str(source / "model.safetensors")))  # type: ignore[arg-type]
    scheme = config.pop("quantization", None)
    for key in [k for k in weights if k.endswith(".scales")]:
        stem = key.removesuffix(".scales")
        packed, scales, biases = (weights.pop(f"{stem}.{part}") for part in ("weight", "scales", "biases"))
        how = {"group_size": scheme["group_size"], "bits": scheme["bits"]}
        weights[f"{stem}.weight"] = mx.dequantize(packed, scales, biases, **how)
    weights = {key: value.astype(mx.float32) for key, value in weights.items()}
    config.setdefault("max_position_embeddings", 8192)
    return write_model(folder, config, weights)


def single_precision(target: Target, source: Path, folder: Path) -> Path:
    """A loaded target's weights as this package holds them on a CPU, unquantized float32, for all to read."""
    config = json.loads((source / "config.json").read_text())
    config.pop("quantization", None), config.pop("quantization_config", None)
    weights = dict(tree_flatten(target.model.parameters()))
    write_model(folder, {**config, "dtype": "float32"}, {k: v.astype(mx.float32) for k, v in weights.items()})
    copy_tokenizer(source, folder)
    return folder


def copy_tokenizer(source: Path, folder: Path) -> None:
    for pattern in ("*token*", "chat_template*"):
        for file in source.glob(pattern):
            shutil.copy(file, folder)


def write_model(folder: Path, config: dict[str, Any], weights: dict[str, mx.array]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
    return folder


def random_qwen3(tokenizer: Path, folder: Path) -> tuple[Path, Path]:
    """A Qwen3 target of 12 layers and a drafter of 2, random, with another model's tokenizer."""
    common = {
        "model_type": "qwen3", "hidden_size": 512, "intermediate_size": 1536, "num_attention_heads": 8,
        "num_key_value_heads": 4, "head_dim": 64, "rms_norm_eps": 1e-6, "rope_theta": 1000000.0, "vocab_size": 49152,
        "max_position_embeddings": 8192, "tie_word_embeddings": True, "attention_bias": False, "hidden_act": "silu",
    }  # fmt: skip
    target = {**common, "architectures": ["Qwen3ForCausalLM"], "num_hidden_layers": 12, "eos_token_id": 2}
    drafter = {
        **common, "architectures": ["DFlashDraftModel"], "num_hidden_layers": 2, "block_size": 8,
        "num_target_layers": 12, "layer_types": ["full_attention"] * 2, "rope_scaling": None,
        "dflash_config": {"mask_token_id": 4, "target_layer_ids": [1, 6, 10]},
    }  # fmt: skip
    rng = random.Random(0)
    weights = {"model.embed_tokens.weight": noise(rng, 49152, 512), "model.norm.weight": mx.ones(512)}
    weights |= {f"model.{key}": value for key, value in layers(rng, 12).items()}
    draft = {"fc.weight": noise(rng, 512, 1536), "hidden_norm.weight": mx.ones(512), "norm.weight": mx.ones(512)}
    model = write_model(folder / "target", target, weights)
    copy_tokenizer(tokenizer, model)
    return model, write_model(folder / "drafter", drafter, draft | layers(rng, 2))


def noise(rng: random.Random, *shape: int) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(rng.randrange(2**31))) * 0.03


def layers(rng: random.Random, count: int) -> dict[str, mx.array]:
    shapes = {
        "self_attn.q_proj": (512, 512), "self_attn.k_proj": (256, 512), "self_attn.v_proj": (256, 512),
        "self_attn.o_proj": (512, 512), "mlp.gate_proj": (1536, 512), "mlp.up_proj": (1536, 512),
        "mlp.down_proj": (512, 1536),
    }  # fmt: skip
    ones = {"input_layernorm": 512, "post_attention_layernorm": 512, "self_attn.q_norm": 64, "self_attn.k_norm": 64}
    found: dict[str, mx.array] = {}
    for i in range(count):
        found |= {f"layers.{i}.{name}.weight": noise(rng, *shape) for name, shape in shapes.items()}
        found |= {f"layers.{i}.{name}.weight": mx.ones(size) for name, size in ones.items()}
    return found


if __name__ == "__main__":
    main()
