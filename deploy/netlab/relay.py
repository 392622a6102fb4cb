"""The TCP relay process: delay and rate on byte streams, where packets cannot be had.

Speaks the same JSON lines as the emulator, and ends with its owner.
"""

from __future__ import annotations

import asyncio
import json
import selectors
import signal
import sys
import time
from contextlib import suppress
from typing import Any

_CHUNK_BYTES = 4096
_BUFFER_S = 0.1  # what a sender may be ahead of the rate before it is made to wait


class Pipe:
    """One direction of the relay, shared by all connections as a link is.

    Bytes leave one after another at the rate, and arrive `delay_ms` later.
    """

    def __init__(self, delay_ms: float, rate_mbit: float | None) -> None:
        self._delay_s = delay_ms / 1000
        self._s_per_byte = 8e-6 / rate_mbit if rate_mbit else 0.0
        self._free_at = 0.0
        self.num_bytes = 0

    def send(self, now: float, size: int) -> tuple[float, float]:
        """(when the last byte has left, when it arrives) of `size` bytes offered at `now`, in seconds."""
        self._free_at = max(now, self._free_at) + size * self._s_per_byte
        self.num_bytes += size
        return self._free_at, self._free_at + self._delay_s

    async def carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Move one connection's bytes until its sender is done."""
        loop = asyncio.get_running_loop()
        waiting: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()

        async def deliver() -> None:
            while True:
                arrival, data = await waiting.get()
                await asyncio.sleep(max(0.0, arrival - loop.time()))
                if not data:
                    return
                writer.write(data)
                await writer.drain()

        async def collect() -> None:
            while True:
                data = await reader.read(_CHUNK_BYTES)
                departure, arrival = self.send(loop.time(), len(data))
                waiting.put_nowait((arrival, data))
                if not data:
                    return
                await asyncio.sleep(max(0.0, departure - loop.time() - _BUFFER_S))

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(deliver())
            tasks.create_task(collect())
        with suppress(OSError):
            writer.write_eof()


async def relay(job: dict[str, Any]) -> None:
    """Serve until standard input says "stop" or ends."""
    up, down = (Pipe(*pair) for pair in zip(job["delays_ms"], job["rates_mbit"], strict=True))
    connections: set[asyncio.Task[None]] = set()

    async def join(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        connections.add(task)
        far_writer = None
        try:
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", job["server_port"])
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(up.carry(reader, far_writer))
                tasks.create_task(down.carry(far_reader, writer))
        except* (OSError, asyncio.CancelledError):
            pass  # one side has gone: the other is told so below
        finally:
            connections.discard(task)
            for end in (writer, far_writer):
                if end is not None:
                    end.transport.abort()

    server = await asyncio.start_server(join, "127.0.0.1", 0)
    _say({"ready": True, "port": server.sockets[0].getsockname()[1]})
    orders = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(orders), sys.stdin.buffer
    )
    cpu_start, start_ns = time.process_time(), time.monotonic_ns()
    while line := await orders.readline():
        match json.loads(line)["do"]:
            case "reset":
                up.num_bytes = down.num_bytes = 0
                cpu_start, start_ns = time.process_time(), time.monotonic_ns()
                _say({"start_ns": start_ns})
            case "stats":
                cpu_s = time.process_time() - cpu_start
                _say({"up_bytes": up.num_bytes, "down_bytes": down.num_bytes, "cpu_s": round(cpu_s, 4)})
            case "stop":
                break
    server.close()
    for task in list(connections):
        task.cancel()


def _say(answer: dict[str, Any]) -> None:
    print(json.dumps(answer), flush=True)


def main() -> None:
    """Entry of the process; the first line on standard input is the job."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with open(0, "rb", buffering=0, closefd=False) as stdin:
        job = json.loads(stdin.readline())
    # epoll in asyncio rounds every wait up to a millisecond; select does not
    loop_factory = lambda: asyncio.SelectorEventLoop(selectors.SelectSelector())  # noqa: E731
    with asyncio.Runner(loop_factory=loop_factory) as runner:
        runner.run(relay(job))
