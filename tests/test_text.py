"""Text comes whole: characters across tokens, stop strings across tokens, and never a difference by round sizes."""

import itertools

import pytest
import tiny
from hypothesis import given
from hypothesis import strategies as st

from mlx_dflash import RequestError
from mlx_dflash.text import TextStream, encode_prompt

KINDS = ["bpe", "spm", "naive"]
END = 257
LONGER = ["hello", " world", "stop", "ab", "\u20acuro", "abcab"]  # ids 258 on


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory):
    return {kind: tiny.byte_tokenizer(tmp_path_factory.mktemp(kind), kind, LONGER) for kind in KINDS}


@pytest.fixture(params=KINDS)
def tokenizer(request, tokenizers):
    return tokenizers[request.param]


def feed(stream, tokens, sizes=None):
    """Cut `tokens` round by round as the loop does; returns the emitted tokens, and what each of them showed."""
    emitted, shown, rest = [], [], list(tokens)
    for size in sizes or itertools.repeat(1):
        block, rest = rest[:size], rest[size:]
        count = stream.cut(block)
        emitted += block[:count]
        if count is not None or not rest:
            break
    stream.finish("length")
    assert len(stream.segments) in (len(emitted), len(emitted) + 1)
    for _ in emitted[:-1]:
        shown.append(stream.segments.popleft())
    return emitted, [*shown, "".join(stream.segments)]


def partitions(total):
    """Every way of splitting `total` tokens into rounds."""
    for cuts in itertools.product([False, True], repeat=total - 1):
        edges = [0, *(i + 1 for i, cut in enumerate(cuts) if cut), total]
        yield [b - a for a, b in itertools.pairwise(edges)]


def text_of(tokenizer, tokens, stop=None, sizes=None):
    stream = TextStream(tokenizer, stop)
    emitted, shown = feed(stream, tokens, sizes)
    assert "".join(shown) == stream.text
    return stream.text, len(emitted), stream.finish_reason


@pytest.mark.parametrize("character", ["\u00e9", "\u20ac", "\U0001f600", "\U0001f468\u200d\U0001f469\u200d\U0001f467"])
def test_a_character_of_several_tokens_comes_out_whole_with_its_last_one(tokenizer, character):
    tokens = list(f"a{character}b".encode())
    for sizes in partitions(len(tokens)) if len(tokens) < 9 else [[1] * len(tokens), [2] * len(tokens), [len(tokens)]]:
        stream = TextStream(tokenizer)
        _, shown = feed(stream, tokens, sizes)
        assert "".join(shown) == f"a{character}b"
        assert "\ufffd" not in "".join(shown)
    assert [len(part) for part in shown if part] == [1] * (len(character) + 2)


MIXED = (
    "Caf\u00e9 \u4f60\u597d \u6771\u4eac \U0001f600 \U0001f468\u200d\U0001f469\u200d\U0001f467 "
    "na\u00efve\u0301 \U0001f1e9\U0001f1ea!"
)


@pytest.mark.parametrize("at", range(1, len(MIXED.encode()) + 1))
def test_every_byte_boundary_of_a_mixed_text(tokenizer, at):
    """As the end of a round nothing shows; as the end of the text, an incomplete character becomes replacements."""
    data = MIXED.encode()
    for sizes in ([at, len(data)], [at, 3, 3, len(data)]):
        _, shown = feed(TextStream(tokenizer), data, sizes)
        assert "".join(shown) == MIXED
    stream = TextStream(tokenizer)
    emitted, shown = feed(stream, data[:at], [5] * len(data))
    whole = data[:at].decode(errors="ignore")
    assert len(emitted) == at and stream.text.startswith(whole)
    assert set(stream.text[len(whole) :]) <= {"\ufffd"}
    assert bool(stream.text[len(whole) :]) == (len(whole.encode()) < at)


def test_a_special_token_amid_the_text_shows_the_same_whatever_the_rounds(tokenizer):
    tokens = [*b"a\xe2\x82\xac", 256, *b"b\xc3\xa9"]
    expected = text_of(tokenizer, tokens)
    assert expected[0].startswith("a\u20ac") and expected[0].endswith("b\u00e9")
    for sizes in partitions(len(tokens)):
        assert text_of(tokenizer, tokens, None, sizes) == expected


def test_a_character_cut_off_by_the_end_is_flushed_as_a_replacement(tokenizer):
    tokens = list("a\u20ac".encode())[:-1]
    for sizes in partitions(len(tokens)):
        stream = TextStream(tokenizer)
        emitted, shown = feed(stream, tokens, sizes)
        assert len(emitted) == 3
        assert shown[:2] == ["a", ""]
        assert set(shown[2]) == {"\ufffd"}
        assert stream.finish_reason == "length"


