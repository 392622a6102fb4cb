"""What siblings would have brought to rounds that were judged without them, and what their rows cost.

The recovered token is drawn before anybody looks whether it is a sibling, so the very rounds of a run without
siblings tell how many more tokens any choice of them would have brought.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from cloud_verifier.siblings import MOST, Doubt, SiblingRule, correction_chances
from cloud_verifier.target_model import Segment, TargetModel
from shared.codecs import Distributions, Row

FIXED = (1, 2, 4, 8)
_HEAD = 64  # likeliest tokens of a row that are remembered
_CONTEXT, _REPEATS = 128, 7
_ROWS = (*range(1, 14), 15, 17, 21, 25, 33, 49)


@dataclass(frozen=True, slots=True)
class JudgedRound:
    """One block: its tokens, the head of their q, and what came out."""

    tokens: tuple[int, ...]
    q: Distributions
    num_accepted: int
    recovered: int  # -1 where nothing was rejected

    @classmethod
    def of(cls, tokens: Sequence[int], rows: Sequence[Row], num_accepted: int, beyond: int) -> JudgedRound:
        recovered = beyond if num_accepted < len(tokens) else -1
        heads = Distributions.from_rows([_head(row) for row in rows])
        return cls(tuple(tokens), heads, num_accepted, recovered)


def _head(row: Row) -> Row:
    if len(row.ids) <= _HEAD:
        return row
    kept = np.sort(np.argpartition(-row.weights, _HEAD)[:_HEAD])
    return Row(row.ids[kept], row.weights[kept], row.total)


def pass_times(target: TargetModel) -> dict[int, float]:
    """The fastest pass in milliseconds, by rows, all of which give logits, after 128 tokens of context."""
    slots = target.pool.allocate(_CONTEXT + _ROWS[-1])
    fastest = dict.fromkeys(_ROWS, float("inf"))
    for _ in range(_REPEATS):  # in turns, so that all meet the same quiet moments
        for rows in _ROWS:
            segment = Segment(np.zeros(rows, np.int64), slots[: _CONTEXT + rows], rows)
            started = time.perf_counter()
            float(target.forward([segment])[-1, -1])
            fastest[rows] = min(fastest[rows], 1e3 * (time.perf_counter() - started))
    target.pool.release(slots)
    return fastest


def sibling_table(
    rounds: Sequence[JudgedRound], times: dict[int, float], price: float
) -> dict[str, dict[str, float]]:
    """By choice: leaves a round, tokens a round, and tokens a second of a target that does nothing else.

    Args:
        rounds: blocks of the same length.
        times: milliseconds of a pass by its rows.
        price: what `cloud_verifier.siblings.row_price` found on this target.
    """
    choices = {"none": SiblingRule(0)}
    choices |= {f"{most} a position": SiblingRule(most) for most in FIXED}
    choices["auto"] = SiblingRule(MOST, price)
    return {name: _tried(rule, rounds, times) for name, rule in choices.items()}


def _tried(rule: SiblingRule, rounds: Sequence[JudgedRound], times: dict[int, float]) -> dict[str, float]:
    num_leaves = num_taken = 0
    pass_ms = choose_s = 0.0
    doubt = Doubt()  # as if all were one session
    for block in rounds:
        started = time.perf_counter()
        siblings = rule.choose(block.q, block.tokens, MOST, len(block.tokens), doubt.share)
        doubt.add(block.q, block.tokens, block.num_accepted)
        choose_s += time.perf_counter() - started
        num_leaves += len(siblings)
        num_taken += (block.num_accepted, block.recovered) in siblings
        num_rows = len(block.tokens) + 1 + len(siblings)
        pass_ms += float(np.interp(num_rows, list(times), list(times.values())))
    num = max(len(rounds), 1)
    plain = sum(block.num_accepted + 1 for block in rounds)
    return {
        "leaves_per_round": num_leaves / num,
        "tokens_per_round": (plain + num_taken) / num,
        "more_tokens_percent": 100 * num_taken / max(plain, 1),
        "pass_ms": pass_ms / num,
        "target_tokens_per_s": 1e3 * (plain + num_taken) / max(pass_ms, 1e-9),
        "choose_us": 1e6 * choose_s / num,
    }


def foreseen_table(rounds: Sequence[JudgedRound]) -> dict[str, dict[str, float]]:
    """By choice: tokens a round that its siblings were expected to bring, and that they would have."""
    out = {}
    for most in FIXED:
        expected, num_taken, doubt = 0.0, 0, Doubt()
        for block in rounds:
            rows, chances = correction_chances(block.q, block.tokens, doubt.share)
            siblings = SiblingRule(most).choose(block.q, block.tokens, MOST, len(block.tokens), doubt.share)
            doubt.add(block.q, block.tokens, block.num_accepted)
            entries = zip(rows.tolist(), block.q.ids.tolist(), chances.tolist(), strict=True)
            expected += sum(chance for row, token, chance in entries if (row, token) in siblings)
            num_taken += (block.num_accepted, block.recovered) in siblings
        num = max(len(rounds), 1)
        out[f"{most} a position"] = {"expected": expected / num, "counted": num_taken / num}
    return out


def guess_table(rounds: Sequence[JudgedRound]) -> dict[str, float]:
    """By number of guesses n: share of all rounds whose correction is among the n that q calls likeliest.

    An edge that waits could draft what follows each of them, and on a hit has its next block at once.
    """
    hits = dict.fromkeys(FIXED, 0)
    for block in rounds:
        rows, chances = correction_chances(block.q, block.tokens)
        for num_guesses in FIXED:
            at = np.argsort(-chances, kind="stable")[:num_guesses]
            hits[num_guesses] += (block.num_accepted, block.recovered) in zip(
                rows[at].tolist(), block.q.ids[at].tolist(), strict=True
            )
    rejected = sum(block.recovered >= 0 for block in rounds) / max(len(rounds), 1)
    shares = {f"{num} guessed": hit / max(len(rounds), 1) for num, hit in hits.items()}
    return {"rejected": rejected, **shares}


def shown(tables: dict[str, dict[str, dict[str, float]]]) -> list[tuple[str, Any]]:
    """Lines of the tables for people: rule and choice, numbers."""
    return [
        (
            f"{rule}, {choice}",
            [
                f"{line['leaves_per_round']:.1f}",
                f"{line['tokens_per_round']:.2f}",
                f"{line['more_tokens_percent']:+.1f}",
                f"{line['pass_ms']:.1f}",
                f"{line['target_tokens_per_s']:.1f}",
            ],
        )
        for rule, table in tables.items()
        for choice, line in table.items()
    ]
