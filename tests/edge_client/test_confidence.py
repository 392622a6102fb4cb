"""What the draft's confidence says of its tokens, and where blocks end by it."""

from itertools import accumulate
from operator import mul

import numpy as np
import pytest

from edge_client.confidence import NUM_GROUPS, Calibration, Ending, largest_probability
from edge_client.drafting import Drafter
from shared.codecs import get_codec
from shared.messages import SamplingParams

RISING = tuple(np.linspace(0.3, 1.0, NUM_GROUPS).tolist())


def test_the_chance_of_a_group_is_what_was_seen_of_it():
    calibration = Calibration()
    rng = np.random.default_rng(0)
    assert calibration.chances(0.7) == pytest.approx([0.7] * NUM_GROUPS)
    for _ in range(400):
        confidences = rng.choice([0.25, 0.95], 6)
        kept = rng.random(6) < np.where(confidences < 0.5, 0.4, 0.98)
        calibration.add(confidences.tolist(), int(np.cumprod(kept).sum()))
    ending = Ending(0.5, calibration.chances(0.7))
    assert ending.kept(0.25) == pytest.approx(0.4, abs=0.12)
    assert ending.kept(0.95) == pytest.approx(0.98, abs=0.05)
    assert ending.kept(0.65) == pytest.approx(0.7)  # never seen
    assert calibration.num_tokens > 100


def test_tokens_behind_the_first_rejection_say_nothing():
    calibration = Calibration()
    calibration.add([0.95, 0.25, 0.65], 1)
    assert calibration.num_tokens == 2
    calibration.add([0.95, 0.95], 2)
    assert calibration.num_tokens == pytest.approx(4, abs=0.05)


def test_groups_have_all_confidences_from_0_to_1():
    ending = Ending(0.5, RISING)
    kept = [ending.kept(confidence) for confidence in np.linspace(0.0, 1.0, 101)]
    assert kept == sorted(kept)
    assert (kept[0], kept[-1]) == (RISING[0], RISING[-1])


def test_the_confidence_in_the_likeliest_token_is_its_softmax():
    logits = np.random.default_rng(1).normal(0, 3, 1000).astype(np.float32)
    weights = np.exp(logits.astype(np.float64))
    assert largest_probability(logits) == pytest.approx(weights.max() / weights.sum(), rel=1e-5)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_block_ends_behind_the_token_that_makes_it_doubtful_and_nowhere_else(draft_model, temperature):
    manifest = draft_model.manifest
    ended, whole = set(), 0
    for seed in range(12):
        sampling = SamplingParams(temperature=temperature, seed=seed)
        drafter = Drafter(draft_model, get_codec("dense_f32"), manifest.tokenizer.size, ())
        drafter.begin([256, *b"the cat"[: 3 + seed % 4]], sampling, 60)
        block = drafter.draft(6, ending=Ending(0.4, RISING))
        assert len(block.confidences) == len(block.tokens)
        kept = [Ending(0.0, RISING).kept(confidence) for confidence in block.confidences]
        all_kept = list(accumulate(kept, mul))
        assert all(chance >= 0.4 for chance in all_kept[:-1])
        if len(block.tokens) < 6:
            assert all_kept[-1] < 0.4
            ended.add(len(block.tokens))
        else:
            whole += 1
        if temperature:
            q = get_codec("dense_f32").decode(block.payload, len(block.tokens), manifest.tokenizer.size)
            drawn = [q.row(i).prob(token) for i, token in enumerate(block.tokens)]
            assert block.confidences == pytest.approx(drawn, rel=1e-4)
        else:
            assert all(confidence < 1.0 for confidence in block.confidences)
    assert ended


def test_without_an_ending_nobody_looks_at_confidence(draft_model):
    drafter = Drafter(draft_model, get_codec("lattice"), draft_model.manifest.tokenizer.size, ())
    drafter.begin([256, *b"the"], SamplingParams(temperature=1.0), 60)
    block = drafter.draft(5)
    assert len(block.tokens) == 5
    assert block.confidences == ()
