"""At temperature 0 in float32 the text is the target's own greedy text, token for token.

The reference is `transformers` generate on the same weights; in between are a real draft, real gRPC
and a real verifier. Answers run several at a time, so batches are ragged.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from cloud_verifier.benchmarks.baseline import HfGenerate
from cloud_verifier.local import local_verifier
from edge_client.chat_template import render
from edge_client.draft_model import DraftModel
from edge_client.experiments.workloads import load_prompts
from edge_client.manifest import TOKENIZER_NAME
from edge_client.results import Result

CODECS = ("lattice", "dense_f32")


@pytest.fixture(scope="module")
def drafts(draft_dir: Path) -> list[DraftModel]:
    return [DraftModel.load(draft_dir, threads=1) for _ in range(4)]


def chat_prompts(draft_dir: Path, model: DraftModel, count: int) -> list[list[int]]:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(draft_dir / TOKENIZER_NAME))
    return [
        tokenizer.encode(
            render(model.manifest, [{"role": "user", "content": prompt.text}]), add_special_tokens=False
        ).ids
        for prompt in load_prompts(None, 2)[:count]
    ]


def check(
    run: Callable[..., list[Result]],
    address: str,
    drafts: Sequence[DraftModel],
    target: Path,
    prompts: Sequence[list[int]],
    num_tokens: int,
    blocks: Sequence[int],
    **settings: object,
) -> None:
    eos = drafts[0].manifest.eos_ids
    hf = HfGenerate(str(target))
    expected = [hf.generate(prompt, num_tokens, eos_ids=eos).tokens for prompt in prompts]
    cases = [(codec, k, i) for codec in CODECS for k in blocks for i in range(len(prompts))]
    jobs = [
        (
            prompts[i],
            {"k": k, "codec": codec, "max_new_tokens": num_tokens, "eos_ids": eos, **settings},
        )
        for codec, k, i in cases
    ]
    for (codec, k, i), result in zip(cases, run(address, drafts, jobs), strict=True):
        assert result.tokens == expected[i], f"prompt {i}, K={k}, codec {codec}"


@pytest.mark.timeout(600)
@pytest.mark.parametrize("ahead", [0, 2])
def test_equals_the_targets_own_text(
    write_many: Callable[..., list[Result]],
    builtin_verifier: str,
    drafts: list[DraftModel],
    draft_dir: Path,
    target_dir: Path,
    ahead: int,
) -> None:
    prompts = chat_prompts(draft_dir, drafts[0], 2)
    check(write_many, builtin_verifier, drafts, target_dir, prompts, 24, (1, 2, 5, 10), ahead=ahead)


@pytest.mark.parametrize("narrower", ["target", "draft"])
def test_logits_for_padding_ids_never_come_out_whichever_side_has_more(
    write_many: Callable[..., list[Result]],
    tiny_target: Path,
    wide_target: Path,
    tiny_draft: Path,
    narrower: str,
) -> None:
    target = tiny_target if narrower == "target" else wide_target
    draft = DraftModel.load(tiny_draft, threads=1)
    prompts = [[256, *text] for text in (b"the cat", b"0, 1, 1, 2", b"zebra")]
    with local_verifier("--target", str(target), "--dtype", "float32") as address:
        results = write_many(
            address, [draft], [(prompt, {"max_new_tokens": 40, "k": 4}) for prompt in prompts]
        )
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    for prompt, result in zip(prompts, results, strict=True):
        expected = list(prompt)
        for _ in range(40):
            with torch.inference_mode():
                logits = model(torch.tensor([expected])).logits[0, -1]
            expected.append(int(logits[: draft.manifest.vocab_size].argmax()))
        assert list(result.tokens) == expected[len(prompt) :]
        assert max(result.tokens) < draft.manifest.vocab_size < len(logits)
        assert (len(logits) < draft.manifest.num_logits) is (narrower == "target")


@pytest.mark.slow
@pytest.mark.timeout(5400)
@pytest.mark.parametrize("ahead", [0, 2])
def test_equals_it_on_twenty_long_answers(
    write_many: Callable[..., list[Result]],
    builtin_verifier: str,
    drafts: list[DraftModel],
    draft_dir: Path,
    target_dir: Path,
    ahead: int,
) -> None:
    prompts = chat_prompts(draft_dir, drafts[0], 20)
    check(write_many, builtin_verifier, drafts, target_dir, prompts, 128, (1, 2, 5, 10), ahead=ahead)
