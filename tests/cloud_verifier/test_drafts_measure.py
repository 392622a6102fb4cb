"""The measurement of a draft that is its target, and of one that is not."""

from __future__ import annotations

from pathlib import Path

import pytest

from cloud_verifier.drafts import measure


def test_a_draft_that_is_the_target_overlaps_wholly(
    tiny_draft: Path, tiny_target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measure, "PROMPTS", ("One", "Two"))
    monkeypatch.setattr(measure, "NUM_TOKENS", 20)
    (same,) = measure.measure_drafts(tiny_draft.with_name("draft-hf"), [tiny_draft])
    assert same.overlap == pytest.approx(1, abs=1e-3)
    assert same.overlap_cold == pytest.approx(1, abs=1e-3)
    assert (same.greedy_agreement, same.num_positions) == (1, 40)
    (other,) = measure.measure_drafts(tiny_target, [tiny_draft])
    assert other.overlap < 0.99
