"""The torch rules against the oracle, block by block, with the same draws."""

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

from cloud_verifier import native_rows
from cloud_verifier.verification import VERIFICATIONS, BlockInput, BlockOutcome, get_verification, judge
from cloud_verifier.verification.batch import pack, params_of
from cloud_verifier.verification.penalties import adjust_logits
from shared import reference
from shared.codecs import Distributions, get_codec
from shared.faults import FaultKind, SpecwireError
from shared.history import TokenHistory, adjust
from shared.messages import SamplingParams
from shared.randomness import Purpose, random_words
from shared.sampling import coupled_choice, is_greedy, probabilities

SAMPLED = SamplingParams(temperature=1.0, seed=3)
ORACLES = {"token": reference.token_wise, "block": reference.block}


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Tensors this small gain nothing from threads, and lose much on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@dataclass(frozen=True)
class Nudged(reference.CounterDraws):
    """The block's draws, moved by less than float32 rounding can move a probability."""

    by: float = 0.0

    def _uniform(self, purpose, index):
        return min(max(reference.CounterDraws._uniform(self, purpose, index) + self.by, 0.0), 1 - 2**-53)


def oracle(rows, block, by=0.0):
    """The oracle's judgement of `block` on float32 logits [K + 1, V]."""
    sampling = block.sampling
    as_greedy = block.rule == "greedy" or (is_greedy(sampling) and block.rule != "fused")
    if as_greedy:
        sampling = replace(sampling, temperature=0.0)
    text = TokenHistory(block.context, block.prompt_len, block.eos_ids)
    p = np.zeros(rows.shape)
    for i, row in enumerate(rows):
        p[i] = probabilities(row, sampling, text)
        text.append(block.tokens[i] if i < len(block.tokens) else 0)
    more = block.more and bool(block.tokens)
    if as_greedy:
        return reference.greedy(block.tokens, p, more=more)
    if block.rule == "coupled":
        return reference.coupled(block.tokens, p * (1 + by), sampling.seed, block.base_len, more=more)
    q = np.zeros((0, rows.shape[1])) if block.q is None else block.q.dense(rows.shape[1])
    draws = Nudged(sampling.seed, block.base_len, by)
    if block.rule == "fused":
        return reference.fused(block.tokens, q, p, draws, sampling.fused_weight, more=more)
    return ORACLES[block.rule](block.tokens, q, p, draws, more=more)


def random_sampling(rng):
    return SamplingParams(
        temperature=float(rng.choice([0.0, 0.5, 1.0, 1.5])),
        top_k=int(rng.choice([0, 0, 3, 20])),
        top_p=float(rng.choice([1.0, 1.0, 0.9, 0.4])),
        min_p=float(rng.choice([0.0, 0.0, 0.05])),
        seed=int(rng.integers(2**64, dtype=np.uint64)),
        fused_weight=float(rng.choice([0.0, 0.3, 1.0])),
    )


def with_penalties(rng, sampling, vocab_size):
    tokens = rng.integers(0, vocab_size + 2, 6).tolist()
    return replace(
        sampling,
        repetition_penalty=float(rng.choice([1.0, 1.3, 0.8])),
        presence_penalty=float(rng.choice([0.0, 0.7, -1.0])),
        frequency_penalty=float(rng.choice([0.0, 0.4])),
        logit_bias={tokens[0]: 1.5, tokens[1]: -2.0} if rng.random() < 0.5 else {},
        min_tokens=int(rng.choice([0, 22])),
        bad_words=((tokens[2],), tuple(tokens[3:5])) if rng.random() < 0.5 else (),
    )


