"""The compiled reading of rows against NumPy in float64, and against the oracle's draws."""

import numpy as np
import pytest
import torch

from cloud_verifier.native_rows import Blocks, kernel_for, row_kernel
from shared.messages import SamplingParams
from shared.randomness import Purpose, uniforms
from shared.reference import inverse_cdf, residual
from shared.sampling import coupled_choice, probabilities

WIDTHS = [1, 5, 31, 1023, 1025, 20_000]


@pytest.fixture(scope="module")
def kernel():
    found = row_kernel()
    if (
        found is None
    ):  # a machine without a C compiler judges with torch's operations, which have their own tests
        pytest.xfail("no C compiler")
    return found


def rate_of(temperature, num):
    return np.full(num, np.log2(np.e) / temperature, np.float32)


def some_logits(rng, num, width):
    """A pass whose rows are wider than the vocabulary, with forbidden tokens."""
    logits = rng.normal(0, 4, (num, width + 3)).astype(np.float32)
    logits[:, rng.random(width + 3) < 0.2] = -np.inf
    logits[:, width // 2] = 1.0
    return torch.from_numpy(logits)[:, :width]


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("temperature", [1.0, 0.3, 1e-4])
def test_maxima_places_and_masses(kernel, width, temperature):
    rng = np.random.default_rng(width)
    logits = some_logits(rng, 7, width)
    logits[2] = logits[2].round()
    rows = np.array([5, 2, 2, 0])
    top, place, mass = kernel.summary(logits, rows, rate_of(temperature, 4))
    wanted = logits.double().numpy()[rows]
    assert top.tolist() == wanted.max(axis=1).tolist()
    assert place.tolist() == wanted.argmax(axis=1).tolist()
    exact = np.exp((wanted - wanted.max(axis=1, keepdims=True)) / temperature).sum(axis=1)
    np.testing.assert_allclose(mass, exact, rtol=5e-6)


def test_without_a_rate_there_is_no_mass(kernel):
    logits = some_logits(np.random.default_rng(0), 3, 50)
    assert kernel.summary(logits, np.arange(3), np.zeros(3, np.float32))[2].tolist() == [1.0] * 3


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("at", [0, 1030, 2047])
def test_a_row_that_is_not_finite_shows_in_its_maximum_alone(kernel, bad, at):
    logits = some_logits(np.random.default_rng(1), 3, 2048)
    expected = kernel.summary(logits, np.arange(3), rate_of(1.0, 3))
    logits[1, at] = bad
    found = kernel.summary(logits, np.arange(3), rate_of(1.0, 3))
    assert not np.isfinite(found[0][1])
    for actual, wanted in zip(found, expected, strict=True):
        assert actual[[0, 2]].tolist() == wanted[[0, 2]].tolist()
    logits[1] = -np.inf
    assert kernel.summary(logits, np.arange(3), rate_of(1.0, 3))[0][1] == -np.inf


def csr(q_rows):
    """Offsets, ids and probabilities of a list of (ids, probs)."""
    offsets = np.cumsum([0, *(len(ids) for ids, _ in q_rows)])
    ids = np.concatenate([ids for ids, _ in q_rows]).astype(np.int64)
    return offsets, ids, np.concatenate([probs for _, probs in q_rows])


def drawn(kernel, logits, rows, temperature, scale, q_rows, uniform):
    """Through the kernel, with q as a list of (ids, probs)."""
    rate = rate_of(temperature, len(rows))
    top, _, mass = kernel.summary(logits, rows, rate)
    # Every row as the first of a block of one drafted token, which is rejected; the bonus rows are not used.
    first, num = 2 * np.arange(len(rows) + 1), len(rows)
    both = [np.repeat(values, 2) for values in (rows, rate, top, mass, uniform)]
    nothing_accepted = np.zeros(num, np.int64)
    return kernel.draw(logits, both[0], first, nothing_accepted, scale, csr(q_rows), *both[1:])


@pytest.mark.parametrize("width", WIDTHS[1:])
def test_draws_are_those_of_the_oracle(kernel, width):
    rng = np.random.default_rng(width)
    num, temperature = 400, 0.8
    logits = some_logits(rng, 10, width)
    rows = rng.integers(0, 10, num)
    scale, uniform = rng.choice([1.0, 0.6], num), rng.random(num)
    uniform[:2] = 0.0, 1 - 2.0**-53
    q_rows, expected = [], []
    for row, factor, u in zip(rows, scale, uniform, strict=True):
        p = probabilities(logits[row].numpy(), SamplingParams(temperature)).astype(np.float64)
        kept = np.sort(rng.choice(width, rng.integers(0, min(width, 20)), replace=False))
        q = np.zeros(width)
        q[kept] = rng.dirichlet(np.ones(len(kept))) if len(kept) else 0.0
        q_rows.append((kept, q[kept]))
        rest = residual(p, q, factor)
        expected.append({inverse_cdf(rest, min(max(u + d, 0.0), 1 - 2.0**-53)) for d in (-1e-5, 0.0, 1e-5)})
    actual = drawn(kernel, logits, rows, temperature, scale, q_rows, uniform)
    # Only a draw within rounding of a boundary may fall on its other side.
    assert all(token in allowed for token, allowed in zip(actual.tolist(), expected, strict=True))
    assert len(set(actual.tolist())) > min(width, 30) // 3


def test_what_p_does_not_leave_is_never_drawn_and_equal_distributions_give_p(kernel):
    logits = torch.full((1, 2000), -torch.inf)
    logits[0, [7, 1500]] = 0.0
    uniform = np.linspace(0, 1 - 2.0**-53, 101)
    rows, scale = np.zeros(101, np.int64), np.ones(101)
    nothing = (np.zeros(0), np.zeros(0))
    assert set(drawn(kernel, logits, rows, 1.0, scale, [nothing] * 101, uniform).tolist()) == {7, 1500}
    certain = (np.array([7]), np.array([0.75]))
    assert set(drawn(kernel, logits, rows, 1.0, scale, [certain] * 101, uniform).tolist()) == {1500}
    equal = (np.array([7, 1500]), np.array([0.5, 0.5]))
    assert set(drawn(kernel, logits, rows, 1.0, scale, [equal] * 101, uniform).tolist()) == {7, 1500}


CUTS = [
    {"top_k": 1},
    {"top_k": 7},
    {"top_k": 900},
    {"top_p": 0.9},
    {"top_p": 0.9999},
    {"min_p": 0.05},
    {"min_p": 1e-6},
    {"top_k": 40, "top_p": 0.8, "min_p": 0.02},
    {"top_p": 0.95, "min_p": 0.001},
]


@pytest.mark.parametrize("width", [5, 1025, 20_000])
@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_truncated_rows_are_those_of_the_edge(kernel, cut, width):
    rng = np.random.default_rng(width)
    logits = some_logits(rng, 6, width)
    logits[1] = logits[1].round()  # equals are kept from the lowest id on
    logits[2] = 0.0
    rows, sampling = np.array([4, 1, 2, 0]), SamplingParams(temperature=0.7, **cut)
    rate = rate_of(0.7, 4)
    top, _, mass = kernel.summary(logits, rows, rate)
    cuts = (
        np.full(4, sampling.top_k),
        np.full(4, sampling.top_p),
        np.full(4, sampling.min_p, np.float32),
    )
    at, ids, probs = kernel.truncate(logits, rows, rate, top, mass, cuts)
    actual = np.zeros((4, width))
    actual[at, ids] = probs
    keys = at * width + ids
    assert (np.diff(keys) > 0).all()
    expected = np.array([probabilities(logits[row].numpy(), sampling) for row in rows])
    # A token at the very edge of a nucleus may fall on its other side by rounding.
    np.testing.assert_allclose(actual, expected, rtol=2e-5, atol=5e-6)


def test_a_row_that_is_not_finite_leaves_nothing(kernel):
    logits = some_logits(np.random.default_rng(5), 3, 100)
    logits[1, 3] = np.nan
    rows, rate = np.arange(3), rate_of(1.0, 3)
    top, _, mass = kernel.summary(logits, rows, rate)
    cuts = (np.full(3, 4), np.ones(3), np.zeros(3, np.float32))
    assert np.bincount(kernel.truncate(logits, rows, rate, top, mass, cuts)[0]).tolist() == [4, 0, 4]


def test_a_row_without_memory_to_rank_its_tokens_is_an_error(kernel):
    logits = torch.empty((1, 1 << 60), device="meta")
    cuts = (np.full(1, 4), np.ones(1), np.zeros(1, np.float32))
    with pytest.raises(MemoryError, match=str(1 << 60)):
        kernel.truncate(logits, np.arange(1), rate_of(1.0, 1), np.zeros(1, np.float32), np.ones(1), cuts)


@pytest.mark.parametrize("width", WIDTHS)
def test_the_coupled_choice_is_that_of_both_sides(kernel, width):
    rng = np.random.default_rng(width)
    num, sampling = 60, SamplingParams(temperature=0.9)
    logits = some_logits(rng, num, width)
    seeds = rng.integers(0, 2**64, num, dtype=np.uint64)
    positions = rng.integers(0, 2**40, num)
    expected = [
        coupled_choice(probabilities(row, sampling), int(seed), int(position))
        for row, seed, position in zip(logits.numpy(), seeds, positions, strict=True)
    ]
    top = np.zeros(num, np.float32)

    def judged(first, drafted):
        keys = (seeds.view(np.int64), positions)
        top.fill(0)
        return kernel.coupled(logits, np.arange(num), Blocks(first, drafted), rate_of(0.9, num), keys, top)

    alone = judged(np.arange(num + 1), np.zeros(0, np.int64))
    largest = logits.amax(dim=1).tolist()
    assert top.tolist() == largest
    assert alone[0].tolist() == [0] * num
    assert alone[1].tolist() == expected
    # Blocks of 2, 0 and 56 drafted tokens; in the last the fourth is wrong.
    drafted = np.array([*expected[:2], *expected[4:60]])
    drafted[2 + 3] += 1
    first = np.array([0, 3, 4, num])
    drafted = drafted[: num - 3]
    num_accepted, out = judged(first, drafted)
    assert num_accepted.tolist() == [2, 0, 3]
    assert out.tolist() == [expected[2], expected[3], expected[7]]
    assert top.tolist() == [*largest[:8], *[0.0] * (num - 8)]  # what is behind the rejected token is not read


@pytest.mark.parametrize("temperature", [1.0, 0.4])
def test_a_token_is_kept_where_its_draw_allows_and_nothing_is_read_behind_the_first_that_is_not(
    kernel, temperature
):
    rng = np.random.default_rng(11)
    width, lengths = 3000, [4, 0, 7, 1, 5]
    num_rows = sum(lengths) + len(lengths)
    logits = some_logits(rng, num_rows, width)
    rows = rng.permutation(num_rows)
    first = np.cumsum([0, *(length + 1 for length in lengths)])
    p = np.array([probabilities(logits[row].numpy(), SamplingParams(temperature)) for row in rows])
    weight = np.array([0.0, 0.0, 0.0, 0.5, 1.0])
    token_rows = np.concatenate([first[b] + np.arange(length) for b, length in enumerate(lengths)])
    block = np.repeat(np.arange(len(lengths)), lengths)
    rate = rate_of(temperature, num_rows)
    for _ in range(50):
        drafted = np.array([rng.choice(width, p=p[row] / p[row].sum()) for row in token_rows])
        at = p[token_rows, drafted]
        q = np.minimum(at * rng.choice([0.5, 1.5, 4.0], len(at)), 1.0)
        uniform = rng.random(num_rows)
        judged = (1 - weight[block]) * at + weight[block] * q
        keeps = uniform[token_rows] * q < judged
        wanted = [
            int(np.cumprod(keeps[block == b]).sum()) if length else 0 for b, length in enumerate(lengths)
        ]
        top, mass = np.zeros(num_rows, np.float32), np.zeros(num_rows)
        blocks = Blocks(first, drafted)
        found = kernel.token(logits, rows, blocks, q, uniform, weight, rate, top, mass)
        assert found.tolist() == wanted
        summary = kernel.summary(logits, rows, rate)
        for b, kept in enumerate(wanted):
            reached = slice(first[b], first[b] + kept + 1)
            behind = slice(first[b] + kept + 1, first[b + 1])
            assert top[reached].tolist() == summary[0][reached].tolist()
            assert mass[reached].tolist() == summary[2][reached].tolist()
            assert not mass[behind].any()


def test_an_impossible_token_is_never_kept_and_a_row_that_is_not_finite_ends_its_block(kernel):
    logits = torch.zeros(4, 50)
    logits[0, 3] = -np.inf
    first, rate = np.array([0, 2, 4]), rate_of(1.0, 4)
    drafted, drawn_q, weight = np.array([3, 3]), np.array([1.0, 1e-9]), np.zeros(2)

    def kept():
        top, mass = np.zeros(4, np.float32), np.ones(4)
        blocks, uniform = Blocks(first, drafted), np.zeros(4)
        return kernel.token(logits, np.arange(4), blocks, drawn_q, uniform, weight, rate, top, mass), top

    assert kept()[0].tolist() == [0, 1]
    logits[2, 7] = np.nan
    num_accepted, top = kept()
    assert num_accepted.tolist() == [0, 0]
    assert np.isnan(top[2])


@pytest.mark.parametrize("purpose", [Purpose.ACCEPT, Purpose.SAMPLE])
def test_draws_are_bit_for_bit_those_of_numpy(kernel, purpose):
    rng = np.random.default_rng(0)
    seeds = rng.integers(0, 2**64, 500, dtype=np.uint64)
    positions, bases = rng.integers(0, 2**40, 500), rng.integers(0, 2**31, 500)
    actual = kernel.uniforms(seeds.view(np.int64), purpose, positions, bases)
    assert actual.tolist() == uniforms(seeds, purpose, positions, bases).tolist()


def test_nothing_depends_on_the_company_nor_on_the_threads(kernel):
    rng = np.random.default_rng(3)
    logits = some_logits(rng, 9, 30_000)
    q = [(np.sort(rng.choice(30_000, 50, replace=False)), rng.dirichlet(np.ones(50)) * 0.5) for _ in range(9)]
    uniform, rows, scale = rng.random(9), np.arange(9), np.ones(9)

    def everything(chosen):
        rate = rate_of(0.7, len(chosen))
        tokens = drawn(
            kernel, logits, rows[chosen], 0.7, scale[chosen], [q[i] for i in chosen], uniform[chosen]
        )
        return list(zip(*kernel.summary(logits, rows[chosen], rate), tokens, strict=True))

    num_threads = torch.get_num_threads()
    together = everything(list(range(9)))
    assert together == [everything([i])[0] for i in range(9)]
    torch.set_num_threads(1)
    assert everything(list(range(9))) == together
    torch.set_num_threads(num_threads)


def test_arrays_that_are_not_dense_are_refused(kernel):
    with pytest.raises(TypeError, match="contiguous"):
        kernel.summary(torch.zeros(4, 8), np.arange(4)[::2], np.zeros(2, np.float32))


def test_other_formats_are_left_to_torch(kernel):
    assert kernel_for(torch.zeros(2, 8)) is kernel
    assert kernel_for(torch.zeros(2, 8, dtype=torch.bfloat16)) is None
    assert kernel_for(torch.zeros(8, 2).t()) is None
