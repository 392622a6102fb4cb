"""The rows of logits that a batch is judged by, and what one reading of all of them gives."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from cloud_verifier.native_rows import Doubles, Floats, RowKernel, kernel_for
from cloud_verifier.verification.transforms import RowParams

_PIECE_ELEMENTS = 1 << 19


@dataclass(frozen=True, slots=True)
class Rows:
    """R rows of a pass.

    Attributes:
        logits: [P, V] in any float type; they are read in place.
        index: int64 [R], which of the P.
        top: float32 [R], the largest logit of each row; NaN where the row has a NaN.
        mass: float64 [R], sum of exp((logits - top) / temperature); 1 in rows of which nobody needs it.
        choice: int64 [R], the lowest id of the largest logit; of rows that are not finite, any.
        params: of every row.
        truncated: whether top-k, top-p, min-p or greedy sampling takes tokens from some of them.
        kernel: reads such rows faster than torch does; None where there is none.
        unread: the kernel's form of the rule is still to write `top` and `mass` of the rows that it looks at;
            those of the others are 0 and 1.
    """

    logits: torch.Tensor
    index: NDArray[np.int64]
    top: torch.Tensor
    mass: torch.Tensor
    choice: torch.Tensor
    params: RowParams
    truncated: bool
    kernel: RowKernel | None
    unread: bool = False

    @property
    def vocab_size(self) -> int:
        return int(self.logits.shape[1])

    @property
    def device(self) -> torch.device:
        return self.logits.device

    def device_index(self) -> torch.Tensor:
        return torch.from_numpy(self.index).to(self.device)

    def on_host(self) -> tuple[Floats, Floats, Doubles]:
        """Rate, top and mass, as the compiled rules take them; `top` and `mass` are not copied."""
        return self.params.rate(), self.top.numpy(), self.mass.numpy()

    def take(self) -> torch.Tensor:
        """[R, V]"""
        return self.logits if self._are_all(self.logits, self.index) else self.logits[self.device_index()]

    @classmethod
    def read(
        cls,
        logits: torch.Tensor,
        index: NDArray[np.int64],
        params: RowParams,
        *,
        weigh: bool,
        choose: bool,
        lazily: bool,
    ) -> Rows:
        """Reads all rows once, or none.

        Args:
            lazily: whether the rule reads rows itself where there is a kernel and nothing truncates them.
            weigh: whether the rule needs the mass of rows that nothing truncates.
            choose: whether it needs `choice`; zeros are given otherwise where it is not free.
        """
        kernel = kernel_for(logits)
        truncated = bool(params.truncates(logits.shape[1]).any())
        if kernel is not None and lazily and not truncated:
            num = len(index)
            nothing = (torch.zeros(num), torch.ones(num, dtype=torch.float64), torch.zeros(num).long())
            return cls(logits, index, *nothing, params, truncated, kernel, unread=True)
        weighed = params.weighed(logits.shape[1], plain=weigh)
        if kernel is not None:
            rate = np.where(weighed, params.rate(), np.float32(0))
            top, choice, mass = kernel.summary(logits, index, rate)
            found = (torch.from_numpy(top), torch.from_numpy(mass), torch.from_numpy(choice))
        else:
            if not cls._are_all(logits, index):
                logits, index = logits[torch.from_numpy(index).to(logits.device)], np.arange(len(index))
            top_ = logits.amax(dim=1).float()
            choice_ = row_choice(logits) if choose else torch.zeros_like(top_, dtype=torch.int64)
            found = (top_, _masses(logits, top_, params, weighed), choice_)
        return cls(logits, index, *found, params, truncated, kernel)

    @staticmethod
    def _are_all(logits: torch.Tensor, index: NDArray[np.int64]) -> bool:
        return len(index) == len(logits) and np.array_equal(index, np.arange(len(index)))


def row_choice(logits: torch.Tensor) -> torch.Tensor:
    """int64 [R]: the likeliest token of each row, the lowest id among equals, a NaN before all."""
    if logits.device.type != "cpu":
        return logits.argmax(dim=1)
    # NumPy's argmax is vectorised where torch's is not: 5 to 10 times as fast on a CPU. In pieces,
    # because half-precision rows have to be widened.
    step = max(1, _PIECE_ELEMENTS // logits.shape[1])
    best = [piece.float().numpy().argmax(axis=1) for piece in torch.split(logits, step)]
    return torch.from_numpy(np.concatenate(best)) if best else torch.zeros(0, dtype=torch.int64)


def _masses(
    logits: torch.Tensor, top: torch.Tensor, params: RowParams, weighed: NDArray[np.bool_]
) -> torch.Tensor:
    mass = torch.ones_like(top, dtype=torch.float64)
    temperature = torch.from_numpy(params.temperature).to(logits.device)
    if weighed.all():
        return row_masses(logits, top, temperature)
    if weighed.any():
        index = torch.from_numpy(np.flatnonzero(weighed)).to(logits.device)
        mass[index] = row_masses(logits[index], top[index], temperature[index])
    return mass


def row_masses(logits: torch.Tensor, top: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    """float64 [R]: sum of exp((logits - top) / temperature) of each row of [R, V].

    On a CPU in pieces that its cache holds.
    """
    num_rows, vocab_size = logits.shape
    step = max(1, 4 * _PIECE_ELEMENTS // vocab_size) if logits.device.type == "cpu" else max(num_rows, 1)
    buffer = torch.empty((min(step, num_rows), vocab_size), device=logits.device)
    mass = torch.empty(num_rows, device=logits.device)
    for start in range(0, num_rows, step):
        part = slice(start, min(start + step, num_rows))
        piece = buffer[: part.stop - start]
        torch.sub(logits[part], top[part, None], out=piece)
        piece.div_(temperature[part, None])
        torch.sum(piece.exp_(), dim=1, out=mass[part])
    return mass.double()
