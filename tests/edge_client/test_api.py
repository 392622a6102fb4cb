"""The endpoint as its clients see it: the official `openai` package and plain HTTP, on a tiny model pair."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path

import edge_support
import httpx
import openai
import pytest
from edge_support import Relay
from openai import AsyncOpenAI
from tokenizers import Tokenizer

from cloud_verifier.local import local_verifier
from cloud_verifier.passes import StepEmulation
from cloud_verifier.target_model import TargetModel
from edge_client import api
from edge_client.api.backend import Backend, open_backend
from edge_client.api.pool import Prompt
from edge_client.api.requests import _IGNORED, _UNSUPPORTED, Wish
from edge_client.api.server import ServeConfig, serving
from edge_client.api.writer import Cost, Ending, write
from edge_client.connection import Verifier
from edge_client.options import Options
from shared.faults import SpecwireError
from shared.messages import SamplingParams

MODEL = "tiny"
HELLO = [{"role": "user", "content": "Hello"}]
# The tiny model writes stray bytes, whose text does not encode to the same tokens again; so it is
# held to printable ASCII where that matters.
ASCII = {str(token): 100 for token in range(94)}


@pytest.fixture(scope="module")
def verifier(tiny_target: Path) -> Iterator[str]:
    """A verifier that no other test has sessions on."""
    with local_verifier("--target", str(tiny_target), "--dtype", "float32") as address:
        yield address


def options(address: str, draft: Path, **changes: object) -> Options:
    values: dict = {
        "verifier": address,
        "draft": str(draft),
        "insecure": True,
        "tls_ca": None,
        "token": "",
        "connect_timeout": 5.0,
        "patience": 2.0,
        "threads": 1,
        "k": "4",
    }
    return Options(**(values | changes))


@asynccontextmanager
async def endpoint(address: str, draft: Path, *, ahead: str = "auto", **config: object) -> AsyncIterator[str]:
    settings = options(address, draft, ahead=ahead)
    async with serving(settings, ServeConfig(port=0, model_alias=MODEL, **config)) as url:
        yield url


ONE_OR_MANY = pytest.mark.parametrize("ahead", ["0", "3"])
"""Blocks that may be in flight beyond the first."""


@pytest.fixture
def ahead() -> str:
    return "auto"


@pytest.fixture
async def url(verifier: str, tiny_draft: Path, ahead: str) -> AsyncIterator[str]:
    async with endpoint(verifier, tiny_draft, ahead=ahead) as url:
        yield url


@pytest.fixture
async def client(url: str) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
async def http(url: str) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=url, timeout=60) as client:
        yield client


async def chat(client: AsyncOpenAI, **changes: object):
    values: dict = {"model": MODEL, "messages": HELLO, "max_tokens": 24, "seed": 1} | changes
    return await client.chat.completions.create(**values)


class TestAnswers:
    async def test_streamed_and_whole_are_the_same(self, client: AsyncOpenAI) -> None:
        whole = await chat(client, temperature=0.8)
        chunks = [chunk async for chunk in await chat(client, temperature=0.8, stream=True)]
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        assert text == whole.choices[0].message.content
        assert text
        assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason
        assert chunks[0].choices[0].delta.role == "assistant"

    async def test_seed_decides(self, client: AsyncOpenAI) -> None:
        texts = [(await chat(client, temperature=1, seed=s)).choices[0].message.content for s in (1, 1, 2)]
        assert texts[0] == texts[1] != texts[2]

    async def test_usage_is_exact(self, client: AsyncOpenAI, tiny_draft: Path) -> None:
        reply = await chat(client, max_tokens=9, temperature=0)
        tokenizer = Tokenizer.from_file(str(tiny_draft / "tokenizer.json"))
        prompt = "<|start|>user: Hello\nassistant: "
        assert reply.usage.prompt_tokens == len(tokenizer.encode(prompt, add_special_tokens=False).ids)
        assert reply.usage.completion_tokens == 9
        assert reply.usage.total_tokens == reply.usage.prompt_tokens + 9
        assert reply.choices[0].finish_reason == "length"

    async def test_both_names_of_the_longest_answer(self, client: AsyncOpenAI) -> None:
        wish = {"model": MODEL, "messages": HELLO, "max_completion_tokens": 5}
        assert (await client.chat.completions.create(**wish)).usage.completion_tokens == 5
        assert (await chat(client, max_tokens=9, max_completion_tokens=4)).usage.completion_tokens == 4

    async def test_stream_ends_with_usage_when_asked(self, client: AsyncOpenAI) -> None:
        stream = await chat(client, stream=True, stream_options={"include_usage": True}, temperature=0)
        chunks = [chunk async for chunk in stream]
        assert chunks[-1].choices == []
        assert chunks[-1].usage.completion_tokens == 24
        assert all(chunk.usage is None for chunk in chunks[:-1])

    async def test_specwire_says_what_speculation_did(self, client: AsyncOpenAI) -> None:
        report = (await chat(client, temperature=0)).model_extra["specwire"]
        assert report["lossy"] is False
        assert report["verification"]
        assert sum(report["origins"].values()) == 24
        assert 0 < report["accepted"] <= report["drafted"]
        assert report["acceptance"] == pytest.approx(report["accepted"] / report["drafted"], abs=1e-4)
        assert report["up_bytes"] > 0 < report["down_bytes"]

    async def test_specwire_says_whose_times_they_are(
        self, client: AsyncOpenAI, target_model: TargetModel, tiny_draft: Path
    ) -> None:
        assert "emulation" not in (await chat(client, max_tokens=3)).model_extra["specwire"]
        emulated = StepEmulation(2.0, 0.1, "Big")
        async with (
            edge_support.serving(target_model, emulation=emulated) as address,
            endpoint(address, tiny_draft) as url,
            connected(url) as other,
        ):
            report = (await chat(other, max_tokens=3)).model_extra["specwire"]
        assert report["emulation"] == "Big: 2 ms a pass and 0.1 ms a token"

    async def test_trace_names_every_token(self, client: AsyncOpenAI, tiny_draft: Path) -> None:
        stream = await chat(client, stream=True, temperature=1, extra_body={"specwire": {"trace": True}})
        text, traced, ids, origins = "", "", [], set()
        async for chunk in stream:
            text += chunk.choices[0].delta.content or ""
            for token in (chunk.model_extra.get("specwire") or {}).get("tokens", []):
                traced += token["text"]
                ids.append(token["id"])
                origins.add(token["origin"])
        assert traced == text
        assert Tokenizer.from_file(str(tiny_draft / "tokenizer.json")).decode(ids) == text
        assert origins <= {"accepted", "recovered", "bonus", "sibling", "cloud"}
        assert "accepted" in origins

    async def test_choices_differ_and_are_all_counted(self, client: AsyncOpenAI) -> None:
        reply = await chat(client, n=3, temperature=1)
        texts = [choice.message.content for choice in reply.choices]
        assert len(set(texts)) == 3
        assert reply.usage.completion_tokens == 3 * 24
        assert [choice.index for choice in reply.choices] == [0, 1, 2]
        alone = await chat(client, temperature=1)
        assert alone.choices[0].message.content == texts[0]

    async def test_streamed_choices_carry_their_index(self, client: AsyncOpenAI) -> None:
        texts, ends = ["", ""], set()
        async for chunk in await chat(client, n=2, temperature=1, stream=True):
            choice = chunk.choices[0]
            texts[choice.index] += choice.delta.content or ""
            if choice.finish_reason:
                ends.add(choice.index)
        assert ends == {0, 1}
        assert texts[0] != texts[1]

    async def test_completions_take_texts_and_ids(self, client: AsyncOpenAI, tiny_draft: Path) -> None:
        tokenizer = Tokenizer.from_file(str(tiny_draft / "tokenizer.json"))
        ids = [256, *tokenizer.encode("abc", add_special_tokens=False).ids]
        create = client.completions.create
        by_text = await create(model=MODEL, prompt="abc", temperature=0, max_tokens=8)
        by_ids = await create(model=MODEL, prompt=ids, temperature=0, max_tokens=8)
        both = await create(model=MODEL, prompt=["abc", "xyz"], temperature=0, max_tokens=8)
        assert by_text.choices[0].text == by_ids.choices[0].text == both.choices[0].text
        assert len(both.choices) == 2
        assert both.usage.prompt_tokens == 8

    async def test_echo_starts_with_the_prompt(self, client: AsyncOpenAI) -> None:
        plain = await client.completions.create(model=MODEL, prompt="abc", temperature=0, max_tokens=8)
        echoed = await client.completions.create(
            model=MODEL, prompt="abc", temperature=0, max_tokens=8, echo=True
        )
        assert echoed.choices[0].text == "abc" + plain.choices[0].text
        stream = await client.completions.create(
            model=MODEL, prompt="abc", temperature=0, max_tokens=8, echo=True, stream=True
        )
        assert "".join([chunk.choices[0].text async for chunk in stream]) == echoed.choices[0].text

    async def test_parts_of_text_are_joined(self, client: AsyncOpenAI) -> None:
        parts = [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]
        whole = await chat(client, temperature=0)
        split = await chat(client, temperature=0, messages=[{"role": "user", "content": parts}])
        assert split.choices[0].message.content == whole.choices[0].message.content

    async def test_models(self, client: AsyncOpenAI) -> None:
        names = [model.id async for model in client.models.list()]
        assert MODEL in names
        assert (await client.models.retrieve(MODEL)).id == MODEL
        with pytest.raises(openai.NotFoundError):
            await client.models.retrieve("other")


class TestSampling:
    async def test_logit_bias_forbids(self, client: AsyncOpenAI) -> None:
        text = (await chat(client, temperature=1, logit_bias=ASCII)).choices[0].message.content
        assert len(text) == 24
        assert all("!" <= char <= "~" for char in text)

    async def test_penalties_are_the_verifiers_too(self, client: AsyncOpenAI) -> None:
        """Greedy among two letters: only the penalty can make the less likely one come."""
        wish = {"temperature": 0, "logit_bias": {"40": 100, "41": 100}, "max_tokens": 24}
        plain = (await chat(client, **wish)).choices[0].message.content
        varied = (await chat(client, **wish, frequency_penalty=2)).choices[0].message.content
        assert abs(varied.count("I") - varied.count("J")) < abs(plain.count("I") - plain.count("J"))

    async def test_every_penalty_is_the_same_to_the_draft_and_the_verifier(
        self, client: AsyncOpenAI, verifier: str, tiny_draft: Path
    ) -> None:
        alone = options(verifier, tiny_draft, cloud_only=True)
        async with (
            serving(alone, ServeConfig(port=0, model_alias=MODEL)) as url,
            connected(url) as cloud,
        ):
            texts = []
            for wish in (
                {},
                {"frequency_penalty": 1.5},
                {"presence_penalty": 2},
                {"extra_body": {"repetition_penalty": 1.8}},
            ):
                ours, theirs = [
                    (await chat(each, temperature=0, logit_bias=ASCII, **wish)).choices[0].message.content
                    for each in (client, cloud)
                ]
                assert ours == theirs
                texts.append(ours)
        assert all(text != texts[0] for text in texts[1:])

    async def test_top_k_of_one_is_greedy(self, client: AsyncOpenAI) -> None:
        greedy = (await chat(client, temperature=0)).choices[0].message.content
        narrow = (await chat(client, temperature=1, extra_body={"top_k": 1})).choices[0].message.content
        assert narrow == greedy


@ONE_OR_MANY
class TestStop:
    @pytest.mark.parametrize("stream", [False, True])
    async def test_text_ids_logprobs_and_usage_end_together(
        self, client: AsyncOpenAI, tiny_draft: Path, stream: bool
    ) -> None:
        """A stop string of two tokens, wherever in a block it falls."""
        tokenizer = Tokenizer.from_file(str(tiny_draft / "tokenizer.json"))
        full = (await chat(client, temperature=0, max_tokens=40, logit_bias=ASCII)).choices[0].message.content
        starts = [s for s in range(2, len(full) - 2) if full.find(full[s : s + 2]) == s]
        for start in starts[:4]:
            stop = full[start : start + 2]
            text, ids, values, usage, finish = await self._answer(client, stop, stream)
            assert text == full[:start]
            assert tokenizer.decode(ids) == text
            assert len(values) == len(ids) == usage.completion_tokens
            assert finish == "stop"

    async def _answer(self, client: AsyncOpenAI, stop: str, stream: bool):
        asked = {
            "temperature": 0,
            "max_tokens": 40,
            "logit_bias": ASCII,
            "stop": ["never there", stop],
            "logprobs": True,
            "extra_body": {"specwire": {"trace": True}},
        }
        if not stream:
            reply = await chat(client, **asked)
            choice = reply.choices[0]
            ids = [token["id"] for token in reply.model_extra["specwire"]["choices"][0]["tokens"]]
            values = [entry.logprob for entry in choice.logprobs.content]
            return choice.message.content, ids, values, reply.usage, choice.finish_reason
        text, ids, values, finish, usage = "", [], [], None, None
        stream_options = {"include_usage": True}
        async for chunk in await chat(client, **asked, stream=True, stream_options=stream_options):
            usage = chunk.usage or usage
            for choice in chunk.choices:
                text += choice.delta.content or ""
                ids += [token["id"] for token in (chunk.model_extra.get("specwire") or {}).get("tokens", [])]
                values += [entry.logprob for entry in (choice.logprobs.content if choice.logprobs else [])]
                finish = choice.finish_reason or finish
        return text, ids, values, usage, finish


class TestLogprobs:
    async def test_chat(self, client: AsyncOpenAI) -> None:
        reply = await chat(client, temperature=0, logprobs=True, top_logprobs=3)
        content = reply.choices[0].logprobs.content
        assert len(content) == reply.usage.completion_tokens
        assert b"".join(bytes(entry.bytes) for entry in content).decode(errors="replace") == (
            reply.choices[0].message.content
        )
        for entry in content:
            values = [top.logprob for top in entry.top_logprobs]
            assert values == sorted(values, reverse=True)
            assert len(values) == 3
            # Greedy: the token is the likeliest one.
            assert entry.logprob == pytest.approx(values[0], abs=1e-5)
            assert entry.logprob < 0

    async def test_none_unless_asked(self, client: AsyncOpenAI) -> None:
        assert (await chat(client)).choices[0].logprobs is None

    async def test_completion(self, client: AsyncOpenAI) -> None:
        reply = await client.completions.create(
            model=MODEL, prompt="abc", temperature=0, max_tokens=12, logprobs=2
        )
        choice = reply.choices[0]
        assert len(choice.logprobs.tokens) == len(choice.logprobs.token_logprobs) == 12
        assert all(len(top) <= 2 for top in choice.logprobs.top_logprobs)
        assert choice.logprobs.text_offset[0] == 0
        assert choice.logprobs.text_offset == sorted(choice.logprobs.text_offset)


class TestRefusals:
    @pytest.mark.parametrize(
        ("change", "param"),
        [
            ({"temperature": -1}, "temperature"),
            ({"temperature": "hot"}, "temperature"),
            ({"top_p": 2}, "top_p"),
            ({"max_tokens": 0}, "max_tokens"),
            ({"n": 0}, "n"),
            ({"n": 33}, "n"),
            ({"stop": 5}, "stop"),
            ({"stop": [""]}, "stop"),
            ({"seed": 1.5}, "seed"),
            ({"stream": "yes"}, "stream"),
            ({"top_logprobs": 2}, "top_logprobs"),
            ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
            ({"stream_options": {"include_usage": True}}, "stream_options"),
            ({"logit_bias": {"x": 1}}, "logit_bias"),
            ({"logit_bias": {"5": 101}}, "logit_bias"),
            ({"logit_bias": {"259": 1}}, "logit_bias"),
            ({"response_format": {"type": "json_object"}}, "response_format"),
            ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
            ({"tool_choice": "required"}, "tool_choice"),
            ({"functions": [{"name": "f"}]}, "functions"),
            ({"temprature": 1}, "temprature"),
            ({"specwire": {"tracing": True}}, "specwire.tracing"),
            ({"messages": []}, "messages"),
            ({"messages": [{"content": "x"}]}, "messages[0]"),
            ({"messages": [{"role": "user"}]}, "messages[0].content"),
            ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content"),
        ],
    )
    async def test_names_the_parameter(self, http: httpx.AsyncClient, change: dict, param: str) -> None:
        reply = await http.post("/v1/chat/completions", json={"model": MODEL, "messages": HELLO, **change})
        assert reply.status_code == 400, reply.text
        error = reply.json()["error"]
        assert error["param"] == param
        assert set(error) == {"message", "type", "param", "code"}
        assert error["type"] == "invalid_request_error"

    async def test_null_means_not_given(self, http: httpx.AsyncClient) -> None:
        body = {"model": MODEL, "messages": HELLO, "max_tokens": 3, "stop": None, "tools": None, "seed": None}
        assert (await http.post("/v1/chat/completions", json=body)).status_code == 200

    async def test_unknown_model(self, client: AsyncOpenAI) -> None:
        with pytest.raises(openai.NotFoundError, match="does not exist"):
            await chat(client, model="other")

    async def test_too_long_a_prompt(self, client: AsyncOpenAI) -> None:
        with pytest.raises(openai.BadRequestError) as caught:
            await chat(client, messages=[{"role": "user", "content": "x" * 600}])
        assert caught.value.code == "context_length_exceeded"

    async def test_a_stream_is_refused_with_a_status(self, client: AsyncOpenAI) -> None:
        with pytest.raises(openai.BadRequestError):
            await chat(client, stream=True, temperature=9)

    @pytest.mark.parametrize("body", [b"", b"{", b"[]", b'"x"', b"[" * 100_000])
    async def test_not_json(self, http: httpx.AsyncClient, body: bytes) -> None:
        headers = {"content-type": "application/json"}
        reply = await http.post("/v1/chat/completions", content=body, headers=headers)
        assert reply.status_code == 400
        assert reply.json()["error"]["code"] == "invalid_json"

    async def test_a_form_of_another_site_is_refused(self, http: httpx.AsyncClient) -> None:
        body = json.dumps({"model": MODEL, "messages": HELLO})
        reply = await http.post("/v1/chat/completions", content=body, headers={"content-type": "text/plain"})
        assert reply.status_code == 415

    async def test_too_large(self, http: httpx.AsyncClient) -> None:
        body = b'{"x":"' + b"x" * (9 << 20) + b'"}'
        headers = {"content-type": "application/json"}
        reply = await http.post("/v1/chat/completions", content=body, headers=headers)
        assert reply.status_code == 413

    @pytest.mark.parametrize(
        ("method", "path", "status"), [("GET", "/v1/nothing", 404), ("GET", "/v1/completions", 405)]
    )
    async def test_unknown_paths(self, http: httpx.AsyncClient, method: str, path: str, status: int) -> None:
        reply = await http.request(method, path)
        assert reply.status_code == status
        assert reply.json()["error"]["message"]


class TestFields:
    async def test_ignored_ones_change_nothing(self, http: httpx.AsyncClient) -> None:
        ignored = dict.fromkeys(_IGNORED, "x")
        for path, asked in (
            ("/v1/completions", {"prompt": "abc"}),
            ("/v1/chat/completions", {"messages": HELLO}),
        ):
            body = {"model": MODEL, "max_tokens": 3, **asked}
            assert (await http.post(path, json=body | ignored)).status_code == 200

    @pytest.mark.parametrize(
        ("name", "value"),
        [
            ("max_completion_tokens", 3),
            ("top_logprobs", 2),
            ("tools", []),
            ("tool_choice", "auto"),
            ("response_format", {"type": "text"}),
        ],
    )
    async def test_those_of_chats_are_unknown_to_completions(
        self, http: httpx.AsyncClient, name: str, value: object
    ) -> None:
        chat = {"model": MODEL, "messages": HELLO, "max_tokens": 3, "logprobs": True, name: value}
        assert (await http.post("/v1/chat/completions", json=chat)).status_code == 200
        reply = await http.post("/v1/completions", json={"model": MODEL, "prompt": "abc", name: value})
        assert reply.status_code == 400
        assert reply.json()["error"]["param"] == name

    def test_the_readme_names_all_of_them(self) -> None:
        text = (Path(api.__file__).parent / "README.md").read_text()
        for row, names in (("taken and ignored", _IGNORED), ("refused,", _UNSUPPORTED)):
            line = next(line for line in text.splitlines() if line.startswith(f"| {row}"))
            assert [name for name in names if f"`{name}`" not in line] == []


class TestAccess:
    async def test_key(self, verifier: str, tiny_draft: Path) -> None:
        async with endpoint(verifier, tiny_draft, api_key="s3cret") as url:
            for key, allowed in (("s3cret", True), ("s3cre", False), ("", False)):
                headers = {"authorization": f"Bearer {key}"} if key else {}
                async with httpx.AsyncClient(base_url=url, headers=headers) as http:
                    reply = await http.get("/v1/models")
                    assert (reply.status_code == 200) is allowed
                    assert allowed or reply.json()["error"]["code"] == "invalid_api_key"

    async def test_loopback_serves_no_other_name(self, http: httpx.AsyncClient) -> None:
        for path in ("/v1/models", "/"):
            assert (await http.get(path, headers={"host": "evil.example"})).status_code == 403
            assert (await http.get(path, headers={"host": "localhost:1"})).status_code == 200

    async def test_cors_is_off(self, http: httpx.AsyncClient) -> None:
        reply = await http.get("/v1/models", headers={"origin": "https://evil.example"})
        assert "access-control-allow-origin" not in reply.headers

    async def test_cors_on_request(self, verifier: str, tiny_draft: Path) -> None:
        async with (
            endpoint(verifier, tiny_draft, origins=("https://good.example",)) as url,
            httpx.AsyncClient(base_url=url) as http,
        ):
            for origin, allowed in (("https://good.example", True), ("https://evil.example", False)):
                reply = await http.get("/v1/models", headers={"origin": origin})
                assert ("access-control-allow-origin" in reply.headers) is allowed

    def test_the_network_needs_a_key(self) -> None:
        with pytest.raises(SpecwireError, match="anybody on the network"):
            ServeConfig(host="0.0.0.0").access()
        assert ServeConfig(host="0.0.0.0", api_key="x").access().hosts == frozenset()
        assert ServeConfig(host="0.0.0.0", allow_no_key=True).access().api_key == ""

    def test_the_machines_own_names_need_none(self) -> None:
        for host in ("127.0.0.1", "127.8.9.1", "::1", "localhost"):
            assert ServeConfig(host=host).access().hosts
        for host in ("::", "unix", "localhost.example", "10.0.0.1"):
            with pytest.raises(SpecwireError, match="anybody on the network"):
                ServeConfig(host=host).access()


class TestVerifierAway:
    async def test_503_says_when_to_come_back(self, tiny_draft: Path) -> None:
        async with (
            endpoint("127.0.0.1:9", tiny_draft) as url,
            httpx.AsyncClient(base_url=url, timeout=30) as http,
        ):
            for stream in (False, True):
                body = {"model": MODEL, "messages": HELLO, "stream": stream}
                reply = await http.post("/v1/chat/completions", json=body)
                assert reply.status_code == 503
                assert int(reply.headers["retry-after"]) >= 1
                assert reply.json()["error"]["code"] == "verifier_unavailable"

    async def test_what_waiting_cannot_mend_is_a_502(self, verifier: str, tiny_draft: Path) -> None:
        over_tls = options(verifier, tiny_draft, insecure=False)
        async with (
            serving(over_tls, ServeConfig(port=0)) as url,
            httpx.AsyncClient(base_url=url, timeout=30) as http,
        ):
            reply = await http.post("/v1/chat/completions", json={"model": MODEL, "messages": HELLO})
        assert reply.status_code == 502
        assert "retry-after" not in reply.headers
        assert reply.json()["error"]["code"] == "protocol_mismatch"

    async def test_lost_in_the_middle_and_back(self, verifier: str, tiny_draft: Path) -> None:
        """The stream ends with an error in OpenAI's shape, the next request hears of it; then all is well."""
        async with (
            Relay(verifier).running() as relay,
            endpoint(relay.address, tiny_draft) as url,
            connected(url) as client,
        ):
            before = await chat(client, temperature=0)
            stream = await chat(client, stream=True, max_tokens=400, temperature=1)
            await anext(aiter(stream))
            relay.refusing = True
            relay.cut()
            with pytest.raises(openai.APIError, match="verifier"):
                await read(stream)
            with pytest.raises(openai.InternalServerError) as caught:
                await chat(client)
            assert caught.value.status_code == 503
            relay.refusing = False
            after = await once_back(client)
            assert after.choices[0].message.content == before.choices[0].message.content

    async def test_a_short_loss_is_mended_silently(self, verifier: str, tiny_draft: Path) -> None:
        async with (
            Relay(verifier).running() as relay,
            endpoint(relay.address, tiny_draft) as url,
            connected(url) as client,
        ):
            before = await chat(client, temperature=1, max_tokens=100)
            relay.cut_after(4000)
            after = await chat(client, temperature=1, max_tokens=100)
            assert after.choices[0].message.content == before.choices[0].message.content
            assert after.model_extra["specwire"]["reconnects"] == 1


