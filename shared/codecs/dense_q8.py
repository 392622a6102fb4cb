"""All V probabilities of every position as 8-bit logarithms: a baseline.

A byte c > 0 stands for the integer weight round(2^40 * 2^(-(255 - c) / 10)), relative to the
likeliest token, which has 255; 0 is no mass. So probabilities within 2^-25.4 of the largest are kept
to 3.5 percent. Layout: K rows of V bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

from shared.codecs.base import Budget, Distributions, Row, bad_payload

_STEPS_PER_OCTAVE = 10


@dataclass(frozen=True, slots=True)
class DenseQ8Codec:
    """One byte for each id."""

    name: str
    carries_q: bool = True

    def quantise(self, probs: NDArray[np.float32], budget: Budget | None = None) -> Row:
        with np.errstate(divide="ignore"):
            octaves = np.log2(probs / probs.max())
        codes = np.rint(255.0 + _STEPS_PER_OCTAVE * octaves).clip(min=0).astype(np.int64)
        ids = np.flatnonzero(codes)
        weights = _weights()[codes[ids]]
        return Row(ids.astype(np.int32), weights, int(weights.sum()))

    def encode(self, rows: Sequence[Row], vocab_size: int) -> bytes:
        codes = np.zeros((len(rows), vocab_size), np.uint8)
        for out, row in zip(codes, rows, strict=True):
            out[row.ids] = np.searchsorted(_weights(), row.weights)
        return codes.tobytes()

    def decode(self, payload: bytes, num_rows: int, vocab_size: int) -> Distributions:
        expected = self.max_payload_bytes(num_rows, vocab_size)
        if len(payload) != expected:
            raise bad_payload(
                self.name,
                f"{num_rows} rows of {vocab_size} ids take {expected} bytes, these are {len(payload)}",
            )
        codes = np.frombuffer(payload, np.uint8).reshape(num_rows, vocab_size)
        rows, ids = np.nonzero(codes)
        offsets = np.searchsorted(rows, np.arange(num_rows + 1)).astype(np.int64)
        if (np.diff(offsets) == 0).any():
            raise bad_payload(self.name, "a row has no mass")
        weights = _weights()[codes[rows, ids]]
        totals = np.add.reduceat(weights, offsets[:-1]) if num_rows else np.zeros(0, np.int64)
        probs = weights / np.repeat(totals, np.diff(offsets)).astype(np.float64)
        return Distributions(offsets, ids.astype(np.int32), probs)

    def max_payload_bytes(self, num_rows: int, vocab_size: int) -> int:
        return num_rows * vocab_size


@cache
def _weights() -> NDArray[np.int64]:
    """int64 [256], rising."""
    weights = np.rint(2.0**40 * np.exp2((np.arange(256) - 255.0) / _STEPS_PER_OCTAVE)).astype(np.int64)
    weights[0] = 0
    weights.flags.writeable = False
    return weights
