"""config.json in whichever layout it was written -> the flat layout that mlx-lm's model files read.

transformers 5 nests RoPE settings in `rope_parameters`; mlx-lm 0.32 then silently builds Llama with the default base.
"""

from typing import Any

from ..errors import CheckpointError, UnsupportedError


def normalise(config: dict[str, Any], where: str = "config.json") -> dict[str, Any]:
    """A copy with `rope_theta` and `rope_scaling` at top level and the defaults of the dense families spelled out."""
    flat = dict(config)
    for key in ("rope_parameters", "rope_scaling"):
        if not isinstance(flat.get(key) or {}, dict):
            raise CheckpointError(f"{where} has {key} {flat[key]!r}, not an object; download it again")
    for key in ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size"):
        if not isinstance(flat.get(key), int):
            raise CheckpointError(f"{where} needs {key} as a whole number; give a complete model folder")
    rope = flat.get("rope_parameters")
    flat["rope_parameters"] = None
    if rope:
        rope = dict(rope)
        theta = rope.pop("rope_theta", None)
        if theta is not None:
            flat["rope_theta"] = theta
        default = rope.get("rope_type", rope.get("type", "default")) == "default"
        flat["rope_scaling"] = None if default else rope
    flat.setdefault("rope_scaling", None)
    if flat.get("head_dim") is None:
        flat["head_dim"] = flat["hidden_size"] // flat["num_attention_heads"]
    # Hugging Face's default is False for qwen3 and llama; mlx-lm's llama assumes True where the key is missing.
    flat.setdefault("tie_word_embeddings", False)
    window = flat.get("use_sliding_window") or "sliding_attention" in (flat.get("layer_types") or [])
    if window:
        raise UnsupportedError(f"{flat['model_type']} with sliding-window layers is not supported yet")
    return flat
