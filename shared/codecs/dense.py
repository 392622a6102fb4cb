"""All V probabilities of every position as little-endian floats: the honest baseline.

A row's distribution is its stored numbers divided by their sum in float64, so that rounding to the
stored type is part of q and not an error. Layout: K rows of V numbers, nothing else.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shared.codecs.base import Budget, Distributions, Row, bad_payload


@dataclass(frozen=True, slots=True)
class DenseCodec:
    """`dtype` is a little-endian NumPy float type name, "<f4" or "<f2"."""

    name: str
    dtype: str
    carries_q: bool = True

    def quantise(self, probs: NDArray[np.float32], budget: Budget | None = None) -> Row:
        stored = probs.astype(self.dtype)
        ids = np.flatnonzero(stored).astype(np.int32)
        weights = stored[ids].astype(np.float64)
        return Row(ids, weights, float(weights.sum()))

    def encode(self, rows: Sequence[Row], vocab_size: int) -> bytes:
        stored = np.zeros((len(rows), vocab_size), self.dtype)
        for out, row in zip(stored, rows, strict=True):
            out[row.ids] = row.weights
        return stored.tobytes()

    def decode(self, payload: bytes, num_rows: int, vocab_size: int) -> Distributions:
        expected = self.max_payload_bytes(num_rows, vocab_size)
        if len(payload) != expected:
            raise bad_payload(
                self.name,
                f"{num_rows} rows of {vocab_size} numbers take {expected} bytes, these are {len(payload)}",
            )
        stored = np.frombuffer(payload, self.dtype).reshape(num_rows, vocab_size)
        if not np.isfinite(stored).all() or (stored < 0).any():
            raise bad_payload(self.name, "it holds a negative number, a NaN or an infinity")
        rows, ids = np.nonzero(stored)
        offsets = np.searchsorted(rows, np.arange(num_rows + 1)).astype(np.int64)
        if (np.diff(offsets) == 0).any():
            raise bad_payload(self.name, "a row has no mass")
        probs = stored[rows, ids].astype(np.float64)
        # Summed row by row exactly as `quantise` does, so that q is the same number on both sides.
        for start, end in itertools.pairwise(offsets.tolist()):
            probs[start:end] /= probs[start:end].sum()
        return Distributions(offsets, ids.astype(np.int32), probs)

    def max_payload_bytes(self, num_rows: int, vocab_size: int) -> int:
        return num_rows * vocab_size * np.dtype(self.dtype).itemsize
