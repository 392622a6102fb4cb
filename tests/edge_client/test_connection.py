"""Lost streams, other verifiers and wrong addresses, over real gRPC."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import grpc.aio
import pytest
from edge_support import CLOUD, PROMPT, Relay, collect, conversing, listening, serving

from cloud_verifier.metrics import Metrics
from cloud_verifier.registry import EngineLimits
from edge_client.alone import is_lost
from edge_client.connection import Patience, Verifier, framed_bytes
from edge_client.controller import Plan
from edge_client.session import DisconnectedError
from shared.faults import FaultKind, SpecwireError
from shared.messages import Open, SamplingParams, TokenizerIdentity
from shared.pb.specwire.v1 import verifier_pb2 as pb
from shared.pb.specwire.v1 import verifier_pb2_grpc as pb_grpc
from shared.transport import Tls

sys.path.append(str(Path(__file__).parents[2] / "deploy"))
from certs import write_certificates

SAMPLED = SamplingParams(temperature=1.0, seed=3)
HASTY = Patience(connect=2.0, reconnect=20.0)
PLANS = [Plan(3), Plan(2, 3), CLOUD]


@pytest.mark.parametrize("plan", PLANS)
async def test_a_stream_cut_at_random_bytes_changes_nothing(target_model, draft_model, plan):
    draws = random.Random(f"{plan}")
    cut = 0
    async with serving(target_model) as address, Relay(address).running() as relay:
        async with conversing(address, draft_model) as talk:
            _, whole = await collect(talk, sampling=SAMPLED, max_new_tokens=40, plan=plan)
        for _ in range(6):
            async with conversing(relay.address, draft_model, patience=HASTY) as talk:
                relay.cut_after(draws.randrange(1, 1500))
                _, result = await collect(talk, sampling=SAMPLED, max_new_tokens=40, plan=plan)
            cut += result.num_reconnects
            assert result.tokens == whole.tokens
    assert cut >= 3


@pytest.mark.parametrize("plan", PLANS)
async def test_another_verifier_takes_over(target_model, other_target_model, draft_model, plan):
    """The first one vanishes at ten random bytes of the answer and does not come back."""
    taken_over = 0
    async with serving(target_model) as first, serving(other_target_model) as second:
        async with conversing(first, draft_model) as talk:
            _, whole = await collect(talk, sampling=SAMPLED, max_new_tokens=30, plan=plan)
        for num_bytes in random.Random(f"{plan}").sample(range(1, 1050), 10):
            async with (
                Relay(first).running() as relay,
                conversing([relay.address, second], draft_model, patience=HASTY) as talk,
            ):
                relay.cut_after(num_bytes)
                relay.refuse_after_cut = True
                _, result = await collect(talk, sampling=SAMPLED, max_new_tokens=30, plan=plan)
            assert result.tokens == whole.tokens
            taken_over += result.num_reconnects
    assert taken_over >= 4


class Sizes(Metrics):
    """Remembers the size of every message that the verifier sees."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[str, list[int]] = {"up": [], "down": []}

    def bytes_passed(self, direction: str, codec: str, num_bytes: int) -> None:
        self.seen[direction].append(num_bytes)


@pytest.mark.parametrize("plan", PLANS)
async def test_padded_messages_have_one_size(target_model, draft_model, plan):
    written, sizes = [], []
    for pad_bytes in (0, 2048):
        metrics = Sizes()
        async with (
            serving(target_model, metrics) as address,
            conversing(address, draft_model, pad_bytes=pad_bytes, logprobs=3) as talk,
        ):
            _, result = await collect(talk, sampling=SAMPLED, max_new_tokens=60, plan=plan)
            await collect(talk, (*talk.committed, 61, 62), sampling=SAMPLED, plan=plan)
        written.append(result.tokens)
        sizes.append({direction: set(seen) for direction, seen in metrics.seen.items()})
        assert min(map(len, metrics.seen.values())) > 3
    assert written[0] == written[1]
    assert min(map(len, sizes[0].values())) > 3
    assert sizes[1] == {"up": {2048}, "down": {2048}}


