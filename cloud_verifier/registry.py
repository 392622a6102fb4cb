"""The sessions of one verifier: admission, resuming, faults, expiry, and who gives up slots.

Only the engine's thread calls this.
"""

from __future__ import annotations

import logging
import secrets
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cloud_verifier.auth import Identity
from cloud_verifier.kv_pool import KvPool
from cloud_verifier.observer import Observer
from cloud_verifier.prefix_cache import PrefixCache
from cloud_verifier.sessions import REPLAY_WINDOW, Session, Sink, context_exceeded
from shared.faults import FaultKind, SpecwireError
from shared.messages import Append, FinishReason, Notice, NoticeKind, Open
from shared.wire import ServerMessage

log = logging.getLogger(__name__)

_RETRY_AFTER_MS = 2_000
_OUR_FAULTS = frozenset({FaultKind.INTERNAL, FaultKind.NOT_FINITE, FaultKind.TIMED_OUT})
_REMEDY_REOPEN = "Open a new session with the text so far."


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """What sessions may take.

    Args:
        max_sessions: with a client at most; more are refused as overloaded.
        max_prefilling: sessions whose prompt waits for the model at most; more are refused likewise.
        max_block: drafted tokens of a block at most.
        max_in_flight: unanswered steps of one session at most.
        idle_seconds: a session that nobody moves is forgotten after so long.
        step_seconds: a step that makes no progress for so long ends its session.
        drain_grace_seconds: while draining, a session that is silent for so long is sent away.
        share_prefixes: a session may read what another identity's sessions have computed of its prefix; how
            fast it begins then tells that somebody else has sent the same text.
    """

    max_sessions: int = 256
    max_prefilling: int = 64
    max_block: int = 32
    max_in_flight: int = 16
    idle_seconds: float = 600.0
    step_seconds: float = 60.0
    drain_grace_seconds: float = 2.0
    share_prefixes: bool = False


