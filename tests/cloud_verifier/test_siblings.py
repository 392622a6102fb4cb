"""Which siblings a block gets, and what the engine writes with them."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch
from verifier_support import Alone, Client, prompts, request, running

from cloud_verifier.kv_pool import KvPool
from cloud_verifier.metrics import Metrics
from cloud_verifier.siblings import MOST, Doubt, SiblingRule, parse_siblings, row_price, sibling_rule
from cloud_verifier.target_model import TargetModel
from shared.codecs import Distributions
from shared.codecs.base import Row
from shared.messages import FinishReason, SamplingParams

SIXTH = 1 / 6


def dist(*rows: dict[int, float]) -> Distributions:
    made = []
    for row in rows:
        ids = np.array(sorted(row), np.int32)
        made.append(Row(ids, np.array([row[i] for i in ids.tolist()]), 1.0))
    return Distributions.from_rows(made)


TWO = dist({3: 0.5, 5: 0.3, 9: 0.2}, {1: 0.1, 2: 0.6, 7: 0.3})


def test_siblings_are_the_likeliest_tokens_that_were_not_drawn():
    assert SiblingRule(8).choose(TWO, (3, 2), 8, 8) == ((0, 5), (0, 9), (1, 7), (1, 1))
    assert SiblingRule(8).choose(TWO, (9, 1), 1, 8) == ((0, 3), (1, 2))
    assert SiblingRule(1).choose(TWO, (9, 1), 8, 8) == ((0, 3), (1, 2))
    assert SiblingRule(0).choose(TWO, (9, 1), 8, 8) == ()


def test_equally_likely_tokens_are_taken_in_order():
    flat = dist(dict.fromkeys(range(6), SIXTH))
    assert SiblingRule(3).choose(flat, (1,), 8, 8) == ((0, 0), (0, 2), (0, 3))


def test_what_is_unlikely_to_be_reached_or_recovered_is_not_worth_its_price():
    sure, unsure = {4: 0.98, 6: 0.02}, {4: 0.5, 6: 0.5}
    rule = SiblingRule(8, price=0.1)
    assert rule.choose(dist(sure, unsure), (4, 4), 8, 8) == ((1, 6),)
    # After two doubtful tokens the third is hardly ever reached.
    assert rule.choose(dist(unsure, unsure, unsure), (4, 4, 4), 8, 8) == ((0, 6),)
    assert SiblingRule(8, price=0.2).choose(dist(unsure), (4,), 8, 8) == ()


def test_a_session_learns_how_far_its_draft_is_to_be_doubted():
    doubt = Doubt()
    before = doubt.share
    for _ in range(40):
        doubt.add(TWO, (3, 2), 2)  # 0.5 and 0.4 were expected to be rejected, at a doubt of 1
    assert doubt.expected == pytest.approx(4 + 40 * 0.9)
    assert doubt.share == pytest.approx(before * 4 / 40)
    rule = SiblingRule(8, price=0.02)
    assert rule.choose(TWO, (3, 2), 8, 8, before)
    assert not rule.choose(TWO, (3, 2), 8, 8, doubt.share)
    assert SiblingRule(8).choose(TWO, (3, 2), 8, 8, 1e-6)  # a fixed number is the same on every verifier
    for _ in range(200):
        doubt.add(TWO, (3, 2), 0)  # only the first was reached
    assert doubt.expected == pytest.approx(40 + 200 * 0.5)
    assert doubt.share == 1.0


def test_places_without_room_and_rows_without_entries_get_none():
    assert SiblingRule(1).choose(TWO, (3, 2), 8, 1) == ((0, 5),)
    assert SiblingRule(1).choose(TWO, (3, 2), 8, -1) == ()
    nothing = Distributions(np.zeros(3, np.int64), np.zeros(0, np.int32), np.zeros(0))
    assert SiblingRule(8).choose(nothing, (3, 2), 8, 8) == ()


@pytest.fixture(scope="module")
def model(tiny_target: Path) -> TargetModel:
    return TargetModel.load(str(tiny_target), dtype="float32", num_slots=4096)


def test_the_option(model):
    assert sibling_rule(parse_siblings("0"), model) is None
    assert sibling_rule(parse_siblings("3"), model) == SiblingRule(3)
    chosen = sibling_rule(parse_siblings("auto"), model)
    assert chosen is not None
    assert chosen.most == MOST
    assert 0 <= chosen.price < 2.5


def test_the_price_of_a_row_leaves_the_pool_as_it_was(model):
    free = model.pool.num_free
    price = row_price(model)
    assert np.log2(price).is_integer()
    assert model.pool.num_free == free


class Metered:
    """A target on which a row costs what it should; time passes as it says."""

    def __init__(self, model, base_s, row_s, step_s=0.0):
        self.pool, self.base_s, self.row_s, self.step_s, self.now = model.pool, base_s, row_s, step_s, 0.0

    def forward(self, segments):
        rows = sum(len(segment.tokens) for segment in segments)
        self.now += self.base_s + self.row_s * rows + self.step_s * (rows > 6)
        return torch.zeros(1, 1)


@pytest.mark.parametrize(("row_s", "price"), [(0.0, 2**-8), (0.001, 1 / 8), (0.01, 1 / 2)])
def test_the_price_follows_what_a_row_costs(model, monkeypatch, row_s, price):
    metered = Metered(model, 0.03, row_s)
    monkeypatch.setattr("time.perf_counter", lambda: metered.now)
    assert row_price(metered) == price


def test_the_price_is_that_of_the_dearer_of_the_first_rows_and_of_many(model, monkeypatch):
    metered = Metered(model, 0.03, 0.001, step_s=0.006)
    monkeypatch.setattr("time.perf_counter", lambda: metered.now)
    assert row_price(metered) == 1 / 4  # 3 ms each of 36


def test_the_price_is_that_of_the_time_that_a_pass_is_made_to_last(model, monkeypatch):
    metered = Metered(model, 0.03, 0.001)
    monkeypatch.setattr("time.perf_counter", lambda: metered.now)
    assert row_price(metered, lambda num_tokens: 0.1 + 0.0001 * num_tokens) == 2**-8


def doubtful(rng: random.Random, truth: list[int], vocab_size: int = 250) -> tuple[list[int], Distributions]:
    """A block with some wrong tokens, and a q that holds the right ones nearly everywhere."""
    tokens, rows = [], []
    for right in truth:
        wrong = (right + rng.randrange(1, vocab_size)) % vocab_size
        other = (wrong + rng.randrange(1, vocab_size)) % vocab_size
        row = {other: 0.1, right if rng.random() < 0.8 else other: 0.4}
        drafted = right if rng.random() < 0.6 else wrong
        row[drafted] = 1.0 - sum(probability for token, probability in row.items() if token != drafted)
        tokens.append(drafted)
        rows.append(row)
    return tokens, dist(*rows)


def write(client: Client, truth: list[int], start: int, rng: random.Random, ahead: bool = False) -> int:
    """Blocks until the answer ends; returns how many siblings were taken."""
    num_taken = 0
    while client.finish is FinishReason.NONE:
        done = len(client.committed) - start
        blocks, base = [], len(client.committed)
        for number in range(rng.randrange(1, 4) if ahead else 1):
            tokens, q = doubtful(rng, truth[done : done + rng.randrange(1, 7)])
            if not tokens:
                break
            blocks.append(client.send_block(tokens, q, base_len=base, more=ahead and number < 2))
            done, base = done + len(tokens), base + len(tokens)
            if not blocks[-1].more:
                break
        for block in blocks:
            verdict = client.verdict(block)
            num_taken += len(verdict.tokens) == 2
            assert verdict.num_accepted < len(block.tokens) or len(verdict.tokens) <= 1
    return num_taken


@pytest.fixture(scope="module")
def alone(tiny_target: Path) -> Alone:
    # On a model of its own: the engine's thread may be at work on the other while this one is asked.
    return Alone(TargetModel.load(str(tiny_target), dtype="float32", num_slots=4096))


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("rule", ["token", "block", "greedy"])
def test_greedy_text_is_the_targets_own_with_siblings(model, alone, monkeypatch, rule, ahead, in_place):
    monkeypatch.setattr(KvPool, "reads_in_place", in_place)
    num_taken = 0
    with running(model, siblings=SiblingRule(4)) as engine:
        for seed in range(6):
            rng = random.Random(seed)
            prompt = prompts(1, rng.randrange(3, 40), seed=seed)[0]
            num_tokens = rng.randrange(20, 60)
            expected = alone(prompt, num_tokens + 30)
            client = Client(engine)
            client.open(request(prompt, num_tokens, verification=rule, num_siblings=8))
            num_taken += write(client, expected, len(prompt), rng, ahead)
            assert client.committed[len(prompt) :] == expected[:num_tokens]
            client.ticket.close()
    assert num_taken > 15


def test_coupled_text_is_what_the_target_alone_writes_with_siblings(model):
    prompt, sampling = prompts(1, 12, seed=3)[0], SamplingParams(temperature=0.8, seed=5)
    with running(model) as engine:
        expected = Client(engine).answer(prompt, 70, sampling=sampling, verification="coupled")
    with running(model, siblings=SiblingRule(2)) as engine:
        client = Client(engine)
        client.open(request(prompt, 50, sampling=sampling, verification="coupled", num_siblings=2))
        num_taken = write(client, expected, len(prompt), random.Random(1))
    assert client.committed[len(prompt) :] == expected[:50]
    assert num_taken > 3


@pytest.mark.parametrize("rule", ["token", "block", "coupled"])
def test_same_seed_same_text_with_siblings_alone_and_beside_others(model, rule):
    def written(engine, num_others):
        others = [Client(engine) for _ in range(num_others)]
        for i, other in enumerate(others):
            other.open(request(prompts(1, 9, seed=i)[0], 60, num_siblings=8))
        client, rng, sampling = Client(engine), random.Random(2), SamplingParams(temperature=1.0, seed=9)
        prompt = prompts(1, 15, seed=4)[0]
        client.open(request(prompt, 40, sampling=sampling, verification=rule, num_siblings=8))
        while client.finish is FinishReason.NONE:
            tokens, q = doubtful(rng, [rng.randrange(250) for _ in range(4)])
            waiting = [(other, other.send_block(*doubtful(rng, [7, 8, 9]))) for other in others]
            client.verdict(client.send_block(tokens, q))
            for other, block in waiting:
                other.verdict(block)
            rng.seed(len(client.committed))  # what the others draw must not matter
        return client.committed

    with running(model, siblings=SiblingRule(8)) as engine:
        assert written(engine, 0) == written(engine, 3)


def test_a_client_that_asks_for_no_siblings_gets_none(model, alone):
    with running(model, siblings=SiblingRule(4)) as engine:
        client = Client(engine)
        prompt = prompts(1, 20)[0]
        client.open(request(prompt, 40, verification="greedy"))
        assert write(client, alone(prompt, 60), len(prompt), random.Random(0)) == 0


@pytest.mark.parametrize("place", ["recovered", "extra"])
def test_an_end_of_sequence_at_a_sibling_ends_the_answer_there(model, alone, place):
    prompt = prompts(1, 20, seed=11)[0]
    truth = alone(prompt, 8)
    recovered, extra = truth[1], truth[2]
    eos = recovered if place == "recovered" else extra
    if eos in truth[: 1 + (place == "extra")]:
        pytest.fail("the tiny model repeats itself here; choose another seed")
    with running(model, siblings=SiblingRule(4)) as engine:
        client = Client(engine)
        client.open(request(prompt, 40, verification="greedy", num_siblings=4, eos_ids=(eos,)))
        wrong = (recovered + 1) % 250
        q = dist({truth[0]: 1.0}, {wrong: 0.5, recovered: 0.5}, {3: 1.0})
        verdict = client.verdict(client.send_block((truth[0], wrong, 3), q))
        assert verdict.tokens == ((recovered,) if place == "recovered" else (recovered, extra))
        assert verdict.finish_reason is FinishReason.STOP
        # The conversation goes on from what the verifier holds.
        client.append(prompts(1, 5, seed=12)[0])
        text = list(client.committed)
        assert client.generate(20) == alone(text, 20)[: len(client.committed) - len(text)]


@pytest.mark.parametrize("limit", [2, 3])
def test_an_answer_is_never_longer_than_asked_for(model, alone, limit):
    prompt = prompts(1, 20, seed=11)[0]
    truth = alone(prompt, 8)
    wrong = (truth[1] + 1) % 250
    with running(model, siblings=SiblingRule(4)) as engine:
        client = Client(engine)
        client.open(request(prompt, limit, verification="greedy", num_siblings=4))
        q = dist({truth[0]: 1.0}, {wrong: 0.5, truth[1]: 0.5})
        verdict = client.verdict(client.send_block((truth[0], wrong), q))
        assert list(verdict.tokens) == truth[1:limit]
        assert verdict.finish_reason is FinishReason.LENGTH


def test_a_repeated_step_gets_the_token_after_the_sibling_again(model, alone):
    prompt = prompts(1, 20, seed=11)[0]
    truth = alone(prompt, 30)
    wrong = (truth[0] + 1) % 250
    metrics = Metrics()
    with running(model, siblings=SiblingRule(4), observer=metrics) as engine:
        client = Client(engine)
        client.open(request(prompt, 40, verification="greedy", num_siblings=4, logprobs=2))
        q = dist({wrong: 0.5, truth[0]: 0.5})
        block = client.send_block((wrong,), q)
        verdict = client.verdict(block)
        assert list(verdict.tokens) == truth[:2]
        assert [line[0] for line in verdict.logprobs.ids] == truth[:2]
        client.ticket.submit(block, q)
        assert client.get() == verdict
        assert client.generate(20) == truth[2:22]
    assert metrics.registry.get_sample_value("specwire_spec_decode_num_sibling_tokens_total") == 1


def test_penalties_after_a_sibling_count_the_recovered_token(model):
    prompt = prompts(1, 20, seed=13)[0]
    sampling = SamplingParams(repetition_penalty=1.8, presence_penalty=1.5, frequency_penalty=0.7)
    with running(model) as engine:
        expected = Client(engine).answer(prompt, 60, sampling=sampling, verification="greedy")
    with running(model, siblings=SiblingRule(4)) as engine:
        client = Client(engine)
        client.open(request(prompt, 40, sampling=sampling, verification="greedy", num_siblings=4))
        assert write(client, expected, len(prompt), random.Random(3)) > 3
    assert client.committed[len(prompt) :] == expected[:40]
