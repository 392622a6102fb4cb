"""What the verifier knows of one session, and how a verdict changes it.

A session owns its committed prefix. Everything here is plain state and arithmetic on lists: no
network, no model, no clock. `cloud_verifier.scheduler` is the only caller that changes a session,
from its one thread, so nothing needs a lock.

KV invariant (`kv_len` is the number of leading committed tokens whose keys and values are held):
committed - 1 after a round, or committed after a wholly accepted `more` block, whose last row of
logits is then kept in `kept_row`.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from numpy.typing import NDArray

from cloud_verifier.admission import check_rule
from cloud_verifier.siblings import Doubt
from cloud_verifier.verification import BlockOutcome
from shared.codecs.base import Distributions
from shared.faults import FaultKind, SpecwireError
from shared.messages import (
    Append,
    DraftBlock,
    FinishReason,
    Generate,
    Logprobs,
    Open,
    SamplingParams,
    Timing,
    Tokens,
    Verdict,
)
from shared.wire import ServerMessage

REPLAY_WINDOW = 16
"""Steps whose verdicts are remembered at least, and as many as a client may have in flight."""

_WORTH_A_PASS = 8
"""So few unread tokens cost the first step next to nothing; a pass of their own would double its wait."""

Sink = Callable[[ServerMessage], None]
"""Takes a message to the client that holds the session, from the engine's thread; a fault is the last one."""


@dataclass(slots=True)
class Step:
    """One client message that advances the session, waiting for its turn.

    `arrived_at` is when it came or, for a Generate that goes on, when its last token left. `q` is the
    block's decoded payload; `written` are the tokens that a Generate has given so far.
    """

    message: DraftBlock | Append | Generate
    arrived_at: float  # seconds, the scheduler's clock
    q: Distributions | None = None
    written: list[int] = field(default_factory=list)


