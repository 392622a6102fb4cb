"""`make bench-logits`: what codecs cost and lose, and how many tokens a round brings by each rule.

One process, no network, the real pair: the target in float32 and a low-precision draft, so that they
really disagree. Distributions are recorded on text that the target wrote, and once more with the
vocabulary padded to 151,936 ids that never come out.
"""

from __future__ import annotations

import argparse
import math
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from tokenizers import Tokenizer

from cloud_verifier.benchmarks.report import Spread, write_report
from cloud_verifier.benchmarks.siblings import (
    JudgedRound,
    foreseen_table,
    guess_table,
    pass_times,
    shown,
    sibling_table,
)
from cloud_verifier.drafts.precisions import Q4_EXACT
from cloud_verifier.siblings import row_price
from cloud_verifier.target_model import Segment, TargetModel
from cloud_verifier.verification import VERIFICATIONS, BlockInput, judge
from edge_client.chat_template import render
from edge_client.draft_model import DraftModel
from edge_client.experiments.workloads import load_prompts
from shared.codecs import CODECS, DEFAULT_CODEC, Budget, Codec, Distributions, Row, get_codec
from shared.codecs.base import PACKET_ROWS
from shared.codecs.lattice import LatticeCodec
from shared.messages import DraftBlock, SamplingParams
from shared.randomness import Purpose, random_words
from shared.sampling import coupled_choice, probabilities
from shared.wire import client_message_to_proto

TEMPERATURES = (0.7, 1.0)
WIDE_VOCABULARY = 151_936
PACKET_BYTES = 1_400
FRAMING_BYTES = 5 + 9  # of gRPC and HTTP/2
SIBLINGS_K = 5  # the block length that siblings are tried on
RULES = ("token", "block", "coupled")
SESSIONS = 16

Logits = NDArray[np.float32]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--prompts", type=Path, help="Spec-Bench questions; default: a built-in set")
    parser.add_argument("--precision", default="int4", help="of the built-in draft")
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--positions", type=int, default=32, help="recorded for each prompt")
    parser.add_argument("--k", type=int, nargs="+", default=[3, 5, 8])
    parser.add_argument("--codec-positions", type=int, default=208, help="that every codec is tried on")
    parser.add_argument("--quick", action="store_true", help="a tenth of it, to see that it works")
    parser.add_argument("--out", type=Path, default=Path("bench-results/logits.json"))
    options = parser.parse_args(arguments)
    if options.quick:
        options.max_tokens, options.positions, options.codec_positions, options.k = 16, 8, 32, [SIBLINGS_K]
    report = run(options)
    write_report(options.out, report)
    _show(report)


