"""Counter-based random draws: every draw is a pure function of (seed, purpose, position, base).

The generator is Philox4x32-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"),
with the session's seed as its 64-bit key. Nothing is ever reseeded and nothing depends on the order
of calls, so a draw comes out the same alone, in a batch, after a reconnect and when a block is sent
again. `positions` are absolute indices in the session's token sequence; `bases` is the committed
length that a block follows, so that a position which is drafted again after a rejection gets a
fresh draw.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_LOW_32 = 0xFFFFFFFF
_ROUNDS = 10
_EXCESS = 1 << 8  # sets the two kinds of COUPLED draws apart

COUPLED_BLOCK = 32  # a power of two

# An int, or an array of int64 or uint64; elementwise with NumPy's broadcasting.
IntLike = Any


class Purpose(IntEnum):
    """What a draw is for; draws of different purposes are independent."""

    DRAFT = 1
    ACCEPT = 2
    SAMPLE = 3  # recovered, bonus and cloud-only tokens
    COUPLED = 4


def philox(counter: tuple[Any, Any, Any, Any], key: tuple[Any, Any]) -> tuple[Any, Any, Any, Any]:
    """Philox4x32-10 on 32-bit words held by Python ints, uint64 arrays or int64 torch tensors."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        product0 = c0 * _MULTIPLIERS[0]
        product1 = c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            ((product1 >> 32) & _LOW_32) ^ c1 ^ k0,
            product1 & _LOW_32,
            ((product0 >> 32) & _LOW_32) ^ c3 ^ k1,
            product0 & _LOW_32,
        )
        k0 = (k0 + _KEY_STEPS[0]) & _LOW_32
        k1 = (k1 + _KEY_STEPS[1]) & _LOW_32
    return c0, c1, c2, c3


def random_words(seeds: IntLike, purpose: Purpose, positions: IntLike, bases: IntLike) -> NDArray[np.uint64]:
    """One 64-bit word an element, of the broadcast shape of the arguments.

    COUPLED draws ignore the schedule of block lengths and are made for each token id; see
    `coupled_noise`.
    """
    return _words(seeds, int(purpose), positions, bases)


def uniforms(seeds: IntLike, purpose: Purpose, positions: IntLike, bases: IntLike) -> NDArray[np.float64]:
    """Uniform draws in [0, 1): the top 53 bits of `random_words`."""
    return words_to_uniforms(random_words(seeds, purpose, positions, bases))


def coupled_blocks(
    seeds: IntLike, positions: IntLike, blocks: IntLike
) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Noise of whole blocks of token ids: the smallest of the block, and which id of it has it.

    Every token id has an Exp(1) draw at every position, the same on both sides whatever was drafted.
    The draws of COUPLED_BLOCK neighbouring ids are made from the top down: first their minimum, which
    is Exp(1) / COUPLED_BLOCK, and its place; the others exceed it by Exp(1) draws of their own
    (`coupled_excesses`), because the exponential distribution has no memory. So the ids of a block
    that cannot matter are ruled out by one draw.
    """
    seed, position, block = (_as_words(x) for x in (seeds, positions, blocks))
    counter = (position & _LOW_32, block & _LOW_32, int(Purpose.COUPLED), (position >> 32) & _LOW_32)
    c0, c1, c2, _ = philox(counter, (seed & _LOW_32, seed >> 32))
    smallest = exponentials(np.asarray((c1 << 32) | c0, np.uint64)) / COUPLED_BLOCK
    return smallest, np.asarray(c2 % COUPLED_BLOCK).astype(np.int64)


def coupled_excesses(seeds: IntLike, positions: IntLike, tokens: IntLike) -> NDArray[np.float64]:
    """By how much the noise of a token exceeds the smallest of its block, unless it is the smallest."""
    return exponentials(_words(seeds, int(Purpose.COUPLED) | _EXCESS, positions, tokens))


def coupled_noise(seeds: IntLike, positions: IntLike, tokens: NDArray[np.int64]) -> NDArray[np.float64]:
    """The Exp(1) draw of each token id at each position; see `coupled_blocks`."""
    smallest, place = coupled_blocks(seeds, positions, tokens // COUPLED_BLOCK)
    excess = coupled_excesses(seeds, positions, tokens)
    return np.where(tokens % COUPLED_BLOCK == place, smallest, smallest + excess)


def exponentials(words: NDArray[np.uint64]) -> NDArray[np.float64]:
    """Exp(1) draws, finite and above 0."""
    return -np.log(((words >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53)


def words_to_uniforms(words: NDArray[np.uint64]) -> NDArray[np.float64]:
    """[0, 1) from the top 53 bits."""
    return (words >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _words(seeds: IntLike, purpose: int, positions: IntLike, last: IntLike) -> NDArray[np.uint64]:
    seed, position, third = (_as_words(x) for x in (seeds, positions, last))
    counter = (position & _LOW_32, third & _LOW_32, purpose, (position >> 32) & _LOW_32)
    c0, c1, _, _ = philox(counter, (seed & _LOW_32, seed >> 32))
    return np.asarray((c1 << 32) | c0, dtype=np.uint64)


def _as_words(x: IntLike) -> Any:
    # Python ints stay ints: one draw then costs 10 us instead of 100.
    if isinstance(x, int | np.integer):
        return int(x) & 0xFFFFFFFFFFFFFFFF
    return np.asarray(x).astype(np.uint64)
