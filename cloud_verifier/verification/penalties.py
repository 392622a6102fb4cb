"""The torch twin of `shared.history.adjust`: every row with the prefix that it really has."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from cloud_verifier.verification.batch import Batch
from cloud_verifier.verification.types import BlockInput
from shared.history import TokenHistory, Touched, touched


def adjust_logits(logits: torch.Tensor, batch: Batch, blocks: Sequence[BlockInput]) -> torch.Tensor:
    """[P, V] logits -> float32 [R, V] with bias, forbidden tokens and penalties.

    Row i of a block is changed as the text before token i says: the committed tokens and the first
    i drafted ones, whether or not those end up accepted.
    """
    changes: list[Touched] = []
    rows: list[int] = []
    for i, block in enumerate(blocks):
        history = TokenHistory(block.context, block.prompt_len, block.eos_ids)
        start = int(batch.starts[i])
        for row in range(start, start + len(block.tokens) + 1):
            changes.append(touched(block.sampling, history, logits.shape[1]))
            rows.append(row)
            if row - start < len(block.tokens):
                history.append(block.tokens[row - start])
    counts = [len(change.ids) for change in changes]
    params = [blocks[batch.block_of_row[row]].sampling for row in rows]

    def each(values: Sequence[float]) -> torch.Tensor:
        return to_device(np.repeat(np.array(values, np.float32), counts))

    def to_device(array: NDArray[Any]) -> torch.Tensor:
        return torch.from_numpy(array).to(logits.device)

    def flat(name: str) -> torch.Tensor:
        return to_device(np.concatenate([getattr(change, name) for change in changes]))

    out = logits[to_device(batch.rows)].float()
    at = (to_device(np.repeat(np.array(rows), counts)), flat("ids"))
    values = out[at] + flat("bias")
    values.masked_fill_(flat("forbidden"), -torch.inf)
    repetition = each([p.repetition_penalty for p in params])
    scaled = torch.where(values > 0, values / repetition, values * repetition)
    values = torch.where(flat("seen"), scaled, values)
    count = flat("count")
    values -= each([p.presence_penalty for p in params]) * (count > 0)
    values -= each([p.frequency_penalty for p in params]) * count
    out[at] = values
    return out
