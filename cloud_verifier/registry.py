"""The sessions of one verifier: admission, resuming, faults, expiry, and who gives up slots.

Only the engine's thread calls this.
"""

from __future__ import annotations

import secrets
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from cloud_verifier.kv_pool import KvPool
from cloud_verifier.prefix_cache import PrefixCache
from cloud_verifier.sessions import Session, context_exceeded
from shared.faults import FaultKind, SpecwireError
from shared.messages import Append, FinishReason, Notice, NoticeKind, Open
from shared.wire import ServerMessage

_RETRY_AFTER_MS = 2_000


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """Args:
    max_sessions: sessions with a client at most; more are refused as overloaded.
    max_block: drafted tokens of a block at most.
    max_in_flight: unanswered steps of one session at most.
    idle_seconds: a session without a client, or a silent one, is forgotten after so long.
    """

    max_sessions: int = 256
    max_block: int = 32
    max_in_flight: int = 16
    idle_seconds: float = 600.0


class Registry:
    """Every session that this verifier knows, with or without a client."""

    def __init__(
        self, pool: KvPool, max_context: int, limits: EngineLimits, clock: Callable[[], float]
    ) -> None:
        self.limits = limits
        self.clock = clock
        self.draining = False
        self.in_pass: set[str] = set()
        self._pool = pool
        self._max_context = max_context
        self._cache = PrefixCache(pool)
        self._sessions: OrderedDict[str, Session] = OrderedDict()
        pool.reclaim = self._reclaim

    def __len__(self) -> int:
        return len(self._sessions)

    def busy(self) -> list[Session]:
        return [s for s in self._sessions.values() if s.steps or (s.wants_prefill and s.behind > 1)]

    def num_waiting(self) -> int:
        return sum(1 for session in list(self._sessions.values()) if session.steps)

    def admit(self, owner: str, request: Open) -> Session:
        if self.draining:
            raise SpecwireError(
                FaultKind.DRAINING,
                "This verifier is shutting down and takes no new session.",
                "Use another verifier.",
                retry_after_ms=_RETRY_AFTER_MS,
            )
        attached = sum(1 for session in self._sessions.values() if session.sink is not None)
        if attached >= self.limits.max_sessions:
            raise SpecwireError(
                FaultKind.OVERLOADED,
                f"This verifier already serves {attached} sessions.",
                f"Try again in {_RETRY_AFTER_MS // 1000} s or use another verifier.",
                retry_after_ms=_RETRY_AFTER_MS,
            )
        if len(request.tokens) >= self._max_context:
            raise context_exceeded(len(request.tokens), self._max_context)
        session = Session(
            session_id=secrets.token_urlsafe(16),
            owner=owner,
            request=request,
            sampling=request.sampling,
            max_context=self._max_context,
            committed=list(request.tokens),
            answer_start=request.prompt_len or len(request.tokens),
            max_new_tokens=request.max_new_tokens,
            slots=self._cache.match(request.tokens[:-1]),
        )
        if len(session.committed) >= session.limit:
            session.finish_reason = FinishReason.LENGTH
        self._sessions[session.session_id] = session
        return session

    def resume(self, owner: str, request: Open) -> Session:
        session = self._sessions.get(request.session_id)
        # One message for both, so that ids cannot be probed.
        if session is None or session.owner != owner:
            raise SpecwireError(
                FaultKind.SESSION_UNKNOWN,
                "This verifier does not know that session.",
                "Open a new session with the text so far.",
            )
        if request.committed_len > len(session.committed):
            raise SpecwireError(
                FaultKind.OUT_OF_ORDER,
                f"The client holds {request.committed_len} tokens; {len(session.committed)} are committed.",
                "Open a new session with the text so far.",
            )
        session.steps.clear()
        session.wants_prefill = True
        return session

    def drain(self, text: str) -> None:
        self.draining = True
        for session in self._sessions.values():
            if session.sink is not None:
                session.sink(Notice(NoticeKind.DRAINING, text))

    def expire(self) -> None:
        deadline = self.clock() - self.limits.idle_seconds
        for session in [s for s in self._sessions.values() if s.last_used < deadline and not s.steps]:
            if session.sink is not None:
                session.sink(
                    SpecwireError(
                        FaultKind.TIMED_OUT,
                        f"The session was silent for {self.limits.idle_seconds:.0f} s.",
                        "Open a new session with the text so far.",
                    )
                )
            self.forget(session)

    def settle(self, session: Session) -> None:
        """Answers every leading step that needs no pass: replays, stale blocks, Append, disorder."""
        while session.steps:
            message = session.steps[0].message
            if message.step < session.next_step and message.step in session.answered:
                session.steps.popleft()
                self.send(session, session.answered[message.step])
                continue
            if session.steps[0].written:
                return
            try:
                session.check_step(message)
                if isinstance(message, Append):
                    reply: ServerMessage = session.append(message)
                elif message.epoch < session.epoch or session.finish_reason is not FinishReason.NONE:
                    reply = session.stale_reply(message)
                else:
                    return
            except SpecwireError as error:
                self.fault(session, error)
                return
            session.steps.popleft()
            session.next_step += 1
            session.remember(message.step, reply)
            self.send(session, reply)

    def send(self, session: Session, reply: ServerMessage) -> None:
        if session.sink is not None:
            session.sink(reply)

    def fault(self, session: Session, error: SpecwireError) -> None:
        self.send(session, error)
        self.forget(session)

    def forget(self, session: Session) -> None:
        session.steps.clear()
        session.sink = None
        session.wants_prefill = False
        if self._sessions.pop(session.session_id, None) is not None:
            self._drop_slots(session)

    def _drop_slots(self, session: Session) -> None:
        self._pool.release(session.slots)
        session.slots = np.empty(0, np.int64)
        session.kept_row = None

    def cache_prompt(self, session: Session) -> None:
        if session.behind <= 1:
            session.wants_prefill = False
            self._cache.insert(session.committed[: session.kv_len], session.slots)

    def _reclaim(self, missing: int) -> None:
        """Frees slots: cached prefixes first, then idle sessions, then those that wait, newest last."""
        pool = self._pool
        wanted = pool.num_free + missing
        self._cache.evict(missing)
        idle = sorted(self._sessions.values(), key=lambda s: (bool(s.steps), s.last_used))
        for session in idle:
            if pool.num_free >= wanted:
                return
            if session.session_id not in self.in_pass and session.kv_len:
                session.wants_prefill = False
                self._drop_slots(session)
                self._cache.evict(wanted - pool.num_free)
