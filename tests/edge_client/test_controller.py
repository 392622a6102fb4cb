"""The controller on simulated links: it has to come close to the best fixed plan, whatever that is."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from edge_client.controller import Acceptance, AutoController, Controller, FixedController, PassTime, Plan
from edge_client.results import Round
from shared.messages import Timing


@dataclass(frozen=True)
class Link:
    """Seconds, except for `kept`: the chance that a drafted token is kept. `crowding` slows both sides while
    they work at the same time, as on shared cores."""

    round_trip: float
    draft: float
    base: float
    per_token: float
    kept: float
    crowding: float = 1.0

    def judge(self, num_tokens: int) -> float:
        return self.base + self.per_token * num_tokens


@dataclass
class Flight:
    arrival: float
    judged: float
    freed: float
    sent: float
    k: int
    accepted: int
    draft: float
    more: bool
    queue: float


def speed(controller: Controller, link: Link, num_tokens: int = 1500, seed: int = 1) -> float:
    """Tokens per second of an answer: one edge that drafts, one verifier that judges in order."""
    draws = random.Random(seed)
    now = free = 0.0
    tokens = 0
    flights: deque[Flight] = deque()
    while tokens < num_tokens:
        plan = controller.plan()
        if plan.cloud_tokens and not flights:
            at = now + link.round_trip / 2
            for _ in range(min(plan.cloud_tokens, num_tokens - tokens)):
                step = link.judge(1)
                at += step
                tokens += 1
                controller.observe(_round(0, 0, at - now, step, 0.0, 0.0))
            now = free = at + link.round_trip / 2
            continue
        window_open = not flights or (flights[-1].more and len(flights) <= plan.ahead)
        if window_open and not plan.cloud_tokens and (not flights or flights[0].arrival > now):
            slow = link.crowding if plan.ahead else 1.0
            took = plan.k * link.draft * slow
            first = flights[0] if flights else None
            if first and first.accepted < first.k and first.arrival < now + took:
                now = first.arrival  # a rejection interrupts
                continue
            now += took
            accepted = next((i for i in range(plan.k) if draws.random() >= link.kept), plan.k)
            judged = link.judge(plan.k + 1) * slow
            reached = now + link.round_trip / 2
            start = max(free, reached)
            free = start + judged
            arrival = free + link.round_trip / 2
            more = plan.ahead > 0
            flights.append(Flight(arrival, judged, free, now, plan.k, accepted, took, more, start - reached))
            continue
        flight = flights.popleft()
        now = max(now, flight.arrival)
        rejected = flight.accepted < flight.k
        tokens += flight.accepted + (1 if rejected or not flight.more else 0)
        if rejected:
            flights.clear()
            free = flight.freed
        controller.observe(
            _round(
                flight.k,
                flight.accepted,
                flight.arrival - flight.sent,
                flight.judged,
                flight.draft,
                flight.queue,
            )
        )
    return tokens / now


def mean_speed(make: Callable[[], Controller], link: Link) -> float:
    """Over several answers, since at long delays a few rejections more or less decide one."""
    return 6 / sum(1 / speed(make(), link, seed=seed) for seed in range(6))


def _round(k: int, accepted: int, round_trip: float, judged: float, draft: float, queue: float) -> Round:
    timing = Timing(int(queue * 1e6), int(judged * 1e6), 0, 1, k + 1)
    return Round(k, accepted, 0, 0, draft, 0.0, round_trip, 0.0, timing)


FIXED = [Plan(k, ahead) for k in (1, 2, 4, 6, 8, 12, 16) for ahead in (0, 1, 2, 4, 8)] + [
    Plan(cloud_tokens=1 << 20)
]

LINKS = {
    "loopback, shared cores": Link(0.0003, 0.006, 0.021, 0.0012, 0.95, crowding=1.8),
    "lan, good draft": Link(0.0005, 0.006, 0.021, 0.0012, 0.95),
    "lan, poor draft": Link(0.0005, 0.0045, 0.021, 0.0012, 0.6),
    "lan, useless draft": Link(0.0005, 0.02, 0.021, 0.0012, 0.1),
    "25 ms, big target": Link(0.025, 0.006, 0.050, 0.0004, 0.9),
    "50 ms, big target": Link(0.050, 0.006, 0.050, 0.0004, 0.9),
    "55 ms, small target": Link(0.055, 0.006, 0.021, 0.0012, 0.9),
    "150 ms, small target": Link(0.150, 0.006, 0.021, 0.0012, 0.9),
    "600 ms, big target": Link(0.600, 0.006, 0.050, 0.0004, 0.95),
    "slow device": Link(0.025, 0.080, 0.050, 0.0004, 0.9),
}


@pytest.mark.parametrize("name", LINKS)
def test_close_to_the_best_fixed_plan(name):
    link = LINKS[name]
    best = max(mean_speed(lambda plan=plan: FixedController(plan), link) for plan in FIXED)
    # At long delays a wrong turn costs long: an answer has only a few dozen rounds to learn from.
    assert mean_speed(AutoController, link) >= (0.88 if link.round_trip < 0.1 else 0.8) * best


def test_obeys_what_is_not_allowed():
    link = LINKS["150 ms, small target"]
    controller = AutoController(max_k=5, max_ahead=0, allows_cloud=False)
    seen: set[Plan] = set()

    class Watched:
        def plan(self) -> Plan:
            seen.add(controller.plan())
            return controller.plan()

        def observe(self, done: Round) -> None:
            controller.observe(done)

        def explain(self) -> str:
            return controller.explain()

    speed(Watched(), link)
    assert all(plan.k <= 5 and plan.ahead == 0 and plan.cloud_tokens == 0 for plan in seen)


@pytest.mark.parametrize("name", ["lan, good draft", "50 ms, big target", "loopback, shared cores"])
def test_does_not_flap(name):
    controller = AutoController()
    changes, last = 0, controller.plan()

    class Watched:
        def plan(self) -> Plan:
            nonlocal changes, last
            plan = controller.plan()
            changes += plan != last
            last = plan
            return plan

        def observe(self, done: Round) -> None:
            controller.observe(done)

        def explain(self) -> str:
            return controller.explain()

    rounds = 400
    speed(Watched(), LINKS[name], num_tokens=rounds * 4)
    assert changes <= rounds / 10


def test_follows_a_link_that_changes():
    controller = AutoController()
    speed(controller, LINKS["lan, good draft"])
    near = controller.plan()
    far = Link(0.3, 0.006, 0.050, 0.0004, 0.95)
    assert speed(controller, far) >= 0.85 * speed(AutoController(), far)
    assert controller.plan() != near


def test_explains_itself():
    controller = AutoController()
    speed(controller, LINKS["25 ms, big target"])
    text = controller.explain()
    for words in ("draft 6.0 ms", "round trip 25", "kept by position", "tokens/s expected", "cloud alone"):
        assert words in text


def test_a_prompt_does_not_count_as_a_round():
    controller = AutoController()
    slow = Round(4, 4, 0, 0, 5.03, 0.0, 9.0, 9.0, Timing(4_000_000, 3_000_000, 0, 1, 900), prompt_s=5.0)
    controller.observe(slow)
    assert controller.plan() == AutoController().plan()
    controller.observe(_round(4, 4, 0.030, 0.025, 0.040, 0.0))
    assert "draft 10.0 ms" in controller.explain()
    assert "queue 0.0 ms" in controller.explain()


def test_pass_times():
    passes = PassTime()
    assert passes.at(5) == 0.0
    passes.add(6, 0.030)
    assert passes.at(6) == pytest.approx(0.030)
    assert 0.020 < passes.at(1) < 0.030
    for num_tokens in (1, 3, 5, 9, 1, 3, 5, 9) * 3:
        passes.add(num_tokens, 0.020 + 0.002 * num_tokens)
    assert passes.at(16) == pytest.approx(0.052, rel=0.05)
    for num_tokens in (1, 9) * 9:
        passes.add(num_tokens, 0.020 - 0.001 * num_tokens)
    assert passes.at(16) >= passes.at(1)


def test_acceptance_by_position():
    acceptance = Acceptance()
    for _ in range(60):
        acceptance.add(3, 1)
    assert acceptance.at(0) > 0.9
    assert acceptance.at(1) < 0.2
    assert acceptance.at(2) == pytest.approx(acceptance.overall)
    assert acceptance.at(9) == acceptance.overall
