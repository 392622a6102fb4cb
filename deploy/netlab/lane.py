"""One direction of the link, as arithmetic: when does each packet come out, if at all?

No sockets and no clock in here: time comes in as nanoseconds, so that every rule is tested without waiting.
A packet goes through, in this order: outage -> random loss -> bursty loss -> queue limit -> rate or trace ->
delay and jitter. Random numbers are drawn per packet offered, whatever happens to it, so that "packet n is
lost" and "packet n has this jitter" depend on the seed and n alone.
"""

from __future__ import annotations

import heapq
import random
from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Protocol

from netlab.profiles import BurstLoss, Direction, Outages

NS_PER_MS = 1_000_000
NS_PER_S = 1_000_000_000
OPPORTUNITY_BYTES = 1500  # what one line of a mahimahi trace may carry
_MAX_OUTAGES = 1000  # in a row, for one packet


class Transmitter(Protocol):
    """The sending end of a direction: serves packets in order, one at a time."""

    def depart(self, now_ns: int, size: int) -> int:
        """When the last byte of a packet of `size` bytes, offered at `now_ns`, has left."""

    def capacity_bytes(self, start_ns: int, end_ns: int) -> float:
        """Bytes that a transmitter which never idles sends in [start_ns, end_ns)."""


class Schedule:
    """Outages on the link's own clock: the first one begins one period after the start."""

    def __init__(self, outages: Outages | None, start_ns: int) -> None:
        self._start = start_ns
        self._every = int(outages.every_s * NS_PER_S) if outages else 0
        self._length = int(outages.length_s * NS_PER_S) if outages else 0

    def end_of_outage(self, now_ns: int) -> int:
        """When the outage that covers `now_ns` ends; `now_ns` itself when there is service."""
        if not self._length:
            return now_ns
        elapsed = now_ns - self._start
        phase = elapsed % self._every
        return now_ns + self._length - phase if elapsed >= self._every and phase < self._length else now_ns

    def next_outage(self, now_ns: int) -> int | None:
        """When the next outage begins, at or after `now_ns`."""
        if not self._length:
            return None
        periods = max(1, -((self._start - now_ns) // self._every))
        return self._start + periods * self._every

    def serve(self, start_ns: int, duration_ns: int) -> int:
        """When work of `duration_ns`, begun at `start_ns`, is done if it rests in every outage."""
        if not self._length:
            return start_ns + duration_ns
        now = self.end_of_outage(start_ns)
        while True:
            pause = self.next_outage(now)
            if pause is None or now + duration_ns <= pause:
                return now + duration_ns
            duration_ns -= pause - now
            now = pause + self._length


class ConstantRate:
    """A fixed number of bits a second; `rate_mbit=None` takes no time at all."""

    def __init__(self, rate_mbit: float | None, held: Schedule) -> None:
        self._ns_per_byte = 8_000 / rate_mbit if rate_mbit else 0.0
        self._held = held
        self._free_at = 0

    def depart(self, now_ns: int, size: int) -> int:
        start = now_ns if now_ns > self._free_at else self._free_at
        self._free_at = self._held.serve(start, int(size * self._ns_per_byte))
        return self._free_at

    def capacity_bytes(self, start_ns: int, end_ns: int) -> float:
        return (end_ns - start_ns) / self._ns_per_byte if self._ns_per_byte else float("inf")


class TraceRate:
    """A mahimahi trace: each line is a millisecond at which 1,500 bytes may leave; the file repeats for ever.

    As in mahimahi's LinkShell, small packets share an opportunity, a large one takes several, and one that
    finds nothing waiting is lost. The last timestamp is the length of one turn.
    """

    def __init__(self, opportunities_ms: Sequence[int], start_ns: int, held: Schedule) -> None:
        if not opportunities_ms or opportunities_ms[-1] <= 0:
            raise ValueError("a trace needs at least one opportunity after 0 ms")
        if any(late < early for early, late in pairwise(opportunities_ms)):
            raise ValueError("the timestamps of a trace must not fall")
        self._at = opportunities_ms
        self._period = opportunities_ms[-1]
        self._start = start_ns
        self._held = held
        self._next = 0  # number of the first opportunity that still has bytes, counted over all turns
        self._left = OPPORTUNITY_BYTES  # of it

    def _time_ns(self, number: int) -> int:
        turn, index = divmod(number, len(self._at))
        return self._start + (turn * self._period + self._at[index]) * NS_PER_MS

    def _first_at_or_after(self, now_ns: int) -> int:
        now_ms = max(0, -((self._start - now_ns) // NS_PER_MS))
        turn, phase = divmod(now_ms, self._period)
        # a timestamp equal to the period belongs to the turn before, as 0 of this one does to this
        if turn and phase == 0:
            turn, phase = turn - 1, self._period
        return turn * len(self._at) + bisect_left(self._at, phase)

    def _seek(self, number: int) -> None:
        if number > self._next:
            self._next, self._left = number, OPPORTUNITY_BYTES

    def depart(self, now_ns: int, size: int) -> int:
        self._seek(self._first_at_or_after(now_ns))
        num_outages = 0
        while True:
            time_ns = self._time_ns(self._next)
            service_at = self._held.end_of_outage(time_ns)
            if service_at > time_ns:
                num_outages += 1
                if num_outages > _MAX_OUTAGES:
                    raise ValueError("outages cover every opportunity of the trace: nothing would ever leave")
                self._seek(self._first_at_or_after(service_at))
                continue
            taken = min(size, self._left)
            size -= taken
            self._left -= taken
            if not self._left:
                self._next, self._left = self._next + 1, OPPORTUNITY_BYTES
            if not size:
                return time_ns

    def capacity_bytes(self, start_ns: int, end_ns: int) -> float:
        return OPPORTUNITY_BYTES * (self._first_at_or_after(end_ns) - self._first_at_or_after(start_ns))


def read_trace(path: Path) -> list[int]:
    """The timestamps of a mahimahi trace in milliseconds.

    Raises:
        ValueError: a line is not a whole number.
    """
    try:
        return [int(line) for line in path.read_text().split()]
    except ValueError as error:
        raise ValueError(f"trace {path.name}: {error}") from error


class _BurstState:
    """The Gilbert-Elliott chain. Two draws a packet, always."""

    def __init__(self, burst: BurstLoss, draws: random.Random) -> None:
        self._burst = burst
        self._draws = draws
        self._bad = False

    def loses_next(self) -> bool:
        move, loss = self._draws.random(), self._draws.random()
        self._bad = move >= self._burst.leave if self._bad else move < self._burst.enter
        return loss < (self._burst.loss_bad if self._bad else self._burst.loss_good)


@dataclass(slots=True)
class LaneCounts:
    """What has happened to packets so far."""

    num_offered: int = 0
    num_delivered: int = 0
    num_lost: int = 0  # random and bursty loss
    num_overflowed: int = 0  # queue full
    num_cut: int = 0  # arrived in an outage
    delivered_bytes: int = 0
    lateness: list[int] = field(default_factory=lambda: [0] * 24)  # by bit length of the us it came out late


class Lane:
    """One direction: `offer` packets as they arrive, take the `due` ones.

    Args:
        seed: same seed, same losses and jitter for packet n.
        name: keeps the draws of the two directions apart.
        start_ns: when outages and the trace begin.
        trace_ms: opportunities, where the direction has a trace.
        lead_ns: what the machinery around the lane takes for itself, taken off the delay.
    """

    def __init__(
        self,
        direction: Direction,
        *,
        seed: int,
        name: str,
        start_ns: int,
        outages: Outages | None = None,
        trace_ms: Sequence[int] | None = None,
        lead_ns: int = 0,
    ) -> None:
        self.counts = LaneCounts()
        self._delay_ns = max(0, int(direction.delay_ms * NS_PER_MS) - lead_ns)
        self._jitter_ns = direction.jitter_ms * NS_PER_MS
        self._reorder = direction.reorder
        self._max_packets = direction.queue_packets or 1 << 60
        self._max_bytes = direction.queue_bytes or 1 << 60
        self._loss = direction.loss
        self._loss_draws = random.Random(f"{seed}/{name}/loss")
        self._jitter_draws = random.Random(f"{seed}/{name}/jitter")
        burst_draws = random.Random(f"{seed}/{name}/burst")
        self._burst = _BurstState(direction.burst, burst_draws) if direction.burst else None
        self._cuts = Schedule(outages if outages and not outages.hold else None, start_ns)
        held = Schedule(outages if outages and outages.hold else None, start_ns)
        self.transmitter: Transmitter = (
            ConstantRate(direction.rate_mbit, held)
            if trace_ms is None
            else TraceRate(trace_ms, start_ns, held)
        )
        self._backlog: deque[tuple[int, int]] = deque()  # (departure, size) of what has not wholly left
        self._backlog_bytes = 0
        self._in_flight: list[tuple[int, int, bytes]] = []  # heap of (delivery, number, packet)
        self._last_delivery = 0

    def offer(self, now_ns: int, packet: bytes) -> None:
        """A packet arrives at the sending end."""
        counts = self.counts
        counts.num_offered += 1
        size = len(packet)
        lost = self._loss > 0 and self._loss_draws.random() < self._loss
        if self._burst is not None and self._burst.loses_next():
            lost = True
        jitter = self._jitter_draws.uniform(-self._jitter_ns, self._jitter_ns) if self._jitter_ns else 0.0
        if self._cuts.end_of_outage(now_ns) > now_ns:
            counts.num_cut += 1
            return
        if lost:
            counts.num_lost += 1
            return
        backlog = self._backlog
        while backlog and backlog[0][0] <= now_ns:
            self._backlog_bytes -= backlog.popleft()[1]
        if len(backlog) >= self._max_packets or self._backlog_bytes + size > self._max_bytes:
            counts.num_overflowed += 1
            return
        departure = self.transmitter.depart(now_ns, size)
        backlog.append((departure, size))
        self._backlog_bytes += size
        delivery = departure + self._delay_ns + int(jitter)
        if not self._reorder:
            delivery = self._last_delivery = max(delivery, self._last_delivery)
        heapq.heappush(self._in_flight, (delivery, counts.num_offered, packet))

    def next_due_ns(self) -> int | None:
        """When the next packet must come out; None when nothing is on its way."""
        return self._in_flight[0][0] if self._in_flight else None

    def due(self, now_ns: int) -> list[bytes]:
        """Take every packet whose time has come, in order."""
        packets: list[bytes] = []
        counts = self.counts
        while self._in_flight and self._in_flight[0][0] <= now_ns:
            delivery, _, packet = heapq.heappop(self._in_flight)
            late_us = (now_ns - delivery) // 1000
            counts.lateness[min(late_us.bit_length(), 23)] += 1
            counts.num_delivered += 1
            counts.delivered_bytes += len(packet)
            packets.append(packet)
        return packets
