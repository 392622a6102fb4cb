"""The engine over a tiny float32 model, without a network: what it writes, and what it never lets happen."""

from __future__ import annotations

import random
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from verifier_support import Alone, Client, one_hot, prompts, request, running, sync, until

from cloud_verifier.auth import Identity, Quota
from cloud_verifier.observer import Observer
from cloud_verifier.registry import EngineLimits
from cloud_verifier.scheduler import Budget
from cloud_verifier.target_model import TargetModel
from shared.faults import FaultKind, SpecwireError
from shared.messages import (
    Append,
    DraftBlock,
    FinishReason,
    Generate,
    Notice,
    SamplingParams,
    Tokens,
    Verdict,
)


@pytest.fixture(scope="module")
def model(tiny_target: Path) -> TargetModel:
    return TargetModel.load(str(tiny_target), dtype="float32", num_slots=4096)


@pytest.fixture(scope="module")
def alone(tiny_target: Path) -> Alone:
    # On a model of its own: the engine's thread may be at work on the other while this one is asked.
    return Alone(TargetModel.load(str(tiny_target), dtype="float32", num_slots=4096))


def test_generate_writes_the_targets_own_text(model, alone):
    with running(model) as engine:
        for prompt in prompts(3, 20):
            assert Client(engine).answer(prompt, 40) == alone(prompt, 40)


