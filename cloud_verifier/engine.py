"""The one thread that owns the model: commands in, forward passes, verdicts out.

The event loop talks to it through `Ticket`s, whose methods only put a command on the inbox; sessions,
slots and model are touched by the engine's thread alone. Replies leave through each session's sink.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable

from cloud_verifier.auth import Identity
from cloud_verifier.observer import Observer, PassRecord
from cloud_verifier.passes import PassRunner, StepEmulation, Target
from cloud_verifier.registry import EngineLimits, Registry
from cloud_verifier.scheduler import Budget, plan
from cloud_verifier.sessions import Session, Sink, Step
from cloud_verifier.siblings import SiblingRule
from shared.codecs import Distributions
from shared.faults import FaultKind, SpecwireError
from shared.messages import Append, DraftBlock, Generate, Load, Open, Opened

log = logging.getLogger(__name__)


class Ticket:
    """One stream's hold on its session. All methods return at once and are safe from any thread."""

    def __init__(self, engine: Engine, identity: Identity, sink: Sink) -> None:
        self.identity = identity
        self.sink = sink
        self.session: Session | None = None  # set and read by the engine's thread
        self._engine = engine

    def open(self, request: Open) -> None:
        self._engine.post(self._engine.open_session, self, request)

    def submit(self, message: DraftBlock | Append | Generate, q: Distributions | None = None) -> None:
        step = Step(message, self._engine.clock(), q)
        self._engine.post(self._engine.submit_step, self, step)

    def fail(self, error: SpecwireError) -> None:
        """Ends the session with a fault."""
        self._engine.post(self._engine.fail_ticket, self, error)

    def close(self) -> None:
        """Ends the session and frees all that it holds."""
        self._engine.post(self._engine.close_ticket, self)

    def detach(self) -> None:
        """The stream is gone; the session waits to be resumed, without its unanswered steps."""
        self._engine.post(self._engine.detach_ticket, self)

    def held(self) -> Session | None:
        """The session, unless another stream has taken it over or it has ended."""
        session = self.session
        return session if session is not None and session.sink is self.sink else None


