"""How much to draft, how far ahead, and whether the edge should draft at all.

`AutoController` maximises the tokens per second that a small model of the pipeline expects. With K
tokens a block, a_i the chance that token i is kept when those before it were, and

    P = a_1 ... a_K          chance that a whole block is kept
    A = a_1 + a_1 a_2 + ...  tokens kept, on average
    D = K * draft step       L = round trip + queue + pass of K + 1 tokens

- one block at a time gives A + 1 tokens (P of them bonus) in D + L;
- with m more in flight there is no bonus token, but a fully kept block is followed by the next after
  p = max(D, queue + pass, uplink, (D + L) / (m + 1)) only. A run of kept blocks ends with a rejection,
  after which the pipeline starts anew: (A + 1 - P) tokens in (1 - P)(D + L) + P p, by renewal;
- the verifier alone gives one token in queue + pass of 1 token.

While the edge reads a prompt the verifier may write (`edge_client.bridge`).

While one block at a time is sent, K is an average: a block goes on for as long as one more token is
expected to bring more than it costs at that speed, which the draft's confidence tells.

A byte of a distribution is worth sending as long as the rejections that it saves take longer than it does on
the uplink: the price of bytes is the ratio of the two derivatives of that speed.

All of it is measured while it runs (`edge_client.estimates`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Protocol

from edge_client.bridge import Bridge
from edge_client.confidence import Ending
from edge_client.estimates import Estimates, Pace
from edge_client.results import Round
from shared.messages import Description


@dataclass(frozen=True, slots=True)
class Plan:
    """What to do next.

    Args:
        k: drafted tokens in a block.
        ahead: blocks that may be in flight beyond the first.
        cloud_tokens: when not 0, the verifier writes so many tokens alone instead.
        first_k: when not 0, tokens of a block that none in flight precedes. With blocks to follow at once, a
            short one brings its tokens, or its rejection, earlier.
        price: total variation that a byte of a distribution must save to be sent, if that is more than the
            codec asks; None where the uplink is not known, see `shared.codecs.Budget`.
        ending: where a block ends before it has k tokens; None: nowhere.
        bridge: how much the verifier writes while the edge reads, before its next block; None: nothing.
    """

    k: int = 5
    ahead: int = 0
    cloud_tokens: int = 0
    first_k: int = 0
    price: float | None = 0.0
    ending: Ending | None = None
    bridge: Bridge | None = None


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
        return _in_words(self.fixed)


_MAX_K = 16
_FIRST_K = 4
_ADVANTAGE = 1.02  # a change must promise this much, so that noise does not make it flap
_TRYING = 0.03  # share of its time that trying a draft which does not seem to pay may take
_NEARLY = 0.25  # of what a trial costs may be missing after a stretch: asking for another costs more
_TRIAL_K = 6
_LONGER = 2  # times as long as K a block may become where the draft is sure
_CALIBRATED = 60.0  # tokens after which confidence is believed
_FIRST_PART = 3  # of a block, in the first; simulated links answer up to 2 % faster with it, and begin sooner
_MIN_CLOUD_TOKENS = 32
_MAX_STRETCH_S = 60.0  # of the verifier alone: for so long a better network may go unnoticed
_MAX_SAVED_TOKENS = 100.0  # what a draft that paid may save up for trying it when it no longer seems to
_ALONE = 0.6  # as long as drafting and judging at the same time, until it was tried
_GUESSED_DRAFT_S = 0.01  # a token, before one was drafted
_GUESSED_READ_S = 0.002  # a token, before any were read
_SLACK = 1.5  # times as many blocks in flight as suffice where nothing varies: more than needed cost nothing
_MUCH_LONGER = 1.25  # blocks are worth a change too: the verifier is busy for less of its time
_NEAR = 0.95  # of the best speed: plans that differ by less are equal, for all that is known
_BLOCK_S = 0.002  # of a block, beside its steps: a verdict to read, a plan to choose, a message to send
_SOME_BYTES, _SOME_OVERLAP = 10.0, 0.01  # small steps, to see what they change
_NOTHING, _MAX_PRICE = 1e-6, 1e-3  # of a byte; coarser distributions are not worth it anywhere


class AutoController:
    """Chooses the plan that promises most, from what it has measured so far. Keep one for a conversation.

    Args:
        max_k: tokens of a block at most.
        max_ahead: blocks in flight beyond the first at most.
        allows_cloud: whether the verifier may write alone.
        prices_bytes: whether distributions may be as large as the uplink makes worth while.
        estimates: what is known from earlier answers; shared with other controllers, it grows with all.
    """

    def __init__(
        self,
        *,
        max_k: int = _MAX_K,
        max_ahead: int = 8,
        allows_cloud: bool = True,
        prices_bytes: bool = True,
        estimates: Estimates | None = None,
    ) -> None:
        self._max_k = max_k
        self._max_ahead = max_ahead
        self._allows_cloud = allows_cloud
        self._prices_bytes = prices_bytes
        self._known = Estimates() if estimates is None else estimates
        self._current = Plan(min(_FIRST_K, max_k), price=None)
        self._expected = 0.0
        self._plan = self._completed(self._current)
        self._pace = Pace()
        self._cloud_left = 0  # messages of a cloud-only stretch still to come
        if self._known.enough:
            self._choose()

    @classmethod
    def within(
        cls, description: Description, estimates: Estimates | None, *, prices_bytes: bool = True
    ) -> AutoController:
        """One that asks for no more than the verifier allows."""
        limits = description.limits
        return cls(
            max_k=min(_MAX_K, limits.max_block),
            max_ahead=max(limits.max_in_flight - 1, 0),
            allows_cloud=description.allows_generate,
            prices_bytes=prices_bytes,
            estimates=estimates,
        )

    def plan(self) -> Plan:
        return self._plan

    def observe(self, done: Round) -> None:
        if done.num_drafted:
            self._known.add(done)
        else:
            self._known.cloud_step_s = self._pace.add(done.round_trip_s) or self._known.cloud_step_s
        if done.since_last_s:
            saved = (1 + _TRYING) * _num_tokens(done) - done.since_last_s * self._cloud_speed()
            self._known.saved_tokens = min(self._known.saved_tokens + saved, _MAX_SAVED_TOKENS)
        if not done.num_drafted:
            self._cloud_left -= 1
            # Every so often: the verifier may turn out slower alone than was thought.
            wrong = self._cloud_left % _MIN_CLOUD_TOKENS == 0 and self._best()[0] > self._cloud_speed()
            if self._cloud_left > 0 and not wrong:
                return
        if self._known.enough:
            self._choose()

    def explain(self) -> str:
        """Estimates and choice, for a person."""
        known, now = self._known, self._current
        mode = known.overlapped if now.ahead and known.overlapped.draft.known else known.alone
        kept = " ".join(f"{chance:.2f}" for chance in known.acceptance.by_position(min(now.k, 8)))
        return (
            f"draft {mode.draft.value * 1e3:.1f} ms a token, round trip {known.network_s(0) * 1e3:.1f} ms "
            f"and {known.uplink_s * 1e3:.2f} ms a token, queue {known.queue.value * 1e3:.1f} ms, "
            f"pass {mode.judge.at(now.k + 1) * 1e3:.1f} ms, kept by position {kept} "
            f"-> {_in_words(self._plan)}, {_price_in_words(now.price)} "
            f"({self._expected:.1f} tokens/s expected, {self._cloud_speed():.1f} cloud alone)"
        )

    def speed(self, k: int, ahead: int, *, lost: float = 0.0, more_bytes: float = 0.0) -> float:
        """Tokens per second that the model expects of a plan.

        Args:
            lost: of the chance of every token to be kept, against what was seen.
            more_bytes: for every drafted token, than were sent so far.
        """
        whole, kept = 1.0, 0.0
        for chance in self._known.acceptance.by_position(k):
            whole *= max(chance - lost, 0.0)
            kept += whole
        return self._speed(k, ahead, whole, kept, more_bytes * self._known.network.slope)

    def _price(self) -> float | None:
        """What a byte costs over what overlap is worth, both in tokens per second, around the present plan.

        None while the uplink's rate is not known.
        """
        k, ahead = self._current.k, self._current.ahead
        if self._current.cloud_tokens or not (self._prices_bytes and self._known.network.shows_slope):
            return None
        now = self.speed(k, ahead)
        byte = (now - self.speed(k, ahead, more_bytes=_SOME_BYTES)) / _SOME_BYTES
        overlap = (now - self.speed(k, ahead, lost=_SOME_OVERLAP)) / _SOME_OVERLAP
        return min(byte / overlap, _MAX_PRICE) if overlap > 0 else 0.0

    def _speed(self, k: int, ahead: int, whole: float, kept: float, more_s: float = 0.0) -> float:
        draft, judged, uplink, latency = self._durations(k, ahead > 0, more_s)
        if not ahead:
            return (kept + 1) / (draft + latency)
        period = max(draft, judged, uplink, (draft + latency) / (ahead + 1))
        return (kept + 1 - whole) / ((1 - whole) * (draft + latency) + whole * period)

    def _enough_ahead(self, k: int) -> int:
        """Blocks beyond the first that keep all stages busy, also when one takes longer than usual."""
        draft, judged, uplink, latency = self._durations(k, True)
        in_flight = (draft + latency) / max(draft, judged, uplink)
        return min(math.ceil(_SLACK * in_flight) - 1, self._max_ahead)

    def _durations(self, k: int, overlapping: bool, more_s: float = 0.0) -> tuple[float, float, float, float]:
        """Seconds of a block of k tokens: drafted, judged, on the uplink, from there to its verdict.

        Args:
            overlapping: whether drafting and judging go on at the same time.
            more_s: on the uplink for every token.
        """
        known = self._known
        mode, other = (known.overlapped, known.alone) if overlapping else (known.alone, known.overlapped)
        # What was never tried is hoped to be as good as it can be: alone may be much faster on shared cores.
        hope = 1.0 if overlapping else _ALONE
        step_s = mode.draft.value or hope * other.draft.value or _GUESSED_DRAFT_S
        num_tokens = k + 1 + known.others.value
        judged = (mode.judge.at(num_tokens) or hope * other.judge.at(num_tokens)) + known.queue.value
        uplink, latency = k * (known.uplink_s + more_s), known.network_s(k) + k * more_s + judged
        return k * step_s + _BLOCK_S, judged, uplink, latency

    def _cloud_step_s(self) -> float:
        known = self._known
        judge = known.alone.judge if known.alone.judge.known else known.overlapped.judge
        return known.cloud_step_s or known.queue.value + judge.at(1 + known.others.value)

    def _cloud_speed(self) -> float:
        step_s = self._cloud_step_s()
        return 1 / step_s if step_s > 0 else 0.0

    def _trial_s(self, trial: Plan) -> float:
        """What it costs at worst to ask the verifier again and to let the edge draft one block in vain."""
        known = self._known
        step_s = known.alone.draft.value or known.overlapped.draft.value or _GUESSED_DRAFT_S
        judged = known.alone.judge.at(trial.k + 1) or known.overlapped.judge.at(trial.k + 1)
        return 2 * known.network_s(trial.k) + trial.k * step_s + judged

    def _best(self, optimism: float = 0.0, max_k: int = 1 << 20) -> tuple[float, Plan]:
        """Of the plans that promise nearly the most, the one that keeps the verifier least busy."""
        found: list[tuple[float, float, int, int]] = []  # speed, tokens a block brings, k, ahead
        whole, kept = 1.0, 0.0
        for k, chance in enumerate(self._known.acceptance.by_position(min(self._max_k, max_k)), 1):
            whole *= min(chance + optimism, 1.0)
            kept += whole
            for ahead in {0, self._enough_ahead(k)}:
                speed = self._speed(k, ahead, whole, kept)
                found.append((speed, kept + (1 - whole if ahead else 1), k, ahead))
        most = max(speed for speed, *_ in found)
        near = (each for each in found if each[0] >= _NEAR * most)
        speed, _, k, ahead = max(near, key=lambda each: each[1])
        return speed, Plan(k, ahead, first_k=-(-k // _FIRST_PART) if ahead else 0)

    def _choose(self) -> None:
        self._choose_blocks()
        self._current = replace(self._current, price=self._price())
        self._plan = self._completed(self._current)

    def _completed(self, plan: Plan) -> Plan:
        return replace(self._with_ending(plan), bridge=self._bridge())

    def _bridge(self) -> Bridge | None:
        known = self._known
        if not (self._allows_cloud and known.enough):
            return None
        return Bridge(known.read.value or _GUESSED_READ_S, known.network_s(0), self._cloud_step_s())

    def _with_ending(self, plan: Plan) -> Plan:
        """The plan with blocks that end early, or go on for longer, as their tokens' confidence says.

        Blocks that others follow at once need not: nothing waits for their end.
        """
        known = self._known
        overall = known.acceptance.overall
        chances = known.calibration.chances(overall)
        step_s = known.alone.draft.value
        if plan.ahead or plan.cloud_tokens or not step_s or known.calibration.num_tokens < _CALIBRATED:
            return replace(plan, ending=Ending(0.0, chances))
        longer = min(_LONGER * plan.k, self._max_k)
        token_s = step_s + known.alone.judge.slope + known.uplink_s
        return replace(plan, k=longer, ending=Ending(self._expected * token_s / overall, chances))

    def _choose_blocks(self) -> None:
        best, plan = self._best()
        now = 0.0 if self._current.cloud_tokens else self.speed(self._current.k, self._current.ahead)
        cloud = self._cloud_speed() if self._allows_cloud else 0.0
        if cloud > _ADVANTAGE * max(best, now):
            hope, trial = self._best(2 * self._known.acceptance.doubt, _TRIAL_K)
            cost = self._trial_s(trial) * cloud
            missing = cost - self._known.saved_tokens
            # A few unlucky blocks must not silence a good draft, but after a stretch any may try.
            hopeful = hope > cloud or self._current.cloud_tokens
            if missing > (_NEARLY * cost if self._current.cloud_tokens else 0) or not hopeful:
                stretch = min((missing if hopeful else cost) / _TRYING, _MAX_STRETCH_S * cloud)
                self._cloud_left = max(int(stretch), _MIN_CLOUD_TOKENS)
                self._current, self._expected = Plan(cloud_tokens=self._cloud_left), cloud
            else:
                self._current, self._expected = trial, best
            return
        is_longer = plan.k >= _MUCH_LONGER * self._current.k and best > now / _ADVANTAGE
        if best > _ADVANTAGE * now or is_longer:
            self._current, self._expected = plan, best
        else:
            self._expected = now


def _num_tokens(done: Round) -> int:
    """Committed by a round; siblings are not counted."""
    return done.num_accepted + (done.num_accepted < done.num_drafted or not done.more)


def _price_in_words(price: float | None) -> str:
    if price is None:
        return "blocks of one packet"
    return f"bytes at {price:.0e} of overlap each" if price >= _NOTHING else "bytes for nothing"


def _in_words(plan: Plan) -> str:
    if plan.cloud_tokens:
        return "the cloud writes alone"
    until = f" while {plan.ending.least:.2f} sure" if plan.ending is not None and plan.ending.least else ""
    return f"K={plan.k}{until}, {plan.ahead} ahead"
