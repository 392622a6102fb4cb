"""Every branch of the oracle, added up: the output distribution of a round is the target's."""

import itertools
from dataclasses import dataclass, field

import numpy as np
import pytest

from shared.randomness import coupled_noise
from shared.reference import (
    CounterDraws,
    Judgement,
    after_sibling,
    block,
    coupled,
    fused,
    greedy,
    inverse_cdf,
    residual,
    token_wise,
)

RULES = {"token": token_wise, "block": block}


@dataclass
class Script:
    """Draws that follow a given list of choices, and note what other choices there were."""

    choices: list[int]
    weight: float = 1.0
    taken: list[int] = field(default_factory=list)
    open_branches: list[list[int]] = field(default_factory=list)

    def _choose(self, probabilities):
        depth = len(self.taken)
        possible = [i for i, p in enumerate(probabilities) if p > 0]
        choice = self.choices[depth] if depth < len(self.choices) else possible[0]
        if depth >= len(self.choices):
            self.open_branches += [[*self.taken, other] for other in possible[1:]]
        self.taken.append(choice)
        self.weight *= probabilities[choice]
        return choice

    def accept(self, index, probability):
        probability = min(1.0, probability)
        return self._choose([1.0 - probability, probability]) == 1

    def sample(self, index, weights):
        return self._choose(weights / weights.sum())


def all_outcomes(judge):
    """[(outcome, probability)] of every path through `judge(draws)`."""
    out, pending = [], [[]]
    while pending:
        script = Script(pending.pop())
        outcome = judge(script)
        out.append((outcome, script.weight))
        pending += script.open_branches
    return out


@dataclass
class Tree:
    """Distributions after every sequence of tokens, made on demand."""

    rng: np.random.Generator
    vocab_size: int
    rows: dict = field(default_factory=dict)

    def __getitem__(self, prefix):
        if prefix not in self.rows:
            row = self.rng.dirichlet(np.full(self.vocab_size, self.rng.choice([0.2, 1.0, 5.0])))
            if self.rng.random() < 0.5:
                row[self.rng.random(self.vocab_size) < 0.4] = 0.0
            if row.sum() == 0:
                row[self.rng.integers(self.vocab_size)] = 1.0
            self.rows[prefix] = row / row.sum()
        return self.rows[prefix]


class SometimesEqual(Tree):
    """q that is exactly p after some prefixes."""

    def __init__(self, rng, target):
        super().__init__(rng, target.vocab_size)
        self.target = target

    def __getitem__(self, prefix):
        if prefix not in self.rows and self.rng.random() < 0.3:
            self.rows[prefix] = self.target[prefix]
        return super().__getitem__(prefix)


def probability(tree, tokens, start=()):
    return float(np.prod([tree[start + tokens[:i]][t] for i, t in enumerate(tokens)]))


def all_drafts(vocab_size, num_drafted, ends):
    """Every block of `num_drafted` tokens, or of fewer where it `ends`."""
    whole = itertools.product(range(vocab_size), repeat=num_drafted)
    lengths = range(1, num_drafted)
    return {next((d[:i] for i in lengths if ends(d[:i])), d) for d in whole}


def round_distribution(rule, p, q, num_drafted, *, more, ends=lambda drafted: False):
    """{emitted tokens: probability} of one round, over all drafts and all branches."""
    out = {}
    for drafted in all_drafts(p.vocab_size, num_drafted, ends):
        drawn = probability(q, drafted)
        if drawn == 0:
            continue
        length = len(drafted)
        q_rows = np.array([q[drafted[:i]] for i in range(length)]).reshape(length, p.vocab_size)
        p_rows = np.array([p[drafted[:i]] for i in range(length + 1)])
        for outcome, weight in all_outcomes(lambda d, a=(drafted, q_rows, p_rows): rule(*a, d, more=more)):
            emitted = drafted[: outcome.num_accepted] + outcome.tokens
            out[emitted] = out.get(emitted, 0.0) + drawn * weight
    return out


def completed(emitted, p, length):
    """Probabilities of all sequences of `length` when the target goes on after what a round emitted."""
    out = {}
    for sequence in itertools.product(range(p.vocab_size), repeat=length):
        out[sequence] = sum(
            weight * probability(p, sequence[len(head) :], head)
            for head, weight in emitted.items()
            if sequence[: len(head)] == head
        )
    return out


CASES = [(v, k) for v, k in itertools.product((3, 4, 5), (1, 2, 3, 4)) if v ** (k + 1) <= 3125]


@pytest.mark.parametrize("more", [False, True])
@pytest.mark.parametrize(("vocab_size", "num_drafted"), [*CASES, (3, 0), (5, 0)])
@pytest.mark.parametrize("name", RULES)
def test_the_enumerated_round_has_the_targets_distribution(name, vocab_size, num_drafted, more):
    for seed in range(3):
        rng = np.random.default_rng([vocab_size, num_drafted, seed])
        p = Tree(rng, vocab_size)
        q = SometimesEqual(rng, p)
        emitted = round_distribution(RULES[name], p, q, num_drafted, more=more)
        assert sum(emitted.values()) == pytest.approx(1.0, abs=1e-12)
        for sequence, actual in completed(emitted, p, num_drafted + 1).items():
            assert actual == pytest.approx(probability(p, sequence), abs=1e-12)


