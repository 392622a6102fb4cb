"""What all requests share: one draft model, one verifier, and the contexts of their conversations."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from tokenizers import Tokenizer

from edge_client.api.pool import Pool
from edge_client.api.turnstile import SharedModel, Turnstile
from edge_client.connection import Verifier
from edge_client.controller import Controller
from edge_client.draft_model import DraftModel
from edge_client.generate import Conversation, SessionSettings
from edge_client.manifest import DraftManifest, read_manifest
from edge_client.options import Options
from edge_client.startup import draft_folder, load_model, load_tokenizer, make_verifier
from edge_client.version import package_version
from shared.codecs import CODECS
from shared.faults import FaultKind, SpecwireError
from shared.messages import Description
from shared.vocabulary import check_same_tokenizer

DEFAULT_CONTEXTS = 8


@dataclass(frozen=True, slots=True)
class Choices:
    """What was settled with the verifier."""

    description: Description
    codec: str
    verification: str


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
        self.controller: Callable[[], Controller] = options.controller
        self._model = model
        self._num_contexts = num_contexts
        self._turnstile = Turnstile()
        self._settling = asyncio.Lock()
        self._choices: Choices | None = None
        self._pool: Pool | None = None

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
        """The contexts, once the verifier has said what it serves.

        Raises:
            SpecwireError: no verifier answers, or it does not fit this draft.
        """
        async with self._settling:
            if self._choices is None:
                self._choices = await self._settle()
            if self._pool is None:
                self._pool = Pool(self._conversation, self.tokenizer, self._num_contexts)
            return self._pool

    def saw_fault(self, fault: SpecwireError) -> None:
        """After a verifier is lost, the next request asks anew what serves there, and hears if none."""
        if fault.kind in (FaultKind.UNAVAILABLE, FaultKind.TIMED_OUT, FaultKind.TOKENIZER_MISMATCH):
            self._choices = None

    async def close(self) -> None:
        if self._pool is not None:
            await self._pool.close()

    async def _settle(self) -> Choices:
        description = await self.verifier.describe()
        check_same_tokenizer(self.manifest.tokenizer, description.tokenizer)
        options = self.options
        known = [name for name in description.codecs if name in CODECS]
        if not known or not description.verifications:
            raise SpecwireError(
                FaultKind.PROTOCOL_MISMATCH,
                "The verifier offers no codec or no verification that this client knows.",
                "Install the same Specwire version on both sides.",
            )
        return Choices(
            description, options.codec or known[0], options.verification or description.verifications[0]
        )

    def _conversation(self, logprobs: int) -> Conversation:
        choices = self._choices
        if choices is None:
            raise RuntimeError("no verifier has been asked")
        return Conversation(
            self.verifier,
            choices.description,
            SharedModel(self._model.fork(), self._turnstile) if self._model is not None else None,
            SessionSettings(
                tokenizer=self.manifest.tokenizer,
                eos_ids=self.manifest.eos_ids,
                codec=choices.codec,
                verification=choices.verification,
                logprobs=logprobs,
                client=f"edge-client {package_version()}",
            ),
        )


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
