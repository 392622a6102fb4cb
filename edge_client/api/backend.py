"""What all requests share: one draft model, one verifier, and the contexts of their conversations."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from tokenizers import Tokenizer

from edge_client.api.pool import Pool
from edge_client.api.turnstile import SharedModel, Turnstile
from edge_client.connection import Verifier
from edge_client.controller import Controller
from edge_client.draft_model import DraftModel
from edge_client.estimates import Estimates
from edge_client.generate import Conversation
from edge_client.manifest import DraftManifest, read_manifest
from edge_client.options import Options
from edge_client.settings import SessionSettings
from edge_client.startup import (
    ask,
    draft_folder,
    load_model,
    load_tokenizer,
    make_verifier,
    session_settings,
)
from shared.faults import FaultKind, SpecwireError
from shared.messages import Description

_SPARE_AFTER_S = 1.0
DEFAULT_CONTEXTS = 8
_LOST_OR_ANOTHER = frozenset(
    {
        FaultKind.UNAVAILABLE,
        FaultKind.TIMED_OUT,
        FaultKind.PROTOCOL_MISMATCH,
        FaultKind.TOKENIZER_MISMATCH,
    }
)


@dataclass(frozen=True, slots=True)
class Choices:
    """What was settled with the verifier."""

    description: Description
    settings: SessionSettings


class Backend:
    """Made by `open_backend`. The verifier need not be there when it starts, nor stay there."""

    def __init__(
        self,
        options: Options,
        verifier: Verifier,
        manifest: DraftManifest,
        tokenizer: Tokenizer,
        model: DraftModel | None,
        num_contexts: int,
    ) -> None:
        self.options = options
        self.verifier = verifier
        self.manifest = manifest
        self.tokenizer = tokenizer
        self.controller: Callable[[], Controller] = self._controller
        self._known = Estimates()  # what one answer measures serves the next
        self._model = model
        self._num_contexts = num_contexts
        self._turnstile = Turnstile()
        self._settling = asyncio.Lock()
        self._choices: Choices | None = None
        self._ask_after = 0.0
        self._pool: Pool | None = None
        self._spare: DraftModel | None = None
        self._sparing: asyncio.Task[None] | None = None

    def _controller(self) -> Controller:
        return self.options.controller(self._choices.description if self._choices else None, self._known)

    @property
    def model_name(self) -> str:
        """Of the target, whose text this is; of the draft while no verifier has answered."""
        return self._choices.description.model if self._choices is not None else self.manifest.name

    @property
    def choices(self) -> Choices | None:
        return self._choices

    @property
    def max_context(self) -> int:
        if self._choices is None:
            return self.manifest.max_context
        return self._choices.description.limits.max_context

    async def pool(self) -> Pool:
        """The contexts, once the verifier has said what it serves, or where the draft may go on alone.

        Raises:
            SpecwireError: no verifier answers, or it does not fit this draft.
        """
        async with self._settling:
            asked = time.monotonic()
            if self._choices is None and asked >= self._ask_after:
                self._choices = await self._settle()
                # While the draft goes on alone, half of the time at most is spent on asking.
                self._ask_after = 2 * time.monotonic() - asked
            if self._pool is None:
                self._pool = Pool(self._conversation, self.tokenizer, self._num_contexts)
            return self._pool

    def introduce(self, conversation: Conversation) -> None:
        """Lets a conversation that began without a verifier use the one that has been found since."""
        if self._choices is not None and not conversation.has_met:
            conversation.meet(self._choices.description)

    def saw_fault(self, fault: SpecwireError) -> None:
        """After a verifier is lost, the next request asks anew what serves there, and hears if none."""
        if fault.kind in _LOST_OR_ANOTHER:
            self._choices, self._ask_after = None, 0.0

    async def close(self) -> None:
        if self._sparing is not None:
            self._sparing.cancel()
            await asyncio.wait([self._sparing])
        if self._pool is not None:
            await self._pool.close()

    async def _settle(self) -> Choices | None:
        description = await ask(self.verifier, self.options, self.manifest)
        if description is None:
            return None
        return Choices(description, session_settings(self.options, self.manifest).agreed(description))

    def _conversation(self, logprobs: int) -> Conversation:
        return Conversation(
            self.verifier,
            self._choices.description if self._choices is not None else None,
            SharedModel(self._take_model(self._model), self._turnstile) if self._model is not None else None,
            session_settings(self.options, self.manifest, logprobs),
        )

    def _take_model(self, model: DraftModel) -> DraftModel:
        taken, self._spare = self._spare or model.fork(), None
        if self._sparing is None or self._sparing.done():
            self._sparing = asyncio.create_task(self._make_spare(model))
        return taken

    async def _make_spare(self, model: DraftModel) -> None:
        """A draft context whose memory is there already, for the answer after this one."""
        await asyncio.sleep(_SPARE_AFTER_S)
        spare = model.fork()
        await asyncio.to_thread(spare.warm)
        self._spare = spare


@asynccontextmanager
async def open_backend(
    options: Options, num_contexts: int = DEFAULT_CONTEXTS, notify: Callable[[str], None] | None = None
) -> AsyncIterator[Backend]:
    """Loads the draft; asks nothing of the verifier.

    Raises:
        SpecwireError: BAD_REQUEST when the draft folder is not whole or an option is wrong.
    """
    options.controller()
    folder = draft_folder(options.draft)
    manifest = read_manifest(folder)
    tokenizer, model = await asyncio.gather(
        asyncio.to_thread(load_tokenizer, folder), asyncio.to_thread(load_model, options, folder)
    )
    async with make_verifier(options, notify) as verifier:
        backend = Backend(options, verifier, manifest, tokenizer, model, num_contexts)
        try:
            yield backend
        finally:
            await backend.close()
