"""One set of promises that every codec of the table keeps."""

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.codecs import CODECS, DEFAULT_CODEC, Budget, Distributions, get_codec
from shared.faults import FaultKind, SpecwireError
from shared.messages import DraftBlock
from shared.wire import client_message_to_proto

CARRYING = [name for name, codec in CODECS.items() if codec.carries_q]

# Largest total variation between the probabilities given and the distribution sent, on rows whose
# support has at most 64 ids, and largest payload a row of such a block in bytes.
MAX_TV = {
    "dense_f32": 1e-6,
    "dense_f16": 1e-3,
    "dense_q8": 0.02,
    "dense_f32_zstd": 1e-6,
    "dense_f16_zstd": 1e-3,
    "dense_q8_zstd": 0.02,
    "lattice": 0.01,
    "lattice_coarse": 0.06,
    "lattice_fine": 0.005,
}
FRAMING_BYTES = 5 + 9  # gRPC's of a message, HTTP/2's of a frame
MAX_ROW_BYTES = {"lattice": 180, "lattice_coarse": 130, "lattice_fine": 220}


def random_probs(rng, vocab_size, support, sharpness, *, frequent=False):
    """float32 [vocab_size] with `support` ids of positive mass; where `frequent`, rather low ones."""
    probs = np.zeros(vocab_size, np.float32)
    mass = np.exp(-sharpness * rng.exponential(size=support))
    if frequent:
        weight = 1.0 / (np.arange(vocab_size) + 500.0)
        ids = rng.choice(vocab_size, support, replace=False, p=weight / weight.sum())
    else:
        ids = rng.choice(vocab_size, support, replace=False)
    probs[ids] = mass / mass.sum()
    return probs


def make_rows(codec, rng, vocab_size, supports, sharpness=5.0):
    probs = [random_probs(rng, vocab_size, n, sharpness) for n in supports]
    return probs, [codec.quantise(p) for p in probs]


def same(a: Distributions, b: Distributions) -> bool:
    return all(
        np.array_equal(getattr(a, f), getattr(b, f)) and getattr(a, f).dtype == getattr(b, f).dtype
        for f in ("offsets", "ids", "probs")
    )


def test_the_table_is_complete():
    assert set(CODECS) == {*MAX_TV, "tokens"}
    assert DEFAULT_CODEC in CODECS
    assert all(get_codec(name) is codec and codec.name == name for name, codec in CODECS.items())
    with pytest.raises(SpecwireError, match="lattice") as raised:
        get_codec("morse")
    assert raised.value.kind is FaultKind.UNKNOWN_CODEC


@pytest.mark.parametrize("name", CARRYING)
@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    vocab_size=st.sampled_from([2, 3, 64, 1000, 49152, 151936]),
    num_rows=st.integers(0, 5),
    sharpness=st.sampled_from([0.0, 1.0, 8.0, 60.0]),
    data=st.data(),
)
def test_decode_gives_back_exactly_what_was_quantised(name, seed, vocab_size, num_rows, sharpness, data):
    codec = CODECS[name]
    rng = np.random.default_rng(seed)
    largest = min(vocab_size, 400)
    supports = data.draw(st.lists(st.integers(1, largest), min_size=num_rows, max_size=num_rows))
    _, rows = make_rows(codec, rng, vocab_size, supports, sharpness)
    payload = codec.encode(rows, vocab_size)
    decoded = codec.decode(payload, num_rows, vocab_size)
    assert same(decoded, Distributions.from_rows(rows))
    assert len(payload) <= codec.max_payload_bytes(num_rows, vocab_size)
    for i in range(num_rows):
        assert decoded.row(i).weights.sum() == pytest.approx(1.0, abs=1e-9)
        assert (np.diff(decoded.row(i).ids) > 0).all()
        assert (decoded.row(i).weights > 0).all()


