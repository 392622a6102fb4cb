"""What only some rules promise, over real gRPC: coupled text is the target's own; penalties act on both."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from edge_client.draft_model import DraftModel
from shared.messages import SamplingParams

PROMPT = [256, *b"to be or not"]
PENALISED = SamplingParams(
    repetition_penalty=1.3,
    presence_penalty=0.4,
    frequency_penalty=0.3,
    logit_bias={101: 1.5, 32: -2.0},
    min_tokens=8,
    bad_words=((116, 104), (110,)),
)


async def answer(write: Any, address: str, model: DraftModel, **settings: Any) -> tuple[int, ...]:
    return (await write(address, model, PROMPT, max_new_tokens=48, **settings)).tokens


@pytest.mark.parametrize("temperature", [0.7, 1.0])
@pytest.mark.parametrize(("k", "ahead"), [(1, 0), (4, 0), (7, 0), (3, 2)])
async def test_coupled_text_is_the_one_that_the_target_writes_alone(
    write: Any, tiny_verifier: str, tiny_model: DraftModel, temperature: float, k: int, ahead: int
) -> None:
    sampling = SamplingParams(temperature=temperature, seed=3)
    alone = await answer(
        write, tiny_verifier, tiny_model, sampling=sampling, verification="coupled", cloud_only=True
    )
    other = await answer(
        write,
        tiny_verifier,
        tiny_model,
        sampling=replace(sampling, seed=4),
        verification="coupled",
        cloud_only=True,
    )
    together = await answer(
        write, tiny_verifier, tiny_model, sampling=sampling, verification="coupled", k=k, ahead=ahead
    )
    assert together == alone != other


async def test_coupled_drafts_are_mostly_accepted(
    write: Any, tiny_verifier: str, tiny_model: DraftModel
) -> None:
    """Both sides draw with the same noise; independent draws would rarely agree."""
    sampling = SamplingParams(temperature=1.0, seed=3)
    coupled, token = [
        await write(
            tiny_verifier, tiny_model, PROMPT, sampling=sampling, verification=rule, max_new_tokens=200, k=4
        )
        for rule in ("coupled", "token")
    ]
    assert coupled.acceptance > 0.6 * token.acceptance
    assert coupled.up_bytes < token.up_bytes


@pytest.mark.parametrize("verification", ["token", "block", "greedy", "coupled"])
@pytest.mark.parametrize("ahead", [0, 2])
async def test_penalised_speculation_is_the_penalised_target(
    write: Any, tiny_verifier: str, tiny_model: DraftModel, verification: str, ahead: int
) -> None:
    eos = tiny_model.manifest.eos_ids
    alone = await answer(write, tiny_verifier, tiny_model, sampling=PENALISED, cloud_only=True, eos_ids=eos)
    plain = await answer(write, tiny_verifier, tiny_model, cloud_only=True, eos_ids=eos)
    together = await answer(
        write,
        tiny_verifier,
        tiny_model,
        sampling=PENALISED,
        verification=verification,
        ahead=ahead,
        eos_ids=eos,
    )
    assert together == alone != plain
    assert len(together) >= 8
    assert 110 not in together
