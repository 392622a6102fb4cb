"""Shared-noise coupling: Daliri et al. 2024 (arXiv 2408.07978), with the noise of `shared.randomness`.

At each position the target's token is the id with the smallest noise / probability, and drafted
tokens are kept while they are that token. What comes out is therefore what the target alone writes
with that seed, whatever was drafted; no q is needed, and a lie about it gains nothing.
"""

from __future__ import annotations

from typing import Any

import torch

from cloud_verifier.verification.batch import Batch
from cloud_verifier.verification.greedy import keep_matching
from cloud_verifier.verification.rows import Rows
from cloud_verifier.verification.target_probs import TargetProbs
from cloud_verifier.verification.transforms import SparseRows
from shared.randomness import COUPLED_BLOCK, Purpose, philox

_LOW_32 = 0xFFFFFFFF
_EXCESS = 1 << 8


def judge_coupled(rows: Rows, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """(num_accepted [B], recovered or bonus token [B]); see `Rule`."""
    if rows.kernel is not None and rows.unread:
        top, rate = rows.top.numpy(), rows.params.rate()
        found = rows.kernel.coupled(rows.logits, rows.index, batch.blocks, rate, batch.coupled_keys, top)
        return torch.from_numpy(found[0]), torch.from_numpy(found[1])
    host_seeds, host_positions = batch.coupled_keys
    device = rows.device
    seeds, positions = torch.from_numpy(host_seeds).to(device), torch.from_numpy(host_positions).to(device)
    target = TargetProbs(rows)
    if target.sparse is None:
        everything = torch.arange(len(rows.index), device=device)
        choice = _smallest_ratio(target.weights(everything), seeds, positions)
    else:
        choice = _choose_sparse(len(rows.index), target.sparse, seeds, positions)
    return keep_matching(choice, batch)


def _choose_sparse(
    num_rows: int, sparse: SparseRows, seeds: torch.Tensor, positions: torch.Tensor
) -> torch.Tensor:
    """[R]: the id with the smallest noise / p of each truncated row."""
    row, ids = sparse.rows, sparse.ids
    smallest, place = _block_noise(seeds[row], positions[row], ids // COUPLED_BLOCK)
    excess = _excess_noise(seeds[row], positions[row], ids)
    noise = smallest + torch.where(ids % COUPLED_BLOCK == place, 0.0, excess)
    ratio = noise / sparse.probs.double()
    best = ratio.new_full((num_rows,), torch.inf).scatter_reduce_(0, row, ratio, "amin")
    wins = ratio == best[row]
    choice = ids.new_zeros(num_rows)
    choice[row[wins]] = ids[wins]
    return choice


def _smallest_ratio(weights: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """[R]: the id with the smallest noise / weight of each row of [R, V].

    Blocks of ids are ruled out by their smallest noise and largest weight, so that few draws are made.
    """
    num_rows, vocab_size = weights.shape
    num_blocks = -(-vocab_size // COUPLED_BLOCK)
    padding = num_blocks * COUPLED_BLOCK - vocab_size
    blocks = torch.nn.functional.pad(weights, (0, padding)).view(num_rows, num_blocks, COUPLED_BLOCK)
    # [R, num_blocks]
    largest = blocks.amax(dim=2).double()
    rows, ids = largest.nonzero(as_tuple=True)
    smallest, place = _block_noise(seeds[rows], positions[rows], ids)
    lower = torch.full_like(largest, torch.inf)
    lower[rows, ids] = smallest / largest[rows, ids]

    best = torch.full((num_rows,), torch.inf, dtype=torch.float64, device=weights.device)
    choice = torch.zeros(num_rows, dtype=torch.int64, device=weights.device)
    members = torch.arange(COUPLED_BLOCK, device=weights.device)
    entry = torch.full((num_rows, num_blocks), -1, device=weights.device)
    entry[rows, ids] = torch.arange(len(rows), device=weights.device)

    def look_into(row: torch.Tensor, block: torch.Tensor) -> None:
        """Updates `best` and `choice` with all ids of these blocks."""
        tokens = block[:, None] * COUPLED_BLOCK + members
        excess = _excess_noise(seeds[row, None], positions[row, None], tokens)
        which = entry[row, block]
        noise = smallest[which, None] + torch.where(members == place[which, None], 0.0, excess)
        ratio, member = (noise / blocks[row, block].double()).min(dim=1)
        found = torch.full_like(best, torch.inf).scatter_reduce_(0, row, ratio, "amin")
        wins = (ratio == found[row]) & (ratio < best[row])
        choice[row[wins]] = block[wins] * COUPLED_BLOCK + member[wins]
        torch.minimum(best, found, out=best)

    finite = torch.isfinite(lower).any(dim=1).nonzero()[:, 0]
    look_into(finite, lower.argmin(dim=1)[finite])
    look_into(*(lower < best[:, None]).nonzero(as_tuple=True))
    return choice


def _block_noise(
    seeds: torch.Tensor, positions: torch.Tensor, blocks: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """`shared.randomness.coupled_blocks` in torch."""
    c0, c1, c2, _ = _philox(seeds, positions, int(Purpose.COUPLED), blocks)
    return _exponential(c0, c1) / COUPLED_BLOCK, c2 % COUPLED_BLOCK


def _excess_noise(seeds: torch.Tensor, positions: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """`shared.randomness.coupled_excesses` in torch."""
    c0, c1, _, _ = _philox(seeds, positions, int(Purpose.COUPLED) | _EXCESS, tokens)
    return _exponential(c0, c1)


def _philox(seeds: torch.Tensor, positions: torch.Tensor, purpose: int, last: torch.Tensor) -> Any:
    key = (seeds & _LOW_32, (seeds >> 32) & _LOW_32)
    return philox((positions & _LOW_32, last, purpose, (positions >> 32) & _LOW_32), key)


def _exponential(c0: torch.Tensor, c1: torch.Tensor) -> torch.Tensor:
    # The top 53 bits of the word c1:c0, as in `shared.randomness.exponentials`.
    bits = (c1 << 21) | (c0 >> 11)
    return -torch.log((bits.double() + 0.5) * 2.0**-53)