def test_a_stop_token_in_the_middle_of_a_character_flushes_it(tokenizer):
    text, count, reason = text_of(tokenizer, [*b"a\xe2\x82", END, *b"tail"], sizes=[7, 1])
    assert (text[0], set(text[1:]), count, reason) == ("a", {"\ufffd"}, 4, "stop")


@pytest.mark.parametrize("at", range(12))
@pytest.mark.parametrize("size", [1, 2, 3, 16])
def test_a_stop_string_is_never_shown_wherever_it_begins(tokenizer, at, size):
    text = "x" * at + "STOP" + "y" * 5
    stream = TextStream(tokenizer, "STOP")
    emitted, shown = feed(stream, text.encode(), [size] * len(text))
    assert "".join(shown) == "x" * at
    assert len(emitted) == at + 4
    assert stream.finish_reason == "stop"


def test_what_may_begin_a_stop_string_is_held_back_until_the_next_token_decides(tokenizer):
    stream = TextStream(tokenizer, ["STOP", "STEP"])
    for token, shown in zip(b"aSTSTE", ["a", "", "", "ST", "", ""], strict=True):
        assert stream.cut([token]) is None
        assert stream.segments.pop() == shown
    assert stream.cut([ord("x")]) is None
    assert stream.segments.pop() == "STEx"


def test_what_was_held_back_is_given_out_at_the_end(tokenizer):
    for end, reason in (([], "length"), ([END], "stop")):
        assert text_of(tokenizer, [*b"aSTO", *end], "STOP", [9]) == ("aSTO", 4 + len(end), reason)


@pytest.mark.parametrize(
    ("text", "stop", "left"),
    [
        ("aaab", "aab", "a"),  # begins inside its own false start
        ("ababac", "abac", "ab"),
        ("xyz", ["z", "yz"], "x"),  # the one that begins first
        ("xyz", ["yz", "xyz"], ""),
        ("one\n\ntwo", "\n\n", "one"),
        ("caf\u00e9 \u20ac5", "\u20ac", "caf\u00e9 "),
        ("\U0001f600\U0001f601", "\U0001f601", "\U0001f600"),
        ("abc", ["c", "abcd"], "ab"),
        ("abc", "abc", ""),
        ("abc", "abcd", "abc"),
    ],
)
def test_every_split_into_rounds_stops_at_the_same_place(tokenizer, text, stop, left):
    tokens = list(text.encode())
    expected = text_of(tokenizer, tokens, stop)
    assert expected[0] == left
    for sizes in partitions(len(tokens)) if len(tokens) < 9 else [[2] * len(tokens), [3] * len(tokens)]:
        assert text_of(tokenizer, tokens, stop, sizes) == expected


def test_a_stop_string_inside_one_token_cuts_its_text_and_keeps_the_token(tokenizer):
    hello = 258 + LONGER.index("hello")
    for tokens in ([hello, 97], [97, hello, 97]):
        for sizes in ([1, 1, 1], [3], [2, 1]):
            text, count, reason = text_of(tokenizer, tokens, "ell", sizes)
            assert text == "".join("h" if t == hello else "a" for t in tokens[:-1])
            assert (count, reason) == (len(tokens) - 1, "stop")


def test_the_text_of_stop_ids_is_not_shown(tokenizer):
    stop = 258 + LONGER.index("stop")
    for tokens, given_ in (([97, END, 98], None), ([97, stop, 98], stop), ([97, stop, 98], [5, stop, "zz"])):
        for sizes in partitions(3):
            assert text_of(tokenizer, tokens, given_, sizes) == ("a", 2, "stop")


def test_a_stop_token_that_comes_first_leaves_no_text(tokenizer):
    stream = TextStream(tokenizer)
    assert stream.cut([END, 97]) == 1
    assert list(stream.segments) == [""]
    assert stream.finish_reason == "stop"


def test_a_stop_string_that_the_flush_completes_still_stops(tokenizer):
    """An incomplete character becomes a replacement at the end, and that can be part of a stop string."""
    text, _, reason = text_of(tokenizer, [*b"ab", 0xE2], "b\ufffd")
    assert (text, reason) == ("a", "stop")


def test_finish_counts_once(tokenizer):
    stream = TextStream(tokenizer, "STOP")
    stream.cut([*b"aST"])
    stream.finish("length")
    before = list(stream.segments)
    stream.finish("stop")
    assert (list(stream.segments), stream.finish_reason) == (before, "length")


