"""Log-probabilities of the emitted tokens under the target."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from cloud_verifier.verification.batch import Batch
from cloud_verifier.verification.types import BlockInput
from shared.messages import Logprobs


def emitted_logprobs(
    logits: torch.Tensor,
    batch: Batch,
    blocks: Sequence[BlockInput],
    num_accepted: NDArray[np.int64],
    tokens: NDArray[np.int64],
) -> list[Logprobs | None]:
    """For each block that asks: of its accepted tokens and of the token beyond them.

    They are the model's own: log-softmax of the logits at temperature 1, before the request's
    transforms. Every row names the emitted token first and then the likeliest of all.

    Args:
        logits: [P, V] of the whole pass.
        batch: the blocks as arrays.
        blocks: the blocks.
        num_accepted: [B].
        tokens: [B], recovered or bonus.
    """
    out: list[Logprobs | None] = [None] * len(blocks)
    asking = [i for i, block in enumerate(blocks) if block.logprobs > 0]
    if not asking:
        return out
    emitted: list[int] = []
    rows: list[int] = []
    counts: list[int] = []
    for i in asking:
        kept = int(num_accepted[i])
        full_more = blocks[i].more and bool(blocks[i].tokens) and kept == len(blocks[i].tokens)
        mine = blocks[i].tokens[:kept] + (() if full_more else (int(tokens[i]),))
        start = int(batch.starts[i])
        emitted += mine
        rows += range(start, start + len(mine))
        counts.append(len(mine))
    width = max(blocks[i].logprobs for i in asking) - 1
    values = logits[torch.from_numpy(batch.rows[rows]).to(logits.device)].float().log_softmax(dim=1)
    own = values.gather(1, torch.tensor(emitted, device=logits.device)[:, None])
    likeliest = values.topk(min(width, values.shape[1]), dim=1)
    host_values = torch.cat([own, likeliest.values], dim=1).cpu().numpy()
    host_ids = likeliest.indices.cpu().numpy()
    row = 0
    for i, count in zip(asking, counts, strict=True):
        part = slice(row, row + count)
        row += count
        n = blocks[i].logprobs
        ids = tuple(
            (token, *top[: n - 1]) for token, top in zip(emitted[part], host_ids[part].tolist(), strict=True)
        )
        out[i] = Logprobs(ids, tuple(tuple(line[:n]) for line in host_values[part].tolist()))
    return out
