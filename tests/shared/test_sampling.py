import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.faults import FaultKind, SpecwireError
from shared.messages import SamplingParams
from shared.randomness import coupled_noise
from shared.sampling import coupled_choice, keep_largest, nucleus, probabilities, validate


def plain(logits, params):
    """The transforms by full sorts in float64, as their papers state them."""
    logits = np.asarray(logits, np.float64)
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    if params.temperature == 0:
        return np.eye(len(logits))[order[0]]
    weights = np.exp((logits - logits.max()) / params.temperature)
    kept = order[: params.top_k or len(order)]
    total, before, nucleus_ids = weights[kept].sum(), 0.0, []
    for i in kept:
        if before < params.top_p * total or not nucleus_ids:
            nucleus_ids.append(i)
        before += weights[i]
    kept = [i for i in nucleus_ids if weights[i] >= params.min_p * weights.max()]
    out = np.zeros(len(logits))
    out[kept] = weights[kept]
    return out / out.sum()


@settings(max_examples=200, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    size=st.integers(1, 300),
    ties=st.booleans(),
    params=st.builds(
        SamplingParams,
        temperature=st.sampled_from([0.0, 0.3, 1.0, 2.5]),
        top_k=st.sampled_from([0, 1, 5, 40, 1000]),
        top_p=st.sampled_from([1.0, 0.95, 0.5, 0.01]),
        min_p=st.sampled_from([0.0, 0.02, 0.3]),
    ),
)
def test_equals_the_plain_definition(seed, size, ties, params):
    logits = np.random.default_rng(seed).normal(0, 3, size).astype(np.float32)
    if ties:
        # Whole numbers at a temperature of a power of two leave no rounding to decide what is equal.
        logits = np.round(logits)
    expected = plain(logits, params)
    actual = probabilities(logits, params)
    assert actual.dtype == np.float32
    assert actual.sum() == pytest.approx(1.0, abs=1e-5)
    np.testing.assert_allclose(actual, expected, rtol=2e-5, atol=1e-9)


def test_equal_logits_are_kept_from_the_lowest_id_on():
    logits = np.array([1, 2, 2, 2, 0], np.float32)
    assert probabilities(logits, SamplingParams(temperature=0.0)).tolist() == [0, 1, 0, 0, 0]
    assert np.flatnonzero(probabilities(logits, SamplingParams(temperature=1.0, top_k=2))).tolist() == [1, 2]
    assert np.flatnonzero(probabilities(logits, SamplingParams(temperature=1.0, top_p=0.5))).tolist() == [
        1,
        2,
    ]
    assert keep_largest(logits, 3).tolist() == [1, 2, 3]


def test_a_flat_distribution_over_a_large_vocabulary_is_cut_where_its_mass_says():
    assert len(nucleus(np.ones(151_936, np.float32), 0.5)) == 75_968


def test_a_tiny_temperature_is_greedy_and_never_overflows():
    logits = np.array([0, 3e38, 1e38, 3e38], np.float32)
    for temperature in (1e-30, 1e-6, 1e-5, 1e-3):
        probs = probabilities(logits, SamplingParams(temperature=temperature))
        assert np.isfinite(probs).all()
        assert probs[1] in (1.0, 0.5)


def test_forbidden_tokens_have_no_mass_and_padding_changes_nothing():
    logits = np.random.default_rng(0).normal(size=50).astype(np.float32)
    padded = np.concatenate([logits, np.full(14, -np.inf, np.float32)])
    for params in (SamplingParams(temperature=0.8), SamplingParams(temperature=1.0, top_p=0.9, top_k=60)):
        probs = probabilities(padded, params)
        np.testing.assert_allclose(probs[:50], probabilities(logits, params), rtol=1e-5)
        assert not probs[50:].any()


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_without_a_finite_maximum_are_refused(bad, temperature):
    for logits in ([0.0, bad, 1.0], [-np.inf, -np.inf]):
        with pytest.raises(SpecwireError) as raised:
            probabilities(np.array(logits, np.float32), SamplingParams(temperature=temperature))
        assert raised.value.kind is FaultKind.NOT_FINITE


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("top_k", -1),
        ("top_p", 0.0),
        ("top_p", 1.01),
        ("min_p", 1.0),
        ("min_p", -0.1),
        ("seed", -1),
        ("seed", 2**64),
        ("repetition_penalty", 0.0),
        ("presence_penalty", 2.5),
        ("frequency_penalty", -2.5),
        ("min_tokens", -1),
        ("fused_weight", 1.5),
        ("logit_bias", {3: float("nan")}),
        ("logit_bias", {-3: 1.0}),
        ("bad_words", ((),)),
    ],
)
def test_parameters_out_of_range_are_named(field, value):
    with pytest.raises(SpecwireError, match=field) as raised:
        validate(SamplingParams(**{field: value}))
    assert raised.value.kind is FaultKind.BAD_SAMPLING


def test_parameters_in_range_are_accepted():
    validate(SamplingParams())
    validate(
        SamplingParams(
            temperature=2.0,
            top_k=50,
            top_p=0.001,
            min_p=0.99,
            seed=2**64 - 1,
            repetition_penalty=1.2,
            presence_penalty=-2.0,
            logit_bias={0: -100.0},
            bad_words=((1, 2),),
            fused_weight=1.0,
        )
    )


@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 2**64 - 1), size=st.integers(1, 400), sharpness=st.sampled_from([0.1, 2.0, 9.0]))
def test_the_coupled_choice_is_the_smallest_noise_over_probability(seed, size, sharpness):
    rng = np.random.default_rng(seed)
    probs = probabilities(
        rng.normal(0, sharpness, size).astype(np.float32), SamplingParams(temperature=1.0, top_k=size // 2)
    )
    noise = coupled_noise(seed, 11, np.arange(size))
    with np.errstate(divide="ignore"):
        assert coupled_choice(probs, seed, 11) == (noise / probs).argmin()


def test_coupled_choices_follow_the_probabilities():
    probs = np.array([0.5, 0.0, 0.3, 0.15, 0.05], np.float32)
    counts = np.bincount([coupled_choice(probs, seed, 3) for seed in range(5000)], minlength=5)
    assert counts[1] == 0
    seen = probs > 0
    statistic = ((counts[seen] - 5000 * probs[seen]) ** 2 / (5000 * probs[seen])).sum()
    assert statistic < 30  # 3 degrees of freedom: p < 1e-5
