"""Prompts to measure with: Spec-Bench where its file is at hand, else a built-in set of the same kinds."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from shared.faults import FaultKind, SpecwireError


@dataclass(frozen=True, slots=True)
class Prompt:
    """One question and the kind of work that it stands for."""

    category: str
    text: str


def load_prompts(file: Path | None, per_category: int = 2) -> list[Prompt]:
    """The first `per_category` questions of every category, in the order of the file.

    Args:
        file: JSON lines with `category` and `turns` as in Spec-Bench; None takes the built-in set.

    Raises:
        SpecwireError: BAD_REQUEST when the file cannot be read or a line is not such an object.
    """
    taken: dict[str, int] = defaultdict(int)
    chosen = []
    for prompt in _read(file):
        if taken[prompt.category] < per_category:
            taken[prompt.category] += 1
            chosen.append(prompt)
    return chosen


def _read(file: Path | None) -> Iterator[Prompt]:
    source = file or resources.files("edge_client.experiments") / "prompts.jsonl"
    try:
        lines = source.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise SpecwireError(
            FaultKind.BAD_REQUEST,
            f"Cannot read {source}: {error.strerror}.",
            "Check the path of the prompts.",
        ) from error
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
            yield Prompt(str(entry["category"]), str(entry["turns"][0]))
        except (ValueError, KeyError, IndexError, TypeError) as error:
            raise SpecwireError(
                FaultKind.BAD_REQUEST,
                f"Line {number} of {source} is not a question.",
                'Each line is an object with "category" and "turns".',
            ) from error
