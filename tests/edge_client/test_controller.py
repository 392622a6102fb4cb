"""The controller on simulated links: it has to come close to the best fixed plan, whatever that is."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from simulated_link import FIXED, Link, done, mean_speed, speed

from edge_client.controller import AutoController, FixedController, Plan
from edge_client.estimates import Acceptance, Average, Estimates, Line, Network, Pace
from edge_client.results import Round
from shared.messages import Timing

BIG = {"base": 0.0514, "per_token": 0.0009}  # what `--emulate-step 70b` asks for
SMALL = {"base": 0.022, "per_token": 0.0015}

LINKS = {
    "loopback, shared cores": Link(0.0003, 0.006, **SMALL, kept=0.96, crowding=1.6),
    "one core a side": Link(0.003, 0.0165, 0.064, 0.001, kept=0.965, spread=0.35),
    "lan, good draft": Link(0.0005, 0.006, **SMALL, kept=0.96),
    "lan, poor draft": Link(0.0005, 0.006, **SMALL, kept=0.6),
    "lan, useless draft": Link(0.0005, 0.02, **SMALL, kept=0.1),
    "5g, big target": Link(0.025, 0.006, **BIG, kept=0.96, jitter=0.002, up_rate=1.7e6),
    "5g, big target, poor draft": Link(0.025, 0.006, **BIG, kept=0.72, jitter=0.002, up_rate=1.7e6),
    "leo, big target": Link(0.050, 0.006, **BIG, kept=0.96, jitter=0.003, up_rate=1.8e6),
    "4g, small target": Link(0.055, 0.006, **SMALL, kept=0.96, jitter=0.004, up_rate=750e3),
    "4g, small target, poor draft": Link(0.055, 0.006, **SMALL, kept=0.72, jitter=0.004, up_rate=750e3),
    "slow-4g, small target": Link(0.150, 0.006, **SMALL, kept=0.96, up_rate=94e3),
    "slow-4g, big target": Link(0.150, 0.006, **BIG, kept=0.96, up_rate=94e3),
    "geo, small target": Link(0.600, 0.006, **SMALL, kept=0.96, up_rate=370e3),
    "geo, poor draft": Link(0.600, 0.006, **BIG, kept=0.72, up_rate=370e3),
    "lte that stalls, big target": Link(
        0.058, 0.018, **BIG, kept=0.96, jitter=0.004, up_rate=1e6, stall=1.0, stall_every=6.0
    ),
    "slow device": Link(0.025, 0.080, **BIG, kept=0.9),
}
ANSWERS, TOKENS = 12, 128  # of one conversation
SEEDS = 16
CLOUD = Plan(cloud_tokens=1 << 20)


def started(link: Link, **settings: Any) -> AutoController:
    """A controller that knows what a client knows from asking the verifier what it serves."""
    return AutoController(estimates=Estimates(link.round_trip, link.judge(4)), **settings)


@pytest.mark.parametrize("name", LINKS)
def test_close_to_the_best_fixed_plan_and_never_below_the_verifier_alone(name):
    link = LINKS[name]
    # Many answers, as the best of 36 noisy figures is itself a lucky one.
    speeds = {
        plan: mean_speed(lambda plan=plan: FixedController(plan), link, TOKENS, seeds=SEEDS) for plan in FIXED
    }
    auto = mean_speed(lambda: started(link), link, TOKENS, seeds=SEEDS, answers=ANSWERS)
    assert auto >= 0.95 * max(speeds.values())
    assert auto >= 0.95 * speeds[CLOUD]


class Blind:
    """A controller that is never told how sure the draft was."""

    def __init__(self, controller: AutoController) -> None:
        self._controller = controller

    def plan(self) -> Plan:
        return self._controller.plan()

    def observe(self, done: Round) -> None:
        self._controller.observe(replace(done, confidences=()))

    def explain(self) -> str:
        return self._controller.explain()


def test_ends_blocks_where_the_draft_is_not_sure_and_lets_others_go_on():
    link = Link(0.0005, 0.012, **SMALL, kept=0.99, unsure=0.2, kept_unsure=0.6)

    def waiting() -> AutoController:
        return started(link, max_ahead=0)

    sure = mean_speed(waiting, link, TOKENS, answers=ANSWERS)
    blind = mean_speed(lambda: Blind(waiting()), link, TOKENS, answers=ANSWERS)
    best = max(
        mean_speed(lambda k=k: FixedController(Plan(k)), link, TOKENS, answers=ANSWERS) for k in range(2, 13)
    )
    assert sure >= 1.03 * blind
    assert sure >= 1.03 * best


def test_learns_in_the_end_where_trying_is_dear():
    link = Link(0.600, 0.006, **BIG, kept=0.96)
    best = mean_speed(lambda: FixedController(Plan(12, 8)), link, TOKENS, answers=40)
    auto = mean_speed(lambda: started(link), link, TOKENS, answers=40)
    assert auto >= 0.8 * best
    assert auto >= 1.1 * mean_speed(lambda: FixedController(CLOUD), link, TOKENS)


def test_does_its_best_where_the_verifier_may_not_write_alone():
    link = LINKS["geo, poor draft"]
    best = max(mean_speed(lambda plan=plan: FixedController(plan), link) for plan in FIXED if plan != CLOUD)
    assert mean_speed(lambda: started(link, allows_cloud=False), link) >= 0.85 * best


def test_obeys_what_is_not_allowed():
    controller = AutoController(max_k=5, max_ahead=0, allows_cloud=False)
    plans = Watched(controller)
    speed(plans, LINKS["4g, small target, poor draft"])
    assert all(plan.k <= 5 and plan.ahead == 0 and plan.cloud_tokens == 0 for plan in plans.seen)


class Watched:
    """A controller whose plans are written down."""

    def __init__(self, controller: AutoController) -> None:
        self._controller = controller
        self.seen: list[Plan] = []

    def plan(self) -> Plan:
        self.seen.append(self._controller.plan())
        return self.seen[-1]

    def observe(self, done: Round) -> None:
        self._controller.observe(done)

    def explain(self) -> str:
        return self._controller.explain()

    @property
    def changes(self) -> int:
        seen = [replace(plan, price=0.0, ending=None, bridge=None) for plan in self.seen]
        return sum(a != b for a, b in pairwise(seen))


@pytest.mark.parametrize(
    "name", ["lan, good draft", "leo, big target", "loopback, shared cores", "5g, big target, poor draft"]
)
def test_does_not_flap(name):
    plans = Watched(started(LINKS[name]))
    speed(plans, LINKS[name], num_tokens=1600)
    assert plans.changes <= len(plans.seen) / 10


def test_leaves_the_draft_alone_for_long_where_it_does_not_pay():
    plans = Watched(started(LINKS["lan, useless draft"]))
    speed(plans, LINKS["lan, useless draft"], num_tokens=3000)
    drafting = [plan for plan in plans.seen if not plan.cloud_tokens]
    assert 1 <= len(drafting) <= 150


def test_follows_a_link_that_changes():
    far = Link(0.3, 0.006, 0.050, 0.0004, 0.95)
    moved = 0.0
    for seed in range(6):
        controller = AutoController()
        speed(controller, LINKS["lan, good draft"], seed=seed)
        near = controller.plan()
        moved += 1 / speed(controller, far, seed=seed)
        assert controller.plan() != near
    assert 6 / moved >= 0.85 * mean_speed(AutoController, far)


def test_a_link_that_was_slow_for_a_moment_is_tried_again_soon():
    link = LINKS["leo, big target"]
    known = Estimates(link.round_trip, link.judge(4))
    controller = AutoController(estimates=known)
    speed(controller, link)
    stalled = replace(link, round_trip=3.0)
    speed(controller, stalled, num_tokens=300)
    assert controller.plan().cloud_tokens
    again = [speed(controller, link, num_tokens=64, seed=seed) for seed in range(8)]
    assert controller.plan().ahead > 0
    assert 8 / sum(1 / each for each in again) >= 1.5 * speed(FixedController(CLOUD), link)


def test_a_stall_is_told_once_by_all_blocks_that_it_holds_up():
    network = Network()
    for _ in range(5):
        network.add(100, 0.060)
    assert network.stall_s == pytest.approx(0.0)
    for num_before in range(4):
        network.add(100, 1.0, num_before)
    assert network.at(100) < 0.075
    assert network.stall_s > 0.9
    network.add(100, 1.0)  # sent after the stall was over
    assert network.at(100) == pytest.approx(1.0)


def test_what_one_answer_learnt_serves_the_next():
    link = LINKS["leo, big target"]
    known = Estimates(link.round_trip)
    speed(AutoController(estimates=known), link)
    assert AutoController(estimates=known).plan().ahead > 0
    assert replace(AutoController().plan(), ending=None) == Plan(k=4, price=None)


def test_bytes_are_dear_where_the_uplink_is_slow():
    def price(up_rate: float, **settings: bool) -> float | None:
        controller = AutoController(allows_cloud=False, **settings)
        speed(controller, Link(0.025, 0.006, **BIG, kept=0.8, up_rate=up_rate))
        return controller.plan().price

    fast, slow = price(5e6), price(20e3)
    assert fast is not None
    assert slow is not None
    assert fast < 1e-4 < slow <= 1e-3  # what the default codec asks of a byte anyway
    assert price(20e3, prices_bytes=False) is None


def test_explains_itself():
    controller = AutoController()
    speed(controller, LINKS["5g, big target"])
    text = controller.explain()
    for words in ("draft 6.0 ms", "round trip 2", "kept by position", "tokens/s expected", "cloud alone"):
        assert words in text


def test_a_prompt_does_not_count_as_a_round():
    known = Estimates()
    known.cloud_step_s, credit = 0.1, known.saved_tokens
    controller = AutoController(estimates=known)
    timing = Timing(4_000_000, 3_000_000, 0, 1, 900)
    controller.observe(Round(4, 4, 0, 0, 5.03, 0.0, 9.0, 9.0, timing, prompt_s=5.0, since_last_s=5.5))
    assert known.saved_tokens == pytest.approx(credit, abs=0.2)  # 5 tokens in half a second
    assert controller.plan() == AutoController().plan()
    controller.observe(done(4, 4, 0.030, 0.025, 0.040, 0.0))
    assert "draft 10.0 ms" in controller.explain()
    assert "queue 0.0 ms" in controller.explain()


def test_drafting_beside_others_is_measured_apart():
    known = Estimates()
    known.add(done(4, 4, 0.060, 0.025, 0.024, 0.0))
    known.add(done(4, 4, 0.090, 0.050, 0.040, 0.020, num_before=1, more=True))
    assert known.alone.draft.value == pytest.approx(0.006)
    assert known.overlapped.draft.value == pytest.approx(0.010)
    assert known.alone.judge.at(5) == pytest.approx(0.025)
    assert known.queue.value == 0.0  # it waited behind our own block


def test_the_pace_of_a_verifier_that_writes_alone_is_taken_over_a_whole_stretch():
    pace = Pace()
    steps = [pace.add(arrival) for arrival in (0.5, 0.5, 0.5, 0.8, 0.8, 0.8)]  # handed over in bursts
    assert steps == [0, 0, 0, 0, pytest.approx(0.3 / 4), pytest.approx(0.3 / 5)]
    assert pace.add(0.5) == 0  # of the next stretch


def test_averages_believe_the_first_values_equally():
    average = Average()
    for value in (1.0, 2.0, 3.0):
        average.add(value)
    assert average.value == pytest.approx(2.0, abs=0.1)
    for _ in range(60):
        average.add(5.0)
    assert average.value == pytest.approx(5.0, abs=0.05)


def test_lines():
    line = Line(share=0.03)
    assert line.at(5) == 0.0
    line.add(6, 0.030)
    assert line.at(6) == pytest.approx(0.030)
    assert 0.020 < line.at(1) < 0.030
    for num_tokens in (1, 3, 5, 9, 1, 3, 5, 9) * 3:
        line.add(num_tokens, 0.020 + 0.002 * num_tokens)
    assert line.at(16) == pytest.approx(0.052, rel=0.05)
    for num_tokens in (1, 9) * 9:
        line.add(num_tokens, 0.020 - 0.001 * num_tokens)
    assert line.at(16) >= line.at(1)


def test_a_stiff_line_takes_convincing():
    stiff, free = Line(stiffness=60.0), Line()
    for line in (stiff, free):
        line.add(4, 0.050)
        line.add(6, 0.060)
    assert 0 <= stiff.slope < 0.3 * free.slope
    for num_tokens in (2, 16) * 6:
        stiff.add(num_tokens, 0.050 + 0.005 * num_tokens)
    assert stiff.slope == pytest.approx(0.005, rel=0.2)


def test_acceptance_by_position():
    acceptance = Acceptance()
    for _ in range(120):
        acceptance.add(3, 1)
    first, second, third, fourth = acceptance.by_position(4)
    assert first > 0.88
    assert second < 0.3
    assert third == pytest.approx(acceptance.overall) == fourth
