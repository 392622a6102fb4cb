"""No distributions at all, for the verifications that need none: greedy and coupled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shared.codecs.base import Budget, Distributions, Row, bad_payload


@dataclass(frozen=True, slots=True)
class TokensCodec:
    """Its payload is empty, and decodes to rows without entries."""

    name: str
    carries_q: bool = False

    def quantise(self, probs: NDArray[np.float32], budget: Budget | None = None) -> Row:
        ids = np.flatnonzero(probs).astype(np.int32)
        weights = probs[ids].astype(np.float64)
        return Row(ids, weights, float(weights.sum()))

    def encode(self, rows: Sequence[Row], vocab_size: int) -> bytes:
        return b""

    def decode(self, payload: bytes, num_rows: int, vocab_size: int) -> Distributions:
        if payload:
            raise bad_payload(self.name, f"it should be empty, but has {len(payload)} bytes")
        return Distributions(np.zeros(num_rows + 1, np.int64), np.zeros(0, np.int32), np.zeros(0))

    def max_payload_bytes(self, num_rows: int, vocab_size: int) -> int:
        return 0
