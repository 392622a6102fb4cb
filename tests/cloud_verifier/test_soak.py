"""Many restless edge clients on two verifiers, one of which is killed again and again.

`make soak` runs it for five minutes; SPECWIRE_SOAK_S sets another duration. Every answer that is finished
must be the text that the target writes alone, and nothing may be left behind.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import re
import socket
import sys
import urllib.request
from collections.abc import AsyncIterator
from pathlib import Path

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
PROMPTS = prompts(12, 24, seed=40)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Process:
    """A verifier in a process of its own, on ports that stay the same when it is started again."""

    def __init__(self, target: Path) -> None:
        self.port, self.metrics_port = free_port(), free_port()
        self.memory_bytes: list[int] = []  # since it was last started
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
        self.memory_bytes.clear()

    async def kill(self) -> None:
        assert self._process is not None
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        await self._process.wait()

    def sample(self) -> None:
        assert self._process is not None
        statm = Path(f"/proc/{self._process.pid}/statm").read_text().split()
        self.memory_bytes.append(int(statm[1]) * os.sysconf("SC_PAGE_SIZE"))

    def metric(self, name: str) -> float:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.metrics_port}/metrics", timeout=30) as response:
            found = re.search(rf"^specwire_{name} (\S+)$", response.read().decode(), re.MULTILINE)
        assert found is not None
        return float(found[1])


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


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.slow
@pytest.mark.timeout(int(DURATION_S) * 2 + 900)
async def test_soak(tiny_target: Path, tiny_draft: Path):
    alone = Alone(TargetModel.load(str(tiny_target), dtype="float32", num_slots=512))
    drafts = [DraftModel.load(tiny_draft, threads=1) for _ in range(NUM_CLIENTS)]
    loop = asyncio.get_running_loop()
    async with two_verifiers(tiny_target) as processes:
        addresses = [f"127.0.0.1:{process.port}" for process in processes]
        clients = [Restless(i, addresses, draft, alone) for i, draft in enumerate(drafts)]
        tasks = [asyncio.create_task(client.live()) for client in clients]
        own_memory: list[int] = []
        num_kills = 0
        end = loop.time() + DURATION_S
        while loop.time() < end:
            next_kill = loop.time() + PERIOD_S
            while loop.time() < next_kill:
                await asyncio.sleep(1)
                own_memory.append(resident_bytes())
                for process in processes:
                    process.sample()
                for task in tasks:
                    if task.done():
                        task.result()  # an answer that was not what it should be
            if loop.time() < end:
                victim = processes[num_kills % 2]
                await victim.kill()
                await victim.start()
                num_kills += 1
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.sleep(10)  # the idle timeout, and the period in which it is looked for
        for process in processes:
            assert process.metric("num_requests_running") == 0
            assert process.metric("num_requests_waiting") == 0
            assert process.metric('faults_total{kind="internal"}') == 0
            _assert_flat(process.memory_bytes)
        _assert_flat(own_memory)
    finished = sum(client.num_finished for client in clients)
    given_up = sum(client.num_given_up for client in clients)
    print(f"{finished} answers, {num_kills} kills, {given_up} visits given up")
    assert finished > NUM_CLIENTS
    assert num_kills
    assert given_up == 0


def _assert_flat(memory_bytes: list[int]) -> None:
    """After the first third, in which everything grows to its size, memory stays within a fifth."""
    later = memory_bytes[len(memory_bytes) // 3 :]
    if len(later) >= 5:
        assert later[-1] < 1.2 * later[0] + (32 << 20)
