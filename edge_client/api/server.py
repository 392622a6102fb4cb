"""Serving: a socket, uvicorn on it, and the backend for as long as it runs."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

import uvicorn
from starlette.applications import Starlette

from edge_client.api.app import Access, make_app
from edge_client.api.backend import DEFAULT_CONTEXTS, open_backend
from edge_client.options import Options
from shared.faults import FaultKind, SpecwireError
from shared.transport import is_loopback

_SHUTDOWN_S = 2
_LOOPBACK_NAMES = frozenset({"localhost", "127.0.0.1", "[::1]"})


@dataclass(frozen=True, slots=True)
class ServeConfig:
    """Args:
    host, port: address to listen on; port 0 picks a free one.
    api_key: what clients must give; empty asks for nothing.
    allow_no_key: listen beyond this machine without an API key.
    origins: web origins that may read answers (CORS).
    contexts: answers written at once; each holds the draft's keys and values of a conversation.
    model_alias: another name for the model, for clients that insist on one.
    """

    host: str = "127.0.0.1"
    port: int = 8080
    api_key: str = ""
    allow_no_key: bool = False
    origins: tuple[str, ...] = ()
    contexts: int = DEFAULT_CONTEXTS
    model_alias: str = ""

    def access(self) -> Access:
        """Raises SpecwireError(BAD_REQUEST) when anybody on the network could use the endpoint."""
        if is_loopback(f"[{self.host}]:{self.port}"):
            return Access(self.api_key, _LOOPBACK_NAMES, self.origins)
        if not self.api_key and not self.allow_no_key:
            raise SpecwireError(
                FaultKind.BAD_REQUEST,
                f"Listening on {self.host} lets anybody on the network use this endpoint.",
                "Set an --api-key, or say --allow-no-key if that is meant.",
            )
        return Access(self.api_key, frozenset(), self.origins)


@asynccontextmanager
async def serving(
    options: Options, config: ServeConfig, notify: Callable[[str], None] | None = None
) -> AsyncIterator[str]:
    """Serves as long as the context lasts; yields the endpoint's URL once it answers."""
    access = config.access()
    listener = _listen(config.host, config.port)
    try:
        async with open_backend(options, config.contexts, notify) as backend:
            app = make_app(backend, access, model_alias=config.model_alias)
            server = _Server(_uvicorn_config(app))
            running = asyncio.create_task(server.serve(sockets=[listener]))
            try:
                await server.up.wait()
                yield _url(listener)
            finally:
                server.should_exit = True
                await asyncio.wait([running])
    finally:
        listener.close()


async def serve(
    options: Options,
    config: ServeConfig,
    ready: Callable[[str], None],
    notify: Callable[[str], None] | None = None,
) -> None:
    """Serves until it is cancelled; `ready` gets the URL.

    Raises:
        SpecwireError: the address is taken, the draft is not whole, or the access is too wide.
    """
    async with serving(options, config, notify) as url:
        ready(url)
        await asyncio.get_running_loop().create_future()


class _Server(uvicorn.Server):
    """Leaves signals to the command line, and says when it answers."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.up = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.up.set()

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        await self._serve(sockets)


def _uvicorn_config(app: Starlette) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http="h11",
        ws="none",
        lifespan="off",
        access_log=False,
        log_config=None,
        log_level=logging.WARNING,
        server_header=False,
        timeout_graceful_shutdown=_SHUTDOWN_S,
    )


def _listen(host: str, port: int) -> socket.socket:
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, proto, _, address = found[0]
        listener = socket.socket(family, kind, proto)
    except OSError as error:
        raise _cannot_listen(host, port, error) from error
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(128)
    except OSError as error:
        listener.close()
        raise _cannot_listen(host, port, error) from error
    return listener


def _cannot_listen(host: str, port: int, error: OSError) -> SpecwireError:
    return SpecwireError(
        FaultKind.BAD_REQUEST,
        f"Cannot listen on {host}:{port}: {error.strerror or error}.",
        "Choose another --host or --port, or stop what is using it.",
    )


def _url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
