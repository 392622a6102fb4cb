"""The way to a verifier: channels, streams, and gRPC's errors in words. The only edge file that knows gRPC.

What survives a lost stream is `edge_client.session`'s business.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, Self

import grpc
import grpc.aio

from edge_client.session import DisconnectedError, RemoteSession
from shared import wire
from shared.faults import FaultKind, SpecwireError
from shared.messages import ClientMessage, Close, Description, Open
from shared.pb.specwire.v1 import verifier_pb2 as pb
from shared.pb.specwire.v1 import verifier_pb2_grpc as pb_grpc
from shared.transport import Tls, open_channel

_CLOSING_S = 1.0
_FRAME_BYTES = 16_384
"""Largest HTTP/2 DATA frame that either side announces."""


_FILLER_TAG = b"\xfa\x3f"
"""Field 1023, length-delimited: no message of the contract has it."""
_REFLECTION = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
_SERVICE = pb.DESCRIPTOR.services_by_name["Verifier"].full_name
_REFLECTION_REQUEST = b"\x22" + bytes([len(_SERVICE)]) + _SERVICE.encode()
"""`file_containing_symbol`, field 4 of ServerReflectionRequest."""


@dataclass(frozen=True, slots=True)
class Patience:
    """How long to wait for what, in seconds.

    Args:
        connect: for an address to accept a connection.
        answer: for any message while one is due. Long, because a long prompt on a busy verifier takes
            its time; a dead peer is noticed by keepalive after 30 s.
        reconnect: for a verifier to come back after the stream was lost, over all addresses.
    """

    connect: float = 5.0
    answer: float = 120.0
    reconnect: float = 60.0


class Verifier:
    """One verifier service, reachable at one or more addresses (`host:port`), tried in order.

    Use it as an async context manager; channels are made when first needed and shared by sessions. With
    `pad_bytes` every message of a session is padded to a multiple of so many bytes, in both directions.
    `notify` gets one sentence whenever a person may wonder why nothing comes.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        *,
        tls: Tls | None,
        token: str = "",
        pad_bytes: int = 0,
        patience: Patience | None = None,
        notify: Callable[[str], None] | None = None,
    ) -> None:
        if not addresses or not all(address.strip() for address in addresses):
            raise SpecwireError(
                FaultKind.BAD_REQUEST, "No verifier address was given.", "Give --verifier host:port."
            )
        self.addresses = tuple(address.strip() for address in addresses)
        self.patience = patience or Patience()
        self.notify = notify or (lambda text: None)
        self._tls = tls
        self._token = token
        self._pad_bytes = pad_bytes
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._closing: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if self._closing:
                await asyncio.wait(self._closing, timeout=_CLOSING_S)
        finally:
            channels = list(self._channels.values())
            self._channels.clear()
            for channel in channels:
                await channel.close(None)

    async def describe(self) -> Description:
        """What the first address that answers serves.

        Raises:
            DisconnectedError: none answers; what the last one said that may be back later.
            SpecwireError: a verifier refuses, or none of the addresses can be right.
        """
        failures: list[DisconnectedError] = []
        for address in self.addresses:
            try:
                return await self.describe_at(address)
            except DisconnectedError as error:
                failures.append(error)
        for failure in reversed(failures):
            if failure.kind is not FaultKind.PROTOCOL_MISMATCH:
                raise failure
        # Waiting brings nothing: not to be taken for a verifier that is lost.
        last = failures[-1]
        raise SpecwireError(last.kind, last.text, last.remedy)

    def open_session(self, request: Open) -> RemoteSession:
        """A session, to be entered as an async context manager; `request` is sent on entering."""
        return RemoteSession(self, replace(request, pad_bytes=self._pad_bytes))

    async def connect(self, address: str, session_key: str) -> GrpcStream:
        """A stream to `address`; `session_key` lets load balancers keep a session on one verifier.

        Raises:
            DisconnectedError: nothing answers there.
        """
        channel = await self._ready(address)
        metadata = (*self._metadata(), ("x-session-id", session_key))
        return GrpcStream(_stub(channel).Session(metadata=metadata), address, self._tls, self._pad_bytes)

    def close_later(self, stream: GrpcStream) -> None:
        """Lets a stream say goodbye without keeping its user waiting."""
        task = asyncio.ensure_future(stream.close(_CLOSING_S))
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    async def ping(self, address: str) -> float:
        """Seconds that one small request takes there and back."""
        await self._ready(address)
        started = time.perf_counter()
        await self.describe_at(address)
        return time.perf_counter() - started

    async def upload(self, address: str, num_bytes: int) -> float:
        """Seconds that a Describe with so many bytes of an unknown field takes, its small answer included.

        The contract has both sides ignore unknown fields, so any verifier takes it.
        """
        channel = await self._ready(address)
        filler = _FILLER_TAG + _varint(num_bytes) + bytes(num_bytes)
        request = pb.DescribeRequest.FromString(filler)
        started = time.perf_counter()
        call = _stub(channel).Describe(request, metadata=self._metadata(), timeout=self.patience.answer)
        await _in_words(call, address, self._tls)
        return time.perf_counter() - started

    async def download(self, address: str, num_bytes: int) -> tuple[int, float]:
        """Bytes and seconds of about so many bytes of answers, asked for all at once.

        They are the service's own description, by gRPC's reflection: the largest thing that every verifier
        tells without work. The seconds include one round trip.

        Raises:
            SpecwireError: PROTOCOL_MISMATCH where a proxy or an older verifier has no reflection.
        """
        channel = await self._ready(address)
        reflection: Any = channel
        call = reflection.stream_stream(_REFLECTION)(metadata=self._metadata(), timeout=self.patience.answer)
        started = time.perf_counter()
        # Theirs is as long as ours, if they have our version; a few bytes of envelope come on top.
        received = await self._reflect(call, address, -(-num_bytes // len(pb.DESCRIPTOR.serialized_pb)))
        seconds = time.perf_counter() - started
        await call.done_writing()
        call.cancel()
        return received, seconds

    async def _reflect(self, call: Any, address: str, count: int) -> int:
        """Bytes of `count` answers to one question asked `count` times."""
        received = 0
        for _ in range(count):
            await _in_words(call.write(_REFLECTION_REQUEST), address, self._tls)
        for _ in range(count):
            answer = await _in_words(call.read(), address, self._tls)
            if not isinstance(answer, bytes):
                raise _explain(await call.code(), await call.details(), address, self._tls)
            received += len(answer)
        return received

    async def describe_at(self, address: str) -> Description:
        channel = await self._ready(address)
        call = _stub(channel).Describe(
            pb.DescribeRequest(), metadata=self._metadata(), timeout=self.patience.connect
        )
        return wire.description_from_proto(await _in_words(call, address, self._tls))

    async def _ready(self, address: str) -> grpc.aio.Channel:
        channel = self._channels.get(address)
        if channel is None:
            channel = self._channels[address] = open_channel(address, self._tls)
        try:
            async with asyncio.timeout(self.patience.connect):
                state = channel.get_state(try_to_connect=True)
                # After a failure gRPC tries again by itself; the first failure already says why.
                while state not in (
                    grpc.ChannelConnectivity.READY,
                    grpc.ChannelConnectivity.TRANSIENT_FAILURE,
                ):
                    await channel.wait_for_state_change(state)
                    state = channel.get_state(try_to_connect=True)
        except TimeoutError:
            raise DisconnectedError(
                FaultKind.UNAVAILABLE,
                f"Nothing answered at {address} within {self.patience.connect:g} s.",
                "Check the address, and that no firewall is in between.",
            ) from None
        return channel

    def _metadata(self) -> tuple[tuple[str, str], ...]:
        return (("authorization", f"Bearer {self._token}"),) if self._token else ()


class GrpcStream:
    """One session's stream: dataclasses in and out, and how many bytes they took on the wire."""

    def __init__(
        self,
        call: grpc.aio.StreamStreamCall[pb.ClientMessage, pb.ServerMessage],
        address: str,
        tls: Tls | None,
        pad_bytes: int,
    ) -> None:
        self._call = call
        self._address = address
        self._tls = tls
        self._pad_bytes = pad_bytes

    async def write(self, message: ClientMessage) -> int:
        """Sends one message and returns its bytes, framing included."""
        proto = wire.client_message_to_proto(message)
        wire.pad(proto, self._pad_bytes)
        try:
            await self._call.write(proto)
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError, grpc.aio.UsageError):
            # What a failed write says is about gRPC's insides; the call's status is about the connection.
            raise await self._why_it_ended() from None
        return framed_bytes(proto.ByteSize())

    async def read(self) -> tuple[wire.ServerMessage, int]:
        """The next message and its bytes, framing included.

        Raises:
            DisconnectedError: the stream ended or broke.
        """
        proto = await _in_words(self._call.read(), self._address, self._tls)
        if not isinstance(proto, pb.ServerMessage):  # grpc.aio.EOF
            raise await self._why_it_ended()
        return wire.server_message_from_proto(proto), framed_bytes(proto.ByteSize())

    async def _why_it_ended(self) -> SpecwireError:
        code, details = await self._call.code(), await self._call.details()
        if code is not grpc.StatusCode.OK:
            return _explain(code, details or "", self._address, self._tls)
        return DisconnectedError(
            FaultKind.UNAVAILABLE, f"The verifier at {self._address} ended the session.", "Try again."
        )

    async def close(self, timeout_s: float) -> None:
        """Ends the session on the verifier, or at least the stream."""
        try:
            async with asyncio.timeout(timeout_s):
                await self.write(Close())
                await self._call.done_writing()
                while isinstance(await self._call.read(), pb.ServerMessage):
                    pass
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError, SpecwireError, TimeoutError):
            pass  # it is gone already, or not worth more waiting
        finally:
            self._call.cancel()
            # That does nothing once a write has failed. What the verifier said before it ended the stream may
            # still be unread, and as long as it is, gRPC keeps the call and its connection.
            self._call._cython_call.cancel("closed")  # type: ignore[attr-defined]


