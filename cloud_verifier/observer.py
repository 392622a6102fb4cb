"""What the engine reports of its work: a class of empty methods, to be overridden by whoever counts."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cloud_verifier.passes import PassRecord
    from shared.faults import FaultKind


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
