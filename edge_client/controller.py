"""How much to draft, how far ahead, and whether the edge should draft at all."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from edge_client.results import Round


@dataclass(frozen=True, slots=True)
class Plan:
    """What to do next.

    Args:
        k: drafted tokens in a block.
        ahead: blocks that may be in flight beyond the first.
        cloud_tokens: when not 0, the verifier writes so many tokens alone instead.
    """

    k: int = 5
    ahead: int = 0
    cloud_tokens: int = 0


class Controller(Protocol):
    """Decides before every block; sees every round."""

    def plan(self) -> Plan: ...

    def observe(self, done: Round) -> None: ...


@dataclass(frozen=True, slots=True)
class FixedController:
    """Always the same plan."""

    fixed: Plan

    def plan(self) -> Plan:
        return self.fixed

    def observe(self, done: Round) -> None:
        pass
