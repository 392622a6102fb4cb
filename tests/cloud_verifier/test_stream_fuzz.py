"""Malformed frames against the codecs' decoders and a live server, with a healthy session beside them."""

from __future__ import annotations

import asyncio
import contextlib
import random
from pathlib import Path

import pytest
from google.protobuf.message import DecodeError
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_server import Alone, Peer, block, opening, prompts, serving

from cloud_verifier.metrics import Metrics
from cloud_verifier.target_model import TargetModel
from shared import wire
from shared.codecs import CODECS
from shared.faults import FaultKind, SpecwireError
from shared.messages import Append, Close, Generate, Opened
from shared.pb.specwire.v1 import verifier_pb2 as pb

_SETTINGS = settings(
    deadline=None, max_examples=150, suppress_health_check=list(HealthCheck), derandomize=True
)


@given(st.sampled_from(sorted(CODECS)), st.binary(max_size=600), st.integers(1, 8), st.integers(1, 300))
@_SETTINGS
def test_decoders_refuse_or_decode(name, payload, num_rows, vocab_size):
    """Whatever comes is a typed fault or rows that are distributions over the vocabulary."""
    fault = None
    try:
        rows = CODECS[name].decode(payload, num_rows, vocab_size)
    except SpecwireError as error:
        fault = error
    if fault is not None:
        assert fault.kind is FaultKind.BAD_PAYLOAD
        return
    assert rows.num_rows == num_rows
    if not len(rows.ids):
        assert not payload  # a codec that carries no distributions
        return
    assert rows.ids.min() >= 0
    assert rows.ids.max() < vocab_size
    for i in range(num_rows):
        row = rows.row(i)
        assert row.weights.min() > 0
        assert row.weights.sum() == pytest.approx(1)


def mutated(frame: bytes, rng: random.Random) -> bytes:
    """`frame` with bytes flipped, cut out, doubled or put in."""
    out = bytearray(frame)
    for _ in range(rng.randrange(1, 4)):
        at = rng.randrange(len(out) + 1)
        match rng.randrange(4):
            case 0 if out:
                out[at % len(out)] ^= 1 << rng.randrange(8)
            case 1:
                del out[at : at + rng.randrange(1, 9)]
            case 2:
                out[at:at] = rng.randbytes(rng.randrange(1, 9))
            case _:
                out[at:at] = out[at : at + rng.randrange(1, 40)]
    return bytes(out)


@pytest.fixture(scope="module")
def model(tiny_target: Path) -> TargetModel:
    return TargetModel.load(str(tiny_target), dtype="float32", num_slots=4096)


async def test_a_live_server_survives_malformed_frames(model, tiny_target):
    """No crash, no leak, no hang, and the healthy session's text is what it would have been."""
    rng = random.Random(1)
    prompt = prompts(1, 10)[0]
    expected = Alone(TargetModel.load(str(tiny_target), dtype="float32", num_slots=512))(prompt, 200)
    messages = [
        opening(model, prompt, 30),
        block(model, 1, 10, [1, 2, 3]),
        Append(1, 0, 10, (1, 2), 5),
        Generate(1, 0, 10, 2),
        Close(),
    ]
    frames = [wire.client_message_to_proto(message).SerializeToString() for message in messages]
    metrics = Metrics()
    async with serving(model, metrics=metrics) as channel:
        healthy = Peer(channel)
        await healthy.send(opening(model, prompt, 200), Generate(1, 0, 10, 200))
        assert isinstance(await healthy.get(), Opened)

        async def attack() -> None:
            peer = Peer(channel)
            opened = frames[0] if rng.random() < 0.7 else mutated(frames[0], rng)
            sent = [opened] + [mutated(rng.choice(frames), rng) for _ in range(rng.randrange(1, 4))]
            try:
                await peer.send(*sent)
                await peer.call.done_writing()
                while await peer.get() is not None:
                    pass
            except (SpecwireError, asyncio.InvalidStateError):
                pass  # a typed fault, or the stream had ended while we were still sending

        for _ in range(25):
            await asyncio.gather(*(attack() for _ in range(8)))
        assert await healthy.written() == expected
        await healthy.close()
        kinds = metrics.registry.get_sample_value("specwire_faults_total", {"kind": "internal"})
        assert kinds == 0
        engine = metrics._engine
        assert engine.is_alive
        for _ in range(100):
            engine.dismiss(-1)
            engine.evict_cache()
            await asyncio.sleep(0.02)
            if model.pool.num_used == 0:
                break
        assert model.pool.num_used == 0


@given(st.binary(max_size=300))
@_SETTINGS
def test_any_bytes_are_a_message_or_a_decode_error(frame):
    with contextlib.suppress(DecodeError, SpecwireError):
        wire.client_message_from_proto(pb.ClientMessage.FromString(frame))
