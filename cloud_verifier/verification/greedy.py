"""Greedy verification: keep drafted tokens for as long as each is the target's likeliest."""

from __future__ import annotations

import torch

from cloud_verifier.verification.batch import Batch


def judge_greedy(logits: torch.Tensor, top: torch.Tensor, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """(num_accepted [B], recovered or bonus token [B]); see `Rule`. No softmax, no draws."""
    # [R]; the lowest id among equals
    best = logits.argmax(dim=1)
    drafted = torch.from_numpy(batch.tokens).to(logits.device)
    accepted = best[torch.from_numpy(batch.token_rows).to(logits.device)] == drafted
    num_accepted = batch.padded(accepted.long(), 0).cumprod(dim=1).sum(dim=1)
    starts = torch.from_numpy(batch.starts).to(logits.device)
    return num_accepted, best[starts + num_accepted]
