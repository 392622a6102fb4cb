"""`make bench-loopback`: device and verifier on one machine, against the verifier alone and transformers.

Arms are interleaved prompt by prompt, so that a drifting machine touches all of them alike. Every answer
has exactly the same length. `tokens_per_s` counts what follows the first arrival, since on one machine
both sides would otherwise pay for the prompt one after the other; `answer_tokens_per_s` counts it in.
"""

from __future__ import annotations

import argparse
import asyncio
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.progress import Progress

from cloud_verifier.benchmarks.report import Spread, write_report

TEMPERATURES = (0.0, 0.7)
HF, CLOUD = "hf_generate", "cloud_ar"


@dataclass(frozen=True, slots=True)
class Sample:
    """One answer of one arm."""

    tokens_per_s: float
    answer_tokens_per_s: float
    first_token_s: float
    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    speculated: int = 0
    block_up_bytes: int = 0
    shares: dict[str, float] | None = None


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--prompts", type=Path, help="Spec-Bench questions; default: a built-in set")
    parser.add_argument("--per-category", type=int, default=2)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--k", type=int, nargs="+", default=[3, 5, 8, 10])
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--precision", default="", help="of the built-in draft; default: the fastest")
    parser.add_argument("--dense", action="store_true", help="add a dense_f32 arm at the largest K")
    parser.add_argument("--out", type=Path, default=Path("bench-results/loopback.json"))
    options = parser.parse_args(arguments)
    asyncio.run(run(options))


async def run(options: argparse.Namespace) -> None:
    from cloud_verifier.benchmarks.baseline import HfGenerate
    from cloud_verifier.benchmarks.edge import BenchEdge
    from cloud_verifier.drafts.builtin import builtin_draft, builtin_target
    from cloud_verifier.local import local_verifier
    from edge_client.experiments.workloads import load_prompts

    prompts = load_prompts(options.prompts, options.per_category)
    target = builtin_target()
    draft = builtin_draft(options.precision) if options.precision else builtin_draft()
    with local_verifier("--target", str(target), "--dtype", options.dtype) as address:
        edge = BenchEdge(draft, address)
        dtype = (await edge.describe()).dtype
        hf = HfGenerate(str(target), dtype=dtype)
        arms = _arms(options, edge, hf)
        samples: dict[str, list[Sample]] = defaultdict(list)
        with Progress() as progress:
            task = progress.add_task("loopback", total=len(prompts) * len(arms) * len(TEMPERATURES))
            for number, prompt in enumerate(prompts):
                ids = edge.encode_chat(prompt.text)
                for temperature in TEMPERATURES:
                    # Another order for every prompt, so that no arm always follows the same one.
                    for at in range(len(arms)):
                        name, arm = arms[(at + number) % len(arms)]
                        progress.update(task, description=f"{name} at temperature {temperature:g}")
                        samples[f"{name}@{temperature:g}"].append(await arm(ids, temperature, number))
                        progress.advance(task)
                write_report(options.out, _report(options, samples, dtype, draft.name, number + 1))
        await edge.close()
    print_table(options.out, samples)


def _arms(options: argparse.Namespace, edge: Any, hf: Any) -> list[tuple[str, Any]]:
    from edge_client.controller import FixedController, Plan
    from shared.messages import SamplingParams

    length: int = options.max_tokens

    async def hf_generate(ids: Sequence[int], temperature: float, seed: int) -> Sample:
        timed = await asyncio.to_thread(hf.generate, ids, length, temperature=temperature, seed=seed)
        return Sample(timed.decode_tokens_per_s, timed.answer_tokens_per_s, timed.first_token_s)

    def ours(plan: Plan, **settings: Any) -> Any:
        async def answer(ids: Sequence[int], temperature: float, seed: int) -> Sample:
            done = await edge.answer(
                ids,
                length,
                sampling=SamplingParams(temperature=temperature, seed=seed),
                controller=FixedController(plan),
                **settings,
            )
            counts = done.result.counts
            return Sample(
                done.timed.decode_tokens_per_s,
                done.timed.answer_tokens_per_s,
                done.timed.first_token_s,
                rounds=counts.num_rounds,
                drafted=counts.num_drafted,
                accepted=counts.num_accepted,
                speculated=len(done.result.tokens),
                block_up_bytes=sum(e.round.up_bytes for e in done.emissions),
                shares=_decode_shares(done),
            )

        return answer

    arms = [(HF, hf_generate), (CLOUD, ours(Plan(cloud_tokens=length), drafting=False))]
    arms += [(f"speculative_k{k}", ours(Plan(k=k))) for k in options.k]
    if options.dense:
        arms.append((f"dense_f32_k{max(options.k)}", ours(Plan(k=max(options.k)), codec="dense_f32")))
    return arms


