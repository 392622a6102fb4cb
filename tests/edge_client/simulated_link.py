"""One edge, one verifier and a link between them, on a simulated clock: milliseconds of work, no waiting.

It follows `edge_client.generate`: a block is drafted whole before anything else is looked at, except that
a rejection interrupts it; the verifier judges in order and drops what a rejection has made stale.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from operator import mul

from edge_client.controller import Controller, Plan
from edge_client.results import Round
from shared.messages import Timing


@dataclass(frozen=True)
class Link:
    """Seconds, except for `kept`: the chance that a drafted token is kept. `crowding` slows both sides while
    they work at the same time, as on shared cores; `spread` is how far a duration can be from its mean, as
    a share of it; `up_rate` is in bytes a second. In a share `unsure` of all tokens the draft has confidence
    of 0.5, and they are kept with the chance `kept_unsure` only; in the others it has 0.98. Nothing
    passes for `stall`, every `stall_every`."""

    round_trip: float
    draft: float
    base: float
    per_token: float
    kept: float
    crowding: float = 1.0
    jitter: float = 0.0
    up_rate: float = 1e9
    token_bytes: int = 60
    spread: float = 0.0
    unsure: float = 0.0
    kept_unsure: float = 0.0
    stall: float = 0.0
    stall_every: float = 1.0

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
    num_before: int
    num_bytes: int
    confidences: tuple[float, ...]


def answer(controller: Controller, link: Link, num_tokens: int, draws: random.Random) -> float:
    """Seconds that an answer takes."""
    now = free = uplink_free = down_free = 0.0
    sizes = random.Random(7)  # blocks of sure tokens are small
    tokens = 0
    last_round = 0.0
    flights: deque[Flight] = deque()

    def varied(seconds: float) -> float:
        return seconds * draws.uniform(1 - link.spread, 1 + link.spread) if link.spread else seconds

    begun = draws.uniform(0.0, link.stall_every) if link.stall else 0.0

    def there(at: float) -> float:
        """When what sets off at `at` arrives."""
        waits = link.stall - (begun + at) % link.stall_every
        return max(waits, 0.0) + at + link.round_trip / 2 + draws.uniform(-link.jitter, link.jitter)

    while tokens < num_tokens:
        plan = controller.plan()
        if plan.cloud_tokens and not flights:
            at = there(now)
            last = last_round
            for _ in range(min(plan.cloud_tokens, num_tokens - tokens)):
                at += link.judge(1)
                tokens += 1
                arrived = max(last, there(at))
                since_last = arrived - last if last else 0.0
                last = arrived
                controller.observe(done(0, 0, last - now, link.judge(1), 0.0, 0.0, since_last=since_last))
            now = free = down_free = last_round = last
            continue
        window_open = not flights or (flights[-1].more and len(flights) <= plan.ahead)
        if window_open and not plan.cloud_tokens and (not flights or flights[0].arrival > now):
            slow = link.crowding if plan.ahead else 1.0
            k = plan.k if flights or not plan.first_k else plan.first_k
            sure = [not link.unsure or draws.random() >= link.unsure for _ in range(k)]
            confidences = [0.98 if is_sure else 0.5 for is_sure in sure]
            if plan.ending is not None:
                all_kept = list(accumulate(map(plan.ending.kept, confidences), mul))
                k = next((i for i, chance in enumerate(all_kept, 1) if chance < plan.ending.least), k)
            took = varied(k * link.draft * slow)
            wrong = next((flight for flight in flights if flight.accepted < flight.k), None)
            if wrong is not None and wrong.arrival < now + took:
                now = wrong.arrival  # the verdicts until then are read below
                while flights:
                    flight = flights.popleft()
                    tokens += _observe(controller, flight, last_round)
                    last_round = flight.arrival
                    if flight is wrong:
                        flights.clear()
                free, down_free = wrong.freed, wrong.arrival
                continue
            now += took
            chances = [link.kept if is_sure else link.kept_unsure for is_sure in sure[:k]]
            accepted = next((i for i, chance in enumerate(chances) if draws.random() >= chance), k)
            judged = varied(link.judge(k + 1) * slow)
            num_bytes = 60 + int(k * link.token_bytes * sizes.uniform(0.2, 1.8))
            uplink_free = max(uplink_free, now) + num_bytes / link.up_rate
            reached = there(uplink_free)
            start = max(free, reached)
            free = start + judged
            arrival = down_free = max(there(free), down_free)
            more = plan.ahead > 0
            queue, before = start - reached, len(flights)
            flights.append(
                Flight(
                    arrival,
                    judged,
                    free,
                    now,
                    k,
                    accepted,
                    took,
                    more,
                    queue,
                    before,
                    num_bytes,
                    tuple(confidences[:k]),
                )
            )
            continue
        flight = flights.popleft()
        now = max(now, flight.arrival)
        tokens += _observe(controller, flight, last_round)
        last_round = flight.arrival
        if flight.accepted < flight.k:
            flights.clear()
            free, down_free = flight.freed, flight.arrival
    return now


def _observe(controller: Controller, flight: Flight, last_round: float) -> int:
    """Hands a verdict to the controller; returns how many tokens it committed."""
    round_trip = flight.arrival - flight.sent
    controller.observe(
        done(
            flight.k,
            flight.accepted,
            round_trip,
            flight.judged,
            flight.draft,
            flight.queue,
            num_before=flight.num_before,
            num_bytes=flight.num_bytes,
            more=flight.more,
            confidences=flight.confidences,
            since_last=flight.arrival - last_round if last_round else 0.0,
        )
    )
    rejected = flight.accepted < flight.k
    return flight.accepted + (1 if rejected or not flight.more else 0)


def done(
    k: int,
    accepted: int,
    round_trip: float,
    judged: float,
    draft: float,
    queue: float,
    *,
    num_before: int = 0,
    num_bytes: int = 0,
    more: bool = False,
    since_last: float = 0.0,
    confidences: tuple[float, ...] = (),
) -> Round:
    timing = Timing(int(queue * 1e6), int(judged * 1e6), 0, 1, k + 1)
    return Round(
        k,
        accepted,
        num_bytes or 60 + 60 * k,
        0,
        draft,
        0.0,
        round_trip,
        0.0,
        timing,
        num_before=num_before,
        more=more,
        since_last_s=since_last,
        confidences=confidences,
    )


def speed(
    controller: Controller, link: Link, num_tokens: int = 1500, seed: int = 1, answers: int = 1
) -> float:
    """Tokens per second over `answers` answers that one controller sees one after the other."""
    draws = random.Random(seed)
    spent = sum(answer(controller, link, num_tokens, draws) for _ in range(answers))
    return answers * num_tokens / spent


def mean_speed(
    make: Callable[[], Controller], link: Link, num_tokens: int = 1500, seeds: int = 6, answers: int = 1
) -> float:
    """Over several seeds, since at long delays a few rejections more or less decide one."""
    return seeds / sum(1 / speed(make(), link, num_tokens, seed, answers) for seed in range(seeds))


FIXED = [Plan(k, ahead) for k in (1, 2, 4, 6, 8, 12, 16) for ahead in (0, 1, 2, 4, 8)] + [
    Plan(cloud_tokens=1 << 20)
]
