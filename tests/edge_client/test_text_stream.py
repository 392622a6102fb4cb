"""The stream against the tokenizer's own decoding of the whole answer."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from edge_client.text_stream import TextStream

TEXTS = st.text(alphabet="ab 你好é\u0301👩\u200d🚀\ufffd\n▁", max_size=30)


def byte_level() -> Tokenizer:
    """Every byte is a token (ids 0..255), 256 is special, 257 is added but visible."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return _with_added(tokenizer)


def byte_fallback() -> Tokenizer:
    """SentencePiece style, as in Llama 2: some pieces (258...), and <0x..> for every other byte."""
    vocab = {f"<0x{i:02X}>": i for i in range(256)}
    vocab |= {text: 256 + i for i, text in enumerate(("▁", "▁a", "a", "b", "你", "▁▁"))}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[("▁", "a")], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return _with_added(tokenizer)


def _with_added(tokenizer: Tokenizer) -> Tokenizer:
    tokenizer.add_special_tokens([AddedToken("<|end|>", special=True)])
    tokenizer.add_tokens([AddedToken("<think>", special=False)])
    return tokenizer


TOKENIZERS = {"byte_level": byte_level(), "byte_fallback": byte_fallback()}


def pieces_of(tokens: list[int], cuts: list[int]) -> list[list[int]]:
    pieces, start = [], 0
    for cut in cuts:
        pieces.append(tokens[start : start + cut])
        start += cut
    return [*pieces, tokens[start:]]


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("skip", [True, False])
@given(
    tokens=st.lists(st.integers(0, 265), max_size=40),
    cuts=st.lists(st.integers(0, 4), max_size=20),
)
@settings(max_examples=300, deadline=None)
def test_any_tokens_give_what_the_tokenizer_decodes(name, skip, tokens, cuts) -> None:
    """Random ids: broken UTF-8, specials within characters, ids that do not exist."""
    tokenizer = TOKENIZERS[name]
    stream = TextStream(tokenizer, skip_special_tokens=skip)
    shown = [stream.push(piece) for piece in pieces_of(tokens, cuts)]
    expected = tokenizer.decode(tokens, skip_special_tokens=skip)
    assert expected.startswith("".join(shown))
    assert "".join(shown) + stream.flush() == expected
    assert stream.num_kept == len(tokens)


@pytest.mark.parametrize("name", TOKENIZERS)
@given(text=TEXTS)
@settings(max_examples=200, deadline=None)
def test_no_half_characters_on_the_way(name, text) -> None:
    text = text.replace("\ufffd", "")
    tokenizer = TOKENIZERS[name]
    tokens = [token for char in text for token in tokenizer.encode(char).ids]
    stream = TextStream(tokenizer)
    assert all("\ufffd" not in stream.push([token]) for token in tokens)


def test_characters_appear_as_soon_as_they_are_whole() -> None:
    tokenizer = TOKENIZERS["byte_level"]
    stream = TextStream(tokenizer)
    shown = [stream.push([token]) for token in tokenizer.encode("a你b").ids]
    assert shown == ["a", "", "", "你", "b"]


@given(
    text=TEXTS,
    stop=st.lists(st.text("ab 你", min_size=1, max_size=3), max_size=3),
    cuts=st.lists(st.integers(0, 4), max_size=20),
)
@example(text=" aa", stop=["a", " aa"], cuts=[])
@settings(max_examples=300, deadline=None)
def test_stop_strings_cut_text_and_tokens(text, stop, cuts) -> None:
    text = text.replace("\ufffd", "")  # which the first byte of three looks like already
    tokenizer = TOKENIZERS["byte_level"]
    tokens = tokenizer.encode(text).ids
    stream = TextStream(tokenizer, stop)
    shown = "".join(stream.push(piece) for piece in pieces_of(tokens, cuts)) + stream.flush()
    found = [(text.find(item) + len(item), text.find(item)) for item in stop if item in text]
    assert stream.stopped == bool(found)
    assert shown == (text[: min(found)[1]] if found else text)
    # One token a byte: the tokens kept are exactly the bytes of the text shown.
    assert stream.num_kept == len(shown.encode())


def test_a_stop_string_is_held_back_until_it_cannot_come() -> None:
    tokenizer = TOKENIZERS["byte_level"]
    stream = TextStream(tokenizer, ["aab"])
    assert [stream.push([token]) for token in tokenizer.encode("aaac").ids] == ["", "", "a", "aac"]
    assert not stream.stopped


def test_after_a_stop_nothing_comes() -> None:
    tokenizer = TOKENIZERS["byte_level"]
    stream = TextStream(tokenizer, ["b", ""])
    assert stream.push(tokenizer.encode("xaby").ids) == "xa"
    assert (stream.push(tokenizer.encode("zz").ids), stream.flush(), stream.num_kept) == ("", "", 2)


def test_a_long_answer_is_decoded_in_a_small_window() -> None:
    class Counting:
        """A tokenizer that notes the longest decoding it is asked for."""

        longest = 0

        def __getattr__(self, name: str) -> object:
            return getattr(TOKENIZERS["byte_level"], name)

        def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
            self.longest = max(self.longest, len(ids))
            return TOKENIZERS["byte_level"].decode(ids, skip_special_tokens=skip_special_tokens)

    counting = Counting()
    stream = TextStream(counting)  # type: ignore[arg-type]
    for token in TOKENIZERS["byte_level"].encode("word 你 " * 50).ids:
        stream.push([token])
    assert counting.longest <= 8
