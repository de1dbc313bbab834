"""Tiny models, drafters and tokenizers for tests: the golden folders, edited copies, and things made in code."""

import json
import shutil
import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import mlx.core as mx
import numpy as np

import mlx_dflash.cli
from mlx_dflash.targets import Target, tokenizer_of

GOLDEN = Path(__file__).parent / "golden"
REMOVE: Any = object()  # as the value of a config override: drop the key

Tensors = dict[str, mx.array]


def command_line() -> ModuleType:
    """The module behind `python -m mlx_dflash.generate`."""
    return mlx_dflash.cli


def target_folder(family: str = "qwen3") -> Path:
    """A golden target: vocabulary 300, hidden 48, 8 layers, stop id 2, tokens `w{i}`, no chat template."""
    return GOLDEN / family / "target"


def draft_folder(family: str = "qwen3") -> Path:
    """The drafter fitted to it: block 8, mask id 299, taps 1, 3, 5."""
    return GOLDEN / family / "draft"


def golden(family: str = "qwen3") -> dict[str, np.ndarray]:
    """golden.npz; tests/oracle/README.md lists the keys."""
    return dict(np.load(GOLDEN / family / "golden.npz"))


def words(ids: Iterable[int]) -> str:
    """The text that a golden target's tokenizer makes of these ids.

    It makes these ids of the text only without its `eos_token` (see `copy_folder`): `w2` is special and cuts `w25`.
    """
    return " ".join({0: "<pad>", 1: "<s>"}.get(int(i), f"w{int(i)}") for i in ids)


def copy_folder(
    source: Path,
    folder: Path,
    config: dict[str, Any] | None = None,
    tensors: Callable[[Tensors], Tensors] | None = None,
    tokenizer_config: dict[str, Any] | None = None,
) -> Path:
    """Copy a model folder to `folder`, with overrides for its JSON files (REMOVE drops a key) and edited tensors."""
    shutil.copytree(source, folder)
    edit_json(folder / "config.json", config or {})
    edit_json(folder / "tokenizer_config.json", tokenizer_config or {})
    if tensors is not None:
        weights = mx.load(str(folder / "model.safetensors"))
        mx.eval(weights)
        (folder / "model.safetensors").unlink()
        mx.save_safetensors(str(folder / "model.safetensors"), tensors(weights), {"format": "mlx"})
    return folder


def edit_json(path: Path, overrides: dict[str, Any]) -> None:
    """Override keys of a JSON file."""
    if overrides:
        value = json.loads(path.read_text()) | overrides
        path.write_text(json.dumps({k: v for k, v in value.items() if v is not REMOVE}, indent=1))


@dataclass
class StubContext:
    """Counts the rows that it was given and keeps their features, each (B, n, taps * hidden)."""

    features: list[mx.array] = field(default_factory=list)

    @property
    def length(self) -> int:
        return sum(f.shape[1] for f in self.features)

    def checkpoint(self) -> int:
        return len(self.features)

    def restore(self, saved: int) -> None:
        del self.features[saved:]

    def arrays(self) -> list[mx.array]:
        return list(self.features)


@dataclass
class StubDrafter:
    """Drafts by script. `script(position)` gives ids for the absolute positions from `position` on, cut to the block.

    asked: (position, rows) of every `propose`, in order.
    """

    target: Target
    script: Callable[[int], Sequence[int]]
    block_size: int = 8
    taps: tuple[int, ...] = (0,)
    asked: list[tuple[int, int]] = field(default_factory=list)

    def make_context(self, window: int | None = None, sink: int = 0) -> StubContext:
        return StubContext()

    def rows(self, width: int, remaining: int) -> int:
        return min(width, remaining + 1)

    def append(self, features: mx.array, context: StubContext) -> None:
        context.features.append(features)

    def propose(
        self, anchor: mx.array, rows: int, context: StubContext, draw: Callable[[mx.array], mx.array]
    ) -> mx.array:
        position = context.length + 1  # the anchor's is context.length
        self.asked.append((position, rows))
        ids = list(self.script(position))[: rows - 1]
        assert len(ids) == rows - 1, f"the script gives {len(ids)} ids at {position}, {rows - 1} are needed"
        return mx.array(ids, anchor.dtype)


