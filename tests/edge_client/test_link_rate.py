"""Rates each way: the arithmetic, and that the bytes are really moved."""

from __future__ import annotations

import grpc.aio
import pytest
from edge_support import Relay

from edge_client.connection import Verifier
from edge_client.doctor import access_check
from edge_client.link_rate import Rate, downlink, uplink
from edge_client.options import Options
from shared.faults import FaultKind, SpecwireError


class FakeVerifier:
    """A link of so many bytes per second each way."""

    def __init__(self, up: float, down: float, round_trip_s: float) -> None:
        self.up, self.down, self.round_trip_s = up, down, round_trip_s
        self.busy_s = 0.0

    async def upload(self, address: str, num_bytes: int) -> float:
        self.busy_s += num_bytes / self.up
        return self.round_trip_s + num_bytes / self.up

    async def download(self, address: str, num_bytes: int) -> tuple[int, float]:
        moved = -(-num_bytes // 3000) * 3000
        self.busy_s += moved / self.down
        return moved, self.round_trip_s + moved / self.down


@pytest.mark.parametrize("up", [1e4, 1e5, 1e7])
@pytest.mark.parametrize("round_trip_s", [0.001, 0.6])
async def test_the_delay_is_no_part_of_the_rate(up: float, round_trip_s: float) -> None:
    link = FakeVerifier(up, 3 * up, round_trip_s)
    one_way = await uplink(link, "x", round_trip_s)  # type: ignore[arg-type]
    assert link.busy_s < 1.7
    other_way = await downlink(link, "x", round_trip_s)  # type: ignore[arg-type]
    # Where the transfer is short beside the delay, the rate is said too low and never too high.
    assert one_way.bits_per_s <= 8 * up * 1.001
    assert other_way.bits_per_s <= 24 * up * 1.001
    if round_trip_s < 0.1 or up < 1e6:
        assert one_way.bits_per_s == pytest.approx(8 * up, rel=1e-3)


@pytest.mark.parametrize(
    ("rate", "text"),
    [(Rate(125_000, 1), "1 Mbit/s"), (Rate(9000, 0.5), "144 kbit/s"), (Rate(10**9, 1), "8000 Mbit/s")],
)
def test_rates_in_words(rate: Rate, text: str) -> None:
    assert str(rate) == text


async def test_real_bytes_travel(verifier_process: str) -> None:
    async with (
        Relay(verifier_process).running() as relay,
        Verifier([relay.address], tls=None) as verifier,
    ):
        await verifier.ping(relay.address)
        up, down = relay.up_bytes, relay.down_bytes
        assert await verifier.upload(relay.address, 100_000) > 0
        assert 100_000 < relay.up_bytes - up < 102_000
        assert relay.down_bytes - down < 2_000
        up, down = relay.up_bytes, relay.down_bytes
        moved, seconds = await verifier.download(relay.address, 100_000)
        assert seconds > 0
        assert 100_000 <= moved < 120_000
        assert relay.down_bytes - down > moved
        assert relay.up_bytes - up < 6_000


async def test_no_reflection_is_a_fault_of_its_own() -> None:
    server = grpc.aio.server()
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with Verifier([f"127.0.0.1:{port}"], tls=None) as verifier:
        with pytest.raises(SpecwireError) as caught:
            await verifier.download(verifier.addresses[0], 1000)
    await server.stop(None)
    assert caught.value.kind is FaultKind.PROTOCOL_MISMATCH


def test_a_token_in_plain_text_is_wrong_except_on_this_machine() -> None:
    exposed = Options(insecure=True, token="secret")
    assert access_check(exposed, ["127.0.0.1:7070"]).ok
    away = access_check(exposed, ["127.0.0.1:7070", "verifier.example:7070"])
    assert not away.ok
    assert "verifier.example:7070" in away.text
    assert away.remedy
    assert access_check(Options(token="secret"), ["verifier.example:7070"]).ok