def test_many_at_once_write_what_each_writes_alone(model, alone):
    texts = prompts(12, 17, seed=1)
    expected = [alone(prompt, 24) for prompt in texts]
    with running(model) as engine:
        clients = [Client(engine) for _ in texts]
        for client, prompt in zip(clients, texts, strict=True):
            client.open(request(prompt, 24))
        written = {}

        def write(i: int) -> None:
            written[i] = clients[i].generate(24)

        threads = [threading.Thread(target=write, args=(i,)) for i in range(len(clients))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert [written[i] for i in range(len(texts))] == expected


@pytest.mark.parametrize("seed", range(12))
def test_random_pipelines_write_the_targets_own_text(model, alone, seed):
    """Blocks of random lengths and quality, drafted ahead with `more`, some of them stale when they come."""
    rng = random.Random(seed)
    prompt = prompts(1, rng.randrange(1, 60), seed=seed)[0]
    num_tokens = rng.randrange(1, 90)
    expected = alone(prompt, num_tokens + 40)
    num_full, num_stale = 0, 0
    with running(model, budget=Budget(pass_tokens=32, prefill_share=8)) as engine:
        client = Client(engine)
        client.open(request(prompt, num_tokens, verification=rng.choice(["token", "greedy"])))
        while client.finish is FinishReason.NONE:
            ahead = len(client.committed) - len(prompt)
            base, blocks = len(client.committed), []
            num_blocks = rng.randrange(1, 5)
            for i in range(num_blocks):
                drafted = expected[ahead : ahead + rng.randrange(1, 9)]
                if rng.random() < 0.3:
                    at = rng.randrange(len(drafted))
                    drafted = [*drafted[:at], (drafted[at] + 1) % 256, *drafted[at + 1 :]]
                more = i < num_blocks - 1 or rng.random() < 0.3
                blocks.append(client.send_block(drafted, base_len=base, more=more))
                ahead, base = ahead + len(drafted), base + len(drafted)
            for block in blocks:
                verdict = client.verdict(block)
                num_stale += verdict.stale
                num_full += block.more and verdict.num_accepted == len(block.tokens)
                _check_kv(client, block, verdict)
        assert client.finish is FinishReason.LENGTH
        assert client.committed[len(prompt) :] == expected[:num_tokens]
        client.ticket.close()
    if num_tokens > 30:
        assert num_full + num_stale


def _check_kv(client: Client, block: DraftBlock, verdict: Verdict) -> None:
    """KV length after a round: committed - 1, or committed after a wholly accepted `more` block."""
    session = client.ticket.session
    assert session is not None
    if verdict.stale or session.steps or client.inbox.qsize():
        return
    full_more = block.more and verdict.num_accepted == len(block.tokens)
    assert session.kv_len == len(session.committed) - (not full_more)
    assert (session.kept_row is not None) == full_more
    assert session.committed == client.committed


def test_generate_goes_on_from_a_kept_row(model, alone):
    prompt = prompts(1, 9)[0]
    text = alone(prompt, 20)
    with running(model) as engine:
        client = Client(engine)
        client.open(request(prompt, 20))
        assert client.verdict(client.send_block(text[:5], more=True)).tokens == ()
        assert client.generate(15) == text[5:]
        client.ticket.close()


def test_an_answer_ends_at_eos_wherever_it_falls_in_a_block(model, alone):
    prompt = prompts(1, 12, seed=5)[0]
    text = alone(prompt, 20)
    eos_at = next(i for i in range(4, 20) if text[i] not in text[:i])
    with running(model) as engine:
        for num_before in range(1, eos_at + 1):
            client = Client(engine)
            client.open(request(prompt, 100, eos_ids=(text[eos_at],)))
            while client.finish is FinishReason.NONE:
                at = len(client.committed) - len(prompt)
                block = client.send_block(text[at : at + num_before] or [0])
                client.verdict(block)
            assert client.finish is FinishReason.STOP
            assert client.committed[len(prompt) :] == text[: eos_at + 1]
            late = client.send_block([1, 2])
            assert client.verdict(late).stale
            client.ticket.close()


@pytest.mark.parametrize("limit", [1, 2, 5, 6, 7])
@pytest.mark.parametrize("more", [False, True])
def test_max_new_tokens_is_exact(model, alone, limit, more):
    prompt = prompts(1, 12, seed=6)[0]
    text = alone(prompt, 12)
    with running(model) as engine:
        client = Client(engine)
        client.open(request(prompt, limit))
        while client.finish is FinishReason.NONE:
            at = len(client.committed) - len(prompt)
            client.verdict(client.send_block(text[at : at + 5], more=more))
        assert client.finish is FinishReason.LENGTH
        assert client.committed[len(prompt) :] == text[:limit]
        client.ticket.close()


def test_the_context_ends_the_answer(model, alone):
    prompt = prompts(1, model.max_context - 10, seed=7)[0]
    with running(model) as engine:
        client = Client(engine)
        client.open(request(prompt, 100))
        written = client.generate(100)
        assert len(written) == 10
        assert client.finish is FinishReason.LENGTH
        with pytest.raises(SpecwireError, match="context of 512") as error:
            client.append([1, 2, 3])
        assert error.value.kind is FaultKind.CONTEXT_EXCEEDED
    with running(model) as engine:
        client = Client(engine)
        client.ticket.open(request(prompts(1, model.max_context)[0]))
        assert client.fault().kind is FaultKind.CONTEXT_EXCEEDED


def test_append_starts_a_new_answer_and_feeds_only_the_new_tokens(model, alone):
    first, turn = prompts(1, 30, seed=8)[0], prompts(1, 5, seed=9)[0]
    with running(model) as engine:
        client = Client(engine)
        client.open(request(first, 6))
        client.generate(6)
        fed = _count_fed(model)
        client.append(turn, 8)
        client.generate(8)
        num_fed = fed()
        whole = [*first, *alone(first, 6), *turn]
        assert client.committed[len(whole) :] == alone(whole, 8)
        assert num_fed == len(turn) + 1 + 7  # the answer's last token, the turn, and what is written
        client.ticket.close()


def _count_fed(model: TargetModel):
    before = model.pool.num_allocated_total
    return lambda: model.pool.num_allocated_total - before


def test_a_returning_conversation_costs_its_new_tokens_only(model):
    prompt = prompts(1, 200, seed=10)[0]
    with running(model) as engine:
        client = Client(engine)
        client.open(request(prompt, 20))
        client.generate(20)
        client.ticket.close()
        fed = _count_fed(model)
        again = Client(engine)
        opened = again.open(request([*client.committed, 1, 2, 3], 4))
        assert opened.replayed_tokens == 219  # the last token of the first answer was never fed
        again.generate(4)
        assert fed() == 4 + 3
        again.ticket.close()


def test_a_conversation_outlives_its_stream_and_its_session(model):
    """A client that comes back without its session's id pays for new tokens only."""
    clock = Clock()
    prompt = prompts(1, 200, seed=33)[0]
    with running(model, limits=EngineLimits(idle_seconds=30), clock=clock) as engine:
        client = Client(engine)
        client.open(request(prompt, 4))
        client.generate(4)
        client.ticket.detach()
        again = Client(engine)
        assert again.open(request([*client.committed, 1], 4)).replayed_tokens == 203
        again.ticket.detach()
        sync(engine)
        clock.now += 40
        engine.expire()
        sync(engine)
        assert len(engine._registry) == 0
        third = Client(engine)
        assert third.open(request([*client.committed, 2], 4)).replayed_tokens == 203
        third.ticket.close()


@pytest.mark.parametrize("shared", [False, True])
def test_prefixes_are_shared_between_identities_only_when_the_operator_says_so(model, alone, shared):
    prompt = prompts(1, 100, seed=34)[0]
    with running(model, limits=EngineLimits(share_prefixes=shared)) as engine:
        assert Client(engine, Identity("alice")).answer(prompt, 4) == alone(prompt, 4)
        for name, num_known in (("bob", 99 if shared else 0), ("alice", 99), ("bob", 99)):
            client = Client(engine, Identity(name))
            assert client.open(request(prompt, 4)).replayed_tokens == num_known, name
            assert client.generate(4) == alone(prompt, 4)
            client.ticket.close()


def test_a_shared_prompt_is_read_once_even_when_both_come_together(model, alone):
    prompt = prompts(1, 300, seed=11)[0]
    expected = alone(prompt, 5)
    with running(model, budget=Budget(pass_tokens=64, prefill_share=16)) as engine:
        fed = _count_fed(model)
        clients = [Client(engine) for _ in range(3)]
        for client in clients:
            client.ticket.open(request(prompt, 5))
        for client in clients:
            client.committed = list(prompt)
            client.get()
            assert client.generate(5) == expected
            client.ticket.close()
        # Three first tokens of the others may slip into the pass that reads the first prompt's end.
        assert fed() < 300 + 3 * 5 + 64


def test_a_long_prompt_does_not_hold_up_a_session_beside_it(model, alone):
    """While a long prompt is read, another's verdict waits for two passes at most."""
    texts = prompts(2, 400, seed=12)
    short = texts[1][:10]
    expected = alone(short, 30)
    sizes = []

    class Counting:
        pool, max_context = model.pool, model.max_context

        def forward(self, segments):
            sizes.append([len(segment.tokens) for segment in segments])
            return model.forward(segments)

    class Watching(Observer):
        """How many passes had begun when the last verdict was given, told by the engine's thread."""

        num_passes = 0

        def passed(self, record):
            if any(isinstance(answered.reply, Verdict) for answered in record.answered):
                self.num_passes = len(sizes)

    watching = Watching()
    arrived: list[int] = []
    budget = Budget(pass_tokens=16, prefill_share=16)
    with running(Counting(), budget=budget, observer=watching) as engine:
        client, long = Client(engine), Client(engine)
        client.open(request(short, 30))
        client.generate(1)
        long.ticket.open(request(texts[0], 5))
        for at in range(1, 25, 4):
            block = client.send_block(expected[at : at + 3])
            engine.post(lambda: arrived.append(len(sizes)))
            client.verdict(block)
            sync(engine)
            assert watching.num_passes - arrived[-1] <= 1  # after the one that was under way
        assert client.committed[10:] == expected[: len(client.committed) - 10]
        assert max(sum(size) for size in sizes) <= 32
        client.ticket.close()
        long.get()
        long.committed = list(texts[0])
        assert long.generate(5) == alone(texts[0], 5)
        long.ticket.close()


def test_repeated_steps_get_the_same_verdict(model, alone):
    prompt = prompts(1, 10, seed=13)[0]
    text = alone(prompt, 30)
    with running(model) as engine:
        client = Client(engine)
        client.open(request(prompt, 30))
        blocks = []
        for size in (3, 1, 4):
            at = len(client.committed) - len(prompt)
            block = client.send_block([*text[at : at + size], 0])
            blocks.append((block, client.verdict(block)))
        for block, verdict in blocks:
            client.ticket.submit(block, one_hot(block.tokens))
            assert client.get() == verdict
        rest = client.generate(4)
        step = client.step - 1
        client.ticket.submit(Append(step, 0, 0, (1,), 1))  # same number: the old answer, whatever is in it
        repeated = client.get()
        assert isinstance(repeated, Tokens)
        assert list(repeated.tokens) == rest
        client.ticket.close()


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"step": 3}, "step 1 was expected"),
        ({"epoch": 1}, "epoch 1"),
        ({"base_len": 11}, "follows 11 tokens"),
        ({"base_len": 9}, "follows 9 tokens"),
    ],
)
def test_blocks_out_of_order_end_their_own_session(model, alone, changes, text):
    prompt = prompts(1, 10, seed=14)[0]
    with running(model) as engine:
        healthy, client = Client(engine), Client(engine)
        healthy.open(request(prompt, 8))
        client.open(request(prompt, 8))
        client.send_block([1, 2], **changes)
        fault = client.fault()
        assert fault.kind is FaultKind.OUT_OF_ORDER
        assert text in fault.text
        assert healthy.generate(8) == alone(prompt, 8)
        healthy.ticket.close()


