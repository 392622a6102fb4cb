"""A real verifier in a process of its own, real gRPC, and a client that writes answers with it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from cloud_verifier.local import local_verifier
from edge_client.confidence import Ending
from edge_client.connection import Verifier
from edge_client.controller import FixedController, Plan
from edge_client.draft_model import DraftModel
from edge_client.drafting import Model
from edge_client.generate import Conversation
from edge_client.results import Result
from edge_client.settings import SessionSettings
from shared.messages import SamplingParams

GREEDY = SamplingParams()
Write = Callable[..., Awaitable[Result]]
Job = tuple[Sequence[int], dict[str, Any]]


@pytest.fixture(scope="session")
def builtin_verifier(target_dir: Path) -> Iterator[str]:
    """Address of a verifier of the built-in target in float32."""
    with local_verifier("--target", str(target_dir), "--dtype", "float32") as address:
        yield address


@pytest.fixture(scope="session")
def tiny_verifier(tiny_target: Path) -> Iterator[str]:
    """Address of a verifier of the tiny random target in float32, which tries eight siblings a token."""
    with local_verifier("--target", str(tiny_target), "--dtype", "float32", "--siblings", "8") as address:
        yield address


@pytest.fixture(scope="session")
def builtin_model(draft_dir: Path) -> DraftModel:
    return DraftModel.load(draft_dir, threads=1)


@pytest.fixture(scope="session")
def tiny_model(tiny_draft: Path) -> DraftModel:
    return DraftModel.load(tiny_draft, threads=1)


async def _write(
    verifier: Verifier,
    model: DraftModel,
    prompt: Sequence[int],
    *,
    sampling: SamplingParams = GREEDY,
    max_new_tokens: int = 32,
    k: int = 5,
    ahead: int = 0,
    ending: Ending | None = None,
    codec: str = "lattice",
    verification: str = "token",
    eos_ids: tuple[int, ...] = (),
    cloud_only: bool = False,
    drafter: Callable[[], Model] | None = None,
) -> Result:
    """One answer; `drafter` makes what drafts in the model's place, with its tokenizer."""
    settings = SessionSettings(
        model.manifest.tokenizer, eos_ids, codec=codec, verification=verification, client="test"
    )
    plan = Plan(cloud_tokens=max_new_tokens) if cloud_only else Plan(k=k, ahead=ahead, ending=ending)
    description = await verifier.describe()
    used = None if cloud_only else drafter() if drafter else model
    async with Conversation(verifier, description, used, settings) as conversation:
        async for event in conversation.answer(
            prompt, sampling=sampling, max_new_tokens=max_new_tokens, controller=FixedController(plan)
        ):
            if isinstance(event, Result):
                return event
    raise RuntimeError("the answer had no end")


@pytest.fixture(scope="session")
def write() -> Write:
    """`await write(address, model, prompt, ...)` gives one answer's result."""

    async def run(address: str, model: DraftModel, prompt: Sequence[int], **settings: Any) -> Result:
        async with Verifier([address], tls=None) as verifier:
            return await _write(verifier, model, prompt, **settings)

    return run


@pytest.fixture(scope="session")
def write_many() -> Callable[..., list[Result]]:
    """Runs many answers over one channel, one at a time on each model; keeps their order.

    `write_many(address, models, [(prompt, settings), ...])`.
    """

    def run(address: str, models: Sequence[DraftModel], jobs: Sequence[Job]) -> list[Result]:
        async def all_of_them() -> list[Result]:
            free: asyncio.Queue[DraftModel] = asyncio.Queue()
            for model in models:
                free.put_nowait(model)

            async def one(prompt: Sequence[int], settings: dict[str, Any]) -> Result:
                model = await free.get()
                try:
                    return await _write(verifier, model, prompt, **settings)
                finally:
                    free.put_nowait(model)

            async with Verifier([address], tls=None) as verifier:
                return await asyncio.gather(*[one(prompt, settings) for prompt, settings in jobs])

        return asyncio.run(all_of_them())

    return run
