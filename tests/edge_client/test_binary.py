"""The built program in a root that holds nothing but it, the C library and zlib."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from PyInstaller.archive.readers import CArchiveReader

from cloud_verifier.local import local_verifier
from deploy.binary import build as build_module
from deploy.binary.build import add_draft, build, folder_bytes

pytestmark = pytest.mark.slow

# What the program takes from the system: the parts of glibc, and zlib, which unpacks the program.
_OF_THE_SYSTEM = (
    "libm.so.6",
    "libdl.so.2",
    "librt.so.1",
    "libpthread.so.0",
    "libutil.so.1",
    "libresolv.so.2",
)


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("dist"))


@pytest.fixture(scope="module")
def root(program: Path, tiny_draft: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """No shell and no Python: the C library, zlib, the program and a draft."""
    root = tmp_path_factory.mktemp("root")
    listed = subprocess.run(
        ["ldd", program / "edge-client"], capture_output=True, text=True, check=True
    ).stdout
    needed = {Path(found) for found in re.findall(r"(?:=> |^\s*)(/\S+)", listed, re.MULTILINE)}
    libc = next(library for library in needed if library.name == "libc.so.6")
    for library in needed | {libc.with_name(name) for name in _OF_THE_SYSTEM}:
        place = root / library.relative_to("/")
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(library.resolve(), place)
    shutil.copytree(program, root / "opt" / "edge-client")
    shutil.copytree(tiny_draft, root / "draft")
    for name in ("tmp", "dev", "proc"):
        (root / name).mkdir()
    return root


_ENTER = (
    'mount --rbind /dev "$0/dev" && mount --rbind /proc "$0/proc" && '
    'exec chroot "$0" /opt/edge-client/edge-client "$@"'
)


def inside(root: Path, *arguments: str) -> list[str]:
    """The program in `root`, with the kernel's /dev and /proc, in a mount namespace that ends with it."""
    as_root = [] if os.geteuid() == 0 else ["--map-root-user"]
    return ["unshare", "--mount", *as_root, "sh", "-c", _ENTER, str(root), *arguments]


def run_inside(root: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {"HOME": "/tmp", "LANG": "C.UTF-8"}
    return subprocess.run(
        inside(root, *arguments), capture_output=True, text=True, env=_path(environment), check=False
    )


def _path(environment: dict[str, str]) -> dict[str, str]:
    return {"PATH": os.environ["PATH"], **environment}


def asked(address: str, draft: str = "") -> list[str]:
    options = ["--verifier", address, "--insecure", "--max-tokens", "24", "--json"]
    options += ["--draft", draft] if draft else []
    return ["run", "Hello", "--temperature", "0", "--threads", "1", *options]


def test_version_names_the_commit(root: Path) -> None:
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False).stdout
    said = run_inside(root, "--version")
    assert said.returncode == 0, said.stderr
    assert (commit.strip()[:12] or "unknown") in said.stdout
    assert re.search(r"edge-client \d+\.\d+\.\d+ \(commit ", said.stdout)


def test_help(root: Path) -> None:
    said = run_inside(root, "--help")
    assert said.returncode == 0
    for command in ("run", "chat", "serve", "doctor"):
        assert command in said.stdout


def test_it_writes_what_the_package_writes(root: Path, tiny_draft: Path, verifier_process: str) -> None:
    ours = run_inside(root, *asked(verifier_process, "/draft"))
    assert ours.returncode == 0, ours.stderr
    command = [sys.executable, "-c", "from edge_client.cli import main; main()"]
    theirs = subprocess.run(
        [*command, *asked(verifier_process, str(tiny_draft))], capture_output=True, text=True, check=True
    )
    assert json.loads(ours.stdout)["text"] == json.loads(theirs.stdout)["text"]


def test_it_serves(root: Path, verifier_process: str) -> None:
    """The endpoint and the page: everything that is imported late is there."""
    options = ["--verifier", verifier_process, "--insecure", "--draft", "/draft", "--port", "0"]
    with subprocess.Popen(
        inside(root, "serve", *options), stdout=subprocess.PIPE, text=True, env=_path({"HOME": "/tmp"})
    ) as server:
        try:
            url = re.search(r"http://\S+", server.stdout.readline())[0]
            page = httpx.get(url)
            assert "Specwire" in page.text
            assert httpx.get(f"{url}/app.js").status_code == 200
            body = {"model": "tiny", "prompt": "abc", "max_tokens": 5}
            reply = httpx.post(f"{url}/v1/completions", json=body, timeout=60)
            assert reply.json()["usage"]["completion_tokens"] == 5
        finally:
            server.terminate()


def test_the_bundle_brings_its_draft(root: Path, target_dir: Path, draft_dir: Path) -> None:
    """`make edge-bundle`: no --draft, no network but the verifier, the same text as the package's."""
    folder = root / "opt" / "edge-client"
    add_draft(folder)
    with local_verifier("--target", str(target_dir)) as address:
        ours = run_inside(root, *asked(address))
        assert ours.returncode == 0, ours.stderr
        command = [sys.executable, "-c", "from edge_client.cli import main; main()"]
        theirs = subprocess.run(
            [*command, *asked(address, str(draft_dir))], capture_output=True, text=True, check=True
        )
    told = json.loads(ours.stdout)
    assert told["text"] == json.loads(theirs.stdout)["text"]
    assert told["num_accepted"] > 0
    shutil.rmtree(folder / "draft")


def test_a_wrong_address_is_said_and_not_a_traceback(root: Path) -> None:
    said = run_inside(root, *asked("127.0.0.1:9", "/draft"))
    assert said.returncode == 3
    assert "Nothing answers" in said.stderr
    assert "Traceback" not in said.stderr


def test_it_holds_the_client_alone(program: Path) -> None:
    names = {path.name.lower() for path in program.rglob("*")}
    modules = frozen_modules(program / "edge-client")
    assert {"edge_client", "shared", "grpc"} <= modules
    for foreign in ("torch", "transformers", "cloud_verifier", "pytest", "scipy", "onnx", "cffi"):
        assert foreign not in names
        assert foreign not in modules
    assert not [name for name in names if name.startswith("_cffi")]
    assert folder_bytes(program) < 200e6


def frozen_modules(executable: Path) -> set[str]:
    """Top-level names of the pure Python modules, which lie in an archive inside the executable."""
    archive = CArchiveReader(str(executable))
    return {name.partition(".")[0] for name in archive.open_embedded_archive("PYZ.pyz").toc}


def test_a_checkout_of_another_user_has_a_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So it is in a container that builds in a folder of its host."""
    monkeypatch.setattr(build_module, "ROOT", tmp_path)
    assert build_module.build_info()["commit"] == "unknown"
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b.example"]
    subprocess.run(["git", "init", "--quiet", str(tmp_path)], check=True)
    subprocess.run([*git, "commit", "--quiet", "--allow-empty", "--message", "first"], check=True)
    commit = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout
    if os.geteuid() == 0:
        for path in (tmp_path, tmp_path / ".git"):
            os.chown(path, 12345, 12345)
    assert build_module.build_info()["commit"] == commit.strip()
