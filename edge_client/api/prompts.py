"""What a request wants continued -> tokens."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from jinja2 import meta
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from edge_client.api.errors import bad_param, unsupported
from edge_client.api.pool import Prompt
from edge_client.chat_template import render
from edge_client.manifest import DraftManifest
from edge_client.prompts import text_tokens


def completion_prompt(manifest: DraftManifest, tokenizer: Tokenizer, prompt: str | tuple[int, ...]) -> Prompt:
    """A text after the model's start token, or ids as they are. Raises ApiError(400)."""
    if not isinstance(prompt, str):
        if max(prompt) >= manifest.vocab_size:
            raise bad_param("prompt", f"Token id {max(prompt)} is not one of {manifest.vocab_size}.")
        return Prompt(prompt)
    tokens = text_tokens(manifest, tokenizer, prompt)
    if not tokens:
        raise bad_param("prompt", "'prompt' is empty, and this model has no start token.")
    return Prompt(tuple(tokens), prompt)


def chat_prompt(
    manifest: DraftManifest,
    tokenizer: Tokenizer,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]],
) -> Prompt:
    """The conversation by the model's own template.

    Raises:
        ApiError: 400 for tools that the template does not know.
        SpecwireError: no template, or it refuses the conversation.
    """
    if tools and not knows_tools(manifest):
        raise unsupported(
            "tools",
            f"the chat template of {manifest.name} has no place for them. Describe them in a message.",
        )
    text = render(manifest, [_for_template(message) for message in messages], tools=tools or None)
    tokens = tuple(tokenizer.encode(text, add_special_tokens=False).ids)
    if not tokens:
        raise bad_param("messages", "The chat template makes an empty prompt of 'messages'.")
    return Prompt(tokens, text)


def knows_tools(manifest: DraftManifest) -> bool:
    """Whether the chat template looks at `tools`."""
    template = manifest.chat_template or ""
    # A cheap look first: parsing needs the template's own extensions only where tools are named.
    if "tools" not in template:
        return False
    environment = ImmutableSandboxedEnvironment(extensions=["jinja2.ext.loopcontrols"])
    plain = template.replace("{% generation %}", "").replace("{% endgeneration %}", "")
    return "tools" in meta.find_undeclared_variables(environment.parse(plain))


def _for_template(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Templates want a tool call's arguments as an object; OpenAI's clients send them as JSON text."""
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return message
    return {**message, "tool_calls": [_with_object(call) for call in calls]}


def _with_object(call: Any) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"])
    except ValueError:
        return call
    return {**call, "function": {**function, "arguments": arguments}}
