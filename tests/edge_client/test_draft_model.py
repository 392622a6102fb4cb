"""The draft model against itself fed afresh, and against transformers."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from edge_client import draft_model
from edge_client.draft_model import DraftModel
from edge_client.manifest import read_manifest, write_manifest
from shared.faults import FaultKind, SpecwireError

TOKENS = st.lists(st.integers(0, 258), min_size=1, max_size=40)


@pytest.fixture
def small_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Growth and chunking happen within a few tokens."""
    monkeypatch.setattr(draft_model, "INITIAL_CAPACITY", 8)
    monkeypatch.setattr(draft_model, "PREFILL_CHUNK", 7)


@pytest.fixture(scope="module")
def fresh(tiny_draft: Path) -> DraftModel:
    """Fed in one piece, with buffers that never grow."""
    return DraftModel.load(tiny_draft, threads=1)


@given(steps=st.lists(st.tuples(TOKENS, st.integers(0, 60)), min_size=1, max_size=8))
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_feeds_and_rollbacks_equal_a_fresh_run(steps, tiny_draft, fresh, small_buffers) -> None:
    model = DraftModel.load(tiny_draft, threads=1)
    held: list[int] = []
    for tokens, back in steps:
        logits = model.feed(tokens)
        held += tokens
        assert model.kv_len == len(held)
        fresh.rollback(0)
        np.testing.assert_allclose(logits, fresh.feed(held), atol=2e-5)
        held = held[: max(len(held) - back, 0)]
        model.rollback(len(held))


def test_equals_transformers(tiny_draft: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    original = AutoModelForCausalLM.from_pretrained(tiny_draft.with_name("draft-hf"))
    tokens = np.random.default_rng(3).integers(0, 259, 50).tolist()
    with torch.inference_mode():
        expected = original(torch.tensor([tokens])).logits[0, :, :259].numpy()  # [50, 259]
    draft = DraftModel.load(tiny_draft)
    draft.feed(tokens[:20])
    for position in range(20, 50):
        logits = draft.feed(tokens[position : position + 1])
        np.testing.assert_allclose(logits, expected[position], atol=1e-4)


def test_padding_ids_are_cut(tiny_draft: Path) -> None:
    model = DraftModel.load(tiny_draft)
    assert (model.manifest.num_logits, model.vocab_size) == (272, 259)
    assert model.feed([1, 2, 3]).shape == (259,)


def test_context_is_a_clear_limit(tiny_draft: Path) -> None:
    model = DraftModel.load(tiny_draft, max_context=10)
    model.feed(range(8))
    with pytest.raises(SpecwireError, match="context of 10") as caught:
        model.feed([1, 2, 3])
    assert caught.value.kind is FaultKind.CONTEXT_EXCEEDED
    assert model.kv_len == 8
    assert np.isfinite(model.feed([1, 2])).all()


def test_a_model_with_fewer_logits_than_ids_never_proposes_the_rest(tiny_draft: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny_draft, tmp_path / "draft")
    manifest = dataclasses.replace(read_manifest(tiny_draft), vocab_size=300)
    write_manifest(tmp_path / "draft", manifest)
    model = DraftModel.load(tmp_path / "draft")
    logits = model.feed([1, 2, 290])
    assert logits.shape == (300,)
    assert np.isneginf(logits[272:]).all()
    assert np.isfinite(logits[:272]).all()


def test_the_kv_buffer_grows_with_what_is_held(tiny_draft: Path, small_buffers: None) -> None:
    model = DraftModel.load(tiny_draft, max_context=20)
    sizes = []
    for _ in range(20):
        model.feed([3])
        sizes.append(model.kv_bytes // (2 * 2 * 2 * 16 * 4))  # layers, keys and values, heads, dim, float32
    assert sizes == [8] * 8 + [16] * 8 + [20] * 4


def test_logits_are_a_view_that_the_next_feed_overwrites(tiny_draft: Path) -> None:
    model = DraftModel.load(tiny_draft)
    first = model.feed([1])
    kept = first.copy()
    assert model.feed([2]) is first
    assert not np.array_equal(first, kept)


@pytest.mark.parametrize("damage", ["missing", "short", "garbage"])
def test_a_damaged_folder_is_a_clear_error(tiny_draft: Path, tmp_path: Path, damage: str) -> None:
    folder = tmp_path / "draft"
    shutil.copytree(tiny_draft, folder)
    if damage == "missing":
        (folder / "specwire.json").unlink()
    elif damage == "short":
        (folder / "model.onnx").write_bytes(b"")
    else:
        size = (folder / "model.onnx").stat().st_size
        (folder / "model.onnx").write_bytes(b"x" * size)
    with pytest.raises(SpecwireError, match=str(folder)) as caught:
        DraftModel.load(folder)
    assert caught.value.kind is FaultKind.BAD_REQUEST


@pytest.mark.parametrize("token", [-1, 259, 270])
def test_ids_outside_the_vocabulary_are_refused(tiny_draft: Path, token: int) -> None:
    model = DraftModel.load(tiny_draft)
    with pytest.raises(SpecwireError, match=f"id {token} ") as caught:
        model.feed([5, token])
    assert caught.value.kind is FaultKind.BAD_TOKENS
    assert model.kv_len == 0


def test_rollback_goes_backwards_only(tiny_draft: Path) -> None:
    model = DraftModel.load(tiny_draft)
    model.feed([1, 2])
    with pytest.raises(ValueError, match="rollback to 3"):
        model.rollback(3)


def test_a_warmed_context_holds_its_memory_and_nothing_else(tiny_draft):
    model = DraftModel.load(tiny_draft, threads=1)
    expected = model.feed([256, 1, 2]).copy()
    spare = model.fork()
    assert spare.kv_bytes == 0
    spare.warm()
    assert (spare.kv_len, spare.kv_bytes) == (0, model.kv_bytes)
    assert np.array_equal(spare.feed([256, 1, 2]), expected)
    spare.warm()  # keeps what is held
    assert np.array_equal(spare.feed([3]), model.feed([3]))
