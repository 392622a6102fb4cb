"""The loop: draft a block, send it, apply the verdict; with blocks in flight while the next is drafted.

`Conversation.answer` is what a terminal, an endpoint or an experiment calls.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import AsyncGenerator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Self

from edge_client.connection import Verifier
from edge_client.controller import Controller, Plan
from edge_client.drafting import Block, Drafter, Model, NoModel
from edge_client.results import Counts, Emission, Origin, Result, Round, TimeShare
from edge_client.session import RemoteSession, Reply, Traffic
from shared.codecs import DEFAULT_CODEC, get_codec
from shared.faults import FaultKind, SpecwireError
from shared.messages import (
    Append,
    Description,
    DraftBlock,
    FinishReason,
    Generate,
    Open,
    SamplingParams,
    TokenizerIdentity,
    Verdict,
)


@dataclass(frozen=True, slots=True)
class SessionSettings:
    """What stays the same for all answers of a conversation."""

    tokenizer: TokenizerIdentity
    eos_ids: tuple[int, ...]
    codec: str = DEFAULT_CODEC
    verification: str = "token"
    max_block: int = 32
    logprobs: int = 0
    client: str = ""


class Conversation:
    """Answers on one draft model and one verifier, reusing what both already know of the text.

    An async context manager. `model=None` lets the verifier write alone. The draft runs in `worker`, a
    thread of its own unless several conversations share one.
    """

    def __init__(
        self,
        verifier: Verifier,
        description: Description,
        model: Model | None,
        settings: SessionSettings,
        worker: ThreadPoolExecutor | None = None,
    ) -> None:
        self._verifier = verifier
        self._description = description
        self._settings = settings
        coupled = settings.verification == "coupled"
        # Coupled verification reads no distributions, so none are sent.
        self._codec = "tokens" if coupled and "tokens" in description.codecs else settings.codec
        self._drafter = Drafter(
            model or NoModel(),
            get_codec(self._codec),
            settings.tokenizer.size,
            settings.eos_ids,
            coupled=coupled,
        )
        self._own_worker = ThreadPoolExecutor(1, "specwire-draft") if worker is None else None
        self._worker = worker or self._own_worker
        self._session: RemoteSession | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.reset()
        if self._own_worker is not None:
            self._own_worker.shutdown()

    @property
    def committed(self) -> tuple[int, ...]:
        """What the verifier has fixed so far, prompts included."""
        return tuple(self._session.committed) if self._session is not None else ()

    @property
    def traffic(self) -> Traffic | None:
        """What the session has sent and received so far, counted on; None without a session."""
        return self._session.traffic if self._session is not None else None

    async def reset(self) -> None:
        """Ends the session on the verifier."""
        session, self._session = self._session, None
        if session is not None:
            await session.__aexit__(None, None, None)

    async def answer(
        self,
        tokens: Sequence[int],
        *,
        sampling: SamplingParams,
        max_new_tokens: int,
        controller: Controller,
    ) -> AsyncGenerator[Emission | Result]:
        """Continues `tokens`; yields emissions as verdicts come, and the result last.

        When `tokens` begin with everything that is committed, only what is new is sent and computed.
        Close the generator (or cancel its task) to stop: the session ends and the verifier frees it.

        Raises:
            SpecwireError: with what is wrong and what to do.
        """
        started = time.perf_counter()
        limit = min(len(tokens) + max_new_tokens, self._description.limits.max_context)
        if limit <= len(tokens):
            raise SpecwireError(
                FaultKind.CONTEXT_EXCEEDED,
                f"{len(tokens)} tokens leave no room for an answer in a context of "
                f"{self._description.limits.max_context}.",
                "Shorten the prompt or the conversation.",
            )
        finished = False
        try:
            session, before = await self._begin(tuple(tokens), sampling, max_new_tokens)
            self._drafter.begin(tokens, sampling, limit)
            loop = _Loop(session, before, self._drafter, self._worker, controller, self._description, limit)
            try:
                async for emission in loop.rounds(started):
                    yield emission
            finally:
                await loop.stop()
            finished = True
            yield loop.result(started)
        finally:
            if not finished:
                await self.reset()

    async def _begin(
        self, tokens: tuple[int, ...], sampling: SamplingParams, max_new_tokens: int
    ) -> tuple[RemoteSession, Traffic]:
        """The session, begun or continued, and its traffic before this answer."""
        session = self._session
        if session is not None:
            held = len(session.committed)
            if held < len(tokens) and tokens[:held] == tuple(session.committed):
                before = replace(session.traffic)
                await session.send(Append(0, 0, held, tokens[held:], max_new_tokens, sampling))
                return session, before
            await self.reset()
        settings = self._settings
        session = self._verifier.open_session(
            Open(
                tokenizer=settings.tokenizer,
                tokens=tokens,
                sampling=sampling,
                codec=self._codec,
                verification=settings.verification,
                max_block=min(settings.max_block, self._description.limits.max_block),
                max_new_tokens=max_new_tokens,
                eos_ids=settings.eos_ids,
                logprobs=settings.logprobs,
                client=settings.client,
            )
        )
        self._session = await session.__aenter__()
        return session, Traffic()


class _Loop:
    """One answer in progress."""

    def __init__(
        self,
        session: RemoteSession,
        before: Traffic,
        drafter: Drafter,
        worker: ThreadPoolExecutor | None,
        controller: Controller,
        description: Description,
        limit: int,
    ) -> None:
        self._session = session
        self._before = before
        self._drafter = drafter
        self._worker = worker
        self._controller = controller
        self._allows_generate = description.allows_generate
        self._max_in_flight = max(description.limits.max_in_flight, 1)
        self._limit = limit
        self._in_flight: deque[Block | None] = deque()  # None: the verifier writes
        self._block_bytes: deque[int] = deque()
        self._generation = session.generation
        self._promised = False  # the last block said that another one follows
        self._stop = threading.Event()
        self._drafting: Future[Block | None] | None = None
        self._receiving: asyncio.Task[Reply] | None = None
        self._last_round = 0.0
        self._send_s = 0.0
        self._finish = FinishReason.NONE
        self._lossy = False
        self._tokens: list[int] = []
        self._counts = Counts()
        self._share = TimeShare()
        self._first_token_s = 0.0

    async def rounds(self, started: float) -> AsyncGenerator[Emission]:
        receiving = self._receive()
        while self._finish is FinishReason.NONE:
            plan = self._controller.plan()
            if not receiving.done() and self._window_is_open(plan):
                await self._send_next(plan)
                continue
            emission = await self._next_emission(receiving)
            if self._finish is FinishReason.NONE:
                receiving = self._receive()
            if emission is None:
                continue
            self._counts.add(emission)
            self._controller.observe(emission.round)
            self._tokens += emission.tokens
            if emission.tokens:
                self._first_token_s = self._first_token_s or time.perf_counter() - started
                yield emission

    def _window_is_open(self, plan: Plan) -> bool:
        if not self._in_flight:
            return True
        window = 0 if plan.cloud_tokens else min(plan.ahead + 1, self._max_in_flight)
        return self._promised and len(self._in_flight) < window and self._drafter.room() > 0

    async def _send_next(self, plan: Plan) -> None:
        room, remaining = self._drafter.room(), self._limit - len(self._drafter.sequence)
        if (plan.cloud_tokens or not room) and self._allows_generate and not self._in_flight:
            num_tokens = min(plan.cloud_tokens or remaining, remaining)
            await self._send(Generate(0, 0, len(self._drafter.sequence), num_tokens), None)
            return
        if room:
            # The bonus token is the last one, so one less needs drafting.
            num_tokens = min(max(plan.k, 1), self._session.max_block, room, max(remaining - 1, 1))
            started, num_before = time.perf_counter(), len(self._in_flight)
            block = await self._draft(num_tokens)
            if block is None or self._in_vain():
                # A rejection has just come, or the draft cannot go on.
                self._share.draft += time.perf_counter() - started
                return
            block = replace(block, num_before=num_before)
        else:
            block = self._drafter.guess()
        self._share.draft += block.draft_s
        self._share.codec += block.codec_s
        left = self._limit - len(self._drafter.sequence)
        self._promised = plan.ahead > 0 and left > 1 and self._drafter.room() > 0
        await self._send(DraftBlock(0, 0, block.base_len, block.tokens, block.payload, self._promised), block)

    async def _draft(self, num_tokens: int) -> Block | None:
        if self._worker is None:
            raise RuntimeError("the conversation is closed")
        self._drafting = self._worker.submit(self._drafter.draft, num_tokens, self._in_vain)
        return await asyncio.wrap_future(self._drafting)

    async def _send(self, request: DraftBlock | Generate, block: Block | None) -> None:
        started = time.perf_counter()
        self._in_flight.append(block)
        self._block_bytes.append(await self._session.send(request))
        self._send_s += time.perf_counter() - started

    def _receive(self) -> asyncio.Task[Reply]:
        """The next reply as a task, so that it can come while a block is drafted."""
        self._receiving = asyncio.create_task(self._session.receive())
        self._receiving.add_done_callback(self._check_failure)
        return self._receiving

    def _check_failure(self, done: asyncio.Task[Reply]) -> None:
        if done.cancelled() or done.exception() is not None:
            self._stop.set()

    def _in_vain(self) -> bool:
        """Whether what is being drafted can no longer count. Asked from the worker's thread."""
        return self._stop.is_set() or self._session.generation != self._generation

    async def _next_emission(self, receiving: asyncio.Task[Reply]) -> Emission | None:
        """What the next reply commits; None for that to an Append."""
        started = time.perf_counter()
        reply = await receiving
        wait_s = time.perf_counter() - started + self._send_s
        self._send_s = 0.0
        self._share.add_wait(wait_s, reply.answer.timing)
        return None if isinstance(reply.request, Append) else self._apply(reply, wait_s)

    def _apply(self, reply: Reply, wait_s: float) -> Emission:
        block, answer = self._in_flight[0], reply.answer
        num_drafted = num_accepted = 0
        up_bytes = self._block_bytes[0]
        if block is None or not isinstance(answer, Verdict):
            self._drafter.extend(reply.tokens)
            origins = (Origin.CLOUD,) * len(reply.tokens)
            done = not isinstance(answer, Verdict) and answer.last
        else:
            num_drafted, num_accepted, done = len(block.tokens), answer.num_accepted, True
            self._drafter.apply(block, num_accepted, answer.tokens)
            origins = _origins(num_drafted, num_accepted, len(answer.tokens))
            self._lossy |= answer.lossy
        if done:
            self._in_flight.popleft()
            self._block_bytes.popleft()
        if self._session.generation != self._generation:  # this verdict made the rest void
            self._in_flight.clear()
            self._block_bytes.clear()
            self._generation = self._session.generation
        self._finish = answer.finish_reason
        now, last = time.perf_counter(), self._last_round
        self._last_round = now
        done_round = Round(
            num_drafted=num_drafted,
            num_accepted=num_accepted,
            up_bytes=up_bytes if done else 0,
            down_bytes=reply.num_bytes,
            draft_s=block.draft_s if block else 0.0,
            codec_s=block.codec_s if block else 0.0,
            round_trip_s=reply.round_trip_s,
            wait_s=wait_s,
            timing=answer.timing,
            prompt_s=block.prompt_s if block else 0.0,
            num_before=block.num_before if block else 0,
            more=isinstance(reply.request, DraftBlock) and reply.request.more,
            since_last_s=now - last if last else 0.0,
        )
        return Emission(reply.tokens, origins, done_round, answer.logprobs)

    async def stop(self) -> None:
        """Leaves no task and no thread at work on this answer."""
        self._stop.set()
        if self._receiving is not None:
            self._receiving.cancel()
            await asyncio.wait([self._receiving])
        if self._drafting is not None and not self._drafting.done():
            await asyncio.wait([asyncio.wrap_future(self._drafting)])

    def result(self, started: float) -> Result:
        total_s = time.perf_counter() - started
        self._share.close(total_s)
        now, before = self._session.traffic, self._before
        return Result(
            tokens=tuple(self._tokens),
            finish_reason=self._finish,
            counts=self._counts,
            time_share=self._share,
            total_s=total_s,
            first_token_s=self._first_token_s,
            up_bytes=now.up_bytes - before.up_bytes,
            down_bytes=now.down_bytes - before.down_bytes,
            wasted_up_bytes=now.wasted_up_bytes - before.wasted_up_bytes,
            num_stale_blocks=now.num_stale_blocks - before.num_stale_blocks,
            num_reconnects=now.num_reconnects - before.num_reconnects,
            lossy=self._lossy,
        )


def _origins(num_drafted: int, num_accepted: int, num_beyond: int) -> tuple[Origin, ...]:
    first = Origin.BONUS if num_accepted == num_drafted else Origin.RECOVERED
    beyond = (first, *(Origin.SIBLING,) * (num_beyond - 1)) if num_beyond else ()
    return (Origin.ACCEPTED,) * num_accepted + beyond