def run(options: argparse.Namespace) -> dict[str, Any]:
    from cloud_verifier.drafts.builtin import builtin_draft, builtin_target

    folder = builtin_draft(options.precision)
    draft = DraftModel.load(folder)
    pair = Pair(draft, TargetModel.load(str(builtin_target()), dtype="float32", num_slots=16_384))
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    prompts = [
        tokenizer.encode(
            render(draft.manifest, [{"role": "user", "content": prompt.text}]), add_special_tokens=False
        ).ids
        for prompt in load_prompts(options.prompts, 1)
    ]
    with Progress() as progress:
        task = progress.add_task("recording", total=len(prompts))
        recorded = []
        for seed, prompt in enumerate(prompts):
            recorded.append(pair.record(prompt, options.positions, seed))
            progress.advance(task)
        drafted = np.concatenate([d for d, _ in recorded])
        judged = np.concatenate([t for _, t in recorded])
        arms = [(rule, k) for k in options.k for rule in RULES]
        task = progress.add_task("rounds", total=len(arms) * len(prompts))
        rounds: dict[str, dict[int, list[JudgedRound]]] = {rule: {} for rule in RULES}
        for rule, k in arms:
            rounds[rule][k] = []
            for seed, prompt in enumerate(prompts):
                rounds[rule][k] += pair.write(prompt, rule, k, options.max_tokens, seed)
                progress.advance(task)
        task = progress.add_task("default draft", total=len(prompts))
        default = Pair(DraftModel.load(builtin_draft(Q4_EXACT)), pair.target)
        by_draft = {options.precision: rounds["block"].get(SIBLINGS_K, []), Q4_EXACT: []}
        for seed, prompt in enumerate(prompts):
            by_draft[Q4_EXACT] += default.write(prompt, "block", SIBLINGS_K, options.max_tokens, seed)
            progress.advance(task)
        task = progress.add_task("codecs", total=len(TEMPERATURES) * 2)
        rates: dict[str, Any] = {}
        spread = np.linspace(0, len(drafted) - 1, min(options.codec_positions, len(drafted))).astype(int)
        for temperature in TEMPERATURES:
            for vocab_size in (drafted.shape[1], WIDE_VOCABULARY):
                name = f"temperature {temperature:g}, vocabulary {vocab_size}"
                rates[name] = _rate_distortion(drafted[spread], judged[spread], temperature, vocab_size)
                progress.advance(task)
    times, price = pass_times(pair.target), row_price(pair.target)
    return {
        "settings": {
            "precision": options.precision,
            "num_prompts": len(prompts),
            "num_positions": len(drafted),
            "max_tokens": options.max_tokens,
        },
        "rate_distortion": rates,
        "tokens_per_round": {
            rule: {str(k): _summary(result) for k, result in by_k.items()} for rule, by_k in rounds.items()
        },
        "pass_ms": {str(num_rows): ms for num_rows, ms in times.items()},
        "row_price": price,
        "siblings": {
            rule: sibling_table(by_k[SIBLINGS_K], times, price)
            for rule, by_k in rounds.items()
            if SIBLINGS_K in by_k
        },
        "siblings_foreseen": {
            precision: foreseen_table(written) for precision, written in by_draft.items() if written
        },
        "correction_guessed": {
            rule: {str(k): guess_table(result) for k, result in by_k.items()} for rule, by_k in rounds.items()
        },
        "judge_ms": _judge_times(drafted, judged),
    }


def _summary(rounds: Sequence[JudgedRound]) -> dict[str, Any]:
    num_drafted, num_accepted = (
        sum(len(block.tokens) for block in rounds),
        sum(block.num_accepted for block in rounds),
    )
    return {
        "tokens_per_round": 1 + num_accepted / max(len(rounds), 1),
        "acceptance": num_accepted / max(num_drafted, 1),
        "num_rounds": len(rounds),
    }