class TestEdgeOnly:
    """The owner allowed the draft to go on alone."""

    @asynccontextmanager
    async def endpoint(self, address: str, draft: Path, ahead: str = "auto") -> AsyncIterator[AsyncOpenAI]:
        settings = options(address, draft, ahead=ahead, edge_only_fallback=True, patience=0.3)
        async with (
            serving(settings, ServeConfig(port=0, model_alias=MODEL)) as url,
            connected(url) as client,
        ):
            yield client

    async def test_every_token_is_marked(self, tiny_draft: Path) -> None:
        async with self.endpoint("127.0.0.1:9", tiny_draft) as client:
            whole = await chat(client, temperature=0.8)
            report = whole.model_extra["specwire"]
            assert report["lossy"] is True
            assert report["lossy_because"] == ["edge_only"]
            assert report["origins"] == {"edge_only": 24}
            assert report["rounds"] == report["up_bytes"] == 0
            assert whole.usage.completion_tokens == 24
            text = ""
            async for chunk in await chat(client, temperature=0.8, stream=True):
                new = chunk.choices[0].delta.content or ""
                text += new
                assert not new or chunk.model_extra["specwire"]["lossy_because"] == ["edge_only"]
            assert text == whole.choices[0].message.content

    async def test_wishes_hold(self, tiny_draft: Path) -> None:
        async with self.endpoint("127.0.0.1:9", tiny_draft) as client:
            full = (await chat(client, temperature=0, logit_bias=ASCII)).choices[0].message.content
            stop = full[5:7]
            cut = await chat(client, temperature=0, logit_bias=ASCII, stop=[stop], logprobs=True)
            assert cut.choices[0].message.content == full[: full.find(stop)]
            assert cut.choices[0].finish_reason == "stop"
            assert cut.model_extra["specwire"]["lossy"] is True
            # The target's log-probabilities are not known, and the draft's are not passed off as them.
            assert [entry.logprob for entry in cut.choices[0].logprobs.content] == [None] * len(
                cut.choices[0].message.content
            )
            many = await chat(client, n=2, temperature=1, max_tokens=9)
            assert many.usage.completion_tokens == 18

    @ONE_OR_MANY
    async def test_lost_in_the_middle_the_stream_goes_on_and_says_where(
        self, verifier: str, tiny_draft: Path, ahead: str
    ) -> None:
        async with (
            Relay(verifier).running() as relay,
            self.endpoint(relay.address, tiny_draft, ahead) as client,
        ):
            exact = await chat(client, temperature=0, max_tokens=100)
            assert exact.model_extra["specwire"]["lossy"] is False
            marks, text = [], ""
            async for chunk in await chat(client, stream=True, temperature=0, max_tokens=100):
                if new := chunk.choices[0].delta.content:
                    marks.append("specwire" in chunk.model_extra)
                    text += new if not marks[-1] else ""
                if marks and not relay.refusing:
                    relay.refusing = True
                    relay.cut()
            assert marks == sorted(marks)
            assert {False, True} == set(marks)
            assert exact.choices[0].message.content.startswith(text)
            report = chunk.model_extra["specwire"]
            assert report["lossy_because"] == ["edge_only"]
            assert 0 < report["origins"]["edge_only"] < 100 == sum(report["origins"].values())

    async def test_the_next_turn_is_judged_again_but_says_what_it_follows(
        self, verifier: str, tiny_draft: Path
    ) -> None:
        async with (
            Relay(verifier).running() as relay,
            self.endpoint(relay.address, tiny_draft) as client,
        ):
            relay.refusing = True
            alone = await chat(client, temperature=0, logit_bias=ASCII)
            turn = [
                *HELLO,
                {"role": "assistant", "content": alone.choices[0].message.content},
                {"role": "user", "content": "More"},
            ]
            relay.refusing = False
            for _ in range(50):
                reply = await chat(client, messages=turn, temperature=0, logit_bias=ASCII)
                if "edge_only" not in reply.model_extra["specwire"]["origins"]:
                    break
                await asyncio.sleep(0.1)
            report = reply.model_extra["specwire"]
            assert report["lossy_because"] == ["prompt"]
            assert report["rounds"] > 0
            # The turn itself, asked again, is the target's.
            assert (await chat(client, temperature=0)).model_extra["specwire"]["lossy"] is False