async def test_a_stream_that_the_verifier_ended_leaves_nothing_behind(target_model, draft_model, monkeypatch):
    """What it said last was never read: nobody waited for an answer."""
    monkeypatch.setattr("cloud_verifier.server._EXPIRY_PERIOD_S", 0.05)
    metrics = Metrics()
    async with serving(target_model, metrics, limits=EngineLimits(idle_seconds=0.0)) as address:
        num_tasks = len(asyncio.all_tasks())
        for _ in range(3):
            async with conversing(address, draft_model) as talk:
                await collect(talk, plan=Plan(3))
                async with asyncio.timeout(10):
                    while metrics._engine.num_attached:  # noqa: ASYNC110 - nothing else tells
                        await asyncio.sleep(0.01)
        async with asyncio.timeout(10):
            while len(asyncio.all_tasks()) > num_tasks:  # noqa: ASYNC110
                await asyncio.sleep(0.01)


async def test_the_next_turn_moves_too(target_model, other_target_model, draft_model):
    async with (
        serving(target_model) as first,
        serving(other_target_model) as second,
        Relay(first).running() as relay,
        conversing([relay.address, second], draft_model, patience=HASTY) as talk,
    ):
        await collect(talk, plan=Plan(3))
        turn = (*talk.committed, 61, 62)
        relay.refusing = True
        relay.cut()
        _, result = await collect(talk, turn, plan=Plan(3))
        assert result.num_reconnects == 1
        await talk.reset()
        _, alone = await collect(talk, turn, plan=CLOUD)
    assert result.tokens == alone.tokens


async def test_a_drained_verifier_is_left_without_a_break(target_model, other_target_model, draft_model):
    notices: list[str] = []
    async with serving(other_target_model) as second:
        async with conversing(second, draft_model) as talk:
            _, whole = await collect(talk, sampling=SAMPLED, max_new_tokens=200, plan=Plan(2, 2))
        draining = serving(target_model, drain_timeout_s=20.0)
        first = await draining.__aenter__()
        async with conversing([first, second], draft_model, notices=notices) as talk:
            answering = asyncio.create_task(
                collect(talk, sampling=SAMPLED, max_new_tokens=200, plan=Plan(2, 2))
            )
            async with asyncio.timeout(10):
                while len(talk.committed) < len(PROMPT) + 10:  # noqa: ASYNC110 - nothing else tells
                    await asyncio.sleep(0.005)
            started = time.monotonic()
            await draining.__aexit__(None, None, None)
            assert time.monotonic() - started < 15
            _, result = await answering
            assert talk._session.address == second
    assert result.tokens == whole.tokens
    assert notices


async def test_gives_up_in_words_when_nobody_comes_back(target_model, draft_model):
    notices: list[str] = []
    patience = Patience(connect=1.0, reconnect=0.5)
    async with (
        serving(target_model) as address,
        Relay(address).running() as relay,
        conversing(relay.address, draft_model, patience=patience, notices=notices) as talk,
    ):
        relay.cut_after(700)
        relay.refuse_after_cut = True
        with pytest.raises(SpecwireError) as caught:
            await collect(talk, max_new_tokens=200, plan=Plan(2))
    assert caught.value.kind is FaultKind.UNAVAILABLE
    assert caught.value.remedy
    assert any("Trying again" in notice for notice in notices)


def request(**changes: object) -> Open:
    identity = TokenizerIdentity("another digest", 10, "another tokenizer")
    return Open(identity, PROMPT, SamplingParams(), "lattice", "token", 4, 9, **changes)


async def test_nothing_listens():
    async with Verifier(["127.0.0.1:1"], tls=None, patience=Patience(connect=3.0)) as verifier:
        for attempt in (verifier.describe(), verifier.open_session(request()).__aenter__()):
            with pytest.raises(DisconnectedError, match=r"Nothing answers at 127\.0\.0\.1:1") as caught:
                await attempt
            assert "cloud-verifier serve" in caught.value.remedy


async def test_something_accepts_and_stays_silent():
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        async with Verifier([address], tls=None, patience=Patience(connect=0.5)) as verifier:
            with pytest.raises(DisconnectedError, match=r"within 0\.5 s"):
                await verifier.describe()


