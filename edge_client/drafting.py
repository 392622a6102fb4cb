"""Drafting one block: logits -> probabilities -> codec -> sample from what the codec's bytes decode to.

Plain synchronous code on one model; no network, no clock except for the durations it reports.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from edge_client.confidence import Ending, largest_probability
from shared.codecs import Budget, Codec, Row
from shared.faults import FaultKind, SpecwireError
from shared.history import TokenHistory, needs_history
from shared.messages import SamplingParams
from shared.randomness import Purpose, random_words
from shared.sampling import coupled_choice, is_greedy, probabilities

_CHUNK = 256
"""Prompt tokens that are read between two looks at whether to stop."""


class Model(Protocol):
    """What drafting needs of `edge_client.draft_model.DraftModel`."""

    max_context: int
    kv_len: int

    def rollback(self, length: int) -> None: ...

    def feed(self, tokens: Sequence[int]) -> NDArray[np.float32]: ...


class NoModel:
    """Drafts nothing: the verifier writes alone."""

    max_context = 0
    kv_len = 0

    def rollback(self, length: int) -> None:
        pass

    def feed(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class Block:
    """K drafted tokens that follow `base_len` others, and the bytes of their distributions.

    `prompt_s` is the part of `draft_s` in which the first token came after reading many. `num_read` tokens
    were read before it in `read_s`, which is that part, or a time before. `num_before` other blocks were in
    flight when this one was begun; `confidences` are the draft's probabilities of its tokens, where somebody
    asked for them.
    """

    base_len: int
    tokens: tuple[int, ...]
    payload: bytes
    draft_s: float
    codec_s: float
    prompt_s: float = 0.0
    num_read: int = 0
    read_s: float = 0.0
    num_before: int = 0
    confidences: tuple[float, ...] = ()


class Drafter:
    """Writes ahead of the verifier on one draft model.

    With `coupled` the draft draws with the noise that the verifier draws with, so that both pick the
    same token wherever their distributions agree enough; nothing else depends on the verification.

    Attributes:
        sequence: committed tokens, then those that are drafted and not yet judged.
    """

    def __init__(
        self,
        model: Model,
        codec: Codec,
        vocab_size: int,
        eos_ids: Collection[int],
        *,
        coupled: bool = False,
    ) -> None:
        self.sequence: list[int] = []
        self._coupled = coupled
        self._history: TokenHistory | None = None  # of `sequence`, where the sampling looks at it
        self._model = model
        self._codec = codec
        self._vocab_size = vocab_size
        self._eos_ids = frozenset(eos_ids)
        self._sampling = SamplingParams()
        self._limit = 0
        self._begun: list[tuple[int, int]] = []  # (KV length, prompt length) at the start of each answer
        self._ended = False  # the last drafted token ends the answer
        self._blind = False  # the model cannot read what is committed

    @property
    def kv_len(self) -> int:
        return self._model.kv_len

    @property
    def num_unread(self) -> int:
        """Tokens of the sequence that the model has not seen."""
        return len(self.sequence) - self._model.kv_len

    def begin(self, tokens: Sequence[int], sampling: SamplingParams, limit: int) -> None:
        """Starts an answer after `tokens` that ends at `limit` tokens, on the KV of what they share.

        A low-precision model gives slightly different keys for the same token read alone and in a
        group. So that the same seed gives the same text again, an answer that is written anew starts
        from where it started the first time, not from all that happens to be known.
        """
        known = self.sequence[: self._model.kv_len]
        differing = (i for i, (a, b) in enumerate(zip(known, tokens, strict=False)) if a != b)
        common = next(differing, min(len(known), len(tokens)))
        start = min(common, max(len(tokens) - 1, 0))  # the logits of the last token are needed
        while self._begun and not self._begun[-1][1] <= min(common, len(tokens) - 1):
            start = min(start, self._begun.pop()[0])
        self._begun.append((start, len(tokens)))
        self._model.rollback(start)
        self.sequence = list(tokens)
        self._history = TokenHistory(tokens, len(tokens), self._eos_ids) if needs_history(sampling) else None
        self._sampling, self._limit = sampling, limit
        self._ended = self._blind = False

    def room(self) -> int:
        """How many more tokens can be drafted now: the answer's end, an EOS and the context bound it."""
        if self._ended or self._blind:
            return 0
        length = len(self.sequence)
        return max(0, min(self._limit - length, self._model.max_context - length + 1))

    def read(self, stop: Callable[[], bool]) -> tuple[int, float]:
        """Reads all but the last token, which the next block begins with, and what is added meanwhile.

        Returns how many, and the seconds that they took.
        """
        num_before, started = self._model.kv_len, time.perf_counter()
        self._feed(stop, num_left=1)
        return self._model.kv_len - num_before, time.perf_counter() - started

    def draft(
        self,
        num_tokens: int,
        stop: Callable[[], bool] = lambda: False,
        *,
        price: float | None = 0.0,
        ending: Ending | None = None,
    ) -> Block | None:
        """Drafts up to `num_tokens` tokens; fewer where an EOS is drawn or the block ends by `ending`.

        `price` and `ending` are those of a `Plan`.

        Returns None, with nothing changed, when `stop` became true or the model cannot go on.
        """
        base_len = len(self.sequence)
        words = random_words(
            self._sampling.seed, Purpose.DRAFT, np.arange(base_len, base_len + num_tokens), base_len
        )
        rows: list[Row] = []
        confidences: list[float] = []
        all_kept = 1.0
        budget = Budget.of_block(num_tokens, price)
        draft_s = codec_s = prompt_s = 0.0
        # Two are fed after a fully kept block: its last token and the bonus.
        num_unread = self.num_unread
        reads_prompt = num_unread > 2
        started = time.perf_counter()
        for word in words:
            if (logits := self._feed(stop)) is None:
                self._undo(base_len)
                return None
            fed = time.perf_counter()
            if reads_prompt and not rows:
                prompt_s = fed - started
            probs = self._probabilities(logits)
            row = self._codec.quantise(probs, budget)
            if self._coupled:
                token = coupled_choice(probs, self._sampling.seed, len(self.sequence))
            else:
                token = row.sample(int(word))
            rows.append(row)
            self.extend((token,))
            if ending is not None:
                confidences.append(self._confidence(logits, probs, token))
                all_kept *= ending.kept(confidences[-1])
            draft_s, codec_s = draft_s + fed - started, codec_s + time.perf_counter() - fed
            started = time.perf_counter()
            if token in self._eos_ids:
                self._ended = True
                break
            if ending is not None and all_kept < ending.least:
                break
        payload = self._codec.encode(rows, self._vocab_size)
        codec_s += time.perf_counter() - started
        return Block(
            base_len,
            tuple(self.sequence[base_len:]),
            payload,
            draft_s,
            codec_s,
            prompt_s,
            num_unread if reads_prompt else 0,
            prompt_s,
            confidences=tuple(confidences),
        )

    def guess(self) -> Block:
        """One token without asking the model, for when it cannot go on and the verifier may not write alone.

        The guess is sent with certainty as its distribution, so the verdict is as exact as any other.
        """
        base_len, token = len(self.sequence), self.sequence[-1]
        certain = np.zeros(self._vocab_size, np.float32)
        certain[token] = 1.0
        started = time.perf_counter()
        payload = self._codec.encode([self._codec.quantise(certain)], self._vocab_size)
        self.extend((token,))
        return Block(base_len, (token,), payload, 0.0, time.perf_counter() - started)

    def apply(self, block: Block, num_accepted: int, tokens: Sequence[int]) -> None:
        """A verdict on the oldest block in flight: keeps `num_accepted` of it, then `tokens`."""
        if num_accepted < len(block.tokens) or tokens:
            self._undo(block.base_len + num_accepted)
            self.extend(tokens)

    def extend(self, tokens: Sequence[int]) -> None:
        """Tokens that were drafted, or that the verifier wrote."""
        self.sequence += tokens
        if self._history is not None:
            for token in tokens:
                self._history.append(token)

    def keep(self, length: int) -> None:
        """Forgets what was drafted beyond `length` tokens; the last of these is read again."""
        self._undo(length)
        self._model.rollback(min(self._model.kv_len, length - 1))

    def _undo(self, length: int) -> None:
        del self.sequence[length:]
        if self._history is not None:
            self._history.truncate(length)
        self._model.rollback(min(self._model.kv_len, length))
        self._ended = False

    def _feed(self, stop: Callable[[], bool], num_left: int = 0) -> NDArray[np.float32] | None:
        """Reads all but the last `num_left` tokens; the logits after the whole sequence, or None when it is
        not read, `stop` became true or the model cannot read it."""
        logits: NDArray[np.float32] | None = None
        try:
            while not stop() and (num_waiting := self.num_unread - num_left) > 0:
                first = self._model.kv_len
                logits = self._model.feed(self.sequence[first : first + min(num_waiting, _CHUNK)])
        except SpecwireError as error:
            if error.kind not in (FaultKind.BAD_TOKENS, FaultKind.CONTEXT_EXCEEDED):
                raise
            # The target may use ids that a smaller draft does not have; it then goes on alone.
            self._blind = True
            return None
        return logits if self._model.kv_len == len(self.sequence) else None

    def _confidence(self, logits: NDArray[np.float32], probs: NDArray[np.float32], token: int) -> float:
        return largest_probability(logits) if is_greedy(self._sampling) else float(probs[token])

    def _probabilities(self, logits: NDArray[np.float32]) -> NDArray[np.float32]:
        """[vocab_size], whatever the model's width: ids beyond the tokenizer never come out."""
        if len(logits) < self._vocab_size:
            padded = np.full(self._vocab_size, -np.inf, np.float32)
            padded[: len(logits)] = logits
            logits = padded
        return probabilities(logits[: self._vocab_size], self._sampling, self._history)
