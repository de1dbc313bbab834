"""A trained drafter -> a folder in z-lab's format (MLX-quantized if asked), with its model card."""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from ..drafters.config import DrafterConfig
from ..drafters.dflash import DFlashModel
from ..drafters.formats.keys import SIZES
from .config import TrainingConfig
from .model import fold_scales, quantize_linears

GROUP_SIZE = 64


def export_drafter(
    model: DFlashModel, shape: DrafterConfig, scales: list[float], folder: Path, *, bits: int | None = 8
) -> None:
    """Write config.json and model.safetensors. The tap scales are folded into `fc` first; model is changed.

    bits: affine width of the draft layers' matrices, group size 64, with `fc` and the scales in fp16; None writes fp32.
    """
    fold_scales(model, scales, shape.hidden_size)
    quantization = None
    if bits is not None:
        quantize_linears(model, bits, GROUP_SIZE)
        quantization = {"group_size": GROUP_SIZE, "bits": bits}
    folder.mkdir(parents=True, exist_ok=True)
    weights = dict(tree_flatten(model.parameters()))
    if bits is not None:  # norms, the few that are left, stay fp32
        halved = [name for name in weights if name == "fc.weight" or name.endswith((".scales", ".biases"))]
        weights |= {name: weights[name].astype(mx.float16) for name in halved}
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})
    (folder / "config.json").write_text(json.dumps(zlab_config(shape, quantization), indent=1) + "\n")


def zlab_config(shape: DrafterConfig, quantization: dict[str, Any] | None) -> dict[str, Any]:
    values = {k: getattr(shape, k) for k in (*SIZES, "rms_norm_eps", "rope_theta", "vocab_size", "block_size")}
    inner = {"mask_token_id": shape.mask_token_id, "target_layer_ids": list(shape.target_layer_ids)}
    extra = {"quantization": quantization} if quantization else {}
    return {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        **values,
        "num_target_layers": shape.num_target_layers,
        "hidden_act": "silu",
        "attention_bias": False,
        "layer_types": ["full_attention"] * shape.num_hidden_layers,
        "rope_scaling": None,
        "tie_word_embeddings": False,
        "dflash_config": inner,
        **extra,
    }


def model_card(target: str, config: TrainingConfig, facts: dict[str, Any], results: dict[str, Any]) -> str:
    """Markdown: what the drafter is for, how it was made, how well it does. Figures come from `evaluate`."""
    rows = [f"# DFlash drafter for {target}", ""]
    rows += [
        f"{config.layers} layers, block {config.block_size}, taps {list(config.taps)}, mask id {config.mask_token_id}."
    ]
    rows += ["Made with `python -m mlx_dflash.training`.", "", "| training | |", "|---|---|"]
    rows += [f"| {key} | {value} |" for key, value in facts.items()]
    rows += ["", "Real greedy speculative decoding of held-out prompts, none of them in the training data:", ""]
    rows += ["| block size | task | rounds | mean accepted length | acceptance |", "|---|---|---|---|---|"]
    for block, tasks in results.items():
        for task, r in tasks.items():
            cells = f"{r['rounds']} | {r['mean_accepted_length']:.2f} | {r['acceptance_rate']:.1%}"
            rows.append(f"| {block} | {task} | {cells} |")
    return "\n".join(rows) + "\n"