class Pair:
    """Draft and target on one growing text."""

    def __init__(self, draft: DraftModel, target: TargetModel) -> None:
        self.draft, self.target = draft, target
        self.vocab_size = min(draft.vocab_size, target.vocab_size)

    def record(self, prompt: list[int], num_positions: int, seed: int) -> tuple[Logits, Logits]:
        """Logits of both, [num_positions, V] each, along text that the target samples at temperature 1."""
        text, drafted, judged = list(prompt), [], []
        slots = self.target.pool.allocate(len(prompt) + num_positions)
        self.draft.rollback(0)
        known = 0
        for _ in range(num_positions):
            drafted.append(self.draft.feed(text[self.draft.kv_len :])[: self.vocab_size].copy())
            rows = self._target_rows(text, known, slots, 1)
            known = len(text)
            judged.append(rows[0, : self.vocab_size].numpy().copy())
            outcome = judge(rows, [BlockInput((), None, SamplingParams(1.0, seed=seed), "token", known)])
            text += outcome[0].tokens
        self.target.pool.release(slots)
        return np.array(drafted), np.array(judged)

    def write(
        self, prompt: list[int], rule: str, num_drafted: int, max_tokens: int, seed: int
    ) -> list[JudgedRound]:
        """An answer at temperature 1 in rounds of `num_drafted` tokens, with dense float32 q."""
        sampling, codec = SamplingParams(1.0, seed=seed), get_codec("dense_f32")
        text = list(prompt)
        slots = self.target.pool.allocate(len(prompt) + max_tokens + num_drafted + 1)
        self.draft.rollback(0)
        known, rounds = 0, []
        while len(text) < len(prompt) + max_tokens:
            tokens, rows = self._draft_block(text, rule, num_drafted, sampling, codec)
            q = Distributions.from_rows(rows) if VERIFICATIONS[rule].needs_q else None
            logits = self._target_rows([*text, *tokens], known, slots, num_drafted + 1)
            outcome = judge(logits, [BlockInput(tuple(tokens), q, sampling, rule, len(text))])[0]
            if outcome.fault is not None:
                raise outcome.fault
            kept = outcome.num_accepted
            rounds.append(JudgedRound.of(tokens, rows, kept, outcome.tokens[0]))
            known = len(text) + kept
            text += [*tokens[:kept], *outcome.tokens]
        self.target.pool.release(slots)
        return rounds

    def _draft_block(
        self, text: list[int], rule: str, num_drafted: int, sampling: SamplingParams, codec: Codec
    ) -> tuple[list[int], list[Row]]:
        self.draft.rollback(min(self.draft.kv_len, len(text) - 1))
        tokens: list[int] = []
        rows: list[Row] = []
        for _ in range(num_drafted):
            position = len(text) + len(tokens)
            logits = self.draft.feed([*text, *tokens][self.draft.kv_len :])[: self.vocab_size]
            probs = probabilities(logits, sampling)
            rows.append(codec.quantise(probs))
            if rule == "coupled":
                tokens.append(coupled_choice(probs, sampling.seed, position))
            else:
                word = int(random_words(sampling.seed, Purpose.DRAFT, position, len(text)))
                tokens.append(rows[-1].sample(word))
        return tokens, rows

    def _target_rows(
        self, text: list[int], known: int, slots: NDArray[np.int64], num_logits: int
    ) -> torch.Tensor:
        """The last `num_logits` rows after `text`, of which `known` tokens are in the cache."""
        segment = Segment(np.array(text[known:], np.int64), slots[: len(text)], num_logits)
        return self.target.forward([segment])[:, : self.vocab_size]


def _rate_distortion(
    drafted: Logits, judged: Logits, temperature: float, vocab_size: int
) -> dict[str, dict[str, Any]]:
    """By codec: bytes a position, overlap sum min(p, q) lost against exact q, microseconds."""
    sampling = SamplingParams(temperature)
    padding = ((0, 0), (0, vocab_size - drafted.shape[1]))
    q, p, sampling_us = [], [], []
    for row in np.pad(drafted, padding, constant_values=-np.inf):
        started = time.perf_counter()
        q.append(probabilities(row, sampling))
        sampling_us.append(1e6 * (time.perf_counter() - started))
    p = [probabilities(row, sampling) for row in np.pad(judged, padding, constant_values=-np.inf)]
    exact = np.array([np.minimum(a, b).sum(dtype=np.float64) for a, b in zip(q, p, strict=True)])
    out: dict[str, dict[str, Any]] = {
        "exact": {"overlap": float(exact.mean()), "sampling_us": float(np.median(sampling_us))}
    }
    for name, codec in CODECS.items():
        if codec.carries_q:
            out[name] = _one_codec(codec, q, p, exact, vocab_size)
        if isinstance(codec, LatticeCodec) and codec.in_packets:
            out[f"{name}, a block in a packet"] = _one_codec(codec, q, p, exact, vocab_size, in_packets=True)
    out["exact"]["lattice_with_tail_lost"] = float(exact.mean() - _overlap_with_tail(q, p))
    return out


