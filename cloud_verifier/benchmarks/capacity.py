"""How many devices one verifier carries: busy-seconds per token, alone and with drafts, by sessions.

    python -m cloud_verifier.benchmarks.capacity --out bench-results/capacity.json

The edges' drafting is recorded beforehand: each prompt is answered once by a real draft model, and its
blocks are kept as the bytes that would travel. Then N sessions replay them into the engine in this process,
each sending its next block as soon as it has the verdict on the last one, so that the cores serve the
verifier alone and it is always saturated. Payloads are decoded as the server does, beside the engine's
thread; gRPC is left out (a message costs it 0.1 to 0.2 ms, see `make bench-loopback`). The cloud-only arm is
the same prompts with the target writing alone. Prompts are read before the clock starts, and a measurement
ends when the first session has its whole answer, so that N sessions are active throughout. Arms alternate.

`shared_prefix_ttft_ratio` is the time to first token of a session whose prompt begins with 1,000 tokens that
another has sent, as a share of that other's.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer

from cloud_verifier.auth import Identity
from cloud_verifier.benchmarks.report import Spread, write_report
from cloud_verifier.cli import load_target
from cloud_verifier.engine import Engine
from cloud_verifier.observer import Observer, PassRecord
from edge_client.chat_template import render
from edge_client.draft_model import DraftModel
from edge_client.drafting import Drafter
from edge_client.experiments.workloads import load_prompts
from edge_client.manifest import TOKENIZER_NAME
from shared.codecs import get_codec
from shared.messages import DraftBlock, FinishReason, Generate, Open, SamplingParams, Tokens, Verdict
from shared.wire import ServerMessage

SESSIONS = (1, 2, 4, 8, 16, 32)
_SHARED, _OWN, _SHARED_RUNS = 1000, 16, 5
_CODEC = get_codec("lattice")


@dataclass(frozen=True, slots=True)
class Recording:
    """One prompt, and the blocks of its answer in their order."""

    prompt: tuple[int, ...]
    blocks: tuple[DraftBlock, ...]


@dataclass(slots=True)
class Passes(Observer):
    """Keeps what every pass reported."""

    records: list[PassRecord] = field(default_factory=list)

    def passed(self, record: PassRecord) -> None:
        self.records.append(record)


@dataclass(frozen=True, slots=True)
class Sample:
    """One run of N sessions. `overhead` is the share of busy time outside forward and verification."""

    busy_s_per_token: float
    tokens_per_s: float
    batch_sessions: float
    round_p50_s: float
    round_p95_s: float
    overhead: float
    num_tokens: int
    num_diverged: int


class Replayer:
    """One session that sends what was recorded, or lets the target write."""

    def __init__(self, engine: Engine, vocab_size: int) -> None:
        self._loop = asyncio.get_running_loop()
        self._inbox: asyncio.Queue[ServerMessage] = asyncio.Queue()
        self._vocab_size = vocab_size
        self.ticket = engine.ticket(Identity(), self._put)

    def _put(self, message: ServerMessage) -> None:
        self._loop.call_soon_threadsafe(self._inbox.put_nowait, message)

    async def get(self) -> ServerMessage:
        message = await self._inbox.get()
        if isinstance(message, Exception):
            raise message
        return message

    async def open(self, request: Open) -> None:
        self.ticket.open(request)
        await self.get()

    async def send(self, block: DraftBlock) -> Verdict:
        self.ticket.submit(block, _CODEC.decode(block.payload, len(block.tokens), self._vocab_size))
        verdict = await self.get()
        if not isinstance(verdict, Verdict):
            raise TypeError(f"expected a verdict, got {type(verdict).__name__}")
        return verdict

    async def replay(self, recording: Recording) -> bool:
        """Returns whether the answer went as it did when it was recorded."""
        for block in recording.blocks:
            verdict = await self.send(block)
            if verdict.stale:
                return False
            if verdict.finish_reason is not FinishReason.NONE:
                return block is recording.blocks[-1]
            following = recording.blocks[recording.blocks.index(block) + 1 :][:1]
            if following and (following[0].base_len, following[0].epoch) != (
                verdict.committed_len,
                verdict.epoch,
            ):
                return False
        return True

    async def write_alone(self, prompt_len: int, num_tokens: int) -> None:
        self.ticket.submit(Generate(1, 0, prompt_len, num_tokens))
        while not (isinstance(message := await self.get(), Tokens) and message.last):
            pass


class Bench:
    """Records drafts on an engine and replays them."""

    def __init__(
        self, engine: Engine, passes: Passes, draft: DraftModel, vocab_size: int, num_tokens: int, k: int
    ) -> None:
        self._engine = engine
        self._passes = passes
        self._draft = draft
        self._vocab_size = vocab_size
        self._num_tokens = num_tokens
        self._k = k

    def _request(self, prompt: Sequence[int], sampling: SamplingParams) -> Open:
        return Open(
            tokenizer=self._draft.manifest.tokenizer,
            tokens=tuple(prompt),
            sampling=sampling,
            codec=_CODEC.name,
            verification="token",
            max_block=self._k,
            max_new_tokens=self._num_tokens,
        )

    async def record(self, prompt: Sequence[int], sampling: SamplingParams) -> Recording:
        drafter = Drafter(self._draft, _CODEC, self._vocab_size, ())
        drafter.begin(prompt, sampling, len(prompt) + self._num_tokens)
        session = Replayer(self._engine, self._vocab_size)
        await session.open(self._request(prompt, sampling))
        blocks: list[DraftBlock] = []
        epoch = 0
        while room := drafter.room():
            drafted = drafter.draft(min(self._k, room))
            if drafted is None:
                break
            block = DraftBlock(len(blocks) + 1, epoch, drafted.base_len, drafted.tokens, drafted.payload)
            verdict = await session.send(block)
            drafter.apply(drafted, verdict.num_accepted, verdict.tokens)
            blocks.append(block)
            epoch = verdict.epoch
            if verdict.finish_reason is not FinishReason.NONE:
                break
        session.ticket.close()
        return Recording(tuple(prompt), tuple(blocks))

    async def shared_prefix(self, text: Sequence[int]) -> dict[str, Any]:
        """Seconds to the first token of two sessions that share 1,000 tokens and end with others of their
        own; `text` has at least as many as all of the measurement's together."""
        times: dict[str, list[float]] = {"first": [], "second": []}
        loop = asyncio.get_running_loop()
        own = itertools.count(_SHARED, _OWN)
        for _ in range(_SHARED_RUNS):
            self._engine.evict_cache()
            await self._settled()
            for found in times.values():
                at = next(own)
                prompt = (*text[:_SHARED], *text[at : at + _OWN])
                session = Replayer(self._engine, self._vocab_size)
                started = loop.time()
                await session.open(self._request(prompt, SamplingParams()))
                await session.write_alone(len(prompt), 1)
                found.append(loop.time() - started)
                session.ticket.close()
        return {f"{name}_ttft_s": Spread.of(found) for name, found in times.items()}

    async def _settled(self) -> None:
        """Waits until the engine has nothing to do."""
        loop = asyncio.get_running_loop()
        while True:
            for _ in range(2):  # what load() says is published after the commands of a turn
                passed = asyncio.Event()
                self._engine.post(_set_from_thread, loop, passed)
                await passed.wait()
            if not self._engine.load().num_waiting:
                return

    async def run(self, group: Sequence[Recording], sampling: SamplingParams, *, alone: bool) -> Sample:
        """All of `group` at once."""
        self._engine.evict_cache()
        sessions = [Replayer(self._engine, self._vocab_size) for _ in group]
        for session, recording in zip(sessions, group, strict=True):
            await session.open(self._request(recording.prompt, sampling))
        await self._settled()
        records = self._passes.records
        records.clear()
        busy_before = self._engine.busy_s
        started = asyncio.get_running_loop().time()
        tasks = [
            asyncio.create_task(
                session.write_alone(len(recording.prompt), self._num_tokens)
                if alone
                else session.replay(recording)
            )
            for session, recording in zip(sessions, group, strict=True)
        ]
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        full, duration_s = records[:], asyncio.get_running_loop().time() - started
        results = await asyncio.gather(*tasks)
        await self._settled()
        busy_s = self._engine.busy_s - busy_before
        for session in sessions:
            session.ticket.close()
        num_diverged = sum(result is False for result in results)
        return _sample(full, duration_s, records, busy_s, num_diverged)


