"""Rows of float32 logits on a CPU, read at the speed of its memory; the Python side of `rows.c`.

torch reads a row several times over and writes as much as it reads; a pass of many sessions is tens of
megabytes of logits, and their verification would take as long as a small model's forward.
"""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from cloud_verifier.native import load_library
from shared.config import cache_dir
from shared.randomness import Purpose

_SOURCE = Path(__file__).with_name("rows.c")

Ints = NDArray[np.int64]
Floats = NDArray[np.float32]
Doubles = NDArray[np.float64]
Cuts = tuple[Ints, Doubles, Floats]


class RowKernel:
    """The compiled functions. `logits` are float32 [P, V] on the CPU, dense in their second dimension; `rows`
    int64 [R] says which of them are meant, and `rate` float32 [R] is log2(e) / temperature."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        for name in ("summary", "draw", "coupled", "truncate"):
            getattr(library, f"specwire_{name}").restype = None

    def summary(self, logits: torch.Tensor, rows: Ints, rate: Floats) -> tuple[Floats, Ints, Doubles]:
        """Maximum (NaN where the row has one), its lowest id, and sum of exp((x - max) / T) of each row; the
        sum is 1 where `rate` is 0."""
        num = len(rows)
        top, place, mass = np.empty(num, np.float32), np.empty(num, np.int64), np.empty(num)
        self._call("summary", logits, rows, rate, top, place, mass)
        return top, place, mass

    def draw(
        self,
        logits: torch.Tensor,
        rows: Ints,
        rate: Floats,
        top: Floats,
        factor: Floats,
        q: tuple[Ints, Ints, Doubles],
        uniform: Doubles,
    ) -> Ints:
        """One id a row, from max(factor exp((x - top) / T) - q, 0), or without q where that has no mass.

        Args:
            q: offsets [R + 1], ids (ascending in each row) and probabilities of its entries.
            uniform: [R] draws in [0, 1).
        """
        out = np.empty(len(rows), np.int64)
        self._call("draw", logits, rows, rate, top, factor, *q, uniform, out)
        return out

    def truncate(
        self, logits: torch.Tensor, rows: Ints, rate: Floats, top: Floats, mass: Doubles, cuts: Cuts
    ) -> tuple[Ints, Ints, Floats]:
        """Row, id and p of every token that top-k, top-p and min-p leave; ascending by row and id.

        Args:
            top, mass: [R], as from `summary`; mass counts in rows with a nucleus only.
            cuts: top_k, top_p and min_p of each row, [R] each.
        """
        counts, most = np.empty(len(rows), np.int64), 512
        while True:
            ids, probs = np.empty((len(rows), most), np.int64), np.empty((len(rows), most), np.float32)
            room = np.array([most])
            self._call("truncate", logits, rows, rate, top, mass, *cuts, room, counts, ids, probs)
            if (needed := int(counts.max(initial=0))) <= most:
                break
            most = needed
        held = np.arange(most) < counts[:, None]
        return np.repeat(np.arange(len(rows)), counts), ids[held], probs[held]

    def coupled(
        self,
        logits: torch.Tensor,
        rows: Ints,
        first: Ints,
        drafted: Ints,
        rate: Floats,
        top: Floats,
        likeliest: Ints,
        keys: tuple[Ints, Ints],
    ) -> tuple[Ints, Ints]:
        """num_accepted and the token beyond, for blocks whose rows are first[b] ... first[b + 1] of `rows`.

        Args:
            drafted: [R - B], all blocks' tokens.
            top, likeliest: [R], as from `summary`.
            keys: seed and position of each row, [R] each.
        """
        num_accepted, out = np.empty(len(first) - 1, np.int64), np.empty(len(first) - 1, np.int64)
        self._library.specwire_coupled(
            *_matrix(logits),
            _pointer(rows),
            ctypes.c_size_t(len(first) - 1),
            *(_pointer(array) for array in (first, drafted, rate, top, likeliest, *keys)),
            ctypes.c_uint32(Purpose.COUPLED),
            _pointer(num_accepted),
            _pointer(out),
            ctypes.c_int(torch.get_num_threads()),
        )
        return num_accepted, out

    def _call(self, name: str, logits: torch.Tensor, rows: Ints, *arrays: NDArray[Any]) -> None:
        getattr(self._library, f"specwire_{name}")(
            *_matrix(logits),
            _pointer(rows),
            ctypes.c_size_t(len(rows)),
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


def _pointer(array: NDArray[Any]) -> ctypes.c_void_p:
    if not array.flags.c_contiguous:
        raise ValueError("the kernel reads dense arrays only")
    return ctypes.c_void_p(array.ctypes.data)
