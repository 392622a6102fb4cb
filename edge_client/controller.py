"""How much to draft, how far ahead, and whether the edge should draft at all.

`AutoController` maximises the tokens per second that a small model of the pipeline expects. With K
tokens a block, a_i the chance that token i is kept when those before it were, and

    P = a_1 ... a_K          chance that a whole block is kept
    A = a_1 + a_1 a_2 + ...  tokens kept, on average
    D = K * draft step       L = round trip + queue + pass of K + 1 tokens

- one block at a time gives A + 1 tokens (P of them bonus) in D + L;
- with m more in flight there is no bonus token, but a fully kept block is followed by the next after
  p = max(D, queue + pass, (D + L) / (m + 1)) only. A run of kept blocks ends with a rejection, after
  which the pipeline starts anew: (A + 1 - P) tokens in (1 - P)(D + L) + P p, by renewal;
- the verifier alone gives one token in queue + pass of 1 token.

All of it is measured while it runs. Drafting and judging at the same time slows both where they share
cores, so their durations with and without blocks ahead are kept apart.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from edge_client.results import Round


@dataclass(frozen=True, slots=True)
class Plan:
    """What to do next.

    Args:
        k: drafted tokens in a block.
        ahead: blocks that may be in flight beyond the first.
        cloud_tokens: when not 0, the verifier writes so many tokens alone instead.
    """

    k: int = 5
    ahead: int = 0
    cloud_tokens: int = 0


class Controller(Protocol):
    """Decides before every block; sees every round."""

    def plan(self) -> Plan: ...

    def observe(self, done: Round) -> None: ...

    def explain(self) -> str: ...


@dataclass(frozen=True, slots=True)
class FixedController:
    """Always the same plan."""

    fixed: Plan

    def plan(self) -> Plan:
        return self.fixed

    def observe(self, done: Round) -> None:
        pass

    def explain(self) -> str:
        return (
            "the cloud writes alone"
            if self.fixed.cloud_tokens
            else f"K={self.fixed.k}, {self.fixed.ahead} ahead"
        )


_AHEAD = (0, 1, 2, 3, 4, 6, 8, 12)
_FIRST = Plan(k=4)
_ADVANTAGE = 1.05  # a change must promise this much, so that noise does not make it flap
_DECAY = 0.9  # weight of what was known, each round
_ACCEPTANCE_DECAY = 0.98  # slower: whether a token is kept is one bit, a duration is many
_PRIOR_ACCEPTANCE, _PRIOR_ROUNDS = 0.7, 2.0
_CLOUD_TOKENS, _MAX_CLOUD_TOKENS = 32, 256
_ASKING = 0.03  # share of a cloud-only stretch that its round trip may take
_MAX_STRETCH = 8  # times as long, at most, as the first cloud-only stretch


class Average:
    """Exponentially weighted mean of durations in seconds; the first value counts whole."""

    def __init__(self, value: float = 0.0) -> None:
        self.value = value
        self.known = value > 0

    def add(self, value: float) -> None:
        self.value = _DECAY * self.value + (1 - _DECAY) * value if self.known else value
        self.known = True


class PassTime:
    """Duration of a pass as base + slope * tokens: least squares that forget, bounded to what can be."""

    def __init__(self) -> None:
        self._n = self._x = self._y = self._xx = self._xy = 0.0

    @property
    def known(self) -> bool:
        return self._n > 0

    def add(self, num_tokens: int, seconds: float) -> None:
        x = float(num_tokens)
        for name, value in (("_n", 1.0), ("_x", x), ("_y", seconds), ("_xx", x * x), ("_xy", x * seconds)):
            setattr(self, name, _DECAY * getattr(self, name) + value)

    def at(self, num_tokens: float) -> float:
        if not self.known:
            return 0.0
        mean_x, mean_y = self._x / self._n, self._y / self._n
        variance = self._xx / self._n - mean_x**2
        covariance = self._xy / self._n - mean_x * mean_y
        # Neither can a token make a pass shorter, nor can a pass without tokens take less than nothing.
        # Where all passes were of one size, most of it is taken to be the base: weights are read once.
        slope = covariance / variance if variance > 0.25 else 0.03 * mean_y
        slope = min(max(slope, 0.0), mean_y / max(mean_x, 1.0))
        return mean_y + slope * (num_tokens - mean_x)


@dataclass(slots=True)
class _Mode:
    """What is measured with blocks ahead, or without."""

    draft: Average = field(default_factory=Average)  # a drafted token, sampling and codec included
    judge: PassTime = field(default_factory=PassTime)


class Acceptance:
    """a_i by position: what was seen there, drawn towards the average of all positions."""

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
        prior = _PRIOR_ROUNDS
        return (sum(self._kept) + prior * _PRIOR_ACCEPTANCE) / (sum(self._tried) + prior)

    @property
    def doubt(self) -> float:
        """Standard error of `overall`."""
        return float((self.overall * (1 - self.overall) / (sum(self._tried) + _PRIOR_ROUNDS)) ** 0.5)

    def at(self, position: int) -> float:
        if position >= len(self._tried):
            return self.overall
        prior = _PRIOR_ROUNDS
        return (self._kept[position] + prior * self.overall) / (self._tried[position] + prior)


class AutoController:
    """Chooses the plan that promises most, from what it has measured so far. Keep one for a conversation.

    Args:
        max_k: tokens of a block at most.
        max_ahead: blocks in flight beyond the first at most.
        allows_cloud: whether the verifier may write alone.
    """

    def __init__(self, *, max_k: int = 16, max_ahead: int = 8, allows_cloud: bool = True) -> None:
        self._max_k = max_k
        self._ahead = [ahead for ahead in _AHEAD if ahead <= max_ahead]
        self._allows_cloud = allows_cloud
        self._alone, self._overlapped = _Mode(), _Mode()
        self._network, self._queue = Average(), Average()
        self._starts_anew = True  # the next verdict is on a block that had none of ours before it
        self._cloud = PassTime()
        self._acceptance = Acceptance()
        self._others = Average()
        self._current = _FIRST
        self._expected = 0.0
        self._cloud_left = 0  # messages of a cloud-only stretch still to come
        self._stretch = 1

    def plan(self) -> Plan:
        return self._current

    def observe(self, done: Round) -> None:
        timing = done.timing
        judged_s = (timing.forward_us + timing.verification_us) / 1e6
        own = done.num_drafted + 1
        if done.num_drafted:
            self._acceptance.add(done.num_drafted, done.num_accepted)
        if done.prompt_s:  # reading a prompt says nothing about the rounds to come
            if done.num_drafted > 1:
                mode = self._overlapped if self._current.ahead else self._alone
                drafting_s = done.draft_s + done.codec_s - done.prompt_s
                mode.draft.add(drafting_s / (done.num_drafted - 1))
            return
        self._others.add(max(timing.batch_tokens - own, 0))
        if done.num_drafted:
            mode = self._overlapped if self._current.ahead else self._alone
            mode.draft.add((done.draft_s + done.codec_s) / done.num_drafted)
            mode.judge.add(timing.batch_tokens or own, judged_s)
            if self._starts_anew:  # others wait behind our own earlier blocks, which `_speed` knows of
                self._queue.add(timing.queue_us / 1e6)
            self._starts_anew = done.num_accepted < done.num_drafted or not self._current.ahead
            self._network.add(max(done.round_trip_s - timing.queue_us / 1e6 - judged_s, 0.0))
        else:
            self._cloud.add(timing.batch_tokens or 1, judged_s)
            self._cloud_left -= 1
            if self._cloud_left > 0:
                return
        self._choose()

    def explain(self) -> str:
        """Estimates and choice, for a person."""
        mode = self._overlapped if self._current.ahead and self._overlapped.draft.known else self._alone
        kept = " ".join(f"{self._acceptance.at(i):.2f}" for i in range(min(self._current.k, 8)))
        choice = (
            "the cloud writes alone"
            if self._current.cloud_tokens
            else f"K={self._current.k}, {self._current.ahead} ahead"
        )
        return (
            f"draft {mode.draft.value * 1e3:.1f} ms a token, round trip {self._network.value * 1e3:.1f} ms, "
            f"queue {self._queue.value * 1e3:.1f} ms, "
            f"pass {mode.judge.at(self._current.k + 1) * 1e3:.1f} ms, "
            f"kept by position {kept} -> {choice} ({self._expected:.1f} tokens/s expected, "
            f"{self._cloud_speed():.1f} cloud alone)"
        )

    def speed(self, k: int, ahead: int) -> float:
        """Tokens per second that the model expects of a plan."""
        whole, kept = 1.0, 0.0
        for i in range(k):
            whole *= self._acceptance.at(i)
            kept += whole
        return self._speed(k, ahead, whole, kept)

    def _speed(self, k: int, ahead: int, whole: float, kept: float) -> float:
        mode = self._overlapped if ahead and self._overlapped.draft.known else self._alone
        if not mode.draft.known:
            mode = self._overlapped
        judged = self._queue.value + mode.judge.at(k + 1 + self._others.value)
        draft, latency = k * mode.draft.value, self._network.value + judged
        if not ahead:
            return (kept + 1) / (draft + latency)
        period = max(draft, judged, (draft + latency) / (ahead + 1))
        return (kept + 1 - whole) / ((1 - whole) * (draft + latency) + whole * period)

    def _cloud_step_s(self) -> float:
        passes = self._cloud if self._cloud.known else self._alone.judge
        return self._queue.value + passes.at(1 + self._others.value)

    def _cloud_speed(self) -> float:
        step_s = self._cloud_step_s()
        num_tokens = self._cloud_tokens()
        return num_tokens / (num_tokens * step_s + self._network.value) if step_s > 0 else 0.0

    def _cloud_tokens(self) -> int:
        """So many that the round trip of asking for them hardly counts."""
        step_s = self._cloud_step_s()
        needed = self._network.value / (_ASKING * step_s) if step_s > 0 else 0.0
        return self._stretch * min(max(_CLOUD_TOKENS, int(needed)), _MAX_CLOUD_TOKENS)

    def _best(self, optimism: float = 0.0) -> tuple[float, Plan]:
        best, plan = 0.0, self._current
        whole, kept = 1.0, 0.0
        for k in range(1, self._max_k + 1):
            whole *= min(self._acceptance.at(k - 1) + optimism, 1.0)
            kept += whole
            for ahead in self._ahead:
                speed = self._speed(k, ahead, whole, kept)
                if speed > best:
                    best, plan = speed, Plan(k, ahead)
        return best, plan

    def _choose(self) -> None:
        best, plan = self._best()
        cloud = self._cloud_speed() if self._allows_cloud else 0.0
        if self._current.cloud_tokens:  # try the draft again, ever more rarely while it does not pay
            self._stretch = min(2 * self._stretch, _MAX_STRETCH)
            self._current, self._expected = plan, best
            return
        now = self.speed(self._current.k, self._current.ahead)
        # A few unlucky blocks must not silence a good draft.
        if cloud > _ADVANTAGE * max(best, now) and cloud > self._best(2 * self._acceptance.doubt)[0]:
            self._cloud_left = self._cloud_tokens()
            self._current, self._expected = Plan(cloud_tokens=self._cloud_left), cloud
            return
        if cloud < now:
            self._stretch = 1
        if best > _ADVANTAGE * now:
            self._current, self._expected = plan, best
        else:
            self._expected = now
