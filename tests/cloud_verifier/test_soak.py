"""Many restless edge clients on two verifiers, one of which is killed again and again.

`make soak` runs it for five minutes; SPECWIRE_SOAK_S sets another duration. Every answer that is finished
must be the text that the target writes alone, and nothing may be left behind: no session, slot, task or
descriptor, and after the first third of the time no more memory than `MAX_GROWTH_BYTES`.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import random
import re
import socket
import sys
import urllib.request
from collections.abc import AsyncIterator
from pathlib import Path
from statistics import median

import pytest
from verifier_support import Alone, prompts

from cloud_verifier.target_model import TargetModel
from edge_client.connection import Patience, Verifier
from edge_client.controller import FixedController, Plan
from edge_client.draft_model import DraftModel
from edge_client.generate import Conversation, SessionSettings
from edge_client.results import Result
from shared.faults import SpecwireError
from shared.messages import SamplingParams

DURATION_S = float(os.environ.get("SPECWIRE_SOAK_S", "30"))
PERIOD_S = min(20.0, DURATION_S / 3)
NUM_CLIENTS = 32
MAX_GROWTH_BYTES = 8 << 20
WARM_UP_S = 5.0
REST_S = 16.0  # twice the idle timeout and the period in which it is looked for
PROMPTS = prompts(12, 24, seed=40)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Process:
    """A verifier in a process of its own, on ports that stay the same when it is started again."""

    def __init__(self, target: Path) -> None:
        self.port, self.metrics_port = free_port(), free_port()
        self._target = target
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        options = ["--target", str(self._target), "--dtype", "float32", "--kv-cache", "4MB", "--insecure"]
        options += [
            "--listen",
            f"127.0.0.1:{self.port}",
            "--metrics-listen",
            f"127.0.0.1:{self.metrics_port}",
        ]
        options += ["--idle-timeout", "2", "--log-level", "error", "--threads", "1"]
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", "from cloud_verifier.cli import main; main()", "serve", *options),
            stdout=asyncio.subprocess.PIPE,
        )
        assert self._process.stdout is not None
        line = await asyncio.wait_for(self._process.stdout.readline(), 240)
        assert line.startswith(b"Serving"), line

    async def kill(self) -> None:
        assert self._process is not None
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        await self._process.wait()

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def metric(self, name: str) -> float:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.metrics_port}/metrics", timeout=30) as response:
            found = re.search(rf"^specwire_{name} (\S+)$", response.read().decode(), re.MULTILINE)
        assert found is not None
        return float(found[1])

    def assert_at_rest(self) -> None:
        """No session is left, and no slot is held but by the prefix cache."""
        assert self.metric("num_sessions_known") == 0
        assert self.metric("num_requests_running") == 0
        assert self.metric("num_requests_waiting") == 0
        assert self.metric("kv_cache_usage_perc") == self.metric("prefix_cache_usage_perc")
        assert self.metric('faults_total{kind="internal"}') == 0


@contextlib.asynccontextmanager
async def two_verifiers(target: Path) -> AsyncIterator[list[Process]]:
    processes = [Process(target), Process(target)]
    try:
        await asyncio.gather(*(process.start() for process in processes))
        yield processes
    finally:
        for process in processes:
            await process.kill()


class Restless:
    """A client that starts, talks over several turns, cancels, vanishes and returns at random."""

    def __init__(self, number: int, addresses: list[str], draft: DraftModel, alone: Alone) -> None:
        self._rng = random.Random(number)
        self._addresses = addresses if number % 2 else addresses[::-1]
        self._draft = draft
        self._alone = alone
        self.num_finished = self.num_given_up = 0

    async def live(self) -> None:
        while True:
            try:
                await self._visit()
            except SpecwireError:
                self.num_given_up += 1  # both were away for longer than patience
            await asyncio.sleep(self._rng.random() * 0.5)

    async def _visit(self) -> None:
        patience = Patience(connect=5, answer=60, reconnect=120)
        async with Verifier(self._addresses, tls=None, patience=patience) as verifier:
            settings = SessionSettings(self._draft.manifest.tokenizer, (), client="soak")
            async with Conversation(
                verifier, await verifier.describe(), self._draft, settings
            ) as conversation:
                text = list(self._rng.choice(PROMPTS))
                for _ in range(self._rng.randrange(1, 4)):
                    num_tokens = self._rng.choice((8, 16, 32))
                    tokens = await self._answer(conversation, text, num_tokens)
                    if tokens is None:
                        return
                    assert tokens == self._alone(text, num_tokens)
                    self.num_finished += 1
                    text += [*tokens, *self._rng.choice(PROMPTS)[:3]]
                    await asyncio.sleep(self._rng.choice((0, 0, 0.1, 3.0)))  # longer than the idle timeout

    async def _answer(self, conversation: Conversation, text: list[int], num_tokens: int) -> list[int] | None:
        plan = self._rng.choice((Plan(k=3), Plan(k=6, ahead=2), Plan(cloud_tokens=64)))
        events = conversation.answer(
            text, sampling=SamplingParams(), max_new_tokens=num_tokens, controller=FixedController(plan)
        )
        leaves_after = self._rng.randrange(1, 4) if self._rng.random() < 0.2 else None
        count = 0
        async with contextlib.aclosing(events):
            async for event in events:
                if isinstance(event, Result):
                    return list(event.tokens)
                count += 1
                if count == leaves_after:
                    return None
        return None


class Footprint:
    """What a process holds, looked at once a second: resident memory, descriptors, threads."""

    def __init__(self, pid: int) -> None:
        self._folder = Path(f"/proc/{pid}")
        self.memory_bytes: list[int] = []

    def sample(self) -> None:
        pages = (self._folder / "statm").read_text().split()[1]
        self.memory_bytes.append(int(pages) * os.sysconf("SC_PAGE_SIZE"))

    @property
    def num_descriptors(self) -> int:
        return sum(1 for _ in (self._folder / "fd").iterdir())

    @property
    def num_threads(self) -> int:
        return sum(1 for _ in (self._folder / "task").iterdir())

    @property
    def growth_bytes(self) -> int:
        """From the second third to the last, by their medians; the first is for warming up."""
        third = len(self.memory_bytes) // 3
        return int(median(self.memory_bytes[-third:]) - median(self.memory_bytes[third : 2 * third]))


async def rest() -> None:
    """Until verifiers have forgotten who left, and Python what refers to itself."""
    await asyncio.sleep(REST_S / 2)
    gc.collect()
    await asyncio.sleep(REST_S / 2)


class Crowd:
    """All the clients at once."""

    def __init__(self, addresses: list[str], drafts: list[DraftModel], alone: Alone) -> None:
        self.clients = [Restless(i, addresses, draft, alone) for i, draft in enumerate(drafts)]
        self._tasks: list[asyncio.Task[None]] = []

    @contextlib.asynccontextmanager
    async def at_work(self) -> AsyncIterator[None]:
        self._tasks = [asyncio.create_task(client.live()) for client in self.clients]
        try:
            yield
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            self._tasks.clear()

    def check(self) -> None:
        """Raises what a client found to be wrong."""
        for task in self._tasks:
            if task.done():
                task.result()


@pytest.mark.slow
@pytest.mark.timeout(int(DURATION_S) * 2 + 900)
async def test_soak(tiny_target: Path, tiny_draft: Path):
    alone = Alone(TargetModel.load(str(tiny_target), dtype="float32", num_slots=512))
    drafts = [DraftModel.load(tiny_draft, threads=1) for _ in range(NUM_CLIENTS)]
    loop = asyncio.get_running_loop()
    async with two_verifiers(tiny_target) as (mortal, lasting):
        addresses = [f"127.0.0.1:{process.port}" for process in (mortal, lasting)]
        verifier, own = Footprint(lasting.pid), Footprint(os.getpid())
        async with Crowd(addresses, drafts, alone).at_work():
            await asyncio.sleep(WARM_UP_S)  # what gRPC and the allocators keep for good is there after that
        await rest()
        num_tasks = len(asyncio.all_tasks())
        held = own.num_descriptors, verifier.num_descriptors, verifier.num_threads
        crowd = Crowd(addresses, drafts, alone)
        num_kills = 0
        end = loop.time() + DURATION_S
        async with crowd.at_work():
            while loop.time() < end:
                next_kill = loop.time() + PERIOD_S
                while loop.time() < next_kill:
                    await asyncio.sleep(1)
                    verifier.sample()
                    own.sample()
                    crowd.check()
                if loop.time() < end:
                    await mortal.kill()
                    await mortal.start()
                    num_kills += 1
        await rest()
        finished = sum(client.num_finished for client in crowd.clients)
        given_up = sum(client.num_given_up for client in crowd.clients)
        print(
            f"{finished} answers, {num_kills} kills, {given_up} visits given up; resident memory grew by "
            f"{verifier.growth_bytes / 2**20:.1f} MiB in the verifier that lived on, by "
            f"{own.growth_bytes / 2**20:.1f} MiB in the clients"
        )
        for process in (mortal, lasting):
            process.assert_at_rest()
        assert len(asyncio.all_tasks()) <= num_tasks
        now = own.num_descriptors, verifier.num_descriptors, verifier.num_threads
        assert all(a <= b for a, b in zip(now, held, strict=True)), (now, held)
        assert verifier.growth_bytes < MAX_GROWTH_BYTES
        assert own.growth_bytes < MAX_GROWTH_BYTES
    assert finished > NUM_CLIENTS
    assert num_kills
    assert given_up == 0
