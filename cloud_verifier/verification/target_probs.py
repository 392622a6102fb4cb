"""The target's distribution of every row of a pass, computed as far as a rule looks at it.

A rule looks at a few tokens of every row and at one whole row a session. So no row is written out
whole until then: of a plain row only the normaliser is found, and single probabilities follow from
the logits; of a truncated row only the tokens that are left are kept.
"""

from __future__ import annotations

import torch

from cloud_verifier.verification.rows import Rows
from cloud_verifier.verification.transforms import SparseRows, truncated_probs


class TargetProbs:
    """p of all rows.

    Attributes:
        rows: what it is made of.
        sparse: what is left of rows that lose tokens; None where none does. All lose some, or none.
    """

    def __init__(self, rows: Rows) -> None:
        params = rows.params
        self.rows = rows
        self.sparse: SparseRows | None = None
        self._index = rows.device_index()
        self._temperature = torch.from_numpy(params.temperature).to(rows.device)
        if rows.truncated:
            self.sparse = _truncated(rows)
            self._keys = self.sparse.rows * rows.vocab_size + self.sparse.ids

    def at(self, rows: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """float64 [n]: p of token ids[i] in row rows[i]."""
        if self.sparse is None:
            logits = self.rows.logits[self._index[rows], ids].float()
            weights = logits.sub_(self.rows.top[rows]).div_(self._temperature[rows]).exp_()
            return weights.double() / self.rows.mass[rows]
        if not len(self._keys):
            return torch.zeros(len(rows), dtype=torch.float64, device=rows.device)
        keys = rows * self.rows.vocab_size + ids
        place = torch.searchsorted(self._keys, keys).clamp_(max=len(self._keys) - 1)
        return torch.where(self._keys[place] == keys, self.sparse.probs[place].double(), 0.0)

    def whole(self, rows: torch.Tensor) -> torch.Tensor:
        """float32 [n, V]: rows that lose no token, in full."""
        return self.weights(rows).div_(self.rows.mass[rows, None].float())

    def weights(self, rows: torch.Tensor) -> torch.Tensor:
        """float32 [n, V]: such rows relative to their likeliest token."""
        shifted = self.rows.logits[self._index[rows]].float() - self.rows.top[rows, None]
        return shifted.div_(self._temperature[rows, None]).exp_()


def _truncated(rows: Rows) -> SparseRows:
    params = rows.params.without_cold()
    if rows.kernel is None:
        return truncated_probs(rows.take(), rows.top, params, rows.mass)
    cuts = (params.top_k, params.top_p, params.min_p)
    found = rows.kernel.truncate(
        rows.logits, rows.index, params.rate(), rows.top.numpy(), rows.mass.numpy(), cuts
    )
    return SparseRows(*(torch.from_numpy(array) for array in found))