@contextlib.asynccontextmanager
async def another_grpc_service() -> AsyncIterator[str]:
    server = grpc.aio.server()
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    yield f"127.0.0.1:{port}"
    await server.stop(None)


@contextlib.asynccontextmanager
async def web_server() -> AsyncIterator[str]:
    async def refuse(connection: socket.socket) -> None:
        await asyncio.get_running_loop().sock_sendall(
            connection, b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n"
        )

    async with listening(refuse) as address:
        yield address


@pytest.mark.parametrize("wrong", [another_grpc_service, web_server])
async def test_something_else_answers(wrong):
    async with wrong() as address, Verifier([address], tls=None) as verifier:
        with pytest.raises(SpecwireError, match="not a Specwire verifier") as caught:
            await verifier.describe()
    assert_waiting_is_in_vain(caught.value)


async def test_tls_against_plain_text(target_model):
    async with serving(target_model) as address, Verifier([address], tls=Tls()) as verifier:
        with pytest.raises(SpecwireError, match="does not speak TLS") as caught:
            await verifier.describe()
    assert "--insecure" in caught.value.remedy
    assert_waiting_is_in_vain(caught.value)


def assert_waiting_is_in_vain(fault: SpecwireError) -> None:
    """Nobody is told to come back, and the draft does not go on alone."""
    assert fault.kind is FaultKind.PROTOCOL_MISMATCH
    assert not is_lost(fault)


@pytest.mark.parametrize("wrong", [another_grpc_service, web_server])
async def test_a_wrong_address_does_not_keep_the_next_one_from_answering(target_model, draft_model, wrong):
    async with serving(target_model) as address, wrong() as first:
        async with conversing(address, draft_model) as talk:
            _, whole = await collect(talk, sampling=SAMPLED, plan=Plan(2))
        async with conversing([first, address], draft_model, patience=HASTY) as talk:
            _, result = await collect(talk, sampling=SAMPLED, plan=Plan(2))
    assert result.tokens == whole.tokens


async def test_a_certificate_of_another_authority(target_model, other_target_model, draft_model, tmp_path):
    """Refused, without a word about later; the next address is used all the same."""
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    for folder in (ours, theirs):
        write_certificates(folder, ("localhost",))
    good, bad = [Tls(cert=folder / "server.pem", key=folder / "server-key.pem") for folder in (ours, theirs)]
    trusting = Tls(ca=ours / "ca.pem")
    async with (
        serving(target_model, tls=good) as right,
        serving(other_target_model, tls=bad) as wrong,
    ):
        async with Verifier([wrong], tls=trusting) as verifier:
            with pytest.raises(SpecwireError, match="is not trusted") as caught:
                await verifier.describe()
        assert_waiting_is_in_vain(caught.value)
        assert "--tls-ca" in caught.value.remedy
        async with conversing([wrong, right], draft_model, patience=HASTY, tls=trusting) as talk:
            _, result = await collect(talk, plan=Plan(2))
    assert len(result.tokens) == 24


async def test_an_address_that_may_be_back_is_what_counts():
    async with web_server() as wrong:
        for addresses in ([wrong, "127.0.0.1:1"], ["127.0.0.1:1", wrong]):
            async with Verifier(addresses, tls=None) as verifier:
                with pytest.raises(DisconnectedError, match="Nothing answers") as caught:
                    await verifier.describe()
            assert is_lost(caught.value)


async def test_no_addresses():
    for addresses in ([], [" "]):
        with pytest.raises(SpecwireError, match="No verifier address"):
            Verifier(addresses, tls=None)


async def test_describe_asks_the_next_address(target_model):
    async with serving(target_model) as address, Verifier(["127.0.0.1:1", address], tls=None) as verifier:
        assert (await verifier.describe()).limits.max_context == target_model.max_context
        assert await verifier.ping(address) > 0


async def test_a_new_client_is_not_held_up_by_an_older_ones_dead_connection(target_model):
    async with contextlib.AsyncExitStack() as stack:
        async with serving(target_model) as address:
            older = await stack.enter_async_context(Verifier([address], tls=None))
            await older.describe()
        with pytest.raises(SpecwireError):
            await older.describe()
        async with serving(target_model, listen=address), Verifier([address], tls=None) as newer:
            assert (await newer.describe()).limits.max_context == target_model.max_context