class Registry:
    """Every session that this verifier knows, with or without a client."""

    def __init__(
        self,
        pool: KvPool,
        max_context: int,
        limits: EngineLimits,
        clock: Callable[[], float],
        observer: Observer,
    ) -> None:
        self.limits = limits
        self.clock = clock
        self.draining = False
        self.in_pass: set[str] = set()
        self._pool = pool
        self._max_context = max_context
        self._observer = observer
        self._cache = PrefixCache(pool)
        self._cache_version = 0
        self._sessions: OrderedDict[str, Session] = OrderedDict()
        self._claimant: Session | None = None
        pool.reclaim = self._reclaim

    def __len__(self) -> int:
        return len(self._sessions)

    def busy(self) -> list[Session]:
        return [session for session in self._sessions.values() if session.has_work]

    def num_attached(self) -> int:
        return sum(1 for session in self._sessions.values() if session.sink is not None)

    @property
    def cache_usage(self) -> float:
        """Share of the slots that the prefix cache remembers, in [0, 1]."""
        return self._cache.num_slots / self._pool.num_slots

    # -- beginning ---------------------------------------------------------------------------------

    def admit(self, identity: Identity, request: Open, sink: Sink) -> Session:
        """A new session, attached to `sink`.

        Raises:
            SpecwireError: DRAINING, OVERLOADED, QUOTA_EXCEEDED or CONTEXT_EXCEEDED.
        """
        self._check_room(identity, len(request.tokens))
        max_context = min(self._max_context, identity.quota.max_context or self._max_context)
        if len(request.tokens) >= max_context:
            raise context_exceeded(len(request.tokens), max_context)
        now = self.clock()
        session = Session(
            session_id=secrets.token_urlsafe(16),
            owner=identity.name,
            request=request,
            sampling=request.sampling,
            max_context=max_context,
            committed=list(request.tokens),
            answer_start=request.prompt_len or len(request.tokens),
            max_new_tokens=request.max_new_tokens,
            sink=sink,
            last_used=now,
            waiting_since=now,
            replay_window=max(REPLAY_WINDOW, self.limits.max_in_flight),
        )
        session.mark_ended()
        self._sessions[session.session_id] = session
        self.match_prefix(session)
        return session

    def resume(self, identity: Identity, request: Open, sink: Sink) -> Session:
        """A session that lost its stream, or whose client came back before that was noticed.

        Raises:
            SpecwireError: SESSION_UNKNOWN, OUT_OF_ORDER, DRAINING or OVERLOADED.
        """
        session = self._sessions.get(request.session_id)
        # One message for both, so that ids cannot be probed.
        if session is None or session.owner != identity.name:
            raise SpecwireError(
                FaultKind.SESSION_UNKNOWN, "This verifier does not know that session.", _REMEDY_REOPEN
            )
        if request.committed_len > len(session.committed):
            raise SpecwireError(
                FaultKind.OUT_OF_ORDER,
                f"The client holds {request.committed_len} tokens; {len(session.committed)} are committed.",
                _REMEDY_REOPEN,
            )
        if session.sink is None:
            self._check_room(identity, len(session.committed))
        else:
            session.sink(
                SpecwireError(
                    FaultKind.NOT_ALLOWED, "The session went on over another connection.", "Use that one."
                )
            )
        session.steps.clear()
        session.sink = sink
        session.wants_prefill = True
        session.last_used = session.waiting_since = self.clock()
        return session

    def _check_room(self, identity: Identity, num_tokens: int) -> None:
        """Raises unless one more session with that many tokens can be served well."""
        if self.draining:
            raise SpecwireError(
                FaultKind.DRAINING,
                "This verifier is shutting down and takes no new session.",
                "Use another verifier.",
                retry_after_ms=_RETRY_AFTER_MS,
            )
        attached = [session for session in self._sessions.values() if session.sink is not None]
        answering = [s for s in attached if s.finish_reason is FinishReason.NONE]
        prefilling = sum(1 for session in answering if session.is_prefilling)
        held = sum(len(session.committed) for session in answering)
        reason = ""
        if len(attached) >= self.limits.max_sessions:
            reason = f"already serves {len(attached)} sessions"
        elif prefilling >= self.limits.max_prefilling:
            reason = f"has {prefilling} prompts waiting"
        elif answering and held + num_tokens > self._pool.num_slots:
            reason = f"has its memory for keys and values full of {len(answering)} answers"
        if reason:
            raise SpecwireError(
                FaultKind.OVERLOADED,
                f"This verifier {reason}.",
                f"Try again in {_RETRY_AFTER_MS // 1000} s or use another verifier.",
                retry_after_ms=_RETRY_AFTER_MS,
            )
        allowed = identity.quota.sessions
        if allowed:
            own = sum(1 for session in attached if session.owner == identity.name)
            if own >= allowed:
                raise SpecwireError(
                    FaultKind.QUOTA_EXCEEDED,
                    f"{identity.name} already has {own} of {allowed} sessions open.",
                    "Close one of them first.",
                    retry_after_ms=_RETRY_AFTER_MS,
                )

    # -- steps -------------------------------------------------------------------------------------

    def settle(self, session: Session) -> None:
        """Answers every leading step that needs no pass: replays, stale blocks, Append, disorder."""
        while session.steps:
            message = session.steps[0].message
            if message.step < session.next_step and message.step in session.answered:
                session.steps.popleft()
                self._observer.replayed()
                self.send(session, session.answered[message.step])
                continue
            if session.steps[0].written:
                return  # a Generate that goes on
            try:
                session.check_step(message)
                if isinstance(message, Append):
                    reply: ServerMessage = session.append(message)
                    session.waiting_since = self.clock()
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

    # -- ending ------------------------------------------------------------------------------------

    def detach(self, session: Session) -> None:
        """The client is gone; the session waits to be resumed, without its unanswered steps. A client that
        comes back without its id finds the text in the prefix cache."""
        self.cache_prefix(session)
        session.sink = None
        session.steps.clear()
        session.wants_prefill = False
        session.last_used = self.clock()
        self._sessions.move_to_end(session.session_id)
        without_client = [s for s in self._sessions.values() if s.sink is None]
        for oldest in without_client[: max(0, len(without_client) - self.limits.max_sessions)]:
            self.forget(oldest)

    def fault(self, session: Session, error: SpecwireError) -> None:
        self._observer.faulted(error.kind)
        log.log(
            logging.WARNING if error.kind in _OUR_FAULTS else logging.INFO,
            "fault %s: %s",
            error.kind,
            error.text,
            extra={"session": session.session_id, "step": error.step, "owner": session.owner},
        )
        self.send(session, error)
        # What this session computed may be what is wrong, so the cache must not learn it.
        self._remove(session)

    def forget(self, session: Session) -> None:
        """Ends a session; its text stays in the prefix cache for as long as there is room."""
        self.cache_prefix(session)
        self._remove(session)

    def _remove(self, session: Session) -> None:
        session.steps.clear()
        session.sink = None
        session.wants_prefill = False
        if self._sessions.pop(session.session_id, None) is not None:
            self._drop_slots(session)

    def expire(self) -> None:
        """Ends sessions that nobody has moved for `idle_seconds`, and steps that hang."""
        now = self.clock()
        for session in list(self._sessions.values()):
            silent = now - session.last_used
            if session.steps and silent > self.limits.step_seconds:
                self.fault(
                    session,
                    SpecwireError(
                        FaultKind.TIMED_OUT,
                        f"The step was not answered within {self.limits.step_seconds:.0f} s.",
                        "Try again later or use another verifier.",
                        retry_after_ms=_RETRY_AFTER_MS,
                        step=session.steps[0].message.step,
                    ),
                )
            elif not session.has_work and silent > self.limits.idle_seconds:
                text = f"The session was silent for {self.limits.idle_seconds:.0f} s."
                self.send(session, SpecwireError(FaultKind.TIMED_OUT, text, _REMEDY_REOPEN))
                self.forget(session)

    def drain(self, text: str) -> None:
        """Takes no session from now on, and tells the clients."""
        self.draining = True
        for session in self._sessions.values():
            self.send(session, Notice(NoticeKind.DRAINING, text))

    def dismiss(self, *, silent_s: float) -> None:
        """Sends away sessions that wait for their client for `silent_s`; a negative number: all of them."""
        now = self.clock()
        for session in list(self._sessions.values()):
            if silent_s < 0 or (not session.steps and now - session.last_used >= silent_s):
                self.send(
                    session,
                    SpecwireError(
                        FaultKind.DRAINING,
                        "This verifier is shutting down.",
                        "Go on with another verifier.",
                        retry_after_ms=_RETRY_AFTER_MS,
                    ),
                )
                self._remove(session)

    def close(self) -> None:
        """Forgets everything, so that the pool is as it was before."""
        for session in list(self._sessions.values()):
            self._remove(session)
        self.evict_cache()
        self._pool.reclaim = None

    # -- slots -------------------------------------------------------------------------------------

    def match_prefix(self, session: Session) -> None:
        """Takes over what others have computed of the session's prefix, when it is more than its own."""
        if session.matched == self._cache_version or session.behind <= 1:
            return
        session.matched = self._cache_version
        known = self._cache.match(session.committed[:-1], self._shared_by(session))
        if len(known) <= session.kv_len:
            self._pool.release(known)
            return
        self._observer.prefix_hit(len(known) - session.kv_len)
        self._drop_slots(session)
        session.slots = known

    def cache_prefix(self, session: Session) -> None:
        """Lets others read what this session has computed."""
        if session.kv_len:
            self._cache.insert(session.committed[: session.kv_len], session.slots, self._shared_by(session))
            self._cache_version += 1

    def _shared_by(self, session: Session) -> str:
        """Whose sessions may read what this one has computed."""
        return "" if self.limits.share_prefixes else session.owner

    def evict_cache(self) -> None:
        """Gives up every slot that only the prefix cache holds."""
        self._cache.evict(self._pool.num_slots)

    def _drop_slots(self, session: Session) -> None:
        self._pool.release(session.slots)
        session.slots = np.empty(0, np.int64)
        session.kept_row = None

    def claim(self, session: Session, num: int, *, at_any_cost: bool = False) -> NDArray[np.int64]:
        """Slots for `num` new tokens of a session, which from then on is part of the pass.

        An answer that has waited longer takes slots from newer ones, never the other way round, so that the
        oldest always gets done; `at_any_cost` takes them from everybody outside the pass.

        Raises:
            SpecwireError: OVERLOADED when there are none to take.
        """
        self._claimant = None if at_any_cost else session
        self.in_pass.add(session.session_id)
        try:
            after = int(session.slots[-1]) if session.kv_len else None
            return self._pool.allocate(num, after=after)
        except SpecwireError:
            self.in_pass.discard(session.session_id)
            raise

    def _reclaim(self, missing: int) -> None:
        """Frees slots: cached prefixes, then idle sessions (longest idle first), then newer answers."""
        pool = self._pool
        wanted = pool.num_free + missing
        self._cache.evict(missing)
        others = [s for s in self._sessions.values() if s.kv_len and s.session_id not in self.in_pass]
        idle = sorted((s for s in others if not s.has_work), key=lambda s: s.last_used)
        newer = [s for s in others if s.has_work and self._yields(s)]
        for session in (*idle, *sorted(newer, key=lambda s: -s.waiting_since)):
            if pool.num_free >= wanted:
                return
            # An idle session computes its text again when its client comes back, not before.
            session.wants_prefill = session.has_work
            self._drop_slots(session)
            self._cache.evict(wanted - pool.num_free)

    def _yields(self, session: Session) -> bool:
        return self._claimant is None or session.waiting_since > self._claimant.waiting_since
