"""What the commands have in common. An option is declared once: name, type, default, help.

`takes_options` turns the fields of `Options` into the options of a command. Only what the help needs is
imported here; everything heavy waits until a command runs.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from shared.faults import FaultKind, SpecwireError

if TYPE_CHECKING:
    from edge_client.controller import Controller
    from edge_client.estimates import Estimates
    from shared.messages import Description, SamplingParams

# Panels of the help; a command takes the options of some of them.
CONNECTION, MODEL, SAMPLING, SPECULATION = "Connection", "Draft model", "Sampling", "Speculation"

_CLOUD_CHUNK = 1 << 20  # more than any answer: one request for all of it


def option(panel: str, text: str, *names: str, **settings: Any) -> Any:
    """An option in `panel` of the help; `names` only where they do not follow from the parameter's."""
    return typer.Option(*names, help=text, rich_help_panel=panel, **settings)


@dataclass(frozen=True, slots=True)
class Options:
    """The options that more than one command has; what a field means is in its help text."""

    verifier: Annotated[
        str, option(CONNECTION, "Verifier's host:port; several with commas are tried in turn.")
    ] = "127.0.0.1:7070"
    insecure: Annotated[bool, option(CONNECTION, "Plain text instead of TLS.", "--insecure")] = False
    tls_ca: Annotated[
        Path | None, option(CONNECTION, "Authority (PEM) to trust beside the system's.", show_default=False)
    ] = None
    tls_cert: Annotated[
        Path | None,
        option(CONNECTION, "Certificate (PEM) to show to a verifier that asks for one.", show_default=False),
    ] = None
    tls_key: Annotated[
        Path | None, option(CONNECTION, "Private key (PEM) of that certificate.", show_default=False)
    ] = None
    token: Annotated[
        str, option(CONNECTION, "Bearer token; better set as SPECWIRE_TOKEN.", show_default=False)
    ] = ""
    connect_timeout: Annotated[float, option(CONNECTION, "Seconds for an address to answer.", min=0.1)] = 5.0
    patience: Annotated[
        float, option(CONNECTION, "Seconds to wait for a verifier that is lost mid-answer.", min=0)
    ] = 60.0
    pad_messages: Annotated[
        int,
        option(
            CONNECTION,
            "Pad messages to multiples of so many bytes, so that their sizes tell nothing; 0 is off.",
            min=0,
            max=1 << 14,
        ),
    ] = 0
    draft: Annotated[
        str, option(MODEL, "Draft folder; 'builtin' is the one of `cloud-verifier draft builtin`.")
    ] = "builtin"
    threads: Annotated[int, option(MODEL, "CPU threads of the draft; 0 takes every core.", min=0)] = 0
    temperature: Annotated[float, option(SAMPLING, "0 always takes the likeliest token.")] = 0.0
    top_k: Annotated[int, option(SAMPLING, "Only the K likeliest tokens; 0 is off.")] = 0
    top_p: Annotated[float, option(SAMPLING, "Only the likeliest tokens that hold this mass; 1 is off.")] = (
        1.0
    )
    min_p: Annotated[
        float, option(SAMPLING, "Only tokens at least this likely, relative to the best; 0 is off.")
    ] = 0.0
    fused_weight: Annotated[
        float,
        option(
            SAMPLING,
            "With --verification fused: the draft's share in what is judged by, 0 to 1; lossy above 0.",
        ),
    ] = 0.0
    seed: Annotated[
        int,
        option(
            SAMPLING,
            "The same seed gives the same text; above temperature 0 only with a fixed --k or coupled "
            "verification.",
        ),
    ] = 0
    max_tokens: Annotated[int, option(SAMPLING, "Tokens of an answer at most.", min=1)] = 512
    k: Annotated[str, option(SPECULATION, "Tokens drafted in a block; 'auto' goes by what is measured.")] = (
        "auto"
    )
    ahead: Annotated[
        str,
        option(SPECULATION, "Further blocks to send before a verdict is back; with a fixed --k, auto is 0."),
    ] = "auto"
    codec: Annotated[
        str, option(SPECULATION, "How distributions are sent; empty takes the verifier's first choice.")
    ] = ""
    verification: Annotated[
        str, option(SPECULATION, "The verifier's rule; empty takes its first choice.")
    ] = ""
    cloud_only: Annotated[
        bool, option(SPECULATION, "Do not draft; the cloud writes alone.", "--cloud-only")
    ] = False

    edge_only_fallback: Annotated[
        bool,
        option(
            SPECULATION,
            "When no verifier can be reached, let the draft go on alone; that text is marked as not exact.",
            "--edge-only-fallback",
        ),
    ] = False

    def sampling(self) -> SamplingParams:
        """Raises SpecwireError(BAD_SAMPLING) naming what is out of range, or not for the verification."""
        from shared.messages import SamplingParams
        from shared.sampling import check_rule, validate

        params = SamplingParams(
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            seed=self.seed,
            fused_weight=self.fused_weight,
        )
        validate(params)
        check_rule(params, self.verification)
        return params

    def controller(
        self, description: Description | None = None, estimates: Estimates | None = None
    ) -> Controller:
        """What decides about K and the rest; `description` bounds it by what the verifier allows, and it
        begins with the `estimates` of earlier answers."""
        from edge_client.controller import AutoController, FixedController, Plan

        if self.cloud_only and self.edge_only_fallback:
            raise SpecwireError(
                FaultKind.BAD_REQUEST,
                "--cloud-only keeps the draft from writing, --edge-only-fallback lets it write alone.",
                "Leave out one of them.",
            )
        if self.cloud_only:
            return FixedController(Plan(cloud_tokens=_CLOUD_CHUNK))
        if self.k != "auto":
            ahead = 0 if self.ahead == "auto" else _whole_number("--ahead", self.ahead, 0)
            price = None if self.pad_messages else 0.0
            return FixedController(Plan(_whole_number("--k", self.k, 1), ahead, price=price))
        if self.ahead != "auto":
            raise SpecwireError(
                FaultKind.BAD_REQUEST, f"--ahead is {self.ahead!r}, but --k is auto.", "Fix both, or neither."
            )
        if description is None:
            return AutoController(prices_bytes=not self.pad_messages, estimates=estimates)
        # What is padded would differ in size again if bytes had a price.
        return AutoController.within(description, estimates, prices_bytes=not self.pad_messages)