async def test_tokenizers_that_differ_are_refused_with_both_names(target_model):
    async with serving(target_model) as address, Verifier([address], tls=None) as verifier:
        async with verifier.open_session(request()) as session:
            with pytest.raises(SpecwireError, match="another tokenizer") as caught:
                await session.receive()
        assert caught.value.kind is FaultKind.TOKENIZER_MISMATCH


async def test_token_and_session_key_travel_as_metadata():
    seen: list[dict[str, object]] = []

    class Service(pb_grpc.VerifierServicer):
        """Only looks at the metadata: no real verifier asks for them here."""

        async def Describe(self, message, context):  # noqa: N802
            seen.append(dict(context.invocation_metadata()))
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, "Your token has expired.")

        async def Session(self, messages, context):  # noqa: N802
            seen.append(dict(context.invocation_metadata()))
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, "Your token has expired.")

    server = grpc.aio.server()
    pb_grpc.add_VerifierServicer_to_server(Service(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with Verifier([f"127.0.0.1:{port}"], tls=None, token="secret") as verifier:
        with pytest.raises(SpecwireError, match="expired") as caught:
            await verifier.describe()
        assert caught.value.kind is FaultKind.UNAUTHENTICATED
        async with verifier.open_session(request()) as session:
            with pytest.raises(SpecwireError, match="expired"):
                await session.receive()
    await server.stop(None)
    assert [one["authorization"] for one in seen] == ["Bearer secret"] * 2
    assert len(str(seen[1]["x-session-id"])) == 16


def messages_in(http2: bytes) -> list[str]:
    """Kinds of the whole messages of one stream in what a client sent, from a frame's beginning on."""
    grpc_bytes = b""
    while len(http2) >= 9 and len(http2) >= 9 + (length := int.from_bytes(http2[:3])):
        kind, payload, http2 = http2[3], http2[9 : 9 + length], http2[9 + length :]
        grpc_bytes += payload if kind == 0 else b""  # DATA
    kinds = []
    while len(grpc_bytes) >= 5 and len(grpc_bytes) >= 5 + (length := int.from_bytes(grpc_bytes[1:5])):
        message, grpc_bytes = grpc_bytes[5 : 5 + length], grpc_bytes[5 + length :]
        kinds.append(pb.ClientMessage.FromString(message).WhichOneof("message") or "")
    return kinds


@pytest.mark.parametrize("plan", [Plan(3), Plan(2, 3)])
async def test_the_first_block_waits_for_no_word_of_the_verifier(target_model, draft_model, plan):
    """Nothing of the session comes down before a block has gone up: who waits for it waits for ever."""
    async with (
        serving(target_model) as address,
        Relay(address).running() as relay,
        conversing(relay.address, draft_model) as talk,
        asyncio.timeout(20),
    ):
        relay.keep_back_until(lambda sent: messages_in(sent)[:2] == ["open", "draft_block"])
        _, result = await collect(talk, plan=plan)
        _, alone = await collect(talk, plan=CLOUD)
    assert result.tokens == alone.tokens


async def test_bytes_are_counted_as_they_are_on_the_connection(target_model, draft_model):
    async with (
        serving(target_model) as address,
        Relay(address).running() as relay,
        conversing(relay.address, draft_model) as talk,
    ):
        await collect(talk, plan=Plan(2))  # the connection's own beginning
        before = relay.up_bytes
        _, result = await collect(
            talk, (*talk.committed, 61), sampling=SAMPLED, max_new_tokens=150, plan=Plan(2)
        )
        await asyncio.sleep(0.05)
        real = relay.up_bytes - before
    # What is not counted: acknowledgements of pings and of flow control.
    assert result.up_bytes <= real <= result.up_bytes * 1.25 + 200


def test_framed_bytes():
    assert framed_bytes(0) == 14
    assert framed_bytes(16_379) == 16_379 + 5 + 9
    assert framed_bytes(16_380) == 16_380 + 5 + 18