class Engine:
    """Runs the model over the sessions' work. `start` spawns the thread; `stop` ends it."""

    def __init__(
        self,
        model: Target,
        *,
        limits: EngineLimits | None = None,
        budget: Budget | None = None,
        emulation: StepEmulation | None = None,
        observer: Observer | None = None,
        clock: Callable[[], float] = time.monotonic,
        siblings: SiblingRule | None = None,
    ) -> None:
        self.limits = limits or EngineLimits()
        self.clock = clock
        self.max_context = min(model.max_context, model.pool.num_slots)
        self._budget = budget or Budget()
        self._observer = _WithPassTimes(observer or Observer())
        self._registry = Registry(model.pool, self.max_context, self.limits, clock, self._observer)
        self._runner = PassRunner(model, self._registry, self._observer, emulation, clock, siblings)
        self._pool = model.pool
        self._inbox: deque[tuple[Callable[..., None], tuple[object, ...]]] = deque()
        self._wake = threading.Condition()
        self._stopping = False
        self._load = Load()
        self._num_attached = 0
        self._num_known = 0
        self._cache_usage = 0.0
        self._busy_s = 0.0
        self._thread = threading.Thread(target=self._run, name="specwire-engine", daemon=True)

    # -- from any thread -----------------------------------------------------------------------------

    def start(self) -> None:
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def ticket(self, identity: Identity, sink: Sink) -> Ticket:
        """`sink` gets the replies, on the engine's thread, and must not block."""
        return Ticket(self, identity, sink)

    def post(self, command: Callable[..., None], *args: object) -> None:
        """Runs `command` on the engine's thread, between two passes."""
        with self._wake:
            self._inbox.append((command, args))
            self._wake.notify()

    def load(self) -> Load:
        """As of the last pass or command."""
        return self._load

    @property
    def num_attached(self) -> int:
        """Sessions with a client, as of the last pass or command."""
        return self._num_attached

    @property
    def num_known(self) -> int:
        """Those and the ones that wait to be resumed."""
        return self._num_known

    @property
    def cache_usage(self) -> float:
        """Share of the slots that the prefix cache remembers."""
        return self._cache_usage

    @property
    def busy_s(self) -> float:
        """Seconds that the thread has worked, waiting not counted."""
        return self._busy_s

    def drain(self, text: str) -> None:
        """Takes no new session from now on and tells the clients."""
        self.post(self._registry.drain, text)

    def dismiss(self, silent_s: float) -> None:
        """Sends away sessions whose client has been silent for `silent_s`; a negative number: all."""
        self.post(lambda: self._registry.dismiss(silent_s=silent_s))

    def expire(self) -> None:
        """Forgets sessions that nobody has used for `idle_seconds`, and ends steps that hang."""
        self.post(self._registry.expire)

    def evict_cache(self) -> None:
        """Frees the slots that only the prefix cache holds."""
        self.post(self._registry.evict_cache)

    def stop(self, timeout_s: float = 10.0) -> None:
        """Ends the thread after the pass in hand; what is unanswered stays so."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    # -- commands, on the engine's thread --------------------------------------------------------------

    def open_session(self, ticket: Ticket, request: Open) -> None:
        resumed = bool(request.session_id)
        begin = self._registry.resume if resumed else self._registry.admit
        try:
            session = begin(ticket.identity, request, ticket.sink)
        except SpecwireError as error:
            self._observer.faulted(error.kind)
            ticket.sink(error)
            return
        ticket.session = session
        log.info(
            "resumed" if resumed else "opened",
            extra={
                "session": session.session_id,
                "owner": session.owner,
                "num_tokens": len(session.committed),
                "num_cached": session.kv_len,
            },
        )
        ticket.sink(
            Opened(
                session_id=session.session_id,
                committed_len=len(session.committed),
                epoch=session.epoch,
                next_step=session.next_step,
                max_block=min(session.request.max_block, self.limits.max_block),
                tokens=tuple(session.committed[request.committed_len :]) if resumed else (),
                finish_reason=session.finish_reason,
                replayed_tokens=session.kv_len,
            )
        )

    def submit_step(self, ticket: Ticket, step: Step) -> None:
        session = ticket.held()
        if session is None:
            return
        session.last_used = max(session.last_used, step.arrived_at)
        session.steps.append(step)
        self._registry.settle(session)

    def fail_ticket(self, ticket: Ticket, error: SpecwireError) -> None:
        session = ticket.held()
        if session is not None:
            self._registry.fault(session, error)
        elif ticket.session is None:
            self._observer.faulted(error.kind)
            ticket.sink(error)

    def close_ticket(self, ticket: Ticket) -> None:
        session = ticket.held()
        if session is not None:
            log.info("closed", extra={"session": session.session_id, "num_tokens": len(session.committed)})
            self._registry.forget(session)

    def detach_ticket(self, ticket: Ticket) -> None:
        session = ticket.held()
        if session is not None:
            log.info("detached", extra={"session": session.session_id, "num_tokens": len(session.committed)})
            self._registry.detach(session)

    # -- the loop --------------------------------------------------------------------------------------

    def _run(self) -> None:
        busy: list[Session] = []
        while True:
            with self._wake:
                while not (self._inbox or self._stopping or busy):
                    self._wake.wait()
                if self._stopping and not self._inbox:
                    break
                commands = list(self._inbox)
                self._inbox.clear()
            woke_at = self.clock()
            for command, args in commands:
                self._guarded(command, args)
            self._guarded(self._pass, (woke_at,))
            busy = self._registry.busy()
            self._publish(busy)
            self._busy_s += self.clock() - woke_at
        self._registry.close()

    def _pass(self, woke_at: float) -> None:
        busy = self._registry.busy()
        for session in busy:
            self._registry.match_prefix(session)
        works = plan(busy, self._budget)
        if works:
            self._runner.run(works, woke_at)

    def _guarded(self, command: Callable[..., None], args: tuple[object, ...]) -> None:
        """The thread must outlive any command; a session that one failed for is told."""
        try:
            command(*args)
        except Exception:
            log.exception("a command failed")
            for ticket in (arg for arg in args if isinstance(arg, Ticket)):
                error = SpecwireError(
                    FaultKind.INTERNAL, "The verifier failed on this session.", "Try again."
                )
                self.fail_ticket(ticket, error)

    def _publish(self, busy: list[Session]) -> None:
        self._num_attached = self._registry.num_attached()
        self._num_known = len(self._registry)
        self._cache_usage = self._registry.cache_usage
        self._load = Load(
            num_sessions=self._num_attached,
            num_waiting=len(busy),
            forward_us=self._observer.median_forward_us(),
            kv_cache_usage=self._pool.usage,
        )


class _WithPassTimes(Observer):
    """Passes everything on, and remembers how long recent passes took."""

    def __init__(self, inner: Observer) -> None:
        self._inner = inner
        self._forward_s: deque[float] = deque(maxlen=32)

    def median_forward_us(self) -> int:
        recent = sorted(self._forward_s)
        return int(recent[len(recent) // 2] * 1e6) if recent else 0

    def passed(self, record: PassRecord) -> None:
        self._forward_s.append(record.forward_s)
        self._inner.passed(record)

    def replayed(self) -> None:
        self._inner.replayed()

    def prefix_hit(self, num_tokens: int) -> None:
        self._inner.prefix_hit(num_tokens)

    def faulted(self, kind: FaultKind) -> None:
        self._inner.faulted(kind)
