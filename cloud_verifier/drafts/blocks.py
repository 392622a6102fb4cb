"""Weights as 4-bit and 8-bit blocks of 32, and the grid that a quantised source left in its weights.

A model that comes from a 4-bit file (Q4_0, Q4_1 and others) and was turned back into floats still has
only 16 evenly spaced values in each block of 32. `recover_grid` finds them, whatever the file was; a
draft can then hold the very same weights in 4 bits, where quantising them anew would add an error as
large as the first one.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

BLOCK = 32
_LEVELS = 16
# How far, in steps, a weight may be from its level: floats of 16 bits still pass, and 32 weights
# without a grid do so with probability below 1e-40.
_TOLERANCE = 0.02


@dataclass(frozen=True, slots=True)
class Grid:
    """weight[n, 32 b + i] = step[n, b] * level[n, b, i] + low[n, b]."""

    level: NDArray[np.uint8]  # [num_outputs, num_blocks, 32], 0..15
    step: NDArray[np.float32]  # [num_outputs, num_blocks]
    low: NDArray[np.float32]  # [num_outputs, num_blocks]


def recover_grid(weight: NDArray[np.float32]) -> Grid | None:
    """The grid of `weight` [num_inputs, num_outputs], blocks along the inputs; None when it has none."""
    num_inputs, num_outputs = weight.shape
    if num_inputs % BLOCK:
        return None
    blocks = np.ascontiguousarray(weight.T, np.float32).reshape(-1, BLOCK)  # [num_outputs * num_blocks, 32]
    low, span = blocks.min(axis=1), np.ptp(blocks, axis=1)
    level = np.zeros(blocks.shape, np.uint8)
    step = np.zeros(len(blocks), np.float32)
    open_blocks = np.flatnonzero(span > 0)
    for num_steps in range(_LEVELS - 1, 0, -1):
        size = span[open_blocks] / num_steps
        exact = (blocks[open_blocks] - low[open_blocks, None]) / size[:, None]
        nearest = np.rint(exact)
        fits = np.abs(exact - nearest).max(axis=1) <= _TOLERANCE
        level[open_blocks[fits]] = nearest[fits]
        step[open_blocks[fits]] = size[fits]
        open_blocks = open_blocks[~fits]
        # Files of 4 bits use all 16 levels in nearly every block, so a model without a grid is
        # recognised after the first round.
        if num_steps == _LEVELS - 1 and len(open_blocks) == len(blocks):
            return None
        if not len(open_blocks):
            shape = (num_outputs, num_inputs // BLOCK)
            level, low = _centre(level, step, low)
            return Grid(level.reshape(*shape, BLOCK), step.reshape(shape), low.reshape(shape))
    return None


def _centre(
    level: NDArray[np.uint8], step: NDArray[np.float32], low: NDArray[np.float32]
) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
    """Shift levels that leave room so that `low` is as near to -8 steps as it can be.

    For symmetric files (Q4_0) that makes it -8 steps everywhere, and no offset remains.
    """
    wanted = np.rint(low / np.where(step > 0, step, 1) + _LEVELS // 2)
    room = _LEVELS - 1 - level.max(axis=1).astype(np.float32)
    shift = np.where(step > 0, np.clip(wanted, 0, room), 0)
    return (level + shift[:, None]).astype(np.uint8), (low - shift * step).astype(np.float32)


def pack_nibbles(level: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """[..., 32] levels of 4 bits -> [..., 16] bytes, the even index in the low half."""
    return (level[..., 0::2] | (level[..., 1::2] << 4)).astype(np.uint8)


def quantise_symmetric(
    values: NDArray[np.float32], bits: int
) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
    """Round blocks [..., 32] to `step * (level - 2^(bits - 1))`; exact for weights from a Q8_0 file.

    Returns:
        levels uint8 [..., 32] and steps float32 [...].
    """
    middle = 1 << (bits - 1)
    step = (np.abs(values).max(axis=-1) / (middle - 1)).astype(np.float32)
    level = np.rint(values / np.where(step > 0, step, 1)[..., None]) + middle
    return level.astype(np.uint8), step
