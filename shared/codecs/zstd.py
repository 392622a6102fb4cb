"""Another codec's payload, compressed with Zstandard (RFC 8878): the best of a dense one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import zstandard
from numpy.typing import NDArray

from shared.codecs.base import Budget, Codec, Distributions, Row, bad_payload

_LEVEL = 1  # float noise hardly compresses better at higher levels, which cost many times as much
_MAX_HEADER_BYTES = 64  # of a frame and of its blocks, beyond what does not compress


@dataclass(frozen=True, slots=True)
class ZstdCodec:
    """`inner` with its whole payload as one Zstandard frame. They share the name."""

    inner: Codec

    @property
    def name(self) -> str:
        return self.inner.name

    @property
    def carries_q(self) -> bool:
        return self.inner.carries_q

    def quantise(self, probs: NDArray[np.float32], budget: Budget | None = None) -> Row:
        return self.inner.quantise(probs, budget)

    def encode(self, rows: Sequence[Row], vocab_size: int) -> bytes:
        return zstandard.ZstdCompressor(_LEVEL).compress(self.inner.encode(rows, vocab_size))

    def decode(self, payload: bytes, num_rows: int, vocab_size: int) -> Distributions:
        most = self.inner.max_payload_bytes(num_rows, vocab_size)
        try:
            size = zstandard.frame_content_size(payload)
            # A frame that does not say its size, or says too much, could ask for any amount of memory.
            if not 0 <= size <= most:
                raise bad_payload(self.name, f"it announces {size} bytes, and {num_rows} rows take {most}")
            data = zstandard.ZstdDecompressor().decompress(
                payload, max_output_size=most, allow_extra_data=False
            )
        except zstandard.ZstdError as error:
            raise bad_payload(self.name, f"it does not decompress ({error})") from None
        return self.inner.decode(data, num_rows, vocab_size)

    def max_payload_bytes(self, num_rows: int, vocab_size: int) -> int:
        plain = self.inner.max_payload_bytes(num_rows, vocab_size)
        return plain + (plain >> 8) + _MAX_HEADER_BYTES  # ZSTD_COMPRESSBOUND
