"""One session on a verifier: steps, the mirror of the committed prefix, and going on after a lost stream.

The verifier owns the committed prefix; `RemoteSession.committed` mirrors it, token by token. When the
stream is lost the session is resumed where it was or, when no verifier knows it any more, opened anew
with everything committed. What had not been answered is sent again: every random draw is a function
of the seed and of positions, so the same blocks get the same verdicts.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import secrets
import time
from collections import deque
from dataclasses import dataclass, replace
from types import TracebackType
from typing import TYPE_CHECKING, Self

from shared.faults import FaultKind, SpecwireError
from shared.messages import (
    Append,
    DraftBlock,
    FinishReason,
    Generate,
    Notice,
    NoticeKind,
    Open,
    Opened,
    Tokens,
    Verdict,
)

if TYPE_CHECKING:
    from edge_client.connection import GrpcStream, Verifier
    from shared.wire import ServerMessage

Request = DraftBlock | Append | Generate

_BACKOFF_S, _MAX_BACKOFF_S = 0.1, 5.0
# The verifier has forgotten the session, but takes one that begins with the same text.
_FORGOTTEN = frozenset({FaultKind.SESSION_UNKNOWN, FaultKind.TIMED_OUT})
_ELSEWHERE = frozenset({FaultKind.DRAINING, FaultKind.OVERLOADED})


class DisconnectedError(SpecwireError):
    """The stream is gone; the session need not be."""


class UnansweredError(SpecwireError):
    """The verifier is there but silent; waiting longer or going elsewhere is a person's decision."""


@dataclass(frozen=True, slots=True)
class Reply:
    """What came back for `request`; `tokens` are the newly committed ones.

    `round_trip_s` counts from the request's first sending.
    """

    request: Request
    answer: Verdict | Tokens
    tokens: tuple[int, ...]
    round_trip_s: float
    num_bytes: int


@dataclass(slots=True)
class Traffic:
    """Bytes of messages with their framing (`connection.framed_bytes`), re-sent ones included."""

    up_bytes: int = 0
    down_bytes: int = 0
    wasted_up_bytes: int = 0  # blocks that were stale, or their answer stopped, before they were judged
    num_stale_blocks: int = 0
    num_reconnects: int = 0

    def since(self, before: Traffic) -> Traffic:
        """What came on top of `before`."""
        return Traffic(*(getattr(self, name) - getattr(before, name) for name in self.__dataclass_fields__))


@dataclass(slots=True)
class _Pending:
    """A request without an answer. `num_received`: tokens that a Generate has already given; `wasted`: a
    block whose verdict can no longer count."""

    request: Request
    sent_at: float = 0.0
    num_bytes: int = 0
    num_received: int = 0
    written: bool = False
    wasted: bool = False


