"""tokenizer.json and its config from a GGUF file's metadata: what the file names, or a refusal that names it.

Byte-level vocabularies of SmolLM2 are ours (`gguf.py`); all others are built by transformers.
"""

from pathlib import Path
from typing import Any

import numpy as np

from mlx_dflash.errors import UnsupportedError

from .gguf import Metadata, convert_tokenizer
from .gguf_file import GgufFile
from .writer import write_json


def write_tokenizer(file: GgufFile, folder: Path) -> None:
    """tokenizer.json and tokenizer_config.json with the chat template, from the metadata.

    Byte-level vocabularies of SmolLM2 are ours (`gguf.py`); all others are built by transformers.
    """
    tokens = file.need("tokenizer.ggml.tokens")
    if (file.get("tokenizer.ggml.model"), file.get("tokenizer.ggml.pre")) == ("gpt2", "smollm"):
        fields = {k: file.get(f"tokenizer.ggml.{k}") for k in ("model", "pre", "tokens", "merges")}
        fields["token_type"] = np.array(file.need("tokenizer.ggml.token_type"))
        write_json(
            folder / "tokenizer.json",
            convert_tokenizer(Metadata({f"tokenizer.ggml.{k}": v for k, v in fields.items()})),
        )
    else:
        build_tokenizer(file).save(str(folder / "tokenizer.json"))
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    for key, name in {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown"}.items():
        if (index := file.get(f"tokenizer.ggml.{name}_token_id")) is not None:
            config[f"{key}_token"] = tokens[int(index)]
    for key in ("add_bos_token", "add_eos_token"):
        if (value := file.get(f"tokenizer.ggml.{key}")) is not None:
            config[key] = bool(value)
    if (template := file.get("tokenizer.chat_template")) is not None:
        config["chat_template"] = template
    config["model_max_length"] = int(file.need_own("context_length"))
    write_json(folder / "tokenizer_config.json", config)


def build_tokenizer(file: GgufFile) -> Any:
    try:
        from transformers.integrations.gguf.gguf_tokenizer_mapping import convert_gguf_tokenizer, get_gguf_tokenizer

        architecture, fields, _ = get_gguf_tokenizer(str(file.path))
        return convert_gguf_tokenizer(architecture, fields)[0]
    except (ImportError, ValueError, LookupError, TypeError, AttributeError, NotImplementedError) as e:
        kind = (file.get("tokenizer.ggml.model"), file.get("tokenizer.ggml.pre"))
        raise UnsupportedError(
            f"{file.path} has the tokenizer {kind}, which transformers can't rebuild ("
            f"{' '.join(str(e).split())[:120]}); give the Hugging Face release"
        ) from e
