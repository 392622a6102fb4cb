"""`make experiment-basic`: the target alone against speculation with K = 5 and K = 10.

For prompts of 50 to 100 tokens: time, speed-up, acceptance, tokens a round; then quality: the perplexity
of both texts under the target, and a two-sample Kolmogorov-Smirnov test on the log-probabilities that the
target gives to their tokens. Sampling at temperature 1, where texts differ but their distribution must
not.

Tokens of one answer are not independent, so the usual p-value, which counts them as if they were, would
be too small. What is independent is which of a prompt's two answers the target wrote alone: the p-values
here are the share of such assignments, of 10,000 drawn ones, that give as large a statistic.
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
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from cloud_verifier.benchmarks.report import Spread, write_report
from cloud_verifier.cli import prepare_threads

if TYPE_CHECKING:
    from cloud_verifier.benchmarks.baseline import HfGenerate, Timed
    from cloud_verifier.benchmarks.edge import BenchEdge

AUTOREGRESSIVE = "autoregressive"
SHORTEST, LONGEST = 50, 100  # prompt tokens
_ASSIGNMENTS = 10_000


@dataclass(frozen=True, slots=True)
class Written:
    """One answer, with the target's log-probability of each of its tokens."""

    timed: Timed
    logprobs: tuple[float, ...]
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
    prepare_threads(0)
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
                written[AUTOREGRESSIVE].append(Written(timed, hf.logprobs(ids, timed.tokens)))
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
        hf.logprobs(ids, done.timed.tokens),
        done.result.acceptance,
        done.result.tokens_per_round,
    )


def _report(
    options: argparse.Namespace, written: dict[str, list[Written]], dtype: str, draft: str, num_prompts: int
) -> dict[str, Any]:
    base = written[AUTOREGRESSIVE]
    arms: dict[str, Any] = {}
    for name, group in written.items():
        logprobs = [x for one in group for x in one.logprobs]
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
            "perplexity": math.exp(-sum(logprobs) / len(logprobs)),
            "p_values": None
            if name == AUTOREGRESSIVE
            else p_values([one.logprobs for one in group], [one.logprobs for one in base]),
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


def p_values(ours: Sequence[Sequence[float]], alone: Sequence[Sequence[float]]) -> dict[str, float]:
    """How often chance alone separates two groups of answers to the same prompts as far, by statistic.

    Args:
        ours, alone: log-probabilities of the tokens of each answer, both in the order of the prompts.

    Returns:
        "ks": of the largest distance of the two distributions of token log-probabilities; "perplexity": of
        the difference of their means.
    """
    values = np.sort(np.concatenate([np.asarray(one) for one in (*ours, *alone)]))
    # [prompts, values]: difference of the two answers' distribution functions
    apart = np.array([_cdf(a, values) - _cdf(b, values) for a, b in zip(ours, alone, strict=True)])
    means = np.array([np.mean(a) - np.mean(b) for a, b in zip(ours, alone, strict=True)])
    signs = np.random.default_rng(0).choice([-1.0, 1.0], (_ASSIGNMENTS, len(means)))
    signs[0] = 1.0  # what was seen is one of them
    distances = np.concatenate([np.abs(part @ apart).max(axis=1) for part in np.array_split(signs, 20)])
    shifts = np.abs(signs @ means)
    return {
        "ks": float(np.mean(distances >= distances[0] * (1 - 1e-12))),
        "perplexity": float(np.mean(shifts >= shifts[0] * (1 - 1e-12))),
    }


def _cdf(sample: Sequence[float], at: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.searchsorted(np.sort(sample), at, side="right") / len(sample)


def _print(report: dict[str, Any], out: Path) -> None:
    table = Table("", "tokens/s", "speed-up", "accepted", "tokens/round", "perplexity", "its p", "KS p")
    for name, arm in report["arms"].items():
        drafted = name != AUTOREGRESSIVE
        table.add_row(
            name,
            f"{arm['tokens_per_s']['median']:.1f}",
            f"{arm['speedup']:.2f}" if drafted else "",
            f"{arm['acceptance']:.1%}" if drafted else "",
            f"{arm['tokens_per_round']:.2f}" if drafted else "",
            f"{arm['perplexity']:.2f}",
            f"{arm['p_values']['perplexity']:.3f}" if drafted else "",
            f"{arm['p_values']['ks']:.3f}" if drafted else "",
        )
    console = Console()
    console.print(table)
    console.print(f"Written to {out}")


if __name__ == "__main__":
    main()