class RemoteSession:
    """A session as an async context manager. One task sends, one (it may be another) receives.

    Attributes:
        committed: the mirror of the verifier's prefix, prompt included.
        finish_reason: of the current answer.
        generation: rises whenever a reply made everything void that was drafted after its block.
        num_given_up: blocks that are void, while the verifier has not yet said that it dropped them.
    """

    def __init__(self, verifier: Verifier, request: Open) -> None:
        self.committed = list(request.tokens)
        self.finish_reason = FinishReason.NONE
        self.traffic = Traffic()
        self.max_block = request.max_block
        self.generation = 0
        self.num_given_up = 0
        self._verifier = verifier
        self._request = request
        self._answer_start = request.prompt_len or len(request.tokens)
        self._key = secrets.token_hex(8)
        self._address = 0
        self._stream: GrpcStream | None = None
        self._session_id = ""
        self._epoch = 0
        self._next_step = 1
        self._pending: deque[_Pending] = deque()
        self._ready: deque[Reply] = deque()
        self._leaving = False
        self._lock = asyncio.Lock()
        self._deadline: asyncio.Timeout | None = None

    async def __aenter__(self) -> Self:
        """Connects and sends Open, but does not wait for the answer: the first block may follow at once.

        Raises:
            SpecwireError: no address answers.
        """
        await self._dial()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._drop_stream()

    @property
    def num_unanswered(self) -> int:
        return len(self._pending)

    @property
    def address(self) -> str:
        return self._verifier.addresses[self._address]

    async def send(self, request: Request) -> int:
        """Sends a request as the next step of the current epoch (its own two numbers are ignored).

        The numbers are given before anything is awaited, so a caller that has just looked at `generation`
        knows what its request belongs to. Returns the bytes it took. A lost stream is no error here:
        `receive` mends it and sends again.
        """
        pending = _Pending(_numbered(request, self._next_step, self._epoch), time.perf_counter())
        self._next_step += 1
        self._pending.append(pending)
        if self._deadline is not None and not self._deadline.expired():
            now = asyncio.get_running_loop().time()
            self._deadline.reschedule(now + self._verifier.patience.answer)
        async with self._lock:
            if self._leaving and self._pending and self._pending[0] is pending:
                await self._move()
            if not self._leaving and not pending.written:
                await self._write(pending)
            return pending.num_bytes

    async def receive(self) -> Reply:
        """The next answer, in the order of the requests; stale blocks are not reported.

        Raises:
            SpecwireError: a fault of this session, or no verifier came back in time.
        """
        while True:
            if self._ready:
                return self._ready.popleft()
            stream = self._stream
            try:
                message, num_bytes = await self._read()
                if self._stream is not stream:
                    continue  # the last words of a verifier that `send` has left meanwhile
                reply = self._take(message, num_bytes)
            except SpecwireError as error:
                if not _can_go_on(error):
                    raise
                await self._reconnect(error, stream)
                continue
            if self._leaving and self._pending and not any(pending.written for pending in self._pending):
                async with self._lock:
                    await self._move()
            if reply is not None:
                return reply

    # -- messages ------------------------------------------------------------------------------

    async def _write(self, pending: _Pending) -> None:
        if self._stream is None:
            return
        # Or on its way: it may be given up, and answered as stale, before this returns.
        pending.written = True
        try:
            pending.num_bytes = await self._stream.write(pending.request)
        except DisconnectedError:
            pending.written = False
            return  # whoever receives finds out, and sends it again
        self.traffic.up_bytes += pending.num_bytes
        if pending.wasted:
            self.traffic.wasted_up_bytes += pending.num_bytes

    async def _read(self) -> tuple[ServerMessage, int]:
        if self._stream is None:
            raise DisconnectedError(FaultKind.UNAVAILABLE, "The session is not connected.", "Try again.")
        patience = self._verifier.patience.answer
        try:
            async with asyncio.timeout(patience if self._pending else None) as self._deadline:
                message, num_bytes = await self._stream.read()
        except TimeoutError:
            raise UnansweredError(
                FaultKind.TIMED_OUT,
                f"The verifier at {self.address} has not answered for {patience:g} s.",
                "Try again, or check whether it is overloaded.",
            ) from None
        finally:
            self._deadline = None
        self.traffic.down_bytes += num_bytes
        if isinstance(message, SpecwireError):
            raise message
        return message, num_bytes

    def _take(self, message: ServerMessage, num_bytes: int) -> Reply | None:
        match message:
            case Opened():
                self._session_id = message.session_id
                self.max_block = message.max_block
                self.finish_reason = message.finish_reason
            case Notice():
                self._verifier.notify(message.text)
                self._leaving = message.kind is NoticeKind.DRAINING and len(self._verifier.addresses) > 1
            case Verdict() | Tokens():
                return self._answer(message, num_bytes)
        return None

    def _answer(self, answer: Verdict | Tokens, num_bytes: int) -> Reply | None:
        if not self._pending or answer.step < self._pending[0].request.step:
            self.num_given_up = max(self.num_given_up - 1, 0)
            return None  # a block that was given up when its epoch ended
        pending = self._pending[0]
        request = pending.request
        if answer.step != request.step:
            raise _diverged(f"step {answer.step} was answered before step {request.step}")
        tokens = self._new_tokens(request, answer)
        if isinstance(answer, Verdict) or answer.last:
            self._pending.popleft()
        else:
            pending.num_received += len(tokens)
        self.committed.extend(tokens)
        if len(self.committed) != answer.committed_len:
            raise _diverged(f"{answer.committed_len} tokens are committed there, {len(self.committed)} here")
        if isinstance(request, Append):
            self._start_answer(request)
            tokens = ()
        self.finish_reason = answer.finish_reason
        if answer.epoch > self._epoch or answer.finish_reason is not FinishReason.NONE:
            self._epoch = answer.epoch
            self.give_up_pending()
        return Reply(request, answer, tokens, time.perf_counter() - pending.sent_at, num_bytes)

    def _new_tokens(self, request: Request, answer: Verdict | Tokens) -> tuple[int, ...]:
        """What `answer` commits beyond the mirror; a repeated part of a Generate is cut off."""
        if isinstance(answer, Tokens):
            if isinstance(request, Append):
                return request.tokens
            start = answer.committed_len - len(answer.tokens)
            return answer.tokens[max(len(self.committed) - start, 0) :]
        if not isinstance(request, DraftBlock) or answer.stale or request.base_len != len(self.committed):
            raise _diverged(f"step {answer.step} got a verdict that does not belong to it")
        return request.tokens[: answer.num_accepted] + answer.tokens

    def _start_answer(self, append: Append) -> None:
        self._answer_start = len(self.committed)
        self._request = replace(
            self._request,
            max_new_tokens=append.max_new_tokens,
            sampling=append.sampling or self._request.sampling,
        )

    def give_up_pending(self) -> None:
        """What an epoch that has ended, or an answer that is stopped, leaves behind; the verifier drops it
        too, and its replies are ignored."""
        for pending in self._pending:
            if isinstance(pending.request, DraftBlock):
                self.traffic.wasted_up_bytes += pending.num_bytes
                self.traffic.num_stale_blocks += 1
                pending.wasted = True
            self.num_given_up += pending.written
        self._pending.clear()
        self.generation += 1

    # -- streams -------------------------------------------------------------------------------

    async def _dial(self) -> None:
        """First connection: every address once, so that a person hears within seconds that none answers."""
        num_addresses = len(self._verifier.addresses)
        for turn in range(num_addresses + 1):
            stream: GrpcStream | None = None
            try:
                stream = await self._verifier.connect(self.address, self._key)
                self.traffic.up_bytes += await stream.write(self._request)
            except BaseException as error:
                if stream is not None:
                    self._verifier.close_later(stream)
                if not isinstance(error, DisconnectedError) or turn >= num_addresses - (stream is None):
                    raise
                # A connection from earlier may have died unnoticed; a new one gets another chance there, once
                # gRPC has had time to notice.
                if stream is None or turn:
                    self._next_address()
                else:
                    await asyncio.sleep(_BACKOFF_S)
                continue
            self._stream = stream
            return

    async def _reconnect(self, cause: SpecwireError, lost: GrpcStream | None) -> None:
        """Back-off with full jitter over all addresses, until one takes the session or patience ends.

        Nothing is to be done where `send` has left the stream that was lost for another one.
        """
        async with self._lock:
            if self._stream is not lost:
                return
            was_open = bool(self._session_id)
            patience = self._verifier.patience.reconnect
            deadline = time.monotonic() + patience
            for attempt in itertools.count():
                self._drop_stream()
                delay = random.uniform(0.0, min(_MAX_BACKOFF_S, _BACKOFF_S * 2 ** min(attempt, 10)))
                if _is_forgotten(cause):
                    self._session_id, delay = "", 0.0
                elif attempt or cause.kind in _ELSEWHERE:
                    self._next_address()
                if attempt >= len(self._verifier.addresses) - 1:
                    delay = max(delay, cause.retry_after_ms / 1e3)
                never_opened = not was_open and cause.kind is FaultKind.UNAVAILABLE
                if time.monotonic() + delay > deadline or (
                    never_opened and attempt > len(self._verifier.addresses)
                ):
                    raise cause
                if attempt == len(self._verifier.addresses) and not never_opened:
                    self._verifier.notify(f"{cause.text} Trying again for up to {patience:g} s.")
                await asyncio.sleep(delay)
                try:
                    self._adopt(*await self._attach(self.address))
                except SpecwireError as error:
                    if not _can_go_on(error):
                        raise
                    cause = error
                    continue
                self.traffic.num_reconnects += 1
                await self._write_all()
                return

    async def _move(self) -> None:
        """Leaves a verifier that is draining for another one; stays while no other takes the session."""
        self._leaving = False
        here = self._address
        session_id, self._session_id = self._session_id, ""
        for _ in range(len(self._verifier.addresses) - 1):
            self._next_address()
            try:
                stream, opened = await self._attach(self.address)
            except SpecwireError:
                continue
            self._drop_stream()
            self._adopt(stream, opened)
            self.traffic.num_reconnects += 1
            break
        else:
            self._address, self._session_id = here, session_id
        await self._write_all()

    async def _attach(self, address: str) -> tuple[GrpcStream, Opened]:
        """A stream to `address` that has this session, resumed or opened anew."""
        stream = await self._verifier.connect(address, self._key)
        try:
            self.traffic.up_bytes += await stream.write(self._open_request())
            async with asyncio.timeout(self._verifier.patience.answer):
                while True:
                    message, num_bytes = await stream.read()
                    self.traffic.down_bytes += num_bytes
                    if isinstance(message, SpecwireError):
                        raise message
                    if isinstance(message, Opened):
                        return stream, message
        except TimeoutError:
            self._verifier.close_later(stream)
            raise DisconnectedError(
                FaultKind.TIMED_OUT, f"The verifier at {address} did not open the session.", "Try again."
            ) from None
        except BaseException:
            self._verifier.close_later(stream)
            raise

    def _open_request(self) -> Open:
        if self._session_id:
            return replace(
                self._request, tokens=(), session_id=self._session_id, committed_len=len(self.committed)
            )
        request = replace(self._request, tokens=tuple(self.committed), prompt_len=self._answer_start)
        first = self._pending[0].request if self._pending else None
        if isinstance(first, Append):  # the new session simply begins after it
            tokens = request.tokens + first.tokens
            request = replace(
                request,
                tokens=tokens,
                prompt_len=len(tokens),
                max_new_tokens=first.max_new_tokens,
                sampling=first.sampling or request.sampling,
            )
        return request

    def _adopt(self, stream: GrpcStream, opened: Opened) -> None:
        """Makes what is pending fit the session as the verifier has it now."""
        self._stream, self.num_given_up = stream, 0
        resumed = bool(self._session_id)
        self._session_id, self.max_block = opened.session_id, opened.max_block
        step = opened.next_step
        if resumed:
            # Steps that were answered there are sent again under their own number, for the replay.
            step = min(step, self._pending[0].request.step) if self._pending else step
            self._catch_up(opened)
        else:
            self._epoch = 0
            self._skip_append(opened)
            self.finish_reason = opened.finish_reason
        for pending in self._pending:
            pending.request = _numbered(pending.request, step, self._epoch)
            pending.written = False
            step += 1
        self._next_step = max(step, opened.next_step)

    def _catch_up(self, opened: Opened) -> None:
        """Takes over what a Generate wrote before the stream was lost."""
        first = self._pending[0] if self._pending else None
        if first is None or not isinstance(first.request, Generate) or first.request.step < opened.next_step:
            return
        self._rest_of_generate(first, opened.tokens, opened.finish_reason)

    def _rest_of_generate(self, first: _Pending, tokens: tuple[int, ...], reason: FinishReason) -> None:
        request = first.request
        if not isinstance(request, Generate):
            return
        self.committed.extend(tokens)
        first.num_received += len(tokens)
        rest = request.num_tokens - first.num_received
        last = reason is not FinishReason.NONE or rest <= 0
        if tokens or last:
            answer = Tokens(request.step, self._epoch, tokens, len(self.committed), reason, last)
            self._ready.append(Reply(request, answer, tokens, time.perf_counter() - first.sent_at, 0))
        self.finish_reason = reason
        if last:
            self._pending.popleft()
        else:
            first.request = replace(request, base_len=len(self.committed), num_tokens=rest)
            first.num_received = 0

    def _skip_append(self, opened: Opened) -> None:
        """The new session was opened with a pending Append's tokens: that is its answer."""
        first = self._pending[0] if self._pending else None
        if first is None:
            return
        if isinstance(first.request, Append):
            self._pending.popleft()
            self.committed.extend(first.request.tokens)
            self._start_answer(first.request)
            answer = Tokens(first.request.step, 0, (), len(self.committed))
            round_trip_s = time.perf_counter() - first.sent_at
            self._ready.append(Reply(first.request, answer, (), round_trip_s, 0))
        else:
            self._rest_of_generate(first, (), opened.finish_reason)

    async def _write_all(self) -> None:
        for pending in list(self._pending):  # `send` may add one meanwhile, and then writes it itself
            if not pending.written:
                await self._write(pending)

    def _drop_stream(self) -> None:
        if self._stream is not None:
            self._verifier.close_later(self._stream)
            self._stream = None

    def _next_address(self) -> None:
        self._address = (self._address + 1) % len(self._verifier.addresses)


def _numbered(request: Request, step: int, epoch: int) -> Request:
    return replace(request, step=step, epoch=epoch)


def _can_go_on(error: SpecwireError) -> bool:
    return isinstance(error, DisconnectedError) or _is_forgotten(error) or error.kind in _ELSEWHERE


def _is_forgotten(error: SpecwireError) -> bool:
    return error.kind in _FORGOTTEN and not isinstance(error, DisconnectedError | UnansweredError)


def _diverged(what: str) -> SpecwireError:
    return SpecwireError(
        FaultKind.INTERNAL,
        f"Client and verifier disagree about the session: {what}.",
        "Start the answer again; if it happens again, check that both sides have the same version.",
    )
