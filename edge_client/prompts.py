"""Text and messages -> prompt tokens, for the first turn and for those that follow it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tokenizers import Tokenizer

from edge_client.chat_template import render
from edge_client.manifest import DraftManifest
from shared.faults import FaultKind, SpecwireError

Message = Mapping[str, Any]
_MARK = "\ue000answer\ue000"  # private use: no text holds it


def text_tokens(manifest: DraftManifest, tokenizer: Tokenizer, text: str) -> list[int]:
    """`text` as it stands, after the start token where the model has one."""
    tokens = list(tokenizer.encode(text).ids)
    if manifest.bos_id is not None and tokens[:1] != [manifest.bos_id]:
        tokens.insert(0, manifest.bos_id)
    return tokens


def plain_prompt(manifest: DraftManifest, tokenizer: Tokenizer, text: str) -> list[int]:
    """`text_tokens`, of which there must be some."""
    return _not_empty(text_tokens(manifest, tokenizer, text))


def chat_prompt(manifest: DraftManifest, tokenizer: Tokenizer, messages: Sequence[Message]) -> list[int]:
    """A conversation by the model's own template, ready for the assistant's answer."""
    return _not_empty(list(tokenizer.encode(render(manifest, messages), add_special_tokens=False).ids))


def next_turn(
    manifest: DraftManifest,
    tokenizer: Tokenizer,
    history: Sequence[int],
    messages: Sequence[Message],
) -> list[int]:
    """`history` (which ends with an answer) and the user's next message after it.

    The answer's own tokens are kept: its text, encoded again, may give others, and then neither side
    could reuse what it knows.

    Args:
        messages: the whole conversation; the last is the new message, the one before it the answer.
    """
    marked = [*messages[:-2], {**messages[-2], "content": _MARK}, messages[-1]]
    _, found, rest = render(manifest, marked).rpartition(_MARK)
    if not found:  # a template that rewrites answers
        return chat_prompt(manifest, tokenizer, messages)
    tokens = list(tokenizer.encode(rest, add_special_tokens=False).ids)
    # The answer usually ends with the token that the template puts after it.
    if tokens[:1] == list(history[-1:]):
        del tokens[0]
    return [*history, *tokens]


def _not_empty(tokens: list[int]) -> list[int]:
    if not tokens:
        raise SpecwireError(FaultKind.BAD_REQUEST, "The prompt is empty.", "Write something to continue.")
    return tokens
