"""The target's distribution of every row of a pass, computed as far as a rule looks at it.

A rule looks at a few tokens of every row and at one whole row a session. So rows without top-k,
top-p and min-p are never written out: one sweep in pieces that fit the processor's cache finds each
row's normaliser, and single probabilities follow from the logits. Only truncated rows are kept whole.
"""

from __future__ import annotations

import numpy as np
import torch

from cloud_verifier.verification.transforms import RowParams, target_probs

_PIECE_ELEMENTS = 1 << 21  # float32: 8 MB


class TargetProbs:
    """p of all rows.

    Args:
        logits: [R, V] in any float type.
        top: [R], their maxima.
        params: of every row.
    """

    def __init__(self, logits: torch.Tensor, top: torch.Tensor, params: RowParams) -> None:
        truncated = params.truncates(logits.shape[1])
        device = logits.device
        self._logits, self._top = logits, top.float()
        self._scale = torch.from_numpy(np.where(truncated, 1, params.temperature)).to(device)
        self._places: torch.Tensor | None = None
        if truncated.any():
            rows = np.flatnonzero(truncated)
            index = torch.from_numpy(rows).to(device)
            # [num truncated, V], and where each row of the pass stands in it, -1 for the others
            self._whole = target_probs(logits[index], top[index], params.take(rows))
            self._places = torch.full((len(logits),), -1, device=device).index_copy_(
                0, index, torch.arange(len(rows), device=device)
            )
        self._mass = None if truncated.all() else _masses(logits, self._top, self._scale)

    def at(self, rows: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """float64 [n]: p of token ids[i] in row rows[i]."""
        if self._mass is None:
            return self._whole[self._place(rows), ids].double()
        weights = (self._logits[rows, ids].float() - self._top[rows]).div_(self._scale[rows]).exp_()
        probs = weights.double() / self._mass[rows].double()
        if self._places is None:
            return probs
        place = self._places[rows]
        return torch.where(place >= 0, self._whole[place.clamp(min=0), ids].double(), probs)

    def whole(self, rows: torch.Tensor) -> torch.Tensor:
        """float32 [n, V]: a copy of whole rows."""
        if self._mass is None:
            return self._whole[self._place(rows)]
        probs = self._logits[rows].float().sub_(self._top[rows, None]).div_(self._scale[rows, None]).exp_()
        probs /= self._mass[rows, None]
        if self._places is None:
            return probs
        place = self._places[rows, None]
        return torch.where(place >= 0, self._whole[place[:, 0].clamp(min=0)], probs)

    def _place(self, rows: torch.Tensor) -> torch.Tensor:
        return rows if self._places is None else self._places[rows]


def _masses(logits: torch.Tensor, top: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """float32 [R]: sum of exp((logits - top) / scale) of each row."""
    num_rows, vocab_size = logits.shape
    step = max(1, _PIECE_ELEMENTS // vocab_size) if logits.device.type == "cpu" else num_rows
    buffer = torch.empty((min(step, num_rows), vocab_size), device=logits.device)
    mass = torch.empty(num_rows, device=logits.device)
    plain = bool((scale == 1).all()) if logits.device.type == "cpu" else False
    for start in range(0, num_rows, step):
        part = slice(start, min(start + step, num_rows))
        piece = buffer[: part.stop - start]
        torch.sub(logits[part], top[part, None], out=piece)
        if not plain:
            piece.div_(scale[part, None])
        torch.sum(piece.exp_(), dim=1, out=mass[part])
    return mass


def row_choice(logits: torch.Tensor) -> torch.Tensor:
    """int64 [R]: the likeliest token of each row, the lowest id among equals, a NaN before all."""
    if logits.device.type != "cpu":
        return logits.argmax(dim=1)
    # NumPy's argmax is vectorised where torch's is not: 5 to 10 times as fast on a CPU. In pieces,
    # because half-precision rows have to be widened.
    step = max(1, _PIECE_ELEMENTS // logits.shape[1])
    best = [piece.float().numpy().argmax(axis=1) for piece in torch.split(logits, step)]
    return torch.from_numpy(np.concatenate(best)) if best else torch.zeros(0, dtype=torch.int64)
