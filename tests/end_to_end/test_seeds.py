"""The same seed gives the same text: again, and beside other sessions; another seed gives another."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

from edge_client.draft_model import DraftModel
from shared.messages import SamplingParams

PROMPT = [256, *b"once upon a time"]
SAMPLING = SamplingParams(temperature=1.0, seed=7)


async def test_same_seed_same_text_alone_and_in_a_batch(
    write: Any, tiny_verifier: str, tiny_draft: Any
) -> None:
    models = [DraftModel.load(tiny_draft, threads=1) for _ in range(6)]

    def answer(number: int, seed: int) -> Any:
        return write(
            tiny_verifier,
            models[number],
            PROMPT,
            sampling=replace(SAMPLING, seed=seed),
            max_new_tokens=60,
            k=4,
        )

    alone = await answer(0, 7)
    again = await answer(0, 7)
    together = await asyncio.gather(*[answer(i, 7 + (i % 3)) for i in range(6)])
    assert again.tokens == alone.tokens
    assert together[0].tokens == together[3].tokens == alone.tokens
    assert together[1].tokens == together[4].tokens
    assert len({result.tokens for result in together}) == 3


async def test_the_verifier_alone_keeps_its_seed_too(
    write: Any, tiny_verifier: str, tiny_model: DraftModel
) -> None:
    texts = [
        (
            await write(
                tiny_verifier,
                tiny_model,
                PROMPT,
                sampling=replace(SAMPLING, seed=seed),
                max_new_tokens=40,
                cloud_only=True,
            )
        ).tokens
        for seed in (1, 1, 2)
    ]
    assert texts[0] == texts[1] != texts[2]
