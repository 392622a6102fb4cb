"""The target's distribution of every row of a pass, computed as far as a rule looks at it.

A rule looks at a few tokens of every row and at one whole row a session. So no row is written out
whole until then: of a plain row only the normaliser is found, and single probabilities follow from
the logits; of a truncated row only the tokens that are left are kept.
"""

from __future__ import annotations

import numpy as np
import torch

from cloud_verifier.verification.transforms import RowParams, SparseRows, row_masses, truncated_probs

_PIECE_ELEMENTS = 1 << 19


class TargetProbs:
    """p of all rows.

    Args:
        logits: [R, V] in any float type.
        top: [R], their maxima.
        params: of every row.
        normalise: False when only `weights` of plain rows are wanted.

    Attributes:
        plain: int64 host array, the rows without truncation.
        sparse: the others, with `rows` of the pass; None when there are none.
    """

    def __init__(
        self, logits: torch.Tensor, top: torch.Tensor, params: RowParams, *, normalise: bool = True
    ) -> None:
        truncated = params.truncates(logits.shape[1])
        device = logits.device
        self._logits, self._top = logits, top.float()
        self._temperature = torch.from_numpy(np.where(truncated, np.float32(1), params.temperature)).to(
            device
        )
        self._truncated = torch.from_numpy(truncated).to(device)
        self.plain = np.flatnonzero(~truncated)
        self.sparse: SparseRows | None = None
        if truncated.any():
            rows = np.flatnonzero(truncated)
            index = torch.from_numpy(rows).to(device)
            found = truncated_probs(logits[index], self._top[index], params.take(rows))
            self.sparse = SparseRows(index[found.rows], found.ids, found.probs)
            self._keys = self.sparse.rows * logits.shape[1] + self.sparse.ids
        self._mass = torch.ones_like(self._top)
        if not normalise:
            return
        if len(self.plain) == len(logits):
            self._mass = row_masses(logits, self._top, self._temperature)
        elif len(self.plain):
            index = torch.from_numpy(self.plain).to(device)
            self._mass[index] = row_masses(logits[index], self._top[index], self._temperature[index])

    def at(self, rows: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """float64 [n]: p of token ids[i] in row rows[i]."""
        weights = (self._logits[rows, ids].float() - self._top[rows]).div_(self._temperature[rows]).exp_()
        probs = weights.double() / self._mass[rows].double()
        if self.sparse is None:
            return probs
        keys = rows * self._logits.shape[1] + ids
        place = torch.searchsorted(self._keys, keys).clamp(max=max(len(self._keys) - 1, 0))
        if not len(self._keys):
            return torch.where(self._truncated[rows], 0.0, probs)
        held = torch.where(self._keys[place] == keys, self.sparse.probs[place].double(), 0.0)
        return torch.where(self._truncated[rows], held, probs)

    def whole(self, rows: torch.Tensor) -> torch.Tensor:
        """float32 [n, V]: distinct rows in full."""
        if self.sparse is not None and not len(self.plain):
            probs = torch.zeros((len(rows), self._logits.shape[1]), device=rows.device)
        else:
            probs = self.weights(rows)
            probs /= self._mass[rows, None]
            if self.sparse is not None:
                probs.masked_fill_(self._truncated[rows, None], 0.0)
        if self.sparse is not None:
            place = torch.full_like(self._top, -1, dtype=torch.int64)
            place[rows] = torch.arange(len(rows), device=rows.device)
            of_entry = place[self.sparse.rows]
            wanted = (of_entry >= 0).nonzero()[:, 0]
            probs[of_entry[wanted], self.sparse.ids[wanted]] = self.sparse.probs[wanted]
        return probs

    def weights(self, rows: torch.Tensor) -> torch.Tensor:
        """float32 [n, V]: plain rows relative to their likeliest token."""
        shifted = self._logits[rows].float() - self._top[rows, None]
        return shifted.div_(self._temperature[rows, None]).exp_()


def row_choice(logits: torch.Tensor) -> torch.Tensor:
    """int64 [R]: the likeliest token of each row, the lowest id among equals, a NaN before all."""
    if logits.device.type != "cpu":
        return logits.argmax(dim=1)
    # NumPy's argmax is vectorised where torch's is not: 5 to 10 times as fast on a CPU. In pieces,
    # because half-precision rows have to be widened.
    step = max(1, _PIECE_ELEMENTS // logits.shape[1])
    best = [piece.float().numpy().argmax(axis=1) for piece in torch.split(logits, step)]
    return torch.from_numpy(np.concatenate(best)) if best else torch.zeros(0, dtype=torch.int64)
