"""An edge client inside a benchmark: one draft model, one verifier, timed answers."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

from cloud_verifier.benchmarks.baseline import Timed
from edge_client.chat_template import render
from edge_client.connection import Patience, Verifier
from edge_client.controller import Controller
from edge_client.draft_model import DraftModel
from edge_client.generate import Conversation
from edge_client.manifest import TOKENIZER_NAME
from edge_client.results import Emission, Result
from edge_client.settings import SessionSettings
from shared.messages import Description, SamplingParams


@dataclass(frozen=True, slots=True)
class TimedAnswer:
    """An answer with the times of its tokens and all that the client counted."""

    timed: Timed
    result: Result
    emissions: tuple[Emission, ...]
    arrivals_s: tuple[float, ...]  # of each emission, after the request


class BenchEdge:
    """Drafts for one verifier at `address`. Every answer is a session of its own.

    Unless `eos_ids` are given, every answer has exactly the length asked for. The verification is the
    verifier's first choice unless another is named.
    """

    def __init__(self, draft: Path, address: str, *, threads: int = 0) -> None:
        self.model = DraftModel.load(draft, threads=threads)
        self._tokenizer = Tokenizer.from_file(str(draft / TOKENIZER_NAME))
        # Some links stall for seconds; an answer that never began would say nothing about its schedule.
        self._verifier = Verifier([address], tls=None, patience=Patience(connect=30.0))

    def encode_chat(self, text: str) -> list[int]:
        """One user turn through the model's chat template."""
        prompt = render(self.model.manifest, [{"role": "user", "content": text}])
        return list(self._tokenizer.encode(prompt, add_special_tokens=False).ids)

    async def describe(self) -> Description:
        return await self._verifier.describe()

    async def ask(self) -> tuple[Description, float]:
        """What the verifier serves, and the seconds that asking took on an open connection."""
        await self._verifier.describe()
        started = time.perf_counter()
        return await self._verifier.describe(), time.perf_counter() - started

    async def answer(
        self,
        prompt: Sequence[int],
        max_new_tokens: int,
        *,
        sampling: SamplingParams,
        controller: Controller,
        codec: str = "lattice",
        verification: str = "",
        drafting: bool = True,
        eos_ids: tuple[int, ...] = (),
    ) -> TimedAnswer:
        description = await self._verifier.describe()
        settings = SessionSettings(
            self.model.manifest.tokenizer,
            eos_ids,
            codec=codec,
            verification=verification or description.verifications[0],
            client="bench",
        )
        emissions: list[Emission] = []
        arrivals: list[float] = []
        async with Conversation(
            self._verifier, description, self.model if drafting else None, settings
        ) as conversation:
            started = time.perf_counter()
            async for event in conversation.answer(
                prompt, sampling=sampling, max_new_tokens=max_new_tokens, controller=controller
            ):
                if isinstance(event, Emission):
                    arrivals.append(time.perf_counter() - started)
                    emissions.append(event)
                else:
                    result: Result = event
        timed = Timed(result.tokens, arrivals[0], arrivals[-1], len(emissions[0].tokens))
        return TimedAnswer(timed, result, tuple(emissions), tuple(arrivals))

    async def close(self) -> None:
        await self._verifier.__aexit__(None, None, None)
