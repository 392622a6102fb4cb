"""The token beyond the accepted ones: inverse-CDF draws of one token a session, in float64."""

from __future__ import annotations

import torch

from cloud_verifier.verification.batch import Batch
from cloud_verifier.verification.target_probs import TargetProbs
from shared.randomness import Purpose


def draw_decisive(
    target: TargetProbs, batch: Batch, num_accepted: torch.Tensor, scale: torch.Tensor | None = None
) -> torch.Tensor:
    """[B]: drawn from the residual at the first rejected token, or from p after full acceptance.

    Args:
        target: p of all rows.
        batch: the blocks.
        num_accepted: [B].
        scale: [B], what p is multiplied by before q is taken off; 1 when None.
    """
    device = num_accepted.device
    draft = batch.need_draft()
    # [B]: the row that judges the first rejected token, or the bonus row
    decisive = torch.from_numpy(batch.starts).to(device) + num_accepted
    chosen = target.whole(decisive)
    entry_row = torch.from_numpy(batch.token_rows[draft.token_of_entry]).to(device)
    entry_block = torch.from_numpy(batch.block_of_token[draft.token_of_entry]).to(device)
    counts = (entry_row == decisive[entry_block]).nonzero()[:, 0]
    weights = _residual(
        chosen,
        scale,
        entry_block[counts],
        torch.from_numpy(draft.ids).to(device)[counts],
        torch.from_numpy(draft.probs).to(device)[counts],
    )
    draws = torch.from_numpy(batch.uniforms(Purpose.SAMPLE)).to(device)
    return sample_rows(weights, draws[decisive])


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


def _residual(
    probs: torch.Tensor,
    scale: torch.Tensor | None,
    entry_row: torch.Tensor,
    ids: torch.Tensor,
    draft: torch.Tensor,
) -> torch.Tensor:
    """max(scale probs - q, 0) [B, V] with q in COO form, or probs where that has no mass (p == q)."""
    rest = probs.clone() if scale is None else probs * scale.to(probs.dtype)[:, None]
    rest.view(-1).scatter_add_(0, entry_row * probs.shape[1] + ids, -draft.to(rest.dtype))
    rest.clamp_(min=0.0)
    return torch.where(rest.sum(dim=1, keepdim=True) > 0, rest, probs)
