"""Is everything in place? Each check is one line; each thing that is wrong says how to fix it."""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from edge_client.connection import Verifier
from edge_client.controller import Controller
from edge_client.drafting import Drafter
from edge_client.generate import Conversation
from edge_client.link_rate import downlink, uplink
from edge_client.manifest import DraftManifest, read_manifest, verify_files
from edge_client.options import Options
from edge_client.prompts import plain_prompt
from edge_client.results import Result
from edge_client.startup import Client, draft_folder, load_model, load_tokenizer, make_verifier
from shared.codecs import CODECS, DEFAULT_CODEC, get_codec
from shared.faults import FaultKind, SpecwireError
from shared.messages import Description, SamplingParams
from shared.transport import is_loopback
from shared.vocabulary import check_same_tokenizer

if TYPE_CHECKING:
    from edge_client.draft_model import DraftModel

_NUM_PINGS = 20
# Of an answer: unmeasured ones, in which the controller learns, measured ones, and of the cloud alone, which
# is slow and needs fewer.
_WARM_UP_TOKENS, _NUM_TOKENS, _NUM_CLOUD_TOKENS = 24, 48, 24
_PROMPT = "Once upon a time, in a small town by the sea,"


@dataclass(frozen=True, slots=True)
class Check:
    """One line of the report; `remedy` says what to do when `ok` is false."""

    name: str
    ok: bool
    text: str
    remedy: str = ""


async def examine(options: Options, report: Callable[[Check], None]) -> bool:
    """Runs all checks that can be run, reporting each as it is done; whether all is well."""
    checks: list[Check] = []

    def add(name: str, ok: bool, text: str, remedy: str = "") -> None:
        checks.append(Check(name, ok, text, remedy))
        report(checks[-1])

    def fault(name: str, error: SpecwireError) -> None:
        add(name, False, error.text, error.remedy or "See the verifier's log.")

    folder, manifest = await _check_draft(options, add, fault)
    async with make_verifier(options) as verifier:
        description = await _check_verifier(verifier, add, fault)
        fits = False
        if description is not None and manifest is not None:
            fits = _check_fit(options, manifest, description, add, fault)
        if description is not None:
            access = access_check(options, verifier.addresses)
            add(access.name, access.ok, access.text, access.remedy)
            await _check_link(verifier, add, fault)
        model = None
        if folder is not None and manifest is not None:
            model = await _check_model(options, folder, manifest, add, fault)
        if (
            fits
            and model is not None
            and folder is not None
            and manifest is not None
            and description is not None
        ):
            client = Client(options, verifier, description, manifest, load_tokenizer(folder), model)
            await _check_speed(client, add, fault)
    return all(check.ok for check in checks)


_Add = Callable[..., None]
_Fault = Callable[[str, SpecwireError], None]


async def _check_draft(
    options: Options, add: _Add, fault: _Fault
) -> tuple[Path | None, DraftManifest | None]:
    try:
        folder = draft_folder(options.draft)
        manifest = read_manifest(folder)
        await asyncio.to_thread(verify_files, folder, manifest)
    except SpecwireError as error:
        fault("draft", error)
        return None, None
    size = sum(file.num_bytes for file in manifest.files) / 1e6
    add("draft", True, f"{manifest.name} ({manifest.precision}, {size:.0f} MB) in {folder} is whole.")
    return folder, manifest


async def _check_verifier(verifier: Verifier, add: _Add, fault: _Fault) -> Description | None:
    """Every address has to answer, or the client could not move there; the first one's answer counts."""
    first: Description | None = None
    for address in verifier.addresses:
        try:
            description = await verifier.describe_at(address)
        except SpecwireError as error:
            fault("verifier", error)
            continue
        first = first or description
        load = description.load
        emulated = f", emulating {description.emulation}" if description.emulation else ""
        add(
            "verifier",
            True,
            f"{address} serves {description.model} ({description.dtype} on {description.device}{emulated}), "
            f"version {description.version}; {load.num_sessions} sessions, {load.num_waiting} waiting, "
            f"{load.kv_cache_usage:.0%} of its cache used.",
        )
    return first


def _check_fit(
    options: Options, manifest: DraftManifest, description: Description, add: _Add, fault: _Fault
) -> bool:
    try:
        check_same_tokenizer(manifest.tokenizer, description.tokenizer)
    except SpecwireError as error:
        fault("tokenizer", error)
        return False
    add("tokenizer", True, f"Both sides use the same {manifest.tokenizer.size} tokens.")
    for what, wanted, offered in (
        ("codec", options.codec, description.codecs),
        ("verification", options.verification, description.verifications),
    ):
        if wanted and wanted not in offered:
            known = f"The verifier does not offer the {what} '{wanted}'."
            add(what, False, known, f"Choose one of: {', '.join(offered)}.")
            return False
    if not set(description.codecs) & set(CODECS):
        add("codec", False, "The two sides have no codec in common.", "Install the same version on both.")
        return False
    return True


