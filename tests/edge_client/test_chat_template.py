"""Equal to transformers' own rendering, and clear when a template refuses."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from edge_client.chat_template import render
from edge_client.manifest import DraftManifest, read_manifest
from shared.faults import FaultKind, SpecwireError

CHATS = [
    [{"role": "user", "content": "Hello <b>& you</b>"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "你好"}],
    [
        {"role": "user", "content": "One"},
        {"role": "assistant", "content": "Two\n"},
        {"role": "user", "content": "Three"},
    ],
]
# What real templates use of the dialect: block trimming, JSON, loop control, exceptions, markers.
RICH = """{%- set ns = namespace(count=0) %}
{{- bos_token }}
{% for message in messages %}
    {%- if message.role == "tool" %}{% continue %}{% endif %}
    {%- set ns.count = ns.count + 1 %}
    {%- if message.role == "assistant" %}
        {% generation %}{{ message.content | trim }}{% endgeneration %}
    {%- else %}
[{{ message.role }}] {{ message | tojson(indent=2) }}{{ eos_token }}
    {%- endif %}
{% endfor %}
{{ ns.count }}{{ dict(a=1) | tojson }}
{%- if add_generation_prompt %}<|assistant|>{% endif %}"""


@pytest.fixture(scope="module")
def manifest(tiny_draft: Path) -> DraftManifest:
    return read_manifest(tiny_draft)


@pytest.mark.parametrize("messages", CHATS)
@pytest.mark.parametrize("template", [None, RICH])
@pytest.mark.parametrize("prompt", [True, False])
def test_equals_transformers(tiny_target: Path, manifest, messages, template, prompt) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_target)
    expected = tokenizer.apply_chat_template(
        messages, chat_template=template, tokenize=False, add_generation_prompt=prompt
    )
    if template:
        manifest = dataclasses.replace(manifest, chat_template=template)
    assert render(manifest, messages, add_generation_prompt=prompt) == expected


def test_a_model_without_a_template_says_so(manifest) -> None:
    with pytest.raises(SpecwireError, match="has no chat template") as caught:
        render(dataclasses.replace(manifest, chat_template=None), CHATS[0])
    assert caught.value.kind is FaultKind.UNSUPPORTED_MODEL


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{% if %}", "Expected"),
        ("{{ messages.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe|not safely callable"),
        ("{{ messages[0]['content'] + 1 }}", "str"),
    ],
)
def test_a_template_that_fails_is_a_typed_error(manifest, template: str, reason: str) -> None:
    with pytest.raises(SpecwireError, match=reason) as caught:
        render(dataclasses.replace(manifest, chat_template=template), CHATS[0])
    assert caught.value.kind is FaultKind.BAD_REQUEST
