"""RPC <-> sessions, nothing else: reads a stream, checks what can be checked without the model, hands
steps to the engine, and writes what comes back."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable

import grpc.aio

from cloud_verifier.admission import check_block, check_open, check_step
from cloud_verifier.auth import Authenticator
from cloud_verifier.engine import Engine, Ticket
from shared import wire
from shared.faults import FaultKind, SpecwireError
from shared.messages import Append, Close, Description, DraftBlock, Generate, Open
from shared.pb.specwire.v1 import verifier_pb2 as pb
from shared.pb.specwire.v1 import verifier_pb2_grpc as pb_grpc

_Context = grpc.aio.ServicerContext[pb.ClientMessage, pb.ServerMessage]

log = logging.getLogger(__name__)


class Outbox:
    """Messages on their way from the engine's thread to one stream."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[pb.ServerMessage | None] = asyncio.Queue()
        self._closed = False

    def put(self, message: wire.ServerMessage) -> None:
        """From any thread. A fault is the last message of a stream."""
        proto = wire.server_message_to_proto(message)
        last = isinstance(message, SpecwireError)
        try:
            self._loop.call_soon_threadsafe(self._put, proto, last)
        except RuntimeError:  # the loop has ended, and with it the stream
            log.debug("a reply came after the end of the server")

    def _put(self, proto: pb.ServerMessage, last: bool) -> None:
        if self._closed:
            return
        self._queue.put_nowait(proto)
        if last:
            self.close()

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._queue.put_nowait(None)

    async def messages(self) -> AsyncIterator[pb.ServerMessage]:
        while (message := await self._queue.get()) is not None:
            yield message


class VerifierService(pb_grpc.VerifierServicer):
    """The gRPC service. `describe` gives the current description, load included."""

    def __init__(
        self, engine: Engine, describe: Callable[[], Description], authenticator: Authenticator
    ) -> None:
        self._engine = engine
        self._describe = describe
        self._authenticator = authenticator

    async def Describe(  # noqa: N802 - the name is the contract's
        self, request: pb.DescribeRequest, context: _Context
    ) -> pb.DescribeResponse:
        await self._identify(context)
        return wire.description_to_proto(self._describe())

    async def Session(  # noqa: N802
        self, requests: AsyncIterator[pb.ClientMessage], context: _Context
    ) -> AsyncIterator[pb.ServerMessage]:
        owner = await self._identify(context)
        outbox = Outbox()
        ticket = self._engine.ticket(owner, outbox.put)
        reader = asyncio.create_task(self._read(requests, ticket, outbox))
        try:
            async for message in outbox.messages():
                yield message
        finally:
            reader.cancel()
            ticket.detach()

    async def _identify(self, context: _Context) -> str:
        try:
            return self._authenticator.identify(
                dict(context.invocation_metadata() or ()), context.auth_context()
            )
        except SpecwireError as error:
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, str(error))
            raise

    async def _read(self, requests: AsyncIterator[pb.ClientMessage], ticket: Ticket, outbox: Outbox) -> None:
        opened: Open | None = None
        try:
            async for proto in requests:
                message = wire.client_message_from_proto(proto)
                if opened is None:
                    opened = self._open(message, ticket)
                else:
                    self._advance(message, opened, ticket)
        except SpecwireError as error:
            ticket.fail(error)
            return
        except asyncio.CancelledError:
            raise
        except Exception:
            log.exception("a stream failed")
            ticket.fail(
                SpecwireError(FaultKind.INTERNAL, "The verifier failed on this stream.", "Try again.")
            )
            return
        outbox.close()

    def _open(self, message: object, ticket: Ticket) -> Open:
        if not isinstance(message, Open):
            raise SpecwireError(
                FaultKind.BAD_REQUEST,
                f"The first message was {type(message).__name__}, not Open.",
                "Open a session first.",
            )
        opened = check_open(message, self._describe())
        ticket.open(opened)
        return opened

    def _advance(self, message: object, opened: Open, ticket: Ticket) -> None:
        match message:
            case DraftBlock():
                ticket.submit(message, check_block(message, opened, self._describe()))
            case Append() | Generate():
                check_step(message, self._describe())
                ticket.submit(message)
            case Close():
                ticket.close()
            case _:
                raise SpecwireError(
                    FaultKind.BAD_REQUEST,
                    "A second Open came on the same stream.",
                    "Use one stream for each session.",
                )
