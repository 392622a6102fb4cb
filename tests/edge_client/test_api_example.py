"""The agent example runs as it stands, against a tiny model that keeps to no form."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from edge_client.api.server import ServeConfig, serving
from edge_client.examples.rag_agent import Agent, Notes, main
from edge_client.options import Options

LINE_END = "198"  # the tiny vocabulary's token of it
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


class Liner(Agent):
    """Its model writes I, J and line ends, whatever else it would like better."""

    def __init__(self, *arguments: Any) -> None:
        self.answers: list[str] = []
        super().__init__(*arguments)

    def _call(self, path: str, body: dict[str, Any] | None = None) -> Any:
        if body is not None:
            body |= {"logit_bias": {"40": 100, "41": 100, LINE_END: 100}}
        reply = super()._call(path, body)
        if body is not None:
            self.answers.append(reply["choices"][0]["message"]["content"])
        return reply


async def test_only_what_is_new_is_sent(
    verifier_process: str, tiny_draft: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also after an answer of several lines, of which the agent reads the first."""
    (tmp_path / "a.txt").write_text("Lake: 118 m.")
    monkeypatch.setattr("edge_client.examples.rag_agent.SYSTEM", "Search. " * 20)
    monkeypatch.setattr("edge_client.examples.rag_agent.EXAMPLE", [])
    monkeypatch.setattr("edge_client.examples.rag_agent.MAX_TOKENS", 12)
    options = Options(verifier=verifier_process, draft=str(tiny_draft), insecure=True, threads=1, k="4")
    async with serving(options, ServeConfig(port=0)) as url:
        agent = await asyncio.to_thread(Liner, f"{url}/v1", "none", Notes(tmp_path), 3)
        await asyncio.to_thread(agent.ask, "Lake?")
    assert any("\n" in answer.strip() for answer in agent.answers[:-1])
    first, *later = rounds = agent.savings.rounds
    assert len(later) == 2
    assert first["prompt_tokens_details"]["cached_tokens"] == 0
    for before, after in itertools.pairwise(rounds):
        known = before["prompt_tokens"] + before["completion_tokens"]
        assert after["prompt_tokens_details"]["cached_tokens"] == known
    assert max(entry["up_bytes"] for entry in later) < first["up_bytes"]


def test_the_best_passage_comes_first() -> None:
    notes = Notes(NOTES)
    assert notes.search("how deep is the lake")[0].file == "lake.txt"
    assert notes.search("Who built the rack railway?")[0].file == "railway.txt"
    assert notes.search("zebra") == []
    files = Counter(passage.file for passage in notes.search("the", count=100))
    assert set(files) == {path.name for path in NOTES.glob("*.txt")}
