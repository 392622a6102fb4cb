"""The NumPy oracle of every verification rule, written to be read against the papers.

One block at a time, float64, no cleverness. Chance comes in through `Draws`, so that the very code
that is compared with `cloud_verifier.verification` can also be run through every branch it has, and
its output distribution added up exactly (tests/shared/test_reference.py).

Notation: `tokens` are the K drafted tokens, q is [K, V], p is [K + 1, V]; row i of both is the
distribution of token i given everything before it, and row K of p is the bonus row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from shared.randomness import Purpose, coupled_noise, uniforms

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
    """How many drafted tokens are kept, and what follows them: the recovered or bonus token (none after a
    full `more` block), and one more where the recovered token is a sibling."""

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


def block(tokens: Sequence[int], q: Floats, p: Floats, draws: Draws, *, more: bool = False) -> Judgement:
    """Block verification: Sun et al. 2024 (arXiv 2403.10444) Algorithm 2.

    The longest prefix whose own draw accepts it is kept; after it the next token comes from the
    residual at the joint acceptance probability of that prefix.
    """
    num_drafted, num_accepted = len(tokens), 0
    joint = np.ones(num_drafted + 1)
    for i, token in enumerate(tokens):
        joint[i + 1] = min(1.0, joint[i] * ratio(p[i, token], q[i, token]))
    for i in range(1, num_drafted + 1):
        if draws.accept(i - 1, joint[i] if i == num_drafted else _prefix_acceptance(joint[i], p[i], q[i])):
            num_accepted = i
    if num_accepted < num_drafted:
        rest = residual(p[num_accepted], q[num_accepted], joint[num_accepted])
        return Judgement(num_accepted, (draws.sample(num_accepted, rest),))
    return Judgement(num_drafted, () if more else (draws.sample(num_drafted, p[-1]),))


def _prefix_acceptance(joint: float, p: Floats, q: Floats) -> float:
    mass = np.maximum(joint * p - q, 0.0).sum()
    # Without residual mass at joint 1 (p == q next) every later prefix is accepted just as surely.
    return float(mass / (mass + 1.0 - joint)) if mass > 0 else float(joint >= 1.0)


def fused(
    tokens: Sequence[int], q: Floats, p: Floats, draws: Draws, weight: float, *, more: bool = False
) -> Judgement:
    """Token-wise against (1 - weight) p + weight q instead of p: lossy unless weight is 0."""
    mixed = p.copy()
    mixed[: len(tokens)] = (1.0 - weight) * p[: len(tokens)] + weight * q
    return token_wise(tokens, q, mixed, draws, more=more)


def coupled(tokens: Sequence[int], p: Floats, seed: int, base_len: int, *, more: bool = False) -> Judgement:
    """Shared-noise coupling: Daliri et al. 2024 (arXiv 2408.07978).

    At every position the target's token is the one with the smallest noise / p, noise being a
    function of seed, position and token alone; drafted tokens are kept while they are that token.
    """
    ids = np.arange(p.shape[1])
    scores = np.full(p.shape, np.inf)
    for i, row in enumerate(p):
        noise = coupled_noise(seed, base_len + i, ids)
        scores[i, row > 0] = noise[row > 0] / row[row > 0]
    return greedy(tokens, -scores, more=more)


def after_sibling(
    judged: Judgement,
    tokens: Sequence[int],
    siblings: Mapping[tuple[int, int], Floats],
    write: Callable[[Floats, int], int],
) -> Judgement:
    """One token more where the recovered token is a sibling, whose row the verifier has at hand.

    Exact because nothing about it is decided by looking: the recovered token has been drawn, and what the
    target would write after it is drawn from the target's own row with a draw of its own.

    Args:
        siblings: (i, token) -> p after tokens[:i] and that token.
        write: (p [V], how many tokens of this round come before) -> the token that the target writes alone.
    """
    kept = judged.num_accepted
    row = siblings.get((kept, judged.tokens[0])) if kept < len(tokens) else None
    return judged if row is None else Judgement(kept, (*judged.tokens, write(row, kept + 1)))
