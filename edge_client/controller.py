"""How much to draft, how far ahead, and whether the edge should draft at all.

`AutoController` takes the plan that promises most tokens per second (`edge_client.pipeline`), or lets the
verifier write alone where that is faster: one token in queue + pass of 1 token.

While the edge reads a prompt the verifier may write (`edge_client.bridge`).

While one block at a time is sent, K is an average: a block goes on for as long as one more token is
expected to bring more than it costs at that speed, which the draft's confidence tells.

A byte of a distribution is worth sending as long as the rejections that it saves take longer than it does on
the uplink: the price of bytes is the ratio of the two derivatives of that speed.

All of it is measured while it runs (`edge_client.estimates`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

from edge_client.bridge import Bridge
from edge_client.confidence import Ending
from edge_client.estimates import Estimates, Pace
from edge_client.pipeline import GUESSED_DRAFT_S, Pipeline, Run
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
_FIRST_PARTS = (1, 2, 3)  # of a block, in the first of a run: a short one finds a rejection earlier
_MIN_CLOUD_TOKENS = 32
_MAX_STRETCH_S = 60.0  # of the verifier alone: for so long a better network may go unnoticed
_MAX_SAVED_TOKENS = 100.0  # what a draft that paid may save up for trying it when it no longer seems to
_GUESSED_READ_S = 0.002  # a token, before any were read
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
        self._before: Round | None = None  # with drafted tokens
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
            self._add_lateness(done)
            self._known.add(done)
        else:
            self._known.cloud_step_s = self._pace.add(done.round_trip_s) or self._known.cloud_step_s
            self._before = None
            if self._pace.has_just_begun:
                self._known.add_first_of_stretch(done)
        if done.since_last_s:
            # Reading a prompt is no part of what a drafted token costs; mostly the verifier writes meanwhile.
            spent_s = done.since_last_s - (done.prompt_s if done.prompt_s < done.since_last_s else 0.0)
            saved = (1 + _TRYING) * _num_tokens(done) - spent_s * self._cloud_speed()
            self._known.saved_tokens = min(self._known.saved_tokens + saved, _MAX_SAVED_TOKENS)
        if not done.num_drafted:
            self._cloud_left -= 1
            # Every so often: the verifier may turn out slower alone than was thought.
            wrong = self._cloud_left % _MIN_CLOUD_TOKENS == 0 and self._best()[0] > self._cloud_speed()
            if self._cloud_left > 0 and not wrong:
                return
        if self._known.enough:
            self._choose()

    def _add_lateness(self, done: Round) -> None:
        """What a round took beyond its known parts, where these tell what it should have taken."""
        before, self._before = self._before, done
        if before is None or not self._known.enough or done.prompt_s or not done.since_last_s:
            return
        pipeline = Pipeline(self._known)
        block = pipeline.block(done.num_drafted, overlapping=done.num_before > 0)
        if done.num_before and before.more and before.num_accepted == before.num_drafted:
            late, expected = self._known.overlapped.late, block.period(done.num_before)
        elif done.more and not done.num_before and before.num_accepted < before.num_drafted:
            block = pipeline.block(done.num_drafted, overlapping=True)
            late, expected = self._known.overlapped.late_anew, block.draft + block.latency
        elif not (done.more or done.num_before or before.more or before.num_before):
            late, expected = self._known.alone.late, block.draft + block.latency
        else:
            return
        late.add(min(done.since_last_s - expected, expected))

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

    def _expected_of(self, plan: Plan) -> float:
        run = Run(self._known.acceptance.by_position(plan.k))
        return Pipeline(self._known).speed(run, plan.k, plan.ahead, plan.first_k)

    def _price(self) -> float | None:
        """What a byte costs over what overlap is worth, both in tokens per second, around the present plan.

        None while the uplink's rate is not known.
        """
        known, plan = self._known, self._current
        if plan.cloud_tokens or not (self._prices_bytes and known.network.shows_slope):
            return None
        chances, choice = known.acceptance.by_position(plan.k), (plan.k, plan.ahead, plan.first_k)
        pipeline, run = Pipeline(known), Run(chances)
        now = pipeline.speed(run, *choice)
        dearer = Pipeline(known, _SOME_BYTES * known.network.slope).speed(run, *choice)
        poorer = pipeline.speed(Run(chances, -_SOME_OVERLAP), *choice)
        byte, overlap = (now - dearer) / _SOME_BYTES, (now - poorer) / _SOME_OVERLAP
        return min(byte / overlap, _MAX_PRICE) if overlap > 0 else 0.0

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
        step_s = known.alone.draft.value or known.overlapped.draft.value or GUESSED_DRAFT_S
        judged = known.alone.judge.at(trial.k + 1) or known.overlapped.judge.at(trial.k + 1)
        return 2 * known.network_s(trial.k) + trial.k * step_s + judged

    def _best(self, optimism: float = 0.0, max_k: int = 1 << 20) -> tuple[float, Plan]:
        """The plan that promises most, and how much."""
        pipeline, max_k = Pipeline(self._known), min(self._max_k, max_k)
        run = Run(self._known.acceptance.by_position(max_k), optimism)
        choices: list[tuple[int, int, int]] = []  # k, ahead, first_k
        for k in range(1, max_k + 1):
            choices.append((k, 0, 0))
            if ahead := min(pipeline.enough_ahead(k), self._max_ahead):
                choices += [(k, ahead, -(-k // part)) for part in _FIRST_PARTS]
        speed, (k, ahead, first_k) = max((pipeline.speed(run, *choice), choice) for choice in choices)
        return speed, Plan(k, ahead, first_k=first_k)

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
        now = 0.0 if self._current.cloud_tokens else self._expected_of(self._current)
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
        if best > _ADVANTAGE * now:
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