class TestCancellation:
    @ONE_OR_MANY
    @pytest.mark.parametrize("stream", [False, True])
    async def test_both_sides_are_free_at_once(
        self, verifier: str, tiny_draft: Path, stream: bool, ahead: str
    ) -> None:
        """With one context, a second answer can only come once the first one has let go."""
        async with endpoint(verifier, tiny_draft, contexts=1, ahead=ahead) as url, connected(url) as client:
            asked = chat(client, stream=stream, max_tokens=450, temperature=1, seed=3)
            if stream:
                running = await asked
                await anext(aiter(running))
                await running.close()
            else:
                task = asyncio.create_task(asked)
                await asyncio.sleep(0.05)
                task.cancel()
                await asyncio.wait([task])
            assert await num_sessions(verifier, at_most=0) == 0
            assert (await chat(client, max_tokens=4)).usage.completion_tokens == 4

    async def test_while_waiting_for_its_turn(self, verifier: str, tiny_draft: Path) -> None:
        async with endpoint(verifier, tiny_draft, contexts=1) as url, connected(url) as client:
            running = await chat(client, stream=True, max_tokens=300, temperature=1)
            await anext(aiter(running))
            waiting = [asyncio.create_task(chat(client, seed=i)) for i in range(3)]
            await asyncio.sleep(0.05)
            waiting[1].cancel()
            await read(running)
            assert (await waiting[0]).usage.completion_tokens == 24
            assert (await waiting[2]).usage.completion_tokens == 24

    @ONE_OR_MANY
    async def test_a_stop_string_frees_the_verifier(
        self, verifier: str, tiny_draft: Path, ahead: str
    ) -> None:
        async with endpoint(verifier, tiny_draft, ahead=ahead) as url, connected(url) as client:
            full = (await chat(client, temperature=0)).choices[0].message.content
            await chat(client, temperature=0, stop=[full[5:7]])
            # The first session stays for a next turn, the stopped one does not.
            assert await num_sessions(verifier, at_most=1) <= 1

    @ONE_OR_MANY
    async def test_what_a_stop_string_leaves_in_flight_was_sent_for_nothing(
        self, verifier: str, tiny_draft: Path, ahead: str
    ) -> None:
        """To the byte: Open, the blocks that were judged and the wasted ones are all that goes up."""
        sampling = SamplingParams(logit_bias={int(token): bias for token, bias in ASCII.items()})
        wish = Wish(MODEL, sampling, 40, (), None, 1, False, False, False)

        async def answer(backend: Backend, *stop: str) -> tuple[str, int, Cost]:
            text, judged = "", 0
            async for event in write(backend, Prompt(tuple(range(40, 60))), replace(wish, stop=stop), 0):
                if isinstance(event, Ending):
                    return text, event.cost.up_bytes - judged, event.cost
                text += event.text
                judged += event.round.up_bytes if event.round is not None else 0
            raise RuntimeError("the answer had no end")

        async with open_backend(options(verifier, tiny_draft, ahead=ahead)) as backend:
            full, rest, cost = await answer(backend)
            open_bytes = rest - cost.wasted_up_bytes
            for start in range(3, 15, 2):
                text, rest, cost = await answer(backend, full[start : start + 2])
                assert full.startswith(text)
                assert len(text) < len(full)
                assert rest == open_bytes + cost.wasted_up_bytes

    @ONE_OR_MANY
    async def test_a_turn_after_a_stop_string_sends_everything_anew(
        self, verifier: str, tiny_draft: Path, ahead: str
    ) -> None:
        """As the README says: the verifier has committed what comes after it."""
        wish = {"temperature": 0, "logit_bias": ASCII, "max_tokens": 20}
        messages = [{"role": "user", "content": "Hello " * 20}]
        sent = []
        async with endpoint(verifier, tiny_draft, ahead=ahead) as url, connected(url) as client:
            full = (await chat(client, messages=messages, **wish)).choices[0].message.content
            for stop in ([], [full[5:7]]):
                first = await chat(client, messages=messages, stop=stop, **wish)
                content = first.choices[0].message.content
                turn = [
                    *messages,
                    {"role": "assistant", "content": content},
                    {"role": "user", "content": "More"},
                ]
                second = await chat(client, messages=turn, **{**wish, "max_tokens": 1})
                sent.append(second.model_extra["specwire"]["up_bytes"])
                cached = second.usage.prompt_tokens_details.cached_tokens
                known = first.usage.prompt_tokens + first.usage.completion_tokens
                assert (cached == known) is (not stop)
        assert sent[1] > sent[0] + 100


