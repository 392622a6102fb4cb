"""Bit strings in NumPy: many fields of different width written or read in a handful of array calls.

Bit 0 of a string is the highest bit of its first byte; fields are written highest bit first.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

MAX_FIELD_BITS = 56  # a field of 56 bits fits a 64-bit window wherever in a byte it begins


def field_bits(values: NDArray[Any], widths: NDArray[Any]) -> NDArray[np.uint8]:
    """Bits (uint8, 0 or 1) of the fields one after the other; widths of 0 write nothing."""
    widths = widths.astype(np.int64)
    ends = np.cumsum(widths)
    num_bits = int(ends[-1]) if len(ends) else 0
    # [num_bits]: how far each bit stands from the low end of its field
    shifts = np.repeat(ends, widths) - np.arange(1, num_bits + 1)
    return ((np.repeat(values.astype(np.int64), widths) >> shifts) & 1).astype(np.uint8)


def read_fields(data: bytes, starts: NDArray[Any], widths: NDArray[Any]) -> NDArray[np.int64]:
    """Fields that begin at bit `starts`, `widths` <= MAX_FIELD_BITS bits long; bits past the end are 0."""
    padded = np.frombuffer(data + bytes(8), np.uint8)
    # [n, 8] -> [n]: the 64-bit window that begins at the byte of the field's first bit
    windows = padded[np.minimum(starts >> 3, len(data))[:, None] + np.arange(8)]
    words = np.ascontiguousarray(windows).view(">u8").ravel().astype(np.uint64)
    words <<= (starts & 7).astype(np.uint64)
    # Shifted in two steps because a shift by 64 is undefined.
    words >>= (63 - widths).astype(np.uint64)
    return (words >> np.uint64(1)).astype(np.int64)


def unary_bits(values: NDArray[np.int64]) -> NDArray[np.uint8]:
    """Each value as that many zeros and a one."""
    ones = np.cumsum(values + 1) - 1
    bits = np.zeros(int(ones[-1]) + 1 if len(ones) else 0, np.uint8)
    bits[ones] = 1
    return bits


def read_unary(bits: NDArray[np.uint8], start: int, count: int) -> tuple[NDArray[np.int64], int] | None:
    """`count` unary values from bit `start` on, and the bit after them; None when there are fewer."""
    if count == 0:
        return np.zeros(0, np.int64), start
    ones = np.flatnonzero(bits[start:])[:count]
    if len(ones) < count:
        return None
    return np.diff(ones, prepend=-1) - 1, start + int(ones[-1]) + 1
