"""Profiles: the figures that experiments are promised, and every way a file can be wrong."""

import pytest
from netlab.profiles import BurstLoss, load_profiles, parse_profile

PROMISED = {  # name: (round trip ms, up Mbit/s)
    "lan": (0.5, None),
    "wifi": (5, None),
    "5g": (25, 14),
    "4g": (55, 6),
    "leo": (50, None),
    "slow-4g": (150, 0.75),
    "geo": (600, None),
}


@pytest.mark.parametrize(
    ("name", "rtt_ms", "up_mbit"), [(name, *figures) for name, figures in PROMISED.items()]
)
def test_promised_figures(name, rtt_ms, up_mbit):
    profile = load_profiles()[name]
    assert profile.rtt_ms == rtt_ms
    assert up_mbit is None or profile.up.rate_mbit == up_mbit


def test_leo_hands_over_every_15_s():
    outages = load_profiles()["leo"].outages
    assert outages is not None
    assert outages.every_s == 15


def test_every_profile_has_a_source_and_a_bounded_queue():
    for profile in load_profiles().values():
        assert len(profile.source) > 20
        for direction in (profile.up, profile.down):
            assert direction.queue_packets or direction.queue_bytes
            assert direction.rate_mbit or direction.trace


def test_a_profile_survives_its_table():
    for name, profile in load_profiles().items():
        assert parse_profile(name, profile.to_table()) == profile


BAD = [
    ({"rtt": 5}, "rtt_ms"),
    ({"rtt_ms": 5, "latency": 3}, "latency"),
    ({"rtt_ms": 5, "up": {"speed": 3}}, "speed"),
    ({"rtt_ms": 5, "up": {"loss": 1.5}}, "loss"),
    ({"rtt_ms": 5, "up": {"rate_mbit": 0}}, "rate_mbit"),
    ({"rtt_ms": 5, "up": {"rate_mbit": "fast"}}, "rate_mbit"),
    ({"rtt_ms": 5, "up": {"rate_mbit": True}}, "rate_mbit"),
    ({"rtt_ms": 5, "up": {"rate_mbit": 5, "trace": "x.up"}}, "trace"),
    ({"rtt_ms": 5, "up": {"trace": "../x.up"}}, "trace"),
    ({"rtt_ms": 5, "up": {"jitter_ms": 3}}, "jitter_ms"),
    ({"rtt_ms": 5, "up": {"queue_packets": 0}}, "queue_packets"),
    ({"rtt_ms": 5, "up": {"delay_ms": 4}}, "delay_ms"),
    ({"rtt_ms": 5, "down": {"burst": {"enter": 0.1}}}, "leave"),
    ({"rtt_ms": 5, "down": {"burst": {"enter": 0.1, "leave": 2}}}, "leave"),
    ({"rtt_ms": 5, "outages": {"every_s": 1, "length_s": 1}}, "length_s"),
    ({"rtt_ms": -5}, "delay_ms"),
    ({"rtt_ms": 5, "mtu": 100}, "mtu"),
]


@pytest.mark.parametrize(("table", "key"), BAD)
def test_a_bad_profile_is_refused_by_name_and_key(table, key):
    with pytest.raises(ValueError, match=f"'odd'.*{key}"):
        parse_profile("odd", table)


def test_mean_of_bursty_loss():
    assert BurstLoss(enter=0.01, leave=0.24).mean == pytest.approx(0.04)
    assert BurstLoss(enter=0.5, leave=0.5, loss_bad=0.6, loss_good=0.2).mean == pytest.approx(0.4)
