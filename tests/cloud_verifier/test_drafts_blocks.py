"""Grids are found where they are, and nowhere else."""

from __future__ import annotations

import numpy as np
import pytest

from cloud_verifier.drafts.blocks import pack_nibbles, quantise_symmetric, recover_grid


def rebuilt(grid):
    values = grid.step[..., None] * grid.level + grid.low[..., None]
    return values.reshape(len(values), -1).T


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("stored", [np.float32, np.float16])
def test_a_four_bit_source_is_recovered(four_bit_weights, symmetric: bool, stored: type) -> None:
    weight = four_bit_weights(np.random.default_rng(1), 96, 40, symmetric=symmetric).astype(stored)
    grid = recover_grid(weight.astype(np.float32))
    assert grid is not None
    np.testing.assert_allclose(rebuilt(grid), weight, atol=1e-6 if stored is np.float32 else 3e-4)


def test_blocks_that_use_few_levels_or_one(four_bit_weights) -> None:
    weight = four_bit_weights(np.random.default_rng(2), 64, 8)
    weight[:32, 0] = 0.25
    weight[:32, 1] = np.tile([0.5, 0.75], 16)
    grid = recover_grid(weight)
    assert grid is not None
    np.testing.assert_allclose(rebuilt(grid), weight, atol=1e-6)


def test_ordinary_weights_have_no_grid(four_bit_weights) -> None:
    rng = np.random.default_rng(3)
    weight = rng.standard_normal((64, 50)).astype(np.float32)
    assert recover_grid(weight) is None
    # One block without a grid is enough.
    weight = four_bit_weights(rng, 64, 50)
    weight[:32, 7] = rng.standard_normal(32)
    assert recover_grid(weight) is None
    assert recover_grid(weight[:40]) is None


def test_nibbles_are_packed_low_half_first() -> None:
    packed = pack_nibbles(np.arange(32, dtype=np.uint8)[None] % 16)
    assert packed.shape == (1, 16)
    assert packed[0, :3].tolist() == [0x10, 0x32, 0x54]


@pytest.mark.parametrize("bits", [4, 8])
def test_symmetric_rounding_errs_by_half_a_step(bits: int) -> None:
    values = np.random.default_rng(4).standard_normal((20, 32)).astype(np.float32)
    values[3] = 0
    level, step = quantise_symmetric(values, bits)
    error = np.abs((level.astype(np.float32) - (1 << (bits - 1))) * step[:, None] - values)
    assert (error <= step[:, None] * 0.501).all()


def test_eight_bit_sources_are_kept_exactly() -> None:
    """Q8_0 files have step = max / 127, so their weights come back as they were."""
    rng = np.random.default_rng(5)
    level = rng.integers(-127, 128, (50, 32)).astype(np.float32)
    level[:, 0] = 127
    values = level * rng.uniform(0.001, 0.01, (50, 1)).astype(np.float32)
    found, step = quantise_symmetric(values, 8)
    np.testing.assert_array_equal(found.astype(int) - 128, level.astype(int))
    np.testing.assert_allclose((found - 128.0) * step[:, None], values, rtol=1e-6)
