"""What only some rules promise, over real gRPC: coupled text is the target's own; penalties act on both."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from bad_draft import BadDraft

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


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(temperature=0.7, seed=3),
        SamplingParams(temperature=1.0, seed=3),
        SamplingParams(temperature=0.8, top_k=40, top_p=0.9, seed=3),
    ],
    ids=["sharp", "plain", "cut"],
)
@pytest.mark.parametrize(
    ("draft", "k", "ahead"),
    [
        ("good", 1, 0),
        ("good", 4, 0),
        ("good", 7, 0),
        ("good", 3, 2),
        ("bad", 4, 0),
        ("bad", 3, 2),
    ],
)
async def test_coupled_text_is_the_one_that_the_target_writes_alone(
    write: Any,
    tiny_verifier: str,
    tiny_model: DraftModel,
    sampling: SamplingParams,
    draft: str,
    k: int,
    ahead: int,
) -> None:
    drafter = (lambda: BadDraft(tiny_model.manifest.vocab_size)) if draft == "bad" else None

    async def coupled(sampling: SamplingParams, **settings: Any) -> tuple[int, ...]:
        return await answer(
            write, tiny_verifier, tiny_model, sampling=sampling, verification="coupled", **settings
        )

    alone = await coupled(sampling, cloud_only=True)
    other = await coupled(replace(sampling, seed=4), cloud_only=True)
    together = await coupled(sampling, k=k, ahead=ahead, drafter=drafter)
    assert together == alone != other


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_so_it_is_with_the_built_in_pair(
    write: Any, builtin_verifier: str, builtin_model: DraftModel
) -> None:
    settings = {
        "sampling": SamplingParams(temperature=1.0, seed=3),
        "verification": "coupled",
        "max_new_tokens": 96,
    }
    alone = await write(builtin_verifier, builtin_model, [504, 2159], cloud_only=True, **settings)
    together = await write(builtin_verifier, builtin_model, [504, 2159], k=5, ahead=2, **settings)
    assert together.tokens == alone.tokens
    assert 0 < together.counts.num_accepted < together.counts.num_drafted


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


@pytest.mark.parametrize(
    ("verification", "temperature"),
    [("token", 0.0), ("block", 0.0), ("greedy", 0.0), ("coupled", 0.0), ("coupled", 0.8)],
)
@pytest.mark.parametrize("ahead", [0, 2])
async def test_penalised_speculation_is_the_penalised_target(
    write: Any, tiny_verifier: str, tiny_model: DraftModel, verification: str, temperature: float, ahead: int
) -> None:
    sampling = replace(PENALISED, temperature=temperature, seed=3)

    async def written(sampling: SamplingParams, **settings: Any) -> tuple[int, ...]:
        return await answer(
            write,
            tiny_verifier,
            tiny_model,
            sampling=sampling,
            verification=verification,
            eos_ids=tiny_model.manifest.eos_ids,
            **settings,
        )

    alone = await written(sampling, cloud_only=True)
    plain = await written(SamplingParams(temperature=temperature, seed=3), cloud_only=True)
    together = await written(sampling, ahead=ahead)
    assert together == alone != plain
    assert len(together) >= 8
    assert 110 not in together
