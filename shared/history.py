"""What a request's logit bias, forbidden tokens and penalties do to logits, given the text so far.

Applied before temperature, in the order of verifier.proto: logit_bias; min_tokens and bad_words;
repetition, presence and frequency penalties. The repetition penalty is Keskar et al. 2019 (arXiv
1909.05858) over prompt and answer, the others are those of the OpenAI API over the answer alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shared.messages import SamplingParams


def needs_history(params: SamplingParams) -> bool:
    """Whether these parameters change logits before the temperature does."""
    return bool(
        params.logit_bias
        or params.min_tokens
        or params.bad_words
        or params.repetition_penalty != 1
        or params.presence_penalty
        or params.frequency_penalty
    )


class TokenHistory:
    """The text so far, its token counts, and where the answer begins in it.

    Args:
        tokens: prompt and answer so far.
        prompt_len: how many of them are not answer.
        eos_ids: ids that end an answer.
    """

    def __init__(self, tokens: Sequence[int], prompt_len: int, eos_ids: Collection[int] = ()) -> None:
        self.tokens: list[int] = list(tokens)
        self.prompt_len = prompt_len
        self.eos_ids = tuple(eos_ids)
        self.prompt = set(self.tokens[:prompt_len])
        self.answer = Counter(self.tokens[prompt_len:])

    def append(self, token: int) -> None:
        self.tokens.append(token)
        self.answer[token] += 1

    def truncate(self, length: int) -> None:
        """Forgets what stands at `length` and after it; never part of the prompt."""
        if length < self.prompt_len:
            raise ValueError(f"a prompt of {self.prompt_len} tokens cannot be cut to {length}")
        for token in self.tokens[length:]:
            self.answer[token] -= 1
            if not self.answer[token]:
                del self.answer[token]
        del self.tokens[length:]

    @property
    def answer_len(self) -> int:
        return len(self.tokens) - self.prompt_len


@dataclass(frozen=True, slots=True)
class Touched:
    """The tokens whose logits change at one position, each array [n]."""

    ids: NDArray[np.int64]
    bias: NDArray[np.float32]
    forbidden: NDArray[np.bool_]
    seen: NDArray[np.bool_]  # in prompt or answer
    count: NDArray[np.float32]  # in the answer


def touched(params: SamplingParams, history: TokenHistory, vocab_size: int) -> Touched:
    """What changes at the position after `history`."""
    forbidden = _forbidden(params, history)
    counted: set[int] = set()
    if params.repetition_penalty != 1:
        counted |= history.prompt | history.answer.keys()
    elif params.presence_penalty or params.frequency_penalty:
        counted |= history.answer.keys()
    ids = [token for token in {*params.logit_bias, *forbidden, *counted} if token < vocab_size]
    answer, prompt = history.answer, history.prompt
    return Touched(
        np.array(ids, np.int64),
        np.array([params.logit_bias.get(token, 0.0) for token in ids], np.float32),
        np.array([token in forbidden for token in ids], np.bool_),
        np.array([token in answer or token in prompt for token in ids], np.bool_),
        np.array([answer.get(token, 0) for token in ids], np.float32),
    )


def adjust(logits: NDArray[np.float32], params: SamplingParams, history: TokenHistory) -> NDArray[np.float32]:
    """[V] logits of the position after `history` -> a changed copy."""
    out = np.array(logits, np.float32)
    change = touched(params, history, len(out))
    values = out[change.ids] + change.bias
    values[change.forbidden] = -np.inf
    if params.repetition_penalty != 1:
        penalty = np.float32(params.repetition_penalty)
        scaled = np.where(values > 0, values / penalty, values * penalty)
        values = np.where(change.seen, scaled, values)
    values -= np.float32(params.presence_penalty) * (change.count > 0)
    values -= np.float32(params.frequency_penalty) * change.count
    out[change.ids] = values
    return out


def _forbidden(params: SamplingParams, history: TokenHistory) -> set[int]:
    forbidden = set(history.eos_ids) if history.answer_len < params.min_tokens else set()
    for word in params.bad_words:
        before = word[:-1]
        if not before or tuple(history.tokens[-len(before) :]) == before:
            forbidden.add(word[-1])
    return forbidden