def _decode_shares(done: Any) -> dict[str, float]:
    """Where the time after the first arrival went, in seconds; `rest` is what nobody claims."""
    shares: dict[str, float] = defaultdict(float)
    total = done.arrivals_s[-1] - done.arrivals_s[0]
    for emission in done.emissions[1:]:
        one, timing = emission.round, emission.round.timing
        verifier = (timing.queue_us + timing.forward_us + timing.verification_us) / 1e6
        shares["draft"] += one.draft_s
        shares["codec"] += one.codec_s
        shares["queue"] += timing.queue_us / 1e6
        shares["forward"] += timing.forward_us / 1e6
        shares["verification"] += timing.verification_us / 1e6
        shares["network"] += max(one.wait_s - verifier, 0.0)
    shares["rest"] = max(total - sum(shares.values()), 0.0)
    return dict(shares)


def _report(
    options: argparse.Namespace, samples: dict[str, list[Sample]], dtype: str, draft: str, num_prompts: int
) -> dict[str, Any]:
    medians = {name: Spread.of([s.tokens_per_s for s in group]) for name, group in samples.items()}
    arms = {
        name: {
            "tokens_per_s": asdict(medians[name]),
            "answer_tokens_per_s": asdict(Spread.of([s.answer_tokens_per_s for s in group])),
            "first_token_s": asdict(Spread.of([s.first_token_s for s in group])),
        }
        for name, group in samples.items()
    }
    speculative = [name for name in samples if not name.startswith((HF, CLOUD))]

    def ratios(baseline: str, names: Sequence[str]) -> dict[str, float]:
        return {
            name: round(medians[name].median / medians[f"{baseline}@{name.partition('@')[2]}"].median, 3)
            for name in names
        }

    def per(names: Sequence[str], top: str, bottom: str) -> dict[str, float]:
        return {
            name: round(
                sum(getattr(s, top) for s in samples[name]) / sum(getattr(s, bottom) for s in samples[name]),
                4,
            )
            for name in names
        }

    return {
        "settings": {
            "num_prompts": num_prompts,
            "max_tokens": options.max_tokens,
            "temperatures": TEMPERATURES,
            "prompts": str(options.prompts.name) if options.prompts else "built-in",
            "target": "SmolLM2-135M-Instruct",
            "dtype": dtype,
            "draft": draft,
            "verification": "the verifier's first choice",
            "seeds": "the prompt's number",
            "tokens_per_s": "tokens after the first arrival over the time after it",
        },
        "arms": arms,
        "speedup_vs_hf_generate": ratios(HF, speculative),
        "speedup_vs_cloud_ar": ratios(CLOUD, speculative),
        "cloud_ar_vs_hf_generate": ratios(HF, [n for n in samples if n.startswith(CLOUD)]),
        "acceptance": per(speculative, "accepted", "drafted"),
        "tokens_per_round": per(speculative, "speculated", "rounds"),
        "bytes_up_per_draft_token": per(speculative, "block_up_bytes", "drafted"),
        "time_share": {name: _mean_shares(samples[name]) for name in speculative},
    }


def _mean_shares(group: Sequence[Sample]) -> dict[str, float]:
    sums: dict[str, float] = defaultdict(float)
    for sample in group:
        for part, seconds in (sample.shares or {}).items():
            sums[part] += seconds
    total = sum(sums.values())
    return {part: round(seconds / total, 4) for part, seconds in sums.items()}


def print_table(out: Path, samples: dict[str, list[Sample]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("arm", "tokens/s", "quartiles", "first token s", title="Loopback, medians")
    for name, group in samples.items():
        speed = Spread.of([s.tokens_per_s for s in group])
        first = Spread.of([s.first_token_s for s in group])
        table.add_row(
            name, f"{speed.median:.1f}", f"{speed.p25:.1f} - {speed.p75:.1f}", f"{first.median:.2f}"
        )
    console = Console()
    console.print(table)
    console.print(f"Written to {out}")


if __name__ == "__main__":
    main()
