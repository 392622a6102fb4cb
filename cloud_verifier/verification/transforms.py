"""The torch twins of `shared.sampling`: logits of many rows -> the target's probabilities.

Everything is float32 whatever type the target runs in, with sums in float64 where they decide what
is kept. Equal values are kept from the lowest id on, as in NumPy.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from shared.sampling import GREEDY_BELOW

# Most nuclei have fewer tokens than this; a row whose nucleus is larger is sorted whole.
_HEAD = 1024


@dataclass(frozen=True, slots=True)
class RowParams:
    """Sampling parameters of every row; each array is [num_rows]."""

    temperature: NDArray[np.float32]  # below GREEDY_BELOW is one-hot
    top_k: NDArray[np.int64]  # 0 is off
    top_p: NDArray[np.float64]  # 1 is off
    min_p: NDArray[np.float32]  # 0 is off

    def truncates(self, vocab_size: int) -> NDArray[np.bool_]:
        """Which rows lose tokens."""
        counted = (self.top_k > 0) & (self.top_k < vocab_size)
        return counted | (self.top_p < 1) | (self.min_p > 0) | (self.temperature < GREEDY_BELOW)

    def take(self, rows: NDArray[np.int64]) -> RowParams:
        return RowParams(self.temperature[rows], self.top_k[rows], self.top_p[rows], self.min_p[rows])


def target_probs(logits: torch.Tensor, top: torch.Tensor, params: RowParams) -> torch.Tensor:
    """[num_rows, V] logits and their maxima [num_rows] -> float32 probabilities [num_rows, V].

    A row whose maximum is not finite comes out as NaN; the caller faults it.
    """
    weights = target_weights(logits, top, params)
    weights /= weights.sum(dim=1, keepdim=True)
    return weights


def target_weights(logits: torch.Tensor, top: torch.Tensor, params: RowParams) -> torch.Tensor:
    """Probabilities relative to the likeliest token's, float32 [num_rows, V]; see `target_probs`."""
    device = logits.device
    cold = params.temperature < GREEDY_BELOW
    temperature = torch.from_numpy(np.where(cold, np.float32(1), params.temperature)).to(device)
    weights = logits.float() - top.float()[:, None]
    weights.div_(temperature[:, None]).exp_()
    _truncate_(weights, params)
    if cold.any():
        rows = torch.from_numpy(np.flatnonzero(cold)).to(device)
        best = logits[rows].argmax(dim=1)
        weights[rows] = 0.0
        weights[rows, best] = 1.0
    return weights


def _truncate_(weights: torch.Tensor, params: RowParams) -> None:
    """Zero what top-k, top-p and min-p drop, in place; the largest weight of each row is 1."""
    vocab_size = weights.shape[1]
    counted = (params.top_k > 0) & (params.top_k < vocab_size)
    rows = np.flatnonzero(counted | (params.top_p < 1))
    if len(rows):
        index = torch.from_numpy(rows).to(weights.device)
        limits = np.where(counted, params.top_k, vocab_size)[rows]
        weights[index] = _keep_head(weights[index], limits, params.top_p[rows])
    if (params.min_p > 0).any():
        floor = torch.from_numpy(params.min_p).to(weights.device)
        weights.masked_fill_(weights < floor[:, None], 0.0)


def _keep_head(weights: torch.Tensor, limits: NDArray[np.int64], top_p: NDArray[np.float64]) -> torch.Tensor:
    """Weights [n, V] without those beyond each row's `limits` largest or beyond its nucleus."""
    vocab_size = weights.shape[1]
    limit = torch.from_numpy(limits).to(weights.device)[:, None]
    mass = torch.from_numpy(top_p).to(weights.device)[:, None]
    unlimited = bool((limits == vocab_size).any())
    width = min(vocab_size, max(_HEAD if unlimited else 0, int(limits[limits < vocab_size].max(initial=1))))
    # [n, 1]: what the nucleus is a share of, where no top-k comes before it
    everything = weights.sum(dim=1, keepdim=True, dtype=torch.float64)
    while True:
        # [n, width], descending
        head = weights.topk(width, dim=1).values.double()
        head.masked_fill_(torch.arange(width, device=weights.device) >= limit, 0.0)
        wanted = mass * torch.where(limit < vocab_size, head.sum(dim=1, keepdim=True), everything)
        running = head.cumsum(dim=1)
        if (
            width == vocab_size
            or not unlimited
            or bool(((running[:, -1:] >= wanted) | (limit <= width)).all())
        ):
            break
        width = vocab_size
    count = ((running - head) < wanted).sum(dim=1, keepdim=True)
    count = torch.where(mass < 1, count.clamp_(min=1), limit).minimum(limit)
    threshold = head.gather(1, (count - 1).clamp_(max=width - 1)).to(weights.dtype)
    above = weights > threshold
    equal = weights == threshold
    among_first = equal.cumsum(dim=1) <= count - above.sum(dim=1, keepdim=True)
    return weights.masked_fill(~(above | (equal & among_first)), 0.0)