def _set_from_thread(loop: asyncio.AbstractEventLoop, event: asyncio.Event) -> None:
    loop.call_soon_threadsafe(event.set)


def _sample(
    full: list[PassRecord], duration_s: float, whole: list[PassRecord], busy_s: float, num_diverged: int
) -> Sample:
    replies = [answered for record in full for answered in record.answered]
    num_tokens = sum(
        len(a.reply.tokens) + (a.reply.num_accepted if isinstance(a.reply, Verdict) else 0) for a in replies
    )
    rounds = sorted(answered.round_s for answered in replies)
    return Sample(
        busy_s_per_token=sum(record.busy_s for record in full) / num_tokens,
        tokens_per_s=num_tokens / duration_s,
        batch_sessions=sum(record.num_sessions for record in full) / len(full),
        round_p50_s=rounds[len(rounds) // 2],
        round_p95_s=rounds[min(len(rounds) - 1, int(len(rounds) * 0.95))],
        overhead=1 - sum(record.forward_s + record.verification_s for record in whole) / busy_s,
        num_tokens=num_tokens,
        num_diverged=num_diverged,
    )


def crossing(ratios: dict[int, float]) -> float | None:
    """Sessions at which the ratio falls to 1, interpolated; None where it stays above."""
    points = sorted(ratios.items())
    for (n0, r0), (n1, r1) in itertools.pairwise(points):
        if r0 >= 1 > r1:
            return n0 + (n1 - n0) * (r0 - 1) / (r0 - r1)
    return None


def main(
    target: Annotated[str, typer.Option(help="Folder or hub name; 'builtin' for the built-in model.")] = (
        "builtin"
    ),
    draft: Annotated[Path | None, typer.Option(help="Draft folder; the built-in one by default.")] = None,
    prompts: Annotated[Path | None, typer.Option(help="Spec-Bench file; a built-in set by default.")] = None,
    sessions: Annotated[str, typer.Option(help="Numbers of sessions, comma-separated.")] = (
        ",".join(map(str, SESSIONS))
    ),
    tokens: Annotated[int, typer.Option(help="Tokens of an answer.", min=8)] = 64,
    k: Annotated[int, typer.Option(help="Drafted tokens of a block.", min=1)] = 8,
    temperature: Annotated[float, typer.Option(min=0)] = 0.0,
    dtype: str = "auto",
    answers: Annotated[int, typer.Option(help="Answers for each number of sessions, at least.")] = 16,
    out: Path = Path("bench-results/capacity.json"),
) -> None:
    """Measures the verifier's capacity, prints the curve and writes JSON."""
    counts = tuple(int(part) for part in sessions.split(","))
    sampling = SamplingParams(temperature=temperature, seed=1)
    report = asyncio.run(_measure(target, draft, prompts, counts, tokens, k, sampling, dtype, answers))
    write_report(out, report)
    typer.echo(f"{'sessions':>8} {'alone ms/token':>15} {'drafts ms/token':>16} {'ratio':>6} {'overhead':>9}")
    for n in counts:
        arms = report["sessions"][str(n)]
        alone, speculative = (
            arms[arm]["busy_s_per_token"].median * 1e3 for arm in ("cloud_only", "speculative")
        )
        ratio, overhead = report["capacity_ratio"][str(n)], report["scheduler_overhead"][str(n)]
        typer.echo(f"{n:>8} {alone:>15.2f} {speculative:>16.2f} {ratio:>6.2f} {overhead:>8.1%}")
    typer.echo(
        f"A second session on a shared prompt of {_SHARED} tokens has its first token after "
        f"{report['shared_prefix_ttft_ratio']:.1%} of the first one's time."
    )
    typer.echo(
        f"The ratio falls to 1 at: {report['crosses_1_at'] or 'beyond what was measured'}. Written to {out}"
    )


async def _measure(
    target: str,
    draft: Path | None,
    file: Path | None,
    counts: Sequence[int],
    num_tokens: int,
    k: int,
    sampling: SamplingParams,
    dtype: str,
    answers: int,
) -> dict[str, Any]:
    from tokenizers import Tokenizer

    from cloud_verifier.drafts.builtin import builtin_draft

    folder = draft or builtin_draft()
    with ThreadPoolExecutor(
        1
    ) as loader:  # ends with the load, as `cloud-verifier serve` does it and says why
        model = loader.submit(load_target, target, "cpu", dtype, None, 0).result()
    drafter = DraftModel.load(folder)
    tokenizer = Tokenizer.from_file(str(folder / TOKENIZER_NAME))
    texts = load_prompts(file, per_category=-(-max(counts) // 12))[: max(counts)]
    passes = Passes()
    with contextlib.ExitStack() as stack:
        engine = Engine(model, observer=passes)
        engine.start()
        stack.callback(engine.stop)
        bench = Bench(engine, passes, drafter, drafter.manifest.tokenizer.size, num_tokens, k)
        recordings: list[Recording] = []
        for number, text in enumerate(texts, 1):
            chat = render(drafter.manifest, [{"role": "user", "content": text.text}])
            prompt = tokenizer.encode(chat, add_special_tokens=False).ids
            recordings.append(await bench.record(prompt, sampling))
            typer.echo(f"\rRecorded {number} of {len(texts)} answers", nl=number == len(texts))
        samples: dict[int, dict[str, list[Sample]]] = {}
        for n in counts:
            arms = samples[n] = {"cloud_only": [], "speculative": []}
            for turn in range(max(2, -(-answers // n))):
                group = [recordings[(turn * n + i) % len(recordings)] for i in range(n)]
                for arm, found in arms.items():
                    found.append(await bench.run(group, sampling, alone=arm == "cloud_only"))
            typer.echo(f"Measured {n} sessions")
        ids = tokenizer.encode(" ".join(prompt.text for prompt in load_prompts(None))).ids
        num_needed = _SHARED + 2 * _OWN * _SHARED_RUNS
        shared = await bench.shared_prefix(list(itertools.islice(itertools.cycle(ids), num_needed)))
    ratio = shared["second_ttft_s"].median / shared["first_ttft_s"].median
    report = _report(samples, model.name, str(model.dtype), k, num_tokens, sampling)
    return report | {"shared_prefix_ttft_ratio": ratio, "shared_prefix": shared}


def _report(
    samples: dict[int, dict[str, list[Sample]]],
    model: str,
    dtype: str,
    k: int,
    num_tokens: int,
    sampling: SamplingParams,
) -> dict[str, Any]:
    def spread(found: list[Sample], name: str) -> Spread:
        return Spread.of([getattr(sample, name) for sample in found])

    names = ("busy_s_per_token", "tokens_per_s", "batch_sessions", "round_p50_s", "round_p95_s", "overhead")
    per_token = {
        n: {arm: spread(found, "busy_s_per_token").median for arm, found in arms.items()}
        for n, arms in samples.items()
    }
    ratios = {n: arms["cloud_only"] / arms["speculative"] for n, arms in per_token.items()}
    return {
        "settings": {
            "model": Path(model).name,
            "dtype": dtype.removeprefix("torch."),
            "k": k,
            "tokens": num_tokens,
            "temperature": sampling.temperature,
            "load": "recorded drafts, replayed without pause",
        },
        "capacity_ratio": {str(n): ratio for n, ratio in ratios.items()},
        "crosses_1_at": crossing(ratios),
        "scheduler_overhead": {
            str(n): spread(arms["speculative"], "overhead").median for n, arms in samples.items()
        },
        "sessions": {
            str(n): {
                arm: {name: spread(found, name) for name in names}
                | {"diverged": sum(s.num_diverged for s in found), "runs": len(found)}
                for arm, found in arms.items()
            }
            for n, arms in samples.items()
        },
    }


if __name__ == "__main__":
    typer.run(main)
