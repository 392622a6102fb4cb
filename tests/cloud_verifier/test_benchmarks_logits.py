import numpy as np
import pytest

from cloud_verifier.benchmarks.logits import (
    RULES,
    Pair,
    Rounds,
    _judge_times,
    _rate_distortion,
    _with_hits,
)
from cloud_verifier.target_model import TargetModel
from edge_client.draft_model import DraftModel
from shared.codecs import CODECS, Row


def random_logits(seed, num_rows=18, vocab_size=300):
    return np.random.default_rng(seed).normal(0, 3, (num_rows, vocab_size)).astype(np.float32)


@pytest.mark.parametrize("vocab_size", [300, 400])
def test_every_codec_with_distributions_is_measured_against_exact_q(vocab_size):
    judged = random_logits(1)
    table = _rate_distortion(judged + random_logits(2) / 3, judged, 1.0, vocab_size)
    assert set(table) == {"exact"} | {name for name, codec in CODECS.items() if codec.carries_q}
    assert abs(table["dense_f32"]["overlap_lost"]) < 1e-6
    assert table["dense_f32"]["bytes_mean"] == 4 * vocab_size
    lost = [table[name]["overlap_lost"] for name in ("lattice_fine", "lattice", "lattice_coarse")]
    sizes = [table[name]["bytes_mean"] for name in ("lattice_fine", "lattice", "lattice_coarse")]
    assert lost == sorted(lost)
    assert sizes == sorted(sizes, reverse=True)
    assert 0 < table["exact"]["overlap"] < 1


def test_judging_is_timed_for_every_rule():
    times = _judge_times(random_logits(3), random_logits(4), num_drafted=2)
    assert {name.split(",")[0] for name in times} == {"greedy", *RULES}


def test_sibling_hits_count_the_likeliest_other_ids():
    row = Row(np.array([2, 5, 7, 9], np.int32), np.array([1, 8, 4, 3]), 16)
    assert _with_hits((0, 0, 0, 0), row, 5, 7) == (1, 1, 1, 1)
    assert _with_hits((0, 0, 0, 0), row, 5, 9) == (0, 1, 1, 1)
    assert _with_hits((0, 0, 0, 0), row, 7, 5) == (1, 1, 1, 1)
    assert _with_hits((0, 0, 0, 0), row, 5, 3) == (0, 0, 0, 0)


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
        counts = Rounds()
        pair.write([5, 6, 7], rule, 3, 20, seed=1, counts=counts)
        summary = counts.summary()
        assert counts.num_tokens == counts.num_rounds + counts.num_accepted >= 20
        assert 1 < summary["tokens_per_round"] <= 4
    assert pair.target.pool.num_free == pair.target.pool.num_slots
