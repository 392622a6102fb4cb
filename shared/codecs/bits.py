"""Strings of bits for payloads that are read sequentially.

Bits are kept as text of "0" and "1": finding the end of a unary number and reading a field are then
single calls into C, which beats both bit arithmetic in Python and array code at these lengths.
"""

from __future__ import annotations


def to_bytes(bits: str) -> bytes:
    """The bits, highest bit of the first byte first, filled up with zeros."""
    num_bytes = (len(bits) + 7) // 8
    return int(bits.ljust(8 * num_bytes, "0") or "0", 2).to_bytes(num_bytes, "big")


def truncated_binary(value: int, size: int) -> str:
    """`value` below `size` in floor(log2 size) bits or one more; nothing when size is 1."""
    width = size.bit_length() - 1
    unused = (2 << width) - size
    if value < unused:
        return f"{value:0{width}b}" if width else ""
    return f"{value + unused:0{width + 1}b}"


class EndOfBits(Exception):  # noqa: N818
    """More bits were asked for than there are."""


class BitReader:
    """Reads what the functions above write; raises EndOfBits instead of reading past the end."""

    def __init__(self, data: bytes) -> None:
        # A leading one keeps leading zeros.
        self._bits = bin(int.from_bytes(b"\x01" + data, "big"))[3:]
        self._at = 0

    def field(self, width: int) -> int:
        """An unsigned number of `width` bits."""
        end = self._at + width
        if end > len(self._bits):
            raise EndOfBits
        value = int(self._bits[self._at : end], 2) if width else 0
        self._at = end
        return value

    def unary(self) -> int:
        """The number of zeros before the next one."""
        one = self._bits.find("1", self._at)
        if one < 0:
            raise EndOfBits
        count = one - self._at
        self._at = one + 1
        return count

    def truncated_binary(self, size: int) -> int:
        """A number below `size`."""
        width = size.bit_length() - 1
        unused = (2 << width) - size
        value = self.field(width)
        if value >= unused:
            value = 2 * value + self.field(1) - unused
        return value

    def at_end(self) -> bool:
        """Whether nothing but the zeros that fill up the last byte is left."""
        return len(self._bits) - self._at < 8 and "1" not in self._bits[self._at :]
