"""What a codec is, and the two forms of a distribution that the edge really sampled from."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from shared.faults import FaultKind, SpecwireError


@dataclass(frozen=True, slots=True)
class Row:
    """One distribution q = weights / total, exactly what the codec's bytes decode to.

    Attributes:
        ids: int32 [n], ascending token ids.
        weights: [n], int64 for integer codecs, float64 for dense ones; all positive.
        total: the sum of the weights; an int for integer weights.
    """

    ids: NDArray[np.int32]
    weights: NDArray[Any]
    total: int | float

    def sample(self, word: int) -> int:
        """Inverse CDF from one 64-bit random word; integer arithmetic throughout for integer weights."""
        cumulative = np.cumsum(self.weights)
        if isinstance(self.total, int):
            index = int(np.searchsorted(cumulative, (int(word) * self.total) >> 64, side="right"))
        else:
            target = (int(word) >> 11) * 2.0**-53 * float(cumulative[-1])
            index = int(np.searchsorted(cumulative, target, side="right"))
        return int(self.ids[min(index, len(self.ids) - 1)])

    def prob(self, token: int) -> float:
        """q(token); 0 for an id outside the support."""
        index = int(np.searchsorted(self.ids, token))
        if index == len(self.ids) or self.ids[index] != token:
            return 0.0
        return float(self.weights[index]) / float(self.total)


@dataclass(frozen=True, slots=True)
class Distributions:
    """The K distributions of a block in CSR form.

    Attributes:
        offsets: int64 [K + 1]; row i is the slice offsets[i]:offsets[i + 1].
        ids: int32 [nnz], ascending in each row.
        probs: float64 [nnz], each row sums to 1.
    """

    offsets: NDArray[np.int64]
    ids: NDArray[np.int32]
    probs: NDArray[np.float64]

    @property
    def num_rows(self) -> int:
        return len(self.offsets) - 1

    def row(self, index: int) -> Row:
        """Row `index` as a float row."""
        part = slice(int(self.offsets[index]), int(self.offsets[index + 1]))
        return Row(self.ids[part], self.probs[part], 1.0)

    def dense(self, vocab_size: int) -> NDArray[np.float64]:
        """float64 [K, vocab_size]."""
        out = np.zeros((self.num_rows, vocab_size))
        out[np.repeat(np.arange(self.num_rows), np.diff(self.offsets)), self.ids] = self.probs
        return out

    @classmethod
    def from_rows(cls, rows: Sequence[Row]) -> Distributions:
        """What decoding the encoded rows gives."""
        offsets = np.zeros(len(rows) + 1, np.int64)
        np.cumsum([len(row.ids) for row in rows], out=offsets[1:])
        if not rows:
            return cls(offsets, np.zeros(0, np.int32), np.zeros(0))
        probs = [row.weights / float(row.total) for row in rows]
        return cls(offsets, np.concatenate([row.ids for row in rows]), np.concatenate(probs))


PACKET_ROWS = 8
_PACKET_PRICE = 2e-4  # where bytes are short, the first rows must not take what buys more later
PACKET_BYTES = 1_160  # of a packet of 1,400: what framing, encryption and the tokens themselves leave


@dataclass(slots=True)
class Budget:
    """What the rows of one block may spend together.

    That is what the price of a byte makes worth while; or a packet for every 8 rows where the price is not
    known, because nobody has measured the uplink. A row then leaves what it does not need to those after it;
    an early one may take more than a late one, because a rejection there costs all that was drafted after
    it too.

    Args:
        bits: of the rows still to come, together.
        num_rows: still to come.
        price: total variation that a byte must save to be spent; the codec's own is the least.
    """

    bits: float
    num_rows: int
    price: float = 0.0

    @classmethod
    def of_block(cls, num_rows: int, price: float | None) -> Budget:
        if price is not None:
            return cls(math.inf, num_rows, price)
        return cls(8.0 * PACKET_BYTES * max(num_rows / PACKET_ROWS, 1.0), num_rows, _PACKET_PRICE)

    def room(self) -> float:
        """Bits that the next row may take."""
        return 2 * self.bits / (self.num_rows + 1)

    def spend(self, bits: float) -> None:
        self.bits -= bits
        self.num_rows -= 1


class Codec(Protocol):
    """How the K x V distributions of a block become bytes."""

    @property
    def name(self) -> str: ...

    @property
    def carries_q(self) -> bool:
        """Whether payloads hold distributions; rules that judge by q need that."""
        ...

    def quantise(self, probs: NDArray[np.float32], budget: Budget | None = None) -> Row:
        """[V] probabilities -> exactly the distribution that `decode` will give back.

        A codec whose rows have no choice of size ignores the budget.
        """
        ...

    def encode(self, rows: Sequence[Row], vocab_size: int) -> bytes:
        """Rows made by `quantise` of this codec -> payload."""
        ...

    def decode(self, payload: bytes, num_rows: int, vocab_size: int) -> Distributions:
        """Payload -> rows; SpecwireError(BAD_PAYLOAD) on anything malformed, before allocating for it."""
        ...

    def max_payload_bytes(self, num_rows: int, vocab_size: int) -> int:
        """No payload of `encode` is longer; a longer one is refused unread."""
        ...


def bad_payload(codec: str, problem: str) -> SpecwireError:
    """The fault for a payload that is not what `codec` writes."""
    return SpecwireError(
        FaultKind.BAD_PAYLOAD,
        f"The payload is not a valid {codec} payload: {problem}.",
        "Use the same Specwire version on both sides, and check that nothing in between alters messages.",
    )
