"""Rows of float32 logits on a CPU, read at the speed of its memory; the Python side of `rows.c`.

torch reads a row several times over and writes as much as it reads; a pass of many sessions is tens of
megabytes of logits, and their verification would take as long as a small model's forward.
"""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from cloud_verifier.native import load_library
from shared import randomness
from shared.config import cache_dir
from shared.randomness import Purpose

_SOURCE = Path(__file__).with_name("rows.c")
_NOTHING = ctypes.c_char * 0  # begins where an array does, even an empty one

Ints = NDArray[np.int64]
Floats = NDArray[np.float32]
Doubles = NDArray[np.float64]
Cuts = tuple[Ints, Doubles, Floats]


class Blocks(NamedTuple):
    """Blocks of a batch: block b has rows first[b] ... first[b + 1] - 1, one more than drafted tokens."""

    first: Ints  # [B + 1]
    drafted: Ints  # [N], all blocks' tokens

    @property
    def num(self) -> int:
        return len(self.first) - 1


class Entries(NamedTuple):
    """q of N drafted tokens: token i has the entries offsets[i] ... offsets[i + 1] - 1."""

    offsets: Ints  # [N + 1]
    ids: Ints  # [nnz], ascending in each
    probs: Doubles  # [nnz]


class RowKernel:
    """The compiled functions. `logits` are float32 [P, V] on the CPU, dense in their second dimension; `rows`
    int64 [R] says which of them are meant, and `rate` float32 [R] is log2(e) / temperature."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        for name in ("summary", "token", "block", "draw", "coupled", "truncate", "uniforms"):
            getattr(library, f"specwire_{name}").restype = None

    def summary(self, logits: torch.Tensor, rows: Ints, rate: Floats) -> tuple[Floats, Ints, Doubles]:
        """Maximum (NaN where the row has one), its lowest id, and sum of exp((x - max) / T) of each row; the
        sum is 1 where `rate` is 0."""
        num = len(rows)
        top, place, mass = np.empty(num, np.float32), np.empty(num, np.int64), np.empty(num)
        self._call("summary", logits, rows, rate, top, place, mass)
        return top, place, mass

    def token(
        self,
        logits: torch.Tensor,
        rows: Ints,
        blocks: Blocks,
        drawn: Doubles,
        uniform: Doubles,
        weight: Doubles,
        rate: Floats,
        top: Floats,
        mass: Doubles,
    ) -> Ints:
        """num_accepted of each block, token by token against (1 - weight) p + weight q.

        Args:
            drawn: [N], q of the drafted tokens themselves.
            uniform: [R] draws in [0, 1).
            weight: [B].
            top, mass: [R], written for the rows that are reached, as `summary` gives them.
        """
        num_accepted = np.empty(blocks.num, np.int64)
        arrays = (*blocks, drawn, uniform, weight, rate, top, mass, num_accepted)
        self._call("token", logits, rows, *arrays, num=blocks.num)
        return num_accepted

    def block(
        self,
        logits: torch.Tensor,
        rows: Ints,
        blocks: Blocks,
        drawn: Doubles,
        q: Entries,
        uniform: Doubles,
        rate: Floats,
        top: Floats,
        mass: Doubles,
    ) -> tuple[Ints, Doubles]:
        """num_accepted of each block, jointly, and what p is multiplied by after that, as `draw` takes it.

        Args:
            drawn: [N], q of the drafted tokens themselves.
            q: of the drafted tokens.
            uniform: [R] draws in [0, 1).
            top, mass: [R], written for the rows that are read, as `summary` gives them.
        """
        num_accepted, scale = np.empty(blocks.num, np.int64), np.empty(blocks.num)
        arrays = (*blocks, drawn, *q, uniform, rate, top, mass, num_accepted, scale)
        self._call("block", logits, rows, *arrays, num=blocks.num)
        return num_accepted, scale

    def draw(
        self,
        logits: torch.Tensor,
        rows: Ints,
        first: Ints,
        num_accepted: Ints,
        scale: Doubles,
        q: Entries,
        rate: Floats,
        top: Floats,
        mass: Doubles,
        uniform: Doubles,
    ) -> Ints:
        """The id behind what is accepted of each block: from max(scale p - q, 0) after a rejection, from p
        where that has no mass or where all is accepted.

        Args:
            first: as in `Blocks`.
            scale: [B].
            q: of the drafted tokens.
            rate, top, mass, uniform: [R].
        """
        out = np.empty(len(num_accepted), np.int64)
        arrays = (first, num_accepted, scale, *q, rate, top, mass, uniform, out)
        self._call("draw", logits, rows, *arrays, num=len(num_accepted))
        return out

    def truncate(
        self, logits: torch.Tensor, rows: Ints, rate: Floats, top: Floats, mass: Doubles, cuts: Cuts
    ) -> tuple[Ints, Ints, Floats]:
        """Row, id and p of every token that top-k, top-p and min-p leave; ascending by row and id.

        Args:
            top, mass: [R], as from `summary`; mass counts in rows with a nucleus only.
            cuts: top_k, top_p and min_p of each row, [R] each.

        Raises:
            MemoryError: there was none for a row's tokens.
        """
        counts, most = np.empty(len(rows), np.int64), 512
        while True:
            ids, probs = np.empty((len(rows), most), np.int64), np.empty((len(rows), most), np.float32)
            room = np.array([most])
            self._call("truncate", logits, rows, rate, top, mass, *cuts, room, counts, ids, probs)
            if counts.min(initial=0) < 0:
                raise MemoryError(f"no memory to rank {logits.shape[1]} tokens")
            if (needed := int(counts.max(initial=0))) <= most:
                break
            most = needed
        held = np.arange(most) < counts[:, None]
        return np.repeat(np.arange(len(rows)), counts), ids[held], probs[held]

    def coupled(
        self,
        logits: torch.Tensor,
        rows: Ints,
        blocks: Blocks,
        rate: Floats,
        keys: tuple[Ints, Ints],
        top: Floats,
    ) -> tuple[Ints, Ints]:
        """num_accepted and the token beyond, of each block.

        Args:
            keys: seed and position of each row, [R] each.
            top: [R], written for the rows that are reached, as `summary` gives it.
        """
        num_accepted, out = np.empty(blocks.num, np.int64), np.empty(blocks.num, np.int64)
        arrays = (*blocks, rate, *keys, top, num_accepted, out)
        self._call("coupled", logits, rows, *arrays, num=blocks.num)
        return num_accepted, out

    def uniforms(self, seeds: Ints, purpose: Purpose, positions: Ints, bases: Ints) -> Doubles:
        """`shared.randomness.uniforms` of n draws; `seeds` are their 64 bits as int64."""
        out = np.empty(len(seeds))
        self._library.specwire_uniforms(
            ctypes.c_size_t(len(seeds)),
            *(_pointer(array) for array in (seeds, positions, bases)),
            ctypes.c_uint32(purpose),
            _pointer(out),
        )
        return out

    def _call(
        self, name: str, logits: torch.Tensor, rows: Ints, *arrays: NDArray[Any], num: int | None = None
    ) -> None:
        getattr(self._library, f"specwire_{name}")(
            *_matrix(logits),
            _pointer(rows),
            ctypes.c_size_t(len(rows) if num is None else num),
            *(_pointer(array) for array in arrays),
            ctypes.c_int(torch.get_num_threads()),
        )


@cache
def row_kernel() -> RowKernel | None:
    """The compiled functions; None without a C compiler."""
    library = load_library(
        _SOURCE, cache_dir(), instead="verification runs on torch's operations, more slowly"
    )
    return None if library is None else RowKernel(library)


def uniforms(seeds: Ints, purpose: Purpose, positions: Ints, bases: Ints) -> Doubles:
    """`shared.randomness.uniforms` of n draws; `seeds` are their 64 bits as int64."""
    kernel = row_kernel()
    if kernel is None:
        return randomness.uniforms(seeds.view(np.uint64), purpose, positions, bases)
    return kernel.uniforms(seeds, purpose, positions, bases)


def kernel_for(logits: torch.Tensor) -> RowKernel | None:
    """The compiled functions, if they can read these logits."""
    readable = logits.device.type == "cpu" and logits.dtype == torch.float32 and logits.stride(1) == 1
    return row_kernel() if readable else None


def _matrix(logits: torch.Tensor) -> tuple[ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t]:
    return (
        ctypes.c_void_p(logits.data_ptr()),
        ctypes.c_size_t(logits.stride(0)),
        ctypes.c_size_t(logits.shape[1]),
    )


def _pointer(array: NDArray[Any]) -> ctypes.Array[ctypes.c_char]:
    """Of a dense writable array; others are a TypeError. In half the time of `array.ctypes`."""
    return _NOTHING.from_buffer(array.data)
