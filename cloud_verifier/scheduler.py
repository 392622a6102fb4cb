"""Which work shares the next forward pass.

Natural batching: whenever the model is free, everything that waits goes into the next pass, up to a
token budget. Nobody waits for a timer or for a full batch. Steps (blocks to judge, tokens to write) come
before prompts, in the order of their arrival. Prompts go in chunks; beside steps they get a fixed share of
the pass, so that neither side starves the other and a verdict waits for one chunk at most.
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
        pass_tokens: of steps at most (a single step may have more), or of prompts when no step waits.
        prefill_share: of prompts at most, in addition, in a pass that also answers steps.
    """

    pass_tokens: int = 512
    prefill_share: int = 128

    def __post_init__(self) -> None:
        for name in ("pass_tokens", "prefill_share"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")


@dataclass(frozen=True, slots=True)
class Work:
    """One session's part of a pass.

    Args:
        start: the session's `kv_len` when this was planned; position of the first of `tokens`.
        tokens: to feed.
        step: what is answered after the pass; None for a chunk of a prompt.
        drafted: the block's tokens among `tokens` (the last ones); empty when the target writes alone.
        siblings: (i, token) fed after all of them, in the place of drafted token i.
    """

    session: Session
    start: int
    tokens: tuple[int, ...]
    step: Step | None = None
    drafted: tuple[int, ...] = ()
    siblings: tuple[tuple[int, int], ...] = ()

    @property
    def num_fed(self) -> int:
        return len(self.tokens) + len(self.siblings)

    @property
    def num_logits(self) -> int:
        """Rows wanted from the forward: of each drafted token and sibling, and the bonus; less a kept one."""
        if self.step is None:
            return 0
        return len(self.drafted) + len(self.siblings) + (self.session.kept_row is None)


def plan(sessions: Iterable[Session], budget: Budget) -> list[Work]:
    """Chooses the next pass from the sessions that have something to do.

    Each session appears at most once. The oldest step is taken whatever its size, and so is some of the
    oldest prompt, so that nothing can wait for ever.
    """
    chosen: list[Work] = []
    prompts: list[Session] = []
    left = budget.pass_tokens
    stepping: list[Session] = []
    for session in sessions:
        is_prompt = not session.steps or session.behind > budget.prefill_share
        (prompts if is_prompt else stepping).append(session)
    for session in sorted(stepping, key=lambda s: s.steps[0].arrived_at):
        work = _step_work(session)
        if not chosen or len(work.tokens) <= left:
            chosen.append(work)
            left -= len(work.tokens)
    left = budget.prefill_share if chosen else budget.pass_tokens
    for session in sorted(prompts, key=lambda s: s.waiting_since):
        if left <= 0:
            break
        # The last token stays behind: its logits are wanted with the first step.
        end = min(session.kv_len + left, len(session.committed) - 1)
        work = Work(session, session.kv_len, tuple(session.committed[session.kv_len : end]))
        if session.steps and len((whole := _step_work(session)).tokens) <= left:
            work = whole
        if work.tokens:
            chosen.append(work)
            left -= len(work.tokens)
    return chosen


def _step_work(session: Session) -> Work:
    step = session.steps[0]
    drafted = session.drafted(step.message) if isinstance(step.message, DraftBlock) else ()
    tokens = (*session.committed[session.kv_len :], *drafted)
    return Work(session, session.kv_len, tokens, step, drafted)
