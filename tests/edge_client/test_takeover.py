"""A verifier that is killed or drained in the middle of an answer, and another that takes over."""

from __future__ import annotations

import asyncio
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from edge_support import CLOUD, PROMPT, conversing
from verifier_process import VerifierProcess

from edge_client.connection import Patience
from edge_client.controller import FixedController, Plan
from edge_client.draft_model import DraftModel
from edge_client.results import Result
from shared.messages import SamplingParams
from shared.transport import Tls

sys.path.append(str(Path(__file__).parents[2] / "deploy"))
from certs import write_certificates

NUM_TOKENS = 48
PASS_MS = 10.0
SAMPLED = SamplingParams(temperature=1.0, seed=3)
HASTY = Patience(connect=2.0, reconnect=20.0)
PLANS = (Plan(3), Plan(2, 3), CLOUD)


@dataclass(slots=True)
class End:
    """What happens to the first verifier: `delay_s` after `num_tokens` have come, `how` is called."""

    how: Callable[[], object]
    num_tokens: int
    delay_s: float
    num_unanswered: int = 0


async def write(
    addresses: Sequence[str],
    model: DraftModel,
    plan: Plan,
    end: End | None = None,
    tls: Tls | None = None,
    prompt: Sequence[int] = PROMPT,
) -> Result:
    async with conversing(addresses, model, patience=HASTY, tls=tls) as talk:
        ending: asyncio.Task[None] | None = None

        async def come_to_an_end() -> None:
            await asyncio.sleep(end.delay_s)
            end.num_unanswered = talk._session.num_unanswered
            end.how()

        num_tokens = 0
        async for event in talk.answer(
            prompt, sampling=SAMPLED, max_new_tokens=NUM_TOKENS, controller=FixedController(plan)
        ):
            if isinstance(event, Result):
                return event
            num_tokens += len(event.tokens)
            if end is not None and ending is None and num_tokens >= end.num_tokens:
                ending = asyncio.create_task(come_to_an_end())
    raise RuntimeError("the answer had no end")


async def test_an_answer_survives_a_verifier_killed_at_ten_random_moments(tiny_target, draft_model):
    draws = random.Random(5)
    ends: list[End] = []
    num_taken_over = 0
    async with VerifierProcess(tiny_target, pass_ms=PASS_MS).running() as survivor:
        whole = [await write([survivor.address], draft_model, plan) for plan in PLANS]
        for moment in range(10):
            plan, expected = PLANS[moment % len(PLANS)], whole[moment % len(PLANS)]
            async with VerifierProcess(tiny_target, pass_ms=PASS_MS).running() as victim:
                at, delay_s = draws.randrange(1, NUM_TOKENS // 2), draws.random() * 2e-3 * PASS_MS
                ends.append(End(victim.kill, at, delay_s))
                result = await write([victim.address, survivor.address], draft_model, plan, ends[-1])
            assert result.tokens == expected.tokens
            num_taken_over += result.num_reconnects > 0
    assert num_taken_over >= 8  # whatever came too late had all of the answer on its way
    assert max(end.num_unanswered for end in ends) > 1


async def test_the_built_in_pair_survives_it_too(target_dir, draft_dir):
    draws = random.Random(4)
    plan = Plan(3, 2)
    model = DraftModel.load(draft_dir, threads=1)
    prompt = [1, *range(5000, 5030)]
    first, second = VerifierProcess(target_dir), VerifierProcess(target_dir)
    async with first.running() as survivor, second.running() as victim:
        whole = await write([survivor.address], model, plan, prompt=prompt)
        end = End(victim.kill, draws.randrange(1, NUM_TOKENS // 2), draws.random() * 0.1)
        result = await write([victim.address, survivor.address], model, plan, end, prompt=prompt)
    assert result.tokens == whole.tokens
    assert result.num_reconnects


@pytest.mark.parametrize("over_tls", [False, True])
async def test_a_verifier_told_to_stop_is_left_without_a_break(tiny_target, draft_model, over_tls, tmp_path):
    server = client = None
    if over_tls:
        write_certificates(tmp_path, ("localhost", "127.0.0.1"))
        server = Tls(cert=tmp_path / "server.pem", key=tmp_path / "server-key.pem")
        client = Tls(ca=tmp_path / "ca.pem")
    plan = Plan(2, 2)
    async with (
        VerifierProcess(tiny_target, pass_ms=PASS_MS, tls=server).running() as second,
        VerifierProcess(tiny_target, pass_ms=PASS_MS, tls=server).running() as first,
    ):
        whole = await write([second.address], draft_model, plan, tls=client)
        leaving: list[asyncio.Task[int | None]] = []
        end = End(lambda: leaving.append(asyncio.create_task(first.drain())), 10, 0.0)
        result = await write([first.address, second.address], draft_model, plan, end, client)
        assert await leaving[0] == 0
    assert result.tokens == whole.tokens
    assert result.num_reconnects == 1  # no second attempt: the user sees no pause
