"""`make bench-client`: what the client costs as a product -> bench-results/client.json.

The endpoint and the verifier are processes of their own; `generate` runs in this one. Arms are interleaved
prompt by prompt. Everything is greedy, so that both arms of a pair write the same text, and a text can be
compared with the one that the same request got alone.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
from tokenizers import Tokenizer

from cloud_verifier.benchmarks.edge import BenchEdge
from cloud_verifier.benchmarks.installed import binary_figures, installed_figures
from cloud_verifier.benchmarks.report import Spread, write_report
from cloud_verifier.drafts.builtin import builtin_draft, builtin_target
from cloud_verifier.local import local_verifier
from edge_client.api.prompts import chat_prompt
from edge_client.controller import FixedController, Plan
from edge_client.experiments.workloads import load_prompts
from edge_client.manifest import TOKENIZER_NAME
from shared.messages import SamplingParams

K = 8
NUM_AT_ONCE = 16
CONVERSATION_TOKENS = 2000
MOST_CONVERSATIONS = 3  # each has a CPU read 4,000 tokens


@dataclass(frozen=True, slots=True)
class Served:
    """One streamed answer of the endpoint. Times count from the request."""

    text: str
    num_tokens: int
    first_token_s: float
    total_s: float

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.total_s


class Endpoint:
    """`edge-client serve` as a client sees it."""

    def __init__(self, url: str, pid: int) -> None:
        self.url = url
        self.pid = pid
        self._http = httpx.AsyncClient(timeout=600)

    async def chat(self, messages: Sequence[dict[str, str]], max_tokens: int) -> Served:
        body = {
            "model": "bench",
            "messages": list(messages),
            "max_tokens": max_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        started = time.perf_counter()
        text, first_s = "", 0.0
        usage: dict[str, int] = {}
        async with self._http.stream("POST", f"{self.url}/v1/chat/completions", json=body) as reply:
            reply.raise_for_status()
            async for line in reply.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                chunk = json.loads(line.removeprefix("data: "))
                if "error" in chunk:
                    raise RuntimeError(chunk["error"]["message"])
                usage = chunk["usage"] or usage
                new = "".join(choice["delta"].get("content") or "" for choice in chunk["choices"])
                if new and not text:
                    first_s = time.perf_counter() - started
                text += new
        return Served(text, usage["completion_tokens"], first_s, time.perf_counter() - started)


@contextmanager
def endpoint(address: str, draft: Path, *options: str) -> Iterator[Endpoint]:
    command = [sys.executable, "-c", "from edge_client.cli import main; main()", "serve", "--port", "0"]
    command += ["--verifier", address, "--insecure", "--draft", str(draft), "--k", str(K)]
    with subprocess.Popen(
        [*command, "--model-alias", "bench", *options], stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            found = re.search(r"http://\S+", process.stdout.readline() if process.stdout else "")
            if found is None:
                raise RuntimeError("the endpoint did not start")
            yield Endpoint(found[0], process.pid)
        finally:
            process.terminate()


async def overhead(
    edge: BenchEdge, served: Endpoint, tokenizer: Tokenizer, texts: Sequence[str], max_tokens: int
) -> dict[str, Any]:
    """The endpoint against `generate`, prompt by prompt, in turns."""
    manifest = edge.model.manifest
    ratios: list[float] = []
    later_ms: list[float] = []
    direct_rates: list[float] = []
    served_rates: list[float] = []
    same = 0
    for index, text in enumerate(texts):
        messages = [{"role": "user", "content": text}]
        prompt = chat_prompt(manifest, tokenizer, messages, ()).tokens

        async def direct(
            length: int = max_tokens, prompt: tuple[int, ...] = prompt
        ) -> tuple[str, float, float]:
            answer = await edge.answer(
                prompt,
                length,
                sampling=SamplingParams(),
                controller=FixedController(Plan(k=K)),
                eos_ids=manifest.eos_ids,
            )
            tokens = [token for token in answer.result.tokens if token not in manifest.eos_ids]
            rate = len(tokens) / answer.result.total_s
            return tokenizer.decode(tokens), rate, answer.result.first_token_s

        # Not counted: from here on the verifier has this prompt in its cache for both arms. No draft runs for
        # it, because the weights of the one that did would lie in the processor's cache.
        await edge.answer(
            prompt,
            1,
            sampling=SamplingParams(),
            controller=FixedController(Plan(cloud_tokens=1)),
            drafting=False,
        )
        if index % 2:
            ours = await served.chat(messages, max_tokens)
            plain = await direct()
        else:
            plain = await direct()
            ours = await served.chat(messages, max_tokens)
        ratios.append(ours.tokens_per_s / plain[1])
        later_ms.append((ours.first_token_s - plain[2]) * 1e3)
        direct_rates.append(plain[1])
        served_rates.append(ours.tokens_per_s)
        same += plain[0] == ours.text
    return {
        "num_prompts": len(texts),
        "num_same_text": same,
        "generate_tokens_per_s": Spread.of(direct_rates),
        "endpoint_tokens_per_s": Spread.of(served_rates),
        "tokens_per_s_lost_percent": round(100 * (1 - statistics.median(ratios)), 2),
        "first_token_later_ms": Spread.of(later_ms),
    }


async def fifth_turn(
    served: Endpoint, texts: Sequence[str], tokenizer: Tokenizer, repeat: int
) -> dict[str, Any]:
    """Time to first token of turn 5 of a conversation, continued and cold."""
    warm: list[float] = []
    cold: list[float] = []
    filler = " ".join(texts)
    part = tokenizer.decode(tokenizer.encode(filler).ids[: (CONVERSATION_TOKENS - 200) // 4])
    for turn in range(repeat):
        # The first words differ each time: no cache knows this conversation.
        messages = [{"role": "system", "content": f"Conversation {turn} at {time.time()}."}]
        for _ in range(4):
            messages.append({"role": "user", "content": f"{part}\n\nSay what this is about."})
            answer = await served.chat(messages, 24)
            messages.append({"role": "assistant", "content": answer.text})
        messages.append({"role": "user", "content": "And in three words?"})
        warm.append((await served.chat(messages, 16)).first_token_s)
        messages[0] = {"role": "system", "content": f"Cold {turn} at {time.time()}."}
        cold.append((await served.chat(messages, 16)).first_token_s)
    return {
        "conversation_tokens": CONVERSATION_TOKENS,
        "continued_s": Spread.of(warm),
        "cold_s": Spread.of(cold),
        "percent_of_cold": round(100 * statistics.median(warm) / statistics.median(cold), 1),
    }


async def many_at_once(served: Endpoint, texts: Sequence[str], max_tokens: int) -> dict[str, Any]:
    """16 requests together against each alone: the same texts, and how long the last one took."""
    asked = [[{"role": "user", "content": text}] for text in texts[:NUM_AT_ONCE]]
    with resident(served.pid) as memory:
        started = time.perf_counter()
        together = await asyncio.gather(*(served.chat(messages, max_tokens) for messages in asked))
        total_s = time.perf_counter() - started
    alone = [await served.chat(messages, max_tokens) for messages in asked]
    times = [answer.total_s for answer in together]
    return {
        "num_requests": len(asked),
        "num_same_text_as_alone": sum(a.text == b.text for a, b in zip(together, alone, strict=True)),
        "total_s": round(total_s, 2),
        "alone_one_after_the_other_s": round(sum(answer.total_s for answer in alone), 2),
        "answer_s": Spread.of(times),
        "first_token_s": Spread.of([answer.first_token_s for answer in together]),
        "resident_mb": round(memory.peak_bytes / 1e6),
    }


@dataclass(slots=True)
class Resident:
    peak_bytes: int = 0


@contextmanager
def resident(pid: int) -> Iterator[Resident]:
    """The largest resident set of a process while this lasts, looked at every 50 ms."""
    process, found, done = psutil.Process(pid), Resident(), threading.Event()

    def watch() -> None:
        while not done.wait(0.05):
            found.peak_bytes = max(found.peak_bytes, process.memory_info().rss)

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield found
    finally:
        done.set()
        watcher.join()


async def measure(
    target: Path, draft: Path, num_prompts: int, max_tokens: int, repeat: int
) -> dict[str, Any]:
    texts = [prompt.text for prompt in load_prompts(None)][: max(num_prompts, NUM_AT_ONCE)]
    tokenizer = Tokenizer.from_file(str(draft / TOKENIZER_NAME))
    report: dict[str, Any] = {"k": K, "max_tokens": max_tokens}
    with local_verifier("--target", str(target)) as address:
        with endpoint(address, draft) as served:
            with resident(served.pid) as memory:
                await served.chat([{"role": "user", "content": texts[0]}], max_tokens)
            report["resident_mb_one_answer"] = round(memory.peak_bytes / 1e6)
            edge = BenchEdge(draft, address)
            report["overhead"] = await overhead(edge, served, tokenizer, texts[:num_prompts], max_tokens)
            await edge.close()
            report["fifth_turn"] = await fifth_turn(served, texts, tokenizer, min(repeat, MOST_CONVERSATIONS))
        with endpoint(address, draft) as served:
            report["sixteen_at_once"] = await many_at_once(served, texts, max_tokens // 2)
        report["binary"] = binary_figures(address, draft, repeat)
    report["installed"] = installed_figures(repeat)
    report["wanted"] = wanted(report)
    return report


def wanted(report: dict[str, Any]) -> dict[str, dict[str, float | bool]]:
    """What the client is held to: each figure, its limit, and whether it keeps to it."""
    endpoint_cost, many = report["overhead"], report["sixteen_at_once"]
    binary, installed = report["binary"], report["installed"]
    figures = {
        "endpoint_tokens_per_s_lost_percent": (endpoint_cost["tokens_per_s_lost_percent"], 5),
        "endpoint_first_token_later_ms": (endpoint_cost["first_token_later_ms"].median, 15),
        "fifth_turn_percent_of_cold": (report["fifth_turn"]["percent_of_cold"], 15),
        "edge_install_mb": (installed["edge_mb"], 260),
        "edge_import_s": (installed["import_s"].median, 0.5),
        "binary_help_s": (binary["help_s"].median, 0.5),
        "binary_first_token_later_s": (
            binary["first_token_s"].median - binary["first_token_of_the_package_s"].median,
            1.0,
        ),
        "sixteen_at_once_wrong_answers": (many["num_requests"] - many["num_same_text_as_alone"], 0),
    }
    return {
        name: {"value": round(value, 3), "at_most": limit, "kept": value <= limit}
        for name, (value, limit) in figures.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("bench-results/client.json"))
    parser.add_argument("--num-prompts", type=int, default=26)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--repeat", type=int, default=5)
    options = parser.parse_args()
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    report = asyncio.run(
        measure(builtin_target(), builtin_draft(), options.num_prompts, options.max_tokens, options.repeat)
    )
    write_report(options.out, report)
    print(options.out.read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
