"""Tokenizers from GGUF metadata, on small vocabularies: each model and split that supported families use."""

import json

import gguf
import pytest
import sentencepiece
from mlx_dflash.convert.gguf_file import GgufFile
from mlx_dflash.convert.gguf_tokenizer import write_tokenizer
from tiny import byte_characters

from mlx_dflash import UnsupportedError
from mlx_dflash.targets import tokenizer_of

NORMAL, UNKNOWN, CONTROL, USER, BYTE = 1, 2, 3, 4, 6


def tokenizer(folder, model, tokens, types, arch="llama", **fields):
    """The folder's tokenizer, made of a file that has no tensors."""
    w = gguf.GGUFWriter(str(folder / "t.gguf"), arch)
    w.add_context_length(128)
    w.add_tokenizer_model(model)
    w.add_token_list(tokens)
    w.add_token_types(types)
    for name, value in fields.items():
        getattr(w, f"add_{name}")(value)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
    write_tokenizer(GgufFile(folder / "t.gguf"), folder)
    (folder / "config.json").write_text(json.dumps({"eos_token_id": fields.get("eos_token_id", 0)}))
    return tokenizer_of(folder)


MERGES = ["1 2", "12 3", "4 5", "123 45", "\u0120 a", "a B"]
TEXT = "12345 aB"
# What no merge may cross: digits in threes, one by one, or all; a capital after a small letter.
SPLITS = {
    "llama-bpe": ["123", "45", "\u0120a", "B"],
    "qwen2": ["1", "2", "3", "4", "5", "\u0120a", "B"],
    "qwen35": ["1", "2", "3", "4", "5", "\u0120a", "B"],
    "gpt-4o": ["123", "45", "\u0120a", "B"],
    "llama4": ["123", "45", "\u0120a", "B"],
    "gpt-2": ["12345", "\u0120a", "B"],
    "smollm": ["1", "2", "3", "4", "5", "\u0120a", "B"],
}


def byte_level(folder, split, **more):
    tokens = [*byte_characters(), *(m.replace(" ", "") for m in MERGES), "<|end|>", "<tool>"]
    types = [NORMAL] * (256 + len(MERGES)) + [CONTROL, USER]
    ends = {"eos_token_id": len(tokens) - 2, "bos_token_id": len(tokens) - 2, "pad_token_id": len(tokens) - 2}
    ends["unk_token_id"] = len(tokens) - 2
    return tokenizer(folder, "gpt2", tokens, types, tokenizer_pre=split, token_merges=MERGES, **ends, **more)


@pytest.mark.parametrize("split", SPLITS)
def test_byte_level_vocabularies_split_as_their_name_says(split, tmp_path):
    made = byte_level(tmp_path, split)
    assert made.convert_ids_to_tokens(made.encode(TEXT)) == SPLITS[split]
    for text in ("Grüße, 世界 🙂\n\n  x = 1", TEXT, " '\t"):
        assert made.decode(made.encode(text)) == text
    ids = made.encode("a<|end|>b<tool>")
    assert made.convert_ids_to_tokens(ids)[1::2] == ["<|end|>", "<tool>"]


def test_small_and_capital_letters_part_in_gpt_4o_alone(tmp_path):
    kinds = {}
    for split in ("llama-bpe", "gpt-4o"):
        (tmp_path / split).mkdir()
        made = byte_level(tmp_path / split, split)
        kinds[split] = made.convert_ids_to_tokens(made.encode("aB"))
    assert kinds == {"llama-bpe": ["aB"], "gpt-4o": ["a", "B"]}


@pytest.mark.parametrize("adds", [True, False])
def test_the_first_token_is_added_where_the_file_says_so(adds, tmp_path):
    made = byte_level(tmp_path, "llama-bpe", add_bos_token=adds)
    assert (made.encode("x")[0] == made.bos_token_id) == adds


@pytest.fixture(scope="module")
def sentences(tmp_path_factory):
    """A SentencePiece model trained here, which is the reference for what a file made of it must give."""
    folder = tmp_path_factory.mktemp("spm")
    text = "the cat sat on the mat and the hat\nthat cat is fat\na man ran at the van\nwhat the cat had\n" * 20
    (folder / "text.txt").write_text(text)
    sentencepiece.SentencePieceTrainer.train(
        input=str(folder / "text.txt"),
        model_prefix=str(folder / "m"),
        vocab_size=300,
        model_type="bpe",
        byte_fallback=True,
        minloglevel=2,
        hard_vocab_limit=False,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
    )
    return sentencepiece.SentencePieceProcessor(model_file=str(folder / "m.model"))


def kind_of(model, index):
    if model.is_byte(index):
        return BYTE
    return UNKNOWN if model.is_unknown(index) else CONTROL if model.is_control(index) else NORMAL


def test_sentencepiece_vocabularies_give_what_sentencepiece_gives(sentences, tmp_path):
    count = sentences.vocab_size()
    tokens = [sentences.id_to_piece(i) for i in range(count)]
    made = tokenizer(
        tmp_path,
        "llama",
        tokens,
        [kind_of(sentences, i) for i in range(count)],
        tokenizer_pre="default",
        token_scores=[sentences.get_score(i) for i in range(count)],
        bos_token_id=1,
        eos_token_id=2,
        unk_token_id=0,
        add_bos_token=True,
    )
    for text in ("the cat sat", "that fat man had a hat", "zebra ü 🙂", "a  van"):
        ids = made.encode(text)
        assert ids[0] == 1 and ids[1:] == sentences.encode(text), text
        assert made.decode(ids, skip_special_tokens=True) == text


def test_gemma_4s_vocabulary(tmp_path):
    """Spaces are letters, merges come with the file, and the template writes the first token."""
    bytes_ = [f"<0x{b:02X}>" for b in range(256)]
    letters = ["\u2581", *"abc\n", "\u2581a", "ab", "\u2581\u2581"]
    tokens = ["<pad>", "<eos>", "<bos>", "<unk>", *bytes_, *letters, "<|channel>"]
    types = [CONTROL] * 3 + [UNKNOWN] + [BYTE] * 256 + [NORMAL] * len(letters) + [USER]
    made = tokenizer(
        tmp_path,
        "gemma4",
        tokens,
        types,
        arch="gemma4",
        token_scores=[0.0] * len(tokens),
        token_merges=["\u2581 a", "a b", "\u2581 \u2581"],
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=2,
        unk_token_id=3,
        add_bos_token=True,
        add_space_prefix=False,
    )
    spelled = made.convert_ids_to_tokens(made.encode("ab a<|channel>c"))
    assert spelled == ["ab", "\u2581a", "<|channel>", "c"]
    assert made.decode(made.encode("a  bü")) == "a  bü"


@pytest.mark.parametrize("model, split, said", [("gpt2", "mpt", "split 'mpt'"), ("t5", "default", "model 't5'")])
def test_others_are_refused_by_name(model, split, said, tmp_path):
    with pytest.raises(UnsupportedError, match=said) as error:
        tokenizer(tmp_path, model, ["a"], [NORMAL], tokenizer_pre=split, token_scores=[0.0], token_merges=["a a"])
    assert "give the Hugging Face release" in str(error.value) and len(str(error.value).splitlines()) == 1
