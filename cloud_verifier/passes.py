"""One forward pass: slots, forward, verification, and what the outcomes change.

Only the engine's thread calls this.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from cloud_verifier.kv_pool import KvPool
from cloud_verifier.observer import Answered, Observer, PassRecord
from cloud_verifier.registry import Registry
from cloud_verifier.scheduler import Work
from cloud_verifier.sessions import Session, Step
from cloud_verifier.siblings import SiblingRule
from cloud_verifier.target_model import Segment
from cloud_verifier.verification import BlockInput, BlockOutcome, is_lossy, judge
from shared.codecs.base import Distributions
from shared.faults import FaultKind, SpecwireError
from shared.history import needs_history
from shared.messages import DraftBlock, Timing, Tokens, Verdict

log = logging.getLogger(__name__)


class Target(Protocol):
    """What a pass needs of a target model; `TargetModel` is the real one."""

    pool: KvPool
    max_context: int

    def forward(self, segments: Sequence[Segment]) -> torch.Tensor: ...


@dataclass(frozen=True, slots=True)
class StepEmulation:
    """Makes a pass last at least as long as a bigger model's would: base + per_token * tokens."""

    base_ms: float
    per_token_ms: float
    model: str = ""

    def __str__(self) -> str:
        model = f"{self.model}: " if self.model else ""
        return f"{model}{self.base_ms:g} ms a pass and {self.per_token_ms:g} ms a token"

    def seconds(self, num_tokens: int) -> float:
        return (self.base_ms + self.per_token_ms * num_tokens) / 1e3


Piece = tuple[Work, NDArray[np.int64]]
"""Work and the slots of its new tokens."""


@dataclass(frozen=True, slots=True)
class _Result:
    logits: torch.Tensor | None  # [sum(K + 1), vocab]
    outcomes: list[BlockOutcome]
    forward_s: float
    verification_s: float