def takes_options(
    *panels: str, without: Collection[str] = (), **defaults: Any
) -> Callable[[Callable[..., Any]], Callable[..., None]]:
    """Makes a function with an argument `options` a command with the options of these panels in its place.

    Args:
        panels: whose options the command takes; the others keep their defaults.
        without: names of fields that it does not take all the same.
        defaults: those that differ from the fields' own.
    """
    hints = get_type_hints(Options, include_extras=True)
    taken = {
        field.name: inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=defaults.get(field.name, field.default),
            annotation=hints[field.name],
        )
        for field in fields(Options)
        if hints[field.name].__metadata__[0].rich_help_panel in panels and field.name not in without
    }

    def decorate(command: Callable[..., Any]) -> Callable[..., None]:
        parameters: dict[str, inspect.Parameter] = {}
        for name, parameter in inspect.signature(command, eval_str=True).parameters.items():
            parameters |= taken if name == "options" else {name: parameter}

        @functools.wraps(command)
        def call(**values: Any) -> None:
            command(options=Options(**{name: values.pop(name) for name in taken}), **values)

        call.__annotations__ = {name: parameter.annotation for name, parameter in parameters.items()}
        call.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in parameters.values()]
        )
        return call

    return decorate


def _whole_number(option_name: str, text: str, least: int) -> int:
    if text.isdecimal() and int(text) >= least:
        return int(text)
    raise SpecwireError(
        FaultKind.BAD_REQUEST,
        f"{option_name} is {text!r}.",
        f"Give a whole number of at least {least}, or auto.",
    )
