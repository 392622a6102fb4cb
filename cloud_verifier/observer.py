"""What the engine reports of its work: records, and a class of empty methods for whoever counts."""

from __future__ import annotations

from dataclasses import dataclass

from shared.faults import FaultKind
from shared.messages import Tokens, Verdict


@dataclass(frozen=True, slots=True)
class Answered:
    """One reply of a pass. `first_token_s` is set when it carries the first token of an answer."""

    reply: Verdict | Tokens
    num_drafted: int
    codec: str
    round_s: float  # from the arrival of the step to the reply
    first_token_s: float | None
    since_last_s: float | None  # since the session's previous tokens left


@dataclass(frozen=True, slots=True)
class PassRecord:
    """What one pass did. Durations in seconds, of the engine's clock; `busy_s` is the whole of it, from the
    moment that the engine woke up, commands and planning included."""

    num_sessions: int
    num_tokens: int
    num_prefill_tokens: int
    forward_s: float
    verification_s: float
    busy_s: float
    answered: tuple[Answered, ...]


class Observer:
    """All methods are called on the engine's thread and must return at once."""

    def passed(self, record: PassRecord) -> None:
        """A pass was done and its replies are on their way."""

    def replayed(self) -> None:
        """A step that came again got its old answer."""

    def prefix_hit(self, num_tokens: int) -> None:
        """So many tokens of a prompt were known already."""

    def faulted(self, kind: FaultKind) -> None:
        """A session ended with a fault, or was refused."""
