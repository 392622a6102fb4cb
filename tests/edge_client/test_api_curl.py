"""The endpoint as a shell script sees it: the real curl."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from edge_client.api.server import ServeConfig, serving
from edge_client.options import Options

BODY = {"model": "tiny", "prompt": "abc", "max_tokens": 12, "temperature": 0}


@pytest.fixture
async def url(verifier_process: str, tiny_draft: Path) -> AsyncIterator[str]:
    options = Options(verifier=verifier_process, draft=str(tiny_draft), insecure=True, threads=1, k="4")
    async with serving(options, ServeConfig(port=0, model_alias="tiny")) as url:
        yield url


async def curl(*arguments: str) -> tuple[int, str]:
    """Exit code and standard output."""
    program = shutil.which("curl")
    assert program, "These tests need curl: apt-get install curl"
    running = await asyncio.create_subprocess_exec(
        program, "--silent", "--no-buffer", "--max-time", "60", *arguments, stdout=asyncio.subprocess.PIPE
    )
    output, _ = await running.communicate()
    return running.returncode or 0, output.decode()


def post(url: str, body: object, *arguments: str) -> list[str]:
    return [
        f"{url}/v1/completions",
        "--header",
        "Content-Type: application/json",
        "--data",
        json.dumps(body),
        *arguments,
    ]


async def test_a_stream_is_lines_of_events(url: str) -> None:
    code, whole = await curl(*post(url, BODY))
    assert code == 0
    code, stream = await curl(*post(url, BODY | {"stream": True}, "--include"))
    assert code == 0
    head, _, events = stream.replace("\r\n", "\n").partition("\n\n")
    assert "200" in head.splitlines()[0]
    assert "text/event-stream" in head.lower()
    lines = [line for line in events.split("\n") if line]
    assert all(line.startswith("data: ") for line in lines)
    assert lines[-1] == "data: [DONE]"
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
    assert len(chunks) > 2
    text = "".join(chunk["choices"][0]["text"] for chunk in chunks)
    assert text == json.loads(whole)["choices"][0]["text"]
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("stream", [False, True])
async def test_an_error_is_a_status_and_a_body_that_names_it(url: str, stream: bool) -> None:
    wrong = BODY | {"temperature": 9, "stream": stream}
    code, body = await curl(*post(url, wrong, "--fail-with-body"))
    assert code == 22  # curl's word for a status of 400 or more
    assert json.loads(body)["error"]["param"] == "temperature"


async def test_no_verifier_is_a_503_that_says_when_to_come_back(tiny_draft: Path) -> None:
    options = Options(verifier="127.0.0.1:9", draft=str(tiny_draft), insecure=True, threads=1)
    async with serving(options, ServeConfig(port=0)) as url:
        code, reply = await curl(*post(url, BODY, "--include"))
    assert code == 0
    head, _, body = reply.replace("\r\n", "\n").partition("\n\n")
    assert "503" in head.splitlines()[0]
    assert "retry-after: " in head.lower()
    assert json.loads(body)["error"]["code"] == "verifier_unavailable"
