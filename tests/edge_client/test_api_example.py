"""The agent example runs as it stands, against a tiny model that keeps to no form."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path

import pytest

from edge_client.api.server import ServeConfig, serving
from edge_client.examples.rag_agent import Notes, main
from edge_client.options import Options

NOTES = Path(__file__).parents[2] / "edge_client" / "examples" / "notes"


async def test_it_answers_and_says_what_was_saved(
    verifier_process: str, tiny_draft: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.txt").write_text("Lake: 118 m.")
    options = Options(verifier=verifier_process, draft=str(tiny_draft), insecure=True, threads=1)
    async with serving(options, ServeConfig(port=0)) as url:
        asked = ["Lake?", "--folder", str(tmp_path), "--url", f"{url}/v1", "--rounds", "2"]
        # Shorter than the example's own: the tiny model's context is 512 bytes.
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("edge_client.examples.rag_agent.SYSTEM", "Search.")
            patch.setattr("edge_client.examples.rag_agent.EXAMPLE", [])
            await asyncio.to_thread(main, asked)
    said = capsys.readouterr().out
    assert "search(" in said
    assert "passes and round trips saved" in said
    assert "all of it exact" in said


def test_the_best_passage_comes_first() -> None:
    notes = Notes(NOTES)
    assert notes.search("how deep is the lake")[0].file == "lake.txt"
    assert notes.search("Who built the rack railway?")[0].file == "railway.txt"
    assert notes.search("zebra") == []
    files = Counter(passage.file for passage in notes.search("the", count=100))
    assert set(files) == {path.name for path in NOTES.glob("*.txt")}