def _overlap_with_tail(q: list[Logits], p: list[Logits]) -> float:
    """Mean overlap if the default codec had one more weight, for a unigram prior over the ids it leaves out.

    The prior is the mean of q over the other positions, which flatters it.
    """
    codec, everything = get_codec(DEFAULT_CODEC), np.sum(q, axis=0, dtype=np.float64)
    overlaps = []
    for draft, target in zip(q, p, strict=True):
        row = codec.quantise(draft)
        tail = np.maximum(everything - draft, 0.0)
        tail[row.ids] = 0.0
        mass = max(1.0 - float(draft[row.ids].sum()), 0.0) if tail.any() else 0.0
        mixed = tail * (mass / max(tail.sum(), 1e-30))
        mixed[row.ids] = (1.0 - mass) * row.weights / float(row.total)
        overlaps.append(np.minimum(mixed, target).sum())
    return float(np.mean(overlaps))


def _one_codec(
    codec: Codec,
    q: list[Logits],
    p: list[Logits],
    exact: NDArray[np.float64],
    vocab_size: int,
    *,
    in_packets: bool = False,
) -> dict[str, Any]:
    times: dict[str, list[float]] = defaultdict(list)
    sizes, overlaps, rows = [], [], []
    budget = None
    for i, (draft, target) in enumerate(zip(q, p, strict=True)):
        if in_packets and i % PACKET_ROWS == 0:
            budget = Budget.of_block(PACKET_ROWS, None)
        marks = [time.perf_counter()]
        row = codec.quantise(draft, budget)
        marks.append(time.perf_counter())
        payload = codec.encode([row], vocab_size)
        marks.append(time.perf_counter())
        codec.decode(payload, 1, vocab_size)
        marks.append(time.perf_counter())
        for name, duration in zip(("quantise_us", "encode_us", "decode_us"), np.diff(marks), strict=True):
            times[name].append(1e6 * float(duration))
        sizes.append(len(payload))
        overlaps.append(np.minimum(row.weights / float(row.total), target[row.ids]).sum())
        rows.append(row if len(row.ids) < 10_000 else None)
    return {
        "bytes_mean": float(np.mean(sizes)),
        "bytes_p95": float(np.percentile(sizes, 95)),
        **_bound(rows, vocab_size),
        **_packets(codec, rows, vocab_size),
        "overlap_lost": float(exact.mean() - np.mean(overlaps)),
        **{name: float(np.median(values)) for name, values in times.items()},
    }


def _bound(rows: Sequence[Row | None], vocab_size: int) -> dict[str, float]:
    """Of rows of integer weights: bytes that tell any n ids of V and any n weights with their sum apart."""

    def bits(row: Row) -> float:
        n = len(row.ids)
        return _log2_choose(vocab_size, n) + _log2_choose(int(row.total) - 1, n - 1)

    whole = [row for row in rows if row is not None and isinstance(row.total, int)]
    return {"bound_bytes_mean": float(np.mean([bits(row) for row in whole])) / 8} if whole else {}


def _log2_choose(n: int, k: int) -> float:
    return (math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)) / math.log(2)


def _packets(codec: Codec, rows: Sequence[Row | None], vocab_size: int) -> dict[str, float]:
    """Of blocks of 8 positions as messages on the wire: bytes, and how many fit one packet."""
    held = [row for row in rows if row is not None]
    if len(held) < len(rows):
        return {}
    sizes = []
    for start in range(0, len(held) - PACKET_ROWS + 1, PACKET_ROWS):
        part = held[start : start + PACKET_ROWS]
        tokens = tuple(int(row.ids[-1]) for row in part)
        block = DraftBlock(1_000, 1_000, 4_000, tokens, codec.encode(part, vocab_size), more=True)
        sizes.append(len(client_message_to_proto(block).SerializeToString()) + FRAMING_BYTES)
    return {
        "block_of_8_bytes_p95": float(np.percentile(sizes, 95)),
        "block_of_8_bytes_max": max(sizes),
        "block_of_8_in_a_packet": float(np.mean(np.array(sizes) <= PACKET_BYTES)),
    }


