"""Identity is about ids and their tokens, nothing else."""

from __future__ import annotations

import json

import pytest

from shared.faults import FaultKind, SpecwireError
from shared.vocabulary import check_same_tokenizer, tokenizer_identity


def bpe(vocab: dict[str, int], added: dict[str, int] | None = None, **rest: object) -> str:
    tokens = [{"id": token_id, "content": text} for text, token_id in (added or {}).items()]
    return json.dumps({"added_tokens": tokens, "model": {"type": "BPE", "vocab": vocab}, **rest})


VOCAB = {"a": 0, "b": 1, "é": 2}


def test_equal_vocabularies_are_equal_whatever_surrounds_them() -> None:
    one = tokenizer_identity(bpe(VOCAB, {"<end>": 3}), "one")
    other = tokenizer_identity(bpe(dict(reversed(VOCAB.items())), {"<end>": 3}, normalizer=None), "two")
    assert (one.digest, one.size, one.name) == (other.digest, 4, "one")
    check_same_tokenizer(one, other)


def test_unigram_lists_and_maps_agree() -> None:
    unigram = json.dumps({"model": {"type": "Unigram", "vocab": [["a", 0.0], ["b", -1.5], ["é", -2.0]]}})
    assert tokenizer_identity(unigram) == tokenizer_identity(bpe(VOCAB))


def test_the_digest_is_fixed() -> None:
    """Another program, or another version of this one, must come to the same digest."""
    digest = tokenizer_identity(bpe(VOCAB, {"<end>": 5})).digest
    assert digest == "842b787390aebd55978ced8ba103fb79546a45912d61bad282d3a06fbfe9aaec"


@pytest.mark.parametrize(
    "other",
    [
        bpe({"b": 0, "a": 1, "é": 2}),
        bpe({"a": 0, "b": 1, "e": 2}),
        bpe({"a": 0, "b": 1}),
        bpe({"a": 0, "b": 1, "é": 3}),
        bpe(VOCAB, {"<end>": 3}),
        bpe(VOCAB, {"A": 0}),
    ],
)
def test_different_vocabularies_are_refused_with_both_named(other: str) -> None:
    edge, cloud = tokenizer_identity(bpe(VOCAB), "small"), tokenizer_identity(other, "large")
    with pytest.raises(SpecwireError) as caught:
        check_same_tokenizer(edge, cloud)
    assert caught.value.kind is FaultKind.TOKENIZER_MISMATCH
    for part in ("small", "large", edge.digest[:12], cloud.digest[:12]):
        assert part in caught.value.text


def test_gaps_count_towards_the_size() -> None:
    assert tokenizer_identity(bpe(VOCAB, {"<end>": 9})).size == 10


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"model": {}}',
        '{"model": {"vocab": {}}}',
        bpe({"a": -1}),
        bpe({"a": 1 << 40}),
        bpe({"a": None}),
    ],
)
def test_no_tokenizer_is_a_clear_error(text: str) -> None:
    with pytest.raises(SpecwireError) as caught:
        tokenizer_identity(text)
    assert caught.value.kind is FaultKind.UNSUPPORTED_MODEL


def test_agrees_with_the_tokenizers_library(tiny_target) -> None:
    from tokenizers import Tokenizer

    text = (tiny_target / "tokenizer.json").read_text()
    vocab = Tokenizer.from_str(text).get_vocab(with_added_tokens=True)
    assert tokenizer_identity(text) == tokenizer_identity(bpe(vocab))
