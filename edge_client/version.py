"""What this program is: its version and, in a built binary, the commit and machine it was built from."""

from __future__ import annotations

import json
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

BUILD_INFO = Path(__file__).with_name("build.json")  # written by deploy/binary/build.py


def package_version() -> str:
    try:
        return version("specwire")
    except PackageNotFoundError:
        return "unknown"


def describe() -> str:
    """One line for people: `edge-client 0.1.0 (commit 1a2b3c4d5e6f, built 2026-01-31 for ...)`."""
    text = f"edge-client {package_version()}"
    try:
        info = json.loads(BUILD_INFO.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return text
    commit, _, changed = info["commit"].partition("-")
    commit = commit[:12] + (f"-{changed}" if changed else "")
    return (
        f"{text} (commit {commit}, built {info['built']} for {info['platform']}, {info['libc']}, "
        f"Python {info['python']})"
    )
