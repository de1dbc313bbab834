"""A target's folder -> the plan of its MLX folder, with mlx-lm's names and a config that stock mlx-lm reads rightly.

The model's own module says what tensors are called and which of them can be quantized; it is built, never filled.
"""

import copy
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.utils import _get_classes, load_config

from mlx_dflash.checkpoint import Checkpoint, read_json
from mlx_dflash.errors import CheckpointError, UnsupportedError
from mlx_dflash.targets import Target, family_of, one_line, private_arrays
from mlx_dflash.targets.config import normalise
from mlx_dflash.targets.experts import ONE, stack_experts

from .decode import Tensors, decode
from .plan import Options, Plan, check_names, check_shapes, fill, quantize

# Towers that are no part of the text: dropped, and named.
NOT_TEXT = ("vision", "visual", "audio", "multi_modal", "image", "embed_audio")
LEFT_OUT = ("vision_config", "audio_config", "_name_or_path", "transformers_version")
COPIED = [
    *("tokenizer*", "*.jinja", "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt"),
    *("generation_config.json", "chat_template.json"),
]


class Port:
    """An opened target: its empty module, its sanitized tensors and all that is to be said of them."""

    def __init__(self, checkpoint: Checkpoint, tensors: Tensors):
        self.checkpoint = checkpoint
        folder = checkpoint.folder
        family = family_of(checkpoint)
        raw = load_config(folder)
        if (extra := folder / "hf_quant_config.json").exists() and not raw.get("quantization_config"):
            raw["quantization_config"] = {"quant_method": "modelopt", **read_json(extra)}
        try:
            self.config = family.prepare(normalise(raw, str(folder / "config.json")))
        except (CheckpointError, UnsupportedError) as e:
            raise type(e)(f"{folder}: {e}") from e
        self.family = family
        self.given: dict[str, Any] | None = self.config.get("quantization")
        decoded = decode(raw, tensors, str(folder))
        self.notes, self.dropped = decoded.notes, dict(decoded.dropped)
        self.model = build(family, self.config, folder)
        check_tied(self.config, decoded.tensors, str(folder), self.dropped)
        self.tensors = self.sanitize(decoded.tensors)
        check_names({name for name, _ in tree_flatten(self.model.parameters())}, set(self.tensors), str(folder))
        check_shapes(self.model, self.tensors, str(folder))

    def sanitize(self, tensors: Tensors) -> Tensors:
        """mlx-lm's names and layouts; what its module leaves out is found by counting bytes, and named."""
        model: Any = self.model
        if not hasattr(model, "sanitize"):
            return tensors
        before = {name: value.nbytes for name, value in tensors.items()}
        try:
            out: Tensors = model.sanitize(dict(tensors))
            if any(ONE.fullmatch(name) for name in out):  # parts of packed experts that it does not know
                out = stack_experts(out)
        except (ValueError, LookupError, TypeError, AttributeError, RuntimeError) as e:
            raise CheckpointError(
                f"{self.checkpoint.folder} does not load as {self.config['model_type']}: {one_line(e)}; download it "
                "again"
            ) from e
        lost = sum(before.values()) - sum(value.nbytes for value in out.values())
        if lost:
            gone = [name for name in tensors if drops(model, name, tensors[name])]
            if sum(before[name] for name in gone) != lost:
                raise UnsupportedError(
                    f"{self.checkpoint.folder}: {lost} bytes of its tensors would be left out unnamed; not supported"
                )
            self.dropped |= {name: reason(name) for name in gone}
        return out

    def plan(self, options: Options) -> Plan:
        config = self.config
        for _ in range(2):  # the second time adds nothing that a conversion of the result would
            config = self.family.prepare(normalise(written(config)))
        config = written(config)
        if options.dtype:
            config |= {"dtype": options.dtype}
            config.pop("torch_dtype", None)
        plan = Plan(config, dropped=dict(self.dropped), notes=list(self.notes))
        quantize(plan, self.model, dict(self.tensors), self.given, options)
        return plan

    def reference(self) -> Target:
        """The target with the source's own values: what a quality gate measures against."""
        model = build(self.family, self.config, self.checkpoint.folder)
        fill(model, self.tensors, self.given)
        target = self.family(model, self.config)
        mx.eval(model.parameters(), private_arrays(model))
        return target

    def shape(self) -> Target:
        """The target without a weight: enough to check a drafter against."""
        return self.family(build(self.family, self.config, self.checkpoint.folder), self.config)


def written(config: dict[str, Any]) -> dict[str, Any]:
    """What goes into config.json, without other towers, quantization and a copy of itself."""
    left_out = (*LEFT_OUT, "quantization", "quantization_config")
    out = {k: v for k, v in config.items() if k not in left_out}
    if isinstance(inner := config.get("text_config"), dict):
        out["text_config"] = {k: v for k, v in inner.items() if k not in (*left_out, "text_config")}
    return out


def build(family: type[Target], config: dict[str, Any], folder: Path) -> nn.Module:
    """mlx-lm's module of this config; its random weights are lazy and never made."""
    classes: Any = family.model_classes or _get_classes
    try:
        model_class, arguments = classes(config=copy.deepcopy(config))
        return model_class(arguments.from_dict(copy.deepcopy(config)))
    except (ValueError, LookupError, TypeError, AttributeError) as e:
        raise CheckpointError(
            f"{folder} does not load as {config['model_type']}: {one_line(e)}; download it again"
        ) from e


def check_tied(config: dict[str, Any], tensors: Tensors, where: str, dropped: dict[str, str]) -> None:
    """`tie_word_embeddings` against the tensors. A spare head that equals the embedding is dropped, and named."""
    heads = [name for name in tensors if name.endswith("lm_head.weight")]
    tied = bool(config.get("tie_word_embeddings"))
    if not tied and not heads:
        raise CheckpointError(
            f"{where} has no lm_head.weight, and its config.json does not say tie_word_embeddings: true; set it if "
            "head and embedding are one, else download it again"
        )
    if not tied or not heads:
        return
    table = next((name for name in tensors if name.endswith("embed_tokens.weight")), None)
    head = heads[0]
    if table is None or tensors[table].shape != tensors[head].shape or not same(tensors[table], tensors[head]):
        raise CheckpointError(
            f"{where} has tie_word_embeddings: true and {head}, which is not the embedding; set it to false in "
            "config.json if the head is the model's own"
        )
    for name in [n for n in tensors if n.startswith(head.removesuffix("weight"))]:
        del tensors[name]
        dropped[name] = "equals the embedding, to which it is tied"


def same(a: mx.array, b: mx.array) -> bool:
    """Equality in slices, so that two large tables are never whole in memory."""
    step = max(1, 2**28 // max(a.nbytes // max(a.shape[0], 1), 1))
    return all(bool(mx.array_equal(a[i : i + step], b[i : i + step])) for i in range(0, a.shape[0], step))


def drops(model: Any, name: str, value: mx.array) -> bool:
    try:
        return not model.sanitize({name: value})
    except (ValueError, LookupError, TypeError, AttributeError, RuntimeError):
        return False  # it is looked for together with others, so it is used


def reason(name: str) -> str:
    if any(word in name for word in NOT_TEXT):
        return "not part of the text model"
    if "mtp." in name:
        return "a multi-token prediction head, which DFlash does not use"
    return "mlx-lm's model does not use it"
