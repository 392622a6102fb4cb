"""What Starlette leaves open: a body with a limit, and work that ends when its client has gone."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from contextlib import aclosing, suppress
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from edge_client.api.errors import ApiError

T = TypeVar("T")

MAX_BODY_BYTES = 8 << 20


class ClientGoneError(Exception):
    """Nobody waits for this any more."""


def error_response(error: ApiError) -> JSONResponse:
    return JSONResponse(error.body(), error.status, error.headers())


async def json_body(request: Request) -> dict[str, Any]:
    """The body as an object.

    Only application/json is taken: a browser sends it to another origin after asking first, and that
    question is answered only where CORS is on.

    Raises:
        ApiError: 415, 413 or 400.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise ApiError(
            415, "Send the request as Content-Type: application/json.", code="unsupported_media_type"
        )
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > MAX_BODY_BYTES:
            raise ApiError(413, f"The request is larger than {MAX_BODY_BYTES >> 20} MiB.", code="too_large")
    try:
        document = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"The request is not valid JSON: {error}.", code="invalid_json") from None
    if not isinstance(document, dict):
        raise ApiError(400, "The request must be a JSON object.", code="invalid_json")
    return document


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`; when the client goes first, `work` is cancelled and has ended on return.

    Raises:
        ClientGoneError: the client has gone.
    """
    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGoneError
    finally:
        for pending in (task, watch):
            pending.cancel()
        # Cancelled once, and waited for: what it holds is in order before anyone else gets it.
        await asyncio.wait({task, watch})


class EventStream(Response):
    """Server-sent events from `events`; an error before the first one is a plain HTTP error.

    `explain` turns an exception into an ApiError, or returns None for one that it does not know.
    """

    def __init__(
        self, events: AsyncGenerator[dict[str, Any]], explain: Callable[[Exception], ApiError | None]
    ) -> None:
        super().__init__()
        self._events = events
        self._explain = explain

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with suppress(ClientGoneError):
            await while_connected(receive, self._run(scope, receive, send))

    async def _run(self, scope: Scope, receive: Receive, send: Send) -> None:
        begun = False
        try:
            async with aclosing(self._events):
                async for event in self._events:
                    if not begun:
                        await send(_START)
                        begun = True
                    await _send_event(send, json.dumps(event, ensure_ascii=False, separators=(",", ":")))
            await _send_event(send, "[DONE]")
        except Exception as error:
            known = self._explain(error)
            if known is None:
                raise
            if not begun:
                await error_response(known)(scope, receive, send)
                return
            await _send_event(send, json.dumps(known.body(), ensure_ascii=False))
        await send({"type": "http.response.body", "body": b"", "more_body": False})


_START = {
    "type": "http.response.start",
    "status": 200,
    "headers": [
        (b"content-type", b"text/event-stream; charset=utf-8"),
        (b"cache-control", b"no-cache"),
        (b"x-accel-buffering", b"no"),  # nginx would collect the stream otherwise
    ],
}


def _send_event(send: Send, data: str) -> Awaitable[None]:
    body = f"data: {data}\n\n".encode()
    return send({"type": "http.response.body", "body": body, "more_body": True})


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
