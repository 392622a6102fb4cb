"""The main path as most programs take it: the official `openai` client, the endpoint, real gRPC, the built-in
models."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from pathlib import Path

import openai
import pytest
import pytest_asyncio
from openai import AsyncOpenAI
from tokenizers import Tokenizer

from edge_client.api.prompts import chat_prompt
from edge_client.api.server import ServeConfig, serving
from edge_client.connection import Verifier
from edge_client.draft_model import DraftModel
from edge_client.options import Options

pytestmark = pytest.mark.asyncio(loop_scope="module")

MODEL = "assistant"
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(builtin_verifier: str, draft_dir: Path) -> AsyncIterator[AsyncOpenAI]:
    options = Options(verifier=builtin_verifier, draft=str(draft_dir), insecure=True, threads=1, k="5")
    async with (
        serving(options, ServeConfig(port=0, model_alias=MODEL)) as url,
        AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
    ):
        yield client


async def ask(client: AsyncOpenAI, **changes):
    wish = {"model": MODEL, "messages": QUESTION, "max_tokens": 32, "temperature": 0} | changes
    return await client.chat.completions.create(**wish)


async def test_a_stream_is_the_targets_own_text(
    client: AsyncOpenAI, builtin_verifier: str, builtin_model: DraftModel, draft_dir: Path, write
) -> None:
    manifest = builtin_model.manifest
    tokenizer = Tokenizer.from_file(str(draft_dir / "tokenizer.json"))
    prompt = chat_prompt(manifest, tokenizer, QUESTION, ()).tokens
    alone = await write(
        builtin_verifier, builtin_model, prompt, cloud_only=True, eos_ids=manifest.eos_ids, max_new_tokens=32
    )
    text, usage, report = "", None, {}
    async for chunk in await ask(client, stream=True, stream_options={"include_usage": True}):
        for choice in chunk.choices:
            text += choice.delta.content or ""
        usage = chunk.usage or usage
        report = chunk.model_extra.get("specwire") or report
    assert text == tokenizer.decode(list(alone.tokens))
    assert "Paris" in text
    assert usage is not None
    assert usage.prompt_tokens == len(prompt)
    assert usage.completion_tokens == len([t for t in alone.tokens if t not in manifest.eos_ids])
    assert report["lossy"] is False
    assert report["rounds"] > 0
    assert report["accepted"] > 0


async def test_logprobs_are_the_targets(client: AsyncOpenAI) -> None:
    reply = await ask(client, logprobs=True, top_logprobs=5, max_tokens=8)
    content = reply.choices[0].logprobs.content
    assert len(content) == reply.usage.completion_tokens
    assert "".join(entry.token for entry in content) == reply.choices[0].message.content
    for entry in content:
        values = [top.logprob for top in entry.top_logprobs]
        assert values == sorted(values, reverse=True)
        assert entry.token == entry.top_logprobs[0].token  # greedy
        assert sum(map(math.exp, values)) <= 1 + 1e-4


async def test_a_stop_string_ends_text_tokens_and_usage_together(client: AsyncOpenAI) -> None:
    full = (await ask(client)).choices[0].message.content
    assert " France" in full
    reply = await ask(client, stop=[" France"], logprobs=True)
    assert reply.choices[0].message.content == full[: full.find(" France")]
    assert reply.choices[0].finish_reason == "stop"
    assert len(reply.choices[0].logprobs.content) == reply.usage.completion_tokens


@pytest.mark.parametrize("stream", [False, True])
async def test_a_stop_string_may_begin_and_end_inside_tokens(client: AsyncOpenAI, stream: bool) -> None:
    """The token that it begins in stays, with the part of its text before the stop string."""
    stop = "ance i"
    full = (await ask(client)).choices[0].message.content
    assert " France is" in full
    asked = {"stop": [stop], "logprobs": True, "stream": stream, "extra_body": {"specwire": {"trace": True}}}
    text, named, traced, finish, usage = "", [], [], None, None
    if stream:
        async for chunk in await ask(client, stream_options={"include_usage": True}, **asked):
            traced += (chunk.model_extra.get("specwire") or {}).get("tokens", [])
            usage = chunk.usage
            for choice in chunk.choices:
                text += choice.delta.content or ""
                named += choice.logprobs.content if choice.logprobs else []
                finish = choice.finish_reason or finish
    else:
        reply = await ask(client, **asked)
        choice, usage = reply.choices[0], reply.usage
        text, named, finish = choice.message.content, choice.logprobs.content, choice.finish_reason
        traced = reply.model_extra["specwire"]["choices"][0]["tokens"]
    assert text == full[: full.find(stop)]
    assert text.endswith(" Fr")
    assert "".join(token["text"] for token in traced) == text
    assert "".join(entry.token for entry in named) == f"{text}ance"
    assert len(named) == len(traced) == usage.completion_tokens
    assert finish == "stop"


async def test_a_next_turn_goes_on_from_what_is_known(client: AsyncOpenAI) -> None:
    first = await ask(client)
    turn = [
        *QUESTION,
        {"role": "assistant", "content": first.choices[0].message.content},
        {"role": "user", "content": "And of Italy?"},
    ]
    second = await ask(client, messages=turn)
    assert "Rome" in second.choices[0].message.content
    known = first.usage.prompt_tokens + first.usage.completion_tokens
    assert second.usage.prompt_tokens_details.cached_tokens >= known


async def test_a_closed_stream_ends_the_work_on_both_sides(
    client: AsyncOpenAI, builtin_verifier: str
) -> None:
    """What it had not written by then is not written any more."""
    async with Verifier([builtin_verifier], tls=None) as verifier:
        before = (await verifier.describe()).load.num_sessions
        stream = await ask(
            client,
            stream=True,
            max_tokens=1000,
            messages=[{"role": "user", "content": "Write a very long story about a lighthouse."}],
        )
        await anext(aiter(stream))
        await stream.close()
        for _ in range(100):
            if (await verifier.describe()).load.num_sessions <= before:
                break
            await asyncio.sleep(0.05)
        load = (await verifier.describe()).load
    assert load.num_sessions <= before
    assert (await ask(client, max_tokens=2)).usage.completion_tokens == 2


async def test_errors_are_typed(client: AsyncOpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="temperature"):
        await ask(client, temperature=9)
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        await ask(client, model="other")
    with pytest.raises(openai.BadRequestError, match="response_format"):
        await ask(client, response_format={"type": "json_object"})
    with pytest.raises(openai.BadRequestError) as caught:
        await ask(client, messages=[{"role": "user", "content": "word " * 20_000}])
    assert caught.value.code == "context_length_exceeded"
