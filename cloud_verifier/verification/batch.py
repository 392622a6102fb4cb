"""Blocks of many sessions as flat arrays: packed once on the host, moved once to the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch
from numpy.typing import NDArray

from cloud_verifier.native_rows import Blocks, Entries, uniforms
from cloud_verifier.verification.transforms import RowParams
from cloud_verifier.verification.types import BlockInput
from shared.messages import SamplingParams
from shared.randomness import Purpose


@dataclass(frozen=True, slots=True)
class DraftProbs:
    """q of every drafted token of a batch, in CSR form: row n is that of token n."""

    offsets: NDArray[np.int64]  # [N + 1]
    token_of_entry: NDArray[np.int64]  # [nnz]
    ids: NDArray[np.int64]  # [nnz]
    probs: NDArray[np.float64]  # [nnz]
    drawn: NDArray[np.float64]  # [N]: q of the drafted token itself

    @property
    def entries(self) -> Entries:
        """For the compiled rules."""
        return Entries(self.offsets, self.ids, self.probs)


@dataclass(frozen=True, slots=True)
class Batch:
    """B blocks of K_b drafted tokens: N = sum K_b tokens, R = N + B rows of logits.

    Attributes:
        rows: int64 [R], rows of the pass that belong to these blocks, block by block.
        block_of_row: int64 [R].
        within: int64 [R], place of each row in its block.
        block_of_token: int64 [N].
        starts: int64 [B], where a block's rows begin in `rows`.
        num_drafted: int64 [B].
        tokens: int64 [N].
        token_rows: int64 [N], the row (index into `rows`) that judges each token.
        token_places: int64 [N], place of each token in a padded [B, max K] array, flattened.
        params: of every row.
        fused_weight: float64 [B].
        draft: q of every drafted token; None for rules that need none.
    """

    rows: NDArray[np.int64]
    block_of_row: NDArray[np.int64]
    within: NDArray[np.int64]
    block_of_token: NDArray[np.int64]
    starts: NDArray[np.int64]
    num_drafted: NDArray[np.int64]
    tokens: NDArray[np.int64]
    token_rows: NDArray[np.int64]
    token_places: NDArray[np.int64]
    params: RowParams
    fused_weight: NDArray[np.float64]
    draft: DraftProbs | None
    _keys: tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]

    @property
    def num_blocks(self) -> int:
        return len(self.starts)

    @property
    def max_drafted(self) -> int:
        return int(self.num_drafted.max(initial=0))

    @property
    def is_last_token(self) -> NDArray[np.bool_]:
        """[N]: whether a token is the last of its block."""
        last = np.ones(len(self.tokens), np.bool_)
        last[:-1] = self.block_of_token[1:] != self.block_of_token[:-1]
        return last

    @property
    def coupled_keys(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Seed (the 64 bits as int64) and position of each row, [R] each."""
        return self._keys[:2]

    @property
    def blocks(self) -> Blocks:
        """For the compiled rules."""
        return Blocks(np.append(self.starts, len(self.rows)), self.tokens)

    def need_draft(self) -> DraftProbs:
        if self.draft is None:
            raise ValueError("this rule needs q; pack the batch with it")
        return self.draft

    def uniforms(self, purpose: Purpose) -> NDArray[np.float64]:
        """float64 [R]: the draw of that purpose at the position that each row judges."""
        seeds, positions, bases = self._keys
        return uniforms(seeds, purpose, positions, bases)

    def padded(self, values: torch.Tensor, fill: float) -> torch.Tensor:
        """[N] values of the tokens -> [B, max K]."""
        out = values.new_full((self.num_blocks * self.max_drafted,), fill)
        out[torch.from_numpy(self.token_places).to(values.device)] = values
        return out.view(self.num_blocks, self.max_drafted)


def pack(
    blocks: Sequence[BlockInput], row_starts: Sequence[int], params: RowParams, *, with_draft: bool
) -> Batch:
    """`blocks`, whose rows of logits begin at `row_starts`, with their parameters, and their q if wanted."""
    num_drafted = np.array([len(b.tokens) for b in blocks], np.int64)
    num_rows = num_drafted + 1
    starts = np.cumsum(num_rows) - num_rows
    block_of_row = np.repeat(np.arange(len(blocks)), num_rows)
    within = np.arange(int(num_rows.sum())) - starts[block_of_row]
    is_token = within < num_drafted[block_of_row]
    samplings = [b.sampling for b in blocks]
    bases = np.array([b.base_len for b in blocks], np.int64)[block_of_row]
    tokens = np.fromiter(chain.from_iterable([b.tokens for b in blocks]), np.int64)
    return Batch(
        rows=np.array(row_starts, np.int64)[block_of_row] + within,
        block_of_row=block_of_row,
        within=within,
        block_of_token=block_of_row[is_token],
        starts=starts,
        num_drafted=num_drafted,
        tokens=tokens,
        token_rows=np.flatnonzero(is_token),
        token_places=(block_of_row * int(num_drafted.max(initial=0)) + within)[is_token],
        params=params.of_rows(block_of_row),
        fused_weight=np.array([s.fused_weight for s in samplings], np.float64),
        draft=_pack_draft(blocks, tokens) if with_draft else None,
        _keys=(
            np.array([s.seed for s in samplings], np.uint64).view(np.int64)[block_of_row],
            bases + within,
            bases,
        ),
    )


def params_of(samplings: Sequence[SamplingParams]) -> RowParams:
    """One row of parameters for each request."""
    return RowParams(
        np.array([s.temperature for s in samplings], np.float32),
        np.array([s.top_k for s in samplings], np.int64),
        np.array([s.top_p for s in samplings], np.float64),
        np.array([s.min_p for s in samplings], np.float32),
    )


def _pack_draft(blocks: Sequence[BlockInput], tokens: NDArray[np.int64]) -> DraftProbs:
    """q of all blocks that have drafted tokens; each of them carries it."""
    parts = [b.q for b in blocks if b.q is not None and b.tokens]
    if not parts:
        none = np.zeros(0, np.int64)
        return DraftProbs(np.zeros(1, np.int64), none, none, np.zeros(0), np.zeros(0))
    lengths = np.concatenate([q.offsets[1:] - q.offsets[:-1] for q in parts])
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    token_of_entry = np.repeat(np.arange(len(lengths)), lengths)
    ids = np.concatenate([q.ids for q in parts]).astype(np.int64)
    probs = np.concatenate([q.probs for q in parts])
    drawn = np.zeros(len(lengths))
    hits = ids == tokens[token_of_entry]
    drawn[token_of_entry[hits]] = probs[hits]
    return DraftProbs(offsets, token_of_entry, ids, probs, drawn)
