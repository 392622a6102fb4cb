"""A conversation -> the prompt text that the model was trained on.

Renders the manifest's template the way transformers' `apply_chat_template` does, in the same jinja2
dialect. A template is code that came with a model, so it runs in jinja2's sandbox.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any, NoReturn

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from edge_client.manifest import DraftManifest
from shared.faults import FaultKind, SpecwireError


def render(
    manifest: DraftManifest,
    messages: Sequence[Mapping[str, Any]],
    *,
    add_generation_prompt: bool = True,
    tools: Sequence[Mapping[str, Any]] | None = None,
) -> str:
    """The prompt text of `messages` (each with `role` and `content`).

    Raises:
        SpecwireError: UNSUPPORTED_MODEL when the model has no template, BAD_REQUEST when the template
            refuses the conversation (a role it does not know, for one) or fails on it.
    """
    if not manifest.chat_template:
        raise SpecwireError(
            FaultKind.UNSUPPORTED_MODEL,
            f"The model '{manifest.name}' has no chat template.",
            "Give it a plain prompt instead (`edge-client run --raw`), or use a chat model.",
        )
    try:
        return _compiled(manifest.chat_template).render(
            messages=[dict(message) for message in messages],
            tools=tools,
            documents=None,
            add_generation_prompt=add_generation_prompt,
            bos_token=manifest.bos_token,
            eos_token=manifest.eos_token,
        )
    except (jinja2.TemplateError, TypeError, KeyError, AttributeError, ValueError) as error:
        raise SpecwireError(
            FaultKind.BAD_REQUEST,
            f"The chat template of '{manifest.name}' does not accept this conversation: {error}.",
            "Use the roles system, user and assistant, in turns, each with a text.",
        ) from error


@lru_cache(maxsize=8)
def _compiled(template: str) -> jinja2.Template:
    """Compiling takes several milliseconds, rendering a fraction of one."""
    return _environment().from_string(template)


def _environment() -> ImmutableSandboxedEnvironment:
    """The dialect of `transformers.utils.chat_template_utils`."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


class _GenerationTag(Extension):
    """`{% generation %}` marks the assistant's text for training; here it prints what it holds."""

    tags = {"generation"}  # noqa: RUF012 (the base class declares it without ClassVar)

    def parse(self, parser: Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """jinja2's own filter escapes HTML, which no model wants."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
