"""Tokens -> text as they come: never half a character, and nothing past a stop string.

What is shown is always a prefix of `tokenizer.decode(all tokens)`. The library's own `DecodeStream`
does not keep that promise with byte-fallback tokenizers: there, one stray byte turns a whole run of
bytes into replacement characters, and it raises on text that it has already given out. So text is
given out when no later token can change it:

- trailing U+FFFD may be the start of a character, and waits for the next token;
- a run of byte-fallback tokens (`<0xE4>`) is decoded as one, and waits for the token that ends it.

Tokens are decoded together with a few before them, because some decoders treat the start of a text
specially; the window moves on, so that a token costs the same at any length.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from tokenizers import Tokenizer

_BYTE_TOKEN = re.compile(r"<0x[0-9A-F]{2}>")
_REPLACEMENT = "\ufffd"
# Visible tokens kept as the decoder's context; more only while these decode to nothing.
_CONTEXT_TOKENS = 4


class TextStream:
    """Turns the tokens of one answer into text that is safe to show.

    Attributes:
        stopped: a stop string was met; tokens pushed afterwards are ignored.
        num_kept: how many of the pushed tokens the text is made of. After a stop string these are the
            tokens that the text before it needs; the last of them may also hold its first characters.
    """

    def __init__(
        self, tokenizer: Tokenizer, stop: Iterable[str] = (), *, skip_special_tokens: bool = True
    ) -> None:
        self._tokenizer = tokenizer
        self._stop = tuple(text for text in stop if text)
        added = tokenizer.get_added_tokens_decoder()
        self._hidden = {i for i, token in added.items() if token.special} if skip_special_tokens else set()
        self._skip = skip_special_tokens
        self._tokens: list[int] = []  # everything pushed
        self._context: list[int] = []  # visible tokens whose text is out of the decoder
        self._pending: list[int] = []  # visible tokens whose text is not, or not wholly
        self._num_out = 0  # characters of the pending tokens that are out
        self._shown = ""
        self._held = ""  # out of the decoder, but may be the start of a stop string
        self.stopped = False
        self.num_kept = 0

    @property
    def settled(self) -> bool:
        """Whether the text of every pushed token is out, none of it held back."""
        return not self._pending and not self._held

    def push(self, token_ids: Sequence[int]) -> str:
        """Add tokens; returns the text, possibly empty, that may be shown now."""
        if self.stopped:
            return ""
        self._tokens += token_ids
        self.num_kept = len(self._tokens)
        self._pending += [token for token in token_ids if self._is_visible(token)]
        return self._show(self._decode_pending(), last=False)

    def flush(self) -> str:
        """The rest of the text, with half characters as the tokenizer itself decodes them."""
        if self.stopped:
            return ""
        num_out = len(self._shown) + len(self._held)
        return self._show(self._decode(self._tokens)[num_out:], last=True)

    def _decode_pending(self) -> str:
        """Text of the pending tokens that no later token can change, less what is out already."""
        settled = len(self._pending)
        while settled and self._is_byte(self._pending[settled - 1]):
            settled -= 1
        if not settled:
            return ""
        window = self._context + self._pending[:settled]
        text = self._decode(window)[len(self._decode(self._context)) :]
        certain = text.rstrip(_REPLACEMENT)
        new = certain[self._num_out :]
        if certain == text:
            self._context, self._num_out = self._trim(window), 0
            del self._pending[:settled]
        else:
            self._num_out = max(self._num_out, len(certain))
        return new

    def _trim(self, window: list[int]) -> list[int]:
        """The shortest tail that still gives the decoder some text to follow."""
        size = _CONTEXT_TOKENS
        while size < len(window) and not self._decode(window[-size:]):
            size *= 2
        return window[-size:]

    def _show(self, text: str, *, last: bool) -> str:
        """Pass on what cannot belong to a stop string; cut at the first stop string to be complete."""
        text, self._held = self._held + text, ""
        # (end, start) of each: the first to be complete wins, however the text was cut into pushes.
        found = [(at + len(stop), at) for stop in self._stop if (at := text.find(stop)) >= 0]
        if found:
            text, self.stopped = text[: min(found)[1]], True
        elif not last:
            held = max((_overlap(text, stop) for stop in self._stop), default=0)
            text, self._held = text[: len(text) - held], text[len(text) - held :]
        self._shown += text
        if self.stopped:
            self._drop_tail()
        return text

    def _drop_tail(self) -> None:
        """Set `num_kept` to the fewest tokens that still decode to all that is shown."""
        while self.num_kept and self._decode(self._tokens[: self.num_kept - 1]).startswith(self._shown):
            self.num_kept -= 1

    def _decode(self, token_ids: list[int]) -> str:
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=self._skip))

    def _is_visible(self, token: int) -> bool:
        """Hidden and unknown ids give no text, and decoders join what stands around them."""
        return token not in self._hidden and self._tokenizer.id_to_token(token) is not None

    def _is_byte(self, token: int) -> bool:
        return _BYTE_TOKEN.fullmatch(self._tokenizer.id_to_token(token) or "") is not None


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that `stop` starts with."""
    sizes = range(min(len(text), len(stop) - 1), 0, -1)
    return next((size for size in sizes if text.endswith(stop[:size])), 0)