def test_every_token_has_one_segment_and_the_flush_joins_the_last(tokenizer):
    for tokens, stop, extra in (
        (b"abc", None, 1),
        (b"abSTOP", "STOP", 0),
        ([*b"ab", END], None, 0),
        ([*b"ab\xe2\x82"], None, 1),
    ):
        stream = TextStream(tokenizer, stop)
        count = stream.cut(list(tokens))
        assert len(stream.segments) == len(tokens)
        assert count == (None if extra else len(tokens))
        stream.finish("length")
        assert len(stream.segments) == len(tokens) + extra


def test_an_interruption_ends_the_text_after_the_round_with_what_was_held_back(tokenizer):
    pressed = []
    stream = TextStream(tokenizer, "STOP", lambda: bool(pressed))
    assert stream.cut([*b"ab"]) is None
    pressed.append(True)
    assert stream.cut([*b"cST"]) == 3
    assert "".join(stream.segments) == "abcST"
    assert stream.finish_reason == "interrupted"


def test_a_stop_in_the_round_of_an_interruption_is_a_stop(tokenizer):
    stream = TextStream(tokenizer, None, lambda: True)
    assert stream.cut([97, END, 98]) == 2
    assert stream.finish_reason == "stop"


@pytest.mark.parametrize("stop", ["", [""], [True], [None], [b"x"], [1.5], [["x"]], 1.5])
def test_a_stop_that_is_neither_text_nor_id_is_refused(tokenizer, stop):
    with pytest.raises(RequestError, match="stop must be"):
        TextStream(tokenizer, stop)


@pytest.mark.parametrize("stop", [None, [], ()])
def test_no_stop_is_no_stop(tokenizer, stop):
    assert text_of(tokenizer, b"abc", stop) == ("abc", 3, "length")


def test_two_requests_do_not_share_a_detokenizer(tokenizer):
    first, second = TextStream(tokenizer), TextStream(tokenizer)
    first.cut([0xE2, 0x82])
    second.cut([*b"b"])
    first.cut([0xAC])
    assert (first.text, second.text) == ("\u20ac", "b")


# Any bytes but 0, which mlx-lm's BPE detokenizer gets wrong; valid text and longer tokens more often than chance.
tokens_ = st.lists(
    st.one_of(
        st.text(alphabet="ab \n\u00e9\u20ac\U0001f600", min_size=1, max_size=4).map(lambda s: list(s.encode())),
        st.lists(st.integers(1, 255), min_size=1, max_size=3),
        st.integers(258, 257 + len(LONGER)).map(lambda i: [i]),
        st.just([END]),
    ),
    min_size=1,
    max_size=8,
).map(lambda parts: list(itertools.chain(*parts)))
stops_ = st.lists(
    st.one_of(st.text(alphabet="ab \n\u00e9\u20ac\ufffd", min_size=1, max_size=4), st.integers(97, 99)), max_size=3
)


@given(kind=st.sampled_from(KINDS), tokens=tokens_, stop=stops_, data=st.data())
def test_segments_add_up_to_the_text_whatever_the_rounds(tokenizers, kind, tokens, stop, data):
    tokenizer = tokenizers[kind]
    sizes = data.draw(st.lists(st.integers(1, 9), min_size=len(tokens), max_size=len(tokens)))
    text, count, reason = text_of(tokenizer, tokens, stop, sizes)
    assert (text, count, reason) == text_of(tokenizer, tokens, stop)
    assert not any(s in text for s in stop if isinstance(s, str))
    if reason == "length":
        assert count == len(tokens)
        detokenizer = tokenizer.detokenizer
        for token in tokens:
            detokenizer.add_token(token)
        detokenizer.finalize()
        assert text == detokenizer.text


# Prompts


def test_text_is_encoded_as_it_is_and_ids_are_kept(tokenizer):
    assert encode_prompt(tokenizer, "a\u00e9\n") == [*"a\u00e9\n".encode()]
    assert encode_prompt(tokenizer, [5, 6]) == [5, 6]
    assert encode_prompt(tokenizer, (7,)) == [7]


@pytest.mark.parametrize("prompt", ["", [], ()])
def test_an_empty_prompt_is_refused(tokenizer, prompt):
    with pytest.raises(RequestError, match="prompt is empty"):
        encode_prompt(tokenizer, prompt)


def test_messages_need_a_chat_template(tokenizer):
    with pytest.raises(RequestError, match="no chat template"):
        encode_prompt(tokenizer, [{"role": "user", "content": "a"}])