def test_an_append_of_an_older_epoch_is_refused(model, alone):
    prompt = prompts(1, 10, seed=15)[0]
    with running(model) as engine:
        client = Client(engine)
        client.open(request(prompt, 8))
        client.verdict(client.send_block([(alone(prompt, 1)[0] + 1) % 256, 5]))
        client.ticket.submit(Append(client.step, 0, len(prompt), (1, 2), 4))
        assert client.fault().kind is FaultKind.OUT_OF_ORDER


def test_steps_older_than_the_replay_window_are_out_of_order(model, alone):
    prompt = prompts(1, 10, seed=16)[0]
    with running(model) as engine:
        client = Client(engine)
        client.open(request(prompt, 60))
        first = client.send_block([0])
        client.verdict(first)
        for _ in range(20):
            client.verdict(client.send_block([0]))
        client.ticket.submit(first, one_hot(first.tokens))
        assert client.fault().kind is FaultKind.OUT_OF_ORDER


def test_resume_goes_on_where_it_was_and_hands_over_what_was_missed(model, alone):
    prompt = prompts(1, 10, seed=17)[0]
    text = alone(prompt, 40)
    with running(model) as engine:
        client = Client(engine)
        opened = client.open(request(prompt, 40))
        block = client.send_block(text[:4])
        verdict = client.verdict(block)
        client.ticket.detach()
        back = Client(engine)
        back.committed = list(prompt)  # the verdict was lost on the way
        again = back.open(request([], 40, session_id=opened.session_id, committed_len=len(prompt)))
        assert back.committed == client.committed
        assert again.next_step == 2
        back.ticket.submit(block, one_hot(block.tokens))
        assert back.get() == verdict
        assert back.generate(35) == text[5:]
        back.ticket.close()


