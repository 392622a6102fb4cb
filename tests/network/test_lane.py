"""One direction of the link under an injected clock: every rule, exactly or within stated binomial bounds."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from netlab.lane import NS_PER_MS, NS_PER_S, Lane, Schedule, TraceRate, read_trace
from netlab.profiles import BurstLoss, Direction, Outages

Z = 5.5  # two-sided normal p of 4e-8: far under 1e-4 over all statistical tests here


def lane(*, seed=0, name="up", outages=None, trace_ms=None, lead_ns=0, **direction):
    return Lane(
        Direction(**{"delay_ms": 0.0, **direction}),
        seed=seed,
        name=name,
        start_ns=0,
        outages=outages,
        trace_ms=trace_ms,
        lead_ns=lead_ns,
    )


def packet(number, size=100):
    return number.to_bytes(4, "big") + bytes(size - 4)


def deliveries(link):
    """(time ns, number) of everything in flight, each taken at its very time."""
    out = []
    while (due := link.next_due_ns()) is not None:
        assert link.due(due - 1) == []
        out += [(due, int.from_bytes(data[:4], "big")) for data in link.due(due)]
    return out


def arrived(link, count, *, gap_ns=1000, size=100):
    """Numbers that come out when `count` packets go in, `gap_ns` apart."""
    for number in range(count):
        link.offer(number * gap_ns, packet(number, size))
    return [number for _, number in deliveries(link)]


def test_delay_is_exact_and_lead_is_taken_off():
    for lead_ns in (0, 300_000):
        link = lane(delay_ms=12.5, lead_ns=lead_ns)
        link.offer(7_000, packet(0))
        assert deliveries(link) == [(7_000 + 12_500_000 - lead_ns, 0)]


def test_lead_never_makes_time_run_backwards():
    link = lane(delay_ms=0.1, lead_ns=NS_PER_MS)
    link.offer(5, packet(0))
    assert deliveries(link) == [(5, 0)]


def test_rate_spaces_packets_by_their_size():
    link = lane(delay_ms=1, rate_mbit=8)  # a byte a microsecond
    for number, size in enumerate((1000, 500, 1500)):
        link.offer(0, packet(number, size))
    assert deliveries(link) == [(2_000_000, 0), (2_500_000, 1), (4_000_000, 2)]


def test_idle_time_earns_no_credit():
    link = lane(rate_mbit=8)
    link.offer(0, packet(0, 1000))
    link.offer(9 * NS_PER_MS, packet(1, 1000))
    assert deliveries(link) == [(NS_PER_MS, 0), (10 * NS_PER_MS, 1)]


def test_queue_in_packets_drops_the_tail_and_drains():
    link = lane(rate_mbit=8, queue_packets=3)
    for number in range(5):
        link.offer(0, packet(number, 1000))
    link.offer(1_000_000, packet(5, 1000))  # one has left by now
    link.offer(1_000_000, packet(6, 1000))
    assert [number for _, number in deliveries(link)] == [0, 1, 2, 5]
    assert link.counts.num_overflowed == 3


def test_queue_in_bytes_lets_a_small_packet_past_a_large_one():
    link = lane(rate_mbit=8, queue_bytes=2500)
    for number, size in enumerate((1500, 1500, 1000, 100)):
        link.offer(0, packet(number, size))
    assert [number for _, number in deliveries(link)] == [0, 2]
    assert link.counts.num_overflowed == 2


def test_packets_in_flight_do_not_fill_the_queue():
    link = lane(delay_ms=500, rate_mbit=8, queue_packets=1)
    assert arrived(link, 50, gap_ns=NS_PER_MS, size=1000) == list(range(50))


@pytest.mark.parametrize("loss", [0.001, 0.1, 0.5])
def test_random_loss_has_its_rate(loss):
    count = 20_000
    lost = count - len(arrived(lane(loss=loss), count))
    assert abs(lost - count * loss) < Z * math.sqrt(count * loss * (1 - loss))


def test_bursty_loss_has_its_rate_and_burst_length():
    burst = BurstLoss(enter=0.02, leave=0.25)
    count = 30_000
    kept = set(arrived(lane(burst=burst), count))
    lost = [number for number in range(count) if number not in kept]
    bursts = sum(1 for number in lost if number - 1 in kept or number == 0)
    mean_length = len(lost) / bursts
    # geometric bursts: mean 1 / leave, standard deviation sqrt(1 - leave) / leave
    assert abs(mean_length - 4) < Z * (math.sqrt(0.75) / 0.25) / math.sqrt(bursts)
    # a sum of that many independent cycles of a burst and a gap
    correlation = (2 - 0.27) / 0.27  # of the two-state chain: sum of 1 + 2 * 0.73^k
    assert abs(len(lost) - count * burst.mean) < Z * math.sqrt(
        count * burst.mean * (1 - burst.mean) * correlation
    )


def test_bursty_loss_in_the_good_state():
    burst = BurstLoss(enter=0.0, leave=1.0, loss_good=0.3)
    count = 20_000
    lost = count - len(arrived(lane(burst=burst), count))
    assert abs(lost - 0.3 * count) < Z * math.sqrt(count * 0.21)


def test_same_seed_same_drops_and_jitter():
    def run(seed, name="up"):
        link = lane(
            seed=seed, name=name, delay_ms=9, jitter_ms=3, loss=0.2, burst=BurstLoss(enter=0.1, leave=0.5)
        )
        for number in range(300):
            link.offer(number * 20 * NS_PER_MS, packet(number))
        return deliveries(link)

    assert run(1) == run(1)
    assert run(1) != run(2)
    assert run(1) != run(1, name="down")


def test_fate_of_a_packet_does_not_depend_on_the_queue():
    count = 2_000
    free = set(arrived(lane(seed=3, loss=0.3), count))
    full = arrived(lane(seed=3, loss=0.3, rate_mbit=100, queue_packets=2), count)
    assert len(full) < len(free) / 2
    assert set(full) <= free


def test_jitter_is_uniform_around_the_delay():
    link = lane(delay_ms=10, jitter_ms=4)
    count, gap_ns = 4_000, 100 * NS_PER_MS
    for number in range(count):
        link.offer(number * gap_ns, packet(number))
    delays_ms = [(time - number * gap_ns) / NS_PER_MS for time, number in deliveries(link)]
    assert 6 <= min(delays_ms) < 6.1
    assert 13.9 < max(delays_ms) <= 14
    assert abs(sum(delays_ms) / count - 10) < Z * 4 / math.sqrt(3 * count)


def test_jitter_keeps_order_unless_told_otherwise():
    kept = arrived(lane(delay_ms=10, jitter_ms=9), 500, gap_ns=NS_PER_MS)
    assert kept == list(range(500))
    mixed = arrived(lane(delay_ms=10, jitter_ms=9, reorder=True), 500, gap_ns=NS_PER_MS)
    assert mixed != kept
    assert sorted(mixed) == kept


TRACE = [0, 5, 5, 20]  # 6,000 bytes in 20 ms


def test_trace_gives_one_packet_an_opportunity_and_repeats():
    link = lane(trace_ms=TRACE)
    for number in range(8):
        link.offer(0, packet(number, 1500))
    times_ms = [time / NS_PER_MS for time, _ in deliveries(link)]
    assert times_ms == [0, 5, 5, 20, 20, 25, 25, 40]


def test_trace_large_and_small_packets_share_opportunities():
    link = lane(trace_ms=TRACE)
    for number, size in enumerate((700, 700, 200, 2900, 100)):
        link.offer(0, packet(number, size))
    # 0 ms: 700 + 700 + 100 of 200; 5 ms: the other 100 + 1,400 of 2,900; 5 ms: its last 1,500; 20 ms: the 100
    assert [time / NS_PER_MS for time, _ in deliveries(link)] == [0, 0, 5, 5, 20]


def test_trace_opportunities_without_a_packet_are_lost():
    link = lane(trace_ms=TRACE)
    link.offer(5 * NS_PER_MS + 1, packet(0, 1500))
    link.offer(47 * NS_PER_MS, packet(1, 100))
    assert [time / NS_PER_MS for time, _ in deliveries(link)] == [20, 60]


def test_trace_capacity():
    transmitter = TraceRate(TRACE, 0, Schedule(None, 0))
    assert transmitter.capacity_bytes(0, 20 * NS_PER_MS) == 4500
    assert transmitter.capacity_bytes(0, 200 * NS_PER_MS) == 10 * 6000 - 1500
    assert transmitter.capacity_bytes(NS_PER_MS, 5 * NS_PER_MS) == 0


@pytest.mark.parametrize("trace", [[], [0], [3, 2]])
def test_impossible_traces_are_refused(trace):
    with pytest.raises(ValueError, match="trace"):
        TraceRate(trace, 0, Schedule(None, 0))


def test_read_trace(tmp_path):
    good, bad = tmp_path / "good.up", tmp_path / "bad.up"
    good.write_text("0\n5\n5\n")
    bad.write_text("0\nfive\n")
    assert read_trace(good) == [0, 5, 5]
    with pytest.raises(ValueError, match=r"bad\.up"):
        read_trace(bad)


HANDOVER = Outages(every_s=1, length_s=0.1)
HELD = Outages(every_s=1, length_s=0.1, hold=True)


def test_outage_loses_what_arrives_in_it():
    link = lane(outages=HANDOVER)
    kept = arrived(link, 250, gap_ns=10 * NS_PER_MS)
    assert [n for n in range(250) if n not in kept] == [*range(100, 110), *range(200, 210)]
    assert link.counts.num_cut == 20


def test_no_outage_before_the_first_period():
    assert arrived(lane(outages=HANDOVER), 9, gap_ns=10 * NS_PER_MS) == list(range(9))


def test_held_outage_delays_instead():
    link = lane(rate_mbit=8, outages=HELD)
    link.offer(999_500_000, packet(0, 1000))  # half sent when service stops
    link.offer(1_050_000_000, packet(1, 1000))
    assert deliveries(link) == [(1_100_500_000, 0), (1_101_500_000, 1)]


def test_held_outage_of_a_trace():
    link = lane(trace_ms=[50], outages=HELD)
    for number in range(3):
        link.offer(960 * NS_PER_MS, packet(number, 1500))
    assert [time / NS_PER_MS for time, _ in deliveries(link)] == [1100, 1150, 1200]


def test_a_trace_hidden_behind_outages_is_refused():
    link = lane(trace_ms=[20], outages=Outages(every_s=0.02, length_s=0.005, hold=True))
    with pytest.raises(ValueError, match="every opportunity"):
        link.offer(0, packet(0))


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    gaps_us=st.lists(st.integers(0, 5_000), min_size=1, max_size=80),
    rate=st.sampled_from([0.5, 8.0, 100.0]),
    trace=st.one_of(st.none(), st.lists(st.integers(1, 40), min_size=1, max_size=9).map(sorted)),
    hold=st.booleans(),
)
def test_every_packet_has_one_fate_and_the_rate_is_never_exceeded(seed, gaps_us, rate, trace, hold):
    link = lane(
        seed=seed,
        delay_ms=3,
        jitter_ms=1,
        loss=0.1,
        queue_packets=9,
        outages=Outages(every_s=0.0203, length_s=0.005, hold=hold),
        rate_mbit=None if trace else rate,
        trace_ms=trace,
    )
    now, size = 0, 1000
    for number, gap_us in enumerate(gaps_us):
        now += gap_us * 1000
        link.offer(now, packet(number, size))
    out = deliveries(link)
    assert [number for _, number in out] == sorted(number for _, number in out)
    counts = link.counts
    fates = counts.num_delivered + counts.num_lost + counts.num_overflowed + counts.num_cut
    assert fates == counts.num_offered == len(gaps_us)
    assert counts.delivered_bytes == size * len(out)
    if out and not trace:
        most = (out[-1][0] - 2 * NS_PER_MS) * rate / 8_000  # bytes by then, without the least delay
        assert counts.delivered_bytes <= most + 1


def test_schedule_far_from_the_start():
    schedule = Schedule(Outages(every_s=15, length_s=0.1), 3)
    assert schedule.end_of_outage(3 + 30 * NS_PER_S) == 3 + 30 * NS_PER_S + 100 * NS_PER_MS
    assert schedule.end_of_outage(2 + 30 * NS_PER_S) == 2 + 30 * NS_PER_S
    assert schedule.next_outage(4 + 30 * NS_PER_S) == 3 + 45 * NS_PER_S
    assert schedule.next_outage(0) == 3 + 15 * NS_PER_S
