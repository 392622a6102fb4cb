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
from contextlib import aclosing
from dataclasses import replace
from types import TracebackType
from typing import Self

from edge_client.alone import NOTICE, AloneText, is_lost, write_alone
from edge_client.bridge import Bridge
from edge_client.connection import Verifier
from edge_client.controller import Controller, Plan
from edge_client.drafting import Block, Drafter, Model, NoModel
from edge_client.results import Emission, Loss, Origin, Result, Round, Tally
from edge_client.session import DisconnectedError, RemoteSession, Reply, Traffic
from edge_client.settings import SessionSettings
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
    Verdict,
)


class Conversation:
    """Answers on one draft model and one verifier, reusing what both already know of the text.

    An async context manager. `model=None` lets the verifier write alone. The draft runs in `worker`, a
    thread of its own unless several conversations share one. `description=None` says that no verifier has
    been reached yet: until `meet`, answers are the draft's alone, if the settings allow that.
    """

    def __init__(
        self,
        verifier: Verifier,
        description: Description | None,
        model: Model | None,
        settings: SessionSettings,
        worker: ThreadPoolExecutor | None = None,
    ) -> None:
        self._verifier = verifier
        self._model = model
        self._settings = settings
        self._description: Description | None = None
        self._drafter = self._make_drafter()
        self._alone: AloneText | None = None
        self._owns_worker = worker is None
        self._worker = worker or ThreadPoolExecutor(1, "specwire-draft")
        self._session: RemoteSession | None = None
        if description is not None:
            self.meet(description)

    def _make_drafter(self) -> Drafter:
        settings = self._settings
        codec = get_codec(settings.codec or DEFAULT_CODEC)
        return Drafter(
            self._model or NoModel(),
            codec,
            settings.tokenizer.size,
            settings.eos_ids,
            # Without q nobody can tell how a token was drawn, and payloads have nothing to draw it from.
            coupled=settings.verification == "coupled" or not codec.carries_q,
        )

    def meet(self, description: Description) -> None:
        """A verifier that serves this judges from the next answer on.

        Raises:
            SpecwireError: it offers nothing that is known here, or the settings ask for what is not.
        """
        self._settings = self._settings.agreed(description, drafts=self._model is not None)
        self._description = description
        self._drafter = self._make_drafter()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.reset()
        if self._owns_worker:
            self._worker.shutdown()

    @property
    def has_met(self) -> bool:
        """Whether a verifier has been reached since this conversation was made."""
        return self._description is not None

    @property
    def committed(self) -> tuple[int, ...]:
        """What the verifier has fixed so far, prompts included."""
        return tuple(self._session.committed) if self._session is not None else ()

    @property
    def history(self) -> tuple[int, ...]:
        """What a next turn should extend: all that is committed, or else what the draft ended alone."""
        if self._session is None and self._alone is not None and self._alone.whole:
            return self._alone.tokens
        return self.committed

    @property
    def traffic(self) -> Traffic | None:
        """What the session has sent and received so far, counted on; None without a session."""
        return self._session.traffic if self._session is not None else None

    async def reset(self) -> None:
        """Ends the session on the verifier, and forgets what the draft wrote alone."""
        self._alone = None
        await self._end_session()

    async def _end_session(self) -> None:
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
        tally = Tally(time.perf_counter())
        limit = min(len(tokens) + max_new_tokens, self._max_context)
        if limit <= len(tokens):
            raise SpecwireError(
                FaultKind.CONTEXT_EXCEEDED,
                f"{len(tokens)} tokens leave no room for an answer in a context of {self._max_context}.",
                "Shorten the prompt or the conversation.",
            )
        earlier = self._alone if self._alone is not None and self._alone.is_in(tokens) else None
        self._alone = earlier
        finished = False
        try:
            written = self._write(tuple(tokens), sampling, max_new_tokens, controller, limit, tally)
            async with aclosing(written):
                async for emission in written:
                    if earlier is not None:
                        emission = replace(emission, losses=emission.losses | {Loss.PROMPT})
                    tally.add(emission)
                    if emission.is_edge_only:
                        self._remember_alone(tokens, tally, earlier)
                    if emission.tokens:
                        yield emission
            finished = True
            yield tally.result()
        finally:
            if not finished:
                await self._end_session()

    @property
    def _max_context(self) -> int:
        if self._description is not None:
            return self._description.limits.max_context
        return self._model.max_context if self._model is not None else 0

    def _remember_alone(self, tokens: Sequence[int], tally: Tally, earlier: AloneText | None) -> None:
        num_alone = tally.counts.by_origin[Origin.EDGE_ONLY]
        start = earlier.start if earlier is not None else len(tokens) + len(tally.tokens) - num_alone
        whole = tally.finish is not FinishReason.NONE
        self._alone = AloneText((*tokens, *tally.tokens), start, whole)

    async def _write(
        self,
        tokens: tuple[int, ...],
        sampling: SamplingParams,
        max_new_tokens: int,
        controller: Controller,
        limit: int,
        tally: Tally,
    ) -> AsyncGenerator[Emission]:
        """The answer's emissions, with the verifier and, where that is allowed, without."""
        self._drafter.begin(tokens, sampling, limit)
        try:
            if self._description is None:
                raise DisconnectedError(
                    FaultKind.UNAVAILABLE, "No verifier has been reached yet.", "Try again later."
                )
            session, before = await self._begin(self._description, tokens, sampling, max_new_tokens)
            tally.emulation = self._description.emulation
            loop = _Loop(session, self._drafter, self._worker, controller, self._description, limit, tally)
            try:
                async for emission in loop.rounds():
                    yield emission
            finally:
                await loop.stop()
                tally.traffic = session.traffic.since(before)
        except SpecwireError as lost:
            if not self._settings.edge_only_fallback or self._model is None or not is_lost(lost):
                raise
            await self._end_session()
            # Before a verifier has been met, whoever asked for one has said why there is none.
            self._verifier.notify(f"{lost.text} {NOTICE}" if self.has_met else NOTICE)
            self._drafter.keep(len(tokens) + len(tally.tokens))
            alone = write_alone(self._drafter, self._worker, limit, self._settings.eos_ids, lost)
            async with aclosing(alone):
                async for emission, tally.finish in alone:
                    tally.share.draft += emission.round.draft_s
                    tally.share.codec += emission.round.codec_s
                    yield emission

    async def _begin(
        self,
        description: Description,
        tokens: tuple[int, ...],
        sampling: SamplingParams,
        max_new_tokens: int,
    ) -> tuple[RemoteSession, Traffic]:
        """The session, begun or continued, and its traffic before this answer."""
        session = self._session
        if session is not None:
            held = len(session.committed)
            if held < len(tokens) and tokens[:held] == tuple(session.committed):
                before = replace(session.traffic)
                await session.send(Append(0, 0, held, tokens[held:], max_new_tokens, sampling))
                return session, before
            await self._end_session()
        settings = self._settings
        session = self._verifier.open_session(
            Open(
                tokenizer=settings.tokenizer,
                tokens=tokens,
                sampling=sampling,
                codec=settings.codec,
                verification=settings.verification,
                max_block=min(settings.max_block, description.limits.max_block),
                max_new_tokens=max_new_tokens,
                eos_ids=settings.eos_ids,
                logprobs=settings.logprobs,
                num_siblings=settings.num_siblings,
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
        drafter: Drafter,
        worker: ThreadPoolExecutor,
        controller: Controller,
        description: Description,
        limit: int,
        tally: Tally,
    ) -> None:
        self._session = session
        self._tally = tally
        self._drafter = drafter
        self._worker = worker
        self._controller = controller
        self._allows_generate = description.allows_generate
        self._max_in_flight = max(description.limits.max_in_flight, 1)
        self._limit = limit
        self._in_flight: deque[Block | None] = deque()  # None: the verifier writes
        self._block_bytes: deque[int] = deque()
        self._generation = session.generation
        self._promised = False  # the last request was a block that said that another one follows
        self._stop = threading.Event()
        self._drafting: Future[Block | None] | None = None
        self._reading: Future[tuple[int, float]] | None = None
        self._read_from = (0, 0.0)  # unread tokens when that began, and when
        self._receiving: asyncio.Task[Reply] | None = None
        self._last_round = 0.0
        self._send_s = 0.0
        self._share = tally.share

    async def rounds(self) -> AsyncGenerator[Emission]:
        receiving = self._receive()
        while self._tally.finish is FinishReason.NONE:
            plan = self._controller.plan()
            if not receiving.done() and await self._has_sent(plan):
                continue
            # Until the next block, all replies are what the verifier wrote.
            bridged = self._reading is not None
            emission = await self._next_emission(receiving)
            if self._tally.finish is FinishReason.NONE:
                receiving = self._receive()
            if emission is None:
                continue
            if not bridged:
                self._controller.observe(emission.round)
            yield emission

    async def _has_sent(self, plan: Plan) -> bool:
        """Does what can be done before another reply comes; False: nothing."""
        if plan.bridge is not None and self._is_reading(plan, plan.bridge):
            return await self._has_bridged(plan.bridge)
        if not self._window_is_open(plan):
            return False
        await self._send_next(plan)
        return True

    def _is_reading(self, plan: Plan, bridge: Bridge) -> bool:
        """Whether the edge reads while the verifier may write; begins with it where that gains something."""
        if self._reading is None and not (plan.cloud_tokens or self._in_flight):
            num_unread = self._drafter.num_unread
            if self._allows_generate and self._drafter.room() and bridge.wants(num_unread, 0.0, 0):
                self._read_from = num_unread, 0.0
                self._reading = self._worker.submit(self._read)
        return self._reading is not None and not self._reading.done()

    def _read(self) -> tuple[int, float]:
        # In the worker's thread, which may have had other work first.
        self._read_from = self._read_from[0], time.perf_counter()
        return self._drafter.read(self._in_vain)

    async def _has_bridged(self, bridge: Bridge) -> bool:
        """Asks for another token or, when none is under way, waits until all is read; False: neither."""
        num_unread, since = self._read_from
        base_len = len(self._drafter.sequence) + len(self._in_flight)
        elapsed_s = time.perf_counter() - since if since else 0.0
        wants = bridge.wants(num_unread, elapsed_s, len(self._in_flight))
        if wants and base_len < self._limit and self._has_room_in_flight():
            self._promised = False
            await self._send(Generate(0, 0, base_len, 1), None)
        elif self._in_flight or self._reading is None:
            return False
        else:
            started = time.perf_counter()
            await asyncio.wait([asyncio.wrap_future(self._reading)])
            self._share.draft += time.perf_counter() - started
        return True

    def _window_is_open(self, plan: Plan) -> bool:
        if not self._has_room_in_flight():
            return False
        if not self._in_flight:
            return True
        window = 0 if plan.cloud_tokens else min(plan.ahead + 1, self._max_in_flight)
        return self._promised and len(self._in_flight) < window and self._drafter.room() > 0

    def _has_room_in_flight(self) -> bool:
        # What is void counts until the verifier has dropped it: it cannot know how soon we hear of that.
        return self._session.num_unanswered + self._session.num_given_up < self._max_in_flight

    async def _send_next(self, plan: Plan) -> None:
        room, remaining = self._drafter.room(), self._limit - len(self._drafter.sequence)
        if (plan.cloud_tokens or not room) and self._allows_generate and not self._in_flight:
            num_tokens = min(plan.cloud_tokens or remaining, remaining)
            self._promised = False  # whatever the plan becomes: nobody knows what a block would follow
            self._reading = None
            await self._send(Generate(0, 0, len(self._drafter.sequence), num_tokens), None)
            return
        if room:
            # The bonus token is the last one, so one less needs drafting.
            k = plan.k if self._in_flight or not plan.first_k else plan.first_k
            num_tokens = min(max(k, 1), self._session.max_block, room, max(remaining - 1, 1))
            started, num_before = time.perf_counter(), len(self._in_flight)
            block = await self._draft(num_tokens, plan)
            if block is None or self._in_vain():
                # A rejection has just come, or the draft cannot go on.
                self._share.draft += time.perf_counter() - started
                return
            block = self._with_reading(replace(block, num_before=num_before))
        else:
            block = self._drafter.guess()
        self._share.draft += block.draft_s
        self._share.codec += block.codec_s
        left = self._limit - len(self._drafter.sequence)
        self._promised = plan.ahead > 0 and left > 1 and self._drafter.room() > 0
        await self._send(DraftBlock(0, 0, block.base_len, block.tokens, block.payload, self._promised), block)

    def _with_reading(self, block: Block) -> Block:
        """The first block after a bridge, with what was read during it."""
        if self._reading is None:
            return block
        (num_read, read_s), self._reading = self._reading.result(), None
        return replace(block, num_read=num_read, read_s=read_s)

    async def _draft(self, num_tokens: int, plan: Plan) -> Block | None:
        self._drafting = self._worker.submit(
            self._drafter.draft, num_tokens, self._in_vain, price=plan.price, ending=plan.ending
        )
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
        losses: frozenset[Loss] = frozenset()
        if block is None or not isinstance(answer, Verdict):
            self._drafter.extend(reply.tokens)
            origins = (Origin.CLOUD,) * len(reply.tokens)
            done = not isinstance(answer, Verdict) and answer.last
        else:
            num_drafted, num_accepted, done = len(block.tokens), answer.num_accepted, True
            self._drafter.apply(block, num_accepted, answer.tokens)
            origins = _origins(num_drafted, num_accepted, len(answer.tokens))
            losses = frozenset({Loss.VERIFICATION}) if answer.lossy else losses
        if done:
            self._in_flight.popleft()
            self._block_bytes.popleft()
        if self._session.generation != self._generation:  # this verdict made the rest void
            self._in_flight.clear()
            self._block_bytes.clear()
            self._generation = self._session.generation
        self._tally.finish = answer.finish_reason
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
            num_read=block.num_read if block else 0,
            read_s=block.read_s if block else 0.0,
            num_before=block.num_before if block else 0,
            more=isinstance(reply.request, DraftBlock) and reply.request.more,
            since_last_s=now - last if last else 0.0,
            confidences=block.confidences if block else (),
        )
        return Emission(reply.tokens, origins, done_round, answer.logprobs, losses)

    async def stop(self) -> None:
        """Leaves no task and no thread at work on this answer; what was not judged yet was sent in vain."""
        self._stop.set()
        if self._receiving is not None:
            self._receiving.cancel()
            await asyncio.wait([self._receiving])
        for work in (self._reading, self._drafting):
            if work is not None and not work.done():
                await asyncio.wait([asyncio.wrap_future(work)])
        self._session.give_up_pending()


def _origins(num_drafted: int, num_accepted: int, num_beyond: int) -> tuple[Origin, ...]:
    first = Origin.BONUS if num_accepted == num_drafted else Origin.RECOVERED
    beyond = (first, *(Origin.SIBLING,) * (num_beyond - 1)) if num_beyond else ()
    return (Origin.ACCEPTED,) * num_accepted + beyond