def test_resume_works_after_the_slots_went_to_others(model, alone):
    prompt = prompts(1, 50, seed=18)[0]
    text = alone(prompt, 20)
    with running(model) as engine:
        client = Client(engine)
        opened = client.open(request(prompt, 20))
        client.verdict(client.send_block(text[:4], more=True))
        client.ticket.detach()
        others = [Client(engine) for _ in range(8)]
        for other, other_prompt in zip(others, prompts(8, 510, seed=19), strict=True):
            other.open(request(other_prompt, 2))
            other.generate(2)
        session = client.ticket.session
        assert session is not None
        assert session.kv_len == 0
        back = Client(engine)
        back.committed = list(client.committed)
        back.open(request([], 20, session_id=opened.session_id, committed_len=len(client.committed)))
        assert back.verdict(back.send_block(text[4:7], more=True)).num_accepted == 3
        assert back.generate(13) == text[7:]
        back.ticket.close()


def test_a_newer_stream_takes_the_session_over(model, alone):
    prompt = prompts(1, 10, seed=20)[0]
    with running(model) as engine:
        old, new = Client(engine), Client(engine)
        opened = old.open(request(prompt, 8))
        new.committed = list(prompt)
        new.open(request([], 8, session_id=opened.session_id, committed_len=10))
        assert old.fault().kind is FaultKind.NOT_ALLOWED
        old.send_block([1])
        old.ticket.detach()
        old.ticket.close()
        assert new.generate(8) == alone(prompt, 8)
        new.ticket.close()


def test_a_session_belongs_to_whoever_opened_it(model):
    with running(model) as engine:
        alice, mallory, nobody = Client(engine, Identity("alice")), Client(engine), Client(engine)
        opened = alice.open(request([1, 2, 3]))
        mallory.ticket.open(request([], session_id=opened.session_id))
        nobody.ticket.open(request([], session_id="x" * 22))
        faults = [mallory.fault(), nobody.fault()]
        assert [fault.kind for fault in faults] == [FaultKind.SESSION_UNKNOWN] * 2
        assert str(faults[0]) == str(faults[1])  # ids cannot be probed
        assert alice.generate(3)
        alice.ticket.close()