class TestConversations:
    async def test_a_next_turn_sends_only_what_is_new(self, client: AsyncOpenAI) -> None:
        messages, before = list(HELLO), 0
        for turn in range(4):
            reply = await chat(client, messages=messages, temperature=0, logit_bias=ASCII, max_tokens=20)
            assert reply.usage.prompt_tokens_details.cached_tokens == before
            before = reply.usage.prompt_tokens + reply.usage.completion_tokens
            messages += [
                {"role": "assistant", "content": reply.choices[0].message.content},
                {"role": "user", "content": f"And {turn}?"},
            ]

    async def test_reuse_changes_no_text(self, verifier: str, tiny_draft: Path) -> None:
        """Continued or cold, the same conversation gets the same greedy answer."""
        messages = list(HELLO)
        async with endpoint(verifier, tiny_draft) as url, connected(url) as client:
            for turn in range(3):
                warm = await chat(client, messages=messages, temperature=0, logit_bias=ASCII, max_tokens=20)
                async with endpoint(verifier, tiny_draft) as other, connected(other) as cold_client:
                    cold = await chat(
                        cold_client, messages=messages, temperature=0, logit_bias=ASCII, max_tokens=20
                    )
                assert warm.choices[0].message.content == cold.choices[0].message.content
                content = warm.choices[0].message.content
                messages += [
                    {"role": "assistant", "content": content},
                    {"role": "user", "content": f"{turn}"},
                ]

    async def test_two_chats_do_not_mix(self, client: AsyncOpenAI) -> None:
        chats = [[{"role": "user", "content": text}] for text in ("Hello", "Good day")]
        alone = [await chat(client, messages=messages, temperature=0, logit_bias=ASCII) for messages in chats]
        again = await asyncio.gather(
            *(chat(client, messages=messages, temperature=0, logit_bias=ASCII) for messages in chats)
        )
        for first, second in zip(alone, again, strict=True):
            assert first.choices[0].message.content == second.choices[0].message.content
        for messages, reply in zip(chats, again, strict=True):
            messages += [
                {"role": "assistant", "content": reply.choices[0].message.content},
                {"role": "user", "content": "More"},
            ]
        for messages in chats:
            reply = await chat(client, messages=messages, temperature=0, logit_bias=ASCII)
            assert reply.usage.prompt_tokens_details.cached_tokens > 24

    async def test_another_wish_for_logprobs_starts_anew(self, client: AsyncOpenAI) -> None:
        first = await chat(client, temperature=0, logit_bias=ASCII)
        messages = [
            *HELLO,
            {"role": "assistant", "content": first.choices[0].message.content},
            {"role": "user", "content": "More"},
        ]
        plain = await chat(client, messages=messages, temperature=0, logit_bias=ASCII)
        named = await chat(client, messages=messages, temperature=0, logit_bias=ASCII, logprobs=True)
        assert len(named.choices[0].logprobs.content) == named.usage.completion_tokens
        assert named.choices[0].message.content == plain.choices[0].message.content


