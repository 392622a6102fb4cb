"""Models and a verifier that the tests of the edge client share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from edge_support import load_tiny_target

from cloud_verifier.local import local_verifier
from cloud_verifier.target_model import TargetModel
from edge_client.draft_model import DraftModel


@pytest.fixture(scope="session")
def target_model(tiny_target: Path) -> TargetModel:
    return load_tiny_target(tiny_target)


@pytest.fixture(scope="session")
def other_target_model(tiny_target: Path) -> TargetModel:
    """A second one, since one pool serves one verifier at a time."""
    return load_tiny_target(tiny_target)


@pytest.fixture(scope="session")
def draft_model(tiny_draft: Path) -> DraftModel:
    return DraftModel.load(tiny_draft, threads=1)


@pytest.fixture(scope="session")
def verifier_process(tiny_target: Path) -> Iterator[str]:
    """Address of a verifier in a process of its own."""
    with local_verifier("--target", str(tiny_target), "--dtype", "float32") as address:
        yield address
