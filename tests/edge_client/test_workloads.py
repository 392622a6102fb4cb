"""Prompts: the built-in set, files in Spec-Bench's form, and what is wrong with others."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from edge_client.experiments.workloads import load_prompts
from shared.faults import FaultKind, SpecwireError


def test_the_built_in_set_has_two_prompts_of_thirteen_kinds() -> None:
    kinds = Counter(prompt.category for prompt in load_prompts(None))
    assert len(kinds) == 13
    assert set(kinds.values()) == {2}


def test_the_first_prompts_of_each_kind_are_taken(tmp_path: Path) -> None:
    file = tmp_path / "questions.jsonl"
    lines = [{"category": c, "turns": [f"{c}{i}", "later"]} for i in range(3) for c in "ab"]
    file.write_text("\n".join(json.dumps(line) for line in lines) + "\n\n")
    assert [prompt.text for prompt in load_prompts(file, 2)] == ["a0", "b0", "a1", "b1"]


@pytest.mark.parametrize("line", ["{}", "[]", "x", '{"category": "a", "turns": []}'])
def test_a_wrong_line_is_named(tmp_path: Path, line: str) -> None:
    file = tmp_path / "questions.jsonl"
    file.write_text('{"category": "a", "turns": ["b"]}\n' + line)
    with pytest.raises(SpecwireError, match="Line 2") as caught:
        load_prompts(file)
    assert caught.value.kind is FaultKind.BAD_REQUEST


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(SpecwireError, match=r"none\.jsonl"):
        load_prompts(tmp_path / "none.jsonl")
