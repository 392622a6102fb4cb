"""Tool calls in a model's text: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`.

That is the form of the Hermes, Qwen and SmolLM families, whose templates ask for it.
"""

from __future__ import annotations

import json
import re
import secrets
from typing import Any

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_BLOCK = re.compile(re.escape(_OPEN) + r"(.*?)(?:" + re.escape(_CLOSE) + r"|\Z)", re.DOTALL)


class ToolCallFilter:
    """Lets text through up to where a tool call may begin; the rest is read at the end."""

    def __init__(self) -> None:
        self._held = ""

    def push(self, text: str) -> str:
        """The part of the text so far that is certainly no tool call, and was not given out before."""
        self._held += text
        at = self._held.find(_OPEN)
        if at < 0:
            sizes = range(min(len(self._held), len(_OPEN) - 1), 0, -1)
            at = len(self._held) - next((n for n in sizes if self._held.endswith(_OPEN[:n])), 0)
        shown, self._held = self._held[:at], self._held[at:]
        return shown

    def finish(self) -> tuple[str, list[dict[str, Any]]]:
        """What is left as text, and the calls. A call that is not whole or not valid stays text."""
        text, self._held = self._held, ""
        calls: list[dict[str, Any]] = []
        for block in _BLOCK.finditer(text):
            found = _calls(block[1])
            if not found:
                return text, []
            calls += found
        rest = _BLOCK.sub("", text).strip() if calls else text
        return rest, calls


def _calls(text: str) -> list[dict[str, Any]]:
    """One call or a list of them, in OpenAI's shape; empty when the text is neither."""
    try:
        document = json.loads(text)
    except ValueError:
        return []
    items = document if isinstance(document, list) else [document]
    if not items or not all(isinstance(item, dict) and isinstance(item.get("name"), str) for item in items):
        return []
    return [
        {
            "id": f"call_{secrets.token_hex(12)}",
            "type": "function",
            "function": {"name": item["name"], "arguments": _arguments(item)},
        }
        for item in items
    ]


def _arguments(item: dict[str, Any]) -> str:
    arguments = item.get("arguments", item.get("parameters", {}))
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
