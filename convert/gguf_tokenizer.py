"""tokenizer.json and its config from a GGUF file's metadata: what the file names, or a refusal that names it.

Byte-level vocabularies of SmolLM2 are ours (`gguf.py`); all others are built by transformers.
"""

from pathlib import Path
from typing import Any

import numpy as np
from tokenizers.processors import TemplateProcessing

from mlx_dflash.errors import CheckpointError, UnsupportedError

from .gguf import Metadata, convert_tokenizer
from .gguf_file import GgufFile
from .writer import write_json

MODELS = ("gpt2", "llama", "gemma4")  # byte-level BPE, SentencePiece, Gemma 4's BPE


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
        built = build_tokenizer(file)
        add_ends(built, file)
        built.save(str(folder / "tokenizer.json"))
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    for key, name in {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown"}.items():
        if (index := file.get(f"tokenizer.ggml.{name}_token_id")) is not None:
            config[f"{key}_token"] = tokens[int(index)]
    if (template := file.get("tokenizer.chat_template")) is not None:
        config["chat_template"] = template
    config["model_max_length"] = int(file.need_own("context_length"))
    write_json(folder / "tokenizer_config.json", config)


def add_ends(tokenizer: Any, file: GgufFile) -> None:
    """The tokens that a text begins and ends with. SentencePiece's begins with one unless the file says otherwise;
    Gemma 4's reference adds none, since the chat template does."""
    kind, tokens = file.need("tokenizer.ggml.model"), file.need("tokenizer.ggml.tokens")
    usual = {"bos": kind == "llama", "eos": False}
    ids = {name: file.get(f"tokenizer.ggml.{name}_token_id") for name in usual}
    added = [n for n in usual if kind != "gemma4" and file.get(f"tokenizer.ggml.add_{n}_token", usual[n])]
    if kind == "llama" and ids["bos"] is None:
        added = [n for n in added if n != "bos"]
    if lacking := [n for n in added if ids[n] is None]:
        raise CheckpointError(f"{file.path} adds {lacking[0]} to a text and has no id for it; give another release")
    if not added:
        return
    named = [(tokens[int(ids[n])], int(ids[n])) for n in added]
    pieces = {n: [token] for n, (token, _) in zip(added, named, strict=True)}
    text = [*pieces.get("bos", []), "$A", *pieces.get("eos", [])]
    tokenizer.post_processor = TemplateProcessing(single=text, special_tokens=named)


def build_tokenizer(file: GgufFile) -> Any:
    """The tokenizer that transformers makes of the file. It would take any unknown split for GPT-2's, so those are
    refused here; llama.cpp knows a split by its name in `tokenizer.ggml.pre`."""
    kind, split = file.need("tokenizer.ggml.model"), file.get("tokenizer.ggml.pre")
    try:
        from transformers.integrations.gguf import gguf_tokenizer_mapping as mapping

        splits = {"smollm", "gpt-2", *mapping.GGUF_PRE_TOKENIZER_SPLITS}
        if kind not in MODELS or (kind == "gpt2" and split not in splits):
            what = f"split {split!r}" if kind in MODELS else f"model {kind!r}"
            known = sorted(splits) if kind in MODELS else MODELS
            raise UnsupportedError(
                f"{file.path} has a tokenizer of the {what}, which is not supported ({', '.join(known)} are); give the "
                "Hugging Face release"
            )
        # what its get_gguf_tokenizer reads, which needs torch
        named = {own: file.get(f"tokenizer.{key}") for key, own in mapping.GGUF_TOKENIZER_MAPPING["tokenizer"].items()}
        fields = {own: value for own, value in named.items() if value is not None}
        return mapping.convert_gguf_tokenizer(file.architecture, fields)[0]
    except (ImportError, ValueError, LookupError, TypeError, AttributeError, NotImplementedError) as e:
        raise UnsupportedError(
            f"{file.path} has the tokenizer {(kind, split)}, which transformers can't rebuild ("
            f"{' '.join(str(e).split())[:120]}); give the Hugging Face release"
        ) from e
