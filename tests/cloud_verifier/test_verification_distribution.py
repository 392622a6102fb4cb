"""What comes out of whole rounds is distributed as the target alone: a chi-square test on samples.

The same test run on the field's classic bug (the draft samples from a wider distribution than the
one it sends) has to fail, or it would prove nothing.
"""

import numpy as np
import pytest
import torch
from scipy import stats

from cloud_verifier.verification import BlockInput, judge
from shared.codecs import Distributions, get_codec
from shared.codecs.lattice import LatticeCodec
from shared.messages import SamplingParams
from shared.randomness import Purpose, coupled_noise, uniforms
from shared.sampling import probabilities

VOCAB, NUM_DRAFTED, NUM_ROUNDS = 10, 3, 4_000
NEED_Q = ["token", "block"]
REJECT_BELOW = 1e-6


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Tensors this small gain nothing from threads, and lose much on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Model:
    """Fixed random logits after every sequence of tokens, [VOCAB ** i, VOCAB] for i tokens."""

    def __init__(self, seed, scale=1.5):
        rng = np.random.default_rng(seed)
        self.logits = [
            rng.normal(0, scale, (VOCAB**i, VOCAB)).astype(np.float32) for i in range(NUM_DRAFTED + 1)
        ]

    def probs(self, sampling):
        return [np.array([probabilities(row, sampling) for row in level]) for level in self.logits]


def mixed(target, other, share):
    model = Model(0)
    model.logits = [share * a + (1 - share) * b for a, b in zip(target.logits, other.logits, strict=True)]
    return model


def draft_rounds(draft, sampling, codec, *, sample_from_sent=True):
    """[(tokens, rows)] of NUM_ROUNDS blocks, each with its own seed."""
    seeds, prefix = np.arange(NUM_ROUNDS, dtype=np.uint64), np.zeros(NUM_ROUNDS, np.int64)
    tokens, rows = [], []
    for i, level in enumerate(draft.probs(sampling)[:NUM_DRAFTED]):
        sent = [codec.quantise(row) for row in level]
        drawn = Distributions.from_rows(sent).dense(VOCAB) if sample_from_sent else level.astype(np.float64)
        cumulative = drawn.cumsum(axis=1)[prefix]
        draws = uniforms(seeds, Purpose.DRAFT, 7 + i, 7)[:, None] * cumulative[:, -1:]
        tokens.append((draws >= cumulative).sum(axis=1))
        rows.append([sent[p] for p in prefix])
        prefix = prefix * VOCAB + tokens[-1]
    return list(zip(zip(*tokens, strict=True), map(list, zip(*rows, strict=True)), strict=True))


def coupled_rounds(draft, sampling):
    """Blocks whose tokens the shared noise picks; they carry no distributions."""
    seeds, prefix = np.arange(NUM_ROUNDS, dtype=np.uint64), np.zeros(NUM_ROUNDS, np.int64)
    tokens = []
    for i, level in enumerate(draft.probs(sampling)[:NUM_DRAFTED]):
        noise = coupled_noise(seeds[:, None], 7 + i, np.arange(VOCAB))
        with np.errstate(divide="ignore"):
            tokens.append((noise / level[prefix]).argmin(axis=1))
        prefix = prefix * VOCAB + tokens[-1]
    return [(drafted, []) for drafted in zip(*tokens, strict=True)]