class TestManyAtOnce:
    async def test_every_answer_is_its_own_and_none_starves(self, verifier: str, tiny_draft: Path) -> None:
        wishes = [
            {"messages": [{"role": "user", "content": f"Number {i}"}], "seed": i, "temperature": i % 2}
            for i in range(16)
        ]
        async with endpoint(verifier, tiny_draft, contexts=4) as url, connected(url) as client:
            together = await asyncio.gather(*(chat(client, **wish) for wish in wishes))
            alone = [await chat(client, **wish) for wish in wishes]
        for first, second in zip(together, alone, strict=True):
            assert first.choices[0].message.content == second.choices[0].message.content
            assert first.usage.completion_tokens == second.usage.completion_tokens

    async def test_they_take_turns(self, verifier: str, tiny_draft: Path) -> None:
        """A short answer that comes later ends long before a long one that came first."""
        async with endpoint(verifier, tiny_draft, contexts=4) as url, connected(url) as client:
            long = asyncio.create_task(chat(client, max_tokens=450, temperature=1))
            await asyncio.sleep(0.05)
            await chat(client, max_tokens=4, messages=[{"role": "user", "content": "x"}])
            assert not long.done()
            long.cancel()


@asynccontextmanager
async def connected(url: str) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield client


async def once_back(client: AsyncOpenAI):
    """An answer, as soon as the connection has noticed that the verifier is there again."""
    for _ in range(50):
        with suppress(openai.InternalServerError):
            return await chat(client, temperature=0)
        await asyncio.sleep(0.1)
    return await chat(client, temperature=0)


