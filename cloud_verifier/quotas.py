"""Rates of tokens and bytes for each identity, as token buckets."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from cloud_verifier.auth import Identity
from shared.faults import FaultKind, SpecwireError

BURST_S = 10.0
"""Whoever was quiet may use up to so many seconds of the rate at once."""


@dataclass(slots=True)
class Bucket:
    """Refilled at `rate` a second up to `BURST_S` seconds of it. `level` may fall below 0: a large request is
    let through once and then waited for."""

    rate: float
    level: float
    at: float

    def take(self, amount: float, now: float) -> float:
        """Takes `amount` and returns 0, or takes nothing and returns the seconds to wait."""
        self.level = min(self.level + (now - self.at) * self.rate, self.rate * BURST_S)
        self.at = now
        if self.level < 0:
            return -self.level / self.rate
        self.level -= amount
        return 0.0


class Meter:
    """What every identity has used lately. Called from the event loop only."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._buckets: dict[tuple[str, str], Bucket] = {}

    def charge(self, identity: Identity, *, num_tokens: int = 0, num_bytes: int = 0) -> None:
        """Counts tokens and bytes.

        Raises:
            SpecwireError: QUOTA_EXCEEDED, with the time to wait.
        """
        quota = identity.quota
        self._charge(identity, "tokens", quota.tokens_per_s, num_tokens)
        self._charge(identity, "bytes", quota.bytes_per_s, num_bytes)

    def _charge(self, identity: Identity, unit: str, rate: float, amount: int) -> None:
        if not rate or not amount:
            return
        now = self._clock()
        bucket = self._buckets.get((identity.name, unit))
        if bucket is None or bucket.rate != rate:
            bucket = self._buckets[identity.name, unit] = Bucket(rate, rate * BURST_S, now)
        wait_s = bucket.take(amount, now)
        if wait_s:
            raise SpecwireError(
                FaultKind.QUOTA_EXCEEDED,
                f"{identity.name} has used more than {rate:g} {unit} a second.",
                f"Try again in {wait_s:.1f} s.",
                retry_after_ms=max(1, int(wait_s * 1000)),
            )