def _judge_times(drafted: Logits, judged: Logits, num_drafted: int = 8) -> dict[str, dict[str, Any]]:
    """The rules on 16 sessions x K = 8, milliseconds, on one thread and on all."""
    codec = get_codec(DEFAULT_CODEC)
    threads = torch.get_num_threads()
    out: dict[str, dict[str, Any]] = {}
    for label, sampling in (
        ("greedy", SamplingParams()),
        ("temperature 1", SamplingParams(1.0)),
        ("temperature 1, top_k 50", SamplingParams(1.0, top_k=50)),
        ("temperature 1, top_p 0.95", SamplingParams(1.0, top_p=0.95)),
    ):
        blocks, logits = [], []
        for session in range(SESSIONS):
            at = (session * num_drafted + np.arange(num_drafted + 1)) % len(drafted)
            mine = replace(sampling, seed=session)
            rows = [codec.quantise(probabilities(drafted[i], mine)) for i in at[:-1]]
            words = random_words(session, Purpose.DRAFT, 100 + np.arange(num_drafted), 100)
            tokens = tuple(row.sample(int(word)) for row, word in zip(rows, words, strict=True))
            blocks.append(BlockInput(tokens, Distributions.from_rows(rows), mine, "token", 100))
            logits.append(judged[at])
        stacked = torch.from_numpy(np.concatenate(logits))
        for rule in RULES if sampling.temperature else ("greedy",):
            chosen = [replace(block, rule=rule) for block in blocks]
            for num_threads in sorted({1, threads}):
                torch.set_num_threads(num_threads)
                spread = Spread.of([_timed_judge(stacked, chosen) for _ in range(9)])
                out.setdefault(f"{rule}, {label}", {})[f"{num_threads} threads"] = spread
    torch.set_num_threads(threads)
    return out


def _timed_judge(logits: torch.Tensor, blocks: Sequence[BlockInput]) -> float:
    started = time.perf_counter()
    judge(logits, blocks)
    return 1e3 * (time.perf_counter() - started)


def _show(report: dict[str, Any]) -> None:
    console = Console()
    for name, by_codec in report["rate_distortion"].items():
        table = Table(
            "codec", "bytes", "p95", "overlap lost", "quantise us", "encode us", "decode us", title=name
        )
        for codec, line in by_codec.items():
            if codec != "exact":
                numbers = [
                    f"{line['bytes_mean']:.1f}",
                    f"{line['bytes_p95']:.0f}",
                    f"{line['overlap_lost']:.4f}",
                ]
                numbers += [f"{line[key]:.0f}" for key in ("quantise_us", "encode_us", "decode_us")]
                table.add_row(codec, *numbers)
        console.print(table)
    rounds = report["tokens_per_round"]
    table = Table("K", *rounds, title="tokens a round, temperature 1")
    for k in next(iter(rounds.values())):
        table.add_row(k, *(f"{by_k[k]['tokens_per_round']:.2f}" for by_k in rounds.values()))
    console.print(table)
    guesses = report["correction_guessed"]["token"]
    table = Table("K", *next(iter(guesses.values())), title="share of `token` rounds with a correction")
    for k, shares in guesses.items():
        table.add_row(k, *(f"{share:.3f}" for share in shares.values()))
    console.print(table)
    title = f"siblings, K={SIBLINGS_K}; a row has to bring {report['row_price']:.3f} tokens"
    table = Table("choice", "leaves", "tokens a round", "more %", "pass ms", "target tokens/s", title=title)
    for name, numbers in shown(report["siblings"]):
        table.add_row(name, *numbers)
    console.print(table)
    foreseen = report["siblings_foreseen"]
    title = f"`block`, K={SIBLINGS_K}: tokens a round from siblings, expected / counted"
    table = Table("draft", *next(iter(foreseen.values())), title=title)
    for precision, by_choice in foreseen.items():
        table.add_row(
            precision, *(f"{line['expected']:.3f} / {line['counted']:.3f}" for line in by_choice.values())
        )
    console.print(table)
    table = Table("16 blocks of 8", *next(iter(report["judge_ms"].values())), title="judging, milliseconds")
    for name, by_threads in report["judge_ms"].items():
        table.add_row(name, *(f"{spread.median:.2f}" for spread in by_threads.values()))
    console.print(table)


if __name__ == "__main__":
    main()
