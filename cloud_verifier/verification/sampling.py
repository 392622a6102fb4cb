"""The token beyond the accepted ones: inverse-CDF draws of one token a session, summed in float64."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from cloud_verifier.native_rows import Doubles, Ints, RowKernel
from cloud_verifier.verification.batch import Batch
from cloud_verifier.verification.rows import Rows
from cloud_verifier.verification.target_probs import TargetProbs
from cloud_verifier.verification.transforms import SparseRows
from shared.randomness import Purpose


@dataclass(frozen=True, slots=True)
class Residuals:
    """max(scale p - q, 0) of n rows, or p where that has no mass (p == q); and a draw for each.

    Attributes:
        rows: int64 [n], rows of the batch.
        scale: float64 [n].
        slots: int64 [nnz], ascending; which of the n an entry of q belongs to. Without entries q is 0.
        ids, q: [nnz], ids ascending in each slot.
        draws: float64 [n] in [0, 1).
    """

    rows: torch.Tensor
    scale: torch.Tensor
    slots: torch.Tensor
    ids: torch.Tensor
    q: torch.Tensor
    draws: torch.Tensor


def draw_decisive(
    target: TargetProbs, batch: Batch, num_accepted: torch.Tensor, scale: torch.Tensor | None = None
) -> torch.Tensor:
    """[B]: drawn from the residual at the first rejected token, or from p after full acceptance.

    Args:
        target: p of all rows.
        batch: the blocks.
        num_accepted: [B].
        scale: float64 [B], what p is multiplied by before q is taken off; 1 when None.
    """
    device = num_accepted.device
    draft = batch.need_draft()
    # [B]: the row that judges the first rejected token, or the bonus row
    decisive = torch.from_numpy(batch.starts).to(device) + num_accepted
    # The first rejected token of each block; none after full acceptance (the place beyond all tokens).
    num_drafted = torch.from_numpy(batch.num_drafted).to(device)
    first = torch.from_numpy(batch.starts - np.arange(batch.num_blocks)).to(device)
    rejected = torch.zeros(len(batch.tokens) + 1, dtype=torch.bool, device=device)
    rejected[torch.where(num_accepted < num_drafted, first + num_accepted, len(batch.tokens))] = True
    rejected[-1] = False
    entry_token = torch.from_numpy(draft.token_of_entry).to(device)
    entries = rejected[entry_token].nonzero()[:, 0]
    residuals = Residuals(
        decisive,
        torch.ones_like(decisive, dtype=torch.float64) if scale is None else scale,
        torch.from_numpy(batch.block_of_token).to(device)[entry_token[entries]],
        torch.from_numpy(draft.ids).to(device)[entries],
        torch.from_numpy(draft.probs).to(device)[entries],
        torch.from_numpy(batch.uniforms(Purpose.SAMPLE)).to(device)[decisive],
    )
    draw = _draw_plain if target.sparse is None else _draw_sparse
    return draw(target, residuals)


def draw_natively(kernel: RowKernel, rows: Rows, batch: Batch, kept: Ints, scale: Doubles) -> torch.Tensor:
    """`draw_decisive` by the compiled functions, from rows that nothing truncates; kept is num_accepted."""
    tokens = kernel.draw(
        rows.logits,
        rows.index,
        batch.blocks.first,
        kept,
        scale,
        batch.need_draft().entries,
        *rows.on_host(),
        batch.uniforms(Purpose.SAMPLE),
    )
    return torch.from_numpy(tokens)


def _draw_plain(target: TargetProbs, residuals: Residuals) -> torch.Tensor:
    """[n]: from rows that nothing truncates."""
    probs = target.whole(residuals.rows)
    rest = probs * residuals.scale.to(probs.dtype)[:, None]
    places = residuals.slots * probs.shape[1] + residuals.ids
    rest.view(-1).scatter_add_(0, places, -residuals.q.to(rest.dtype))
    rest.clamp_(min=0.0)
    return sample_rows(torch.where(rest.sum(dim=1, keepdim=True) > 0, rest, probs), residuals.draws)


def _draw_sparse(target: TargetProbs, residuals: Residuals) -> torch.Tensor:
    """[n]: from truncated rows, of which few tokens are left."""
    sparse = target.sparse
    if sparse is None:
        raise ValueError("no row of this batch is truncated")
    slots, entries = _entries_of(sparse, residuals.rows, len(target.rows.index))
    ids, probs = sparse.ids[entries], sparse.probs[entries]
    vocab_size = target.rows.vocab_size
    rest = probs * residuals.scale.to(probs.dtype)[slots]
    if len(residuals.slots):
        drafted = residuals.slots * vocab_size + residuals.ids
        keys = slots * vocab_size + ids
        place = torch.searchsorted(drafted, keys).clamp_(max=len(drafted) - 1)
        rest -= torch.where(drafted[place] == keys, residuals.q[place].to(rest.dtype), 0.0)
        rest.clamp_(min=0.0)
    num = len(residuals.rows)
    counts = torch.bincount(slots, minlength=num)
    rank = torch.arange(len(slots), device=slots.device) - (counts.cumsum(0) - counts)[slots]
    # [n, most tokens left]: padding changes no row's sums, so that a row's draw depends on itself alone.
    shape = (num, max(int(counts.amax()), 1))  # a row that is not finite has none
    padded, padded_ids = rest.new_zeros(shape), ids.new_zeros(shape)
    padded[slots, rank], padded_ids[slots, rank] = rest, ids
    whole = torch.zeros_like(padded)
    whole[slots, rank] = probs
    padded = torch.where(padded.sum(dim=1, keepdim=True) > 0, padded, whole)
    return padded_ids.gather(1, sample_rows(padded, residuals.draws)[:, None])[:, 0]


def sample_rows(weights: torch.Tensor, draws: torch.Tensor) -> torch.Tensor:
    """Index drawn from each row of `weights` [B, V] in proportion; `draws` float64 [B] in [0, 1).

    The draw lands on the first index whose running sum exceeds its share of the total, so that an
    index without weight is never drawn, whatever the draw.
    """
    cumulative = weights.cumsum(dim=1, dtype=torch.float64)
    total = cumulative[:, -1]
    target = torch.minimum(draws * total, torch.nextafter(total, torch.zeros_like(total)))
    index = torch.searchsorted(cumulative, target[:, None], right=True)[:, 0]
    # Only a row of NaN reaches the end; its block is faulted.
    return index.clamp_(max=weights.shape[1] - 1)


def _entries_of(sparse: SparseRows, rows: torch.Tensor, num_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Entries of some rows: which of the rows each is of, and where it is in `sparse`; both ascending."""
    place = torch.full((num_rows,), -1, dtype=torch.int64, device=rows.device)
    place[rows] = torch.arange(len(rows), device=rows.device)
    slots = place[sparse.rows]
    entries = (slots >= 0).nonzero()[:, 0]
    return slots[entries], entries
