"""The table of codecs: how the distributions of a block become bytes."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from shared.codecs.base import Codec, Distributions, Row
from shared.codecs.dense import DenseCodec
from shared.codecs.dense_q8 import DenseQ8Codec
from shared.codecs.lattice import LatticeCodec
from shared.codecs.tokens import TokensCodec
from shared.faults import FaultKind, SpecwireError

__all__ = ["CODECS", "DEFAULT_CODEC", "Codec", "Distributions", "Row", "get_codec"]

_ALL: tuple[Codec, ...] = (
    LatticeCodec("lattice"),
    LatticeCodec("lattice_coarse", price=1e-3),  # a block of 8 in one packet of 1,400 bytes
    LatticeCodec("lattice_fine", price=2e-5),
    DenseQ8Codec("dense_q8_deflate", deflate=True),
    DenseQ8Codec("dense_q8"),
    DenseCodec("dense_f16", "<f2"),
    DenseCodec("dense_f32", "<f4"),
    TokensCodec("tokens"),
)

# In order of preference.
CODECS: Mapping[str, Codec] = MappingProxyType({codec.name: codec for codec in _ALL})

DEFAULT_CODEC = "lattice"


def get_codec(name: str) -> Codec:
    """The codec of that name, or SpecwireError(UNKNOWN_CODEC) that names the known ones."""
    codec = CODECS.get(name)
    if codec is None:
        raise SpecwireError(
            FaultKind.UNKNOWN_CODEC,
            f"There is no codec {name!r}.",
            f"Choose one of: {', '.join(CODECS)}.",
        )
    return codec