def test_session_ids_are_long_and_distinct(model):
    with running(model) as engine:
        ids = set()
        for _ in range(50):
            client = Client(engine)
            ids.add(client.open(request([1])).session_id)
            client.ticket.close()
    assert len(ids) == 50
    assert min(map(len, ids)) >= 22  # 128 bits


def test_moving_to_another_verifier_goes_on_inside_the_answer(model, alone):
    prompt = prompts(1, 10, seed=21)[0]
    text = alone(prompt, 20)
    with running(model) as engine:
        client = Client(engine)
        client.open(request([*prompt, *text[:7]], 20, prompt_len=10))
        assert client.generate(100) == text[7:]
        assert client.finish is FinishReason.LENGTH
        ended = Client(engine).open(request([*prompt, *text], 20, prompt_len=10))
        assert ended.finish_reason is FinishReason.LENGTH
        stopped = Client(engine).open(request([*prompt, *text[:3]], 20, prompt_len=10, eos_ids=(text[2],)))
        assert stopped.finish_reason is FinishReason.STOP


class Broken:
    """The model, but sessions whose last token is `trigger` get `row` as their logits, or an exception."""

    def __init__(self, model: TargetModel, trigger: int, row: float | None) -> None:
        self.pool, self.max_context = model.pool, model.max_context
        self._model, self._trigger, self._row = model, trigger, row

    def forward(self, segments):
        logits = self._model.forward(segments).clone()
        row = 0
        for segment in segments:
            if self._trigger in segment.tokens.tolist():
                if self._row is None:
                    raise RuntimeError("the kernel failed")
                logits[row : row + segment.num_logits] = self._row
            row += segment.num_logits
        return logits


@pytest.mark.parametrize(
    ("row", "kind"),
    [(float("nan"), FaultKind.NOT_FINITE), (float("inf"), FaultKind.NOT_FINITE), (None, FaultKind.INTERNAL)],
)
def test_a_fault_in_one_session_leaves_the_others_alone(model, alone, row, kind):
    texts = prompts(6, 15, seed=22, vocab_size=255)
    with running(Broken(model, 255, row)) as engine:
        clients = [Client(engine) for _ in texts]
        for client, prompt in zip(clients, texts, strict=True):
            client.open(request(prompt, 12))
        bad = Client(engine)
        bad.open(request([*texts[0][:14], 255], 12))
        outcome = {}

        def write(i: int) -> None:
            outcome[i] = clients[i].generate(12)

        threads = [threading.Thread(target=write, args=(i,)) for i in range(6)]
        for thread in threads:
            thread.start()
        bad.send_block([255, 255])
        assert bad.fault().kind is kind
        for thread in threads:
            thread.join()
        for i, prompt in enumerate(texts):
            assert outcome[i] == alone(prompt, 12)
            clients[i].ticket.close()


def test_a_command_that_fails_ends_that_session_only(model, alone, monkeypatch):
    prompt = prompts(1, 10, seed=23)[0]
    with running(model) as engine:
        healthy, client = Client(engine), Client(engine)
        healthy.open(request(prompt, 8))
        client.open(request(prompt, 8))
        session = client.ticket.session
        original = engine._registry.settle

        def settle(which):
            if which is session:
                raise ZeroDivisionError
            original(which)

        monkeypatch.setattr(engine._registry, "settle", settle)
        client.send_block([1])
        assert client.fault().kind is FaultKind.INTERNAL
        assert healthy.generate(8) == alone(prompt, 8)
        healthy.ticket.close()


def test_admission_is_bounded_and_says_when_to_come_back(model):
    with running(model, limits=EngineLimits(max_sessions=3)) as engine:
        clients = [Client(engine) for _ in range(3)]
        for client in clients:
            client.open(request([1, 2, 3]))
        late = Client(engine)
        late.ticket.open(request([1, 2, 3]))
        fault = late.fault()
        assert fault.kind is FaultKind.OVERLOADED
        assert fault.retry_after_ms > 0
        clients[0].ticket.detach()
        Client(engine).open(request([1, 2, 3]))


