"""Log-probabilities are the target's own, whatever the rule made of the block."""

import numpy as np
import pytest
import torch

from cloud_verifier.verification import VERIFICATIONS, BlockInput, judge
from shared.codecs import Distributions, get_codec
from shared.messages import SamplingParams

VOCAB, WIDTH = 40, 4
# (whether the target wants each drafted token, whether more blocks follow, drafted tokens kept)
CASES = {
    "rejected": ((True, False, True), False, 1),
    "kept": ((True, True, True), False, 3),
    "kept, more to come": ((True, True), True, 2),
    "none drafted": ((), False, 0),
}


def certain(tokens):
    """The one distribution that can only have given each token."""
    rows = [get_codec("lattice").quantise(np.eye(VOCAB, dtype=np.float32)[token]) for token in tokens]
    return Distributions.from_rows(rows)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("top_k", [0, 8])
@pytest.mark.parametrize("rule", VERIFICATIONS)
def test_they_are_those_of_every_emitted_token_before_any_transform(rule, top_k, dtype):
    rng = np.random.default_rng(3)
    sampling = SamplingParams(temperature=1.0, top_k=top_k, seed=2, fused_weight=0.1)
    blocks, logits = [], []
    for wanted, more, _ in CASES.values():
        tokens = tuple(rng.integers(0, VOCAB, len(wanted)).tolist())
        rows = rng.normal(0, 2, (len(wanted) + 1, VOCAB)).astype(np.float32)
        for row, token, wants in zip(rows, tokens, wanted, strict=False):
            row[token] = 16.0 if wants else -16.0
        q = certain(tokens) if VERIFICATIONS[rule].needs_q and tokens else None
        blocks.append(BlockInput(tokens, q, sampling, rule, base_len=5, more=more, logprobs=WIDTH))
        logits.append(rows)
    outcomes = judge(torch.from_numpy(np.concatenate(logits)).to(dtype), blocks)
    for (_, more, num_kept), block, rows, outcome in zip(
        CASES.values(), blocks, logits, outcomes, strict=True
    ):
        assert outcome.fault is None
        assert outcome.num_accepted == num_kept
        emitted = block.tokens[:num_kept] + outcome.tokens
        assert len(emitted) == num_kept + (not more)
        expected = torch.from_numpy(rows).to(dtype).double().log_softmax(dim=1)[: len(emitted)]
        ids, values = np.array(outcome.logprobs.ids), np.array(outcome.logprobs.values)
        assert ids.shape == values.shape == (len(emitted), WIDTH)
        assert tuple(ids[:, 0]) == emitted
        np.testing.assert_allclose(values, np.take_along_axis(expected.numpy(), ids, axis=1), atol=1e-5)
        likeliest = expected.topk(WIDTH - 1).values.numpy()
        np.testing.assert_allclose(values[:, 1:], likeliest, atol=1e-5)  # equal ones in any order