class PassRunner:
    """Runs passes over a model and commits what comes out."""

    def __init__(
        self,
        model: Target,
        registry: Registry,
        observer: Observer,
        emulation: StepEmulation | None,
        clock: Callable[[], float],
        siblings: SiblingRule | None = None,
    ) -> None:
        self._model = model
        self._registry = registry
        self._observer = observer
        self._emulation = emulation
        self._clock = clock
        self._siblings = siblings

    def run(self, works: list[Work], woke_at: float) -> None:
        """One pass; whatever goes wrong ends the session that it belongs to, and no other."""
        started = self._clock()
        try:
            ready = self._claim(works)
            for pieces, result in self._compute(ready) if ready else []:
                self._finish(pieces, result, started, woke_at)
        finally:
            self._registry.in_pass.clear()

    def _claim(self, works: list[Work]) -> list[Piece]:
        """Slots for every piece of work. Work that gets none waits for a later pass."""
        ready: list[Piece] = []
        for work in works:
            session = work.session
            if session.kv_len != work.start:
                continue  # an older one needed its slots
            widened = self._with_siblings(work)
            with contextlib.suppress(SpecwireError):
                ready.append((widened, self._registry.claim(session, widened.num_fed)))
        if works and not ready:
            work = works[0]
            try:
                ready.append((work, self._registry.claim(work.session, len(work.tokens), at_any_cost=True)))
            except SpecwireError as error:
                self._registry.fault(work.session, error)
        return ready

    def _with_siblings(self, work: Work) -> Work:
        """The work with what its session allows and the rule finds worth a row."""
        session, q = work.session, self._q_for_siblings(work)
        if self._siblings is None or q is None:
            return work
        # What follows the recovered token must fit the answer too.
        room = session.limit - len(session.committed) - 1
        most, doubt = session.request.num_siblings, session.doubt.share
        return replace(work, siblings=self._siblings.choose(q, work.drafted, most, room, doubt))

    def _q_for_siblings(self, work: Work) -> Distributions | None:
        """Of the drafted tokens that can still count; None where none may have siblings."""
        step = work.step
        wanted = self._siblings is not None and work.session.request.num_siblings
        if not wanted or step is None or step.q is None or not work.drafted:
            return None
        return _first_positions(step.q, len(work.drafted))

    def _compute(self, ready: list[Piece]) -> list[tuple[list[Piece], _Result]]:
        """Forward and verification. When a pass fails each piece runs alone, so that only the one at fault
        ends."""
        try:
            return [(ready, self._forward_and_judge(ready))]
        except Exception as error:
            if len(ready) > 1:
                return [done for piece in ready for done in self._compute([piece])]
            work, new_slots = ready[0]
            self._model.pool.release(new_slots)
            self._registry.fault(work.session, internal_fault(error, work))
            return []

    @torch.inference_mode()
    def _forward_and_judge(self, ready: list[Piece]) -> _Result:
        segments = [
            _segment(work, np.concatenate((work.session.slots, new_slots)))
            for work, new_slots in ready
            if work.tokens
        ]
        started = self._clock()
        rows = self._model.forward(segments) if segments else None
        if segments and self._emulation is not None:
            num_tokens = sum(work.num_fed for work, _ in ready)
            time.sleep(max(0.0, self._emulation.seconds(num_tokens) - (self._clock() - started)))
        judging = self._clock()
        judged = [work for work, _ in ready if work.step is not None]
        if not judged:
            return _Result(None, [], judging - started, 0.0)
        logits = _with_kept_rows(rows, judged)
        outcomes = judge(logits, [_block_input(work) for work in judged])
        return _Result(logits, outcomes, judging - started, self._clock() - judging)

    def _finish(self, pieces: list[Piece], result: _Result, started: float, woke_at: float) -> None:
        """Commits the outcomes of a pass and replies."""
        num_tokens = sum(work.num_fed for work, _ in pieces)
        answered: list[Answered] = []
        outcomes = iter(result.outcomes)
        row = 0
        for work, new_slots in pieces:
            session, step = work.session, work.step
            held = session.slots = np.concatenate((session.slots, new_slots))
            session.last_used = self._clock()
            if step is None:
                if not session.is_prefilling:
                    self._registry.cache_prefix(session)
                continue
            outcome = next(outcomes)
            bonus_row = row + len(work.drafted)
            row = bonus_row + 1 + len(work.siblings)
            timing = Timing(
                queue_us=max(0, int((started - step.arrived_at) * 1e6)),
                forward_us=int(result.forward_s * 1e6),
                verification_us=int(result.verification_s * 1e6),
                batch_sessions=len(pieces),
                batch_tokens=num_tokens,
            )
            try:
                if outcome.fault is not None:
                    raise outcome.fault
                last_row = None if result.logits is None else result.logits[bonus_row]
                answered.append(self._commit(work, step, held, outcome, timing, last_row))
            except Exception as error:
                self._registry.fault(session, internal_fault(error, work))
        self._observer.passed(
            PassRecord(
                num_sessions=len(pieces),
                num_tokens=num_tokens,
                num_prefill_tokens=sum(len(work.tokens) for work, _ in pieces if work.step is None),
                forward_s=result.forward_s,
                verification_s=result.verification_s,
                busy_s=self._clock() - woke_at,
                answered=tuple(answered),
            )
        )

    def _commit(
        self,
        work: Work,
        step: Step,
        held: NDArray[np.int64],
        outcome: BlockOutcome,
        timing: Timing,
        last_row: torch.Tensor | None,
    ) -> Answered:
        """Turns one outcome into committed tokens, held slots and a reply.

        `held` are the slots of the old prefix and of all that was fed, siblings last.
        """
        session, message = work.session, step.message
        before = len(session.committed)
        reply: Verdict | Tokens
        if isinstance(message, DraftBlock):
            lossy = is_lossy(session.request.verification, session.sampling)
            reply = verdict = session.commit_verdict(message, outcome, timing, lossy)
            if (q := self._q_for_siblings(work)) is not None:
                session.doubt.add(q, work.drafted, outcome.num_accepted)
            continues = message.more and verdict.num_accepted == len(message.tokens)
        else:
            reply = session.commit_generated(step, outcome, timing)
            continues = False
        # The model has seen the old prefix, the accepted tokens and the sibling that was taken; the rest is
        # forgotten.
        seen = before + outcome.num_accepted
        if outcome.sibling >= 0:
            held = self._with_sibling(held, seen, len(held) - len(work.siblings) + outcome.sibling)
            seen += 1
        keep = min(seen, len(session.committed) - (not continues))
        session.slots = held[:keep]
        self._model.pool.release(held[keep:])
        session.kept_row = last_row.clone() if continues and last_row is not None else None
        if work.start < session.answer_start - 1:
            self._registry.cache_prefix(session)
        answered = self._timed(session, step, reply, work)
        if isinstance(reply, Tokens) and not reply.last:
            step.arrived_at = session.emitted_at
        else:
            session.steps.popleft()
            session.next_step = message.step + 1
            session.remember(message.step, _whole_reply(reply, step))
        self._registry.send(session, reply)
        self._registry.settle(session)
        return answered

    def _with_sibling(self, held: NDArray[np.int64], seen: int, at: int) -> NDArray[np.int64]:
        """`held` with the sibling, which is at `at`, behind the `seen` first ones."""
        pool = self._model.pool
        if pool.reads_in_place:
            # In the slot of the token that it replaces, so that the prefix stays in one piece.
            pool.copy(int(held[at]), int(held[seen]))
            return held
        return np.concatenate((held[:seen], held[at : at + 1], held[seen:at], held[at + 1 :]))

    def _timed(self, session: Session, step: Step, reply: Verdict | Tokens, work: Work) -> Answered:
        now, previous = self._clock(), session.emitted_at
        session.emitted_at = now
        return Answered(
            reply=reply,
            num_drafted=len(work.drafted),
            codec=(getattr(step.message, "codec", "") or session.request.codec),
            round_s=now - step.arrived_at,
            first_token_s=None if previous else now - session.waiting_since,
            since_last_s=now - previous if previous else None,
        )


