"""Size and start-up of the client: as a Python package, and as the built program."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cloud_verifier.benchmarks.report import Spread

ROOT = Path(__file__).resolve().parents[2]
_PACKAGE = (sys.executable, "-c", "from edge_client.cli import main; main()")
_IMPORT = "import time; t = time.perf_counter(); import edge_client.cli; print(time.perf_counter() - t)"


def installed_figures(repeat: int) -> dict[str, Any]:
    """`[edge]` in an environment of its own: bytes of what pip brought, and seconds to import the CLI."""
    with tempfile.TemporaryDirectory() as folder:
        venv.create(folder, with_pip=True)
        python = Path(folder) / "bin" / "python"
        before = _tree_bytes(Path(folder))
        # Not compiled: byte code is written when a module is first used, as pip would write all of it.
        pip = [str(python), "-m", "pip", "install", "--quiet", "--no-compile", "--disable-pip-version-check"]
        subprocess.run([*pip, f"{ROOT}[edge]"], check=True)
        size = _tree_bytes(Path(folder)) - before
        subprocess.run([str(python), "-c", _IMPORT], check=True, capture_output=True, cwd=folder)
        imports = [
            float(subprocess.check_output([str(python), "-c", _IMPORT], cwd=folder)) for _ in range(repeat)
        ]
    return {"edge_mb": round(size / 1e6, 1), "import_s": Spread.of(imports)}


def binary_figures(address: str, draft: Path, repeat: int) -> dict[str, Any]:
    """The program of `make edge-binary`, built when it is not there."""
    folder = ROOT / "dist" / "edge-client"
    if not (folder / "edge-client").is_file():
        subprocess.run([sys.executable, str(ROOT / "deploy" / "binary" / "build.py")], check=True)
    program = (str(folder / "edge-client"),)
    subprocess.run([*program, "--help"], check=True, capture_output=True)  # into the page cache
    asked = ("run", "Say hello.", "--verifier", address, "--insecure", "--draft", str(draft))
    firsts: dict[str, list[float]] = {"binary": [], "package": []}
    for _ in range(repeat):
        firsts["package"].append(_first_output_s((*_PACKAGE, *asked)))
        firsts["binary"].append(_first_output_s((*program, *asked)))
    return {
        "folder_mb": round(_tree_bytes(folder) / 1e6, 1),
        "help_s": Spread.of([_first_output_s((*program, "--help")) for _ in range(repeat)]),
        "first_token_s": Spread.of(firsts["binary"]),
        "first_token_of_the_package_s": Spread.of(firsts["package"]),
    }


def _first_output_s(command: Sequence[str]) -> float:
    """Seconds from the start to the first byte of output; then until the end, unmeasured."""
    started = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        if process.stdout is None or not process.stdout.read(1):
            raise RuntimeError(f"{command[0]} printed nothing")
        first_s = time.perf_counter() - started
        process.stdout.read()
    return first_s


def _tree_bytes(folder: Path) -> int:
    return sum(path.lstat().st_size for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