@pytest.mark.parametrize("where", ["at a token", "where the draft is not sure"])
@pytest.mark.parametrize("name", RULES)
def test_a_block_that_ends_early_is_judged_as_exactly(name, where):
    rng = np.random.default_rng(3)
    p = Tree(rng, 4)
    q = SometimesEqual(rng, p)

    def ends(drafted):
        return drafted[-1] == 2 if where == "at a token" else probability(q, drafted) < 0.25

    drafts = all_drafts(4, 3, ends)
    assert {len(drafted) for drafted in drafts if probability(q, drafted) > 0} == {1, 2, 3}
    emitted = round_distribution(RULES[name], p, q, 3, more=False, ends=ends)
    assert sum(emitted.values()) == pytest.approx(1.0, abs=1e-12)
    for sequence, actual in completed(emitted, p, 4).items():
        assert actual == pytest.approx(probability(p, sequence), abs=1e-12)


def with_siblings(rule, p, chosen):
    """`rule` with the tokens `chosen(i, drafted, q)` as siblings of drafted token i."""

    def judge(drafted, q_rows, p_rows, draws, *, more):
        siblings = {
            (i, token): p[(*drafted[:i], token)]
            for i in range(len(drafted))
            for token in chosen(i, drafted, q_rows)
            if token != drafted[i]
        }
        judged = rule(drafted, q_rows, p_rows, draws, more=more)
        return after_sibling(judged, drafted, siblings, lambda row, n: draws.sample(n, row))

    return judge


def likeliest_two(i, drafted, q_rows):
    others = [token for token in np.argsort(-q_rows[i], kind="stable").tolist() if token != drafted[i]]
    return others[:2]


@pytest.mark.parametrize("more", [False, True])
@pytest.mark.parametrize(("vocab_size", "num_drafted"), [(3, 1), (3, 2), (4, 2), (3, 3), (4, 3)])
@pytest.mark.parametrize("name", RULES)
def test_siblings_add_tokens_and_change_nothing(name, vocab_size, num_drafted, more):
    more_tokens = 0.0
    for seed in range(3):
        rng = np.random.default_rng([vocab_size, num_drafted, seed])
        p = Tree(rng, vocab_size)
        q = SometimesEqual(rng, p)
        emitted = round_distribution(
            with_siblings(RULES[name], p, likeliest_two), p, q, num_drafted, more=more
        )
        assert sum(emitted.values()) == pytest.approx(1.0, abs=1e-12)
        for sequence, actual in completed(emitted, p, num_drafted + 1).items():
            assert actual == pytest.approx(probability(p, sequence), abs=1e-12)
        plain = round_distribution(RULES[name], p, q, num_drafted, more=more)
        for sign, out in ((1, emitted), (-1, plain)):
            more_tokens += sign * sum(len(tokens) * weight for tokens, weight in out.items())
    assert more_tokens > 0.01


@pytest.mark.parametrize("name", RULES)
def test_the_enumeration_would_notice_a_recovered_token_that_prefers_siblings(name):
    rng = np.random.default_rng(5)
    p, q = Tree(rng, 4), Tree(rng, 4)

    def preferring(drafted, q_rows, p_rows, draws, *, more):
        judged = RULES[name](drafted, q_rows, p_rows, draws, more=more)
        if judged.num_accepted == len(drafted):
            return judged
        at = judged.num_accepted
        wanted = [t for t in likeliest_two(at, drafted, q_rows) if p_rows[at, t] > 0]
        return Judgement(at, (wanted or judged.tokens)[:1])

    emitted = round_distribution(with_siblings(preferring, p, likeliest_two), p, q, 2, more=False)
    worst = max(abs(a - probability(p, s)) for s, a in completed(emitted, p, 3).items())
    assert worst > 1e-3


def test_after_a_sibling_greedy_and_coupled_write_what_the_target_alone_writes():
    rng = np.random.default_rng(6)
    p = Tree(rng, 4)
    for drafted in itertools.product(range(4), repeat=2):
        p_rows = np.array([p[drafted[:i]] for i in range(3)])
        siblings = {(i, t): p[(*drafted[:i], t)] for i in range(2) for t in range(4) if t != drafted[i]}
        for rule in (
            lambda tokens, rows, base: greedy(tokens, rows),
            lambda tokens, rows, base: coupled(tokens, rows, 8, base),
        ):
            written = ()
            for i in range(4):
                written += rule((), p[written][None], 20 + i).tokens
            judged = after_sibling(
                rule(drafted, p_rows, 20),
                drafted,
                siblings,
                lambda row, n, rule=rule: rule((), row[None], 20 + n).tokens[0],
            )
            emitted = drafted[: judged.num_accepted] + judged.tokens
            assert emitted == written[: len(emitted)]
            assert len(judged.tokens) == 1 + (judged.num_accepted < 2)


