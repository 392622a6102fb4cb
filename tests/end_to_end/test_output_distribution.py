"""What comes out is distributed as the target alone would write it: over real gRPC, with good and bad drafts.

For every token that came out, the target's exact distribution after the very same prefix is known. The
mass of the likelier tokens, plus a random part of the token's own mass, is then uniform on [0, 1) if
and only if the token was drawn from that distribution (the randomised probability integral transform).
A Kolmogorov-Smirnov test asks whether it is: more than a thousand samples, at several positions, in
one statistic. Ordering by likelihood puts truncated tails and sharpened heads at the two ends, where the
test sees them best.

Error rate: seeds are fixed; each of the at most 25 cases fails a right implementation with
probability 4e-6, all of them together less than once in 10,000 choices of the seeds. Power: no case has fewer
samples than the broken draft below, which has to fail the same test.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from bad_draft import BadDraft
from numpy.typing import NDArray
from scipy import stats

from edge_client.confidence import NUM_GROUPS, Ending
from edge_client.draft_model import DraftModel
from edge_client.results import Origin, Result
from shared.codecs import Row, get_codec
from shared.faults import FaultKind, SpecwireError
from shared.messages import SamplingParams
from shared.sampling import probabilities

P_VALUE = 4e-6
_VOCAB = 259  # of the tiny pair
NUM_ANSWERS, NUM_TOKENS = 110, 14
PROMPT = [256, *b"the cat"]
PLAIN = SamplingParams(temperature=1.0)
CUT = SamplingParams(temperature=0.8, top_k=40, top_p=0.9, min_p=0.01)

WriteMany = Callable[..., list[Result]]


def uniforms(
    target: Path, prompt: Sequence[int], results: Sequence[Result], sampling: SamplingParams
) -> NDArray[np.float64]:
    """The transform of every token of every answer, [num_answers * num_tokens]."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    vocab_size = len(AutoTokenizer.from_pretrained(target))  # the model has rows for padding beyond
    assert all(token < vocab_size for result in results for token in result.tokens)
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    answers = [result.tokens for result in results]
    rng = np.random.default_rng(11)
    distributions: dict[tuple[int, ...], NDArray[np.float64]] = {}
    prefixes = sorted({tuple(a[:i]) for a in answers for i in range(len(a))})
    by_length: dict[int, list[tuple[int, ...]]] = {}
    for prefix in prefixes:
        by_length.setdefault(len(prefix), []).append(prefix)
    with torch.inference_mode():
        for same_length in by_length.values():
            for at in range(0, len(same_length), 64):
                part = same_length[at : at + 64]
                ids = torch.tensor([[*prompt, *prefix] for prefix in part])
                logits = model(ids, logits_to_keep=1).logits[:, 0].numpy()
                for prefix, row in zip(part, logits, strict=True):
                    distributions[prefix] = probabilities(row[:vocab_size], sampling).astype(np.float64)
    values = []
    for answer in answers:
        for i, token in enumerate(answer):
            p = distributions[tuple(answer[:i])]
            likelier = p[p > p[token]].sum() + p[:token][p[:token] == p[token]].sum()
            values.append((likelier + rng.random() * p[token]) / p.sum())
    return np.array(values)


def sample(
    run: WriteMany,
    address: str,
    models: Sequence[DraftModel],
    sampling: SamplingParams,
    num_answers: int,
    prompt: Sequence[int] = PROMPT,
    **settings: Any,
) -> list[Result]:
    jobs = [(prompt, {"sampling": replace(sampling, seed=seed), **settings}) for seed in range(num_answers)]
    return run(address, models, jobs)


def p_value(values: NDArray[np.float64]) -> float:
    return float(stats.kstest(values, "uniform").pvalue)


@pytest.fixture(scope="module")
def tiny_models(tiny_draft: Path) -> list[DraftModel]:
    return [DraftModel.load(tiny_draft, threads=1) for _ in range(16)]


@pytest.fixture
def tiny_sample(write_many: WriteMany, tiny_verifier: str, tiny_models: list[DraftModel]) -> WriteMany:
    """`tiny_sample(sampling, ...)` gives the answers of the tiny pair."""
    return partial(
        sample,
        write_many,
        tiny_verifier,
        tiny_models,
        num_answers=NUM_ANSWERS,
        max_new_tokens=NUM_TOKENS,
    )


@pytest.mark.parametrize("sampling", [PLAIN, CUT], ids=["plain", "cut"])
@pytest.mark.parametrize("draft", ["good", "bad"])
@pytest.mark.parametrize(
    ("codec", "ahead", "verification"),
    [
        ("lattice", 0, "token"),
        ("dense_f16", 4, "token"),
        ("lattice", 4, "block"),
        ("tokens", 4, "coupled"),
    ],
)
def test_output_is_distributed_as_the_targets(
    tiny_sample: WriteMany,
    tiny_models: list[DraftModel],
    tiny_target: Path,
    sampling: SamplingParams,
    draft: str,
    codec: str,
    ahead: int,
    verification: str,
) -> None:
    size = tiny_models[0].manifest.vocab_size
    extra = {"drafter": lambda: BadDraft(size)} if draft == "bad" else {}
    answers = tiny_sample(
        sampling,
        k=2 if ahead else 3,
        codec=codec,
        ahead=ahead,
        verification=verification,
        **extra,
    )
    assert p_value(uniforms(tiny_target, PROMPT, answers, sampling)) > P_VALUE
    # Where blocks are drafted ahead, some came to nothing, or the test would say nothing about that.
    assert (sum(result.num_stale_blocks for result in answers) > 0) is (ahead > 0)
    # Tokens after a sibling are among them too, except without q, by which siblings are chosen.
    num_siblings = sum(result.counts.by_origin[Origin.SIBLING] for result in answers)
    if codec == "tokens":
        assert num_siblings == 0
    else:
        assert num_siblings > (50 if draft == "good" else 2)


