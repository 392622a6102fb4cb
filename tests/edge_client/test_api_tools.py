"""Tool calls: read from a model's text, shown to its template, refused where it has no place for them."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from edge_client.api.errors import ApiError
from edge_client.api.pieces import TokenNames
from edge_client.api.prompts import chat_prompt, knows_tools
from edge_client.api.replies import Reply
from edge_client.api.requests import chat_wish
from edge_client.api.tool_calls import ToolCallFilter
from edge_client.api.writer import Cost, Ending, Piece
from edge_client.manifest import read_manifest

CALL = '<tool_call>\n{"name": "search", "arguments": {"words": "deep lake"}}\n</tool_call>'
TOOL = {"type": "function", "function": {"name": "search", "parameters": {"type": "object"}}}
TEMPLATE = (
    "{% if tools %}TOOLS {{ tools | tojson }}\n{% endif %}{% for message in messages %}{{ message.role }}: "
    "{{ message.content }}{% for call in message.tool_calls or [] %}{{ call.function.arguments.words }}"
    "{% endfor %}\n{% endfor %}"
)


def read(text: str, cuts: tuple[int, ...] = ()):
    """The text in pieces -> what is shown, and the calls."""
    tools = ToolCallFilter()
    edges = itertools.pairwise([0, *sorted(cuts), len(text)])
    shown = "".join(tools.push(text[start:end]) for start, end in edges)
    rest, calls = tools.finish()
    return shown + rest, calls


@given(st.lists(st.integers(0, 80), max_size=5))
def test_a_call_is_found_however_the_text_is_cut(cuts: list[int]) -> None:
    text = f"I look it up. {CALL}"
    shown, calls = read(text, tuple(min(cut, len(text)) for cut in cuts))
    assert shown == "I look it up. "
    assert [call["function"]["name"] for call in calls] == ["search"]
    assert json.loads(calls[0]["function"]["arguments"]) == {"words": "deep lake"}
    assert calls[0]["type"] == "function"
    assert calls[0]["id"]


def test_several_calls_have_their_own_ids() -> None:
    _, calls = read(f"{CALL}\n{CALL}")
    assert len({call["id"] for call in calls}) == 2
    _, listed = read('<tool_call>[{"name": "a", "arguments": {}}, {"name": "b"}]</tool_call>')
    assert [call["function"]["name"] for call in listed] == ["a", "b"]


@pytest.mark.parametrize(
    "text",
    [
        "a < b",
        "<tool",
        "<tool_call>not JSON</tool_call>",
        '<tool_call>{"arguments": {}}</tool_call>',
        "<tool_call>",
    ],
)
def test_anything_else_stays_text(text: str) -> None:
    assert read(text) == (text, [])


def test_a_call_that_ends_with_the_answer_counts() -> None:
    """The closing mark may be the token that ends the answer."""
    _, calls = read(CALL.removesuffix("</tool_call>"))
    assert len(calls) == 1


def test_a_reply_carries_the_calls_and_says_why_it_ended(tiny_draft: Path) -> None:
    """Whole and streamed: the text before the call is shown, the call is an object, nothing comes twice."""
    names = TokenNames(Tokenizer.from_file(str(tiny_draft / "tokenizer.json")))
    events = [
        Piece("I look it up. <tool", ()),
        Piece(CALL.removeprefix("<tool"), ()),
        Ending("stop", Cost(completion_tokens=9)),
    ]
    body = {"model": "tiny", "messages": [{"role": "user", "content": "x"}], "tools": [TOOL]}

    def reply() -> Reply:
        return Reply(chat_wish(body).wish, names, "tiny", {}, [""], chat=True, with_tools=True)

    whole = reply()
    for event in events:
        whole.add(0, event)
    choice = whole.whole()["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] == "I look it up."
    assert json.loads(choice["message"]["tool_calls"][0]["function"]["arguments"]) == {"words": "deep lake"}
    streamed = reply()
    chunks = [chunk["choices"][0] for event in events for chunk in streamed.chunks(0, event)]
    assert "".join(chunk["delta"].get("content") or "" for chunk in chunks) == "I look it up. "
    calls = [call for chunk in chunks for call in chunk["delta"].get("tool_calls", [])]
    assert [(call["index"], call["function"]["name"]) for call in calls] == [(0, "search")]
    assert chunks[-1]["finish_reason"] == "tool_calls"


def test_templates_see_tools_and_earlier_calls(tiny_draft: Path) -> None:
    manifest = replace(read_manifest(tiny_draft), chat_template=TEMPLATE)
    tokenizer = Tokenizer.from_file(str(tiny_draft / "tokenizer.json"))
    call = {"type": "function", "function": {"name": "search", "arguments": '{"words": "deep lake"}'}}
    asked = chat_wish(
        {
            "model": "tiny",
            "messages": [
                {"role": "user", "content": "How deep?"},
                {"role": "assistant", "content": None, "tool_calls": [call]},
                {"role": "tool", "content": "118 metres"},
            ],
            "tools": [TOOL],
        }
    )
    text = chat_prompt(manifest, tokenizer, asked.messages, asked.tools).text
    assert text.startswith('TOOLS [{"type": "function"')
    assert "assistant: deep lake" in text
    assert "tool: 118 metres" in text


def test_a_template_without_tools_refuses_them(tiny_draft: Path) -> None:
    manifest = read_manifest(tiny_draft)
    assert not knows_tools(manifest)
    assert knows_tools(replace(manifest, chat_template=TEMPLATE))
    assert not knows_tools(replace(manifest, chat_template="{# tools #}{{ messages }}"))
    with pytest.raises(ApiError, match="no place for them") as caught:
        chat_prompt(manifest, Tokenizer.from_file(str(tiny_draft / "tokenizer.json")), [], [TOOL])
    assert caught.value.status == 400


def test_no_tools_on_request(tiny_draft: Path) -> None:
    body = {"model": "tiny", "messages": [{"role": "user", "content": "x"}], "tools": [TOOL]}
    assert chat_wish(body | {"tool_choice": "none"}).tools == ()
    assert len(chat_wish(body | {"tool_choice": "auto"}).tools) == 1
