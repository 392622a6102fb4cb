"""How likely ids are to be in a distribution's head, as a stretched axis of integers.

Byte-pair vocabularies list their tokens in the order in which they were merged, so ids in the head
of a next-token distribution become rarer with their number. Each range of ids has a width on the
axis (a power of two for each id) such that heads spread over the axis about evenly. Any vocabulary
can be coded; one in another order costs a little more.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from functools import lru_cache

# First id of each range, and log2 of the axis width of an id in it.
RANGES = ((0, 6), (512, 5), (1024, 4), (4096, 3), (8192, 2), (16384, 1), (32768, 0))


@dataclass(frozen=True, slots=True)
class IdAxis:
    """The axis of one vocabulary.

    Attributes:
        vocab_size: number of ids.
        first_ids: first id of each range.
        shifts: log2 of the width of an id, for each range.
        begins: where each range begins on the axis.
        length: where the axis ends.
    """

    vocab_size: int
    first_ids: tuple[int, ...]
    shifts: tuple[int, ...]
    begins: tuple[int, ...]
    length: int

    def begin(self, token: int) -> int:
        """Where the id begins on the axis; `length` for vocab_size."""
        if token >= self.vocab_size:
            return self.length
        part = bisect_right(self.first_ids, token) - 1
        return self.begins[part] + ((token - self.first_ids[part]) << self.shifts[part])


class AxisWalk:
    """Visits ascending ids along the axis, cell by cell; never goes back.

    Attributes:
        following: the next possible id.
        begin: where it begins on the axis.
        first: first id of the cell that was entered.
    """

    __slots__ = (
        "_begins",
        "_first_ids",
        "_length",
        "_part",
        "_shifts",
        "_vocab_size",
        "begin",
        "first",
        "following",
    )

    def __init__(self, axis: IdAxis) -> None:
        self._vocab_size, self._length = axis.vocab_size, axis.length
        # Ends of the last range, so that there is always a next one.
        self._first_ids = (*axis.first_ids, axis.vocab_size)
        self._begins = (*axis.begins, axis.length)
        self._shifts = axis.shifts
        self._part = 0
        self.following = self.begin = self.first = 0

    def cell_bits(self, left: int) -> int:
        """log2 of the size of the cells for the next of `left` ids; the next cell is never empty."""
        mean = (self._length - self.begin) * 11 // (16 * left)
        return max(mean.bit_length() - 1, self._shifts[self._part])

    def enter(self, skipped: int, cell: int) -> int:
        """Skips cells of 2^cell; returns how many ids begin in the one that follows."""
        place = self.begin + (skipped << cell)
        self.first = self._first_at(place)
        return self._first_at(place + (1 << cell)) - self.first

    def take(self, offset: int) -> int:
        """The id `offset` ids after the first of the cell; the walk goes on after it."""
        token = self.first + offset
        self.following = following = token + 1
        part, first_ids = self._part, self._first_ids
        while following >= first_ids[part + 1]:
            if following >= self._vocab_size:
                self.begin = self._length
                return token
            part += 1
        self._part = part
        self.begin = self._begins[part] + ((following - first_ids[part]) << self._shifts[part])
        return token

    def _first_at(self, place: int) -> int:
        """The first id that begins at `place` or beyond; vocab_size when there is none."""
        if place >= self._length:
            return self._vocab_size
        part, begins = self._part, self._begins
        while place >= begins[part + 1]:
            part += 1
        shift = self._shifts[part]
        return self._first_ids[part] + ((place - begins[part] + (1 << shift) - 1) >> shift)


@lru_cache(maxsize=16)
def id_axis(vocab_size: int) -> IdAxis:
    """The axis for a vocabulary."""
    ranges = [(first, shift) for first, shift in RANGES if first < vocab_size]
    begins = [0]
    for (first, shift), (following, _) in zip(ranges, [*ranges[1:], (vocab_size, 0)], strict=True):
        begins.append(begins[-1] + ((following - first) << shift))
    return IdAxis(
        vocab_size,
        tuple(first for first, _ in ranges),
        tuple(shift for _, shift in ranges),
        tuple(begins[:-1]),
        begins[-1],
    )
