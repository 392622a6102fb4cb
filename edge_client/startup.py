"""From options to a client that can answer: find the draft, ask the verifier, load the model meanwhile."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from tokenizers import Tokenizer

from edge_client.alone import is_lost
from edge_client.connection import Patience, Verifier
from edge_client.estimates import Estimates
from edge_client.generate import Conversation
from edge_client.manifest import TOKENIZER_NAME, DraftManifest, read_manifest
from edge_client.options import Options
from edge_client.settings import SessionSettings
from edge_client.version import package_version
from shared.config import cache_dir
from shared.faults import FaultKind, SpecwireError
from shared.messages import Description
from shared.transport import Tls
from shared.vocabulary import check_same_tokenizer

if TYPE_CHECKING:
    from edge_client.draft_model import DraftModel

# How `cloud-verifier draft builtin` names its folders, NAME-draft-PRECISION-vVERSION, and which precision
# is preferred where several are there; importing that module would import torch.
_BUILTIN = "SmolLM2-135M-Instruct-draft-"
_PREFERRED = ("q4_exact", "int8", "int4", "fp32")


@dataclass(frozen=True, slots=True)
class Client:
    """All that an answer needs. `model` is None when the verifier writes alone, `reached` when no verifier
    could be reached and the draft may go on alone."""

    options: Options
    verifier: Verifier
    reached: Description | None
    manifest: DraftManifest
    tokenizer: Tokenizer
    model: DraftModel | None
    estimates: Estimates = field(default_factory=Estimates)

    @property
    def description(self) -> Description:
        """Raises SpecwireError(UNAVAILABLE) when no verifier was reached."""
        if self.reached is None:
            raise SpecwireError(FaultKind.UNAVAILABLE, "No verifier could be reached.", "Try again later.")
        return self.reached

    async def ask_again(self) -> Description | None:
        """What the verifier serves now, as `ask` does."""
        return await ask(self.verifier, self.options, self.manifest)

    def conversation(self, logprobs: int = 0) -> Conversation:
        """A new conversation; the caller enters it as a context manager."""
        return Conversation(
            self.verifier,
            self.reached,
            self.model,
            session_settings(self.options, self.manifest, logprobs),
        )


def session_settings(options: Options, manifest: DraftManifest, logprobs: int = 0) -> SessionSettings:
    """What these options ask of every session."""
    return SessionSettings(
        tokenizer=manifest.tokenizer,
        eos_ids=manifest.eos_ids,
        codec=options.codec,
        verification=options.verification,
        logprobs=logprobs,
        client=f"edge-client {package_version()}",
        edge_only_fallback=options.edge_only_fallback,
    )


async def ask(verifier: Verifier, options: Options, manifest: DraftManifest) -> Description | None:
    """What the verifier serves; None when none can be reached and the draft may then go on alone.

    Raises:
        SpecwireError: no verifier answers, or it does not fit this draft.
    """
    try:
        description = await verifier.describe()
    except SpecwireError as fault:
        if not options.edge_only_fallback or not is_lost(fault):
            raise
        verifier.notify(fault.text)
        return None
    check_same_tokenizer(manifest.tokenizer, description.tokenizer)
    return description


def draft_folder(draft: str) -> Path:
    """The folder of --draft; 'builtin' and 'builtin:int4' are in the cache, or beside a built program.

    Raises:
        SpecwireError: BAD_REQUEST when the built-in draft is not there yet.
    """
    name, _, precision = draft.partition(":")
    if name != "builtin":
        return Path(draft).expanduser()
    beside = Path(sys.executable).with_name("draft")  # where `make edge-bundle` puts it
    if getattr(sys, "frozen", False) and not precision and beside.is_dir():
        return beside
    models = cache_dir() / "models"
    found = [folder for folder in models.glob(f"{_BUILTIN}{precision or '*'}-v*") if folder.is_dir()]
    if not found:
        raise SpecwireError(
            FaultKind.BAD_REQUEST,
            f"The built-in draft is not here yet ({models / _BUILTIN}*).",
            "Make it once with `cloud-verifier draft builtin`, or name a draft folder with --draft.",
        )
    return min(found, key=_preference)


def _preference(folder: Path) -> tuple[int, int]:
    precision, _, version_number = folder.name.removeprefix(_BUILTIN).rpartition("-v")
    rank = _PREFERRED.index(precision) if precision in _PREFERRED else len(_PREFERRED)
    return rank, -int(version_number) if version_number.isdecimal() else 0


def make_verifier(options: Options, notify: Callable[[str], None] | None = None) -> Verifier:
    """Raises SpecwireError(BAD_REQUEST) for an address without a port, or half a client certificate."""
    addresses = [address.strip() for address in options.verifier.split(",") if address.strip()]
    for address in addresses:
        if not address.startswith("unix:") and not address.rpartition(":")[2].isdecimal():
            raise SpecwireError(
                FaultKind.BAD_REQUEST,
                f"The verifier's address {address!r} has no port.",
                f"Give --verifier {address.rstrip(':')}:7070, or the port that it listens on.",
            )
    if (options.tls_cert is None) != (options.tls_key is None):
        raise SpecwireError(
            FaultKind.BAD_REQUEST,
            "A certificate is of no use without its private key, nor the key without it.",
            "Give both --tls-cert and --tls-key.",
        )
    return Verifier(
        addresses,
        tls=None if options.insecure else Tls(options.tls_ca, options.tls_cert, options.tls_key),
        token=options.token,
        pad_bytes=options.pad_messages,
        patience=Patience(connect=options.connect_timeout, reconnect=options.patience),
        notify=notify,
    )


def load_tokenizer(folder: Path) -> Tokenizer:
    try:
        return Tokenizer.from_file(str(folder / TOKENIZER_NAME))
    except Exception as error:  # the library raises a bare Exception
        raise SpecwireError(
            FaultKind.BAD_REQUEST,
            f"{folder / TOKENIZER_NAME} cannot be read: {error}.",
            "Export the draft again with `cloud-verifier draft export`.",
        ) from error


def load_model(options: Options, folder: Path) -> DraftModel | None:
    if options.cloud_only:
        return None
    from edge_client.draft_model import DraftModel

    return DraftModel.load(folder, threads=options.threads)


@asynccontextmanager
async def open_client(options: Options, notify: Callable[[str], None] | None = None) -> AsyncIterator[Client]:
    """A client for as long as the context lasts.

    Raises:
        SpecwireError: nothing answers, or draft and verifier do not fit.
    """
    options.sampling()
    options.controller()
    folder = draft_folder(options.draft)
    manifest = read_manifest(folder)
    async with make_verifier(options, notify) as verifier:
        loading = asyncio.ensure_future(asyncio.to_thread(load_model, options, folder))
        try:
            tokenizer, description = await asyncio.gather(
                asyncio.to_thread(load_tokenizer, folder), ask(verifier, options, manifest)
            )
            estimates = await _first_estimates(verifier, description) if description else Estimates()
            model = await loading
        except BaseException:
            await asyncio.wait([loading])
            if not loading.cancelled():
                loading.exception()
            raise
        yield Client(options, verifier, description, manifest, tokenizer, model, estimates)


async def _first_estimates(verifier: Verifier, description: Description) -> Estimates:
    """What asking once more tells a controller, while the model is loaded anyway."""
    try:
        round_trip_s = await verifier.ping(verifier.addresses[0])
    except SpecwireError:
        return Estimates()  # another address has answered
    return Estimates(round_trip_s, description.load.forward_us / 1e6)
