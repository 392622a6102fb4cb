"""What is asked of netem, and what the relay promises, as values."""

import pytest
from netlab.backends import RelayBackend, netem_arguments, netem_lacks
from netlab.calibrate import Calibration, rtt_tolerance_ms
from netlab.errors import LinkError
from netlab.link import Link, find_profile
from netlab.namespaces import tool
from netlab.profiles import BurstLoss, Direction, load_profiles, parse_profile


def test_netem_always_gets_a_rate_and_room_for_what_the_delay_holds():
    direction = Direction(delay_ms=300, rate_mbit=24, queue_packets=100)
    in_flight = 600  # 24 Mbit/s x 300 ms / 1,500 bytes
    words = ["limit", str(100 + in_flight), "delay", "300ms", "rate", "24000000bit"]
    assert netem_arguments(direction, 1500) == words


def test_netem_jitter_and_loss():
    words = " ".join(netem_arguments(Direction(delay_ms=5, jitter_ms=1, loss=0.015), 1500))
    assert "delay 5ms 1ms loss random 1.5% rate" in words
    burst = BurstLoss(enter=0.01, leave=0.3, loss_bad=0.9, loss_good=0.001)
    words = " ".join(netem_arguments(Direction(delay_ms=5, burst=burst), 1500))
    assert "loss gemodel 1% 30% 90% 0.1% rate" in words


def test_netem_is_not_given_what_it_cannot_do():
    assert netem_lacks(find_profile("geo")) == []
    assert netem_lacks(find_profile("leo")) == ["outages"]
    assert netem_lacks(find_profile("trace-verizon-lte")) == ["traces"]
    table = {"up": {"queue_bytes": 9, "reorder": True, "loss": 0.1, "burst": {"enter": 0.1, "leave": 0.1}}}
    assert len(netem_lacks(parse_profile("x", {"rtt_ms": 1, **table}))) == 3


def test_relay_says_what_it_cannot_do():
    for name, extra in (("leo", "outages"), ("5g", "jitter"), ("trace-verizon-lte", "traces")):
        cannot = " ".join(RelayBackend(load_profiles()[name], (1.0, 1.0), 1).cannot)
        for word in ("loss", "queue", "UDP", "congestion", extra):
            assert word in cannot


def test_tolerance_is_ten_per_cent_or_two_milliseconds():
    assert rtt_tolerance_ms(600, None) == pytest.approx(60)
    assert rtt_tolerance_ms(5, None) == 2
    assert rtt_tolerance_ms(0.5, 0.4) == 0.4


def test_a_miss_is_named_with_both_figures():
    result = Calibration()
    result.compare("rtt_ms", 50.0, 54.9, 5.0)
    result.compare("up_mbit", None, None, 0.0)
    assert result.misses == []
    result.compare("down_mbit", 20.0, 17.9, 2.0)
    result.compare("up_mbit", 6.0, None, 0.6)
    assert result.misses == [
        "down_mbit: measured 17.900, asked 20.000 +- 2.000",
        "up_mbit: nothing came through, asked 6.000",
    ]


def test_a_missing_tool_names_its_package():
    with pytest.raises(LinkError, match=r"`no-such-tool`.*apt-get install iproute2"):
        tool("no-such-tool", "iproute2")


def test_unknown_names_are_refused():
    with pytest.raises(ValueError, match=r"no profile '6g'; known: lan"):
        Link("6g")
    with pytest.raises(ValueError, match="backend 'magic'"):
        Link("lan", backend="magic")


def test_trace_profiles_need_their_folder(monkeypatch, tmp_path):
    monkeypatch.delenv("SPECWIRE_TRACES", raising=False)
    with pytest.raises(LinkError, match=r"--traces or SPECWIRE_TRACES"), Link("trace-verizon-lte"):
        pass
    with pytest.raises(LinkError, match=r"no trace .*Verizon"), Link("trace-verizon-lte", traces=tmp_path):
        pass