def _stub(channel: grpc.aio.Channel) -> Any:
    return pb_grpc.VerifierStub(channel)  # type: ignore[no-untyped-call]


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def framed_bytes(num_bytes: int) -> int:
    """Bytes of a message on the connection: gRPC's prefix of 5, and 9 for each HTTP/2 DATA frame.

    Not counted: headers at the start of a stream (about 300 bytes once), window updates, TLS records,
    TCP and IP.
    """
    num_bytes += 5
    return num_bytes + 9 * -(-num_bytes // _FRAME_BYTES)


async def _in_words(awaitable: Awaitable[Any], address: str, tls: Tls | None) -> Any:
    """Awaits a gRPC operation; an error becomes SpecwireError, `DisconnectedError` where trying again, or
    another address, may help."""
    try:
        return await awaitable
    except grpc.aio.AioRpcError as error:
        raise _explain(error.code(), error.details() or "", address, tls) from error
    except asyncio.InvalidStateError as error:  # writing to a stream that has ended
        raise DisconnectedError(
            FaultKind.UNAVAILABLE, f"The connection to the verifier at {address} was lost.", "Try again."
        ) from error
    except grpc.aio.UsageError as error:  # the channel was closed under it
        raise DisconnectedError(
            FaultKind.UNAVAILABLE, f"The connection to the verifier at {address} was closed.", "Try again."
        ) from error


def _explain(code: grpc.StatusCode, details: str, address: str, tls: Tls | None) -> SpecwireError:
    """A gRPC status as one sentence on what is wrong and one on what to do."""
    match code:
        case grpc.StatusCode.UNAVAILABLE:
            return _unreachable(details, address, tls)
        case grpc.StatusCode.UNAUTHENTICATED:
            return SpecwireError(
                FaultKind.UNAUTHENTICATED,
                details or f"The verifier at {address} does not know you.",
                "Give a valid token with --token or SPECWIRE_TOKEN.",
            )
        case grpc.StatusCode.PERMISSION_DENIED:
            return SpecwireError(
                FaultKind.NOT_ALLOWED, details or f"The verifier at {address} does not allow this.", ""
            )
        case grpc.StatusCode.UNIMPLEMENTED:
            return DisconnectedError(
                FaultKind.PROTOCOL_MISMATCH,
                f"Something answers at {address}, but it is not a Specwire verifier of this version.",
                "Check the address and the versions of both sides.",
            )
        case grpc.StatusCode.RESOURCE_EXHAUSTED:
            return SpecwireError(
                FaultKind.BAD_REQUEST,
                f"A message was too large for the connection to {address} ({details}).",
                "Use the lattice codec, or a smaller --k.",
            )
        case grpc.StatusCode.DEADLINE_EXCEEDED:
            return DisconnectedError(
                FaultKind.TIMED_OUT,
                f"The verifier at {address} did not answer in time.",
                "Try again, or check whether it is overloaded.",
            )
        case _:
            return DisconnectedError(
                FaultKind.UNAVAILABLE,
                f"The connection to the verifier at {address} failed ({code.name.lower()}: {details}).",
                "Try again.",
            )


def _unreachable(details: str, address: str, tls: Tls | None) -> DisconnectedError:
    """PROTOCOL_MISMATCH where waiting cannot help, because something else is at that address."""
    lowered = details.lower()
    if tls is not None and "certificate_verify_failed" in lowered:
        return DisconnectedError(
            FaultKind.PROTOCOL_MISMATCH,
            f"The certificate of the verifier at {address} is not trusted here.",
            "Give the authority that signed it with --tls-ca.",
        )
    if tls is not None and ("wrong_version_number" in lowered or "handshake" in lowered):
        return DisconnectedError(
            FaultKind.PROTOCOL_MISMATCH,
            f"What answers at {address} does not speak TLS with us.",
            "If the verifier was started with --insecure, give --insecure here too.",
        )
    if "dns" in lowered or "name resolution" in lowered or "hostname lookup" in lowered:
        return DisconnectedError(
            FaultKind.UNAVAILABLE,
            f"The host name in {address} is unknown.",
            "Check the spelling and the network connection.",
        )
    if "failed to connect" in lowered and "socket closed" in lowered:
        return DisconnectedError(
            FaultKind.UNAVAILABLE,
            f"What answers at {address} closes the connection at once.",
            "If the verifier uses TLS, leave out --insecure."
            if tls is None
            else "If the verifier asks for client certificates, give --tls-cert and --tls-key.",
        )
    if "failed parsing http/2" in lowered:
        return DisconnectedError(
            FaultKind.PROTOCOL_MISMATCH,
            f"Something answers at {address}, but it is not a Specwire verifier.",
            "Check the address and the port.",
        )
    if "failed to connect" in lowered or "refused" in lowered:
        return DisconnectedError(
            FaultKind.UNAVAILABLE,
            f"Nothing answers at {address}.",
            "Is the verifier running? Start it with `cloud-verifier serve`, or check the address.",
        )
    return DisconnectedError(
        FaultKind.UNAVAILABLE,
        f"The connection to the verifier at {address} was lost.",
        "Check whether the verifier still runs, then try again.",
    )