@pytest.mark.parametrize("name", CARRYING)
@pytest.mark.parametrize("vocab_size", [64, 49152, 151936])
def test_errors_and_sizes_are_bounded(name, vocab_size):
    codec = CODECS[name]
    rng = np.random.default_rng(1)
    probs, rows = make_rows(codec, rng, vocab_size, [1, 2, 5, 20, 64, 64])
    decoded = codec.decode(codec.encode(rows, vocab_size), 6, vocab_size).dense(vocab_size)
    distances = 0.5 * np.abs(decoded - probs).sum(axis=1)
    assert distances.max() <= MAX_TV[name]
    bytes_of_all = {"dense_f32": 4, "dense_f16": 2, "dense_q8": 1}
    if name in bytes_of_all:
        assert len(codec.encode(rows, vocab_size)) == 6 * vocab_size * bytes_of_all[name]
    elif name.endswith("_zstd"):
        plain = 6 * vocab_size * bytes_of_all[name.removesuffix("_zstd")]
        assert len(codec.encode(rows, vocab_size)) <= min(plain + 64, 6 * 1_200)
    else:
        assert len(codec.encode(rows, vocab_size)) <= 6 * MAX_ROW_BYTES[name]
        one_hot = codec.quantise(random_probs(rng, vocab_size, 1, 0.0))
        assert len(codec.encode([one_hot], vocab_size)) <= 5


@pytest.mark.parametrize("name", CARRYING)
def test_sampling_a_row_follows_its_probabilities(name):
    codec = CODECS[name]
    row = codec.quantise(np.array([0, 0.5, 0.25, 0, 0.125, 0.125], np.float32))
    words = np.random.default_rng(2).integers(0, 2**64, 20_000, dtype=np.uint64).tolist()
    counts = np.bincount([row.sample(word) for word in words], minlength=6)
    expected = np.array([row.prob(token) for token in range(6)]) * len(words)
    assert (counts[expected == 0] == 0).all()
    seen = expected > 0
    assert (
        (counts[seen] - expected[seen]) ** 2 / expected[seen]
    ).sum() < 30  # 3 degrees of freedom: p < 1e-5
    assert row.sample(0) == 1
    assert row.sample(2**64 - 1) == 5
    assert row.prob(0) == row.prob(6) == 0.0


@pytest.mark.parametrize("name", CARRYING)
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_any_other_bytes_are_a_bad_payload_or_a_valid_block(name, data):
    codec = CODECS[name]
    rng = np.random.default_rng(3)
    vocab_size = 300
    _, rows = make_rows(codec, rng, vocab_size, [1, 7, 30])
    payload = bytearray(codec.encode(rows, vocab_size))
    for _ in range(data.draw(st.integers(1, 4))):
        payload[data.draw(st.integers(0, len(payload) - 1))] ^= data.draw(st.integers(1, 255))
    altered = bytes(payload)[: data.draw(st.sampled_from([len(payload), len(payload) - 1, 3, 0]))]
    altered += data.draw(st.sampled_from([b"", b"\x00", b"\xff"]))
    try:
        decoded = codec.decode(altered, 3, vocab_size)
    except SpecwireError as error:
        assert error.kind is FaultKind.BAD_PAYLOAD  # noqa: PT017
        assert name in error.text  # noqa: PT017
        return
    assert decoded.num_rows == 3
    for i in range(3):
        row = decoded.row(i)
        assert row.weights.sum() == pytest.approx(1.0, abs=1e-9)
        assert (row.weights > 0).all()
        assert (np.diff(row.ids) > 0).all()
        assert 0 <= row.ids[0] <= row.ids[-1] < vocab_size


@pytest.mark.parametrize("name", CARRYING)
def test_cut_lengthened_and_miscounted_payloads_are_refused(name):
    codec = CODECS[name]
    _, rows = make_rows(codec, np.random.default_rng(4), 500, [3, 40])
    payload = codec.encode(rows, 500)
    for wrong, num_rows in [
        (payload[:-1], 2),
        (payload + b"\x00", 2),
        (payload, 1),
        (payload, 3),
        (b"", 2),
        (bytes(len(payload)), 2),
        (bytes(codec.max_payload_bytes(2, 500) + 1), 2),
    ]:
        with pytest.raises(SpecwireError) as raised:
            codec.decode(wrong, num_rows, 500)
        assert raised.value.kind is FaultKind.BAD_PAYLOAD


