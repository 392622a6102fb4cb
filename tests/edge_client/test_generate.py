"""The loop against a real verifier: exact text, exact ends, invariants after every round."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np
import pytest
from edge_support import CLOUD, GREEDY, PROMPT, WrappedDraft, collect, conversing, serving

from cloud_verifier.passes import StepEmulation
from cloud_verifier.registry import EngineLimits
from edge_client.connection import Verifier
from edge_client.controller import FixedController, Plan
from edge_client.draft_model import DraftModel
from edge_client.generate import Conversation
from edge_client.results import Emission, Origin, Round
from edge_client.settings import SessionSettings
from shared.faults import FaultKind, SpecwireError
from shared.messages import FinishReason, SamplingParams

SAMPLED = SamplingParams(temperature=1.0, seed=11)
PLANS = [Plan(1), Plan(3), Plan(7), Plan(1, 1), Plan(2, 2), Plan(3, 4), Plan(5, 8)]


@pytest.mark.parametrize("codec", ["lattice", "dense_f32"])
async def test_greedy_text_is_the_clouds_whatever_the_plan(target_model, draft_model, codec):
    async with serving(target_model) as address, conversing(address, draft_model, codec=codec) as talk:
        _, alone = await collect(talk, max_new_tokens=40, plan=CLOUD)
        assert len(alone.tokens) == 40
        assert alone.counts.by_origin[Origin.CLOUD] == 40
        for plan in PLANS:
            emissions, result = await collect(talk, max_new_tokens=40, plan=plan)
            assert result.tokens == alone.tokens
            assert tuple(t for e in emissions for t in e.tokens) == result.tokens
            assert result.finish_reason is FinishReason.LENGTH
            # The pair agrees often and not always, or this test would say little.
            assert 0 < result.counts.num_accepted < result.counts.num_drafted


class WatchedDraft(WrappedDraft):
    """The tiny draft with a random bias on its logits, so that acceptance follows no pattern."""

    def __init__(self, model: DraftModel, seed: int) -> None:
        super().__init__(model)
        self._random = np.random.default_rng(seed)

    def feed(self, tokens):
        logits = super().feed(tokens)
        scale = self._random.choice([0.0, 0.3, 5.0])
        return logits + scale * self._random.standard_normal(len(logits)).astype(np.float32)


@pytest.mark.parametrize("seed", range(6))
async def test_invariants_after_every_round(target_model, draft_model, seed):
    model = WatchedDraft(draft_model, seed)
    draws = np.random.default_rng(seed)

    class Restless:
        """Another K every round."""

        def plan(self) -> Plan:
            return Plan(int(draws.integers(1, 7)))

        def observe(self, done) -> None:
            pass

    settings = SessionSettings(draft_model.manifest.tokenizer, (), verification="token")
    full = rejected = 0
    async with (
        serving(target_model) as address,
        Verifier([address], tls=None) as verifier,
        Conversation(verifier, await verifier.describe(), model, settings) as talk,
    ):
        length = len(PROMPT)
        async for event in talk.answer(PROMPT, sampling=SAMPLED, max_new_tokens=60, controller=Restless()):
            if not isinstance(event, Emission):
                break
            done = event.round
            length += len(event.tokens)
            assert len(talk.committed) == length
            assert talk._drafter.sequence == list(talk.committed)
            assert len(event.tokens) == done.num_accepted + 1 or length == len(PROMPT) + 60
            if done.num_accepted == done.num_drafted:
                full += 1
                assert model.kv_len == length - (2 if len(event.tokens) > done.num_accepted else 1)
                assert event.origins[-1] in (Origin.BONUS, Origin.ACCEPTED)
            else:
                rejected += 1
                assert model.kv_len == length - 1
                assert event.origins == (Origin.ACCEPTED,) * done.num_accepted + (Origin.RECOVERED,)
        # The verifier's own prefix, token by token, as a resuming client is told.
        stream = await verifier.connect(address, "peek")
        await stream.write(replace(talk._session._open_request(), committed_len=len(PROMPT)))
        opened, _ = await stream.read()
        assert opened.tokens == talk.committed[len(PROMPT) :]
        await stream.close(1.0)
    assert full
    assert rejected


class Capricious:
    """Another K, depth and author whenever it is asked, in the middle of what was asked before too."""

    def __init__(self, seed: int) -> None:
        self._draws = np.random.default_rng(seed)

    def plan(self) -> Plan:
        draws = self._draws
        cloud_tokens = int(draws.integers(1, 9)) if draws.random() < 0.4 else 0
        return Plan(int(draws.integers(1, 6)), int(draws.integers(0, 4)), cloud_tokens)

    def observe(self, done: Round) -> None:
        pass

    def explain(self) -> str:
        return "by chance"


@pytest.mark.parametrize(("verification", "sampling"), [("greedy", GREEDY), ("coupled", SAMPLED)])
async def test_plans_that_change_at_any_moment_change_no_text(
    target_model, draft_model, verification, sampling
):
    async with (
        serving(target_model) as address,
        conversing(address, draft_model, verification=verification) as talk,
    ):
        _, alone = await collect(talk, sampling=sampling, max_new_tokens=80, plan=CLOUD)
        for seed in range(8):
            _, result = await collect(talk, sampling=sampling, max_new_tokens=80, controller=Capricious(seed))
            assert result.tokens == alone.tokens
            assert {Origin.ACCEPTED, Origin.CLOUD} <= {o for o, n in result.counts.by_origin.items() if n}


class Alternating:
    """A block that says that another one follows; when it is judged, the verifier writes a token instead."""

    def __init__(self) -> None:
        self._drafts = True

    def plan(self) -> Plan:
        drafts, self._drafts = self._drafts, False
        return Plan(1, 1) if drafts else Plan(cloud_tokens=1)

    def observe(self, done: Round) -> None:
        self._drafts = not done.num_drafted

    def explain(self) -> str:
        return "by turns"


async def test_emulated_time_passes_only_where_something_is_computed(target_model, draft_model):
    emulation = StepEmulation(base_ms=40.0, per_token_ms=0.0)
    async with (
        serving(target_model, emulation=emulation) as address,
        conversing(address, draft_model) as talk,
    ):
        emissions, _ = await collect(talk, max_new_tokens=24, controller=Alternating())
    rounds = [emission.round for emission in emissions]
    # Behind a block that was kept, the verifier still has the row that its next token is drawn from.
    has_row = [False, *(done.more and done.num_accepted == done.num_drafted for done in rounds)]
    assert {False, True} == set(has_row)
    for known, done in zip(has_row, rounds, strict=False):
        assert (done.timing.forward_us < 40_000) is known


@pytest.mark.parametrize("plan", [Plan(1), Plan(4), Plan(2, 3), Plan(6, 1), CLOUD])
async def test_exact_lengths(target_model, draft_model, plan):
    async with serving(target_model) as address, conversing(address, draft_model) as talk:
        _, whole = await collect(talk, max_new_tokens=12, plan=CLOUD)
        for num_tokens in (1, 2, 3, 5, 8, 12):
            _, result = await collect(talk, max_new_tokens=num_tokens, plan=plan)
            assert result.tokens == whole.tokens[:num_tokens]
            assert result.finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("plan", [Plan(1), Plan(5), Plan(3, 3), Plan(8, 1), CLOUD])
async def test_stops_at_eos_wherever_it_falls(target_model, draft_model, plan):
    async with serving(target_model) as address:
        async with conversing(address, draft_model) as talk:
            _, whole = await collect(talk, max_new_tokens=30, plan=CLOUD)
        for eos in dict.fromkeys(whole.tokens[:12]):
            async with conversing(address, draft_model, eos_ids=(eos,)) as talk:
                _, result = await collect(talk, max_new_tokens=30, plan=plan)
            assert result.tokens == whole.tokens[: whole.tokens.index(eos) + 1]
            assert result.finish_reason is FinishReason.STOP


@pytest.mark.parametrize("allow_generate", [True, False])
async def test_goes_on_past_the_drafts_context(target_model, tiny_draft, allow_generate):
    short = DraftModel.load(tiny_draft, threads=1, max_context=len(PROMPT) + 9)
    async with serving(target_model) as address, conversing(address, short) as talk:
        _, alone = await collect(talk, max_new_tokens=24, plan=CLOUD)
    async with serving(target_model, allow_generate=allow_generate) as address:
        for plan in (Plan(4), Plan(3, 2)):
            async with conversing(address, short) as talk:
                _, result = await collect(talk, max_new_tokens=24, plan=plan)
                assert result.tokens == alone.tokens
                assert (result.counts.by_origin[Origin.CLOUD] > 0) is allow_generate
                # A prompt that is longer than the draft's context from the start.
                _, longer = await collect(talk, PROMPT * 2, max_new_tokens=4, plan=plan)
                assert len(longer.tokens) == 4


async def test_ends_when_the_targets_context_is_full(target_model, draft_model):
    prompt = tuple(i % 200 for i in range(target_model.max_context - 7))
    async with serving(target_model) as address, conversing(address, draft_model) as talk:
        for plan in (Plan(5), Plan(2, 3), CLOUD):
            _, result = await collect(talk, prompt, max_new_tokens=50, plan=plan)
            assert len(result.tokens) == 7
            assert result.finish_reason is FinishReason.LENGTH
        with pytest.raises(SpecwireError, match="leave no room") as caught:
            await collect(talk, (*prompt, *range(7)))
        assert caught.value.kind is FaultKind.CONTEXT_EXCEEDED


@pytest.mark.parametrize("plan", [Plan(4), Plan(3, 3)])
async def test_seeds(target_model, draft_model, plan):
    async with serving(target_model) as address, conversing(address, draft_model) as talk:
        texts = [(await collect(talk, sampling=SAMPLED, plan=plan))[1].tokens for _ in range(2)]
        await talk.reset()
        texts.append((await collect(talk, sampling=SAMPLED, plan=plan))[1].tokens)
        other = (await collect(talk, sampling=SamplingParams(temperature=1.0, seed=12), plan=plan))[1].tokens
    assert len(set(texts)) == 1
    assert other != texts[0]


async def test_a_second_turn_sends_only_what_is_new(target_model, draft_model):
    async with serving(target_model) as address, conversing(address, draft_model) as talk:
        prompt = PROMPT * 8
        _, first = await collect(talk, prompt, plan=Plan(4))
        session = talk._session
        turn = (*talk.committed, 61, 62, 63)
        fed = []
        model_feed = draft_model.feed

        def feed(tokens):
            fed.append(len(tokens))
            return model_feed(tokens)

        talk._drafter._model.feed = feed
        try:
            _, second = await collect(talk, turn, plan=Plan(4))
        finally:
            del talk._drafter._model.feed
        assert talk._session is session
        assert max(fed) <= 5
        assert second.up_bytes < first.up_bytes
        await talk.reset()
        _, afresh = await collect(talk, turn, plan=CLOUD)
    assert second.tokens == afresh.tokens


async def test_stopping_an_answer_frees_the_verifier_and_leaves_the_conversation_usable(
    target_model, draft_model
):
    async with (
        serving(target_model) as address,
        Verifier([address], tls=None) as verifier,
        conversing(address, draft_model) as talk,
    ):
        _, whole = await collect(talk, max_new_tokens=40, plan=Plan(2, 3))
        events = talk.answer(
            PROMPT, sampling=GREEDY, max_new_tokens=400, controller=FixedController(Plan(2, 3))
        )
        async for _ in events:
            break
        await events.aclose()
        await _until_idle(verifier)
        _, again = await collect(talk, max_new_tokens=40, plan=Plan(2, 3))
        assert again.tokens == whole.tokens

        async def endless() -> None:
            await collect(talk, max_new_tokens=450, plan=CLOUD)

        task = asyncio.create_task(endless())
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await _until_idle(verifier)


@pytest.mark.parametrize("plan", [Plan(4), Plan(2, 3), Plan(1, 8)])
async def test_what_was_in_flight_when_an_answer_is_stopped_was_sent_for_nothing(
    target_model, draft_model, plan
):
    """To the byte: Open, the blocks that were judged and the wasted ones are all that goes up."""
    stopped_in_flight = 0
    async with serving(target_model) as address:
        async with conversing(address, draft_model) as talk:
            emissions, result = await collect(talk, max_new_tokens=40)
            open_bytes = result.up_bytes - sum(emission.round.up_bytes for emission in emissions)
        for num_rounds in range(1, 7):
            async with conversing(address, draft_model) as talk:
                events = talk.answer(
                    PROMPT, sampling=GREEDY, max_new_tokens=40, controller=FixedController(plan)
                )
                judged = sum([(await anext(events)).round.up_bytes for _ in range(num_rounds)])
                traffic, stopped = talk.traffic, talk._session.num_unanswered
                stale = traffic.num_stale_blocks
                await events.aclose()
                assert traffic.up_bytes == open_bytes + judged + traffic.wasted_up_bytes
                assert traffic.num_stale_blocks == stale + stopped
                stopped_in_flight += stopped
    assert (stopped_in_flight > 0) is (plan.ahead > 0)


async def _until_idle(verifier: Verifier) -> None:
    for _ in range(400):
        if (await verifier.describe()).load.num_sessions == 0:
            return
        await asyncio.sleep(0.01)
    raise AssertionError("the verifier still holds a session")


async def test_figures_add_up(target_model, draft_model):
    async with serving(target_model) as address, conversing(address, draft_model) as talk:
        for plan in (Plan(4), Plan(2, 3)):
            emissions, result = await collect(talk, sampling=SAMPLED, max_new_tokens=60, plan=plan)
            counts, share = result.counts, result.time_share
            assert sum(counts.by_origin.values()) == len(result.tokens) == 60
            assert counts.num_accepted == sum(counts.accepted_at) == counts.by_origin[Origin.ACCEPTED]
            assert counts.num_drafted == sum(counts.drafted_at)
            assert counts.num_rounds == len(emissions)
            parts = [getattr(share, name) for name in share.__dataclass_fields__]
            assert min(parts) >= 0
            assert sum(parts) == pytest.approx(result.total_s, rel=0.05)
            assert result.first_token_s < result.total_s
            if plan.ahead:
                assert result.num_stale_blocks > 0
                assert 0 < result.wasted_up_bytes < result.up_bytes
            else:
                assert result.wasted_up_bytes == 0


async def test_no_more_blocks_in_flight_than_the_verifier_takes(target_model, draft_model):
    limits = EngineLimits(max_in_flight=2)
    async with serving(target_model, limits=limits) as address, conversing(address, draft_model) as talk:
        _, alone = await collect(talk, plan=CLOUD)
        _, result = await collect(talk, plan=Plan(1, 12))
    assert result.tokens == alone.tokens


async def test_longer_blocks_than_granted_are_cut(target_model, draft_model):
    limits = EngineLimits(max_block=2)
    async with serving(target_model, limits=limits) as address, conversing(address, draft_model) as talk:
        emissions, _ = await collect(talk, plan=Plan(9))
    assert max(emission.round.num_drafted for emission in emissions) == 2


@pytest.mark.parametrize(
    ("settings", "sampling", "kind"),
    [
        ({"codec": "dense_f16", "verification": "nonsense"}, GREEDY, FaultKind.UNKNOWN_VERIFICATION),
        ({"verification": "greedy"}, SAMPLED, FaultKind.BAD_SAMPLING),
        ({"codec": "tokens", "verification": "block"}, SAMPLED, FaultKind.BAD_REQUEST),
        ({}, SamplingParams(top_p=2.0), FaultKind.BAD_SAMPLING),
    ],
)
async def test_what_the_verifier_refuses_is_said_once_and_ends(
    target_model, draft_model, settings, sampling, kind
):
    async with serving(target_model) as address, conversing(address, draft_model, **settings) as talk:
        with pytest.raises(SpecwireError) as caught:
            await collect(talk, sampling=sampling)
    assert caught.value.kind is kind
    assert caught.value.remedy


async def test_who_never_drafts_needs_no_codec_that_carries_distributions(target_model, draft_model):
    settings = {"codec": "tokens", "verification": "block"}
    async with serving(target_model) as address:
        async with conversing(address, draft_model, draft=False, **settings) as talk:
            _, alone = await collect(talk, sampling=SAMPLED, plan=CLOUD)
        async with conversing(address, draft_model, **settings) as talk:  # nor does who decodes greedily
            _, greedy = await collect(talk, plan=Plan(3))
    assert len(alone.tokens) == len(greedy.tokens) == 24


async def test_two_conversations_do_not_mix(target_model, draft_model, tiny_draft):
    other_model = DraftModel.load(tiny_draft, threads=1)
    other_prompt = tuple(reversed(PROMPT))
    async with (
        serving(target_model) as address,
        conversing(address, draft_model) as one,
        conversing(address, other_model) as two,
    ):
        _, first = await collect(one, plan=CLOUD)
        _, second = await collect(two, other_prompt, plan=CLOUD)
        together = await asyncio.gather(
            collect(one, plan=Plan(3, 2)), collect(two, other_prompt, plan=Plan(4))
        )
    assert together[0][1].tokens == first.tokens
    assert together[1][1].tokens == second.tokens
