import numpy as np
import pytest

from shared.randomness import Purpose, coupled_noise, philox, random_words, uniforms

# `kat_vectors` of the Random123 distribution (D. E. Shaw Research), philox4x32, 10 rounds.
KNOWN_ANSWERS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "answer"), KNOWN_ANSWERS)
def test_philox_gives_the_published_answers_for_ints_and_arrays(counter, key, answer):
    assert philox(counter, key) == answer
    arrays = philox(
        tuple(np.array([c, 7], np.uint64) for c in counter), tuple(np.array([k, 9], np.uint64) for k in key)
    )
    assert tuple(int(a[0]) for a in arrays) == answer


def test_a_draw_alone_equals_the_draw_in_a_batch():
    rng = np.random.default_rng(0)
    seeds = rng.integers(0, 2**64, 50, dtype=np.uint64)
    positions = rng.integers(0, 10_000, 50)
    bases = rng.integers(0, 10_000, 50)
    batch = random_words(seeds, Purpose.ACCEPT, positions, bases)
    alone = [
        int(random_words(int(s), Purpose.ACCEPT, int(p), int(b)))
        for s, p, b in zip(seeds, positions, bases, strict=True)
    ]
    assert batch.tolist() == alone
    assert random_words(7, Purpose.DRAFT, np.arange(3), 5).shape == (3,)


def test_every_argument_changes_the_draw():
    def draw(seed=1, purpose=Purpose.DRAFT, position=1, base=1):
        return int(random_words(seed, purpose, position, base))

    others = [draw(seed=2), draw(seed=1 + 2**32), draw(position=2), draw(base=2)]
    others += [draw(purpose=p) for p in Purpose if p != Purpose.DRAFT]
    assert len({draw(), *others}) == 1 + len(others)
    assert len(np.unique(coupled_noise(3, np.arange(40)[:, None], np.arange(50)))) == 2000


def test_uniforms_are_uniform_and_below_one():
    draws = uniforms(np.arange(200, dtype=np.uint64)[:, None], Purpose.SAMPLE, np.arange(500), 0)
    assert draws.min() >= 0.0
    assert draws.max() < 1.0
    counts, _ = np.histogram(draws, bins=100, range=(0, 1))
    chi_square = ((counts - 1000.0) ** 2 / 1000.0).sum()
    assert chi_square < 175  # 99 degrees of freedom: p < 1e-5 above 171


def test_coupled_noise_is_independent_and_exponential_for_every_id():
    noise = coupled_noise(np.arange(4000, dtype=np.uint64)[:, None], 17, np.arange(70))
    for token in (0, 1, 31, 32, 69):
        counts, _ = np.histogram(1 - np.exp(-noise[:, token]), bins=20, range=(0, 1))
        assert ((counts - 200.0) ** 2 / 200.0).sum() < 60  # 19 degrees of freedom: p < 1e-5 above 56
    # Which of the ids is smallest is uniform, within a block and across blocks.
    smallest = np.bincount(noise.argmin(axis=1), minlength=70)
    assert ((smallest - 4000 / 70) ** 2 / (4000 / 70)).sum() < 135  # 69 degrees of freedom
    correlation = np.corrcoef(noise.T) - np.eye(70)
    assert np.abs(correlation).max() < 0.09


def test_coupled_noise_of_an_id_does_not_depend_on_which_others_are_asked_for():
    ids = np.array([3, 70, 40_000])
    assert coupled_noise(9, 5, ids).tolist() == [
        float(coupled_noise(9, 5, np.array([token]))[0]) for token in ids
    ]
