"""Token ids with integer weights that sum to a power of two: the default codec.

The edge samples such a row with integer arithmetic and the verifier rebuilds the very same rational
number, so nothing depends on float rounding, on the CPU or on the library version.

How many ids and how fine the weights are is chosen for each position: a byte is spent where it buys
enough closeness. The ids that are left out get nothing. One more weight for them all, spread over a
unigram prior that both sides hold, was tried and lost; see README.md.

A payload is one string of bits, row after row:
  b           4 bits: the weights sum to 2^b; b = 0 is a one-hot row
  n - 1       min(b, 9) bits: the number of ids
  ids         ascending. Each is told as a distance on the axis of `shared.codecs.id_prior` from the
              end of the one before: cells of 2^l to skip, in unary, and then which of the ids that
              begin in that cell, in truncated binary. l follows from what is left of the axis and
              how many ids are still to come, near the best for such distances (Golomb 1966).
  place       of the largest weight, truncated binary below n
  weights     all but the largest, in the order of the ids, Elias gamma; the largest is what is left
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shared.codecs.base import Budget, Distributions, Row, bad_payload
from shared.codecs.bits import BitReader, EndOfBits, to_bytes, truncated_binary
from shared.codecs.id_prior import AxisWalk, IdAxis, id_axis
from shared.sampling import keep_largest

_BITS_WIDTH = 4
_COUNT_WIDTH = 9
MAX_IDS = 1 << _COUNT_WIDTH
MAX_WEIGHT_BITS = 13
_BITS = np.arange(MAX_WEIGHT_BITS + 1)
_ID_BITS, _ROW_BITS = 0.8, 4.0  # beyond log2(V / n) for an id; of the row itself: fitted to real rows


@dataclass(frozen=True, slots=True)
class LatticeCodec:
    """`price` is how much total variation a byte must save to be spent; `in_packets`: a budget's room counts.

    The default is low because a draft that agrees with its target pays for all total variation with
    rejections: on the built-in pair a price of 1e-3 gives up an overlap of 0.012 at temperature 0.7 and 0.058
    at 1 for 28 and 55 bytes a position; 1e-4 gives up 0.003 and 0.020 for 78 and 217. With the room of a
    packet for 8 positions it is 0.006 and 0.045 for 54 and 100.
    """

    name: str
    price: float = 1e-4
    in_packets: bool = True
    carries_q: bool = True

    def quantise(self, probs: NDArray[np.float32], budget: Budget | None = None) -> Row:
        """The likeliest ids with weights by largest-remainder rounding."""
        ids, mass = _head(probs)
        bits, count = self._choose(mass, len(probs), budget)
        kept, weights = _round(mass[:count], 1 << bits)
        order = np.argsort(ids[kept])
        ids, weights = ids[kept][order], weights[order]
        if len(ids) == 1:
            return Row(ids.astype(np.int32), np.ones(1, np.int64), 1)
        return Row(ids.astype(np.int32), weights, 1 << bits)

    def _choose(self, mass: NDArray[np.float32], vocab_size: int, budget: Budget | None) -> tuple[int, int]:
        """(b, number of ids) with the least total variation + price x bytes that the budget has room for.

        Args:
            mass: [m], the largest probabilities, descending.
            vocab_size: V.
        """
        price, room = self.price, np.inf
        if budget is not None:
            price = max(price, budget.price)
            room = budget.room() if self.in_packets else np.inf
        # Ids that would round to nothing are left out.
        counts = np.searchsorted(-mass, -0.6 * 0.5**_BITS, side="right").clip(min=1)
        counts[0] = 1
        sums = np.cumsum(mass, dtype=np.float64)
        octaves = np.cumsum(np.log2(mass, dtype=np.float64))
        num_bits = _estimated_bits(octaves, sums, counts, _BITS, vocab_size)
        best = int(np.argmin(_lost(sums, counts) + price / 8 * num_bits))
        if num_bits[best] > room:  # fewer ids, coarser weights, or both
            every_count = np.arange(1, len(mass) + 1)
            fits = _estimated_bits(octaves, sums, every_count, _BITS[:, None], vocab_size) <= room
            counts = np.minimum(counts, np.logical_and.accumulate(fits, axis=1).sum(axis=1)).clip(min=1)
            num_bits = _estimated_bits(octaves, sums, counts, _BITS, vocab_size)
            cost = _lost(sums, counts) + price / 8 * num_bits
            best = int(np.argmin(np.where(num_bits <= max(room, num_bits[0]), cost, np.inf)))
        if budget is not None:
            budget.spend(float(num_bits[best]))
        return best, int(counts[best])

    def encode(self, rows: Sequence[Row], vocab_size: int) -> bytes:
        axis = id_axis(vocab_size)
        out: list[str] = []
        for row in rows:
            bits = int(row.total).bit_length() - 1
            ids = row.ids.tolist()
            out.append(f"{bits:0{_BITS_WIDTH}b}")
            if bits:
                out.append(f"{len(ids) - 1:0{min(bits, _COUNT_WIDTH)}b}")
            _write_ids(out, ids, axis)
            if bits:
                _write_weights(out, row.weights.tolist())
        return to_bytes("".join(out))

    def decode(self, payload: bytes, num_rows: int, vocab_size: int) -> Distributions:
        if len(payload) > self.max_payload_bytes(num_rows, vocab_size):
            raise bad_payload(self.name, f"{len(payload)} bytes are more than {num_rows} rows can take")
        reader = BitReader(payload)
        axis = id_axis(vocab_size)
        offsets = np.zeros(num_rows + 1, np.int64)
        ids: list[int] = []
        probs: list[NDArray[np.float64]] = []
        try:
            for i in range(num_rows):
                bits = reader.field(_BITS_WIDTH)
                count = 1 + reader.field(min(bits, _COUNT_WIDTH))
                ids += self._read_ids(reader, count, axis)
                weights = self._read_weights(reader, count, 1 << bits) if bits else [1]
                probs.append(np.array(weights, np.float64) / (1 << bits))
                offsets[i + 1] = len(ids)
        except EndOfBits:
            raise bad_payload(self.name, "it is cut short") from None
        if not reader.at_end():
            raise bad_payload(self.name, "something follows the last weight")
        flat = np.concatenate(probs) if probs else np.zeros(0)
        return Distributions(offsets, np.array(ids, np.int32), flat)

    def max_payload_bytes(self, num_rows: int, vocab_size: int) -> int:
        # A distance that is the share f of the axis that is left skips less than 2.9 n f cells, and
        # the shares of a row add up to less than ln(length): together under 2 n log2(length).
        axis_bits = id_axis(vocab_size).length.bit_length()
        count = min(MAX_IDS, vocab_size)
        id_bits = 2 * axis_bits + 1 + vocab_size.bit_length()
        row = _BITS_WIDTH + 2 * _COUNT_WIDTH + count * (id_bits + 2 * 15) + 2 * axis_bits
        return (num_rows * row + 7) // 8

    def _read_ids(self, reader: BitReader, count: int, axis: IdAxis) -> list[int]:
        ids = []
        walk = AxisWalk(axis)
        for left in range(count, 0, -1):
            size = walk.enter(reader.unary(), walk.cell_bits(left))
            if size < 1:
                raise bad_payload(self.name, f"a token id is outside the vocabulary of {axis.vocab_size}")
            ids.append(walk.take(reader.truncated_binary(size)))
        return ids

    def _read_weights(self, reader: BitReader, count: int, total: int) -> list[int]:
        place = reader.truncated_binary(count)
        weights = []
        left = total
        for i in range(count):
            weight = 0
            if i != place:
                length = reader.unary()
                if length > MAX_WEIGHT_BITS + 2:
                    raise bad_payload(self.name, "a weight is larger than its total")
                weight = (1 << length) | reader.field(length)
                left -= weight
            weights.append(weight)
        if left < 1:
            raise bad_payload(self.name, "the weights of a row exceed its total")
        weights[place] = left
        return weights


def _head(probs: NDArray[np.float32]) -> tuple[NDArray[np.intp], NDArray[np.float32]]:
    """Up to MAX_IDS likeliest ids and their probabilities, descending, lowest id first among equals."""
    floor = np.float32(0.5 ** (MAX_WEIGHT_BITS + 1))
    ids = np.flatnonzero(probs >= min(floor, probs.max()))
    mass = probs[ids]
    if len(ids) > MAX_IDS:
        kept = keep_largest(mass, MAX_IDS)
        ids, mass = ids[kept], mass[kept]
    order = np.argsort(-mass, kind="stable")
    return ids[order], mass[order]


def _estimated_bits(
    octaves: NDArray[np.float64],
    sums: NDArray[np.float64],
    counts: NDArray[np.int64],
    bits: NDArray[np.int64],
    vocab_size: int,
) -> NDArray[np.float64]:
    """About how many bits a row takes with weights that sum to 2^bits on the `counts` likeliest ids.

    Args:
        octaves, sums: [m], running sums of log2 of the probabilities, and of the probabilities.
        counts, bits: of one shape when broadcast.
    """
    last = counts - 1
    weights = 2.0 * (octaves[last] - octaves[0] + last * (bits - np.log2(sums[last])))
    ids = counts * (np.log2(vocab_size / counts) + _ID_BITS)
    estimate: NDArray[np.float64] = np.maximum(weights, 0.0) + ids + _ROW_BITS
    return estimate


def _lost(sums: NDArray[np.float64], counts: NDArray[np.int64]) -> NDArray[np.float64]:
    """For every b, about the total variation with `counts[b]` ids: what is left out, and rounding, which
    moves a quarter of a unit of each weight on average."""
    rounding: NDArray[np.float64] = np.where(counts > 1, counts * 0.125 * 0.5**_BITS, 0.0)
    return 1.0 - sums[counts - 1] + rounding


def _round(mass: NDArray[np.float32], total: int) -> tuple[NDArray[np.intp], NDArray[np.int64]]:
    """Integer weights in proportion to `mass` that sum to `total`: those above 0, and where they are."""
    ideal = mass.astype(np.float64) * (total / float(mass.sum(dtype=np.float64)))
    weights = np.floor(ideal).astype(np.int64)
    missing = total - int(weights.sum())
    weights[np.argsort(weights - ideal, kind="stable")[:missing]] += 1
    kept = np.flatnonzero(weights)
    return kept, weights[kept]


def _write_ids(out: list[str], ids: Sequence[int], axis: IdAxis) -> None:
    walk = AxisWalk(axis)
    for left, token in zip(range(len(ids), 0, -1), ids, strict=True):
        cell = walk.cell_bits(left)
        skipped = (axis.begin(token) - walk.begin) >> cell
        size = walk.enter(skipped, cell)
        out.append("0" * skipped + "1")
        out.append(truncated_binary(token - walk.first, size))
        walk.take(token - walk.first)


def _write_weights(out: list[str], weights: Sequence[int]) -> None:
    place = weights.index(max(weights))
    out.append(truncated_binary(place, len(weights)))
    for i, weight in enumerate(weights):
        if i != place:
            out.append("0" * (weight.bit_length() - 1) + f"{weight:b}")
