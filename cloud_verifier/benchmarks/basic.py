"""`make experiment-basic`: the target alone against speculation with K = 5 and K = 10.

For prompts of 50 to 100 tokens: time, speed-up, acceptance, tokens a round; then quality. Sampling at
temperature 1, where texts differ but their distribution must not.

The perplexity of a text under the target depends on which text it is, so it differs between equal arms.
Beside it stands what it should be for that very text: exp of the target's mean entropy at its positions. The
Kolmogorov-Smirnov test asks whether every token was drawn from the target's distribution at its place: the
mass of the likelier tokens plus a random part of its own is then uniform, independently for all tokens.
"""

from __future__ import annotations

import argparse
import asyncio
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from cloud_verifier.benchmarks.report import Spread, write_report

if TYPE_CHECKING:
    from cloud_verifier.benchmarks.baseline import HfGenerate, Scored, Timed
    from cloud_verifier.benchmarks.edge import BenchEdge

AUTOREGRESSIVE = "autoregressive"
SHORTEST, LONGEST = 50, 100  # prompt tokens


@dataclass(frozen=True, slots=True)
class Written:
    """One answer, and what the target says of each of its tokens."""

    timed: Timed
    scored: Scored
    acceptance: float = 0.0
    tokens_per_round: float = 0.0


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--prompts", type=Path, help="Spec-Bench questions; default: a built-in set")
    parser.add_argument("--num-prompts", type=int, default=20)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--k", type=int, nargs="+", default=[5, 10])
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--out", type=Path, default=Path("bench-results/experiment-basic.json"))
    options = parser.parse_args(arguments)
    asyncio.run(run(options))


async def run(options: argparse.Namespace) -> None:
    from cloud_verifier.benchmarks.baseline import HfGenerate
    from cloud_verifier.benchmarks.edge import BenchEdge
    from cloud_verifier.drafts.builtin import builtin_draft, builtin_target
    from cloud_verifier.local import local_verifier
    from edge_client.experiments.workloads import load_prompts

    target, draft = builtin_target(), builtin_draft()
    written: dict[str, list[Written]] = defaultdict(list)
    with local_verifier("--target", str(target), "--dtype", options.dtype) as address:
        edge = BenchEdge(draft, address)
        dtype = (await edge.describe()).dtype
        hf = HfGenerate(str(target), dtype=dtype)
        encoded = [edge.encode_chat(prompt.text) for prompt in load_prompts(options.prompts, 80)]
        chosen = [ids for ids in encoded if SHORTEST <= len(ids) <= LONGEST][: options.num_prompts]
        with Progress() as progress:
            task = progress.add_task("writing", total=len(chosen) * (1 + len(options.k)))
            for seed, ids in enumerate(chosen):
                timed = await asyncio.to_thread(
                    hf.generate, ids, options.max_tokens, temperature=options.temperature, seed=seed
                )
                written[AUTOREGRESSIVE].append(
                    Written(timed, hf.score(ids, timed.tokens, temperature=options.temperature, seed=seed))
                )
                progress.advance(task)
                for k in options.k:
                    written[f"speculative_k{k}"].append(await _speculate(edge, hf, ids, k, seed, options))
                    progress.advance(task)
        await edge.close()
    report = _report(options, written, dtype, draft.name, len(chosen))
    write_report(options.out, report)
    _print(report, options.out)


async def _speculate(
    edge: BenchEdge, hf: HfGenerate, ids: Sequence[int], k: int, seed: int, options: argparse.Namespace
) -> Written:
    from edge_client.controller import FixedController, Plan
    from shared.messages import SamplingParams

    done = await edge.answer(
        ids,
        options.max_tokens,
        sampling=SamplingParams(temperature=options.temperature, seed=seed),
        controller=FixedController(Plan(k=k)),
    )
    return Written(
        done.timed,
        hf.score(ids, done.timed.tokens, temperature=options.temperature, seed=seed),
        done.result.acceptance,
        done.result.tokens_per_round,
    )


def _report(
    options: argparse.Namespace, written: dict[str, list[Written]], dtype: str, draft: str, num_prompts: int
) -> dict[str, Any]:
    from scipy import stats

    base = written[AUTOREGRESSIVE]
    arms: dict[str, Any] = {}
    for name, group in written.items():
        logprobs, entropies, uniforms = (
            np.concatenate([getattr(one.scored, part) for one in group])
            for part in ("logprobs", "entropies", "uniforms")
        )
        seconds = Spread.of([one.timed.last_token_s for one in group])
        arms[name] = {
            "answer_s": asdict(seconds),
            "tokens_per_s": asdict(Spread.of([one.timed.decode_tokens_per_s for one in group])),
            "speedup": Spread.of(
                [
                    one.timed.decode_tokens_per_s / alone.timed.decode_tokens_per_s
                    for one, alone in zip(group, base, strict=True)
                ]
            ).median,
            "acceptance": sum(one.acceptance for one in group) / len(group),
            "tokens_per_round": sum(one.tokens_per_round for one in group) / len(group),
            "perplexity": math.exp(-logprobs.mean()),
            "expected_perplexity": math.exp(entropies.mean()),
            "ks_p_value": float(stats.kstest(uniforms, "uniform").pvalue),
        }
    return {
        "settings": {
            "num_prompts": num_prompts,
            "prompt_tokens": [SHORTEST, LONGEST],
            "max_tokens": options.max_tokens,
            "temperature": options.temperature,
            "dtype": dtype,
            "draft": draft,
            "seeds": "the prompt's number",
        },
        "arms": arms,
    }


def _print(report: dict[str, Any], out: Path) -> None:
    table = Table("", "tokens/s", "speed-up", "accepted", "tokens/round", "perplexity", "expected", "KS p")
    for name, arm in report["arms"].items():
        drafted = name != AUTOREGRESSIVE
        table.add_row(
            name,
            f"{arm['tokens_per_s']['median']:.1f}",
            f"{arm['speedup']:.2f}" if drafted else "",
            f"{arm['acceptance']:.1%}" if drafted else "",
            f"{arm['tokens_per_round']:.2f}" if drafted else "",
            f"{arm['perplexity']:.2f}",
            f"{arm['expected_perplexity']:.2f}",
            f"{arm['ks_p_value']:.3f}",
        )
    console = Console()
    console.print(table)
    console.print(f"Written to {out}")


if __name__ == "__main__":
    main()