def access_check(options: Options, addresses: Sequence[str]) -> Check:
    """About verifiers that have answered, so that they take what they were given: can others read it?"""
    exposed = [address for address in addresses if options.insecure and not is_loopback(address)]
    if exposed and options.token:
        return Check(
            "access",
            False,
            f"The token travels to {exposed[0]} in plain text.",
            "Leave out --insecure, and give the verifier a certificate (`make certs` makes one for trials).",
        )
    way = "Plain text" if options.insecure else "TLS with a trusted certificate"
    token = "the token is accepted" if options.token else "no token is asked for"
    return Check("access", True, f"{way}; {token}.")


async def _check_link(verifier: Verifier, add: _Add, fault: _Fault) -> None:
    address = verifier.addresses[0]
    times: list[float] = []
    try:
        for _ in range(_NUM_PINGS):
            times.append(await verifier.ping(address))
    except SpecwireError as error:
        if not times:
            fault("round trip", error)
            return
    times.sort()
    p50, p95 = statistics.median(times), times[int(0.95 * (len(times) - 1))]
    add("round trip", True, f"{p50 * 1e3:.1f} ms (p50), {p95 * 1e3:.1f} ms (p95) to {address}.")
    try:
        text = await _rates(verifier, address, p50)
    except SpecwireError as error:
        fault("rate", error)
        return
    add("rate", True, text)


async def _rates(verifier: Verifier, address: str, round_trip_s: float) -> str:
    up = await uplink(verifier, address, round_trip_s)
    upwards = f"At least {up} up (by moving {up.num_bytes / 1e3:.0f} kB)"
    try:
        down = await downlink(verifier, address, round_trip_s)
    except SpecwireError as error:
        if error.kind is not FaultKind.PROTOCOL_MISMATCH:
            raise
        return f"{upwards}; down is not known, because gRPC's reflection does not answer there."
    return f"{upwards} and {down} down ({down.num_bytes / 1e3:.0f} kB), each on one gRPC stream."


async def _check_model(
    options: Options, folder: Path, manifest: DraftManifest, add: _Add, fault: _Fault
) -> DraftModel | None:
    try:
        model = await asyncio.to_thread(load_model, options, folder)
        if model is None:
            return None
        step_s = await asyncio.to_thread(_draft_step_s, model, folder, manifest)
    except SpecwireError as error:
        fault("draft speed", error)
        return None
    add("draft speed", True, f"{step_s * 1e3:.1f} ms a drafted token ({1 / step_s:.0f} tokens/s at most).")
    return model


def _draft_step_s(model: DraftModel, folder: Path, manifest: DraftManifest) -> float:
    """Median over blocks of one token, sampling and quantising included."""
    tokens = plain_prompt(manifest, load_tokenizer(folder), _PROMPT)
    drafter = Drafter(model, get_codec(DEFAULT_CODEC), manifest.tokenizer.size, ())
    drafter.begin(tokens, SamplingParams(temperature=1.0), len(tokens) + 24)
    blocks = [drafter.draft(1) for _ in range(24)]
    return statistics.median(block.draft_s + block.codec_s for block in blocks[4:] if block is not None)


async def _check_speed(client: Client, add: _Add, fault: _Fault) -> None:
    """Writes a short answer both ways; without the first tokens, which wait for the prompt."""
    options = client.options
    alone = replace(options, cloud_only=True)
    try:
        spec = await _speed(client, options, [_WARM_UP_TOKENS, _NUM_TOKENS])
        cloud = (
            await _speed(client, alone, [_NUM_CLOUD_TOKENS]) if client.description.allows_generate else None
        )
    except SpecwireError as error:
        fault("speed", error)
        return
    text = f"Expect {spec[0]:.1f} tokens/s with speculation ({spec[1].acceptance:.0%} accepted)"
    add("speed", True, f"{text}, {cloud[0]:.1f} with the cloud alone." if cloud else f"{text}.")


async def _speed(client: Client, options: Options, lengths: Sequence[int]) -> tuple[float, Result]:
    """Tokens per second of the last of these answers; those before it warm up, the controller with them."""
    tokens = plain_prompt(client.manifest, client.tokenizer, _PROMPT)
    controller = options.controller(client.description)
    async with client.conversation() as conversation:
        for length in lengths:
            result = await _answer(conversation, tokens, options, length, controller)
    after_first = result.total_s - result.first_token_s
    return (len(result.tokens) - 1) / after_first if after_first > 0 else result.tokens_per_s, result


async def _answer(
    conversation: Conversation, tokens: list[int], options: Options, length: int, controller: Controller
) -> Result:
    async for event in conversation.answer(
        tokens, sampling=options.sampling(), max_new_tokens=length, controller=controller
    ):
        if isinstance(event, Result):
            return event
    raise SpecwireError(FaultKind.INTERNAL, "An answer ended without a result.", "Run the doctor again.")
