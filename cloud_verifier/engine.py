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

from cloud_verifier.passes import PassRecord, PassRunner, StepEmulation, Target
from cloud_verifier.registry import EngineLimits, Registry
from cloud_verifier.scheduler import Budget, plan
from cloud_verifier.sessions import Session, Sink, Step
from shared.codecs.base import Distributions
from shared.faults import FaultKind, SpecwireError
from shared.messages import Append, DraftBlock, Generate, Load, Open, Opened

log = logging.getLogger(__name__)


class Ticket:
    """One stream's hold on its session. All methods return at once and are safe from any thread."""

    def __init__(self, engine: Engine, owner: str, sink: Sink) -> None:
        self.owner = owner
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


class Engine:
    """Runs the model over the sessions' work. `start` spawns the thread; `stop` drains it."""

    def __init__(
        self,
        model: Target,
        *,
        limits: EngineLimits | None = None,
        budget: Budget | None = None,
        emulation: StepEmulation | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.limits = limits or EngineLimits()
        self.clock = clock
        self._budget = budget or Budget()
        self._registry = Registry(model.pool, model.max_context, self.limits, clock)
        self._runner = PassRunner(model, self._registry, emulation, clock)
        self._pool = model.pool
        self._inbox: deque[tuple[Callable[..., None], tuple[object, ...]]] = deque()
        self._wake = threading.Condition()
        self._stopping = False
        self._forward_s: deque[float] = deque(maxlen=32)
        self._thread = threading.Thread(target=self._run, name="specwire-engine", daemon=True)
        self.observe(lambda record: self._forward_s.append(record.forward_s))

    # -- from any thread ---------------------------------------------------------------------

    def start(self) -> None:
        self._thread.start()

    def ticket(self, owner: str, sink: Sink) -> Ticket:
        return Ticket(self, owner, sink)

    def post(self, command: Callable[..., None], *args: object) -> None:
        with self._wake:
            self._inbox.append((command, args))
            self._wake.notify()

    def observe(self, observer: Callable[[PassRecord], None]) -> None:
        """`observer` is called on the engine's thread after every pass."""
        self._runner.observers.append(observer)

    def load(self) -> Load:
        recent = sorted(self._forward_s)
        return Load(
            num_sessions=len(self._registry),
            num_waiting=self._registry.num_waiting(),
            forward_us=int(recent[len(recent) // 2] * 1e6) if recent else 0,
            kv_cache_usage=self._pool.usage,
        )

    def drain(self, text: str) -> None:
        """Takes no new session from now on and tells the clients."""
        self.post(self._registry.drain, text)

    def expire(self) -> None:
        """Forgets sessions that nobody has used for `idle_seconds`."""
        self.post(self._registry.expire)

    def stop(self, timeout_s: float = 10.0) -> None:
        with self._wake:
            self._stopping = True
            self._wake.notify()
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    # -- commands, on the engine's thread ------------------------------------------------------

    def open_session(self, ticket: Ticket, request: Open) -> None:
        try:
            session = (
                self._registry.resume(ticket.owner, request)
                if request.session_id
                else self._registry.admit(ticket.owner, request)
            )
        except SpecwireError as error:
            ticket.sink(error)
            return
        ticket.session = session
        session.sink = ticket.sink
        session.last_used = self.clock()
        resumed = bool(request.session_id)
        ticket.sink(
            Opened(
                session_id=session.session_id,
                committed_len=len(session.committed),
                epoch=session.epoch,
                next_step=session.next_step,
                max_block=min(session.request.max_block, self.limits.max_block),
                tokens=tuple(session.committed[request.committed_len :]) if resumed else (),
                finish_reason=session.finish_reason,
                replayed_tokens=0 if resumed else session.kv_len,
            )
        )

    def submit_step(self, ticket: Ticket, step: Step) -> None:
        session = ticket.session
        if session is None or session.sink is not ticket.sink:
            return
        session.last_used = self.clock()
        if len(session.steps) >= self.limits.max_in_flight:
            self._registry.fault(
                session,
                SpecwireError(
                    FaultKind.BAD_REQUEST,
                    f"{len(session.steps)} steps already wait for a verdict.",
                    "Wait for a verdict before sending more blocks.",
                    step=step.message.step,
                ),
            )
            return
        session.steps.append(step)
        self._registry.settle(session)

    def fail_ticket(self, ticket: Ticket, error: SpecwireError) -> None:
        session = ticket.session
        if session is not None and session.sink is ticket.sink:
            self._registry.fault(session, error)
        else:
            ticket.sink(error)

    def close_ticket(self, ticket: Ticket) -> None:
        session = ticket.session
        if session is not None and session.sink is ticket.sink:
            self._registry.forget(session)

    def detach_ticket(self, ticket: Ticket) -> None:
        session = ticket.session
        if session is not None and session.sink is ticket.sink:
            session.sink = None
            session.steps.clear()
            session.wants_prefill = False
            session.last_used = self.clock()

    # -- the loop --------------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            with self._wake:
                while not (self._inbox or self._stopping or self._registry.busy()):
                    self._wake.wait()
                commands = list(self._inbox)
                self._inbox.clear()
                stopping = self._stopping
            for command, args in commands:
                try:
                    command(*args)
                except Exception:
                    log.exception("a command failed")
            busy = self._registry.busy()
            if busy:
                self._runner.run(plan(busy, self._budget))
            elif stopping and not self._inbox:
                return
