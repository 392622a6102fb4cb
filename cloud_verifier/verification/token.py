"""Token-wise rejection sampling: Leviathan et al. 2022 (arXiv 2211.17192), Chen et al. 2023 (2302.01318)."""

from __future__ import annotations

import torch

from cloud_verifier.verification.batch import Batch
from cloud_verifier.verification.sampling import sample_rows, subtract_draft
from cloud_verifier.verification.transforms import target_probs
from shared.randomness import Purpose


def judge_token(logits: torch.Tensor, top: torch.Tensor, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """(num_accepted [B], recovered or bonus token [B]); see `Rule`."""
    device = logits.device
    draft = batch.need_draft()
    probs = target_probs(logits, top, batch.params)

    # Accept iff u < p / q, written without the division: p = 0 is never accepted, not even at u = 0.
    token_rows = torch.from_numpy(batch.token_rows).to(device)
    drafted = torch.from_numpy(batch.tokens).to(device)
    draws = torch.from_numpy(batch.uniforms(Purpose.ACCEPT)[batch.token_rows] * draft.drawn).to(device)
    accepted = draws < probs[token_rows, drafted].double()
    num_accepted = batch.padded(accepted.long(), 0).cumprod(dim=1).sum(dim=1)

    # [B, V]: the row that judges the first rejected token, or the bonus row
    starts = torch.from_numpy(batch.starts).to(device)
    decisive = starts + num_accepted
    chosen = probs[decisive]
    entry_row = torch.from_numpy(batch.token_rows[draft.token_of_entry]).to(device)
    entry_block = torch.from_numpy(batch.block_of_token[draft.token_of_entry]).to(device)
    counts = entry_row == decisive[entry_block]
    weights = subtract_draft(
        chosen,
        entry_block,
        torch.from_numpy(draft.ids).to(device),
        torch.from_numpy(draft.probs).to(device) * counts,
    )
    sample_draws = torch.from_numpy(batch.uniforms(Purpose.SAMPLE)).to(device)
    return num_accepted, sample_rows(weights, sample_draws[decisive])
