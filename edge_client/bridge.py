"""What the verifier writes while the edge still reads.

Before its first block an edge has to read the prompt, or a stretch that the verifier wrote alone. The
verifier has read it sooner, so it writes meanwhile: those tokens are shown earlier, and they hardly delay the
block, as they are asked for one by one and only while the next one would come in time.
"""

from __future__ import annotations

from dataclasses import dataclass

A_TEXT = 8
"""Tokens: fewer are what a round leaves behind, and are read with the next block."""


@dataclass(frozen=True, slots=True)
class Bridge:
    """Durations in seconds, all expected.

    Args:
        read_s: for the edge to read one token of a text.
        network_s: there and back.
        step_s: for the verifier to write one token.
    """

    read_s: float
    network_s: float
    step_s: float

    def wants(self, num_unread: int, elapsed_s: float, num_asked: int) -> bool:
        """Whether to ask for one more token.

        Args:
            num_unread: tokens that there were to read `elapsed_s` seconds ago.
            num_asked: tokens that have been asked for and have not come.
        """
        if num_unread < A_TEXT:
            return False
        covers_delay = (num_asked - 1) * self.step_s > self.network_s
        left_s = num_unread * self.read_s - elapsed_s
        return not covers_delay and left_s > self.network_s + (num_asked + 1) * self.step_s