@pytest.mark.parametrize(
    ("codec", "sampling"), [("dense_q8", PLAIN), ("dense_f32_zstd", CUT), ("lattice_coarse", PLAIN)]
)
def test_so_it_is_with_other_codecs(
    tiny_sample: WriteMany,
    tiny_target: Path,
    sampling: SamplingParams,
    codec: str,
) -> None:
    answers = tiny_sample(
        sampling,
        k=3,
        codec=codec,
        verification="block",
    )
    assert p_value(uniforms(tiny_target, PROMPT, answers, sampling)) > P_VALUE


@pytest.mark.parametrize("verification", ["token", "block"])
def test_so_it_is_where_blocks_end_early(
    tiny_sample: WriteMany,
    tiny_target: Path,
    verification: str,
) -> None:
    unsure = Ending(0.5, tuple(np.linspace(0.0, 1.0, NUM_GROUPS)))
    answers = tiny_sample(
        PLAIN,
        k=4,
        ending=unsure,
        verification=verification,
    )
    assert p_value(uniforms(tiny_target, PROMPT, answers, PLAIN)) > P_VALUE
    counts = [result.counts for result in answers]
    drafted = sum(count.num_drafted for count in counts) / sum(count.num_rounds for count in counts)
    assert 1.0 < drafted < 2.5


@dataclass(frozen=True)
class OtherRow(Row):
    """A row that sends one distribution and samples from another on the same ids: the classic bug."""

    really: Row | None = None

    def sample(self, word: int) -> int:
        assert self.really is not None
        return self.really.sample(word)


class BrokenCodec:
    """Sends equal weights for the eight likeliest ids, and samples from their true probabilities."""

    name = "lattice"

    def __getattr__(self, name: str) -> Any:
        return getattr(get_codec("lattice"), name)

    def quantise(self, probs: NDArray[np.float32], budget: Any = None) -> Row:
        ids = np.sort(np.argsort(-probs, kind="stable")[:8]).astype(np.int32)
        true = probs[ids].astype(np.float64)
        ones = np.full(len(ids), 128, np.int64)
        return OtherRow(ids, ones, int(ones.sum()), really=Row(ids, true, float(true.sum())))


def test_the_test_sees_a_draft_that_samples_from_what_it_does_not_send(
    tiny_sample: WriteMany,
    tiny_target: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("edge_client.generate.get_codec", lambda name: BrokenCodec())
    answers = tiny_sample(
        PLAIN,
        k=3,
        codec="lattice",
    )
    assert p_value(uniforms(tiny_target, PROMPT, answers, PLAIN)) < P_VALUE


class UntruncatedRow(Row):
    """A row that samples from more than it sends."""

    def sample(self, word: int) -> int:
        return int(np.random.default_rng(word % 2**32).choice(_VOCAB))


class UntruncatingCodec:
    """Sends the eight likeliest ids, and samples from all."""

    name = "lattice"

    def __getattr__(self, name: str) -> Any:
        return getattr(get_codec("lattice"), name)

    def quantise(self, probs: NDArray[np.float32], budget: Any = None) -> Row:
        ids = np.sort(np.argsort(-probs, kind="stable")[:8]).astype(np.int32)
        return UntruncatedRow(ids, np.full(len(ids), 128, np.int64), 1024)


def test_a_token_that_was_drawn_from_beyond_what_was_sent_is_refused(
    write_many: WriteMany, tiny_verifier: str, tiny_models: list[DraftModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("edge_client.generate.get_codec", lambda name: UntruncatingCodec())
    with pytest.raises(SpecwireError, match="probability 0 in its own distribution") as raised:
        sample(write_many, tiny_verifier, tiny_models, PLAIN, 1, max_new_tokens=6, k=3, codec="lattice")
    assert raised.value.kind is FaultKind.BAD_PAYLOAD


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("sampling", [PLAIN, replace(CUT, top_k=20)], ids=["plain", "cut"])
def test_the_built_in_pair_too(
    write_many: WriteMany,
    builtin_verifier: str,
    draft_dir: Path,
    target_dir: Path,
    sampling: SamplingParams,
) -> None:
    models = [DraftModel.load(draft_dir, threads=1) for _ in range(4)]
    prompt = [504, 2159]
    answers = sample(
        write_many, builtin_verifier, models, sampling, 600, prompt=prompt, max_new_tokens=4, k=3
    )
    assert p_value(uniforms(target_dir, prompt, answers, sampling)) > P_VALUE
