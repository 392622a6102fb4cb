import numpy as np
import pytest

from cloud_verifier.benchmarks.logits import (
    RULES,
    Pair,
    _judge_times,
    _rate_distortion,
    _summary,
)
from cloud_verifier.benchmarks.siblings import (
    JudgedRound,
    foreseen_table,
    guess_table,
    pass_times,
    sibling_table,
)
from cloud_verifier.siblings import Doubt
from cloud_verifier.target_model import TargetModel
from edge_client.draft_model import DraftModel
from shared.codecs import CODECS, Row


def random_logits(seed, num_rows=18, vocab_size=300):
    return np.random.default_rng(seed).normal(0, 3, (num_rows, vocab_size)).astype(np.float32)


@pytest.mark.parametrize("vocab_size", [300, 400])
def test_every_codec_with_distributions_is_measured_against_exact_q(vocab_size):
    judged = random_logits(1)
    table = _rate_distortion(judged + random_logits(2) / 3, judged, 1.0, vocab_size)
    packed = {f"{name}, a block in a packet" for name in ("lattice", "lattice_coarse")}
    assert set(table) == {"exact"} | packed | {name for name, codec in CODECS.items() if codec.carries_q}
    for name in packed:
        assert table[name]["block_of_8_in_a_packet"] == 1
        assert table[name]["bytes_mean"] <= table[name.partition(",")[0]]["bytes_mean"]
    assert abs(table["dense_f32"]["overlap_lost"]) < 1e-6
    assert table["dense_f32"]["bytes_mean"] == 4 * vocab_size
    lost = [table[name]["overlap_lost"] for name in ("lattice_fine", "lattice", "lattice_coarse")]
    sizes = [table[name]["bytes_mean"] for name in ("lattice_fine", "lattice", "lattice_coarse")]
    assert lost == sorted(lost)
    assert sizes == sorted(sizes, reverse=True)
    assert 0 < table["exact"]["overlap"] < 1
    assert 0 < table["lattice"]["block_of_8_in_a_packet"] <= 1
    assert table["dense_f32"]["block_of_8_in_a_packet"] == 0


def test_guessed_corrections_are_counted():
    rows = [Row(np.array([2, 5, 7, 9], np.int32), np.array([2, 8, 4, 2]), 16)] * 2
    rounds = [
        JudgedRound.of((5, 7), rows, 1, 5),  # the likeliest token, where another was drafted
        JudgedRound.of((5, 7), rows, 0, 3),  # q does not have it
        JudgedRound.of((5, 7), rows, 2, 4),  # nothing was rejected
        JudgedRound.of((5, 7), rows, 0, 9),
    ]
    shares = guess_table(rounds)
    assert shares["rejected"] == 0.75
    assert shares["1 guessed"] == 0.25
    assert shares["8 guessed"] == 0.5


def test_judging_is_timed_for_every_rule():
    times = _judge_times(random_logits(3), random_logits(4), num_drafted=2)
    assert {name.split(",")[0] for name in times} == {"greedy", *RULES}


def test_siblings_are_counted_on_rounds_that_had_none():
    rows = [Row(np.array([2, 5, 7, 9], np.int32), np.array([2, 8, 4, 2]), 16)] * 2
    rounds = [
        JudgedRound.of((5, 7), rows, 0, 7),  # the likeliest other one
        JudgedRound.of((5, 7), rows, 0, 2),  # the second
        JudgedRound.of((5, 7), rows, 1, 3),  # none that q knows
        JudgedRound.of((5, 7), rows, 2, 7),  # a bonus
    ]
    table = sibling_table(rounds, {3: 30.0, 11: 38.0}, price=0.2)
    assert table["none"]["tokens_per_round"] == 7 / 4
    assert table["none"]["pass_ms"] == 30.0
    assert table["1 a position"]["tokens_per_round"] == 8 / 4
    assert table["1 a position"]["leaves_per_round"] == 2
    assert table["1 a position"]["pass_ms"] == 32.0
    assert table["8 a position"]["tokens_per_round"] == 9 / 4
    assert table["8 a position"]["more_tokens_percent"] == pytest.approx(200 / 7)
    foreseen = foreseen_table(rounds)
    assert [line["counted"] for line in foreseen.values()] == [1 / 4, 2 / 4, 2 / 4, 2 / 4]
    doubt, shares = Doubt(), []
    for block in rounds:
        shares.append(doubt.share)
        doubt.add(block.q, block.tokens, block.num_accepted)
    # The likeliest other one of either position; the second is reached where the first was not rejected.
    expected = [share * (0.25 * 0.75 + (1 - share * 0.5) * 0.5 * 0.5) for share in shares]
    assert foreseen["1 a position"]["expected"] == pytest.approx(sum(expected) / len(rounds))
    # Only the other half of the first position's q is worth its row.
    assert table["auto"]["leaves_per_round"] < table["8 a position"]["leaves_per_round"]


def test_rounds_on_a_pair_of_models_are_counted(tiny_target, tiny_draft):
    pair = Pair(
        DraftModel.load(tiny_draft), TargetModel.load(str(tiny_target), dtype="float32", num_slots=256)
    )
    drafted, judged = pair.record([5, 6, 7], 10, seed=1)
    assert drafted.shape == judged.shape == (10, pair.vocab_size)
    # The draft is the target with some noise, and both have read the same text.
    correlations = [np.corrcoef(d, t)[0, 1] for d, t in zip(drafted, judged, strict=True)]
    assert min(correlations) > 0.5
    for rule in RULES:
        rounds = pair.write([5, 6, 7], rule, 3, 20, seed=1)
        assert sum(block.num_accepted + 1 for block in rounds) >= 20
        assert 1 < _summary(rounds)["tokens_per_round"] <= 4
        assert all((block.recovered < 0) == (block.num_accepted == 3) for block in rounds)
        assert all(block.q.num_rows == 3 for block in rounds)
    times = pass_times(pair.target)
    assert all(ms > 0 for ms in times.values())
    assert pair.target.pool.num_free == pair.target.pool.num_slots
