"""What a device installs: the `[edge]` extra alone, in an empty environment, writes an answer."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
TOO_BIG = {"torch", "transformers", "onnx", "onnxruntime-genai", "gguf"}


def run(*command: str | Path, cwd: Path) -> str:
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False, timeout=500)
    assert done.returncode == 0, f"{command}: {done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A new environment with `specwire[edge]`, installed from a copy of the sources."""
    base = tmp_path_factory.mktemp("device")
    sources = base / "sources"
    sources.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(REPOSITORY / name, sources)
    for name in ("shared", "edge_client", "cloud_verifier"):
        shutil.copytree(REPOSITORY / name, sources / name, ignore=shutil.ignore_patterns("__pycache__"))
    run(sys.executable, "-m", "venv", base / "venv", cwd=base)
    run(base / "venv/bin/python", "-m", "pip", "install", "--quiet", f"{sources}[edge]", cwd=base)
    return base / "venv"


@pytest.mark.timeout(600)
def test_the_edge_extra_alone_writes_an_answer(
    environment: Path, builtin_verifier: str, draft_dir: Path, tmp_path: Path
) -> None:
    listed = run(environment / "bin/python", "-m", "pip", "list", "--format=json", cwd=tmp_path)
    installed = {package["name"].lower() for package in json.loads(listed)}
    assert "onnxruntime" in installed
    assert not installed & TOO_BIG

    answer = json.loads(
        run(
            environment / "bin/edge-client",
            "run",
            "What is the capital of France?",
            *("--verifier", builtin_verifier, "--insecure", "--draft", str(draft_dir)),
            *("--max-tokens", "12", "--json"),
            cwd=tmp_path,
        )
    )
    assert "Paris" in answer["text"]


@pytest.mark.timeout(600)
def test_no_module_of_the_edge_asks_for_more(environment: Path, tmp_path: Path) -> None:
    """Every module of edge_client and shared imports where there is neither torch nor transformers."""
    program = """
import importlib, pkgutil, sys
import edge_client, shared
for package in (edge_client, shared):
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        if "__main__" not in module.name and ".examples" not in module.name:
            importlib.import_module(module.name)
print(sorted({"torch", "transformers"} & set(sys.modules)))
"""
    environ = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(
        [environment / "bin/python", "-c", program],
        cwd=tmp_path,
        env=environ,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"
