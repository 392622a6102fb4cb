"""How fast a way of drafting should be, from what is known of its stages.

With K tokens a block, a_i the chance that token i is kept when those before it were, and

    P = a_1 ... a_K          chance that a whole block is kept
    A = a_1 + a_1 a_2 + ...  tokens kept, on average
    D = K * draft step       L = round trip + queue + pass of K + 1 tokens

- one block at a time gives A + 1 tokens (P of them bonus) in D + L;
- with m more in flight there is no bonus token, but a fully kept block is followed by the next after
  p = max(D, queue + pass, uplink, (D + L) / (m + 1)) only. A run of kept blocks ends with a rejection, after
  which the pipeline starts anew, with a block of its own length f: by renewal, (A_f + 1 - P_f) +
  n (A + 1 - P) tokens in D_f + L_f + n p, where n = P_f / (1 - P) blocks follow the first on average;
- every round takes longer than its parts, by as much as those before did: verdicts are read, messages sent,
  stages that take turns wait for each other where neither is much faster, and a step of the draft that is
  under way when a rejection comes has to end first.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import mul

from edge_client.estimates import Average, Estimates

GUESSED_DRAFT_S = 0.01
"""A token, before one was drafted."""

_ALONE = 0.6  # as long as drafting and judging at the same time, until it was tried
_LATE_S = 0.002  # a round, before one was seen
_SLACK = 1.5  # times as many blocks in flight as suffice where nothing varies: more than needed cost nothing


class Run:
    """Of the first k tokens of a block, by k: the chance that all are kept, and how many are on average.

    Args:
        chances: of every token to be kept when those before it were.
        change: added to all of them.
    """

    def __init__(self, chances: Sequence[float], change: float = 0.0) -> None:
        chances = [min(max(chance + change, 0.0), 1.0) for chance in chances]
        self.whole = list(accumulate(chances, mul, initial=1.0))
        self.kept = [0.0, *accumulate(self.whole[1:])]

    def brought(self, k: int) -> float:
        """Tokens by a block that another one follows: no bonus."""
        return self.kept[k] + 1 - self.whole[k]


@dataclass(frozen=True, slots=True)
class Durations:
    """Seconds of a block: drafted, judged, on the uplink, from its end to its verdict."""

    draft: float
    judged: float
    uplink: float
    latency: float

    def period(self, num_before: int) -> float:
        """From one verdict to the next while all are kept and a block is drafted behind so many others."""
        return max(self.draft, self.judged, self.uplink, (self.draft + self.latency) / (num_before + 1))


def _late(seen: Average) -> float:
    return max(seen.value, 0.0) if seen.known else _LATE_S


@dataclass(frozen=True, slots=True)
class _Stages:
    """Seconds of each stage: `step` and `uplink` of a token, `judged` a line in the tokens of a block."""

    step: float
    judged: tuple[float, float]
    network: float
    uplink: float
    late: float
    late_anew: float

    @classmethod
    def of(cls, known: Estimates, *, overlapping: bool, more: float) -> _Stages:
        mode, other = (known.overlapped, known.alone) if overlapping else (known.alone, known.overlapped)
        # What was never tried is hoped to be as good as it can be: alone may be much faster on shared cores.
        hope = 1.0 if overlapping else _ALONE
        judge, scale = (mode.judge, 1.0) if mode.judge.known else (other.judge, hope)
        return cls(
            mode.draft.value or hope * other.draft.value or GUESSED_DRAFT_S,
            (scale * judge.at(1 + known.others.value) + known.queue.value, scale * judge.slope),
            known.network_s(0),
            known.uplink_s + more,
            _late(mode.late),
            _late(mode.late_anew),
        )

    def block(self, k: int) -> Durations:
        judged, uplink = self.judged[0] + k * self.judged[1], k * self.uplink
        return Durations(k * self.step, judged, uplink, self.network + uplink + judged)


class Pipeline:
    """What is known now, ready for many questions.

    Args:
        more_s: on the uplink for every token, than was seen so far.
    """

    def __init__(self, known: Estimates, more_s: float = 0.0) -> None:
        self._stall_s = known.network.stall_s
        self._alone = _Stages.of(known, overlapping=False, more=more_s)
        self._ahead = _Stages.of(known, overlapping=True, more=more_s)

    def block(self, k: int, *, overlapping: bool) -> Durations:
        """Args:
        overlapping: whether drafting and judging go on at the same time.
        """
        return (self._ahead if overlapping else self._alone).block(k)

    def speed(self, run: Run, k: int, ahead: int, first_k: int) -> float:
        """Tokens per second with `ahead` blocks beyond the first under way.

        Args:
            k: tokens of a block.
            first_k: of one that none in flight precedes; 0: k.
        """
        if not ahead:
            block = self._alone.block(k)
            return (run.kept[k] + 1) / (block.draft + block.latency + self._alone.late)
        first_k = first_k or k
        first = self._ahead.block(first_k)
        period = self._ahead.block(k).period(ahead) + self._ahead.late
        num_following = run.whole[first_k] / max(1 - run.whole[k], 1e-9)
        num_tokens = run.brought(first_k) + num_following * run.brought(k)
        return num_tokens / (first.draft + first.latency + self._ahead.late_anew + num_following * period)

    def enough_ahead(self, k: int) -> int:
        """Blocks beyond the first that keep all stages busy, also when one takes longer than usual or the
        network stalls as it did of late."""
        block = self._ahead.block(k)
        usual_s = block.draft + block.latency
        covered_s = max(_SLACK * usual_s, usual_s + self._stall_s)
        return math.ceil(covered_s / max(block.draft, block.judged, block.uplink)) - 1
