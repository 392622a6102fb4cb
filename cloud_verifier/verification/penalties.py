"""The torch twin of `shared.history.adjust`: every row with the prefix that it really has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
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
    changes = [change for block in blocks for change in _touched_rows(block, logits.shape[1])]
    counts = [len(change.ids) for change in changes]
    params = [blocks[i].sampling for i in batch.block_of_row]

    def each(values: Sequence[float]) -> torch.Tensor:
        return to_device(np.repeat(np.array(values, np.float32), counts))

    def to_device(array: NDArray[Any]) -> torch.Tensor:
        return torch.from_numpy(array).to(logits.device)

    def flat(name: str) -> torch.Tensor:
        return to_device(np.concatenate([getattr(change, name) for change in changes]))

    out = logits[to_device(batch.rows)].float()
    at = (to_device(np.repeat(np.arange(len(batch.rows)), counts)), flat("ids"))
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


def _touched_rows(block: BlockInput, vocab_size: int) -> list[Touched]:
    """`touched` of each of the block's K + 1 rows, from one reading of the text.

    All have the ids that any of them has; a token that nothing is said of keeps its logit.
    """
    params, drafted = block.sampling, block.tokens
    history = TokenHistory(block.context, block.prompt_len, block.eos_ids)
    first = touched(params, history, vocab_size)
    forbids = replace(
        params, logit_bias={}, repetition_penalty=1.0, presence_penalty=0.0, frequency_penalty=0.0
    )
    forbidden = [first.ids[first.forbidden]]
    for token in drafted:
        history.append(token)
        forbidden.append(touched(forbids, history, vocab_size).ids)

    ids = np.unique(np.concatenate([first.ids, np.array(drafted, np.int64), *forbidden]))
    known = np.searchsorted(ids, first.ids)
    bias, count = np.zeros(len(ids), np.float32), np.zeros(len(ids), np.float32)
    seen = np.zeros(len(ids), np.bool_)
    bias[known], count[known], seen[known] = first.bias, first.count, first.seen
    rows = []
    for i, now in enumerate(forbidden):
        if i > 0:
            place = np.searchsorted(ids, drafted[i - 1])
            count[place] += 1
            seen[place] = True
        is_forbidden = np.zeros(len(ids), np.bool_)
        is_forbidden[np.searchsorted(ids, now)] = True
        rows.append(Touched(ids, bias, is_forbidden, seen.copy(), count.copy()))
    return rows
