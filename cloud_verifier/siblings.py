"""Which other tokens than the drafted ones are worth a row of the pass.

A sibling stands in the place of a drafted token, as a leaf of the same pass. If the token that corrects
the first rejection is one, the logits after it are there already, and one token more comes out of the
round for no byte on the wire. Which tokens are added depends on the session's own blocks and their q alone,
never on the load or on how long passes happen to take: so the same seed gives the same text alone and in any
company.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from cloud_verifier.kv_pool import KvPool
from cloud_verifier.pass_layout import Segment
from shared.codecs.base import Distributions
from shared.faults import FaultKind, SpecwireError

_DOUBT, _DOUBT_WEIGHT = 0.45, 4.0  # of a draft that nothing is known of: that of an int4 one, with `block`
_LEAST_GAIN = 1e-3  # tokens; what brings less is not worth looking at, whatever it costs

MOST = 8
_TOKENS_A_ROUND = 3.0  # by `block` at K = 5
_LOWEST = -8  # log2 of the lowest price: on a big model rows are nearly free
_BLOCK, _CONTEXT, _REPEATS = 6, 48, 12
_LEAVES = (0, 3, 19)


class Forward(Protocol):
    """What is needed of a target to find out what a row costs."""

    pool: KvPool

    def forward(self, segments: Sequence[Segment]) -> torch.Tensor: ...


@dataclass(slots=True)
class Doubt:
    """How often a session's drafted tokens are rejected, as a share of 1 - q(x) of those that were reached.

    A drafted token x is then rejected with about `share` times 1 - q(x), and y recovered with about that
    times q(y) (1 - q(y)): a token that q overrates is rarely what p - q leaves. The closer the draft is to
    the target, the less it is.
    """

    expected: float = _DOUBT_WEIGHT
    rejected: float = _DOUBT * _DOUBT_WEIGHT

    @property
    def share(self) -> float:
        return min(self.rejected / self.expected, 1.0)

    def add(self, q: Distributions, tokens: tuple[int, ...], num_accepted: int) -> None:
        """A judged block of `tokens`, drawn from `q`."""
        _, drawn, _ = _drawn(q, tokens)
        self.expected += float((1.0 - drawn[: num_accepted + 1]).sum())
        self.rejected += num_accepted < len(tokens)


@dataclass(frozen=True, slots=True)
class SiblingRule:
    """How many siblings a block gets.

    Args:
        most: for one drafted token.
        price: tokens that one more row of the pass has to bring on average.
    """

    most: int
    price: float = 0.0

    def choose(
        self, q: Distributions, tokens: tuple[int, ...], most: int, room: int, doubt: float = _DOUBT
    ) -> tuple[tuple[int, int], ...]:
        """(i, token) of every sibling: `token` instead of the drafted token i.

        Args:
            q: what the K tokens were drawn from.
            most: siblings that the client allows for one token.
            room: only the first so many drafted tokens get any.
            doubt: the session's `Doubt.share`; a rule without a price goes by the usual one, and so chooses
                the same on every verifier.
        """
        rows, gain = correction_chances(q, tokens, doubt if self.price else _DOUBT)
        worth = (gain >= max(self.price, _LEAST_GAIN)) & (rows < room)
        rows, ids, gain = rows[worth], q.ids[worth], gain[worth]
        order = np.lexsort((ids, -gain, rows))
        rows, ids = rows[order], ids[order]
        rank = np.arange(len(rows)) - np.searchsorted(rows, rows)
        few = rank < min(self.most, most)
        return tuple(zip(rows[few].tolist(), ids[few].tolist(), strict=True))


def _drawn(
    q: Distributions, tokens: tuple[int, ...]
) -> tuple[NDArray[np.int64], NDArray[np.float64], NDArray[np.bool_]]:
    """The row of every entry of q, q(x) of the K drafted tokens, and which entries those are."""
    rows = np.repeat(np.arange(q.num_rows), np.diff(q.offsets))
    is_drafted = q.ids == np.array(tokens, np.int64)[rows]
    drawn = np.zeros(q.num_rows)
    drawn[rows[is_drafted]] = q.probs[is_drafted]
    return rows, drawn, is_drafted


def correction_chances(
    q: Distributions, tokens: tuple[int, ...], doubt: float = _DOUBT
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """For every entry of q: its row, and about how likely it is what corrects the block's first rejection."""
    rows, drawn, is_drafted = _drawn(q, tokens)
    kept = np.cumprod(1.0 - doubt * (1.0 - drawn))
    reached = np.concatenate(([1.0], kept[:-1]))
    return rows, np.where(is_drafted, 0.0, doubt * reached[rows] * q.probs * (1.0 - q.probs))


def parse_siblings(wanted: str) -> int | None:
    """What `--siblings` says: how many for every drafted token at most; None for "auto".

    Raises:
        SpecwireError: BAD_REQUEST for anything else.
    """
    if wanted == "auto":
        return None
    if not wanted.isdecimal():
        raise SpecwireError(
            FaultKind.BAD_REQUEST, f"--siblings {wanted!r} is no number.", "Use auto, 0, 1, ..."
        )
    return int(wanted)


def sibling_rule(
    most: int | None, model: Forward, least_s: Callable[[int], float] | None = None
) -> SiblingRule | None:
    """Up to `most` for every drafted token; None: what the model's speed makes worth while.

    Args:
        least_s: seconds that a pass of so many tokens is made to last at least.
    """
    if most is None:
        return SiblingRule(MOST, row_price(model, least_s))
    return SiblingRule(most) if most else None


def row_price(model: Forward, least_s: Callable[[int], float] | None = None) -> float:
    """Tokens that one more row must bring so that the target writes no fewer tokens a second.

    A row that lengthens a pass by the share s has to lengthen what comes out of it by that share. It is
    measured once, on a block of usual size, because what a block gets must not change while sessions run; and
    rounded up to a power of two, so that a verifier that starts again nearly always finds the same. Of a few
    leaves and of many the dearer counts: on a CPU the first can cost three times what later ones do.
    """
    slots = model.pool.allocate(min(_CONTEXT + _BLOCK + _LEAVES[-1], model.pool.num_slots))
    without = len(slots) - _LEAVES[-1]
    try:
        # In turns, so that all meet the same quiet moments of a busy machine.
        turns = [[_timed(model, slots[: without + num], num) for num in _LEAVES] for _ in range(_REPEATS)]
    finally:
        model.pool.release(slots)
    fastest = [
        max(min(times), least_s(_BLOCK + num) if least_s else 0.0)
        for num, times in zip(_LEAVES, zip(*turns, strict=True), strict=True)
    ]
    share = max(
        (wide - narrow) / (more - num) / fastest[0]
        for (num, narrow), (more, wide) in itertools.pairwise(zip(_LEAVES, fastest, strict=True))
    )
    return float(2.0 ** math.ceil(math.log2(max(_TOKENS_A_ROUND * share, 2.0**_LOWEST))))


def _timed(model: Forward, slots: NDArray[np.int64], num_leaves: int) -> float:
    parents = np.concatenate((np.arange(_BLOCK) - 1, np.full(num_leaves, -1)))
    tokens = np.zeros(_BLOCK + num_leaves, np.int64)
    started = time.perf_counter()
    logits = model.forward([Segment(tokens, slots, len(tokens), parents)])
    float(logits[-1, -1])  # waits for a device that works behind our back
    return time.perf_counter() - started
