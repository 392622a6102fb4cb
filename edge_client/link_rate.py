"""How fast the connection to a verifier is, each way: messages on one gRPC stream, as answers are."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from edge_client.connection import Verifier

_FIRST_BYTES, _MOST_BYTES = 1 << 14, 1 << 20
_LONG_ENOUGH_S, _PATIENCE_S = 0.2, 1.5

# How many bytes to move -> bytes that were moved, and the seconds it took, one round trip included.
Transfer = Callable[[int], Awaitable[tuple[int, float]]]


@dataclass(frozen=True, slots=True)
class Rate:
    """Bytes per second at least: of one transfer, in which the connection may not have come up to speed."""

    num_bytes: int
    seconds: float

    @property
    def bits_per_s(self) -> float:
        return 8 * self.num_bytes / self.seconds

    def __str__(self) -> str:
        value, unit = self.bits_per_s / 1e6, "Mbit/s"
        if value < 1:
            value, unit = 1e3 * value, "kbit/s"
        return f"{value:.3g} {unit}" if value < 1000 else f"{value:.0f} {unit}"


async def uplink(verifier: Verifier, address: str, round_trip_s: float) -> Rate:
    async def send(num_bytes: int) -> tuple[int, float]:
        return num_bytes, await verifier.upload(address, num_bytes)

    return await _measure(send, round_trip_s)


async def downlink(verifier: Verifier, address: str, round_trip_s: float) -> Rate:
    """Raises SpecwireError(PROTOCOL_MISMATCH) where nothing large can be asked for."""

    async def fetch(num_bytes: int) -> tuple[int, float]:
        return await verifier.download(address, num_bytes)

    return await _measure(fetch, round_trip_s)


async def _measure(transfer: Transfer, round_trip_s: float) -> Rate:
    """More each time, until a transfer is long enough to tell its rate from its delay, or patience ends."""
    num_bytes, spent_s = _FIRST_BYTES, 0.0
    while True:
        moved, seconds = await transfer(num_bytes)
        spent_s += seconds
        # What is left is at least a part of it, however much the round trip varies.
        moving_s = max(seconds - round_trip_s, seconds / 10)
        if moving_s >= _LONG_ENOUGH_S or num_bytes >= _MOST_BYTES or spent_s >= _PATIENCE_S:
            return Rate(moved, moving_s)
        num_bytes *= 4
