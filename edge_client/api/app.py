"""The routes: /v1/models, /v1/completions, /v1/chat/completions, /health, and the chat page."""

from __future__ import annotations

import hmac
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from edge_client.api.backend import Backend
from edge_client.api.costs import verifier_facts
from edge_client.api.errors import ApiError, from_fault
from edge_client.api.http import ClientGoneError, EventStream, error_response, json_body, while_connected
from edge_client.api.merge import merge
from edge_client.api.page import page_routes
from edge_client.api.pieces import TokenNames
from edge_client.api.pool import Prompt
from edge_client.api.prompts import chat_prompt, completion_prompt
from edge_client.api.replies import Reply
from edge_client.api.requests import Wish, chat_wish, completion_wish
from edge_client.api.writer import Ending, Piece, write
from shared.faults import SpecwireError

_CLIENT_CLOSED = 499  # nobody reads it; nginx's number for the log

Handler = Callable[[Request], Awaitable[Response]]


@dataclass(frozen=True, slots=True)
class Access:
    """Who may use the endpoint.

    Args:
        api_key: what `Authorization: Bearer` must hold; empty asks for nothing.
        hosts: names that `Host` may have; empty allows all. Without it, a web page whose name resolves to
            this machine could read answers.
        origins: web origins that may read answers; empty turns CORS off.
    """

    api_key: str = ""
    hosts: frozenset[str] = frozenset()
    origins: tuple[str, ...] = ()


def make_app(backend: Backend, access: Access, *, model_alias: str = "") -> Starlette:
    """The application; `backend` outlives it."""
    endpoint = _Endpoint(backend, access, model_alias)
    routes = [
        Route("/v1/models", endpoint.guarded(endpoint.models)),
        Route("/v1/models/{model:path}", endpoint.guarded(endpoint.one_model)),
        Route("/v1/completions", endpoint.guarded(endpoint.completions), methods=["POST"]),
        Route("/v1/chat/completions", endpoint.guarded(endpoint.chat), methods=["POST"]),
        Route("/health", endpoint.health),
        *page_routes(endpoint.check_host),
    ]
    middleware = []
    if access.origins:
        middleware.append(
            Middleware(
                CORSMiddleware,
                allow_origins=list(access.origins),
                allow_methods=["GET", "POST"],
                allow_headers=["authorization", "content-type"],
            )
        )
    return Starlette(
        routes=routes, middleware=middleware, exception_handlers={HTTPException: _http_error, Exception: _bug}
    )


