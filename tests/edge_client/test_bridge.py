"""What the verifier writes while the edge reads: the same text, earlier, and no request too many."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from edge_support import CLOUD, GREEDY, PROMPT, Relay, WrappedDraft, collect, conversing, serving

from edge_client.bridge import Bridge
from edge_client.connection import Patience
from edge_client.controller import AutoController, FixedController, Plan
from edge_client.draft_model import DraftModel
from edge_client.estimates import Estimates
from edge_client.results import Emission, Origin, Result
from shared.messages import FinishReason, SamplingParams

SAMPLED = SamplingParams(temperature=0.8, seed=5)
PATIENT = Bridge(read_s=100.0, network_s=0.004, step_s=0.001)  # six under way
PLANS = [Plan(4, bridge=PATIENT), Plan(2, 3, bridge=PATIENT)]


class SlowReader(WrappedDraft):
    """The tiny draft, which holds a text that it reads until `finish` is called (0.1 s where nobody does)."""

    def __init__(self, model: DraftModel, hold_s: float = 30.0) -> None:
        super().__init__(model)
        self._hold_s = hold_s
        self._finished = threading.Event()

    def feed(self, tokens):
        if len(tokens) > 8:
            self._finished.wait(self._hold_s)
            self.finish()
        return super().feed(tokens)

    def finish(self) -> None:
        self._finished.set()


def test_asks_only_for_what_comes_in_time():
    bridge = Bridge(read_s=0.004, network_s=0.050, step_s=0.020)
    assert bridge.wants(100, 0.0, 0)
    assert not bridge.wants(17, 0.0, 0)  # read in 68 ms, while a token needs 70
    assert bridge.wants(18, 0.0, 0)
    assert not bridge.wants(18, 0.010, 0)
    assert not PATIENT.wants(7, 0.0, 0)  # read with the next block
    assert [bridge.wants(100, 0.0, num) for num in range(6)] == [True] * 4 + [False] * 2  # the way is full


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize(("verification", "sampling"), [("greedy", GREEDY), ("coupled", SAMPLED)])
async def test_the_verifier_writes_until_the_prompt_is_read(
    target_model, draft_model, plan, verification, sampling
):
    model = SlowReader(draft_model)
    async with serving(target_model) as address:
        async with conversing(address, draft_model, verification=verification) as talk:
            _, alone = await collect(talk, sampling=sampling, max_new_tokens=40, plan=CLOUD)
        emissions: list[Emission] = []
        async with conversing(address, model, verification=verification) as talk:
            async for event in talk.answer(
                PROMPT, sampling=sampling, max_new_tokens=40, controller=FixedController(plan)
            ):
                if isinstance(event, Result):
                    break
                emissions.append(event)
                if len(emissions) == 5:
                    model.finish()
            assert talk._session.num_unanswered == 0
    assert event.tokens == alone.tokens
    first = next(i for i, emission in enumerate(emissions) if emission.round.num_drafted)
    assert first >= 5
    assert all(emission.origins == (Origin.CLOUD,) for emission in emissions[:first])
    assert event.counts.by_origin[Origin.CLOUD] == first
    assert emissions[first].round.num_read >= len(PROMPT) - 1
    assert emissions[first].round.read_s > 0
    assert event.counts.num_accepted > 0


async def test_an_answer_that_ends_before_the_prompt_is_read(target_model, draft_model):
    async with serving(target_model) as address:
        async with conversing(address, draft_model) as talk:
            _, alone = await collect(talk, max_new_tokens=12, plan=CLOUD)
        for num_tokens in (1, 2, 7):
            model = SlowReader(draft_model, hold_s=0.1)
            async with conversing(address, model) as talk:
                _, result = await collect(talk, max_new_tokens=num_tokens, plan=PLANS[0])
                assert result.tokens == alone.tokens[:num_tokens]
                _, result = await collect(talk, max_new_tokens=12, plan=PLANS[1])
                assert result.tokens == alone.tokens
        for eos in dict.fromkeys(alone.tokens[:4]):
            model = SlowReader(draft_model, hold_s=0.1)
            async with conversing(address, model, eos_ids=(eos,)) as talk:
                _, result = await collect(talk, max_new_tokens=12, plan=PLANS[0])
                assert result.tokens == alone.tokens[: alone.tokens.index(eos) + 1]
                assert result.finish_reason is FinishReason.STOP
                # What was asked for beyond the end is void, and the session goes on.
                session = talk._session
                turn = (*talk.committed, *PROMPT)
                _, second = await collect(talk, turn, max_new_tokens=6, plan=PLANS[0])
                assert talk._session is session
                await talk.reset()
                _, afresh = await collect(talk, turn, max_new_tokens=6, plan=CLOUD)
                assert second.tokens == afresh.tokens


async def test_stopped_while_reading_the_conversation_stays_usable(target_model, draft_model):
    async with serving(target_model) as address:
        model = SlowReader(draft_model, hold_s=0.1)
        async with conversing(address, model) as talk:
            events = talk.answer(
                PROMPT, sampling=GREEDY, max_new_tokens=40, controller=FixedController(PLANS[0])
            )
            await anext(events)
            await events.aclose()
            _, result = await collect(talk, max_new_tokens=20, plan=PLANS[0])
            _, alone = await collect(talk, max_new_tokens=20, plan=CLOUD)
    assert result.tokens == alone.tokens


@pytest.mark.parametrize("num_before", [0, 1, 3])
async def test_a_lost_connection_with_many_tokens_asked_for(target_model, draft_model, num_before):
    patience = Patience(reconnect=20.0)
    async with serving(target_model) as address:
        relay = Relay(address)
        async with relay.running():
            async with conversing(address, draft_model) as talk:
                _, alone = await collect(talk, sampling=GREEDY, max_new_tokens=40, plan=CLOUD)
            model = SlowReader(draft_model)
            tokens: tuple[int, ...] = ()
            num_emissions = 0
            async with conversing(relay.address, model, patience=patience) as talk:
                if num_before == 0:
                    relay.cut_after(600)
                async for event in talk.answer(
                    PROMPT, sampling=GREEDY, max_new_tokens=40, controller=FixedController(PLANS[1])
                ):
                    if isinstance(event, Result):
                        break
                    tokens += event.tokens
                    num_emissions += 1
                    if num_emissions == num_before:
                        relay.cut()
                    if num_emissions == num_before + 4:
                        model.finish()
                assert talk.traffic.num_reconnects == 1
    assert tokens == event.tokens == alone.tokens
    assert event.counts.num_accepted > 0


async def test_the_controller_bridges_and_learns_how_fast_the_edge_reads(target_model, draft_model):
    prompt = PROMPT * 10
    known = Estimates(round_trip_s=0.001, forward_s=0.05)
    controller = AutoController(estimates=known, max_k=4)
    async with serving(target_model) as address:
        model = SlowReader(draft_model, hold_s=0.2)
        async with conversing(address, model) as talk:
            emissions, _ = await collect(talk, prompt, max_new_tokens=240, controller=controller)
            assert emissions[0].origins == (Origin.CLOUD,)
            read = next(emission.round for emission in emissions if emission.round.num_read)
            assert read.num_read >= len(prompt) - 1
            assert read.read_s >= 0.2
    assert known.read.known
    bridge = AutoController(estimates=known).plan().bridge
    assert bridge is not None
    assert np.isclose(bridge.read_s, known.read.value)
    assert AutoController(estimates=known, allows_cloud=False).plan().bridge is None
