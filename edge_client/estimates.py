"""What an edge knows of its draft, the network and the verifier, measured round by round.

Drafting and judging at the same time slows both where they share cores, so their durations with and
without other blocks under way are kept apart.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from edge_client.bridge import A_TEXT
from edge_client.confidence import Calibration
from edge_client.results import Round

_DECAY = 0.9  # weight of what was known of a duration, each round
_ACCEPTANCE_DECAY = 0.99  # slower: whether a token is kept is one bit, a duration is many
_FEW = 5  # tokens of a stretch that say how fast the verifier writes
_PRIOR_ACCEPTANCE, _PRIOR_TOKENS = 0.8, 3.0
_POSITION_TOKENS = 12.0  # trials at a position that count as much as all other positions together


class Average:
    """Mean of durations in seconds that forgets exponentially, once it has seen enough to forget."""

    def __init__(self) -> None:
        self.value = 0.0
        self._weight = 0.0

    @property
    def known(self) -> bool:
        return self._weight > 0

    def add(self, value: float) -> None:
        self._weight = _DECAY * self._weight + 1.0
        self.value += (value - self.value) / self._weight


class Line:
    """Seconds as base + slope * size: least squares that forget, bounded to what can be.

    Args:
        share: of the mean that is taken to be slope where nothing shows it, because all were of one size.
        stiffness: how much it takes (size squared) to believe another slope.
    """

    def __init__(self, share: float = 0.0, stiffness: float = 0.0) -> None:
        self._share, self._stiffness = share, stiffness
        self._n = self._x = self._y = self._xx = self._xy = 0.0

    @property
    def known(self) -> bool:
        return self._n > 0

    def add(self, size: float, seconds: float) -> None:
        x = float(size)
        for name, value in (("_n", 1.0), ("_x", x), ("_y", seconds), ("_xx", x * x), ("_xy", x * seconds)):
            setattr(self, name, _DECAY * getattr(self, name) + value)

    def at(self, size: float) -> float:
        if not self.known:
            return 0.0
        return self._y / self._n + self.slope * (size - self._x / self._n)

    @property
    def _spread(self) -> float:
        """Sum of squared distances of the sizes from their mean."""
        return max(self._xx - self._x**2 / self._n, 0.0) if self.known else 0.0

    @property
    def shows_slope(self) -> bool:
        """Whether the sizes differed enough for the slope to be more measured than assumed."""
        return self._spread > max(self._stiffness, 0.25)

    @property
    def slope(self) -> float:
        """Neither can more make things shorter, nor can nothing take less than no time."""
        if not self.known:
            return 0.0
        mean_x, mean_y = self._x / self._n, self._y / self._n
        variance = self._spread + self._stiffness
        covariance = self._xy - self._n * mean_x * mean_y + self._stiffness * self._share * mean_y
        slope = covariance / variance if variance > 0.25 else self._share * mean_y
        return min(max(slope, 0.0), mean_y / max(mean_x, 1.0))


class Pace:
    """From one token to the next while the verifier writes alone, over a whole stretch.

    Where the network hands tokens over in bursts, a few of them say nothing.
    """

    def __init__(self) -> None:
        self._arrivals: list[float] = []

    @property
    def has_just_begun(self) -> bool:
        """Whether the last token was the first of its stretch."""
        return len(self._arrivals) == 1

    def add(self, since_asked_s: float) -> float:
        """Seconds a token so far; 0 while too few have come."""
        if self._arrivals and since_asked_s < self._arrivals[-1]:
            self._arrivals.clear()  # another stretch was asked for
        self._arrivals.append(since_asked_s)
        if len(self._arrivals) < _FEW:
            return 0.0
        return (self._arrivals[-1] - self._arrivals[0]) / (len(self._arrivals) - 1)


class Acceptance:
    """The chance that a drafted token is kept when those before it were.

    By position: what was seen there, drawn towards the average of all positions.
    """

    def __init__(self) -> None:
        self._tried: list[float] = []
        self._kept: list[float] = []

    def add(self, num_drafted: int, num_accepted: int) -> None:
        tried = min(num_accepted + 1, num_drafted)  # nothing is known beyond the first rejection
        missing = num_drafted - len(self._tried)
        self._tried += [0.0] * missing
        self._kept += [0.0] * missing
        for i in range(tried):
            self._tried[i] = _ACCEPTANCE_DECAY * self._tried[i] + 1.0
            self._kept[i] = _ACCEPTANCE_DECAY * self._kept[i] + (i < num_accepted)

    @property
    def overall(self) -> float:
        kept = sum(self._kept) + _PRIOR_TOKENS * _PRIOR_ACCEPTANCE
        return kept / (sum(self._tried) + _PRIOR_TOKENS)

    @property
    def doubt(self) -> float:
        """Standard error of `overall`."""
        return float((self.overall * (1 - self.overall) / (sum(self._tried) + _PRIOR_TOKENS)) ** 0.5)

    def by_position(self, num_positions: int) -> list[float]:
        overall = self.overall
        chances = [overall] * num_positions
        for i in range(min(num_positions, len(self._tried))):
            kept = self._kept[i] + _POSITION_TOKENS * overall
            chances[i] = kept / (self._tried[i] + _POSITION_TOKENS)
        return chances


class Network:
    """Seconds there and back over a block's bytes: what does not depend on these is the round trip.

    A stall holds up all blocks that are under way. It is told once, by the first of them, and as no more than
    twice what was expected; when a block that was sent after it takes so long too, it is another network.
    """

    def __init__(self) -> None:
        self._line = Line(stiffness=_UPLINK_STIFFNESS)
        self._num_odd = 0  # in a row
        self._since_odd = math.inf  # blocks
        self._longest_s = 0.0  # of late

    def add(self, num_bytes: int, seconds: float, num_before: int = 0) -> None:
        """Args:
        num_before: blocks that were under way when this one was sent.
        """
        self._longest_s = max(_LONGEST_DECAY * self._longest_s, seconds)
        self._since_odd += 1
        expected = self.at(num_bytes)
        if not self.known or 0.5 * expected <= seconds <= 2.0 * expected + _UNLIKE_S:
            self._num_odd = 0
        elif num_before >= self._since_odd:
            return  # held up by what was told already
        else:
            self._num_odd, self._since_odd = self._num_odd + 1, 0
            if self._num_odd < _UNLIKE:
                seconds = min(seconds, 2.0 * expected + _UNLIKE_S)
            else:
                self._line, self._num_odd = Line(stiffness=_UPLINK_STIFFNESS), 0
        self._line.add(num_bytes, seconds)

    def at(self, num_bytes: float) -> float:
        return self._line.at(num_bytes)

    @property
    def known(self) -> bool:
        return self._line.known

    @property
    def slope(self) -> float:
        """Seconds a byte: the uplink."""
        return self._line.slope

    @property
    def shows_slope(self) -> bool:
        return self._line.shows_slope

    @property
    def stall_s(self) -> float:
        """How much longer than usual it took of late, at most."""
        return max(self._longest_s - self.at(0), 0.0)


_CREDIT_TOKENS = 26.0  # what an unknown draft may lose at first: more often than not it pays
# Of a pass nearly all is the reading of the weights, once, whatever the number of tokens.
_PASS_SHARE, _PASS_STIFFNESS = 0.02, 10.0
_UPLINK_STIFFNESS = 2e5  # bytes squared
_UNLIKE, _UNLIKE_S = 2, 0.005
_LONGEST_DECAY = 0.97  # a block: a stall is half forgotten after 23


@dataclass(slots=True)
class Mode:
    """What is measured while other blocks are under way, or while none is."""

    draft: Average = field(default_factory=Average)  # a drafted token, sampling and codec included
    judge: Line = field(default_factory=lambda: Line(_PASS_SHARE, _PASS_STIFFNESS))
    late: Average = field(default_factory=Average)  # a round, against what its known parts take
    late_anew: Average = field(default_factory=Average)  # the same, of a first block after a rejection


class Estimates:
    """All that was measured, of one draft and one verifier. Outlives an answer.

    Args:
        round_trip_s: of the network, where it is known from before.
        forward_s: of a recent pass on the verifier; 0 where nobody knows.
    """

    def __init__(self, round_trip_s: float = 0.0, forward_s: float = 0.0) -> None:
        self.alone, self.overlapped = Mode(), Mode()
        self.network = Network()
        self.token_bytes = Average()  # of a block, for a drafted token
        self.read = Average()  # a token of a text
        self.queue, self.others = Average(), Average()
        self.cloud_step_s = 0.0  # from one token to the next while the verifier writes alone; 0: not seen
        self.saved_tokens = _CREDIT_TOKENS  # by drafting, against the verifier alone; below 0: lost
        self.acceptance, self.calibration = Acceptance(), Calibration()
        if round_trip_s > 0:
            self.network.add(0, round_trip_s)
        if forward_s > 0:
            self.alone.judge.add(1, forward_s)

    def add_first_of_stretch(self, done: Round) -> None:
        """The first token that the verifier writes alone: all that is heard of the network while nothing is
        drafted. It may have waited for a prompt to be read, so it can only show a faster network."""
        timing = done.timing
        there_s = (timing.queue_us + timing.forward_us + timing.verification_us) / 1e6
        network_s = max(done.round_trip_s - there_s, 0.0)
        if self.network.known and network_s < self.network.at(0):
            self.network.add(0, network_s)

    def network_s(self, num_tokens: float) -> float:
        """There and back, with a block of so many tokens."""
        return self.network.at(num_tokens * self.token_bytes.value)

    @property
    def uplink_s(self) -> float:
        """What a drafted token takes on the uplink."""
        return self.network.slope * self.token_bytes.value

    @property
    def enough(self) -> bool:
        """Whether all is known that a choice depends on."""
        return self.network.known and (self.alone.judge.known or self.overlapped.judge.known)

    def add(self, done: Round) -> None:
        """One block and its verdict."""
        self.acceptance.add(done.num_drafted, done.num_accepted)
        self.calibration.add(done.confidences, done.num_accepted)
        self.token_bytes.add(done.up_bytes / done.num_drafted)
        if done.num_read >= A_TEXT:
            self.read.add(done.read_s / done.num_read)
        mode = self.overlapped if done.more or done.num_before else self.alone
        if done.prompt_s:  # reading a prompt says nothing about the rounds to come
            if done.num_drafted > 1:
                mode.draft.add((done.draft_s + done.codec_s - done.prompt_s) / (done.num_drafted - 1))
            return
        timing, own = done.timing, done.num_drafted + 1
        judged_s, queue_s = (timing.forward_us + timing.verification_us) / 1e6, timing.queue_us / 1e6
        mode.draft.add((done.draft_s + done.codec_s) / done.num_drafted)
        mode.judge.add(timing.batch_tokens or own, judged_s)
        self.others.add(max(timing.batch_tokens - own, 0))
        network_s = max(done.round_trip_s - queue_s - judged_s, 0.0)
        self.network.add(done.up_bytes, network_s, done.num_before)
        if not done.num_before:  # others wait behind our own earlier blocks, which the model knows of
            self.queue.add(queue_s)