def random_block(rng, vocab_size, rule, max_drafted=6):
    """(float32 logits [K + 1, V], block): the draft resembles the target, as drafts do."""
    num_drafted = int(rng.integers(0, max_drafted + 1))
    sampling = random_sampling(rng)
    context = rng.integers(0, vocab_size, 20).tolist()
    if vocab_size > 2 and rng.random() < 0.3:
        sampling = with_penalties(rng, sampling, vocab_size)
    history = TokenHistory(context, 15, (1,))
    logits = rng.normal(0, 2, (num_drafted + 1, vocab_size)).astype(np.float32)
    if rng.random() < 0.2:
        logits = np.round(logits)
    logits[:, rng.random(vocab_size) < 0.1] = -np.inf
    logits[:, 0] = 0.0
    base_len = int(rng.integers(1, 3000))
    noise = float(rng.choice([0.0, 0.3, 2.0]))
    codec = get_codec(str(rng.choice(["lattice", "dense_f32"])))
    rows, tokens = [], []
    for i in range(num_drafted):
        drafted = logits[i] + rng.normal(0, noise, vocab_size).astype(np.float32)
        row = codec.quantise(probabilities(drafted, sampling, history))
        rows.append(row)
        tokens.append(row.sample(int(random_words(sampling.seed, Purpose.DRAFT, base_len + i, base_len))))
        history.append(tokens[-1])
    q = codec.decode(codec.encode(rows, vocab_size), num_drafted, vocab_size)
    more = bool(rng.random() < 0.3)
    return logits, BlockInput(
        tuple(tokens), q, sampling, rule, base_len, more, context=context, prompt_len=15, eos_ids=(1,)
    )


def random_batch(rng, rules, vocab_size):
    parts = [random_block(rng, vocab_size, str(rng.choice(rules))) for _ in range(rng.integers(1, 9))]
    return np.concatenate([rows for rows, _ in parts]), [block for _, block in parts]


