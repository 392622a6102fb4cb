"""The verifier over real gRPC: TLS, tokens, quotas, malformed frames, silent and slow clients, drain."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import logging
import os
import sys
import time
from dataclasses import replace
from pathlib import Path

import grpc
import grpc.aio
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from tokenizers import Tokenizer
from verifier_support import Alone, prompts, request

from cloud_verifier.auth import Authenticator, hash_token
from cloud_verifier.metrics import Metrics
from cloud_verifier.registry import EngineLimits
from cloud_verifier.server import ServerConfig, running_server
from cloud_verifier.service import SERVICE_NAME, VerifierService
from cloud_verifier.target_model import TargetModel
from edge_client.options import Options
from edge_client.startup import make_verifier
from shared import transport, wire
from shared.codecs import get_codec
from shared.faults import FaultKind, SpecwireError
from shared.messages import (
    Append,
    Close,
    DraftBlock,
    Generate,
    Notice,
    Open,
    Opened,
    SamplingParams,
    Tokens,
    Verdict,
)
from shared.pb.specwire.v1 import verifier_pb2 as pb
from shared.vocabulary import tokenizer_identity

sys.path.append(str(Path(__file__).parents[2] / "deploy"))
from certs import write_certificates

PATIENCE_S = 30.0


@pytest.fixture(scope="module")
def model(tiny_target: Path) -> TargetModel:
    return TargetModel.load(str(tiny_target), dtype="float32", num_slots=8192)


@pytest.fixture(scope="module")
def alone(tiny_target: Path) -> Alone:
    return Alone(TargetModel.load(str(tiny_target), dtype="float32", num_slots=512))


@pytest.fixture(scope="module")
def certificates(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("certs")
    write_certificates(folder, ("localhost", "127.0.0.1"))
    return folder


class Peer:
    """One raw stream to the server."""

    def __init__(self, channel: grpc.aio.Channel, metadata=()) -> None:
        self.call = channel.stream_stream(f"/{SERVICE_NAME}/Session")(metadata=metadata)

    async def send(self, *messages) -> None:
        for message in messages:
            frame = message if isinstance(message, bytes) else wire.client_message_to_proto(message)
            await self.call.write(frame if isinstance(frame, bytes) else frame.SerializeToString())

    async def get(self):
        async with asyncio.timeout(PATIENCE_S):
            frame = await self.call.read()
        if not isinstance(frame, bytes):
            return None
        message = wire.server_message_from_proto(pb.ServerMessage.FromString(frame))
        if isinstance(message, SpecwireError):
            raise message
        return message

    async def fault(self) -> SpecwireError:
        while True:
            try:
                assert await self.get() is not None, "the stream ended without a fault"
            except SpecwireError as fault:
                assert await self.get() is None  # nothing follows a fault
                return fault

    async def written(self) -> list[int]:
        tokens: list[int] = []
        while True:
            message = await self.get()
            assert isinstance(message, Tokens), message
            tokens += message.tokens
            if message.last:
                return tokens

    async def answer(self, message: Open, num_tokens: int) -> list[int]:
        await self.send(message, Generate(1, 0, len(message.tokens), num_tokens))
        assert isinstance(await self.get(), Opened)
        return await self.written()

    async def close(self) -> None:
        await self.send(Close())
        assert await self.get() is None


@contextlib.asynccontextmanager
async def serving(model: TargetModel, authenticator=None, tls=None, client_tls=None, metrics=None, **config):
    settings = ServerConfig(listen="127.0.0.1:0", tls=tls, drain_timeout_s=0.0, **config)
    async with running_server(model, settings, authenticator, metrics) as port:
        host = "127.0.0.1" if tls is None else "localhost"
        async with transport.open_channel(f"{host}:{port}", client_tls) as channel:
            yield channel


def opening(model: TargetModel, prompt, num_tokens: int = 32, **changes: object) -> Open:
    base = request(prompt, num_tokens, tokenizer=tokenizer_identity(model.tokenizer_json))
    return replace(base, **changes)


def block(model: TargetModel, step: int, base_len: int, tokens, **changes: object) -> DraftBlock:
    codec = get_codec("lattice")
    rows = []
    for token in tokens:
        probs = np.zeros(model.vocab_size, np.float32)
        probs[token] = 1
        rows.append(codec.quantise(probs))
    payload = codec.encode(rows, model.vocab_size)
    return DraftBlock(step, changes.pop("epoch", 0), base_len, tuple(tokens), payload, **changes)


async def test_generate_and_blocks_write_the_targets_text(model, alone):
    prompt = prompts(1, 20)[0]
    text = alone(prompt, 30)
    async with serving(model) as channel:
        peer = Peer(channel)
        await peer.send(opening(model, prompt, 30), block(model, 1, 20, text[:5]))
        assert isinstance(await peer.get(), Opened)
        verdict = await peer.get()
        assert isinstance(verdict, Verdict)
        assert (verdict.num_accepted, verdict.tokens) == (5, (text[5],))
        await peer.send(Generate(2, 0, 26, 24))
        assert await peer.written() == text[6:]
        await peer.close()


@pytest.mark.parametrize(("verification", "weight"), [("fused", 0.5), ("fused", 0.0), ("token", 0.0)])
async def test_a_verdict_is_lossy_only_with_a_weight(model, verification, weight):
    sampling = SamplingParams(temperature=1, fused_weight=weight)
    async with serving(model, verifications=("fused", "token")) as channel:
        peer = Peer(channel)
        asked = opening(model, [1, 2, 3], verification=verification, sampling=sampling)
        await peer.send(asked, block(model, 1, 3, [5, 6]))
        assert isinstance(await peer.get(), Opened)
        verdict = await peer.get()
        assert isinstance(verdict, Verdict)
        assert verdict.lossy is (weight > 0)
        await peer.close()


async def test_health_reflection_and_description(model):
    async with serving(model) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        answer = await health.Check(health_pb2.HealthCheckRequest(service=SERVICE_NAME))
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
        reflection = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo()
        await reflection.write(reflection_pb2.ServerReflectionRequest(list_services=""))
        services = (await reflection.read()).list_services_response.service
        assert SERVICE_NAME in [service.name for service in services]
        reflection.cancel()
        describe = channel.unary_unary(f"/{SERVICE_NAME}/Describe", None, pb.DescribeResponse.FromString)
        description = wire.description_from_proto(await describe(b""))
        assert description.tokenizer.size == 259
        assert description.limits.max_context == 512
        assert "/" not in description.model


BAD_OPENS = [
    ({"protocol": 2}, FaultKind.PROTOCOL_MISMATCH),
    ({"codec": "smoke"}, FaultKind.UNKNOWN_CODEC),
    ({"verification": "hope"}, FaultKind.UNKNOWN_VERIFICATION),
    ({"sampling": SamplingParams(temperature=-1)}, FaultKind.BAD_SAMPLING),
    ({"sampling": SamplingParams(top_p=0)}, FaultKind.BAD_SAMPLING),
    ({"verification": "greedy", "sampling": SamplingParams(temperature=1)}, FaultKind.BAD_SAMPLING),
    ({"codec": "tokens", "sampling": SamplingParams(temperature=1)}, FaultKind.BAD_REQUEST),
    ({"sampling": SamplingParams(temperature=1, fused_weight=0.5)}, FaultKind.BAD_SAMPLING),
    ({"tokens": ()}, FaultKind.BAD_REQUEST),
    ({"tokens": (1, 259)}, FaultKind.BAD_TOKENS),
    ({"tokens": (1,) * 512}, FaultKind.CONTEXT_EXCEEDED),
    ({"prompt_len": 99}, FaultKind.BAD_REQUEST),
    ({"max_block": 0}, FaultKind.BAD_REQUEST),
    ({"max_new_tokens": 0}, FaultKind.BAD_REQUEST),
    ({"logprobs": 99}, FaultKind.BAD_REQUEST),
    ({"session_id": "guess"}, FaultKind.SESSION_UNKNOWN),
]


async def test_bad_opens_are_typed_faults(model):
    async with serving(model) as channel:
        for changes, kind in BAD_OPENS:
            peer = Peer(channel)
            await peer.send(opening(model, [1, 2, 3], **changes))
            assert (await peer.fault()).kind is kind, changes
        peer = Peer(channel)
        await peer.send(request([1, 2, 3]))
        fault = await peer.fault()
        assert fault.kind is FaultKind.TOKENIZER_MISMATCH


async def test_bad_steps_are_typed_faults_and_touch_nobody_else(model, alone):
    prompt = prompts(1, 10)[0]
    good = block(model, 1, 10, [5, 6])
    cases = [
        (opening(model, prompt), FaultKind.BAD_REQUEST),
        (b"\xff\xff\xff\xff", FaultKind.BAD_REQUEST),
        (b"", FaultKind.BAD_REQUEST),
        (bytes(200_000), FaultKind.BAD_REQUEST),
        (DraftBlock(1, 0, 10, (), b""), FaultKind.BAD_REQUEST),
        (DraftBlock(1, 0, 10, (1,) * 17, b""), FaultKind.BAD_REQUEST),
        (DraftBlock(1, 0, 10, (5, 300), good.payload), FaultKind.BAD_TOKENS),
        (DraftBlock(1, 0, 10, (5, 6), good.payload[:-1]), FaultKind.BAD_PAYLOAD),
        (DraftBlock(1, 0, 10, (5, 6), good.payload * 500), FaultKind.BAD_PAYLOAD),
        (DraftBlock(1, 0, 10, (5, 7), good.payload), FaultKind.BAD_PAYLOAD),
        (DraftBlock(1, 0, 10, (5, 6), good.payload, codec="smoke"), FaultKind.UNKNOWN_CODEC),
        (DraftBlock(2, 0, 10, (5, 6), good.payload), FaultKind.OUT_OF_ORDER),
        (Generate(1, 0, 10, 0), FaultKind.BAD_REQUEST),
        (Append(1, 0, 10, (), 5), FaultKind.BAD_REQUEST),
        (Append(1, 0, 10, (259,), 5), FaultKind.BAD_TOKENS),
        (Append(1, 0, 10, (1,), 5, SamplingParams(top_p=2)), FaultKind.BAD_SAMPLING),
    ]
    warm = Append(1, 0, 10, (1,), 5, SamplingParams(temperature=1))
    opened = [({}, *case) for case in cases] + [
        ({"verification": "greedy"}, warm, FaultKind.BAD_SAMPLING),
        ({}, Append(1, 0, 10, (1,), 5, SamplingParams(fused_weight=0.5)), FaultKind.BAD_SAMPLING),
        ({"codec": "tokens", "verification": "block"}, warm, FaultKind.BAD_REQUEST),
    ]
    async with serving(model) as channel:
        healthy = Peer(channel)
        await healthy.send(opening(model, prompt, 60), Generate(1, 0, 10, 60))
        assert isinstance(await healthy.get(), Opened)
        for changes, message, kind in opened:
            peer = Peer(channel)
            await peer.send(opening(model, prompt, **changes))
            assert isinstance(await peer.get(), Opened)
            await peer.send(message)
            assert (await peer.fault()).kind is kind, message
        assert await healthy.written() == alone(prompt, 60)


async def test_generate_can_be_forbidden(model):
    async with serving(model, allow_generate=False) as channel:
        peer = Peer(channel)
        await peer.send(opening(model, [1]), Generate(1, 0, 1, 5))
        assert (await peer.fault()).kind is FaultKind.NOT_ALLOWED


async def test_too_many_blocks_in_flight_are_refused(model):
    async with serving(model, limits=EngineLimits(max_in_flight=3)) as channel:
        peer = Peer(channel)
        await peer.send(opening(model, [1], 400), Generate(1, 0, 1, 400))
        await peer.send(*(block(model, step, 1, [1]) for step in (2, 3)), block(model, 4, 1, [1]))
        fault = await peer.fault()
        assert fault.kind is FaultKind.BAD_REQUEST
        assert fault.step == 4


async def test_half_close_still_gets_what_is_owed(model, alone):
    prompt = prompts(1, 10)[0]
    async with serving(model) as channel:
        peer = Peer(channel)
        await peer.send(opening(model, prompt, 20), Generate(1, 0, 10, 20))
        await peer.call.done_writing()
        assert isinstance(await peer.get(), Opened)
        assert await peer.written() == alone(prompt, 20)
        assert await peer.get() is None


async def test_a_stream_that_opens_nothing_is_ended(model):
    async with serving(model, open_timeout_s=0.2) as channel:
        peer = Peer(channel)
        await peer.call.wait_for_connection()
        assert (await peer.fault()).kind is FaultKind.TIMED_OUT


async def test_a_client_that_does_not_read_is_cut_and_can_resume(model, monkeypatch):
    narrow = [("grpc.http2.lookahead_bytes", 4096), ("grpc.http2.bdp_probe", 0)]
    settings = ServerConfig(listen="127.0.0.1:0", drain_timeout_s=0)
    async with (
        running_server(model, settings) as port,
        grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=narrow) as channel,
    ):
        peer = Peer(channel)
        await peer.send(opening(model, [1, 2, 3], 400))
        opened = await peer.get()
        await peer.send(Generate(1, 0, 3, 400))
        assert len(await peer.written()) == 400
        monkeypatch.setattr("cloud_verifier.stream.MAX_UNREAD", 20)
        with contextlib.suppress(asyncio.InvalidStateError, grpc.aio.AioRpcError):
            for _ in range(200):  # 160 kB
                await peer.send(Generate(1, 0, 3, 400))  # the same step again: its old answer, unread
                await asyncio.sleep(0.003)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await peer.fault()
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        back = Peer(channel)
        await back.send(opening(model, [], session_id=opened.session_id, committed_len=3))
        again = await back.get()
        assert isinstance(again, Opened)
        assert again.committed_len == 403
        await back.close()


async def test_a_cut_stream_resumes_and_another_identity_cannot(model, alone, tmp_path):
    tokens = tmp_path / "tokens.toml"
    tokens.write_text(
        f'[identities.alice]\nsha256 = "{hash_token("a")}"\n[identities.bob]\nsha256 = "{hash_token("b")}"\n'
    )
    prompt = prompts(1, 10)[0]
    alice, bob = ((("authorization", f"Bearer {token}"),) for token in "ab")
    async with serving(model, Authenticator(tokens)) as channel:
        peer = Peer(channel, alice)
        await peer.send(opening(model, prompt, 20), Generate(1, 0, 10, 5))
        opened = await peer.get()
        first = await peer.written()
        peer.call.cancel()
        thief = Peer(channel, bob)
        await thief.send(opening(model, [], session_id=opened.session_id))
        assert (await thief.fault()).kind is FaultKind.SESSION_UNKNOWN
        back = Peer(channel, alice)
        await back.send(opening(model, [], session_id=opened.session_id, committed_len=12))
        again = await back.get()
        assert list(again.tokens) == first[2:]
        await back.send(Generate(again.next_step, again.epoch, 15, 15))
        assert first + await back.written() == alone(prompt, 20)
        await back.close()


async def test_tokens_are_asked_for_and_read_again_when_they_change(model, tmp_path):
    tokens = tmp_path / "tokens.toml"
    tokens.write_text("")
    async with serving(model, Authenticator(tokens)) as channel:
        describe = channel.unary_unary(f"/{SERVICE_NAME}/Describe")
        for metadata in ((), (("authorization", "Bearer x"),), (("authorization", "x"),)):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await describe(b"", metadata=metadata)
            assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
            peer = Peer(channel, metadata)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await peer.call.read()
            assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
        tokens.write_text(f'[identities.eve]\nsha256 = "{hash_token("x")}"\n')
        assert await describe(b"", metadata=(("authorization", "Bearer x"),))
        tokens.write_text("this is no TOML")
        assert await describe(b"", metadata=(("authorization", "Bearer x"),))


async def test_streams_end_when_their_token_is_revoked(model, tmp_path):
    tokens = tmp_path / "tokens.toml"

    def allow(**bearers: str) -> None:
        tokens.write_text(
            "".join(
                f'[identities.{name}]\nsha256 = "{hash_token(token)}"\n' for name, token in bearers.items()
            )
        )

    allow(alice="a", bob="b")
    alice, bob = ((("authorization", f"Bearer {token}"),) for token in "ab")
    async with serving(model, Authenticator(tokens)) as channel:
        waiting, unopened, other = Peer(channel, alice), Peer(channel, alice), Peer(channel, bob)
        await waiting.send(opening(model, [1, 2, 3]))
        opened = await waiting.get()
        await unopened.call.wait_for_connection()
        await other.send(opening(model, [1, 2, 3], 400))
        assert isinstance(await other.get(), Opened)
        allow(alice="new", bob="b")
        for peer in (waiting, unopened):
            assert (await peer.fault()).kind is FaultKind.UNAUTHENTICATED
        await other.send(Generate(1, 0, 3, 5))
        assert len(await other.written()) == 5
        back = Peer(channel, (("authorization", "Bearer new"),))
        await back.send(opening(model, [], session_id=opened.session_id, committed_len=3))
        assert (await back.fault()).kind is FaultKind.SESSION_UNKNOWN  # its text went with it
        await other.close()


def test_a_file_of_tokens_that_is_just_being_written_ends_nobody(tmp_path):
    tokens = tmp_path / "tokens.toml"
    allowing = f'[identities.alice]\nsha256 = "{hash_token("a")}"\n'
    tokens.write_text(allowing)
    authenticator = Authenticator(tokens)

    class Ending:
        identity = authenticator.identify({"authorization": "Bearer a"}, {})
        num_revoked = 0

        def revoke(self) -> None:
            self.num_revoked += 1

    service, stream = VerifierService(None, lambda: None, authenticator), Ending()
    service._streams.add(stream)
    for text, num_revoked in (("", 0), (allowing, 0), ("", 0), ("", 1)):
        tokens.write_text(text)
        service.revoke()
        assert stream.num_revoked == num_revoked


async def test_rates_are_limited_with_a_time_to_wait(model, tmp_path):
    tokens = tmp_path / "tokens.toml"
    tokens.write_text(f'[identities.eve]\nsha256 = "{hash_token("x")}"\ntokens-per-s = 5\nsessions = 1\n')
    metadata = (("authorization", "Bearer x"),)
    async with serving(model, Authenticator(tokens)) as channel:
        peer = Peer(channel, metadata)
        await peer.send(opening(model, [1] * 10, 400), Generate(1, 0, 10, 400))
        second = Peer(channel, metadata)
        await second.send(opening(model, [1]))
        assert (await second.fault()).kind is FaultKind.QUOTA_EXCEEDED
        fault = await peer.fault()
        assert fault.kind is FaultKind.QUOTA_EXCEEDED
        assert fault.retry_after_ms > 0


async def test_tls_and_client_certificates(model, certificates):
    server = transport.Tls(cert=certificates / "server.pem", key=certificates / "server-key.pem")
    mutual = transport.Tls(certificates / "ca.pem", server.cert, server.key)
    trusting = transport.Tls(ca=certificates / "ca.pem")
    known = transport.Tls(trusting.ca, certificates / "client.pem", certificates / "client-key.pem")

    async def describes(tls, client_tls) -> bool:
        async with serving(model, tls=tls, client_tls=client_tls) as channel:
            call = channel.unary_unary(f"/{SERVICE_NAME}/Describe")(b"", timeout=10)
            code = await call.code()
            assert code in (grpc.StatusCode.OK, grpc.StatusCode.UNAVAILABLE)
            return code is grpc.StatusCode.OK

    assert await describes(server, trusting)
    assert not await describes(server, transport.Tls())  # its authority is nobody's
    assert not await describes(server, None)
    assert await describes(mutual, known)
    assert not await describes(mutual, trusting)


async def test_the_clients_options_name_its_certificate(model, certificates):
    mutual = transport.Tls(
        certificates / "ca.pem", certificates / "server.pem", certificates / "server-key.pem"
    )
    options = Options(
        tls_ca=mutual.ca, tls_cert=certificates / "client.pem", tls_key=certificates / "client-key.pem"
    )
    settings = ServerConfig(listen="127.0.0.1:0", tls=mutual, drain_timeout_s=0.0)
    async with (
        running_server(model, settings) as port,
        make_verifier(replace(options, verifier=f"localhost:{port}")) as verifier,
    ):
        assert (await verifier.describe()).model
        without = replace(options, verifier=f"localhost:{port}", tls_cert=None, tls_key=None)
        async with make_verifier(without) as refused:
            with pytest.raises(SpecwireError) as raised:
                await refused.describe()
        assert "--tls-cert" in raised.value.remedy
    with pytest.raises(SpecwireError, match="without its private key"):
        make_verifier(replace(options, tls_key=None))


async def test_a_client_certificate_names_its_bearer(model, certificates, tmp_path):
    mutual = transport.Tls(
        certificates / "ca.pem", certificates / "server.pem", certificates / "server-key.pem"
    )
    known = transport.Tls(mutual.ca, certificates / "client.pem", certificates / "client-key.pem")
    identities = tmp_path / "tokens.toml"
    identities.write_text("[identities.developer]\nmax-context = 20\n")
    async with serving(model, Authenticator(identities), mutual, known) as channel:
        peer = Peer(channel)
        await peer.send(opening(model, [1] * 20))
        assert (await peer.fault()).kind is FaultKind.CONTEXT_EXCEEDED
        identities.write_text("[identities.somebody-else]\n")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await Peer(channel).call.read()
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED


async def test_drain_tells_finishes_and_does_not_wait_for_the_silent(model, alone):
    prompt = prompts(1, 10)[0]
    settings = ServerConfig(
        listen="127.0.0.1:0", drain_timeout_s=20.0, limits=EngineLimits(drain_grace_seconds=2.0)
    )
    server = running_server(model, settings)
    port = await server.__aenter__()
    async with transport.open_channel(f"127.0.0.1:{port}", None) as channel:
        busy, silent = Peer(channel), Peer(channel)
        await busy.send(opening(model, prompt, 100), Generate(1, 0, 10, 100))
        await silent.send(opening(model, prompt))
        assert isinstance(await busy.get(), Opened)
        assert isinstance(await silent.get(), Opened)
        started = time.monotonic()
        leaving = asyncio.create_task(server.__aexit__(None, None, None))
        assert isinstance(await silent.get(), Notice)
        assert (await silent.fault()).kind is FaultKind.DRAINING
        late = Peer(channel)
        await late.send(opening(model, prompt))
        assert (await late.fault()).kind is FaultKind.DRAINING
        written: list[int] = []
        while len(written) < 100:
            message = await busy.get()
            written += message.tokens if isinstance(message, Tokens) else ()
        assert written == alone(prompt, 100)
        await busy.close()
        await leaving
        assert time.monotonic() - started < 15


@pytest.mark.parametrize("wanted", [False, True])
async def test_prompts_are_in_the_log_only_when_asked_for(model, caplog, wanted):
    caplog.set_level(logging.DEBUG)
    secret = "correct horse battery staple"
    ids = Tokenizer.from_str(model.tokenizer_json).encode(secret).ids
    async with serving(model, log_prompts=wanted) as channel:
        peer = Peer(channel)
        await peer.answer(opening(model, ids), 4)
        await peer.send(b"\xff")
        await peer.fault()
    told = "\n".join(record.getMessage() + str(record.__dict__) for record in caplog.records)
    assert "opened" in told
    assert (secret in told) == wanted
    assert str(ids)[1:-1] not in told


async def test_pings_while_a_long_prompt_is_read_do_not_end_the_connection(model, alone):
    """By default a server takes two pings between its own data and then hangs up: `too_many_pings`."""
    prompt = prompts(1, 10)[0]

    class Slow(TargetModel):
        def __init__(self) -> None:
            self.__dict__.update(model.__dict__)

        def forward(self, segments):
            time.sleep(2.0)  # twenty pings
            return model.forward(segments)

    settings = ServerConfig(listen="127.0.0.1:0", drain_timeout_s=0)
    async with running_server(Slow(), settings) as port:
        often = [("grpc.keepalive_time_ms", 100)]
        options = [option for option in transport.client_options() if option[0] != often[0][0]] + often
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=options) as channel:
            peer = Peer(channel)
            await peer.send(opening(model, prompt), Generate(1, 0, 10, 2))
            assert isinstance(await peer.get(), Opened)
            assert await peer.written() == alone(prompt, 2)


def test_the_server_takes_pings_more_often_than_the_client_sends_them():
    client, server = dict(transport.client_options()), dict(transport.server_options())
    assert client["grpc.keepalive_time_ms"] < 30_000  # or a mobile network forgets the connection
    assert server["grpc.http2.min_recv_ping_interval_without_data_ms"] < client["grpc.keepalive_time_ms"]


def _num_fds() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def _resident_bytes() -> int:
    # What is free already but kept for later by the allocator is nobody's.
    ctypes.CDLL(None).malloc_trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


async def _end_somehow(model: TargetModel, peer: Peer, how: int) -> None:
    """Leaves the stream in one of the phases that it goes through; some are left to the caller to cancel."""
    match how:
        case 0:
            peer.call.cancel()
        case 1:
            await peer.send(opening(model, prompts(1, 300, seed=id(peer))[0]))
            peer.call.cancel()
        case 2:
            await peer.send(opening(model, [1, 2], 50), Generate(1, 0, 2, 50))
            await peer.get()
            peer.call.cancel()
        case 3:
            await peer.send(opening(model, [1, 2]), b"\xff")
            await peer.fault()
        case 4:
            await peer.answer(opening(model, [1, 2], 2), 2)
            await peer.close()
        case 5:
            await peer.send(opening(model, [1, 2]))
            await peer.call.done_writing()


async def test_streams_that_end_in_any_phase_leave_nothing_behind(model):
    metrics = Metrics()
    limits = EngineLimits(idle_seconds=0.0)

    async def end_streams(channel: grpc.aio.Channel, num: int) -> None:
        peers = [Peer(channel) for _ in range(num)]
        for i, peer in enumerate(peers):
            await _end_somehow(model, peer, i % 6)
        for peer in peers:
            peer.call.cancel()

    async def at_rest(tasks: int, descriptors: int) -> bool:
        engine = metrics._engine
        for _ in range(400):
            gc.collect()
            engine.expire()
            engine.evict_cache()
            await asyncio.sleep(0.05)
            num_held = model.pool.num_used + len(engine._registry)
            if num_held == 0 and len(asyncio.all_tasks()) <= tasks and _num_fds() <= descriptors:
                return True
        return False

    async with serving(model, metrics=metrics, limits=limits) as channel:
        await Peer(channel).answer(opening(model, [1]), 1)
        gc.collect()
        tasks, descriptors = len(asyncio.all_tasks()), _num_fds()
        await end_streams(channel, 252)  # memory grows to its size
        assert await at_rest(tasks, descriptors)
        before = _resident_bytes()
        await end_streams(channel, 252)
        assert await at_rest(tasks, descriptors)
        assert _resident_bytes() - before < 4 << 20  # 16 kB a stream would be more
