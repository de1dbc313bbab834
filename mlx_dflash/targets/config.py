"""config.json in whichever layout it was written -> the flat layout that mlx-lm's model files read.

transformers 5 nests RoPE settings in `rope_parameters`; mlx-lm 0.32 then silently builds Llama with the default base.
Models with other towers nest all that is said of the text in `text_config`. What a family says by other keys, and
which values stand for missing keys, is its own affair (`Target.prepare`).
"""

from typing import Any

from ..errors import CheckpointError, UnsupportedError


def normalise(config: dict[str, Any], where: str = "config.json") -> dict[str, Any]:
    """A copy with all keys of the text and of a single `rope_parameters` at top level, `rope_scaling` among them.

    `rope_parameters` stays where it is keyed by layer type; `text_config` stays too, since some of mlx-lm's model
    files read it. Raises CheckpointError, naming `where`, for values of another type.
    """
    text = config.get("text_config") or {}
    flat = {**config, **text, "model_type": config["model_type"]}
    for key in ("rope_parameters", "rope_scaling"):
        if not isinstance(flat.get(key) or {}, dict):
            raise CheckpointError(f"{where} has {key} {flat[key]!r}, not an object; download it again")
    for key in ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size"):
        if not isinstance(flat.get(key), int):
            raise CheckpointError(f"{where} needs {key} as a whole number; give a complete model folder")
    rope = flat.get("rope_parameters")
    if rope and any(isinstance(value, dict) for value in rope.values()):
        return flat
    flat["rope_parameters"] = None
    if rope:
        rope = dict(rope)
        for key in ("rope_theta", "partial_rotary_factor"):
            if (value := rope.pop(key, None)) is not None:
                flat[key] = value
        default = rope.get("rope_type", rope.get("type", "default")) == "default"
        flat["rope_scaling"] = None if default else rope
    flat.setdefault("rope_scaling", None)
    return flat


def refuse_other_values(config: dict[str, Any], **known: Any) -> None:
    """Raise UnsupportedError for a key that is there with another value than the one its family is written for."""
    for key, value in known.items():
        if config.get(key, value) != value:
            raise UnsupportedError(
                f"{config['model_type']} with {key} = {config[key]!r} is not supported; {value!r} is"
            )


def refuse_unread_scaling(config: dict[str, Any]) -> None:
    """Raise UnsupportedError for YaRN settings that mlx-lm 0.32 ignores in silence."""
    scaling = config.get("rope_scaling") or {}
    if scaling.get("truncate", True) is not True or scaling.get("attention_factor") is not None:
        raise UnsupportedError(
            f"{config['model_type']} with truncate or attention_factor in its rope_scaling is not supported: mlx-lm "
            "ignores them"
        )
