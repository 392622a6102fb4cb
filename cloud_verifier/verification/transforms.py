"""The torch twins of `shared.sampling`: which tokens of a row top-k, top-p and min-p leave, and their p.

Everything is float32 whatever type the target runs in, with sums in float64 where they decide what
is kept. Equal values are kept from the lowest id on, as in NumPy. Rows are never sorted whole: a
lower bound on what can be kept comes from the maxima of groups of ids, and only the few tokens above
it are ranked.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from shared.sampling import GREEDY_BELOW

_GROUP = 32  # ids whose maximum stands for them
_OCTAVES = 64
_LOG2_E = np.float32(np.log2(np.e))


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

    def weighed(self, vocab_size: int, *, plain: bool) -> NDArray[np.bool_]:
        """Rows whose mass decides something: those with a nucleus, and if wanted those that lose no token."""
        counted = (self.top_k > 0) & (self.top_k < vocab_size)
        nuclear = (self.top_p < 1) & ~counted & (self.temperature >= GREEDY_BELOW)
        return nuclear | ~self.truncates(vocab_size) if plain else nuclear

    def rate(self) -> NDArray[np.float32]:
        """log2(e) / temperature: it turns differences of logits into octaves of weight. 0 in greedy rows."""
        cold = self.temperature < GREEDY_BELOW
        return np.where(cold, np.float32(0), _LOG2_E / np.where(cold, np.float32(1), self.temperature))

    def of_rows(self, rows: NDArray[np.int64]) -> RowParams:
        return RowParams(self.temperature[rows], self.top_k[rows], self.top_p[rows], self.min_p[rows])

    def without_cold(self) -> RowParams:
        """Greedy rows as the likeliest token alone."""
        cold = self.temperature < GREEDY_BELOW
        return RowParams(
            np.where(cold, np.float32(1), self.temperature),
            np.where(cold, 1, self.top_k),
            np.where(cold, 1.0, self.top_p),
            np.where(cold, np.float32(0), self.min_p),
        )


@dataclass(frozen=True, slots=True)
class SparseRows:
    """p of truncated rows in COO form, ascending by row and id."""

    rows: torch.Tensor  # int64 [nnz]
    ids: torch.Tensor  # int64 [nnz]
    probs: torch.Tensor  # float32 [nnz]


def truncated_probs(
    logits: torch.Tensor, top: torch.Tensor, params: RowParams, mass: torch.Tensor
) -> SparseRows:
    """[n, V] logits, their maxima [n] and masses [n] -> what top-k, top-p and min-p leave of each row.

    `params` are those of `RowParams.without_cold`; `mass`, float64, counts in rows with a nucleus only.
    Nothing is left of a row whose maximum is not finite; the caller faults it.
    """
    vocab_size = logits.shape[1]
    temperature = torch.from_numpy(params.temperature).to(logits.device)
    counted = (params.top_k > 0) & (params.top_k < vocab_size)
    nuclear = ~counted & (params.top_p < 1)
    bound = _bounds(logits, top, params, counted, nuclear, mass)
    # No logit is above NaN. Sums run over all rows' candidates: such a row would spoil those of the others.
    bound = torch.where(torch.isfinite(top), bound, torch.nan)
    rows, ids = (logits >= bound[:, None]).nonzero(as_tuple=True)
    if nuclear.any():
        kept = _above_nucleus(logits, top, temperature, rows, ids, params, nuclear, mass)
        rows, ids = rows[kept], ids[kept]
    kept, weights = _rank(logits, top, temperature, rows, ids, params, counted, mass)
    rows, ids, weights = rows[kept], ids[kept], weights[kept]
    totals = torch.zeros_like(mass).index_add_(0, rows, weights.double())
    return SparseRows(rows, ids, (weights / totals[rows]).float())


def _bounds(
    logits: torch.Tensor,
    top: torch.Tensor,
    params: RowParams,
    counted: NDArray[np.bool_],
    nuclear: NDArray[np.bool_],
    mass: torch.Tensor,
) -> torch.Tensor:
    """[n]: logits below it are certainly dropped."""
    device = logits.device
    bound = torch.full_like(top, -torch.inf)
    alone = ~counted & ~nuclear
    if alone.any():
        # Only min-p: a little lower than its floor, which is applied exactly to the weights.
        with np.errstate(divide="ignore"):
            floor = params.temperature * np.log(params.min_p) * np.float32(1.001) - np.float32(0.01)
        bound = torch.where(
            torch.from_numpy(alone).to(device), top + torch.from_numpy(floor).to(device), bound
        )
    if nuclear.any():
        # Even V tokens at this bound together lack the mass that a nucleus leaves out.
        beyond = torch.from_numpy(np.where(nuclear, 1 - params.top_p, 1.0)).to(device)
        share = (beyond * mass.clamp(min=1.0) / logits.shape[1]).log().float()
        level = top + torch.from_numpy(params.temperature).to(device) * share * 1.001 - 0.01
        bound = torch.where(torch.from_numpy(nuclear).to(device), level, bound)
    wanted = np.where(counted, params.top_k, 0)
    size = logits.shape[1] // _GROUP
    possible = (wanted > 0) & (wanted <= size)
    if possible.any():
        # The k-th largest of these maxima is no larger than the k-th largest logit.
        maxima = logits[:, : size * _GROUP].view(-1, _GROUP, size).amax(dim=1)
        largest = maxima.topk(int(wanted[possible].max()), dim=1).values
        place = torch.from_numpy(np.where(possible, wanted - 1, 0)).to(device)
        found = largest.gather(1, place[:, None])[:, 0].float()
        bound = torch.where(torch.from_numpy(possible).to(device), found, bound)
    return bound


def _above_nucleus(
    logits: torch.Tensor,
    top: torch.Tensor,
    temperature: torch.Tensor,
    rows: torch.Tensor,
    ids: torch.Tensor,
    params: RowParams,
    nuclear: NDArray[np.bool_],
    mass: torch.Tensor,
) -> torch.Tensor:
    """Bool [m]: candidates in the octaves of weight that a row's nucleus reaches down to."""
    device = logits.device
    weights = ((logits[rows, ids].float() - top[rows]) / temperature[rows]).exp_()
    octave = (-weights.log2()).floor_().clamp_(0, _OCTAVES - 1).nan_to_num_(0).long()
    # [n, _OCTAVES]: mass of the octaves down to each
    held = torch.zeros(len(logits) * _OCTAVES, dtype=torch.float64, device=device)
    held = held.index_add_(0, rows * _OCTAVES + octave, weights.double()).view(-1, _OCTAVES).cumsum(dim=1)
    wanted = torch.from_numpy(params.top_p).to(device) * mass
    lowest = (held < wanted[:, None]).sum(dim=1)
    lowest = lowest.masked_fill_(torch.from_numpy(~nuclear).to(device), _OCTAVES)
    return octave <= lowest[rows]


