"""The README's first command, and the measurements, as a person runs them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest


def run(*command: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", *command],
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
        env=os.environ | {"COLUMNS": "120"},  # a table's head is one line
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def one_prompt(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    # As many tokens as the basic experiment asks of a prompt: 50 to 100.
    text = "What is the capital of France, and why do so many people visit it every year? " * 3
    file.write_text(json.dumps({"category": "qa", "turns": [text]}) + "\n")
    return file


def test_the_demo_writes_a_true_answer_together(target_dir: Path, draft_dir: Path) -> None:
    shown = run("cloud_verifier.demo", "What is the capital of France?", "--max-tokens", "12")
    assert shown.count("Paris") >= 2  # together, and alone
    rows = [re.split(r"\s*[│┃]\s*", line)[1:-1] for line in shown.splitlines() if line[:1] in ("│", "┃")]
    assert rows[0] == ["", "tokens/s", "tokens", "first token", "accepted", "bytes up per drafted token"]
    together, alone = rows[1:]
    assert together[0] == "together"
    assert together[2] == alone[2]  # greedy: the same text
    assert re.fullmatch(r"\d+%", together[4])
    assert int(together[5]) > 0
    assert alone[4:] == ["-", "-"]


def test_the_loopback_bench_reports_what_it_promises(
    target_dir: Path, draft_dir: Path, one_prompt: Path, tmp_path: Path
) -> None:
    out = tmp_path / "loopback.json"
    arguments = ["--prompts", str(one_prompt), "--max-tokens", "8", "--k", "3", "--out", str(out)]
    run("cloud_verifier.benchmarks.loopback", *arguments)
    report = json.loads(out.read_text())
    assert set(report["arms"]) == {
        f"{arm}@{t}" for arm in ("hf_generate", "cloud_ar", "speculative_k3") for t in ("0", "0.7")
    }
    for key in ("machine", "versions", "settings"):
        assert report[key]
    for key in (
        "speedup_vs_hf_generate",
        "speedup_vs_cloud_ar",
        "cloud_ar_vs_hf_generate",
        "acceptance",
        "tokens_per_round",
        "bytes_up_per_draft_token",
    ):
        assert report[key]
        assert all(value > 0 for value in report[key].values())
    for shares in report["time_share"].values():
        assert set(shares) == {"draft", "codec", "network", "queue", "forward", "verification", "rest"}
        assert sum(shares.values()) == pytest.approx(1, abs=0.01)


def test_the_basic_experiment_reports_what_it_promises(
    target_dir: Path, draft_dir: Path, one_prompt: Path, tmp_path: Path
) -> None:
    out = tmp_path / "basic.json"
    arguments = ["--prompts", str(one_prompt), "--max-tokens", "8", "--k", "3", "--out", str(out)]
    run("cloud_verifier.benchmarks.basic", *arguments)
    arms = json.loads(out.read_text())["arms"]
    assert set(arms) == {"autoregressive", "speculative_k3"}
    assert arms["speculative_k3"]["tokens_per_round"] >= 1
    assert all(0 < arm["ks_p_value"] <= 1 for arm in arms.values())