def test_block_verification_never_accepts_less_than_token_wise():
    for seed in range(20):
        rng = np.random.default_rng(seed)
        p, q = Tree(rng, 4), Tree(rng, 4)
        lengths = {
            name: sum(len(tokens) * w for tokens, w in round_distribution(rule, p, q, 3, more=False).items())
            for name, rule in RULES.items()
        }
        assert lengths["block"] >= lengths["token"] - 1e-12


def test_fused_judges_by_the_weighted_sum_and_is_token_wise_at_weight_zero():
    rng = np.random.default_rng(2)
    p, q = Tree(rng, 4), Tree(rng, 4)

    def emitted(weight):
        return round_distribution(lambda *a, more: fused(*a, weight, more=more), p, q, 2, more=False)

    assert emitted(0.0) == round_distribution(token_wise, p, q, 2, more=False)
    assert all(len(tokens) == 3 for tokens, weight in emitted(1.0).items() if weight > 1e-15)
    first = np.zeros(4)
    for tokens, weight in emitted(0.3).items():
        first[tokens[0]] += weight
    np.testing.assert_allclose(first, 0.7 * p[()] + 0.3 * q[()], atol=1e-12)


def test_coupled_emits_what_the_target_alone_writes_with_that_noise_whatever_was_drafted():
    rng = np.random.default_rng(4)
    p = Tree(rng, 5)
    written = ()
    for i in range(4):
        with np.errstate(divide="ignore"):
            written += (int((coupled_noise(8, 20 + i, np.arange(5)) / p[written]).argmin()),)
    for drafted in itertools.product(range(5), repeat=3):
        p_rows = np.array([p[drafted[:i]] for i in range(4)])
        judged = coupled(drafted, p_rows, 8, 20)
        emitted = drafted[: judged.num_accepted] + judged.tokens
        assert emitted == written[: len(emitted)]
        assert len(emitted) == judged.num_accepted + 1


@pytest.mark.parametrize("name", RULES)
def test_the_enumeration_would_notice_a_draft_that_was_not_drawn_from_q(name):
    rng = np.random.default_rng(9)
    p, q = Tree(rng, 4), Tree(rng, 4)

    def understated(tokens, q_rows, p_rows, draws, *, more):
        cut = np.where(q_rows >= q_rows.max(axis=1, keepdims=True) / 2, q_rows, 0.0)
        return RULES[name](tokens, cut / cut.sum(axis=1, keepdims=True), p_rows, draws, more=more)

    emitted = round_distribution(understated, p, q, 2, more=False)
    worst = max(abs(a - probability(p, s)) for s, a in completed(emitted, p, 3).items())
    assert worst > 1e-3


def test_equal_distributions_are_always_accepted_and_a_forced_rejection_samples_p():
    p = np.array([[0.5, 0.5, 0.0], [0.1, 0.2, 0.7]])
    outcomes = all_outcomes(lambda draws: token_wise((1,), p[:1], p, draws))
    assert {o.num_accepted for o, weight in outcomes if weight > 0} == {1}
    assert residual(p[0], p[0]).tolist() == p[0].tolist()


def test_a_forbidden_token_is_not_accepted_even_at_a_draw_of_zero():
    class Zero:
        def accept(self, index, probability):
            return probability > 0.0

        def sample(self, index, weights):
            return inverse_cdf(weights, 0.0)

    q = np.array([[0.5, 0.5]])
    p = np.array([[0.0, 1.0], [0.0, 1.0]])
    assert token_wise((0,), q, p, Zero()) == Judgement(0, (1,))


def test_inverse_cdf_never_lands_on_an_index_without_weight():
    weights = np.array([0.0, 0.3, 0.0, 0.7, 0.0])
    assert [inverse_cdf(weights, u) for u in (0.0, 0.299, 0.301, 1 - 2**-53)] == [1, 1, 3, 3]


def test_greedy_keeps_the_likeliest_and_corrects_the_first_other():
    p = np.array([[0.2, 0.4, 0.4], [0.6, 0.2, 0.2], [0.1, 0.1, 0.8]])
    assert greedy((1, 0), p) == Judgement(2, (2,))
    assert greedy((1, 0), p, more=True) == Judgement(2, ())
    assert greedy((1, 2), p) == Judgement(1, (0,))
    assert greedy((2, 0), p) == Judgement(0, (1,))


def test_counter_draws_depend_on_seed_position_and_base_only():
    weights = np.full(1000, 1.0)
    a = CounterDraws(5, 10).sample(3, weights)
    assert a == CounterDraws(5, 10).sample(3, weights)
    others = [
        CounterDraws(6, 10).sample(3, weights),
        CounterDraws(5, 11).sample(2, weights),
        CounterDraws(5, 10).sample(2, weights),
    ]
    assert a not in others
