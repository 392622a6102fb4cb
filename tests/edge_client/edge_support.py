"""A real verifier in this process, answers from it, and connections that can be cut."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from pathlib import Path

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
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[Relay]:
        server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        try:
            yield self
        finally:
            server.close()
            await asyncio.sleep(0.01)  # what was accepted by now has its task
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def cut(self) -> None:
        """Breaks every connection that is open now."""
        for writer in self._writers:
            writer.transport.abort()

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

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        ends = {writer}
        try:
            if self.refusing:
                return
            host, _, port = self._target.rpartition(":")
            far_reader, far_writer = await asyncio.open_connection(host, int(port))
            ends.add(far_writer)
            self._writers |= ends
            await asyncio.gather(
                self._pump(reader, far_writer, up=True), self._pump(far_reader, writer, up=False)
            )
        except OSError:
            return  # the verifier is not there: to the edge, one that refuses
        finally:
            self._writers -= ends
            for end in ends:
                end.transport.abort()
                with contextlib.suppress(OSError):
                    await end.wait_closed()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, up: bool) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(65536):
                if up:
                    self.up_bytes += len(data)
                    self._look_at(data)
                else:
                    self.down_bytes += len(data)
                    await self._enough.wait()
                if self._cut_after is not None:
                    data, self._cut_after = data[: max(self._cut_after, 0)], self._cut_after - len(data)
                writer.write(data)
                await writer.drain()
                if self._cut_after is not None and self._cut_after <= 0:
                    self._cut_after = None
                    self.refusing = self.refuse_after_cut
                    self.cut()
        writer.transport.abort()
