"""A verifier in a process of its own that starts in well under a second and can be killed like any other.

The processes are forked from one that has imported torch already, and that runs nothing else.
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import signal
from collections.abc import AsyncIterator
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from cloud_verifier.passes import StepEmulation
from cloud_verifier.server import ServerConfig, running_server
from cloud_verifier.target_model import TargetModel
from shared.transport import Tls

DRAIN_TIMEOUT_S = 20.0

_forks = multiprocessing.get_context("forkserver")
_forks.set_forkserver_preload(
    ["cloud_verifier.server", "cloud_verifier.target_model", "transformers.models.llama.modeling_llama"]
)


class VerifierProcess:
    """`pass_ms`: what a forward pass takes at least, so that there is a middle of an answer."""

    def __init__(self, target: Path, *, pass_ms: float = 0.0, tls: Tls | None = None) -> None:
        self.address = ""
        self._tls = tls
        self._receiving, sending = _forks.Pipe(duplex=False)
        self._process = _forks.Process(target=_serve, args=(target, pass_ms, tls, sending), daemon=True)
        self._process.start()
        sending.close()

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[VerifierProcess]:
        try:
            port = await asyncio.to_thread(self._receiving.recv)
            self.address = f"{'localhost' if self._tls else '127.0.0.1'}:{port}"
            yield self
        finally:
            self.kill()
            self._process.join()
            self._process.close()
            self._receiving.close()

    def kill(self) -> None:
        """SIGKILL: it has no time for a last word."""
        self._process.kill()

    async def drain(self) -> int | None:
        """SIGTERM; the exit code, None when it does not end within its time to drain."""
        self._process.terminate()
        await asyncio.to_thread(self._process.join, DRAIN_TIMEOUT_S)
        return self._process.exitcode


def _serve(target: Path, pass_ms: float, tls: Tls | None, ready: Connection) -> None:
    torch.set_num_threads(1)
    model = TargetModel.load(str(target), device="cpu", dtype="float32", num_slots=2048)
    config = ServerConfig(
        listen="127.0.0.1:0",
        tls=tls,
        emulation=StepEmulation(pass_ms, 0.0),
        drain_timeout_s=DRAIN_TIMEOUT_S,
    )
    asyncio.run(_until_told(model, config, ready))


async def _until_told(model: TargetModel, config: ServerConfig, ready: Connection) -> None:
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    async with running_server(model, config) as port:
        ready.send(port)
        await stop.wait()
