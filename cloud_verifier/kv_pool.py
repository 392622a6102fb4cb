"""The slots: one flat store of keys and values that every session shares.

A slot holds the key and the value of one token in every layer. A session is a list of slots, so rolling
back is forgetting slots, a shared prefix is the same slots in two lists, and nothing is ever moved.
Reference counts say who still needs a slot. One thread owns the pool; nothing here locks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from shared.faults import FaultKind, SpecwireError

_RETRY_AFTER_MS = 1000


@dataclass(frozen=True, slots=True)
class LayerShape:
    """What one attention layer keeps for one token."""

    num_kv_heads: int
    key_dim: int
    value_dim: int

    @property
    def num_values(self) -> int:
        return self.num_kv_heads * (self.key_dim + self.value_dim)


def slot_bytes(layers: Sequence[LayerShape], dtype: torch.dtype) -> int:
    """Bytes that one token takes in all layers."""
    return sum(layer.num_values for layer in layers) * dtype.itemsize


class KvPool:
    """Keys and values of `num_slots` tokens, with a reference count for each.

    `keys[layer]` is [num_slots + 1, kv_heads, key_dim], `values[layer]` likewise. The extra row,
    `padding_slot`, is always zero: padded positions read it, so that they are finite whatever others wrote.

    `reclaim`, when set, is asked to give up slots before an allocation fails; it takes the number missing.
    """

    def __init__(
        self,
        layers: Sequence[LayerShape],
        num_slots: int,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        if num_slots < 1:
            raise ValueError(f"num_slots must be at least 1, not {num_slots}")
        self.num_slots = num_slots
        self.padding_slot = num_slots
        self.slot_bytes = slot_bytes(layers, dtype)
        self.reclaim: Callable[[int], object] | None = None
        self.num_allocated_total = 0
        self.max_used = 0
        self._refs: NDArray[np.int32] = np.zeros(num_slots, dtype=np.int32)
        self._num_free = num_slots

        def store(layer: LayerShape, dim: int) -> torch.Tensor:
            return _zeros((num_slots + 1, layer.num_kv_heads, dim), dtype, torch.device(device))

        self.keys = [store(layer, layer.key_dim) for layer in layers]
        self.values = [store(layer, layer.value_dim) for layer in layers]

    @property
    def num_free(self) -> int:
        return self._num_free

    @property
    def num_used(self) -> int:
        return self.num_slots - self._num_free

    @property
    def usage(self) -> float:
        """Share of the slots that somebody holds, in [0, 1]."""
        return self.num_used / self.num_slots

    def allocate(self, num: int, *, after: int | None = None) -> NDArray[np.int64]:
        """`num` free slots, each with one reference.

        They follow slot `after` where those are free (a session that grows stays contiguous, and its keys can
        then be read in place); else they are one run where one fits, else the longest runs there are.

        Raises:
            SpecwireError: OVERLOADED when fewer than `num` slots are free, after asking `reclaim`.
        """
        if num > self._num_free and self.reclaim is not None:
            self.reclaim(num - self._num_free)
        if num > self._num_free:
            raise SpecwireError(
                FaultKind.OVERLOADED,
                f"The verifier's key-value cache is full ({self._num_free} of {self.num_slots} slots "
                f"are free, {num} are needed).",
                "Try again when another session has ended, or give the verifier a larger --kv-cache.",
                retry_after_ms=_RETRY_AFTER_MS,
            )
        slots = self._choose(num, after)
        self._refs[slots] = 1
        self._num_free -= num
        self.num_allocated_total += num
        self.max_used = max(self.max_used, self.num_used)
        return slots

    def retain(self, slots: NDArray[np.int64]) -> None:
        """One more reference to each of `slots` (distinct, all in use)."""
        self._check_held(slots, "retained")
        self._refs[slots] += 1

    def release(self, slots: NDArray[np.int64]) -> None:
        """One reference less to each of `slots` (distinct, all in use); those without any are free."""
        self._check_held(slots, "released")
        left = self._refs[slots] - 1
        self._refs[slots] = left
        self._num_free += int(np.count_nonzero(left == 0))

    @property
    def reads_in_place(self) -> bool:
        """Whether a session whose slots are consecutive is read without a copy of its own; not on a device,
        where sessions share calls and a copy of one slot would be a launch for every layer."""
        return self.keys[0].device.type == "cpu"

    def copy(self, source: int, target: int) -> None:
        """Writes the keys and values of one slot over those of another."""
        for store in (*self.keys, *self.values):
            store[target] = store[source]

    def references(self, slots: NDArray[np.int64]) -> NDArray[np.int32]:
        """How many hold each of `slots`."""
        return self._refs[slots]

    def _check_held(self, slots: NDArray[np.int64], verb: str) -> None:
        if slots.size == 0:
            return
        ordered = np.sort(slots)
        inside = ordered[0] >= 0 and ordered[-1] < self.num_slots
        if not inside or bool(np.any(ordered[1:] == ordered[:-1])) or bool(np.any(self._refs[slots] < 1)):
            raise SpecwireError(
                FaultKind.INTERNAL,
                f"Slots are {verb} that are not in use, or twice in one call.",
                "Report this bug.",
            )

    def _choose(self, num: int, after: int | None) -> NDArray[np.int64]:
        if after is not None:
            start, end = after + 1, after + 1 + num
            if end <= self.num_slots and not self._refs[start:end].any():
                return np.arange(start, end, dtype=np.int64)
        # Runs of free slots, from where "free" changes along the pool.
        free = np.concatenate(([False], self._refs == 0, [False]))
        edges = np.flatnonzero(free[1:] != free[:-1])
        starts, lengths = edges[0::2], edges[1::2] - edges[0::2]
        fitting = np.flatnonzero(lengths >= num)
        if fitting.size:
            start = int(starts[fitting[np.argmin(lengths[fitting])]])
            return np.arange(start, start + num, dtype=np.int64)
        longest_first = np.argsort(-lengths, kind="stable")
        taken = longest_first[: int(np.searchsorted(np.cumsum(lengths[longest_first]), num)) + 1]
        runs = [np.arange(starts[i], starts[i] + lengths[i], dtype=np.int64) for i in taken]
        return np.concatenate(runs)[:num] if runs else np.empty(0, dtype=np.int64)


def _zeros(shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros that take memory only once they are written: on a CPU torch.zeros would touch every page."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    lazy = np.zeros(math.prod(shape) * dtype.itemsize, dtype=np.uint8)
    return torch.from_numpy(lazy).view(dtype).view(shape)