@dataclass(slots=True)
class Session:
    """State of one session. `slots[i]` is the KV slot of committed token i, for i < kv_len.

    `last_used` is when the client or the model last moved the session; `waiting_since` is when the first
    token of the current answer was asked for, and `emitted_at` when its newest token left (0: none yet).
    `matched` is the version of the prefix cache that this session has looked its prefix up in; `doubt` is
    what its blocks have taught of its draft.
    """

    session_id: str
    owner: str
    request: Open
    sampling: SamplingParams
    max_context: int
    committed: list[int]
    answer_start: int
    max_new_tokens: int
    epoch: int = 0
    next_step: int = 1
    finish_reason: FinishReason = FinishReason.NONE
    slots: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    kept_row: torch.Tensor | None = None
    wants_prefill: bool = True
    steps: deque[Step] = field(default_factory=deque)
    answered: OrderedDict[int, ServerMessage] = field(default_factory=OrderedDict)
    sink: Sink | None = None
    last_used: float = 0.0
    waiting_since: float = 0.0
    emitted_at: float = 0.0
    matched: int = -1
    doubt: Doubt = field(default_factory=Doubt)
    replay_window: int = REPLAY_WINDOW

    @property
    def kv_len(self) -> int:
        return len(self.slots)

    @property
    def behind(self) -> int:
        """Committed tokens that the model has not seen yet."""
        return len(self.committed) - len(self.slots)

    @property
    def limit(self) -> int:
        """Committed length at which the answer ends."""
        return min(self.answer_start + self.max_new_tokens, self.max_context)

    @property
    def has_work(self) -> bool:
        return bool(self.steps) or self.is_prefilling

    @property
    def is_prefilling(self) -> bool:
        """Whether enough of the prompt is unread to go ahead without waiting for a step."""
        return self.wants_prefill and self.behind > _WORTH_A_PASS

    def mark_ended(self) -> None:
        """Sets the finish reason of an answer that came with the request, from another verifier."""
        if len(self.committed) >= self.limit:
            self.finish_reason = FinishReason.LENGTH
        if len(self.committed) > self.answer_start and self.committed[-1] in self.request.eos_ids:
            self.finish_reason = FinishReason.STOP

    def drafted(self, block: DraftBlock) -> tuple[int, ...]:
        """The block's tokens that can still become part of the answer."""
        return block.tokens[: max(self.limit - len(self.committed), 0)]

    def remember(self, step: int, reply: ServerMessage) -> None:
        self.answered[step] = reply
        while len(self.answered) > self.replay_window:
            self.answered.popitem(last=False)

    def commit_verdict(
        self, block: DraftBlock, outcome: BlockOutcome, timing: Timing, lossy: bool
    ) -> Verdict:
        """Extends the committed prefix by an outcome; the caller then trims the KV slots to `kv_len`."""
        drafted = self.drafted(block)
        emitted, reason = self._truncate(drafted[: outcome.num_accepted] + outcome.tokens)
        num_accepted = min(outcome.num_accepted, len(emitted))
        self.committed.extend(emitted)
        self.finish_reason = reason
        # Blocks that were drafted on top of what was rejected, or past the end, must be known as stale.
        if num_accepted < len(block.tokens) or reason is not FinishReason.NONE:
            self.epoch += 1
        return Verdict(
            step=block.step,
            epoch=self.epoch,
            num_accepted=num_accepted,
            tokens=emitted[num_accepted:],
            committed_len=len(self.committed),
            finish_reason=reason,
            timing=timing,
            logprobs=_first_rows(outcome, len(emitted)),
            lossy=lossy,
        )

    def commit_generated(self, step: Step, outcome: BlockOutcome, timing: Timing) -> Tokens:
        """Adds one token that the target wrote alone."""
        message = step.message
        if not isinstance(message, Generate):
            raise TypeError("only a Generate step writes tokens alone")
        emitted, reason = self._truncate(outcome.tokens)
        self.committed.extend(emitted)
        self.finish_reason = reason
        step.written.extend(emitted)
        last = reason is not FinishReason.NONE or len(step.written) >= message.num_tokens
        return Tokens(
            step=message.step,
            epoch=self.epoch,
            tokens=emitted,
            committed_len=len(self.committed),
            finish_reason=reason,
            last=last,
            timing=timing,
            logprobs=_first_rows(outcome, len(emitted)),
        )

    def append(self, message: Append) -> Tokens:
        """Adds tokens that nobody samples and starts a new answer after them.

        Raises:
            SpecwireError: CONTEXT_EXCEEDED when they do not fit, BAD_SAMPLING or BAD_REQUEST when the
                session's rule or codec cannot serve the new sampling.
        """
        if message.sampling is not None:
            check_rule(replace(self.request, sampling=message.sampling))
        if len(self.committed) + len(message.tokens) >= self.max_context:
            raise context_exceeded(len(self.committed) + len(message.tokens), self.max_context, message.step)
        self.committed.extend(message.tokens)
        self.answer_start = len(self.committed)
        self.max_new_tokens = message.max_new_tokens
        self.sampling = message.sampling or self.sampling
        self.finish_reason = FinishReason.NONE
        self.kept_row = None
        self.wants_prefill = True
        self.emitted_at = 0.0
        self.doubt = Doubt()  # so that a new session writes the same after the same text
        return Tokens(message.step, self.epoch, (), len(self.committed), self.finish_reason)

    def check_step(self, message: DraftBlock | Append | Generate) -> None:
        """Raises OUT_OF_ORDER unless `message` continues this session exactly."""
        problem = ""
        if message.step != self.next_step:
            problem = f"came where step {self.next_step} was expected"
        elif message.epoch > self.epoch:
            problem = f"claims epoch {message.epoch}, but the session is in epoch {self.epoch}"
        # What is of an older epoch, or comes after the answer's end, is stale and not judged. An Append must
        # never land elsewhere.
        elif (self._is_current(message) or isinstance(message, Append)) and (
            message.base_len != len(self.committed)
        ):
            problem = f"follows {message.base_len} tokens, but {len(self.committed)} are committed"
        if problem:
            raise SpecwireError(
                FaultKind.OUT_OF_ORDER,
                f"Step {message.step} {problem}.",
                "Resume the session, or open a new one with the text so far.",
                step=message.step,
            )

    def _is_current(self, message: DraftBlock | Append | Generate) -> bool:
        return message.epoch == self.epoch and self.finish_reason is FinishReason.NONE

    def stale_reply(self, message: DraftBlock | Generate) -> ServerMessage:
        """The answer to a block of an older epoch, or to anything after the answer has ended."""
        if isinstance(message, Generate):
            return Tokens(message.step, self.epoch, (), len(self.committed), self.finish_reason)
        return Verdict(message.step, self.epoch, 0, (), len(self.committed), self.finish_reason, stale=True)

    def _truncate(self, emitted: tuple[int, ...]) -> tuple[tuple[int, ...], FinishReason]:
        room = self.limit - len(self.committed)
        emitted = emitted[:room]
        for index, token in enumerate(emitted):
            if token in self.request.eos_ids:
                return emitted[: index + 1], FinishReason.STOP
        return emitted, FinishReason.LENGTH if len(emitted) >= room else FinishReason.NONE


def context_exceeded(num_tokens: int, max_context: int, step: int = 0) -> SpecwireError:
    return SpecwireError(
        FaultKind.CONTEXT_EXCEEDED,
        f"{num_tokens} tokens leave no room for an answer in a context of {max_context}.",
        "Shorten the prompt or the conversation.",
        step=step,
    )


def _first_rows(outcome: BlockOutcome, num_tokens: int) -> Logprobs | None:
    if outcome.logprobs is None:
        return None
    return Logprobs(outcome.logprobs.ids[:num_tokens], outcome.logprobs.values[:num_tokens])