class _Endpoint:
    def __init__(self, backend: Backend, access: Access, model_alias: str) -> None:
        self._backend = backend
        self._access = access
        self._alias = model_alias
        self._names = TokenNames(backend.tokenizer)

    def guarded(self, handler: Handler) -> Handler:
        """`handler` behind the checks, with its errors in OpenAI's shape."""

        async def guarded(request: Request) -> Response:
            try:
                self.check_host(request)
                self._check_key(request)
                return await handler(request)
            except ClientGoneError:
                return Response(status_code=_CLIENT_CLOSED)
            except (ApiError, SpecwireError) as error:
                return error_response(self._explain(error) or _INTERNAL)

        return guarded

    def check_host(self, request: Request) -> None:
        host = request.headers.get("host", "").rpartition(":")
        name = (host[0] if host[2].isdecimal() else "".join(host)).lower()
        if self._access.hosts and name not in self._access.hosts:
            raise ApiError(403, f"This endpoint does not serve the host '{name}'.", code="wrong_host")

    def _check_key(self, request: Request) -> None:
        key = self._access.api_key
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        if key and not (
            scheme.lower() == "bearer" and hmac.compare_digest(given.strip().encode(), key.encode())
        ):
            raise ApiError(
                401, "Give the endpoint's API key as 'Authorization: Bearer KEY'.", code="invalid_api_key"
            )

    # -- models --------------------------------------------------------------------------------

    async def models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._model(name) for name in self._model_names()]})

    async def one_model(self, request: Request) -> Response:
        name = request.path_params["model"]
        self._check_model(name)
        return JSONResponse(self._model(name))

    def _model_names(self) -> list[str]:
        names = [self._backend.model_name, self._alias]
        return [name for name in dict.fromkeys(names) if name]

    def _check_model(self, name: str) -> None:
        # The draft's name too: before a verifier has answered it is the only one known.
        if name not in (*self._model_names(), self._backend.manifest.name) and not self._is_alone():
            raise ApiError(
                404,
                f"The model '{name}' does not exist here. Available: {', '.join(self._model_names())}.",
                param="model",
                code="model_not_found",
            )

    def _is_alone(self) -> bool:
        """Whether nobody knows the target's name; the draft that may answer then does so to any."""
        return self._backend.choices is None and self._backend.options.edge_only_fallback

    def _model(self, name: str) -> dict[str, Any]:
        return {"id": name, "object": "model", "created": 0, "owned_by": "specwire"}

    async def health(self, request: Request) -> Response:
        return JSONResponse({"status": "ok"})

    # -- answers -------------------------------------------------------------------------------

    async def chat(self, request: Request) -> Response:
        asked = chat_wish(await json_body(request))
        await self._prepare(asked.wish)
        prompt = chat_prompt(self._backend.manifest, self._backend.tokenizer, asked.messages, asked.tools)
        return await self._answer(request, asked.wish, [prompt], chat=True, with_tools=bool(asked.tools))

    async def completions(self, request: Request) -> Response:
        asked = completion_wish(await json_body(request))
        await self._prepare(asked.wish)
        manifest, tokenizer = self._backend.manifest, self._backend.tokenizer
        prompts = [completion_prompt(manifest, tokenizer, prompt) for prompt in asked.prompts]
        return await self._answer(request, asked.wish, prompts, chat=False)

    async def _prepare(self, wish: Wish) -> None:
        """Asks the verifier what it serves, if nobody has yet, and checks the model's name."""
        await self._backend.pool()
        self._check_model(wish.model)
        largest = max(wish.sampling.logit_bias, default=0)
        if largest >= self._backend.manifest.vocab_size:
            raise ApiError(
                400, f"'logit_bias' names token {largest}, which does not exist.", param="logit_bias"
            )

    async def _answer(
        self, request: Request, wish: Wish, prompts: list[Prompt], *, chat: bool, with_tools: bool = False
    ) -> Response:
        for prompt in prompts:
            self._check_length(prompt)
        repeated = [prompt for prompt in prompts for _ in range(wish.num_choices)]
        echoes = [self._echo(prompt) if wish.echo else "" for prompt in repeated]
        facts = verifier_facts(self._backend.choices)
        reply = Reply(wish, self._names, wish.model, facts, echoes, chat=chat, with_tools=with_tools)
        writers = [
            write(self._backend, prompt, wish, index % wish.num_choices)
            for index, prompt in enumerate(repeated)
        ]
        if wish.stream:
            return EventStream(_chunks(reply, wish, writers), self._explain)
        await while_connected(request.receive, _collect(reply, writers))
        return JSONResponse(reply.whole())

    def _check_length(self, prompt: Prompt) -> None:
        limit = self._backend.max_context
        if len(prompt.tokens) >= limit:
            raise ApiError(
                400,
                f"The prompt has {len(prompt.tokens)} tokens; the model's context of {limit} must also hold "
                "the answer. Shorten the prompt.",
                code="context_length_exceeded",
            )

    def _echo(self, prompt: Prompt) -> str:
        if prompt.text is not None:
            return prompt.text
        return str(self._backend.tokenizer.decode(list(prompt.tokens)))

    def _explain(self, error: Exception) -> ApiError | None:
        if isinstance(error, SpecwireError):
            self._backend.saw_fault(error)
            return from_fault(error)
        return error if isinstance(error, ApiError) else None


async def _chunks(
    reply: Reply, wish: Wish, writers: list[AsyncGenerator[Piece | Ending]]
) -> AsyncGenerator[dict[str, Any]]:
    async with aclosing(merge(writers)) as events:
        async for index, event in events:
            for chunk in reply.chunks(index, event):
                yield chunk
    if wish.include_usage:
        yield reply.usage_chunk()


async def _collect(reply: Reply, writers: list[AsyncGenerator[Piece | Ending]]) -> None:
    async with aclosing(merge(writers)) as events:
        async for index, event in events:
            reply.add(index, event)


_INTERNAL = ApiError(500, "Something is wrong in this endpoint; its log says what.", kind="server_error")


async def _http_error(request: Request, error: Exception) -> Response:
    """Unknown paths and methods."""
    if not isinstance(error, HTTPException):
        return error_response(_INTERNAL)
    message = f"{error.detail}: {request.method} {request.url.path}."
    response = error_response(ApiError(error.status_code, message, code="unknown_url"))
    response.headers.update(error.headers or {})
    return response


async def _bug(request: Request, error: Exception) -> Response:
    return error_response(_INTERNAL)
