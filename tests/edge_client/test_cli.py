"""The command line against a real verifier in a process of its own."""

from __future__ import annotations

import asyncio
import json
import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from edge_support import Relay
from typer.testing import CliRunner

from edge_client.chat import Chat
from edge_client.cli import EDGE_ONLY, INTERRUPTED, TRY_LATER, WRONG, app, guarded
from edge_client.options import Options
from edge_client.startup import open_client
from edge_client.terminal import Terminal
from shared.faults import FaultKind, SpecwireError

RUNNER = CliRunner()
COMMAND = [sys.executable, "-c", "from edge_client.cli import main; main()"]


@pytest.fixture
def options(verifier_process: str, tiny_draft: Path, monkeypatch, tmp_path) -> list[str]:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    return ["--verifier", verifier_process, "--insecure", "--draft", str(tiny_draft), "--threads", "1"]


def output(*args: str, text: str | None = None) -> str:
    result = RUNNER.invoke(app, list(args), input=text, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def test_run_streams_plain_text_when_piped(options):
    piped = RUNNER.invoke(app, ["run", "hello", "--max-tokens", "20", "--show-origin", *options])
    text = piped.stdout_bytes.decode()  # random bytes, line ends of every kind among them
    assert "\x1b" not in text
    told = json.loads(output("run", "hello", "--max-tokens", "20", "--json", *options))
    assert told["text"] + "\n" == text
    assert len(told["tokens"]) == 20
    assert told["finish_reason"] == "length"
    alone = json.loads(output("run", "hello", "--max-tokens", "20", "--json", "--cloud-only", *options))
    assert alone["tokens"] == told["tokens"]
    assert alone["tokens_by_origin"]["cloud"] == 20


def test_run_reads_standard_input_and_settings(options, monkeypatch):
    monkeypatch.setenv("SPECWIRE_MAX_TOKENS", "5")
    told = json.loads(output("run", "-", "--raw", "--json", *options, text="once"))
    assert len(told["tokens"]) == 5
    assert told["tokens"] == json.loads(output("run", "once", "--raw", "--json", *options))["tokens"]
    assert told["tokens"] != json.loads(output("run", "once", "--json", *options))["tokens"]


def test_stats_go_to_standard_error(options):
    result = RUNNER.invoke(app, ["run", "hello", "--max-tokens", "9", "--k", "4", "--stats", *options])
    assert "accepted" in result.stderr
    assert "accepted" not in result.stdout


def test_chat_keeps_the_conversation_and_obeys_commands(options):
    lines = ["/stats", "hello", "go \\", "on", "/stats", "/seed 5", "/reset", "hello", "/nonsense", "/quit"]
    settings = ["--temperature", "0", "--max-tokens", "12", "--k", "4"]
    result = RUNNER.invoke(app, ["chat", *settings, *options], input="\n".join(lines))
    assert result.exit_code == 0, result.output
    answers = result.stdout.splitlines()
    assert answers[0] == output("run", "hello", "--max-tokens", "12", *options).splitlines()[0]
    for words in (
        "There is no answer yet",
        "speculation",
        "The seed is 5",
        "forgotten",
        "no command '/nonsense'",
    ):
        assert words in result.stderr


def test_edge_only_is_said_in_the_exit_code_the_json_and_one_line(options):
    away = ["--verifier", "127.0.0.1:1", "--max-tokens", "12"]
    refused = RUNNER.invoke(app, ["run", "hello", "--json", *options, *away])
    assert isinstance(refused.exception, SpecwireError)
    alone = RUNNER.invoke(app, ["run", "hello", "--json", *options, *away, "--edge-only-fallback"])
    assert alone.exit_code == EDGE_ONLY
    told = json.loads(alone.stdout)
    assert told["lossy"] is True
    assert told["lossy_because"] == ["edge_only"]
    assert told["tokens_by_origin"]["edge_only"] == len(told["tokens"]) == 12
    assert told["model"] is None
    assert alone.stderr.count("edge only") == 1
    shown = RUNNER.invoke(app, ["run", "hello", "--stats", *options, *away, "--edge-only-fallback"])
    assert shown.stdout_bytes.decode() == told["text"] + "\n"
    assert "not exact" in shown.stderr


def test_edge_only_can_be_allowed_in_the_file_and_the_environment(options, monkeypatch, tmp_path):
    away = ["run", "hello", "--max-tokens", "4", *options, "--verifier", "127.0.0.1:1"]
    with monkeypatch.context() as patch:
        patch.setenv("SPECWIRE_EDGE_ONLY_FALLBACK", "1")
        assert RUNNER.invoke(app, away).exit_code == EDGE_ONLY
    (tmp_path / "specwire").mkdir()
    (tmp_path / "specwire" / "specwire.toml").write_text("[edge-client]\nedge-only-fallback = true\n")
    assert RUNNER.invoke(app, away).exit_code == EDGE_ONLY


def test_a_chat_goes_on_alone_and_finds_the_verifier_again(options, verifier_process, tiny_draft, capsys):
    """The verifier is away for the first question; every later answer follows what was written alone."""
    with asyncio.Runner() as runner:
        stack = AsyncExitStack()
        relay = runner.run(stack.enter_async_context(Relay(verifier_process).running()))
        relay.refusing = True
        settings = Options(
            verifier=relay.address,
            draft=str(tiny_draft),
            insecure=True,
            threads=1,
            max_tokens=6,
            patience=0.3,
            edge_only_fallback=True,
        )
        terminal = Terminal()
        client = runner.run(stack.enter_async_context(open_client(settings, terminal.notice)))
        told: list[str] = []

        def lines() -> Iterator[str]:
            yield "hello"
            told.append(capsys.readouterr().err)
            relay.refusing = False
            for _ in range(20):
                yield "more"
                told.append(capsys.readouterr().err)
                if "the draft wrote some of it alone" not in told[-1]:
                    return
                time.sleep(0.1)  # until the connection is tried again

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("builtins.input", _reader(lines()))
            Chat(client, terminal, runner.run, "", stats=True).loop()
        runner.run(stack.aclose())
    assert "edge only" in told[0]
    assert "it follows what the draft wrote alone" in told[-1]
    assert "edge only" not in told[-1]


def _reader(lines: Iterator[str]) -> Callable[[str], str]:
    """`input` that reads these lines."""

    def read(prompt: str) -> str:
        line = next(lines, None)
        if line is None:
            raise EOFError
        return line

    return read


def test_bench_compares_both_arms(options):
    report = json.loads(output("bench", "--prompts", "2", "--max-tokens", "12", *options))
    assert set(report["arms"]) == {"speculative", "cloud_only"}
    assert report["speedup"]["median"] > 0
    assert report["arms"]["speculative"]["up_bytes_per_draft_token"] > 0
    assert sum(report["arms"]["speculative"]["time_share"].values()) == pytest.approx(1, abs=0.05)


def test_doctor_finds_nothing_wrong(options):
    text = output("doctor", *options)
    assert "wrong" not in text
    for name in ("draft", "verifier", "tokenizer", "access", "round trip", "rate", "draft speed", "speed"):
        assert f"ok    {name}" in text


def test_doctor_says_how_to_fix_each_thing(options, tmp_path):
    nobody = RUNNER.invoke(
        app, ["doctor", "--verifier", "127.0.0.1:1", "--insecure", "--draft", str(tmp_path)]
    )
    assert nobody.exit_code == WRONG
    assert "wrong draft" in nobody.stdout
    assert "cloud-verifier draft export" in nobody.stdout
    assert "cloud-verifier serve" in nobody.stdout
    codec = RUNNER.invoke(app, ["doctor", "--codec", "morse", *options])
    assert codec.exit_code == WRONG
    assert "lattice" in codec.stdout


def test_doctor_notices_a_changed_file_and_another_tokenizer(options, tiny_draft, tmp_path):
    import shutil

    folder = tmp_path / "draft"
    shutil.copytree(tiny_draft, folder)
    manifest = json.loads((folder / "specwire.json").read_text())
    manifest["tokenizer_digest"] = "0" * 64
    (folder / "specwire.json").write_text(json.dumps(manifest))
    other = RUNNER.invoke(app, ["doctor", *options, "--draft", str(folder)])
    assert other.exit_code == WRONG
    assert "wrong tokenizer" in other.stdout
    model = folder / "model.onnx"
    data = bytearray(model.read_bytes())
    data[len(data) // 2] ^= 255
    model.write_bytes(data)
    changed = RUNNER.invoke(app, ["doctor", *options, "--draft", str(folder)])
    assert "wrong draft" in changed.stdout
    assert "model.onnx" in changed.stdout


@pytest.mark.parametrize(
    ("args", "kind", "words"),
    [
        (["--temperature", "-1"], FaultKind.BAD_SAMPLING, "temperature"),
        (["--top-p", "0"], FaultKind.BAD_SAMPLING, "top_p"),
        (["--cloud-only", "--edge-only-fallback"], FaultKind.BAD_REQUEST, "--edge-only-fallback"),
        (["--k", "many"], FaultKind.BAD_REQUEST, "--k"),
        (["--codec", "morse"], FaultKind.UNKNOWN_CODEC, "morse"),
        (["--verification", "trust"], FaultKind.UNKNOWN_VERIFICATION, "trust"),
        (["--draft", "builtin:int1"], FaultKind.BAD_REQUEST, "cloud-verifier draft builtin"),
        (["--verifier", "localhost"], FaultKind.BAD_REQUEST, "no port"),
        (["--verifier", "127.0.0.1:1"], FaultKind.UNAVAILABLE, "Nothing answers"),
    ],
)
def test_wrong_options_are_one_fault(options, args, kind, words):
    with pytest.raises(SpecwireError) as caught:
        RUNNER.invoke(app, ["run", "x", *options, *args], catch_exceptions=False)
    assert caught.value.kind is kind
    assert words in str(caught.value)
    assert caught.value.remedy


def test_the_builtin_draft_is_the_best_there_is(monkeypatch, tmp_path):
    from edge_client.startup import draft_folder

    monkeypatch.setenv("SPECWIRE_CACHE", str(tmp_path))
    for name in ("int4-v1", "int8-v1", "int8-v2", "q4_exact-v1", "new-v1", "int8-v10"):
        (tmp_path / "models" / f"SmolLM2-135M-Instruct-draft-{name}").mkdir(parents=True)
    assert draft_folder("builtin").name.endswith("q4_exact-v1")
    assert draft_folder("builtin:int8").name.endswith("int8-v10")
    assert draft_folder("builtin:new").name.endswith("new-v1")
    assert draft_folder(str(tmp_path)) == tmp_path


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (SpecwireError(FaultKind.BAD_REQUEST, "Wrong.", "Do it right."), WRONG),
        (SpecwireError(FaultKind.UNAVAILABLE, "Gone.", "Wait."), TRY_LATER),
        (KeyboardInterrupt(), INTERRUPTED),
        (SystemExit(2), 2),
        (None, 0),
    ],
)
def test_exit_codes(error, code, capsys):
    def command() -> None:
        if error is not None:
            raise error

    assert guarded(command) == code
    told = capsys.readouterr()
    assert told.out == ""
    if isinstance(error, SpecwireError):
        assert error.text in told.err
        assert error.remedy in told.err