@pytest.mark.parametrize("name", CARRYING)
def test_payloads_of_other_codecs_are_refused_or_a_valid_block(name):
    codec = CODECS[name]
    for other in CARRYING:
        written = CODECS[other]
        _, rows = make_rows(written, np.random.default_rng(8), 500, [1, 30, 200])
        try:
            decoded = codec.decode(written.encode(rows, 500), 3, 500)
        except SpecwireError as error:
            assert error.kind is FaultKind.BAD_PAYLOAD  # noqa: PT017
        else:
            assert decoded.num_rows == 3
            assert decoded.dense(500).sum(axis=1) == pytest.approx([1.0] * 3, abs=1e-9)


def test_a_token_id_outside_the_vocabulary_is_refused():
    # A one-hot row that skips eleven cells of an axis that is far shorter.
    with pytest.raises(SpecwireError, match="outside the vocabulary of 5"):
        get_codec("lattice").decode(b"\x00\x01", 1, 5)


def test_the_tokens_codec_sends_nothing():
    codec = get_codec("tokens")
    row = codec.quantise(np.array([0.1, 0.2, 0.4, 0.3], np.float32))
    assert {row.sample(word) for word in (0, 1 << 63, (1 << 64) - 1)} == {2}
    assert codec.encode([row] * 3, 100) == b""
    assert codec.decode(b"", 3, 100).num_rows == 3
    with pytest.raises(SpecwireError, match="empty"):
        codec.decode(b"x", 3, 100)


@pytest.mark.parametrize("says_its_size", [True, False])
def test_a_small_payload_cannot_ask_for_much_memory(says_its_size):
    compressor = zstandard.ZstdCompressor(1, write_content_size=says_its_size)
    bomb = compressor.compress(bytes(50_000_000))
    with pytest.raises(SpecwireError, match="announces") as raised:
        get_codec("dense_q8_zstd").decode(bomb, 1, 100)
    assert raised.value.kind is FaultKind.BAD_PAYLOAD


@pytest.mark.parametrize("name", ["lattice", "lattice_coarse"])
@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    vocab_size=st.sampled_from([49152, 151936]),
    num_rows=st.integers(1, 16),
    supports=st.lists(st.sampled_from([1, 3, 30, 400, 3000]), min_size=16, max_size=16),
    sharpness=st.sampled_from([0.0, 1.0, 3.0, 8.0]),
)
def test_a_block_of_8_fits_a_packet(name, seed, vocab_size, num_rows, supports, sharpness):
    codec, rng = CODECS[name], np.random.default_rng(seed)
    budget = Budget.of_block(num_rows, None)
    probs = [random_probs(rng, vocab_size, n, sharpness, frequent=True) for n in supports[:num_rows]]
    rows = [codec.quantise(p, budget) for p in probs]
    payload = codec.encode(rows, vocab_size)
    tokens = (vocab_size - 1,) * num_rows
    block = DraftBlock(100_000, 100_000, 200_000, tokens, payload, more=True)
    message = client_message_to_proto(block).SerializeToString()
    assert len(message) + FRAMING_BYTES <= 1_400 * max(1.0, num_rows / 8)
    assert same(codec.decode(payload, num_rows, vocab_size), Distributions.from_rows(rows))


def test_what_one_row_of_a_block_leaves_is_there_for_the_next():
    codec, rng = get_codec("lattice"), np.random.default_rng(5)
    sharp, flat = random_probs(rng, 49152, 1, 0.0), random_probs(rng, 49152, 3000, 1.0)

    def ids_of_the_last(*probs):
        budget = Budget.of_block(8, None)
        return [len(codec.quantise(p, budget).ids) for p in probs][-1]

    assert ids_of_the_last(*[sharp] * 7, flat) > ids_of_the_last(flat) > ids_of_the_last(*[flat] * 8) >= 1
    assert len(codec.quantise(flat).ids) >= ids_of_the_last(*[sharp] * 7, flat)


def test_bytes_that_are_dearer_than_the_codec_thinks_are_spared():
    codec, flat = get_codec("lattice"), random_probs(np.random.default_rng(6), 49152, 300, 4.0)
    sizes = [
        len(codec.encode([codec.quantise(flat, Budget.of_block(1, price))], 49152))
        for price in (0.0, 1e-5, 3e-4, 1e-3)
    ]
    assert sizes[0] == sizes[1] > sizes[2] > sizes[3]
