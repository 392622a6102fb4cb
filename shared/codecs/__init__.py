"""The table of codecs: how the distributions of a block become bytes."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from shared.codecs.base import Budget, Codec, Distributions, Row
from shared.codecs.dense import DenseCodec
from shared.codecs.dense_q8 import DenseQ8Codec
from shared.codecs.lattice import LatticeCodec
from shared.codecs.tokens import TokensCodec
from shared.codecs.zstd import ZstdCodec
from shared.faults import FaultKind, SpecwireError

__all__ = ["CODECS", "DEFAULT_CODEC", "Budget", "Codec", "Distributions", "Row", "get_codec"]

_ALL: tuple[Codec, ...] = (
    LatticeCodec("lattice"),
    LatticeCodec("lattice_coarse", price=1e-3),
    LatticeCodec("lattice_fine", price=2e-5, in_packets=False),
    ZstdCodec(DenseQ8Codec("dense_q8_zstd")),
    DenseQ8Codec("dense_q8"),
    ZstdCodec(DenseCodec("dense_f16_zstd", "<f2")),
    DenseCodec("dense_f16", "<f2"),
    ZstdCodec(DenseCodec("dense_f32_zstd", "<f4")),
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