@pytest.mark.parametrize("total", [400, pytest.param(6000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rules", [[name] for name in VERIFICATIONS] + [list(VERIFICATIONS)])
def test_equals_the_oracle_on_random_ragged_batches(rules, dtype, total):
    rng = np.random.default_rng(len(rules) * 10 + (dtype is torch.bfloat16))
    num_blocks = num_borderline = num_accepted = 0
    while num_blocks < total:
        logits, blocks = random_batch(rng, rules, int(rng.choice([2, 7, 60, 300])))
        passed = torch.from_numpy(logits).to(dtype)
        judged_rows = passed.float().numpy()
        row = 0
        for block, outcome in zip(blocks, judge(passed, blocks), strict=True):
            rows = judged_rows[row : row + len(block.tokens) + 1]
            row += len(rows)
            assert outcome.fault is None
            actual = reference.Judgement(outcome.num_accepted, outcome.tokens)
            if actual != oracle(rows, block):
                # Only a draw that stands within rounding of a boundary may fall on its other side.
                num_borderline += 1
                assert actual in (oracle(rows, block, -1e-5), oracle(rows, block, 1e-5)), block
            num_blocks += 1
            num_accepted += outcome.num_accepted
    assert num_borderline <= num_blocks // 200
    assert num_accepted > num_blocks // 2


def test_with_and_without_a_compiler_the_verdicts_are_the_same(monkeypatch):
    rng = np.random.default_rng(12)
    batches = [random_batch(rng, list(VERIFICATIONS), 200) for _ in range(60)]
    compiled = [judge(torch.from_numpy(logits), blocks) for logits, blocks in batches]
    monkeypatch.setattr("cloud_verifier.native_rows.row_kernel", lambda: None)
    assert [judge(torch.from_numpy(logits), blocks) for logits, blocks in batches] == compiled


def with_siblings(rng, rows, block):
    """(logits with a row for each sibling at the end, block with siblings): likely and unlikely ones."""
    vocab_size = rows.shape[1]
    siblings = tuple(
        (i, int(token))
        for i, drafted in enumerate(block.tokens)
        for token in rng.choice(vocab_size, rng.integers(0, 4))
        if token != drafted
    )
    siblings = tuple(dict.fromkeys(siblings))
    after = rng.normal(0, 2, (len(siblings), vocab_size)).astype(np.float32)
    return np.concatenate([rows, after]), replace(block, siblings=siblings)


def oracle_with_siblings(logits, block, by=0.0):
    num_rows = len(block.tokens) + 1

    def write(row, num_before):
        emitted = block.tokens[: num_before - 1] + judged.tokens
        alone = replace(
            block,
            tokens=(),
            q=None,
            more=False,
            base_len=block.base_len + num_before,
            context=[*block.context, *emitted],
        )
        return oracle(row[None], alone, by).tokens[0]

    judged = oracle(logits[:num_rows], block, by)
    siblings = dict(zip(block.siblings, logits[num_rows:], strict=True))
    return reference.after_sibling(judged, block.tokens, siblings, write)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rules", [[name] for name in VERIFICATIONS] + [list(VERIFICATIONS)])
def test_siblings_equal_the_oracle_on_random_ragged_batches(rules, dtype):
    rng = np.random.default_rng(len(rules) + 40)
    num_blocks = num_borderline = num_taken = 0
    while num_blocks < 300:
        size = int(rng.choice([4, 7, 12]))
        parts = [random_block(rng, size, str(rng.choice(rules))) for _ in range(rng.integers(1, 7))]
        parts = [with_siblings(rng, rows, block) for rows, block in parts]
        passed = torch.from_numpy(np.concatenate([rows for rows, _ in parts])).to(dtype)
        judged_rows, row = passed.float().numpy(), 0
        for (_, block), outcome in zip(parts, judge(passed, [block for _, block in parts]), strict=True):
            rows = judged_rows[row : row + len(block.tokens) + 1 + len(block.siblings)]
            row += len(rows)
            assert outcome.fault is None
            actual = reference.Judgement(outcome.num_accepted, outcome.tokens)
            if actual != oracle_with_siblings(rows, block):
                num_borderline += 1
                assert actual in [oracle_with_siblings(rows, block, by) for by in (-1e-5, 1e-5)], block
            if outcome.sibling >= 0:
                num_taken += 1
                assert block.siblings[outcome.sibling] == (outcome.num_accepted, outcome.tokens[0])
            assert len(outcome.tokens) <= 1 + (outcome.sibling >= 0)
            num_blocks += 1
    assert num_borderline <= num_blocks // 100
    assert num_taken > 5


def test_siblings_change_neither_what_is_accepted_nor_what_is_recovered():
    rng = np.random.default_rng(14)
    for rule in VERIFICATIONS:
        plain = [random_block(rng, 12, rule) for _ in range(40)]
        wide = [with_siblings(rng, rows, block) for rows, block in plain]
        before, after = (
            judge(
                torch.from_numpy(np.concatenate([rows for rows, _ in parts])), [block for _, block in parts]
            )
            for parts in (plain, wide)
        )
        for one, other in zip(before, after, strict=True):
            assert (one.num_accepted, one.tokens) == (other.num_accepted, other.tokens[: len(one.tokens)])


def test_logprobs_go_on_after_a_sibling():
    logits = torch.randn(5, 30, generator=torch.Generator().manual_seed(2))
    best = logits.argmax(dim=1).tolist()
    wrong = (best[0] + 1) % 30
    siblings = ((0, (wrong + 5) % 30), (0, best[0]))
    block = BlockInput((wrong, 3), None, SamplingParams(), "greedy", 5, logprobs=2, siblings=siblings)
    outcome = judge(logits, [block])[0]
    assert (outcome.num_accepted, outcome.tokens, outcome.sibling) == (0, (best[0], best[4]), 1)
    assert [line[0] for line in outcome.logprobs.ids] == [best[0], best[4]]
    exact = logits.double().log_softmax(dim=1)
    wanted = [float(exact[0, best[0]]), float(exact[4, best[4]])]
    np.testing.assert_allclose([line[0] for line in outcome.logprobs.values], wanted, atol=1e-5)


def test_a_row_after_a_sibling_that_is_not_finite_faults_its_block_when_it_is_needed():
    logits = torch.zeros(4, 4)
    logits[0, 2] = 9.0
    block = BlockInput((1,), None, SamplingParams(), "greedy", 5, siblings=((0, 2), (0, 3)))
    logits[3, 0] = torch.nan
    assert judge(logits, [block])[0].tokens == (2, 0)
    logits[2, 0] = torch.nan
    assert judge(logits, [block])[0].fault.kind is FaultKind.NOT_FINITE


@pytest.mark.parametrize(
    "changes",
    [
        {"repetition_penalty": 1.3},
        {"presence_penalty": 0.5, "frequency_penalty": -0.25},
        {"repetition_penalty": 0.8, "presence_penalty": 0.5, "logit_bias": {3: 2.0, 9: -1.0, 99: 1.0}},
        {"min_tokens": 5, "bad_words": ((4, 7, 8), (2,), (7, 99))},
        {"repetition_penalty": 1.3, "min_tokens": 5, "bad_words": ((4, 7, 8), (7, 7))},
        {"frequency_penalty": 0.5, "logit_bias": {7: 1.0, 8: 1.0}, "bad_words": ((7, 8),), "min_tokens": 4},
    ],
    ids=str,
)
def test_every_row_is_adjusted_for_the_text_before_it(changes):
    """Counts rise, a word is about to be completed, and enough tokens are there, all within a block."""
    sampling = replace(SAMPLED, **changes)
    text, prompt_len, eos = [3, 5, 5, 1, 6, 3], 4, (0,)
    blocks = [
        BlockInput(tokens, None, sampling, "greedy", 6, context=text, prompt_len=prompt_len, eos_ids=eos)
        for tokens in ((4, 7, 7, 3, 7, 11), (), (8,))
    ]
    logits = torch.randn(10, 12, generator=torch.Generator().manual_seed(1))
    batch = pack(blocks, [0, 7, 8], params_of([block.sampling for block in blocks]), with_draft=False)
    actual = adjust_logits(logits, batch, blocks).numpy()
    before = [[*text, *block.tokens[:i]] for block in blocks for i in range(len(block.tokens) + 1)]
    for row, changed, tokens in zip(logits.numpy(), actual, before, strict=True):
        expected = adjust(row, sampling, TokenHistory(tokens, prompt_len, eos))
        assert changed.tolist() == expected.tolist()


def flat(num_rows, vocab_size=4):
    return torch.zeros(num_rows, vocab_size)


def uniform_q(num_rows, vocab_size=4):
    row = get_codec("lattice").quantise(np.full(vocab_size, 1 / vocab_size, np.float32))
    return Distributions.from_rows([row] * num_rows)


@pytest.mark.parametrize("rule", VERIFICATIONS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_logits_that_are_not_finite_fault_their_own_block_only(rule, bad):
    blocks = [BlockInput((0, 1), uniform_q(2), SAMPLED, rule, 5 + i) for i in range(3)]
    logits = torch.randn(9, 4, generator=torch.Generator().manual_seed(0))
    expected = judge(logits, blocks)
    logits[3, 2] = bad
    actual = judge(logits, blocks)
    assert actual[1].fault is not None
    assert actual[1].fault.kind is FaultKind.NOT_FINITE
    assert [actual[0], actual[2]] == [expected[0], expected[2]]


NEITHER, TOP_K, TOP_P = SAMPLED, replace(SAMPLED, top_k=50), replace(SAMPLED, top_p=0.9)
BOTH = replace(TOP_K, top_p=0.9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rule", [name for name in VERIFICATIONS if name != "greedy"])
@pytest.mark.parametrize("sampling", [NEITHER, TOP_K, TOP_P, BOTH], ids=["plain", "top_k", "top_p", "both"])
def test_without_a_compiler_too_a_row_that_is_not_finite_faults_its_own_block_only(
    monkeypatch, sampling, rule, dtype
):
    monkeypatch.setattr("cloud_verifier.native_rows.row_kernel", lambda: None)
    size = 200
    q = uniform_q(2, size)
    companies = [sampling] if sampling is NEITHER else [sampling, BOTH]  # who is computed alike
    for other in companies:
        before, after = (BlockInput((3, 7), q, replace(other, seed=i), rule, 5 + i) for i in range(2))
        faulty = BlockInput((3, 7), q, sampling, rule, 9)
        logits = torch.randn(9, size, generator=torch.Generator().manual_seed(0)).to(dtype)
        logits[3, 2] = torch.nan
        outcomes = judge(logits, [before, faulty, after])
        assert outcomes[1].fault is not None
        assert outcomes[1].fault.kind is FaultKind.NOT_FINITE
        assert [outcomes[0]] == judge(logits[:3], [before])
        assert [outcomes[2]] == judge(logits[6:], [after])


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("sampling", [SAMPLED, replace(SAMPLED, top_k=3)], ids=["plain", "top_k"])
@pytest.mark.parametrize(("num_kept", "bad"), [(0, 1), (0, 2), (1, 2), (0, 0), (1, 1), (2, 1), (2, 2)])
@pytest.mark.parametrize("rule", VERIFICATIONS)
def test_a_row_that_is_not_finite_counts_where_it_decides_something(
    monkeypatch, rule, num_kept, bad, sampling, compiled
):
    if not compiled:
        monkeypatch.setattr("cloud_verifier.native_rows.row_kernel", lambda: None)
    logits = torch.zeros(3, 4)
    logits[:, 2] = 60.0
    logits[num_kept:, 1:3] = torch.tensor([60.0, 0.0])  # what is drafted there is wrong
    logits[bad, 0] = torch.nan
    outcome = judge(logits, [BlockInput((2, 2), uniform_q(2), sampling, rule, 5)])[0]
    # Behind the first rejection it decides nothing. Block verification judges all tokens jointly: only its
    # compiled form knows which rows cannot change what is kept.
    reads_all = rule == "block" and (native_rows.row_kernel() is None or sampling.top_k > 0)
    if bad > num_kept and not reads_all:
        assert outcome == BlockOutcome(num_kept, (1,))
    else:
        assert outcome.fault is not None
        assert outcome.fault.kind is FaultKind.NOT_FINITE


@pytest.mark.parametrize("rule", VERIFICATIONS)
def test_equal_distributions_accept_everything(rule):
    # Rules that do not look at q need the target to be as sure as the draft.
    sampling = SAMPLED if VERIFICATIONS[rule].needs_q else SamplingParams(temperature=0.0)
    blocks = [BlockInput((0, 0, 0), uniform_q(3), replace(sampling, seed=i), rule, 5) for i in range(50)]
    assert all(outcome.num_accepted == 3 for outcome in judge(flat(200), blocks))


def test_a_forbidden_token_is_rejected_whatever_the_draw(monkeypatch):
    monkeypatch.setattr(
        "cloud_verifier.verification.batch.uniforms",
        lambda seeds, purpose, positions, bases: np.zeros(len(positions)),
    )
    logits = torch.tensor([[-torch.inf, 0.0, 0.0, 0.0]] * 2)
    for rule in ("token", "block", "fused"):
        outcome = judge(logits, [BlockInput((0,), uniform_q(1), SAMPLED, rule, 5)])[0]
        assert (outcome.num_accepted, outcome.tokens) == (0, (1,))


@pytest.mark.parametrize("rule", VERIFICATIONS)
def test_a_block_is_judged_alike_alone_and_in_any_company(rule):
    rng = np.random.default_rng(8)
    parts = [random_block(rng, 50, rule) for _ in range(6)]
    together = judge(torch.from_numpy(np.concatenate([rows for rows, _ in parts])), [b for _, b in parts])
    alone = [judge(torch.from_numpy(rows), [block])[0] for rows, block in parts]
    assert together == alone


@pytest.mark.parametrize("rule", VERIFICATIONS)
def test_cloud_only_writing_and_more_blocks(rule):
    logits = torch.zeros(5, 4)
    logits[:, 2] = 60.0
    q = Distributions.from_rows([get_codec("lattice").quantise(np.array([0, 0, 1, 0], np.float32))] * 2)
    alone = BlockInput((), None, SAMPLED, rule, 5)
    full = BlockInput((2, 2), q, SAMPLED, rule, 5, more=True)
    # `more` promises another block; it takes nothing away from writing one token alone.
    lone_more = replace(alone, more=True)
    outcomes = judge(logits, [alone, full, lone_more])
    assert [(o.num_accepted, o.tokens) for o in outcomes] == [(0, (2,)), (2, ()), (0, (2,))]


def test_no_block_at_all():
    assert judge(torch.zeros(0, 4), []) == []
    with pytest.raises(ValueError, match="2 rows"):
        judge(torch.zeros(3, 4), [BlockInput((1,), uniform_q(1), SAMPLED, "token", 5)])


@pytest.mark.parametrize(
    ("block", "kind"),
    [
        (BlockInput((1,), None, SAMPLED, "token", 5), FaultKind.BAD_PAYLOAD),
        (BlockInput((1,), uniform_q(2), SAMPLED, "token", 5), FaultKind.BAD_PAYLOAD),
        (BlockInput((4,), uniform_q(1), SAMPLED, "token", 5), FaultKind.BAD_TOKENS),
        (BlockInput((-1,), uniform_q(1), SAMPLED, "greedy", 5), FaultKind.BAD_TOKENS),
        (BlockInput((1,), uniform_q(1), SAMPLED, "coin_toss", 5), FaultKind.UNKNOWN_VERIFICATION),
        (
            BlockInput((1,), Distributions.from_rows([uniform_q(1, 1).row(0)]), SAMPLED, "token", 5),
            FaultKind.BAD_TOKENS,
        ),
    ],
)
def test_a_block_that_cannot_be_judged_is_faulted_alone(block, kind):
    good = BlockInput((1,), uniform_q(1), SAMPLED, "token", 5)
    outcomes = judge(flat(6), [good, block, good])
    assert outcomes[1].fault is not None
    assert outcomes[1].fault.kind is kind
    assert outcomes[0] == outcomes[2]
    assert outcomes[0].fault is None


def test_the_table_names_what_it_knows():
    assert set(VERIFICATIONS) == {"block", "token", "coupled", "greedy", "fused"}
    assert [name for name, verification in VERIFICATIONS.items() if verification.lossy] == ["fused"]
    with pytest.raises(SpecwireError, match="token"):
        get_verification("coin_toss")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logprobs_are_the_targets_own_at_temperature_one(dtype):
    rng = np.random.default_rng(4)
    logits = torch.from_numpy(rng.normal(0, 3, (8, 30)).astype(np.float32)).to(dtype)
    best = logits.float().argmax(dim=1).tolist()
    cold = SamplingParams(temperature=0.0, top_k=2)
    accepted = BlockInput((best[0], best[1]), None, cold, "greedy", 5, logprobs=3)
    rejected = BlockInput((best[3], (best[4] + 1) % 30), None, cold, "greedy", 5, logprobs=1)
    silent = BlockInput((best[6],), None, cold, "greedy", 5, more=True)
    outcomes = judge(logits, [accepted, rejected, silent])
    expected = logits.double().log_softmax(dim=1)
    assert outcomes[2].logprobs is None
    for outcome, block, start in zip(outcomes[:2], (accepted, rejected), (0, 3), strict=True):
        emitted = block.tokens[: outcome.num_accepted] + outcome.tokens
        assert tuple(line[0] for line in outcome.logprobs.ids) == emitted
        for i, (ids, values) in enumerate(zip(outcome.logprobs.ids, outcome.logprobs.values, strict=True)):
            assert len(ids) == len(values) == block.logprobs
            np.testing.assert_allclose(values, expected[start + i][list(ids)], atol=1e-5)
            assert list(ids[1:]) == expected[start + i].topk(block.logprobs - 1).indices.tolist()


def test_fused_at_weight_one_keeps_everything_and_at_weight_zero_is_token_wise():
    rng = np.random.default_rng(6)
    parts = [random_block(rng, 40, "fused") for _ in range(60)]
    logits = torch.from_numpy(np.concatenate([rows for rows, _ in parts]))

    def judged(rule, weight):
        blocks = [
            replace(block, rule=rule, sampling=replace(block.sampling, fused_weight=weight))
            for _, block in parts
        ]
        return [(outcome.num_accepted, outcome.tokens) for outcome in judge(logits, blocks)]

    assert judged("fused", 0.0) == judged("token", 0.0)
    assert [kept for kept, _ in judged("fused", 1.0)] == [len(block.tokens) for _, block in parts]


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_coupled_writes_what_the_target_alone_writes_whatever_is_drafted(temperature):
    rng = np.random.default_rng(7)
    table = torch.from_numpy(rng.normal(0, 2, (50, 50)).astype(np.float32))
    sampling = SamplingParams(temperature=temperature, seed=11)

    def write(num_drafted, length):
        text = [0]
        while len(text) <= length:
            # The draft guesses from a blurred copy of the target.
            drafted, previous = [], text[-1]
            for i in range(num_drafted):
                logits = (table[previous] + torch.from_numpy(rng.normal(0, 1, 50))).numpy()
                probs = probabilities(logits, sampling)
                previous = coupled_choice(probs, sampling.seed, len(text) + i)
                drafted.append(previous)
            rows = table[[text[-1], *drafted]]
            outcome = judge(rows, [BlockInput(tuple(drafted), None, sampling, "coupled", len(text))])[0]
            accepted[num_drafted] += outcome.num_accepted
            text += [*drafted[: outcome.num_accepted], *outcome.tokens]
        return text[: length + 1]

    accepted = dict.fromkeys((0, 1, 3, 8), 0)
    alone = write(0, 150)
    assert all(write(k, 150) == alone for k in (1, 3, 8))
    assert accepted[3] > 50
    assert len(set(alone)) > 10
