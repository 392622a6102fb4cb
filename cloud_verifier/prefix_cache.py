"""Prefixes that were computed before: from token sequences to the slots that hold them.

A radix tree for each owner: how fast an answer begins tells whether its beginning was known, so one owner's
texts are not looked up for another. Each node is a stretch of tokens with their slots, and holds one
reference to each; a session that begins with the same tokens takes references of its own. A node is split
where two sequences part, so that any common prefix is found, to the token. When slots are needed, leaves go
first, longest unused first, and those that sessions still read last of all, because giving them up frees
nothing yet.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from cloud_verifier.kv_pool import KvPool


@dataclass(slots=True, eq=False)
class _Node:
    tokens: NDArray[np.int64]
    slots: NDArray[np.int64]
    parent: _Node | None
    last_used: int
    children: dict[int, _Node] = field(default_factory=dict)  # by first token


class PrefixCache:
    """Remembers slots by the tokens that lead to them; holds one reference to each slot it remembers."""

    def __init__(self, pool: KvPool) -> None:
        self._pool = pool
        self._roots: dict[str, _Node] = {}  # by owner
        self._clock = 0
        self.num_slots = 0  # remembered
        self.num_hit_tokens = 0  # found by match, in all

    def match(self, tokens: Sequence[int] | NDArray[np.int64], owner: str = "") -> NDArray[np.int64]:
        """Slots of the longest prefix of `tokens` that `owner` has, with a reference each for the caller."""
        root = self._roots.get(owner)
        path = self._walk(root, np.asarray(tokens, np.int64))[0] if root is not None else []
        if not path:
            return np.empty(0, np.int64)
        slots = np.concatenate([node.slots[:length] for node, length in path])
        self._pool.retain(slots)
        self.num_hit_tokens += len(slots)
        return slots

    def insert(
        self, tokens: Sequence[int] | NDArray[np.int64], slots: NDArray[np.int64], owner: str = ""
    ) -> None:
        """Remembers the slots of `tokens`, from the first token on, with a reference of its own to each.

        What `owner` has of `tokens` already keeps its slots.
        """
        wanted = np.asarray(tokens, np.int64)
        if len(wanted) != len(slots):
            raise ValueError(f"{len(wanted)} tokens cannot have {len(slots)} slots")
        if not len(wanted):
            return
        node = self._roots.setdefault(owner, _Node(wanted[:0], np.empty(0, np.int64), None, 0))
        path, known = self._walk(node, wanted)
        if known == len(wanted):
            return
        if path:
            node, length = path[-1]
            if length < len(node.tokens):
                node = self._split(node, length)
        new = slots[known:].copy()
        self._pool.retain(new)
        self.num_slots += len(new)
        node.children[int(wanted[known])] = _Node(wanted[known:].copy(), new, node, self._clock)

    def evict(self, num: int) -> None:
        """Gives up what was not used for longest, until `num` more slots are free or nothing is left."""
        goal = self._pool.num_free + num
        leaves = [(*self._rank(node), order, node) for order, node in enumerate(self._leaves())]
        heapq.heapify(leaves)
        order = len(leaves)
        while leaves and self._pool.num_free < goal:
            *_, node = heapq.heappop(leaves)
            self._pool.release(node.slots)
            self.num_slots -= len(node.slots)
            parent = node.parent
            if parent is None:
                continue
            del parent.children[int(node.tokens[0])]
            if not parent.children and parent.parent is not None:
                heapq.heappush(leaves, (*self._rank(parent), order, parent))
                order += 1
        self._roots = {owner: root for owner, root in self._roots.items() if root.children}

    def _rank(self, node: _Node) -> tuple[bool, int]:
        """Leaves of a lower rank are given up first: those that free slots, the longest unused among them."""
        return bool(np.all(self._pool.references(node.slots) > 1)), node.last_used

    def _walk(self, node: _Node, tokens: NDArray[np.int64]) -> tuple[list[tuple[_Node, int]], int]:
        """The nodes below `node` along `tokens`, with how many tokens match in each and in all."""
        self._clock += 1
        path: list[tuple[_Node, int]] = []
        at = 0
        while at < len(tokens):
            child = node.children.get(int(tokens[at]))
            if child is None:
                break
            child.last_used = self._clock
            span = min(len(child.tokens), len(tokens) - at)
            differ = np.flatnonzero(child.tokens[:span] != tokens[at : at + span])
            length = int(differ[0]) if differ.size else span
            path.append((child, length))
            at += length
            if length < len(child.tokens):
                break
            node = child
        return path, at

    def _split(self, node: _Node, at: int) -> _Node:
        """Cuts `node` in two; returns the upper part, which has the lower one as its child."""
        upper = _Node(node.tokens[:at], node.slots[:at], node.parent, node.last_used)
        if node.parent is not None:
            node.parent.children[int(node.tokens[0])] = upper
        node.tokens, node.slots, node.parent = node.tokens[at:], node.slots[at:], upper
        upper.children[int(node.tokens[0])] = node
        return upper

    def _leaves(self) -> Iterator[_Node]:
        stack = [node for root in self._roots.values() for node in root.children.values()]
        while stack:
            node = stack.pop()
            if node.children:
                stack.extend(node.children.values())
            else:
                yield node
