"""One forward pass: slots, forward, verification, and what the outcomes change.

Only the engine's thread calls this.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from cloud_verifier.kv_pool import KvPool
from cloud_verifier.registry import Registry
from cloud_verifier.scheduler import Work
from cloud_verifier.sessions import Session, Step
from cloud_verifier.target_model import Segment
from cloud_verifier.verification import VERIFICATIONS, BlockInput, BlockOutcome, judge
from shared.codecs.base import Distributions
from shared.faults import FaultKind, SpecwireError
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

    def seconds(self, num_tokens: int) -> float:
        return (self.base_ms + self.per_token_ms * num_tokens) / 1e3


@dataclass(frozen=True, slots=True)
class PassRecord:
    """What one pass did, for metrics. Durations in seconds, of the engine's clock."""

    num_sessions: int
    num_tokens: int
    num_prefill_tokens: int
    forward_s: float
    verification_s: float
    busy_s: float
    replies: tuple[tuple[Session, Verdict | Tokens, int], ...]  # with the number of drafted tokens


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
        emulation: StepEmulation | None,
        clock: Callable[[], float],
    ) -> None:
        self.observers: list[Callable[[PassRecord], None]] = []
        self._model = model
        self._registry = registry
        self._emulation = emulation
        self._clock = clock

    def run(self, works: list[Work]) -> None:
        started = self._clock()
        self._registry.in_pass = {work.session.session_id for work in works}
        ready: list[Piece] = []
        for work in works:
            try:
                after = int(work.session.slots[-1]) if work.session.kv_len else None
                ready.append((work, self._model.pool.allocate(len(work.tokens), after=after)))
            except SpecwireError as error:
                if not ready:
                    self._registry.fault(work.session, error)
                    break
                # The others free slots when they end; this one waits for the next pass.
        for pieces, result in self._compute(ready) if ready else []:
            self._finish(pieces, result, started)
        self._registry.in_pass = set()

    def _compute(self, ready: list[Piece]) -> list[tuple[list[Piece], _Result]]:
        """Forward and verification. When a pass fails, each piece runs alone, so that only the one
        at fault ends."""
        try:
            return [(ready, self._forward_and_judge(ready))]
        except Exception as error:
            if len(ready) > 1:
                return [done for piece in ready for done in self._compute([piece])]
            work, new_slots = ready[0]
            self._model.pool.release(new_slots)
            if not isinstance(error, SpecwireError):
                log.error("session %s failed in a pass", work.session.session_id, exc_info=error)
                error = SpecwireError(
                    FaultKind.INTERNAL,
                    f"The verifier failed on this session: {type(error).__name__}.",
                    "Try again; the operator finds the cause in the verifier's log.",
                )
            self._registry.fault(work.session, error)
            return []

    @torch.inference_mode()
    def _forward_and_judge(self, ready: list[Piece]) -> _Result:
        segments = [
            Segment(
                np.asarray(work.tokens, np.int64),
                np.concatenate((work.session.slots, new_slots)),
                work.num_logits,
            )
            for work, new_slots in ready
            if work.tokens
        ]
        started = self._clock()
        rows = self._model.forward(segments) if segments else None
        if self._emulation is not None:
            num_tokens = sum(len(work.tokens) for work, _ in ready)
            time.sleep(max(0.0, self._emulation.seconds(num_tokens) - (self._clock() - started)))
        judging = self._clock()
        judged = [work for work, _ in ready if work.step is not None]
        logits = _with_kept_rows(rows, judged) if judged else None
        outcomes = judge(logits, [_block_input(work) for work in judged]) if logits is not None else []
        return _Result(logits, outcomes, judging - started, self._clock() - judging)

    def _finish(self, pieces: list[Piece], result: _Result, started: float) -> None:
        """Commits the outcomes of a pass and replies."""
        num_tokens = sum(len(work.tokens) for work, _ in pieces)
        replies: list[tuple[Session, Verdict | Tokens, int]] = []
        outcomes = iter(result.outcomes)
        row = 0
        for work, new_slots in pieces:
            session = work.session
            if work.step is None:
                session.slots = np.concatenate((session.slots, new_slots))
                self._registry.cache_prompt(session)
                continue
            timing = Timing(
                queue_us=max(0, int((started - work.step.arrived_at) * 1e6)),
                forward_us=int(result.forward_s * 1e6),
                verification_us=int(result.verification_s * 1e6),
                batch_sessions=len(pieces),
                batch_tokens=num_tokens,
            )
            row += len(work.drafted) + 1
            last_row = result.logits[row - 1] if result.logits is not None else None
            reply = self._commit(work, work.step, new_slots, next(outcomes), timing, last_row)
            if reply is not None:
                replies.append((session, reply, len(work.drafted)))
        record = PassRecord(
            num_sessions=len(pieces),
            num_tokens=num_tokens,
            num_prefill_tokens=sum(len(work.tokens) for work, _ in pieces if work.step is None),
            forward_s=result.forward_s,
            verification_s=result.verification_s,
            busy_s=self._clock() - started,
            replies=tuple(replies),
        )
        for observer in self.observers:
            observer(record)

    def _commit(
        self,
        work: Work,
        step: Step,
        new_slots: NDArray[np.int64],
        outcome: BlockOutcome,
        timing: Timing,
        last_row: torch.Tensor | None,
    ) -> Verdict | Tokens | None:
        """Turns one outcome into committed tokens, held slots and a reply; None after a fault."""
        session, message = work.session, step.message
        held = np.concatenate((session.slots, new_slots))
        if outcome.fault is not None:
            session.slots = held
            self._registry.fault(session, outcome.fault)
            return None
        before = len(session.committed)
        reply: Verdict | Tokens
        if isinstance(message, DraftBlock):
            lossy = is_lossy(session.request.verification)
            reply = verdict = session.commit_verdict(message, outcome, timing, lossy)
            continues = message.more and verdict.num_accepted == len(message.tokens)
        else:
            reply = session.commit_generated(step, outcome, timing)
            continues = False
        # The model has seen the old prefix and the accepted tokens; the rest is forgotten.
        keep = min(before + outcome.num_accepted, len(session.committed) - (not continues))
        session.slots = held[:keep]
        self._model.pool.release(held[keep:])
        session.kept_row = last_row.clone() if continues and last_row is not None else None
        if isinstance(reply, Tokens) and not reply.last:
            step.arrived_at = self._clock()
        else:
            session.steps.popleft()
            session.next_step = message.step + 1
            session.remember(message.step, _whole_reply(reply, step))
        self._registry.send(session, reply)
        self._registry.settle(session)
        return reply


def is_lossy(verification: str) -> bool:
    """Whether the rule does not keep the target's distribution."""
    return bool(getattr(VERIFICATIONS[verification], "lossy", False))


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
        q=_first_positions(step.q, len(work.drafted)) if work.drafted else None,
        sampling=session.sampling,
        rule=session.request.verification,
        base_len=len(session.committed),
        more=isinstance(message, DraftBlock) and message.more and len(work.drafted) == len(message.tokens),
        logprobs=session.request.logprobs,
    )


def _first_positions(q: Distributions | None, num_rows: int) -> Distributions | None:
    if q is None or len(q.offsets) == num_rows + 1:
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
