"""A request's JSON -> what it asks of every choice."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from edge_client.api.errors import ApiError, bad_param, unsupported
from edge_client.api.fields import Fields
from shared.messages import SamplingParams

MAX_CHOICES = 32
_MAX_STOPS = 16
_MAX_TOP_LOGPROBS = 20
_MAX_TOKENS = 1 << 30
_SEED_BITS = 53  # of seeds that are drawn here: what JSON readers with floats keep
_COMPLETION_TOKENS = 16  # OpenAI's default of /v1/completions

# They change nothing about the answer here.
_IGNORED = frozenset(
    {"user", "metadata", "store", "service_tier", "safety_identifier", "parallel_tool_calls"}
    | {"prompt_cache_key", "prompt_cache_retention"}
)
# Refused unless absent or empty: an answer that silently lacks them would be wrong.
_UNSUPPORTED = {
    "audio": "the model writes text only.",
    "best_of": "use 'n' and choose yourself.",
    "function_call": "use 'tools'.",
    "functions": "use 'tools'.",
    "prediction": "speculation here comes from the draft model.",
    "reasoning_effort": "the model has no such setting.",
    "suffix": "the model only continues a text.",
    "verbosity": "the model has no such setting.",
    "web_search_options": "this endpoint searches nothing.",
}


@dataclass(frozen=True, slots=True)
class Wish:
    """What a request asks of each of its choices.

    Args:
        model: as given.
        sampling: with the seed of the first choice.
        max_new_tokens: None lets the answer fill the context.
        stop: strings that end the answer and are not part of it.
        logprobs: None for none; else how many of the likeliest tokens to name beside each token.
        num_choices: answers to each prompt.
        stream: as server-sent events.
        include_usage: ends a stream with usage.
        trace: tells each token's id and origin.
        echo: starts a completion with its prompt.
    """

    model: str
    sampling: SamplingParams
    max_new_tokens: int | None
    stop: tuple[str, ...]
    logprobs: int | None
    num_choices: int
    stream: bool
    include_usage: bool
    trace: bool
    echo: bool = False


@dataclass(frozen=True, slots=True)
class ChatWish:
    wish: Wish
    messages: tuple[Mapping[str, Any], ...]
    tools: tuple[Mapping[str, Any], ...]


@dataclass(frozen=True, slots=True)
class CompletionWish:
    wish: Wish
    prompts: tuple[str | tuple[int, ...], ...]


def chat_wish(body: Mapping[str, Any]) -> ChatWish:
    """Raises ApiError(400) that names the parameter."""
    fields = Fields(body)
    messages = fields.take("messages")
    if not isinstance(messages, list) or not messages:
        raise bad_param("messages", "'messages' must be a list of at least one message.")
    top_logprobs = fields.integer("top_logprobs", 0, 0, _MAX_TOP_LOGPROBS)
    logprobs: int | None = top_logprobs
    if not fields.boolean("logprobs"):
        if top_logprobs:
            raise bad_param("top_logprobs", "'top_logprobs' needs 'logprobs' to be true.")
        logprobs = None
    _check_response_format(fields)
    tools = _tools(fields)
    max_tokens = fields.integer("max_tokens", 0, 1, _MAX_TOKENS) if "max_tokens" in _given(body) else None
    if "max_completion_tokens" in _given(body):
        max_tokens = fields.integer("max_completion_tokens", 0, 1, _MAX_TOKENS)
    wish = _wish(fields, logprobs, max_tokens)
    return ChatWish(wish, tuple(_message(i, message) for i, message in enumerate(messages)), tools)


def completion_wish(body: Mapping[str, Any]) -> CompletionWish:
    """Raises ApiError(400) that names the parameter."""
    fields = Fields(body)
    prompts = _prompts(fields.take("prompt"))
    logprobs: int | None = None
    if "logprobs" in _given(body):
        logprobs = fields.integer("logprobs", 0, 0, _MAX_TOP_LOGPROBS)
    echo = fields.boolean("echo")
    if echo and logprobs is not None:
        raise unsupported("echo", "log-probabilities of a prompt are not computed; leave one of both out.")
    max_tokens = fields.integer("max_tokens", _COMPLETION_TOKENS, 1, _MAX_TOKENS)
    wish = _wish(fields, logprobs, max_tokens, echo=echo)
    if len(prompts) * wish.num_choices > MAX_CHOICES:
        raise bad_param("n", f"{len(prompts)} prompts x {wish.num_choices} choices exceed {MAX_CHOICES}.")
    return CompletionWish(wish, prompts)


def _given(body: Mapping[str, Any]) -> set[str]:
    return {key for key, value in body.items() if value is not None}


def _wish(fields: Fields, logprobs: int | None, max_tokens: int | None, *, echo: bool = False) -> Wish:
    for name, why in _UNSUPPORTED.items():
        if fields.take(name) not in (None, [], {}, ""):
            raise unsupported(name, why)
    if fields.take("modalities", ["text"]) != ["text"]:
        raise unsupported("modalities", "the model writes text only.")
    stream = fields.boolean("stream")
    stream_options = fields.object("stream_options")
    include_usage = stream_options.boolean("include_usage")
    stream_options.ignore(frozenset({"include_obfuscation"}))
    stream_options.close()
    if include_usage and not stream:
        raise bad_param("stream_options", "'stream_options' needs 'stream' to be true.")
    own = fields.object("specwire")
    trace = own.boolean("trace")
    own.close()
    wish = Wish(
        model=fields.text("model"),
        sampling=_sampling(fields),
        max_new_tokens=max_tokens,
        stop=_stop(fields.take("stop", [])),
        logprobs=logprobs,
        num_choices=fields.integer("n", 1, 1, MAX_CHOICES),
        stream=stream,
        include_usage=include_usage,
        trace=trace,
        echo=echo,
    )
    fields.ignore(_IGNORED)
    fields.close()
    return wish


def _sampling(fields: Fields) -> SamplingParams:
    """OpenAI's parameters with OpenAI's defaults, and those that are common beside them."""
    seed = fields.integer("seed", secrets.randbits(_SEED_BITS), -(1 << 63), (1 << 64) - 1)
    top_p = fields.number("top_p", 1.0, 0.0, 1.0)
    return SamplingParams(
        temperature=fields.number("temperature", 1.0, 0.0, 2.0),
        # OpenAI allows 0, which leaves the likeliest token alone.
        top_p=max(top_p, 1e-6),
        top_k=max(fields.integer("top_k", 0, -1, 1 << 31), 0),
        min_p=fields.number("min_p", 0.0, 0.0, 0.999),
        seed=seed % (1 << 64),
        repetition_penalty=fields.number("repetition_penalty", 1.0, 1e-3, 1e3),
        presence_penalty=fields.number("presence_penalty", 0.0, -2.0, 2.0),
        frequency_penalty=fields.number("frequency_penalty", 0.0, -2.0, 2.0),
        logit_bias=_logit_bias(fields.take("logit_bias", {})),
        min_tokens=fields.integer("min_tokens", 0, 0, _MAX_TOKENS),
        fused_weight=fields.number("fused_weight", 0.0, 0.0, 1.0),
    )


def _logit_bias(value: Any) -> dict[int, float]:
    if not isinstance(value, dict):
        raise bad_param("logit_bias", "'logit_bias' must be an object of token ids and numbers.")
    out: dict[int, float] = {}
    for key, bias in value.items():
        if not str(key).isdecimal() or isinstance(bias, bool) or not isinstance(bias, int | float):
            raise bad_param("logit_bias", "'logit_bias' must map token ids to numbers.")
        if not -100 <= bias <= 100:
            raise bad_param("logit_bias", f"'logit_bias' of token {key} must be from -100 to 100.")
        out[int(key)] = float(bias)
    return out


def _stop(value: Any) -> tuple[str, ...]:
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(text, str) and text for text in stops):
        raise bad_param("stop", "'stop' must be a text, or a list of texts, none of them empty.")
    if len(stops) > _MAX_STOPS:
        raise bad_param("stop", f"'stop' takes at most {_MAX_STOPS} texts.")
    return tuple(stops)


def _prompts(value: Any) -> tuple[str | tuple[int, ...], ...]:
    """A text, token ids, or a list of either."""
    if isinstance(value, str):
        return (value,)
    if isinstance(value, list) and value:
        if _is_ids(value):
            return (tuple(value),)
        if all(isinstance(item, str) or _is_ids(item) for item in value):
            return tuple(item if isinstance(item, str) else tuple(item) for item in value)
    raise bad_param("prompt", "'prompt' must be a text, a list of token ids, or a list of these.")


def _is_ids(value: Any) -> bool:
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(item, int) and not isinstance(item, bool) and item >= 0 for item in value)
    )


def _check_response_format(fields: Fields) -> None:
    wanted = fields.object("response_format")
    kind = wanted.take("type", "text")
    if kind != "text":
        raise ApiError(
            400,
            f"'response_format' of type {kind!r} is not supported: nothing forces a grammar on the model. "
            "Ask for the format in the prompt and check the answer.",
            param="response_format",
            code="unsupported_parameter",
        )


def _tools(fields: Fields) -> tuple[Mapping[str, Any], ...]:
    tools = fields.take("tools", [])
    if not isinstance(tools, list) or not all(_is_function(tool) for tool in tools):
        raise bad_param("tools", "'tools' must be a list of objects of type 'function'.")
    choice = fields.take("tool_choice", "auto")
    if choice == "none":
        return ()
    if choice != "auto":
        raise unsupported("tool_choice", "the model decides by itself; use 'auto' or 'none'.")
    return tuple(tools)


def _is_function(tool: Any) -> bool:
    return (
        isinstance(tool, dict)
        and tool.get("type") == "function"
        and isinstance(tool.get("function"), dict)
        and isinstance(tool["function"].get("name"), str)
    )


def _message(index: int, message: Any) -> Mapping[str, Any]:
    """A message as chat templates take it: its content as one text."""
    where = f"messages[{index}]"
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise bad_param(where, f"'{where}' must be an object with a 'role'.")
    out = {key: value for key, value in message.items() if value is not None}
    if out["role"] == "developer":
        out["role"] = "system"
    out["content"] = _content(f"{where}.content", message.get("content"), "tool_calls" in out)
    return out


def _content(where: str, content: Any, may_be_missing: bool) -> str:
    if isinstance(content, str):
        return content
    if content is None and may_be_missing:
        return ""
    if not isinstance(content, list):
        raise bad_param(where, f"'{where}' must be a text or a list of parts.")
    parts: list[str] = []
    for part in content:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise unsupported(where, "parts other than of type 'text' are not.")
        parts.append(part["text"])
    return "".join(parts)
