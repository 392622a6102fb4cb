"""Rejection sampling token by token, and the lossy variant that judges by a mixture."""

from __future__ import annotations

import numpy as np
import torch

from cloud_verifier.verification.batch import Batch
from cloud_verifier.verification.rows import Rows
from cloud_verifier.verification.sampling import draw_decisive, draw_natively
from cloud_verifier.verification.target_probs import TargetProbs
from shared.randomness import Purpose


def judge_token(rows: Rows, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """Leviathan et al. 2022 (arXiv 2211.17192) Algorithm 1, Chen et al. 2023 (2302.01318) Algorithm 2.

    (num_accepted [B], recovered or bonus token [B]); see `Rule`.
    """
    return _judge(rows, batch, None)


def judge_fused(rows: Rows, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """Token-wise against (1 - weight) p + weight q: lossy unless the request's weight is 0.

    The residual max((1 - weight) p + weight q - q, 0) is (1 - weight) max(p - q, 0), so only the
    acceptance differs from `judge_token`.
    """
    return _judge(rows, batch, batch.fused_weight)


def _judge(rows: Rows, batch: Batch, fused_weight: np.ndarray | None) -> tuple[torch.Tensor, torch.Tensor]:
    drawn, uniforms = batch.need_draft().drawn, batch.uniforms(Purpose.ACCEPT)
    if rows.kernel is not None and rows.unread:
        weight = np.zeros(batch.num_blocks) if fused_weight is None else fused_weight
        kept = rows.kernel.token(
            rows.logits, rows.index, batch.blocks, drawn, uniforms, weight, *rows.on_host()
        )
        tokens = draw_natively(rows.kernel, rows, batch, kept, np.ones(batch.num_blocks))
        return torch.from_numpy(kept), tokens
    target = TargetProbs(rows)
    num_accepted = _num_accepted(target, batch, drawn, uniforms, fused_weight)
    return num_accepted, draw_decisive(target, batch, num_accepted)


def _num_accepted(
    target: TargetProbs,
    batch: Batch,
    drawn: np.ndarray,
    uniforms: np.ndarray,
    fused_weight: np.ndarray | None,
) -> torch.Tensor:
    """[B]"""
    device = target.rows.device
    token_rows = torch.from_numpy(batch.token_rows).to(device)
    # [N]
    judged = target.at(token_rows, torch.from_numpy(batch.tokens).to(device))
    if fused_weight is not None:
        weight = fused_weight[batch.block_of_token]
        judged *= torch.from_numpy(1.0 - weight).to(device)
        judged += torch.from_numpy(weight * drawn).to(device)
    # Accept iff u < p / q, written without the division: p = 0 is never accepted, not even at u = 0.
    draws = torch.from_numpy(uniforms[batch.token_rows] * drawn).to(device)
    return batch.padded((draws < judged).long(), 0).cumprod(dim=1).sum(dim=1)
