"""Greedy verification: keep drafted tokens for as long as each is the target's likeliest."""

from __future__ import annotations

import torch

from cloud_verifier.verification.batch import Batch
from cloud_verifier.verification.rows import Rows


def judge_greedy(rows: Rows, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """(num_accepted [B], recovered or bonus token [B]); see `Rule`. No softmax, no draws."""
    return keep_matching(rows.choice, batch)


def keep_matching(choice: torch.Tensor, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """Keeps drafted tokens while they are the target's `choice` [R]; the first other choice follows."""
    device = choice.device
    drafted = torch.from_numpy(batch.tokens).to(device)
    accepted = choice[torch.from_numpy(batch.token_rows).to(device)] == drafted
    num_accepted = batch.padded(accepted.long(), 0).cumprod(dim=1).sum(dim=1)
    return num_accepted, choice[torch.from_numpy(batch.starts).to(device) + num_accepted]
