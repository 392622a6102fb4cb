"""A quick comparison on one verifier: speculation and the cloud alone, interleaved prompt by prompt."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from edge_client.experiments.workloads import load_prompts
from edge_client.generate import Conversation
from edge_client.prompts import chat_prompt, plain_prompt
from edge_client.results import Result
from edge_client.startup import Client


async def run_bench(
    client: Client, num_prompts: int, progress: Callable[[str, float], None]
) -> dict[str, Any]:
    """Tokens per second of both arms (median and quartiles), and what speculation cost.

    Both arms write `max_tokens` tokens at most with the same settings; one unmeasured answer each warms
    them up. Stops early at an end of sequence, as a person's answers do.
    """
    options = client.options
    arms = {"speculative": options, "cloud_only": replace(options, cloud_only=True)}
    if options.cloud_only or not client.description.allows_generate:
        arms.pop("speculative" if options.cloud_only else "cloud_only")
    prompts = load_prompts(None, per_category=max(1, -(-num_prompts // 13)))[:num_prompts]
    results: dict[str, list[Result]] = {name: [] for name in arms}
    done = 0
    for turn, prompt in enumerate([prompts[0], *prompts]):
        # Whoever goes second finds the verifier's caches warm, so they take turns at that.
        names = list(arms) if turn % 2 else list(reversed(arms))
        for name in names:
            async with client.conversation() as conversation:
                result = await _answer(
                    client, conversation, prompt.text, arms[name].controller(client.description)
                )
            if turn:
                results[name].append(result)
            done += 1
            progress(f"{prompt.category}, {name}", done / (len(arms) * (len(prompts) + 1)))
    return _report(client, results)


async def _answer(client: Client, conversation: Conversation, text: str, controller: Any) -> Result:
    if client.manifest.chat_template:
        tokens = chat_prompt(client.manifest, client.tokenizer, [{"role": "user", "content": text}])
    else:
        tokens = plain_prompt(client.manifest, client.tokenizer, text)
    events = conversation.answer(
        tokens,
        sampling=client.options.sampling(),
        max_new_tokens=client.options.max_tokens,
        controller=controller,
    )
    async for event in events:
        if isinstance(event, Result):
            return event
    raise RuntimeError("an answer ended without a result")


def _report(client: Client, results: dict[str, list[Result]]) -> dict[str, Any]:
    arms = {name: _arm(measured) for name, measured in results.items()}
    report: dict[str, Any] = {
        "model": client.description.model,
        "dtype": client.description.dtype,
        "device": client.description.device,
        "emulation": client.description.emulation,
        "draft": f"{client.manifest.name} {client.manifest.precision}",
        "settings": {
            "k": client.options.k,
            "ahead": client.options.ahead,
            "temperature": client.options.temperature,
            "max_tokens": client.options.max_tokens,
        },
        "arms": arms,
    }
    if len(arms) == 2:
        ratios = [
            a.tokens_per_s / b.tokens_per_s
            for a, b in zip(results["speculative"], results["cloud_only"], strict=True)
        ]
        report["speedup"] = _spread(ratios)
    return report


def _arm(results: list[Result]) -> dict[str, Any]:
    drafted = sum(result.counts.num_drafted for result in results)
    rounds = sum(result.counts.num_rounds for result in results)
    total_s = sum(result.total_s for result in results)
    arm: dict[str, Any] = {
        "tokens_per_s": _spread([result.tokens_per_s for result in results]),
        "first_token_s": _spread([result.first_token_s for result in results]),
        "num_tokens": sum(len(result.tokens) for result in results),
        "time_share": {
            name: sum(getattr(result.time_share, name) for result in results) / total_s
            for name in ("draft", "codec", "network", "queue", "forward", "verification", "rest")
        },
        "lossy": any(result.lossy for result in results),
    }
    if drafted:
        arm |= {
            "acceptance": sum(result.counts.num_accepted for result in results) / drafted,
            "tokens_per_round": sum(len(result.tokens) for result in results) / rounds,
            "up_bytes_per_draft_token": sum(result.up_bytes for result in results) / drafted,
        }
    return arm


def _spread(values: list[float]) -> dict[str, float]:
    if len(values) < 2:
        return {"median": values[0], "q1": values[0], "q3": values[0]}
    q1, median, q3 = statistics.quantiles(values, n=4, method="inclusive")
    return {"median": median, "q1": q1, "q3": q3}
