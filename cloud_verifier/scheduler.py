"""Which work shares the next forward pass.

Natural batching: whenever the model is free, everything that waits goes into the next pass, up to a
token budget. Nobody waits for a timer or for a full batch. Blocks come before cloud-only writing,
which comes before prompts; prompts go in chunks, and a share of the budget is theirs in every pass,
so that neither side starves the other.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from cloud_verifier.sessions import Session, Step
from shared.messages import DraftBlock


@dataclass(frozen=True, slots=True)
class Budget:
    """Tokens of one pass.

    Args:
        pass_tokens: at most so many tokens in one pass.
        prefill_chunk: at most so many prompt tokens of one session in one pass.
        prefill_share: so many tokens of a pass are kept for prompts when any wait.
    """

    pass_tokens: int = 512
    prefill_chunk: int = 256
    prefill_share: int = 64

    def __post_init__(self) -> None:
        for name in ("pass_tokens", "prefill_chunk", "prefill_share"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")


@dataclass(frozen=True, slots=True)
class Work:
    """One session's part of a pass.

    Args:
        tokens: to feed, the first of them at position `session.kv_len`.
        drafted: the block's tokens among them (the last ones); empty when the target writes alone.
        step: what is answered after the pass; None for a chunk of a prompt.
    """

    session: Session
    step: Step | None
    tokens: tuple[int, ...]
    drafted: tuple[int, ...] = ()

    @property
    def num_logits(self) -> int:
        """Rows wanted from the forward: one a drafted token and the bonus row, less a kept row."""
        if self.step is None:
            return 0
        return len(self.drafted) + (self.session.kept_row is None)


def plan(sessions: Iterable[Session], budget: Budget) -> list[Work]:
    """Chooses the next pass from the sessions that have something to do.

    Each session appears at most once. Order of arrival decides within each kind of work; the first
    piece of work is taken whatever its size, so that nothing can wait for ever.
    """
    verifying: list[Work] = []
    writing: list[Work] = []
    prefilling: list[Session] = []
    for session in sorted(sessions, key=_arrival):
        work = _step_work(session, budget) if session.steps else None
        if work is None:
            prefilling.append(session)
        elif isinstance(work.step and work.step.message, DraftBlock):
            verifying.append(work)
        else:
            writing.append(work)
    chosen: list[Work] = []
    left = budget.pass_tokens - (budget.prefill_share if prefilling else 0)
    for work in verifying + writing:
        if not chosen or len(work.tokens) <= left:
            chosen.append(work)
            left -= len(work.tokens)
    left += budget.prefill_share if prefilling else 0
    for session in prefilling:
        if left <= 0 and chosen:
            break
        chunk = min(budget.prefill_chunk, max(left, 1))
        start = session.kv_len
        tokens = session.committed[start : min(start + chunk, len(session.committed) - 1)]
        if tokens:
            chosen.append(Work(session, None, tuple(tokens)))
            left -= len(tokens)
    return chosen


def _step_work(session: Session, budget: Budget) -> Work | None:
    """The session's first step as work, or None while its prompt is still too long to go with it."""
    step = session.steps[0]
    message = step.message
    drafted = session.drafted(message) if isinstance(message, DraftBlock) else ()
    if session.behind > budget.prefill_chunk:
        return None
    return Work(session, step, (*session.committed[session.kv_len :], *drafted), drafted)


def _arrival(session: Session) -> float:
    return session.steps[0].arrived_at if session.steps else session.last_used
