"""No distributions at all, for the verifications that need none: greedy and coupled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shared.codecs.base import Budget, Distributions, Row, bad_payload


@dataclass(frozen=True, slots=True)
class TokensCodec:
    """Its payload is empty, and decodes to rows without entries; the edge's own hold the likeliest token."""

    name: str
    carries_q: bool = False

    def quantise(self, probs: NDArray[np.float32], budget: Budget | None = None) -> Row:
        # What is sampled from it is greedy; `coupled` chooses without it.
        return Row(np.array([probs.argmax()], np.int32), np.ones(1), 1.0)

    def encode(self, rows: Sequence[Row], vocab_size: int) -> bytes:
        return b""

    def decode(self, payload: bytes, num_rows: int, vocab_size: int) -> Distributions:
        if payload:
            raise bad_payload(self.name, f"it should be empty, but has {len(payload)} bytes")
        return Distributions(np.zeros(num_rows + 1, np.int64), np.zeros(0, np.int32), np.zeros(0))

    def max_payload_bytes(self, num_rows: int, vocab_size: int) -> int:
        return 0
