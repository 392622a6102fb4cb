"""Edge only: the draft goes on alone where that is allowed, every token of it is marked, and none is kept as
the target's."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import pytest
from edge_support import GREEDY, PROMPT, Relay, collect, serving

from cloud_verifier.target_model import TargetModel
from edge_client.connection import Patience, Verifier
from edge_client.controller import FixedController, Plan
from edge_client.draft_model import DraftModel
from edge_client.drafting import Drafter
from edge_client.generate import Conversation
from edge_client.results import Emission, Loss, Origin, Result
from edge_client.settings import SessionSettings
from shared.codecs import get_codec
from shared.faults import FaultKind, SpecwireError
from shared.messages import FinishReason, SamplingParams

PATIENCE = Patience(connect=5, reconnect=0.3)
NOBODY = "127.0.0.1:9"
EOS = 257


@asynccontextmanager
async def conversing(
    address: str,
    model: DraftModel,
    *,
    fallback: bool = True,
    eos_ids: tuple[int, ...] = (),
    met: bool = True,
    notices: list[str] | None = None,
) -> AsyncIterator[Conversation]:
    notify = notices.append if notices is not None else None
    async with Verifier([address], tls=None, patience=PATIENCE, notify=notify) as verifier:
        description = await verifier.describe() if met else None
        settings = SessionSettings(model.manifest.tokenizer, eos_ids, edge_only_fallback=fallback)
        async with Conversation(verifier, description, model, settings) as conversation:
            yield conversation


@asynccontextmanager
async def relayed(
    target: TargetModel, draft: DraftModel, **settings
) -> AsyncIterator[tuple[Conversation, Relay]]:
    """A conversation with a verifier behind a relay that can be cut."""
    async with (
        serving(target) as address,
        Relay(address).running() as relay,
        conversing(relay.address, draft, **settings) as conversation,
    ):
        yield conversation, relay


def drafts_alone(
    model: DraftModel, tokens: tuple[int, ...], count: int, sampling: SamplingParams, eos_ids=()
) -> list[int]:
    """What the draft writes after `tokens`, token by token."""
    drafter = Drafter(model, get_codec("lattice"), model.manifest.tokenizer.size, eos_ids)
    drafter.begin(tokens, sampling, len(tokens) + count)
    while drafter.room():
        assert drafter.draft(1) is not None
    return drafter.sequence[len(tokens) :]


async def until_lost(
    conversation: Conversation, relay: Relay, after: int, plan: Plan | None = None, **answer
) -> Result:
    """An answer whose verifier goes for good after `after` emissions."""
    seen = 0
    events = conversation.answer(PROMPT, controller=FixedController(plan or Plan(k=3)), **answer)
    async for event in events:
        if isinstance(event, Result):
            return event
        seen += 1
        if seen == after:
            relay.refusing = True
            relay.cut()
    raise RuntimeError("the answer had no end")


@pytest.mark.parametrize("temperature", [0.0, 0.8])
async def test_before_the_first_verifier_the_draft_writes_alone(draft_model, temperature):
    sampling = SamplingParams(temperature=temperature, seed=3)
    async with conversing(NOBODY, draft_model, met=False) as conversation:
        emissions, result = await collect(conversation, sampling=sampling)
        assert not conversation.has_met
    assert list(result.tokens) == drafts_alone(draft_model, PROMPT, 24, sampling)
    assert result.losses == {Loss.EDGE_ONLY}
    assert result.finish_reason is FinishReason.LENGTH
    assert result.counts.by_origin[Origin.EDGE_ONLY] == 24
    assert result.up_bytes == 0
    assert all(emission.is_edge_only for emission in emissions)
    assert all(set(emission.origins) == {Origin.EDGE_ONLY} for emission in emissions)


async def test_never_unasked(target_model, draft_model):
    async with conversing(NOBODY, draft_model, met=False, fallback=False) as conversation:
        with pytest.raises(SpecwireError) as caught:
            await collect(conversation)
        assert caught.value.kind is FaultKind.UNAVAILABLE
    async with relayed(target_model, draft_model, fallback=False) as (conversation, relay):
        with pytest.raises(SpecwireError):
            await until_lost(conversation, relay, 2, sampling=GREEDY, max_new_tokens=60)


@pytest.mark.parametrize("plan", [Plan(k=3), Plan(k=3, ahead=3), Plan(k=1, ahead=8)])
@pytest.mark.parametrize("after", [1, 3])
async def test_lost_in_the_middle_it_goes_on_from_what_is_committed(target_model, draft_model, after, plan):
    notices: list[str] = []
    async with relayed(target_model, draft_model, notices=notices) as (conversation, relay):
        _, exact = await collect(conversation, max_new_tokens=60, plan=Plan(k=3))
        await conversation.reset()
        result = await until_lost(conversation, relay, after, plan, sampling=GREEDY, max_new_tokens=60)
        assert conversation.committed == ()
        assert conversation.history == (*PROMPT, *result.tokens)
    num_alone = result.counts.by_origin[Origin.EDGE_ONLY]
    assert 0 < num_alone < 60 == len(result.tokens)
    kept = result.tokens[: 60 - num_alone]
    assert kept == exact.tokens[: len(kept)]
    assert list(result.tokens[len(kept) :]) == drafts_alone(draft_model, (*PROMPT, *kept), num_alone, GREEDY)
    assert result.losses == {Loss.EDGE_ONLY}
    assert "edge only" in notices[-1]


async def test_the_next_turn_opens_a_session_with_it_in_the_prompt_and_says_so(target_model, draft_model):
    async with relayed(target_model, draft_model) as (conversation, relay):
        lost = await until_lost(conversation, relay, 2, sampling=GREEDY, max_new_tokens=40)
        relay.refusing = False
        turn = (*conversation.history, 50, 51)
        assert turn == (*PROMPT, *lost.tokens, 50, 51)
        second = await once_back(conversation, turn)
        # The verifier judged every token of this answer, but what it follows is not the target's.
        assert second.counts.by_origin[Origin.EDGE_ONLY] == 0
        assert second.losses == {Loss.PROMPT}
        assert conversation.committed[: len(turn)] == turn
        third = (await collect(conversation, (*conversation.committed, 52)))[1]
        assert third.losses == {Loss.PROMPT}
        # Regenerated from the same prompt, nothing of it is left.
        again = (await collect(conversation, PROMPT))[1]
        assert again.losses == frozenset()
        await conversation.reset()
        assert (await collect(conversation, turn))[1].tokens == second.tokens


async def test_a_stopped_answer_marks_the_turn_that_holds_what_was_read_of_it(draft_model):
    async with conversing(NOBODY, draft_model, met=False) as conversation:
        events = conversation.answer(
            PROMPT, sampling=GREEDY, max_new_tokens=20, controller=FixedController(Plan())
        )
        first = [await anext(events) for _ in range(3)]
        await events.aclose()
        assert conversation.history == ()
        read = tuple(token for event in first[:2] if isinstance(event, Emission) for token in event.tokens)
        told = (await collect(conversation, (*PROMPT, *read, 50)))[1]
        assert told.losses == {Loss.PROMPT, Loss.EDGE_ONLY}
        assert (await collect(conversation, (*PROMPT, 50)))[1].losses == {Loss.EDGE_ONLY}


async def test_settings_hold_alone(draft_model):
    """Seed, end, penalties and bias are the same draft's with the same transforms."""
    async with conversing(NOBODY, draft_model, met=False, eos_ids=(EOS,)) as conversation:
        warm = SamplingParams(temperature=1.0, seed=5)
        texts = [(await collect(conversation, sampling=warm))[1].tokens for _ in range(2)]
        assert texts[0] == texts[1]
        other = (await collect(conversation, sampling=SamplingParams(temperature=1.0, seed=6)))[1].tokens
        assert other != texts[0]
        forced = SamplingParams(logit_bias={EOS: 100.0}, min_tokens=4)
        ended = (await collect(conversation, sampling=forced))[1]
        assert ended.finish_reason is FinishReason.STOP
        assert ended.tokens[-1] == EOS
        assert len(ended.tokens) == 5
        bias = {40: 100.0, 41: 100.0}
        plain = (await collect(conversation, sampling=SamplingParams(logit_bias=bias)))[1].tokens
        varied = SamplingParams(logit_bias=bias, frequency_penalty=2.0)
        penalised = (await collect(conversation, sampling=varied))[1].tokens
        assert set(plain) | set(penalised) <= {40, 41}
        assert abs(penalised.count(40) - 12) < abs(plain.count(40) - 12)


async def test_it_ends_with_the_drafts_context(draft_model):
    async with conversing(NOBODY, draft_model, met=False) as conversation:
        room = draft_model.max_context - len(PROMPT)
        result = (await collect(conversation, max_new_tokens=room + 50))[1]
        assert result.finish_reason is FinishReason.LENGTH
        assert len(result.tokens) == room


async def once_back(conversation: Conversation, tokens: tuple[int, ...]) -> Result:
    """An answer by the verifier, as soon as the channel has noticed that it is there again."""
    for _ in range(50):
        with suppress(SpecwireError):
            result = (await collect(conversation, tokens))[1]
            if Loss.EDGE_ONLY not in result.losses:
                return result
    raise AssertionError("the verifier was not found again")