def internal_fault(error: Exception, work: Work) -> SpecwireError:
    """`error` as a fault of one session; whatever is not one already goes to the log with its traceback."""
    if isinstance(error, SpecwireError):
        return error
    extra = {"session": work.session.session_id, "step": work.step.message.step if work.step else 0}
    log.error("a pass failed", exc_info=error, extra=extra)
    return SpecwireError(
        FaultKind.INTERNAL,
        f"The verifier failed on this session: {type(error).__name__}.",
        "Try again; the operator finds the cause in the verifier's log.",
    )


def _whole_reply(reply: Verdict | Tokens, step: Step) -> Verdict | Tokens:
    """What a repeated step is answered with: for Generate, all that it wrote, in one message."""
    return replace(reply, tokens=tuple(step.written)) if isinstance(reply, Tokens) else reply


def _block_input(work: Work) -> BlockInput:
    session, step = work.session, work.step
    if step is None:
        raise TypeError("a chunk of a prompt has nothing to judge")
    message = step.message
    return BlockInput(
        tokens=work.drafted,
        q=_first_positions(step.q, len(work.drafted)) if work.drafted and step.q is not None else None,
        sampling=session.sampling,
        rule=session.request.verification,
        base_len=len(session.committed),
        more=isinstance(message, DraftBlock) and message.more and len(work.drafted) == len(message.tokens),
        logprobs=session.request.logprobs,
        context=session.committed if needs_history(session.sampling) else (),
        prompt_len=session.answer_start,
        eos_ids=session.request.eos_ids,
        siblings=work.siblings,
    )


def _segment(work: Work, slots: NDArray[np.int64]) -> Segment:
    """What a piece of work feeds: its tokens, and every sibling as a leaf beside the token it may replace."""
    tokens = np.array([*work.tokens, *(token for _, token in work.siblings)], np.int64)
    if not work.siblings:
        return Segment(tokens, slots, work.num_logits)
    first = len(work.tokens) - len(work.drafted)
    chain = np.arange(len(work.tokens)) - 1
    leaves = np.array([first + place - 1 for place, _ in work.siblings])
    return Segment(tokens, slots, work.num_logits, np.concatenate((chain, leaves)))


def _first_positions(q: Distributions, num_rows: int) -> Distributions:
    if len(q.offsets) == num_rows + 1:
        return q
    end = int(q.offsets[num_rows])
    return Distributions(q.offsets[: num_rows + 1], q.ids[:end], q.probs[:end])


def _with_kept_rows(rows: torch.Tensor | None, works: Sequence[Work]) -> torch.Tensor:
    """The forward's rows with each session's kept row in front of its own. [sum(K + 1), vocab]"""
    if rows is not None and all(work.session.kept_row is None for work in works):
        return rows
    pieces: list[torch.Tensor] = []
    at = 0
    for work in works:
        if work.session.kept_row is not None:
            pieces.append(work.session.kept_row[None])
        if rows is not None and work.num_logits:
            pieces.append(rows[at : at + work.num_logits])
            at += work.num_logits
    return torch.cat(pieces)
