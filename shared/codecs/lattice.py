"""Token ids with integer weights that sum to a power of two: the default codec.

The edge samples such a row with integer arithmetic and the verifier rebuilds the very same rational
number, so nothing depends on float rounding, on the CPU or on the library version.

Payload, as one bit string (see `shared.codecs.bits`):
  headers     K times: b (4 bits); n - 1 (b bits); Rice parameter l (5 bits)
  id units    unary, of all rows: gap >> l, where gap = id - previous id - 1 (previous = -1 at first)
  id rests    the low l bits of each gap
  weight units, rests   weights but the last of each row, Elias gamma: unary of the number of bits
              below the leading one, then those bits; the last weight is what the sum to 2^b leaves
A one-hot row has b = 0, so it takes 9 bits and the id.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shared.codecs.base import Distributions, Row, bad_payload
from shared.codecs.bits import field_bits, read_fields, read_unary, unary_bits

_BITS_WIDTH = 4
_RICE_WIDTH = 5


@dataclass(frozen=True, slots=True)
class LatticeCodec:
    """`weight_bits` is b of every row that is not one-hot; at most `max_ids` ids a row are kept."""

    name: str
    weight_bits: int = 10
    max_ids: int = 160

    def quantise(self, probs: NDArray[np.float32]) -> Row:
        """Largest-remainder rounding of the likeliest ids to weights that sum to 2^b; zeros fall away."""
        total = 1 << self.weight_bits
        top = float(probs.max())
        ids = np.flatnonzero(probs >= min(top, 0.5 / total))
        mass = probs[ids]
        if len(ids) > self.max_ids:
            order = np.argsort(-mass, kind="stable")[: self.max_ids]
            ids = np.sort(ids[order])
            mass = probs[ids]
        ideal = mass.astype(np.float64) * (total / float(mass.sum(dtype=np.float64)))
        weights = np.floor(ideal).astype(np.int64)
        missing = total - int(weights.sum())
        weights[np.argsort(weights - ideal, kind="stable")[:missing]] += 1
        kept = weights > 0
        kept_ids = ids[kept].astype(np.int32)
        if len(kept_ids) == 1:
            return Row(kept_ids, np.ones(1, np.int64), 1)
        return Row(kept_ids, weights[kept], total)

    def encode(self, rows: Sequence[Row], vocab_size: int) -> bytes:
        if not rows:
            return b""
        bits = np.array([int(row.total).bit_length() - 1 for row in rows])
        counts = np.array([len(row.ids) for row in rows])
        rice = np.array([_rice_parameter(n, vocab_size) for n in counts.tolist()])
        headers = field_bits(
            np.stack([bits, counts - 1, rice], axis=1).ravel(),
            np.stack(
                [np.full_like(bits, _BITS_WIDTH), bits, np.full_like(bits, _RICE_WIDTH)], axis=1
            ).ravel(),
        )
        ids = np.concatenate([row.ids for row in rows]).astype(np.int64)
        weights = np.concatenate([row.weights for row in rows])
        ends = np.cumsum(counts)
        gaps = np.diff(ids, prepend=-1) - 1
        first = ends - counts
        gaps[first] = ids[first]
        id_bits = np.repeat(rice, counts)
        coded = np.delete(weights, ends - 1)
        weight_bits = _bit_lengths(coded) - 1
        string = [
            headers,
            unary_bits(gaps >> id_bits),
            field_bits(gaps, id_bits),
            unary_bits(weight_bits),
            field_bits(coded, weight_bits),
        ]
        return np.packbits(np.concatenate(string)).tobytes()

    def decode(self, payload: bytes, num_rows: int, vocab_size: int) -> Distributions:
        if len(payload) > self.max_payload_bytes(num_rows, vocab_size):
            raise bad_payload(self.name, f"{len(payload)} bytes are more than {num_rows} rows can take")
        bits, counts, rice, cursor = self._read_headers(payload, num_rows)
        offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
        num_ids = int(offsets[-1])
        if cursor + num_ids > 8 * len(payload):
            raise bad_payload(self.name, "it is cut short")
        string = np.unpackbits(np.frombuffer(payload, np.uint8))

        units = read_unary(string, cursor, num_ids)
        if units is None:
            raise bad_payload(self.name, "it is cut short")
        quotients, cursor = units
        low_bits = np.repeat(rice, counts)
        rests, cursor = _read_run(payload, cursor, low_bits)
        if (quotients > (vocab_size >> low_bits)).any():
            raise bad_payload(self.name, f"a token id is outside the vocabulary of {vocab_size}")
        ids = _sum_gaps((quotients << low_bits) | rests, offsets)
        if num_ids and ids.max() >= vocab_size:
            raise bad_payload(self.name, f"token id {ids.max()} is outside the vocabulary of {vocab_size}")

        units = read_unary(string, cursor, num_ids - num_rows)
        if units is None:
            raise bad_payload(self.name, "it is cut short")
        lengths, cursor = units
        if (lengths >= 1 << _BITS_WIDTH).any():
            raise bad_payload(self.name, "a weight is larger than its total")
        rests, cursor = _read_run(payload, cursor, lengths)
        if cursor > 8 * len(payload) or 8 * len(payload) - cursor >= 8 or string[cursor:].any():
            raise bad_payload(self.name, "it is cut short, or something follows the last weight")

        weights = np.zeros(num_ids, np.int64)
        last = np.zeros(num_ids, np.bool_)
        last[offsets[1:] - 1] = True
        weights[~last] = (1 << lengths) | rests
        totals = 1 << bits
        weights[last] = totals - (np.add.reduceat(weights, offsets[:-1]) if num_rows else weights)
        if (weights < 1).any():
            raise bad_payload(self.name, "the weights of a row exceed its total")
        return Distributions(offsets, ids.astype(np.int32), weights / np.repeat(totals, counts))

    def max_payload_bytes(self, num_rows: int, vocab_size: int) -> int:
        # An id takes at most its Rice rest, a one and its share of V >> l zeros; a gamma code of a
        # weight below 2^b takes at most 2b - 1 bits.
        header = _BITS_WIDTH + _RICE_WIDTH + self.weight_bits
        rice = _rice_parameter(self.max_ids, vocab_size)
        ids = self.max_ids * (rice + 1) + (vocab_size >> rice)
        one_id = _rice_parameter(1, vocab_size) + 3
        weights = self.max_ids * 2 * self.weight_bits
        return (num_rows * (header + max(ids, one_id) + weights) + 7) // 8

    def _read_headers(
        self, payload: bytes, num_rows: int
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64], int]:
        """(b, n, l) of every row and the bit that follows the headers."""
        header_bytes = (num_rows * (2 * _BITS_WIDTH + _RICE_WIDTH + 15) + 7) // 8
        available = payload[:header_bytes]
        string = int.from_bytes(available, "big")
        num_bits = 8 * len(available)
        cursor = 0

        def take(width: int) -> int:
            nonlocal cursor
            cursor += width
            if cursor > num_bits:
                raise bad_payload(self.name, "it is cut short")
            return (string >> (num_bits - cursor)) & ((1 << width) - 1)

        out = np.zeros((3, num_rows), np.int64)
        for i in range(num_rows):
            out[0, i] = bits = take(_BITS_WIDTH)
            out[1, i] = take(bits) + 1
            out[2, i] = take(_RICE_WIDTH)
        if (out[1] > self.max_ids).any():
            raise bad_payload(self.name, f"a row of {out[1].max()} ids exceeds {self.max_ids}")
        return out[0], out[1], out[2], cursor


def _rice_parameter(num_ids: int, vocab_size: int) -> int:
    """l near the best for a geometric gap of mean V / n: 2^l about 0.69 times the mean (Golomb 1966)."""
    return max(0, int(0.69 * vocab_size / num_ids).bit_length() - 1)


def _bit_lengths(values: NDArray[np.int64]) -> NDArray[np.int64]:
    return np.frexp(values.astype(np.float64))[1].astype(np.int64)


def _read_run(payload: bytes, cursor: int, widths: NDArray[np.int64]) -> tuple[NDArray[np.int64], int]:
    """Fields of `widths` bits one after the other from bit `cursor` on, and the bit after them."""
    ends = cursor + np.cumsum(widths)
    return read_fields(payload, ends - widths, widths), int(ends[-1]) if len(ends) else cursor


def _sum_gaps(gaps: NDArray[np.int64], offsets: NDArray[np.int64]) -> NDArray[np.int64]:
    """Ascending ids of each row from the gaps between them."""
    running = np.concatenate([[0], np.cumsum(gaps + 1)])
    ids: NDArray[np.int64] = running[1:] - np.repeat(running[offsets[:-1]], np.diff(offsets)) - 1
    return ids
