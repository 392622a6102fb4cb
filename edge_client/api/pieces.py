"""Tokens as OpenAI names them: their text, bytes and log-probabilities."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any

from tokenizers import Tokenizer, pre_tokenizers

from edge_client.api.writer import TokenInfo


class TokenNames:
    """What single tokens stand for.

    A token's bytes may be half a character, so its text has U+FFFD where they are no UTF-8; the bytes
    are exact for byte-level and byte-fallback vocabularies.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._added = {i: token.content for i, token in tokenizer.get_added_tokens_decoder().items()}

    @cached_property
    def _byte_level(self) -> dict[str, int] | None:
        """Character -> byte of the byte-level alphabet; None for other vocabularies."""
        if "ByteLevel" not in repr(self._tokenizer.decoder):
            return None
        # GPT-2's mapping: printable bytes stand for themselves, the others follow from U+0100 on.
        alphabet = set(pre_tokenizers.ByteLevel.alphabet())
        own = {chr(byte): byte for byte in range(256) if chr(byte) in alphabet}
        others = (byte for byte in range(256) if chr(byte) not in alphabet)
        return own | {chr(256 + index): byte for index, byte in enumerate(others)}

    def bytes(self, token: int) -> bytes:
        if token in self._added:
            return self._added[token].encode()
        text = self._tokenizer.id_to_token(token) or ""
        table = self._byte_level
        if table is not None:
            return bytes(table[char] for char in text if char in table)
        if len(text) == 6 and text.startswith("<0x") and text.endswith(">"):
            return bytes([int(text[3:5], 16)])
        return text.replace("\u2581", " ").encode()

    def text(self, token: int) -> str:
        return self.bytes(token).decode(errors="replace")


def chat_logprobs(names: TokenNames, infos: Iterable[TokenInfo]) -> dict[str, Any]:
    """`choices[].logprobs` of a chat."""
    return {
        "content": [
            {
                **_entry(names, info.token, info.logprob),
                "top_logprobs": [_entry(names, token, value) for token, value in info.top],
            }
            for info in infos
        ],
        "refusal": None,
    }


def completion_logprobs(names: TokenNames, infos: Sequence[TokenInfo], offset: int) -> dict[str, Any]:
    """`choices[].logprobs` of a completion; `offset` is where its first token's text begins."""
    offsets: list[int] = []
    for info in infos:
        offsets.append(offset)
        offset += len(info.text)
    return {
        "tokens": [names.text(info.token) for info in infos],
        "token_logprobs": [info.logprob for info in infos],
        "top_logprobs": [{names.text(token): value for token, value in info.top} for info in infos],
        "text_offset": offsets,
    }


def _entry(names: TokenNames, token: int, logprob: float | None) -> dict[str, Any]:
    return {"token": names.text(token), "logprob": logprob, "bytes": list(names.bytes(token))}