async def num_sessions(address: str, at_most: int) -> int:
    """Sessions on the verifier once there are as few as expected, or after some seconds."""
    async with Verifier([address], tls=None) as verifier:
        for _ in range(100):
            found = (await verifier.describe()).load.num_sessions
            if found <= at_most:
                break
            await asyncio.sleep(0.05)
    return found


async def read(stream) -> None:
    async for _ in stream:
        pass


async def test_fused_verification_takes_its_weight_from_the_request(tiny_target, tiny_draft, url):
    rules = ("--allow-verification", "token,fused")
    with local_verifier("--target", str(tiny_target), "--dtype", "float32", *rules) as address:
        settings = options(address, tiny_draft, verification="fused")
        async with (
            serving(settings, ServeConfig(port=0, model_alias=MODEL)) as fusing,
            connected(fusing) as client,
        ):
            for weight, lossy in ((None, False), (0.0, False), (0.9, True)):
                body = {} if weight is None else {"fused_weight": weight}
                reply = await chat(client, temperature=1.0, extra_body=body)
                report = reply.model_extra["specwire"]
                assert report["lossy"] is lossy
                assert report["lossy_because"] == (["verification"] if lossy else [])
    async with connected(url) as client:
        with pytest.raises(openai.BadRequestError, match="fused"):
            await chat(client, temperature=1.0, extra_body={"fused_weight": 0.5})
        with pytest.raises(openai.BadRequestError, match="fused_weight"):
            await chat(client, extra_body={"fused_weight": 1.5})
