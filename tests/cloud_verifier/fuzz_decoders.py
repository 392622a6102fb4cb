"""Coverage-guided fuzzing of everything that a verifier decodes; `make fuzz`.

    python tests/cloud_verifier/fuzz_decoders.py -max_total_time=60

Needs atheris. A crash is any exception but a typed fault; libFuzzer writes the input that caused it.
"""

from __future__ import annotations

import sys

import atheris

with atheris.instrument_imports(include=["shared.codecs", "shared.wire", "cloud_verifier.admission"]):
    from cloud_verifier.admission import check_block, check_open, check_step
    from shared import wire
    from shared.codecs import CODECS

from google.protobuf.message import DecodeError

from cloud_verifier.verification import VERIFICATIONS
from shared.faults import SpecwireError
from shared.messages import (
    Append,
    Description,
    DraftBlock,
    Generate,
    Limits,
    Open,
    SamplingParams,
    TokenizerIdentity,
)
from shared.pb.specwire.v1 import verifier_pb2 as pb

_VOCAB = 259
_IDENTITY = TokenizerIdentity("0" * 64, _VOCAB)
_OFFER = Description(
    model="fuzz",
    tokenizer=_IDENTITY,
    codecs=tuple(CODECS),
    verifications=tuple(VERIFICATIONS),
    limits=Limits(512, 16, 1 << 20, 16),
)
_OPENED = Open(_IDENTITY, (1,), SamplingParams(temperature=1.0), "lattice", "token", 16, 32)


def decode_anything(data: bytes) -> None:
    """The first byte chooses what the rest is: a payload of one of the codecs, or a message."""
    if not data:
        return
    choice, rest = data[0] % (len(CODECS) + 1), data[1:]
    try:
        if choice < len(CODECS):
            num_rows = 1 + (rest[0] % 8 if rest else 0)
            rows = list(CODECS.values())[choice].decode(rest[1:], num_rows, _VOCAB)
            if rows.num_rows != num_rows or (
                len(rows.ids) and not 0 <= rows.ids.min() <= rows.ids.max() < _VOCAB
            ):
                raise AssertionError("decoded rows are not rows over the vocabulary")
            return
        match message := wire.client_message_from_proto(pb.ClientMessage.FromString(rest)):
            case Open():
                check_open(message, _OFFER)
            case DraftBlock():
                check_block(message, _OPENED, _OFFER)
            case Append() | Generate():
                check_step(message, _OFFER)
    except (SpecwireError, DecodeError):
        pass


def main() -> None:
    atheris.Setup(sys.argv, decode_anything)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
