"""A verifier that allows what is not exact: who must ask for it, what comes out, and that it says so."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cloud_verifier.local import local_verifier
from edge_client.draft_model import DraftModel
from edge_client.results import Loss, Result
from shared.faults import FaultKind, SpecwireError
from shared.messages import SamplingParams

PROMPT = [256, *b"to be or not"]
SAMPLING = SamplingParams(temperature=1.0, seed=5)


@pytest.fixture(scope="module")
def fusing_verifier(tiny_target: Path) -> Iterator[str]:
    """Address of a verifier of the tiny target that allows `token` and `fused`, and nothing else."""
    options = ("--dtype", "float32", "--allow-verification", "token,fused")
    with local_verifier("--target", str(tiny_target), *options) as address:
        yield address


async def answer(write: Any, address: str, model: DraftModel, rule: str, weight: float = 0.0) -> Result:
    sampling = replace(SAMPLING, fused_weight=weight)
    result: Result = await write(
        address, model, PROMPT, sampling=sampling, verification=rule, max_new_tokens=48, k=4
    )
    return result


async def test_fused_is_refused_where_nobody_allowed_it(
    write: Any, tiny_verifier: str, tiny_model: DraftModel
) -> None:
    with pytest.raises(SpecwireError, match="'fused'") as raised:
        await answer(write, tiny_verifier, tiny_model, "fused", 1.0)
    assert raised.value.kind is FaultKind.UNKNOWN_VERIFICATION
    assert "block, token, coupled, greedy." in str(raised.value)


async def test_what_is_not_on_the_list_is_refused(
    write: Any, fusing_verifier: str, tiny_model: DraftModel
) -> None:
    with pytest.raises(SpecwireError, match="'coupled'") as raised:
        await answer(write, fusing_verifier, tiny_model, "coupled")
    assert raised.value.kind is FaultKind.UNKNOWN_VERIFICATION
    assert "token, fused." in str(raised.value)


async def test_fused_of_weight_zero_writes_what_token_writes(
    write: Any, fusing_verifier: str, tiny_model: DraftModel
) -> None:
    token = await answer(write, fusing_verifier, tiny_model, "token")
    fused = await answer(write, fusing_verifier, tiny_model, "fused")
    assert fused.tokens == token.tokens
    assert fused.counts == token.counts
    assert token.acceptance < 1
    assert not token.lossy


@pytest.mark.parametrize("weight", [0.5, 1.0])
async def test_fused_keeps_more_than_token_and_says_that_it_is_lossy(
    write: Any, fusing_verifier: str, tiny_model: DraftModel, weight: float
) -> None:
    token = await answer(write, fusing_verifier, tiny_model, "token")
    fused = await answer(write, fusing_verifier, tiny_model, "fused", weight)
    assert fused.acceptance > token.acceptance
    assert (fused.acceptance == 1) is (weight == 1)
    assert fused.lossy
    assert fused.losses == {Loss.VERIFICATION}
