"""One client's stream: bytes in, checked messages to the engine, replies out, all of it bounded."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from cloud_verifier.admission import check_block, check_open, check_step, max_message_bytes
from cloud_verifier.auth import Identity
from cloud_verifier.engine import Engine
from cloud_verifier.quotas import Meter
from shared import wire
from shared.faults import FaultKind, SpecwireError
from shared.messages import (
    Append,
    ClientMessage,
    Close,
    Description,
    DraftBlock,
    Generate,
    Open,
    Tokens,
    Verdict,
)
from shared.pb.specwire.v1 import verifier_pb2 as pb

log = logging.getLogger(__name__)

MAX_UNREAD = 1024
"""Messages that may wait for a client that does not read; then its stream is cut."""


@dataclass(frozen=True, slots=True)
class ServicePolicy:
    """Args:
    open_seconds: a stream must say what it wants within so long.
    on_bytes: called with direction ("up" or "down"), codec and size of every message.
    decode_prompt: token ids to text, to log prompts; None keeps them out of the log.
    """

    open_seconds: float = 20.0
    on_bytes: Callable[[str, str, int], None] | None = None
    decode_prompt: Callable[[tuple[int, ...]], str] | None = None


class Outbox:
    """Messages on their way from the engine's thread to one stream, and how many steps they still owe."""

    def __init__(self, on_overflow: Callable[[], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[wire.ServerMessage | None] = asyncio.Queue()
        self._on_overflow = on_overflow
        self._closed = False
        self._half_closed = False
        self.num_unanswered = 0

    def put(self, message: wire.ServerMessage) -> None:
        """From any thread. A fault is the last message of a stream."""
        with contextlib.suppress(RuntimeError):  # the loop has ended, and with it the stream
            self._loop.call_soon_threadsafe(self._put, message)

    def _put(self, message: wire.ServerMessage) -> None:
        if self._closed:
            return
        if self._queue.qsize() >= MAX_UNREAD:
            self.close()
            self._on_overflow()
            return
        self._queue.put_nowait(message)
        if isinstance(message, Verdict) or (isinstance(message, Tokens) and message.last):
            self.num_unanswered -= 1
        if isinstance(message, SpecwireError) or (self._half_closed and self.num_unanswered <= 0):
            self.close()

    def half_close(self) -> None:
        """The client sends nothing more: what it is owed still goes out."""
        self._half_closed = True
        if self.num_unanswered <= 0:
            self.close()

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._queue.put_nowait(None)

    async def messages(self) -> AsyncIterator[wire.ServerMessage]:
        while (message := await self._queue.get()) is not None:
            yield message


class Stream:
    """Reads one client's messages and writes its replies."""

    def __init__(
        self,
        engine: Engine,
        offer: Description,
        policy: ServicePolicy,
        meter: Meter,
        identity: Identity,
        context: Any,
    ) -> None:
        self._offer = offer
        self._policy = policy
        self._meter = meter
        self.identity = identity
        self._context = context
        self._cutting: asyncio.Task[None] | None = None
        self._revoked = False
        self._outbox = Outbox(self._cut)
        self._opened: Open | None = None
        self._max_bytes = max_message_bytes(None, offer)
        self.ticket = engine.ticket(identity, self._outbox.put)

    async def replies(self) -> AsyncIterator[bytes]:
        """Serialised messages until the stream ends."""
        async for message in self._outbox.messages():
            proto = wire.server_message_to_proto(message)
            wire.pad(proto, self._opened.pad_bytes if self._opened else 0)
            frame = proto.SerializeToString()
            self._count("down", len(frame))
            try:
                num_tokens = len(message.tokens) if isinstance(message, Tokens) else 0
                self._meter.charge(self.identity, num_tokens=num_tokens, num_bytes=len(frame))
            except SpecwireError as error:
                self.ticket.fail(error)
            yield frame

    async def read(self, requests: AsyncIterator[bytes]) -> None:
        """Takes messages until the client has sent its last, and ends the session when one is wrong."""
        try:
            async with asyncio.timeout(self._policy.open_seconds) as deadline:
                async for frame in requests:
                    message = self._parse(frame)
                    if self._opened is None:
                        self._opened = self._open(message)
                        deadline.reschedule(None)
                    elif isinstance(message, Close):
                        self.ticket.close()
                        self._outbox.close()
                        return
                    else:
                        self._opened = self._advance(message, self._opened)
            self._outbox.half_close()
        except SpecwireError as error:
            self.ticket.fail(error)
        except TimeoutError:
            self.ticket.fail(
                SpecwireError(
                    FaultKind.TIMED_OUT,
                    f"No session was opened within {self._policy.open_seconds:g} s.",
                    "Open a session as soon as the stream is there.",
                )
            )
        except grpc.aio.AbortError:  # cut from this side
            return
        except Exception:
            log.exception("a stream failed", extra={"owner": self.identity.name})
            self.ticket.fail(
                SpecwireError(FaultKind.INTERNAL, "The verifier failed on this stream.", "Try again.")
            )

    def revoke(self) -> None:
        """Ends the session because its identity is no longer let in; asked again, cuts a client that does not
        read as far as that."""
        if self._revoked:
            if self._cutting is None:
                self._cut()
            return
        self._revoked = True
        self.ticket.fail(
            SpecwireError(
                FaultKind.UNAUTHENTICATED,
                "The token or certificate of this session is no longer accepted.",
                "Ask the operator for a new one.",
            )
        )

    def _parse(self, frame: bytes) -> ClientMessage:
        self._count("up", len(frame))
        if len(frame) > self._max_bytes:
            raise SpecwireError(
                FaultKind.BAD_REQUEST,
                f"A message of {len(frame)} bytes came; this session may send {self._max_bytes} at most.",
                "Use the lattice codec, or smaller blocks.",
            )
        try:
            message = wire.client_message_from_proto(pb.ClientMessage.FromString(frame))
        except DecodeError as error:
            raise SpecwireError(
                FaultKind.BAD_REQUEST,
                "A message came that is no message of this protocol.",
                "Use a client of the same version as the verifier.",
            ) from error
        num_tokens = 0 if isinstance(message, Generate | Close) else len(message.tokens)
        self._meter.charge(self.identity, num_tokens=num_tokens, num_bytes=len(frame))
        return message

    def _open(self, message: ClientMessage) -> Open:
        if not isinstance(message, Open):
            raise SpecwireError(
                FaultKind.BAD_REQUEST,
                f"The first message was {type(message).__name__}, not Open.",
                "Open a session first.",
            )
        opened = check_open(message, self._offer)
        self._max_bytes = max_message_bytes(opened, self._offer)
        if self._policy.decode_prompt is not None:
            log.info(
                "prompt: %s", self._policy.decode_prompt(opened.tokens), extra={"owner": self.identity.name}
            )
        self.ticket.open(opened)
        return opened

    def _advance(self, message: ClientMessage, opened: Open) -> Open:
        """Hands a step to the engine; returns the request as it stands after it."""
        if isinstance(message, Open | Close):
            raise SpecwireError(
                FaultKind.BAD_REQUEST,
                "A second Open came on the same stream.",
                "Use one stream for each session.",
            )
        if self._outbox.num_unanswered >= self._offer.limits.max_in_flight:
            raise SpecwireError(
                FaultKind.BAD_REQUEST,
                f"{self._outbox.num_unanswered} steps already wait for a verdict.",
                "Wait for a verdict before sending more.",
                step=message.step,
            )
        q = None
        if isinstance(message, DraftBlock):
            q = check_block(message, opened, self._offer)
        else:
            check_step(message, self._offer)
            if isinstance(message, Append) and message.sampling is not None:
                opened = replace(opened, sampling=message.sampling)
        self._outbox.num_unanswered += 1
        self.ticket.submit(message, q)
        return opened

    def _cut(self) -> None:
        """Ends the RPC of a client that does not read; the session can be resumed."""
        log.warning("a client reads too slowly", extra={"owner": self.identity.name})
        self.ticket.detach()
        self._cutting = asyncio.create_task(self._abort())

    async def _abort(self) -> None:
        with contextlib.suppress(grpc.aio.AbortError):
            await self._context.abort(
                grpc.StatusCode.UNAVAILABLE, "Replies were not read; resume the session."
            )

    def _count(self, direction: str, num_bytes: int) -> None:
        if self._policy.on_bytes is not None:
            self._policy.on_bytes(direction, self._opened.codec if self._opened else "", num_bytes)
