"""Edge only: the draft goes on alone when no verifier can be reached.

What it writes is not distributed as the target's text, so it does so only where its owner allowed it, and
every token says where it came from (`Origin.EDGE_ONLY`).
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from edge_client.drafting import Block, Drafter
from edge_client.results import Emission, Loss, Origin, Round
from edge_client.session import DisconnectedError, UnansweredError
from shared.faults import FaultKind, SpecwireError
from shared.messages import FinishReason, Timing

NOTICE = "The draft goes on alone: what it writes now is not what the target would have written (edge only)."


@dataclass(frozen=True, slots=True)
class AloneText:
    """A prompt and its answer, which the draft wrote alone from token `start` on.

    `whole` is false for an answer that was stopped: its reader saw less of it.
    """

    tokens: tuple[int, ...]
    start: int
    whole: bool

    def is_in(self, prompt: Sequence[int]) -> bool:
        """Whether `prompt` holds any of what the draft wrote."""
        beginning = self.start + 1
        return len(self.tokens) > self.start and tuple(prompt[:beginning]) == self.tokens[:beginning]


def is_lost(fault: SpecwireError) -> bool:
    """Whether no verifier can be reached, as opposed to one that refuses or a setting that is wrong."""
    return isinstance(fault, DisconnectedError | UnansweredError) or fault.kind is FaultKind.DRAINING


async def write_alone(
    drafter: Drafter, worker: ThreadPoolExecutor, limit: int, eos_ids: Collection[int], lost: SpecwireError
) -> AsyncGenerator[tuple[Emission, FinishReason]]:
    """The draft's own tokens after the drafter's sequence, one by one, to an EOS, `limit` or its context.

    A token's draw depends on the seed and its position only. Close the generator to stop: no thread is then
    at work on it.

    Raises:
        SpecwireError: `lost`, when the draft cannot read what it should continue.
    """
    stopped = threading.Event()
    drafting: Future[Block | None] | None = None
    finish = FinishReason.NONE
    try:
        while finish is FinishReason.NONE:
            block = None
            if drafter.room():
                drafting = worker.submit(drafter.draft, 1, stopped.is_set)
                block = await asyncio.wrap_future(drafting)
            if block is None:
                raise lost
            if block.tokens[-1] in eos_ids:
                finish = FinishReason.STOP
            elif len(drafter.sequence) >= limit or not drafter.room():
                finish = FinishReason.LENGTH
            yield _emission(block), finish
    finally:
        stopped.set()
        if drafting is not None and not drafting.done():
            await asyncio.wait([asyncio.wrap_future(drafting)])


def _emission(block: Block) -> Emission:
    done = Round(
        num_drafted=0,
        num_accepted=0,
        up_bytes=0,
        down_bytes=0,
        draft_s=block.draft_s,
        codec_s=block.codec_s,
        round_trip_s=0.0,
        wait_s=0.0,
        timing=Timing(),
        prompt_s=block.prompt_s,
    )
    return Emission(block.tokens, (Origin.EDGE_ONLY,), done, losses=frozenset({Loss.EDGE_ONLY}))
