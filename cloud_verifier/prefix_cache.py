"""Prefixes that sessions share: the slots of token sequences that were computed before, by least recent use."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from cloud_verifier.kv_pool import KvPool


class PrefixCache:
    """Remembers the slots of whole sequences; each entry holds one reference to each of its slots."""

    def __init__(self, pool: KvPool) -> None:
        self._pool = pool
        self._entries: OrderedDict[tuple[int, ...], NDArray[np.int64]] = OrderedDict()

    def match(self, tokens: Sequence[int]) -> NDArray[np.int64]:
        """Slots of the longest known prefix of `tokens`, with a reference each for the caller."""
        wanted = np.asarray(tokens, np.int64)
        best: tuple[int, ...] | None = None
        best_len = 0
        for known in self._entries:
            common = min(len(known), len(wanted))
            same = np.asarray(known[:common], np.int64) == wanted[:common]
            length = common if same.all() else int(same.argmin())
            if length > best_len:
                best, best_len = known, length
        if best is None:
            return np.empty(0, np.int64)
        self._entries.move_to_end(best)
        slots = self._entries[best][:best_len]
        self._pool.retain(slots)
        return slots.copy()

    def insert(self, tokens: Sequence[int], slots: NDArray[np.int64]) -> None:
        """Keeps the slots of `tokens`, with a reference of its own to each."""
        key = tuple(tokens)
        if not key or key in self._entries:
            return
        self._pool.retain(slots)
        self._entries[key] = slots.copy()

    def evict(self, num: int) -> None:
        """Gives up entries until `num` more slots are free, or nothing is left."""
        goal = self._pool.num_free + num
        while self._entries and self._pool.num_free < goal:
            _, slots = self._entries.popitem(last=False)
            self._pool.release(slots)