def p_value(target, rounds, rule, sampling):
    """Chi-square p-value of the first two tokens that NUM_ROUNDS rounds lead to, against the target."""
    blocks, logits = [], []
    for seed, (tokens, rows) in enumerate(rounds):
        q = Distributions.from_rows(rows) if rows else None
        params = SamplingParams(sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p, seed)
        blocks.append(BlockInput(tuple(int(t) for t in tokens), q, params, rule, base_len=7))
        prefix = 0
        for i in range(NUM_DRAFTED + 1):
            logits.append(target.logits[i][prefix])
            prefix = prefix * VOCAB + tokens[i] if i < NUM_DRAFTED else 0
    outcomes = judge(torch.from_numpy(np.array(logits)), blocks)
    p = target.probs(sampling)
    rng = np.random.default_rng(1)
    counts = np.zeros((VOCAB, VOCAB))
    for block, outcome in zip(blocks, outcomes, strict=True):
        assert outcome.fault is None
        emitted = [*block.tokens[: outcome.num_accepted], *outcome.tokens]
        if len(emitted) < 2:
            # The target goes on alone, which changes nothing about what the round did.
            row = p[1][emitted[0]].astype(np.float64)
            emitted.append(int(rng.choice(VOCAB, p=row / row.sum())))
        counts[emitted[0], emitted[1]] += 1
    expected = (p[0][0][:, None] * p[1]).astype(np.float64) * len(blocks)
    # Pairs too rare for the chi-square approximation share one cell; forbidden ones must not occur.
    assert not counts[expected == 0].any()
    frequent = expected >= 5
    seen = [*counts[frequent], counts[~frequent].sum()]
    wanted = [*expected[frequent], expected[~frequent].sum() + 1e-9]
    statistic = sum((a - b) ** 2 / b for a, b in zip(seen, wanted, strict=True) if b > 1e-3)
    return float(stats.chi2.sf(statistic, len(seen) - 1))


SAMPLINGS = [
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.7, top_k=6, top_p=0.9),
]


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["plain", "truncated"])
@pytest.mark.parametrize("share", [0.7, 0.0], ids=["good_draft", "bad_draft"])
@pytest.mark.parametrize(
    ("rule", "codec"), [("token", "lattice"), ("block", "lattice"), ("block", "dense_f16"), ("coupled", "")]
)
def test_rounds_are_distributed_as_the_target_alone(rule, codec, sampling, share):
    target = Model(1)
    draft = mixed(target, Model(2), share)
    if rule == "coupled":
        rounds = coupled_rounds(draft, sampling)
    else:
        rounds = draft_rounds(draft, sampling, get_codec(codec))
    assert p_value(target, rounds, rule, sampling) > REJECT_BELOW


class Truncating:
    """Sends only the four likeliest tokens of each row."""

    def quantise(self, probs, budget=None):
        kept = np.where(probs >= np.sort(probs)[-4], probs, 0).astype(np.float32)
        return get_codec("lattice").quantise(kept / kept.sum())


@pytest.mark.parametrize("rule", NEED_Q)
@pytest.mark.parametrize("codec", [Truncating(), LatticeCodec("coarse", price=0.3)])
def test_sampling_from_another_distribution_than_the_one_sent_is_caught(rule, codec, monkeypatch):
    target, sampling = Model(1), SamplingParams(temperature=1.0)
    draft = mixed(target, Model(2), 0.7)
    # The verifier notices a token that its q excludes; here only the statistics shall speak.
    monkeypatch.setattr("cloud_verifier.verification._impossible_tokens", lambda batch: {})
    honest = draft_rounds(draft, sampling, codec)
    assert p_value(target, honest, rule, sampling) > REJECT_BELOW
    buggy = draft_rounds(draft, sampling, codec, sample_from_sent=False)
    assert p_value(target, buggy, rule, sampling) < REJECT_BELOW


def test_a_token_that_its_own_q_excludes_is_a_fault():
    draft, sampling = Model(2), SamplingParams(temperature=1.0)
    tokens, rows = next(
        (tokens, rows)
        for tokens, rows in draft_rounds(draft, sampling, Truncating(), sample_from_sent=False)
        if rows[1].prob(tokens[1]) == 0
    )
    block = BlockInput(
        tuple(int(t) for t in tokens), Distributions.from_rows(rows), sampling, "token", base_len=7
    )
    fault = judge(torch.zeros(NUM_DRAFTED + 1, VOCAB), [block])[0].fault
    assert fault is not None
    assert f"token {tokens[1]} has probability 0" in fault.text
