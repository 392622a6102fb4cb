"""How sure the draft was of a token, and what that says about whether the token is kept."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

_EDGES = (0.1, 0.2, 0.3, 0.45, 0.6, 0.75, 0.85, 0.92, 0.97, 0.99)  # of confidence, between groups
NUM_GROUPS = len(_EDGES) + 1
_DECAY = 0.99  # weight of what was seen of a group, each time that it is seen again
_PRIOR_TOKENS = 6.0  # trials of a group that count as much as all groups together


@dataclass(frozen=True, slots=True)
class Ending:
    """Where a block ends although it may be longer: where it has become unlikely that all of it is kept.

    That depends on drafted tokens alone, never on draws that judge them, so every exact rule stays exact: a
    block is judged as if its tokens had been all that was to be drafted after that prefix.

    Args:
        least: chance that all tokens of a block are kept below which it ends; 0 never ends one.
        chances: of a token to be kept when those before it were, by group of confidence; NUM_GROUPS of them.
    """

    least: float
    chances: tuple[float, ...]

    def kept(self, confidence: float) -> float:
        return self.chances[bisect_right(_EDGES, confidence)]


class Calibration:
    """The chance that a token is kept when those before it were, by the draft's confidence in it."""

    def __init__(self) -> None:
        self._tried = [0.0] * NUM_GROUPS
        self._kept = list(self._tried)

    def add(self, confidences: Sequence[float], num_accepted: int) -> None:
        for i, confidence in enumerate(confidences[: num_accepted + 1]):
            group = bisect_right(_EDGES, confidence)
            self._tried[group] = _DECAY * self._tried[group] + 1.0
            self._kept[group] = _DECAY * self._kept[group] + (i < num_accepted)

    @property
    def num_tokens(self) -> float:
        """That were seen, as far as they are remembered."""
        return sum(self._tried)

    def chances(self, overall: float) -> tuple[float, ...]:
        """By group; drawn towards `overall`, the chance of any token, where few were seen."""
        return tuple(
            (kept + _PRIOR_TOKENS * overall) / (tried + _PRIOR_TOKENS)
            for tried, kept in zip(self._tried, self._kept, strict=True)
        )


def largest_probability(logits: NDArray[np.float32]) -> float:
    """Of the softmax at temperature 1: the confidence in a token that is the likeliest of all."""
    return float(1.0 / np.exp(logits - logits.max()).sum(dtype=np.float64))
