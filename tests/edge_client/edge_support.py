"""A real verifier in this process, answers from it, and connections that can be cut."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cloud_verifier.metrics import Metrics
from cloud_verifier.server import ServerConfig, running_server
from cloud_verifier.target_model import TargetModel
from edge_client.connection import Patience, Verifier
from edge_client.controller import Controller, FixedController, Plan
from edge_client.draft_model import DraftModel
from edge_client.generate import Conversation
from edge_client.results import Emission, Result
from edge_client.settings import SessionSettings
from shared.messages import SamplingParams
from shared.transport import Tls

GREEDY = SamplingParams()
PROMPT = tuple(range(40, 60))


def load_tiny_target(folder: Path) -> TargetModel:
    return TargetModel.load(str(folder), device="cpu", dtype="float32", num_slots=4096)


@contextlib.asynccontextmanager
async def serving(model: TargetModel, metrics: Metrics | None = None, **config: object) -> AsyncIterator[str]:
    """A verifier in this process; yields its address."""
    settings = replace(ServerConfig(listen="127.0.0.1:0", drain_timeout_s=0.2), **config)
    async with running_server(model, settings, metrics=metrics) as port:
        yield f"{'localhost' if settings.tls else '127.0.0.1'}:{port}"


@contextlib.asynccontextmanager
async def conversing(
    addresses: str | Sequence[str],
    model: DraftModel | WrappedDraft,
    *,
    eos_ids: tuple[int, ...] = (),
    draft: bool = True,
    patience: Patience | None = None,
    notices: list[str] | None = None,
    tls: Tls | None = None,
    pad_bytes: int = 0,
    **settings: object,
) -> AsyncIterator[Conversation]:
    addresses = [addresses] if isinstance(addresses, str) else list(addresses)
    notify = notices.append if notices is not None else None
    async with Verifier(
        addresses, tls=tls, pad_bytes=pad_bytes, patience=patience, notify=notify
    ) as verifier:
        description = await verifier.describe()
        chosen = SessionSettings(model.manifest.tokenizer, eos_ids, client="test", **settings)
        async with Conversation(verifier, description, model if draft else None, chosen) as conversation:
            yield conversation


async def collect(
    conversation: Conversation,
    tokens: Sequence[int] = PROMPT,
    *,
    sampling: SamplingParams = GREEDY,
    max_new_tokens: int = 24,
    plan: Plan | None = None,
    controller: Controller | None = None,
) -> tuple[list[Emission], Result]:
    """A whole answer."""
    emissions: list[Emission] = []
    async for event in conversation.answer(
        tokens,
        sampling=sampling,
        max_new_tokens=max_new_tokens,
        controller=controller or FixedController(plan or Plan()),
    ):
        if isinstance(event, Result):
            return emissions, event
        emissions.append(event)
    raise RuntimeError("the answer had no end")


CLOUD = Plan(cloud_tokens=1 << 20)


class WrappedDraft:
    """A draft model, to be given another behaviour."""

    def __init__(self, model: DraftModel) -> None:
        self._model = model
        self.manifest, self.max_context = model.manifest, model.max_context

    @property
    def kv_len(self) -> int:
        return self._model.kv_len

    def rollback(self, length: int) -> None:
        self._model.rollback(length)

    def feed(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        return self._model.feed(tokens)


@contextlib.asynccontextmanager
async def listening(serve: Callable[[socket.socket], Coroutine[Any, Any, None]]) -> AsyncIterator[str]:
    """A TCP server; yields its address. A connection is closed when `serve` is done with it or failed with an
    OSError, and none outlives the server: asyncio's own forgets those whose task has not begun."""
    loop = asyncio.get_running_loop()
    tasks: set[asyncio.Task[None]] = set()
    connections: set[socket.socket] = set()

    async def close_after(connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            await serve(connection)

    def accept() -> None:
        try:
            connection, _ = listener.accept()
        except OSError:
            return  # gone before it was accepted
        connections.add(connection)
        connection.setblocking(False)
        tasks.add(loop.create_task(close_after(connection)))

    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        loop.add_reader(listener, accept)
        try:
            yield f"127.0.0.1:{listener.getsockname()[1]}"
        finally:
            loop.remove_reader(listener)
            for task in tasks:
                task.cancel()
            ends = await asyncio.gather(*tasks, return_exceptions=True)
            for connection in connections:
                connection.close()
    for end in ends:
        if isinstance(end, Exception):
            raise end


class Relay:
    """A TCP connection that can be cut, at once or after so many bytes in one direction, and that can keep
    back what comes down."""

    def __init__(self, target: str) -> None:
        self.address = ""
        self.refusing = False
        self.refuse_after_cut = False
        self.up_bytes = 0
        self.down_bytes = 0
        self._target = target
        self._cut_after: int | None = None
        self._is_enough: Callable[[bytes], bool] = lambda sent: True
        self._sent = b""
        self._enough = asyncio.Event()
        self._enough.set()
        self._ends: set[socket.socket] = set()

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[Relay]:
        async with listening(self._serve) as self.address:
            yield self

    def cut(self) -> None:
        """Breaks every connection that is open now."""
        for end in self._ends:
            _break(end)

    def cut_after(self, num_bytes: int) -> None:
        """Breaks everything once so many more bytes have passed, wherever in a message that is."""
        self._cut_after = num_bytes

    def keep_back_until(self, is_enough: Callable[[bytes], bool]) -> None:
        """Lets nothing more down until what goes up from now on is enough."""
        self._is_enough, self._sent = is_enough, b""
        self._enough.clear()

    def _look_at(self, data: bytes) -> None:
        if not self._enough.is_set():
            self._sent += data
            if self._is_enough(self._sent):
                self._enough.set()

    async def _serve(self, near: socket.socket) -> None:
        if self.refusing:
            return
        host, _, port = self._target.rpartition(":")
        with socket.socket() as far:
            far.setblocking(False)
            await asyncio.get_running_loop().sock_connect(far, (host, int(port)))
            self._ends |= {near, far}
            try:
                async with asyncio.TaskGroup() as pumps:
                    pumps.create_task(self._pump(near, far, up=True))
                    pumps.create_task(self._pump(far, near, up=False))
            finally:
                self._ends -= {near, far}

    async def _pump(self, source: socket.socket, sink: socket.socket, *, up: bool) -> None:
        loop = asyncio.get_running_loop()
        with contextlib.suppress(OSError):
            while data := await loop.sock_recv(source, 65536):
                if up:
                    self.up_bytes += len(data)
                    self._look_at(data)
                else:
                    self.down_bytes += len(data)
                    await self._enough.wait()
                if self._cut_after is not None:
                    data, self._cut_after = data[: max(self._cut_after, 0)], self._cut_after - len(data)
                await loop.sock_sendall(sink, data)
                if self._cut_after is not None and self._cut_after <= 0:
                    self._cut_after = None
                    self.refusing = self.refuse_after_cut
                    self.cut()
        _break(sink)


def _break(end: socket.socket) -> None:
    """Wakes whoever reads or writes there; the socket is closed where it was opened."""
    with contextlib.suppress(OSError):
        end.shutdown(socket.SHUT_RDWR)
