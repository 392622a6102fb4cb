"""The NumPy oracle of every verification rule, written to be read against the papers.

One block at a time, float64, no cleverness. Chance comes in through `Draws`, so that the very code
that is compared with `cloud_verifier.verification` can also be run through every branch it has, and
its output distribution added up exactly (tests/shared/test_reference.py).

Notation: `tokens` are the K drafted tokens, q is [K, V], p is [K + 1, V]; row i of both is the
distribution of token i given everything before it, and row K of p is the bonus row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from shared.randomness import Purpose, uniforms

Floats = NDArray[np.float64]


class Draws(Protocol):
    """The random decisions of one round; `index` counts positions from the block's first token."""

    def accept(self, index: int, probability: float) -> bool:
        """True with that probability (strictly: never when it is 0)."""
        ...

    def sample(self, index: int, weights: Floats) -> int:
        """An index of `weights` [V] with probability proportional to its weight."""
        ...


@dataclass(frozen=True, slots=True)
class CounterDraws:
    """The draws of `shared.randomness` for a block that follows `base_len` committed tokens."""

    seed: int
    base_len: int

    def accept(self, index: int, probability: float) -> bool:
        return self._uniform(Purpose.ACCEPT, index) < probability

    def sample(self, index: int, weights: Floats) -> int:
        return inverse_cdf(weights, self._uniform(Purpose.SAMPLE, index))

    def _uniform(self, purpose: Purpose, index: int) -> float:
        return float(uniforms(self.seed, purpose, self.base_len + index, self.base_len))


@dataclass(frozen=True, slots=True)
class Judgement:
    """How many drafted tokens are kept, and the recovered or bonus token (none after a full `more` block)."""

    num_accepted: int
    tokens: tuple[int, ...]


def inverse_cdf(weights: Floats, u: float) -> int:
    """The index at which the running sum of `weights` first exceeds u times their sum."""
    cumulative = np.cumsum(weights, dtype=np.float64)
    target = min(u * cumulative[-1], np.nextafter(cumulative[-1], 0))
    return int(np.searchsorted(cumulative, target, side="right"))


def residual(p: Floats, q: Floats, scale: float = 1.0) -> Floats:
    """max(scale p - q, 0), or p where that has no mass (p == q)."""
    rest = np.maximum(scale * p - q, 0.0)
    return rest if rest.sum() > 0 else p


def ratio(p: float, q: float) -> float:
    """p / q, where a token that the draft cannot have drawn counts as certain unless p forbids it."""
    if q > 0:
        return p / q
    return np.inf if p > 0 else 0.0


def greedy(tokens: Sequence[int], p: Floats, *, more: bool = False) -> Judgement:
    """Keep tokens for as long as each is the likeliest (lowest id among equals)."""
    for i, token in enumerate(tokens):
        best = int(p[i].argmax())
        if token != best:
            return Judgement(i, (best,))
    return Judgement(len(tokens), () if more else (int(p[-1].argmax()),))


def token_wise(tokens: Sequence[int], q: Floats, p: Floats, draws: Draws, *, more: bool = False) -> Judgement:
    """Speculative sampling: Leviathan et al. 2022 (arXiv 2211.17192) Algorithm 1, Chen et al. 2023
    (arXiv 2302.01318) Algorithm 2.
    """
    for i, token in enumerate(tokens):
        if not draws.accept(i, ratio(p[i, token], q[i, token])):
            return Judgement(i, (draws.sample(i, residual(p[i], q[i])),))
    if more:
        return Judgement(len(tokens), ())
    return Judgement(len(tokens), (draws.sample(len(tokens), p[-1]),))