def test_nobody_there_is_said_within_seconds_without_a_traceback(tiny_draft):
    started = time.monotonic()
    done = subprocess.run(
        [*COMMAND, "run", "x", "--insecure", "--verifier", "127.0.0.1:1", "--draft", str(tiny_draft)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == TRY_LATER
    assert done.stdout == ""
    assert "Nothing answers" in done.stderr
    assert "Traceback" not in done.stderr
    assert time.monotonic() - started < 45  # of which starting Python takes most on a busy machine


def test_help_needs_nothing_heavy():
    program = (
        "import sys\n"
        "from edge_client.cli import app\n"
        "try:\n    app(['run', '--help'])\nexcept SystemExit:\n    pass\n"
        "heavy = {'numpy', 'grpc', 'onnxruntime', 'tokenizers', 'torch', 'transformers', 'asyncio'}\n"
        "print(sorted(heavy & set(sys.modules)), file=sys.stderr)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stderr.strip() == "[]"
    for option in ("--verifier", "--temperature", "--k", "--json"):
        assert option in done.stdout


def test_version():
    assert output("--version").startswith("edge-client ")


def test_ctrl_c_ends_a_run_quietly(options):
    running = subprocess.Popen(
        [*COMMAND, "run", "hello", "--max-tokens", "480", *options, "--k", "1"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert running.stdout is not None
    assert running.stdout.read(1)
    running.send_signal(signal.SIGINT)
    _, stderr = running.communicate(timeout=60)
    assert running.returncode == INTERRUPTED
    assert b"Traceback" not in stderr


def test_ctrl_c_in_a_chat_stops_the_answer_only(options):
    """At a real terminal, because that is where Ctrl-C comes from."""
    leader, follower = pty.openpty()
    environment = {**os.environ, "TERM": "dumb"}
    chat = subprocess.Popen(
        [*COMMAND, "chat", *options, "--max-tokens", "480", "--k", "1", "--temperature", "0"],
        stdin=follower,
        stdout=follower,
        stderr=follower,
        env=environment,
        start_new_session=True,
        preexec_fn=lambda: _take_terminal(follower),
    )
    os.close(follower)
    try:
        seen = _read_until(leader, b"> ")
        os.write(leader, b"hello\n")
        seen = _read_until(leader, b"hello\r\n")
        os.read(leader, 1)
        os.write(leader, b"\x03")
        seen = _read_until(leader, b"> ")
        assert b"Stopped" in seen
        os.write(leader, b"/quit\n")
        _read_until(leader, None)
        assert chat.wait(30) == 0
    finally:
        chat.kill()
        chat.wait()
        os.close(leader)


def _take_terminal(terminal: int) -> None:
    import fcntl
    import termios

    fcntl.ioctl(terminal, termios.TIOCSCTTY, 0)


def _read_until(terminal: int, end: bytes | None) -> bytes:
    """What the program writes up to `end`, or until it closes the terminal."""
    seen = b""
    while end is None or not seen.endswith(end):
        try:
            data = os.read(terminal, 1024)
        except OSError:
            break
        if not data:
            break
        seen += data
    return seen