def test_prompts_that_wait_are_bounded(model):
    gate = threading.Event()

    class Slow:
        pool, max_context = model.pool, model.max_context

        def forward(self, segments):
            gate.wait(60)
            return model.forward(segments)

    with running(Slow(), limits=EngineLimits(max_prefilling=4)) as engine:
        clients = [Client(engine) for _ in range(7)]
        for client in clients:
            client.ticket.open(request(prompts(1, 40)[0]))
        gate.set()
        kinds = []
        for client in clients:
            try:
                client.get()
                kinds.append(None)
            except SpecwireError as fault:
                kinds.append(fault.kind)
        assert kinds.count(FaultKind.OVERLOADED) in (2, 3)


def test_answers_that_do_not_fit_the_slots_are_refused(model):
    with running(model) as engine:
        clients = [Client(engine) for _ in range(8)]
        for client, prompt in zip(clients, prompts(8, 500, seed=24), strict=True):
            client.open(request(prompt, 5))
        late = Client(engine)
        late.ticket.open(request(prompts(1, 200, seed=25)[0], 5))
        assert late.fault().kind is FaultKind.OVERLOADED


def test_too_small_a_pool_serves_sessions_one_after_the_other(tiny_target):
    """More text than slots: everybody still gets their own, nobody starves."""
    model = TargetModel.load(str(tiny_target), dtype="float32", num_slots=160)
    alone = Alone(TargetModel.load(str(tiny_target), dtype="float32", num_slots=512))
    texts = prompts(4, 40, seed=26)
    with running(model, budget=Budget(pass_tokens=16, prefill_share=4)) as engine:
        clients = [Client(engine) for _ in texts]
        for client, prompt in zip(clients[:3], texts, strict=False):
            client.open(request(prompt, 50))
        outcome = {}

        def write(i: int) -> None:
            outcome[i] = clients[i].generate(50)

        threads = [threading.Thread(target=write, args=(i,)) for i in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [outcome[i] for i in range(3)] == [alone(prompt, 50) for prompt in texts[:3]]


def test_quotas_bound_sessions_and_context(model):
    limited = Identity("bob", Quota(sessions=2, max_context=20))
    with running(model) as engine:
        first, second, third = (Client(engine, limited) for _ in range(3))
        first.open(request([1, 2, 3], 100))
        second.open(request([1, 2, 3]))
        third.ticket.open(request([1, 2, 3]))
        assert third.fault().kind is FaultKind.QUOTA_EXCEEDED
        Client(engine).open(request([1, 2, 3]))
        assert len(first.generate(100)) == 17
        assert first.finish is FinishReason.LENGTH
        second.ticket.close()
        fourth = Client(engine, limited)
        fourth.ticket.open(request([1] * 20))
        assert fourth.fault().kind is FaultKind.CONTEXT_EXCEEDED


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_idle_sessions_expire_and_hanging_steps_end(model):
    clock = Clock()
    limits = EngineLimits(idle_seconds=30, step_seconds=10)
    with running(model, limits=limits, clock=clock) as engine:
        silent, gone, talking = Client(engine), Client(engine), Client(engine)
        for client in (silent, gone, talking):
            client.open(request([1, 2, 3]))
        gone.ticket.detach()
        sync(engine)
        until(lambda: not engine.load().num_waiting)
        clock.now += 20
        talking.generate(1)
        clock.now += 15
        engine.expire()
        assert silent.fault().kind is FaultKind.TIMED_OUT
        talking.generate(1)
        again = Client(engine)
        again.ticket.open(request([], session_id=gone.opened.session_id))
        assert again.fault().kind is FaultKind.SESSION_UNKNOWN
        until(lambda: engine.num_attached == 1)


def test_a_step_that_makes_no_progress_is_ended(model):
    clock = Clock()
    entered, gate = threading.Event(), threading.Event()

    class Slow:
        pool, max_context = model.pool, model.max_context

        def forward(self, segments):
            entered.set()
            gate.wait(60)
            return model.forward(segments)

    with running(Slow(), limits=EngineLimits(step_seconds=10), clock=clock) as engine:
        client = Client(engine)
        client.open(request([1], 50))
        other = Client(engine)
        other.open(request([2], 50))
        client.send_block([1])
        entered.wait(60)
        other.send_block([1])
        clock.now += 11
        engine.expire()
        gate.set()
        assert other.fault().kind is FaultKind.TIMED_OUT
        assert isinstance(client.get(), Verdict)


def test_draining_tells_clients_finishes_answers_and_sends_the_silent_away(model, alone):
    clock = Clock()
    prompt = prompts(1, 10, seed=27)[0]
    with running(model, clock=clock) as engine:
        busy, silent = Client(engine), Client(engine)
        busy.open(request(prompt, 8))
        silent.open(request(prompt, 8))
        engine.drain("Going down.")
        notice = busy.get()
        assert isinstance(notice, Notice)
        assert notice.text == "Going down."
        silent.get()
        late = Client(engine)
        late.ticket.open(request(prompt))
        assert late.fault().kind is FaultKind.DRAINING
        clock.now += 5
        assert busy.generate(8) == alone(prompt, 8)
        engine.dismiss(2.0)
        assert silent.fault().kind is FaultKind.DRAINING
        busy.ticket.close()
        until(lambda: engine.num_attached == 0)


def test_detached_sessions_are_bounded(model):
    with running(model, limits=EngineLimits(max_sessions=4)) as engine:
        opened = []
        for _ in range(10):
            client = Client(engine)
            opened.append(client.open(request([1, 2, 3])).session_id)
            client.ticket.detach()
        kinds = []
        for session_id in opened:
            client = Client(engine)
            client.committed = [1, 2, 3]
            try:
                client.open(request([], session_id=session_id, committed_len=3))
                client.ticket.close()
                kinds.append(None)
            except SpecwireError as fault:
                kinds.append(fault.kind)
        assert kinds == [FaultKind.SESSION_UNKNOWN] * 6 + [None] * 4


def test_five_hundred_sessions_in_every_phase_leave_nothing_behind(model):
    """`running` checks the slots; here: sessions that end in every possible way."""
    rng = random.Random(28)
    texts = prompts(20, 80, seed=28)
    clock = Clock()
    with running(model, budget=Budget(pass_tokens=64, prefill_share=16), clock=clock) as engine:
        clients = []
        for i in range(500):
            client = Client(engine)
            prompt = texts[rng.randrange(20)][: rng.randrange(1, 80)]
            client.ticket.open(request(prompt, 20))
            if rng.random() < 0.8:
                client.committed, client.step = list(prompt), 1
                if rng.random() < 0.5:
                    client.send_block(
                        [rng.randrange(256) for _ in range(rng.randrange(1, 9))], more=i % 2 == 0
                    )
                else:
                    client.ticket.submit(_generate(client, rng.randrange(1, 9)))
            if rng.random() < 0.5:
                until(lambda c=client: c.inbox.qsize() > 0)
            end = i % 5
            if end == 0:
                client.ticket.close()
            elif end == 1:
                client.ticket.detach()
            elif end == 2:
                client.ticket.fail(SpecwireError(FaultKind.BAD_PAYLOAD, "broken"))
            elif end == 3:
                client.send_block([1], step=99)
            clients.append(client)
            if i % 10 == 9:
                clock.now += 1000
                engine.expire()

        def forgotten() -> bool:
            clock.now += 1000
            engine.expire()
            sync(engine)
            return len(engine._registry) == 0

        until(forgotten)


def _generate(client: Client, num_tokens: int) -> Generate:
    return Generate(client.step, client.epoch, len(client.committed), num_tokens)


def test_same_seed_same_text_alone_and_beside_others(model):
    prompt = prompts(1, 10, seed=29)[0]

    def write(engine, seed: int) -> list[int]:
        return Client(engine).answer(prompt, 20, sampling=SamplingParams(temperature=1.0, seed=seed))

    with running(model) as engine:
        first = write(engine, 1)
        noise = [Client(engine) for _ in range(5)]
        for client, other in zip(noise, prompts(5, 30, seed=30), strict=True):
            client.open(request(other, 40))
            client.ticket.submit(_generate(client, 40))
        assert write(engine, 1) == first
        assert write(engine, 2) != first
        for client in noise:
            client.generated()
            client.ticket.close()


def test_rows_are_not_shared_between_passes(model, alone):
    """A kept row is a copy: later passes do not write into it."""
    prompt = prompts(1, 10, seed=31)[0]
    with running(model) as engine:
        client = Client(engine)
        client.open(request(prompt, 40))
        first = alone(prompt, 3)
        client.verdict(client.send_block(first, more=True))
        session = client.ticket.session
        assert session is not None
        assert session.kept_row is not None
        before = session.kept_row.clone()
        Client(engine).answer(prompts(1, 30, seed=32)[0], 10)
        assert torch.equal(session.kept_row, before)
        assert np.isfinite(before.numpy()).all()
        client.ticket.close()
