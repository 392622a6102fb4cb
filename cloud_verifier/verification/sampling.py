"""Inverse-CDF draws of one token a session, in float64."""

from __future__ import annotations

import torch


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


def subtract_draft(
    probs: torch.Tensor, block: torch.Tensor, ids: torch.Tensor, draft: torch.Tensor
) -> torch.Tensor:
    """max(probs - q, 0) [B, V], or probs where that has no mass (p == q).

    Args:
        probs: [B, V] scaled target probabilities.
        block: [nnz] row of each entry of q.
        ids: [nnz] token of each entry.
        draft: [nnz] q; 0 for entries that do not count.
    """
    rest = probs.clone()
    rest.view(-1).scatter_add_(0, block * probs.shape[1] + ids, -draft.to(rest.dtype))
    rest.clamp_(min=0.0)
    return torch.where(rest.sum(dim=1, keepdim=True) > 0, rest, probs)
