"""From options to a client that can answer: find the draft, ask the verifier, load the model meanwhile."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from tokenizers import Tokenizer

from edge_client.connection import Patience, Verifier
from edge_client.generate import Conversation, SessionSettings
from edge_client.manifest import TOKENIZER_NAME, DraftManifest, read_manifest
from edge_client.options import Options
from shared.codecs import CODECS
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
    """All that an answer needs. `model` is None when the verifier writes alone."""

    options: Options
    verifier: Verifier
    description: Description
    manifest: DraftManifest
    tokenizer: Tokenizer
    model: DraftModel | None

    def conversation(self, logprobs: int = 0) -> Conversation:
        """A new conversation; the caller enters it as a context manager."""
        return Conversation(
            self.verifier,
            self.description,
            self.model,
            SessionSettings(
                tokenizer=self.manifest.tokenizer,
                eos_ids=self.manifest.eos_ids,
                codec=_offered("codec", self.options.codec, self.description.codecs, tuple(CODECS)),
                verification=_offered(
                    "verification", self.options.verification, self.description.verifications
                ),
                logprobs=logprobs,
                client=f"edge-client {version('specwire')}",
            ),
        )


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
    return Verifier(
        [address for address in options.verifier.split(",") if address.strip()],
        tls=None if options.insecure else Tls(ca=options.tls_ca),
        token=options.token,
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
                asyncio.to_thread(load_tokenizer, folder), verifier.describe()
            )
            check_same_tokenizer(manifest.tokenizer, description.tokenizer)
            model = await loading
        except BaseException:
            await asyncio.wait([loading])
            if not loading.cancelled():
                loading.exception()
            raise
        yield Client(options, verifier, description, manifest, tokenizer, model)


def _offered(what: str, wanted: str, offered: tuple[str, ...], known: tuple[str, ...] | None = None) -> str:
    """`wanted`, or the verifier's first choice that this client knows."""
    if wanted:
        return wanted
    choices = [name for name in offered if known is None or name in known]
    if not choices:
        raise SpecwireError(
            FaultKind.PROTOCOL_MISMATCH,
            f"The verifier offers no {what} that this client knows ({', '.join(offered) or 'none'}).",
            "Install the same Specwire version on both sides.",
        )
    return choices[0]