def _rank(
    logits: torch.Tensor,
    top: torch.Tensor,
    temperature: torch.Tensor,
    rows: torch.Tensor,
    ids: torch.Tensor,
    params: RowParams,
    counted: NDArray[np.bool_],
    mass: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Of the candidates (rows, ids) [m]: which are kept, and their weights."""
    device = logits.device
    values = logits[rows, ids].float()
    # Descending within each row, lowest id first among equals: two stable sorts.
    order = values.argsort(descending=True, stable=True)
    order = order[rows[order].argsort(stable=True)]
    row = rows[order]
    weights = ((values[order] - top[row]) / temperature[row]).exp_()
    starts = torch.searchsorted(row, torch.arange(len(logits), device=device))
    rank = torch.arange(len(row), device=device) - starts[row]
    limit = np.where(counted, params.top_k, logits.shape[1])
    within = rank < torch.from_numpy(limit).to(device)[row]

    wide = torch.where(within, weights, 0.0).double()
    held = torch.zeros_like(mass).index_add_(0, row, wide)
    total = torch.where(torch.from_numpy(counted).to(device), held, mass)
    running = wide.cumsum(0)
    before = running - wide
    before -= before[starts.clamp(max=max(len(row) - 1, 0))][row] if len(row) else 0.0
    top_p = torch.from_numpy(params.top_p).to(device)
    inside = (before < (top_p * total)[row]) | (top_p[row] >= 1) | (rank == 0)
    kept = within & inside & (weights >= torch.from_numpy(params.min_p).to(device)[row])

    back = torch.empty_like(order)
    back[order] = torch.arange(len(order), device=device)
    return kept[back], weights[back]