def byte_characters() -> list[str]:
    """GPT-2's printable character for each byte, as byte-level BPE vocabularies spell them."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [b for b in range(256) if b not in printable]
    return [chr(b if b in printable else 256 + others.index(b)) for b in range(256)]


def byte_tokenizer(folder: Path, kind: str = "bpe", more: Sequence[str] = ()) -> Any:
    """mlx-lm's wrapper of a tokenizer with a token for every byte: id b is byte b, 256 is <s>, 257 is </s>, the end.

    kind picks mlx-lm's detokenizer: 'bpe', 'spm' (with byte fallback) or 'naive'. more: longer tokens, from id 258 on.
    """
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    characters = byte_characters()
    if kind == "spm":
        replace = {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "}
        decoder: Any = {"type": "Sequence", "decoders": [replace, {"type": "ByteFallback"}, {"type": "Fuse"}]}
        normalizer: Any = {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}
        bytes_, spell, splitter = [f"<0x{b:02X}>" for b in range(256)], lambda text: text.replace(" ", "\u2581"), None
    else:
        decoder = byte_level if kind == "bpe" else {"type": "Sequence", "decoders": [byte_level]}
        normalizer, splitter = None, byte_level
        bytes_, spell = characters, lambda text: "".join(characters[b] for b in text.encode())
    vocabulary = [*bytes_, "<s>", "</s>", *map(spell, more)]
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": 256, "content": "<s>", **flags}, {"id": 257, "content": "</s>", **flags}],
        "normalizer": normalizer,
        "pre_tokenizer": splitter,
        "post_processor": None,
        "decoder": decoder,
        "model": {
            "type": "BPE",
            "byte_fallback": kind == "spm",
            "vocab": {token: i for i, token in enumerate(vocabulary)},
            "merges": [],
        },
    }
    folder.mkdir(parents=True, exist_ok=True)
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"clean_up_tokenization_spaces": False}))
    (folder / "config.json").write_text(json.dumps({"eos_token_id": 257}))
    return tokenizer_of(folder)


def write_gguf(path: Path, seed: int = 0) -> None:
    """A random one-layer Llama in GGUF, laid out like the demo's: Q4_1 matrices, Q8_0 embedding, byte vocabulary."""
    rng = np.random.default_rng(seed)
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *byte_characters(), "\u0120a"]
    special_ids = {"bos": 1, "eos": 2, "padding": 2, "unknown": 0}
    width, inner, heads = 64, 96, 2
    fields: dict[str, Any] = {
        "general.architecture": "llama",
        "general.file_type": 3,
        "llama.block_count": 1,
        "llama.context_length": 128,
        "llama.embedding_length": width,
        "llama.feed_forward_length": inner,
        "llama.attention.head_count": heads,
        "llama.attention.head_count_kv": heads,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.rope.freq_base": 10000.0,
        "llama.vocab_size": len(tokens),
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3, 3, 3] + [1] * (len(tokens) - 3),
        "tokenizer.ggml.merges": ["\u0120 a"],
        **{f"tokenizer.ggml.{name}_token_id": i for name, i in special_ids.items()},
        "tokenizer.chat_template": "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}",
    }
    shapes = {f"blk.0.attn_{x}.weight": (width, width) for x in ("q", "k", "v", "output")}
    shapes |= {f"blk.0.ffn_{x}.weight": (inner, width) for x in ("gate", "up")}
    shapes["blk.0.ffn_down.weight"] = (width, inner)
    tensors: dict[str, tuple[tuple[int, ...], int, bytes]] = {  # name -> shape, ggml type, data
        name: (shape, 3, q4_1(rng, shape)) for name, shape in shapes.items()
    }
    tensors["token_embd.weight"] = ((len(tokens), width), 8, q8_0(rng, (len(tokens), width)))
    for name in ("blk.0.attn_norm", "blk.0.ffn_norm", "output_norm"):
        tensors[f"{name}.weight"] = ((width,), 0, np.ones(width, np.float32).tobytes())

    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(fields))
    head += b"".join(gguf_string(key) + gguf_value(value) for key, value in fields.items())
    data = b""
    for name, (shape, kind, raw) in tensors.items():
        head += gguf_string(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *reversed(shape), kind, len(data))
        data += raw + bytes(-len(raw) % 32)
    path.write_bytes(head + bytes(-len(head) % 32) + data)


def q4_1(rng: np.random.Generator, shape: tuple[int, int]) -> bytes:
    """Random blocks of 32 weights: fp16 scale, fp16 minimum, 16 bytes of 4-bit integers."""
    blocks = shape[0] * shape[1] // 32
    scale = (rng.random((blocks, 1)) * 0.02 + 0.01).astype("<f2")
    quants = rng.integers(0, 256, (blocks, 16), np.uint8)
    return np.hstack([scale.view(np.uint8), (-8 * scale).view(np.uint8), quants]).tobytes()


def q8_0(rng: np.random.Generator, shape: tuple[int, int]) -> bytes:
    """Random blocks of 32 weights: fp16 scale, 32 8-bit integers."""
    blocks = shape[0] * shape[1] // 32
    scale = (rng.random((blocks, 1)) * 0.01 + 0.005).astype("<f2")
    quants = rng.integers(-127, 128, (blocks, 32), np.int8)
    return np.hstack([scale.view(np.uint8), quants.view(np.uint8)]).tobytes()


def gguf_string(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def gguf_value(value: Any) -> bytes:
    """Type tag and value; an int is uint32, a float float32, a list an array of its first item's type."""
    kinds: dict[type, tuple[int, Callable[[Any], bytes]]] = {
        int: (4, lambda v: struct.pack("<I", v)),
        float: (6, lambda v: struct.pack("<f", v)),
        str: (8, gguf_string),
    }
    if isinstance(value, list):
        kind, pack = kinds[type(value[0])]
        return struct.pack("<IIQ", 9, kind, len(value)) + b"".join(map(pack, value))
    kind, pack = kinds[type(value)]
    return struct.pack("<I", kind) + pack(value)
