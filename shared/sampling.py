"""From logits to the distribution that is sampled, in NumPy: the edge's side and the oracle's.

The order is that of verifier.proto: what `shared.history` does, then temperature, top-k, top-p,
min-p, each on what the one before left over. Equal logits are kept in order of their ids, lowest
first. The torch twins of these transforms live in `cloud_verifier.verification` and agree with them
to float32 rounding.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shared.faults import FaultKind, SpecwireError
from shared.history import TokenHistory, adjust, needs_history
from shared.messages import SamplingParams
from shared.randomness import COUPLED_BLOCK, coupled_blocks, coupled_excesses

# Both sides treat anything colder as greedy, so that they never disagree about which it is.
GREEDY_BELOW = 1e-5

_FIRST_BLOCKS = 8  # of `coupled_choice`


def is_greedy(params: SamplingParams) -> bool:
    """Whether the distribution is one-hot at the likeliest token (lowest id among equals)."""
    return params.temperature < GREEDY_BELOW


def validate(params: SamplingParams) -> None:
    """SpecwireError(BAD_SAMPLING) that names the first field out of range, its value and the range."""
    checks: list[tuple[str, float, bool, str]] = [
        ("temperature", params.temperature, params.temperature >= 0, "0 or more"),
        ("top_k", params.top_k, params.top_k >= 0, "0 (off) or more"),
        ("top_p", params.top_p, 0 < params.top_p <= 1, "above 0 and at most 1 (off)"),
        ("min_p", params.min_p, 0 <= params.min_p < 1, "at least 0 (off) and below 1"),
        ("seed", params.seed, 0 <= params.seed < 1 << 64, "an integer of 64 bits without sign"),
        ("repetition_penalty", params.repetition_penalty, params.repetition_penalty > 0, "above 0; 1 is off"),
        ("presence_penalty", params.presence_penalty, abs(params.presence_penalty) <= 2, "from -2 to 2"),
        ("frequency_penalty", params.frequency_penalty, abs(params.frequency_penalty) <= 2, "from -2 to 2"),
        ("min_tokens", params.min_tokens, params.min_tokens >= 0, "0 (off) or more"),
        ("fused_weight", params.fused_weight, 0 <= params.fused_weight <= 1, "from 0 to 1"),
    ]
    checks += [
        (f"logit_bias[{token}]", bias, token >= 0, "for a token id of 0 or more")
        for token, bias in params.logit_bias.items()
    ]
    for name, value, in_range, allowed in checks:
        if not in_range or not math.isfinite(value):
            raise _bad_sampling(name, value, f"finite and {allowed}")
    for word in params.bad_words:
        if not word or min(word) < 0:
            raise _bad_sampling("bad_words", word, "sequences of at least one token id of 0 or more")


def check_rule(params: SamplingParams, verification: str) -> None:
    """SpecwireError(BAD_SAMPLING) where a verification cannot give what these parameters ask for."""
    if verification == "greedy" and not is_greedy(params):
        raise SpecwireError(
            FaultKind.BAD_SAMPLING,
            f"Greedy verification cannot keep a temperature of {params.temperature:g}.",
            "Set the temperature to 0, or choose another verification.",
        )
    if params.fused_weight > 0 and verification != "fused":
        raise SpecwireError(
            FaultKind.BAD_SAMPLING,
            f"fused_weight is {params.fused_weight:g}, which only fused verification takes.",
            "Choose fused verification, which is lossy, or leave the weight at 0.",
        )


def probabilities(
    logits: NDArray[np.float32], params: SamplingParams, history: TokenHistory | None = None
) -> NDArray[np.float32]:
    """[V] logits -> float32 [V] probabilities that sum to 1.

    -inf forbids a token. `history` is the text before this position; only penalties and the like
    look at it. SpecwireError(NOT_FINITE) when a logit is NaN or +inf, or all are -inf.
    """
    values = np.asarray(logits, np.float32)
    if history is not None and needs_history(params):
        values = adjust(values, params, history)
    top = values.max()
    if not np.isfinite(top):
        raise SpecwireError(
            FaultKind.NOT_FINITE,
            f"The model gave logits without a finite maximum ({top}).",
            "Try a wider number format for this model; half precision overflows in some.",
        )
    out = np.zeros(len(values), np.float32)
    if is_greedy(params):
        out[int(values.argmax())] = 1.0
        return out
    ids: NDArray[np.intp] | slice = slice(None)
    if 0 < params.top_k < len(values):
        ids = keep_largest(values, params.top_k)
    # Shifted before it is divided: what overflows then is -inf, which is weight 0.
    with np.errstate(over="ignore"):
        weights = values[ids] - top
        weights /= np.float32(params.temperature)
    np.exp(weights, out=weights)
    if params.top_p < 1:
        kept = nucleus(weights, params.top_p)
        ids, weights = _take(ids, kept), weights[kept]
    if params.min_p > 0:
        # The largest weight is exactly 1.
        kept = np.flatnonzero(weights >= np.float32(params.min_p))
        ids, weights = _take(ids, kept), weights[kept]
    weights /= weights.sum()
    out[ids] = weights
    return out


def coupled_choice(probs: NDArray[np.float32], seed: int, position: int) -> int:
    """The token that the shared noise of `coupled` verification picks from [V] probabilities.

    It is the id with the smallest noise / probability, which is distributed as `probs` (the
    exponential form of the Gumbel-max trick). Blocks of ids are ruled out by their smallest noise
    and largest probability, so that few draws are made.
    """
    num_blocks = -(-len(probs) // COUPLED_BLOCK)
    if len(probs) % COUPLED_BLOCK:
        probs = np.append(probs, np.zeros(num_blocks * COUPLED_BLOCK - len(probs), probs.dtype))
    weights = probs.reshape(num_blocks, COUPLED_BLOCK)
    largest = np.ascontiguousarray(weights.T).max(axis=0)  # along short rows it takes four times as long
    possible = np.flatnonzero(largest)
    smallest, place = coupled_blocks(seed, position, possible)
    bounds = smallest / largest[possible]
    members = np.arange(COUPLED_BLOCK)

    def ratios(chosen: NDArray[np.intp]) -> NDArray[np.float64]:
        blocks = possible[chosen]
        excess = coupled_excesses(seed, position, blocks[:, None] * COUPLED_BLOCK + members)
        noise = smallest[chosen, None] + np.where(members == place[chosen, None], 0.0, excess)
        weight = weights[blocks]
        return np.divide(noise, weight, out=np.full_like(noise, np.inf), where=weight > 0)

    # The best of a few blocks rules out nearly all others.
    num_first = min(_FIRST_BLOCKS, len(bounds))
    best = ratios(np.argpartition(bounds, num_first - 1)[:num_first]).min()
    chosen = np.flatnonzero(bounds <= best)
    block, member = divmod(int(ratios(chosen).argmin()), COUPLED_BLOCK)
    return int(possible[chosen[block]]) * COUPLED_BLOCK + member


def keep_largest(values: NDArray[np.float32], count: int) -> NDArray[np.intp]:
    """Ascending indices of the `count` largest values, lowest index first among equals."""
    if count >= len(values):
        return np.arange(len(values))
    threshold = np.partition(values, len(values) - count)[len(values) - count]
    above = np.flatnonzero(values > threshold)
    equal = np.flatnonzero(values == threshold)[: count - len(above)]
    return np.sort(np.concatenate([above, equal]))


def nucleus(weights: NDArray[np.float32], mass: float) -> NDArray[np.intp]:
    """Ascending indices of the smallest set of largest weights that holds `mass` of their sum."""
    wanted = mass * float(weights.sum(dtype=np.float64))
    candidates = _likeliest(weights, wanted)
    largest = np.sort(weights[candidates])[::-1]
    before = np.cumsum(largest, dtype=np.float64) - largest
    count = max(1, int(np.count_nonzero(before < wanted)))
    return candidates[keep_largest(weights[candidates], count)]


def _likeliest(weights: NDArray[np.float32], wanted: float) -> NDArray[np.intp]:
    """Ascending indices of all weights above some level that together hold at least `wanted`.

    Selecting by level avoids sorting the vocabulary: a few dozen to a few thousand ids remain.
    """
    level = float(weights.max())
    floor = level * 2.0**-24
    while level > floor:
        level /= 8
        chosen = np.flatnonzero(weights >= np.float32(level))
        if float(weights[chosen].sum(dtype=np.float64)) >= wanted:
            return chosen
    return np.arange(len(weights))


def _take(ids: NDArray[np.intp] | slice, kept: NDArray[np.intp]) -> NDArray[np.intp]:
    return kept if isinstance(ids, slice) else ids[kept]


def _bad_sampling(name: str, value: Any, allowed: str) -> SpecwireError:
    return SpecwireError(
        FaultKind.BAD_SAMPLING, f"{name} is {value}, which is out of range.", f"It must be {allowed}."
    )
