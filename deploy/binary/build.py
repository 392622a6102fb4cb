"""`make edge-binary` and `make edge-bundle`: the edge client as one folder that needs no Python.

The folder is for the kind of machine that it is built on: for arm64, run the same command on an arm64
machine (or in an arm64 container under QEMU); nothing here names an architecture. It needs zlib and a
glibc at least as new as that of the machine it was built on, so build on the oldest one to be supported.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
NAME = "edge-client"
DRAFT_NAME = "draft"


def build_info() -> dict[str, str]:
    """What `edge-client --version` will say."""
    seconds = int(os.environ.get("SOURCE_DATE_EPOCH", time.time()))
    return {
        "version": version("specwire"),
        "commit": _commit(),
        "built": time.strftime("%Y-%m-%d", time.gmtime(seconds)),
        "platform": f"{platform.system().lower()}-{platform.machine()}",
        "libc": " ".join(platform.libc_ver()),
        "python": platform.python_version(),
    }


def build(out: Path) -> Path:
    """Builds `out/edge-client`; replaces an older one."""
    work = ROOT / "build" / "binary"
    work.mkdir(parents=True, exist_ok=True)
    info = work / "build.json"
    info.write_text(json.dumps(build_info(), indent=1) + "\n", encoding="utf-8")
    command = [sys.executable, "-m", "PyInstaller", "--noconfirm", "--clean", "--log-level", "WARN"]
    command += ["--distpath", str(out), "--workpath", str(work), str(HERE / "edge-client.spec")]
    subprocess.run(command, check=True, env={**os.environ, "SPECWIRE_BUILD_INFO": str(info)})
    if shutil.which("strip"):  # Python's own library alone: symbols can be most of it
        for library in (out / NAME / "_internal").glob("libpython*.so*"):
            subprocess.run(["strip", "--strip-unneeded", str(library)], check=True)
    return out / NAME


def add_draft(folder: Path) -> None:
    """Puts the built-in draft beside the program, where it looks first."""
    from cloud_verifier.drafts.builtin import builtin_draft

    shutil.copytree(builtin_draft(), folder / DRAFT_NAME, dirs_exist_ok=True)


def folder_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file() and not path.is_symlink())


def _commit() -> str:
    commit = _git("rev-parse", "HEAD")
    if not commit:
        return "unknown"
    return commit + ("-changed" if _git("status", "--porcelain", "-uno") else "")


def _git(*arguments: str) -> str:
    """What git says of this checkout; nothing when there is no git, or no checkout."""
    if not shutil.which("git"):
        return ""
    # In a container the checkout is often another user's, which git otherwise refuses to read.
    command = ["git", "-c", f"safe.directory={ROOT}", "-C", str(ROOT), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "dist")
    parser.add_argument("--with-draft", action="store_true", help="put the built-in draft model beside it")
    options = parser.parse_args()
    folder = build(options.out)
    print(f"{folder}: {folder_bytes(folder) / 1e6:.0f} MB")
    if options.with_draft:
        add_draft(folder)
        print(f"with the built-in draft: {folder_bytes(folder) / 1e6:.0f} MB")


if __name__ == "__main__":
    main()
