"""Block verification: Sun et al. 2024 (arXiv 2403.10444) Algorithm 2."""

from __future__ import annotations

import torch

from cloud_verifier.verification.batch import Batch, DraftProbs
from cloud_verifier.verification.rows import Rows
from cloud_verifier.verification.sampling import draw_decisive, draw_natively
from cloud_verifier.verification.target_probs import TargetProbs
from shared.randomness import Purpose


def judge_block(rows: Rows, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """Keeps the longest prefix whose own draw accepts it; never less than token-wise on average.

    (num_accepted [B], recovered or bonus token [B]); see `Rule`.
    """
    draft = batch.need_draft()
    if rows.kernel is not None and rows.unread:
        draws = batch.uniforms(Purpose.ACCEPT)
        kept, scale = rows.kernel.block(
            rows.logits, rows.index, batch.blocks, draft.drawn, draft.entries, draws, *rows.on_host()
        )
        return torch.from_numpy(kept), draw_natively(rows.kernel, rows, batch, kept, scale)
    target = TargetProbs(rows)
    num_accepted, scale_of_kept = _judge(target, batch, draft)
    return num_accepted, draw_decisive(target, batch, num_accepted, scale=scale_of_kept)


def _judge(target: TargetProbs, batch: Batch, draft: DraftProbs) -> tuple[torch.Tensor, torch.Tensor]:
    """num_accepted [B], and the joint acceptance probability of what is kept, 1 for nothing [B]."""
    device = target.rows.device
    token_rows = torch.from_numpy(batch.token_rows).to(device)
    drafted = torch.from_numpy(batch.tokens).to(device)
    drawn = torch.from_numpy(draft.drawn).to(device)

    # [B, max K]: log of the joint acceptance probability of each prefix, min(1, .) at every step
    ratios = batch.padded((target.at(token_rows, drafted) / drawn).log(), 0.0)
    running = ratios.cumsum(dim=1)
    joint = (running - running.cummax(dim=1).values.clamp(min=0.0)).exp()

    # [N]: the residual mass sum max(joint p - q, 0) after each prefix but the last, from q's support
    # alone: joint - sum min(joint p, q). Token n + 1 has the row that follows the prefix that ends in n.
    places = torch.from_numpy(batch.token_places).to(device)
    joint_of_token = joint.reshape(-1)[places]
    before = torch.cat([joint_of_token.new_ones(1), joint_of_token])[:-1]
    entry_token = torch.from_numpy(draft.token_of_entry).to(device)
    ids = torch.from_numpy(draft.ids).to(device)
    common = torch.minimum(
        before[entry_token] * target.at(token_rows[entry_token], ids),
        torch.from_numpy(draft.probs).to(device),
    )
    overlap = torch.zeros_like(drawn).index_add_(0, entry_token, common)
    mass = (before - overlap).clamp(min=0.0)[1:]
    mass = torch.cat([mass, mass.new_zeros(1)])[: len(drawn)]
    inner = mass / (mass + 1.0 - joint_of_token)
    inner = torch.where(mass > 0, inner, (joint_of_token >= 1.0).double())
    is_last = torch.from_numpy(batch.is_last_token).to(device)
    acceptance = torch.where(is_last, joint_of_token, inner)

    draws = torch.from_numpy(batch.uniforms(Purpose.ACCEPT)[batch.token_rows]).to(device)
    accepted = batch.padded((draws < acceptance).long(), 0)
    lengths = torch.arange(1, batch.max_drafted + 1, device=device)
    num_accepted = torch.cat([accepted.new_zeros(batch.num_blocks, 1), accepted * lengths], dim=1).amax(dim=1)
    kept = torch.cat([joint.new_ones(batch.num_blocks, 1), joint], dim=1).gather(1, num_accepted[:, None])
    return num_accepted, kept[:, 0]
