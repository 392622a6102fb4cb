"""The command line against a real verifier in a process of its own."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import os
import pty
import re
import signal
import socketserver
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest
from edge_support import Relay
from rich.console import Console
from typer.testing import CliRunner
from verifier_process import VerifierProcess

from cloud_verifier.auth import Authenticator, hash_token
from cloud_verifier.passes import StepEmulation
from cloud_verifier.server import ServerConfig, running_server
from cloud_verifier.target_model import TargetModel
from edge_client.chat import Chat
from edge_client.cli import EDGE_ONLY, INTERRUPTED, TRY_LATER, WRONG, app, guarded
from edge_client.options import Options
from edge_client.results import Emission, Origin, Round, Tally
from edge_client.startup import load_tokenizer, open_client
from edge_client.terminal import Terminal
from shared.faults import FaultKind, SpecwireError
from shared.messages import Timing
from shared.transport import Tls

sys.path.append(str(Path(__file__).parents[2] / "deploy"))
from certs import write_certificates

RUNNER = CliRunner()
COMMAND = [sys.executable, "-c", "from edge_client.cli import main; main()"]
# How a terminal is told the colour of each origin.
COLOURS = {
    Origin.ACCEPTED: "32",
    Origin.RECOVERED: "31",
    Origin.BONUS: "36",
    Origin.SIBLING: "35",
    Origin.CLOUD: "33",
    Origin.EDGE_ONLY: "3;90",
}


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


async def run_on_emulation(
    target_model: TargetModel, draft: Path, home: Path, emulation: StepEmulation, *asked: str
) -> subprocess.CompletedProcess[str]:
    config = ServerConfig(listen="127.0.0.1:0", drain_timeout_s=0.2, emulation=emulation)
    async with running_server(target_model, config) as port:
        where = ["--verifier", f"127.0.0.1:{port}", "--insecure", "--draft", str(draft)]
        done = await command("run", "hello", *where, *asked, XDG_CONFIG_HOME=str(home))
    assert done.returncode == 0, done.stderr
    return done


async def test_stats_say_whose_times_they_are(target_model, tiny_draft, tmp_path):
    emulation = StepEmulation(2.0, 0.1, "[big] model")
    done = await run_on_emulation(
        target_model, tiny_draft, tmp_path, emulation, "--max-tokens", "5", "--stats"
    )
    assert "[big] model: 2 ms a pass and 0.1 ms a token" in " ".join(done.stderr.split())


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


def talk(settings: Options, lines: Iterable[str], terminal: Terminal | None = None, **chat) -> list[str]:
    """The answers of a chat to whom these lines are typed."""
    answers: list[str] = []
    with asyncio.Runner() as runner, pytest.MonkeyPatch.context() as patch:
        stack = AsyncExitStack()
        terminal = terminal or Terminal()
        client = runner.run(stack.enter_async_context(open_client(settings, terminal.notice)))
        stream = terminal.stream

        async def remembered(*details):
            answer, result = await stream(*details)
            answers.append(answer)
            return answer, result

        patch.setattr(terminal, "stream", remembered)
        patch.setattr("builtins.input", _reader(iter(lines)))
        Chat(client, terminal, runner.run, "", **{"stats": False} | chat).loop()
        runner.run(stack.aclose())
    return answers


@pytest.fixture
def chatting(verifier_process: str, tiny_draft: Path) -> Options:
    return Options(
        verifier=verifier_process, draft=str(tiny_draft), insecure=True, threads=1, max_tokens=12, k="4"
    )


def test_reset_forgets_what_was_said(chatting):
    first, second, after = talk(chatting, ["hello", "hello", "/reset", "hello"])
    assert after == first != second


def test_a_line_that_ends_with_a_backslash_goes_on_in_the_next(chatting, options):
    asked = ["--max-tokens", "12", "--k", "4", "--json", *options]
    joined, apart = [json.loads(output("run", text, *asked))["text"] for text in ("go \non", "go on")]
    assert talk(chatting, ["go \\", "on"]) == [joined]
    assert joined != apart


def test_seed_changes_what_is_drawn_and_restores_it(chatting):
    warm = replace(chatting, temperature=1.0)
    lines = ["hello", "/seed 5", "/reset", "hello", "/seed 0", "/reset", "hello"]
    first, other, again = talk(warm, lines)
    assert again == first != other


class Interrupting(Terminal):
    """Presses Ctrl-C, if told to, as soon as there is a word of the answer."""

    armed = False

    def _show(self, piece: str, origin: Origin) -> None:
        super()._show(piece, origin)
        if self.armed and self.shown:
            self.armed = False
            signal.raise_signal(signal.SIGINT)


def test_a_stopped_answer_has_no_figures_and_not_those_of_the_one_before(chatting, capsys):
    terminal, told = Interrupting(), []

    def lines() -> Iterator[str]:
        for line in ("hello", "/stats", "more", "/stats"):
            terminal.armed = line == "more"
            yield line
            told.append(capsys.readouterr().err)

    assert len(talk(replace(chatting, k="1"), lines(), terminal, stats=True)) == 1
    assert "tokens/s" in told[0]
    assert "tokens/s" in told[1]
    assert told[2].strip() == "Stopped."
    assert "tokens/s" not in told[3]
    assert "did not come to its end" in told[3]


async def test_show_origin_colours_each_token(tiny_draft, monkeypatch, capsys):
    monkeypatch.setattr("edge_client.terminal.Console", TERMINAL_CONSOLE)
    nothing = Round(0, 0, 0, 0, 0.0, 0.0, 0.0, 0.0, Timing())

    async def events():
        for token, origin in enumerate(COLOURS, start=ord("a") - ord("!")):
            yield Emission((token,), (origin,), nothing)
        yield Tally(0.0).result()

    terminal = Terminal(show_origin=True)
    answer, _ = await terminal.stream(SimpleNamespace(tokenizer=load_tokenizer(tiny_draft)), events())
    assert answer == "abcdef"
    coloured = zip(answer, COLOURS.values(), strict=True)
    assert capsys.readouterr().out == "".join(f"\x1b[{code}m{char}\x1b[0m" for char, code in coloured) + "\n"


def test_colours_are_shown_where_they_are_asked_for(options, monkeypatch):
    asked = ["run", "hello", "--max-tokens", "20", "--k", "4", *options]
    counts = json.loads(output(*asked, "--json"))["tokens_by_origin"]
    monkeypatch.setattr("edge_client.terminal.Console", TERMINAL_CONSOLE)
    shown = RUNNER.invoke(app, [*asked, "--show-origin"])
    seen = {origin for origin, code in COLOURS.items() if f"\x1b[{code}m" in shown.stdout}
    # A token may be half a character, which is shown with the next one.
    assert (
        {Origin.ACCEPTED, Origin.RECOVERED} <= seen <= {origin for origin, count in counts.items() if count}
    )
    for origin, code in COLOURS.items():
        assert f"\x1b[{code}m{origin.label}" in shown.stderr
    assert "\x1b" not in RUNNER.invoke(app, asked).stdout


async def test_explain_says_after_every_round_what_was_measured_and_chosen(
    target_model, tiny_draft, tmp_path
):
    slow = StepEmulation(40.0, 0.0)  # or the verifier might as well write alone
    asked = ["--max-tokens", "40", "--k", "auto", "--json", "--explain"]
    done = await run_on_emulation(target_model, tiny_draft, tmp_path, slow, *asked)
    told = json.loads(done.stdout)
    number, share = r"[\d.]+", r"[01]\.\d\d"
    line = re.compile(
        rf"draft {number} ms a token, round trip {number} ms and {number} ms a token, queue {number} ms, "
        rf"pass {number} ms, kept by position( {share})* -> (K=\d+, \d+ ahead|the cloud writes alone), "
        rf"(blocks of one packet|bytes .*) \({number} tokens/s expected, {number} cloud alone\)"
    )
    lines = done.stderr.splitlines()
    assert [text for text in lines if not line.fullmatch(text)] == []
    # The verifier's own tokens come one in a message.
    assert len(lines) == told["num_rounds"] + told["tokens_by_origin"]["cloud"]
    assert told["num_rounds"] > 1


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


@pytest.mark.parametrize("stats", [False, True])
def test_a_chat_goes_on_alone_and_finds_the_verifier_again(verifier_process, tiny_draft, capsys, stats):
    """The verifier is away for the first question; every later answer follows what was written alone, and
    says so once, until /reset."""
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

        def hear() -> None:
            told.append(" ".join(capsys.readouterr().err.split()))

        def lines() -> Iterator[str]:
            yield "hello"
            hear()
            relay.refusing = False
            for _ in range(20):
                yield "more"
                hear()
                if "goes on alone" not in told[-1]:
                    break
                time.sleep(0.1)  # until the connection is tried again
            yield "/reset"
            yield "hello"
            hear()

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("builtins.input", _reader(lines()))
            Chat(client, terminal, runner.run, "", stats=stats).loop()
        runner.run(stack.aclose())
    first, *_, again, after = told
    notice = "This answer is not exact: it follows what the draft wrote alone."
    assert "edge only" in first
    assert [text.count(notice) for text in told] == [0, *[1] * (len(told) - 2), 0]
    assert again.count("it follows what the draft wrote alone") == 1 + stats
    assert "edge only" not in again + after


TERMINAL_CONSOLE = functools.partial(Console, force_terminal=True, color_system="standard")


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


async def test_doctor_over_tls(target_model, tiny_draft, tmp_path, monkeypatch):
    """With the right token, with a wrong one, and without the authority that signed the certificate."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    write_certificates(tmp_path, ("localhost",))
    identities = tmp_path / "identities.toml"
    identities.write_text(f'[identities.alice]\nsha256 = "{hash_token("s3cret")}"\n')
    tls = Tls(cert=tmp_path / "server.pem", key=tmp_path / "server-key.pem")
    config = ServerConfig(listen="127.0.0.1:0", tls=tls, drain_timeout_s=0.2)
    trust = ["--tls-ca", str(tmp_path / "ca.pem")]
    async with running_server(target_model, config, Authenticator(identities)) as port:
        asked = ["doctor", "--verifier", f"localhost:{port}", "--draft", str(tiny_draft), "--threads", "1"]
        right = await command(*asked, *trust, SPECWIRE_TOKEN="s3cret")
        wrong = await command(*asked, *trust, SPECWIRE_TOKEN="guessed")
        unknown = await command(*asked, SPECWIRE_TOKEN="s3cret")
    assert right.returncode == 0, right.stdout
    assert "TLS with a trusted certificate; the token is accepted." in right.stdout
    for done, remedy in ((wrong, "--token or SPECWIRE_TOKEN"), (unknown, "--tls-ca")):
        assert done.returncode == WRONG
        verifier, _, rest = done.stdout.partition("wrong verifier")[2].partition("\n")
        assert remedy in rest.splitlines()[0]
        assert "s3cret" not in done.stdout
    assert "is not trusted" in verifier


async def command(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """The command line in a process of its own, while this one serves."""
    running = await asyncio.create_subprocess_exec(
        *COMMAND,
        *arguments,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=os.environ | environment,
    )
    out, err = await running.communicate()
    return subprocess.CompletedProcess(arguments, running.returncode or 0, out.decode(), err.decode())


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
        (SpecwireError(FaultKind.PROTOCOL_MISMATCH, "Not one of ours.", "Check the address."), WRONG),
        (SpecwireError(FaultKind.UNAUTHENTICATED, "Unknown.", "Give a token."), WRONG),
        (SpecwireError(FaultKind.UNAVAILABLE, "Gone.", "Wait."), TRY_LATER),
        (SpecwireError(FaultKind.TIMED_OUT, "Silent.", "Wait."), TRY_LATER),
        (SpecwireError(FaultKind.OVERLOADED, "Busy.", "Wait."), TRY_LATER),
        (SpecwireError(FaultKind.DRAINING, "Going.", "Wait."), TRY_LATER),
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


class _WebServer(socketserver.BaseRequestHandler):
    def handle(self) -> None:
        with contextlib.suppress(OSError):
            self.request.recv(4096)
            self.request.sendall(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n")


@contextlib.contextmanager
def web_server(certificates: Path | None = None) -> Iterator[str]:
    """Something that is no verifier; its address."""
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), _WebServer) as server:
        if certificates is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(certificates / "server.pem", certificates / "server-key.pem")
            context.set_alpn_protocols(["h2"])
            server.socket = context.wrap_socket(server.socket, server_side=True)
        serving = threading.Thread(target=server.serve_forever)
        serving.start()
        try:
            yield f"127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            serving.join()


@pytest.mark.parametrize(
    ("over_tls", "args", "words"),
    [
        (False, ["--insecure"], "not a Specwire verifier"),
        (False, [], "does not speak TLS"),
        (True, [], "is not trusted"),
    ],
)
@pytest.mark.parametrize("fallback", [[], ["--edge-only-fallback"]])
def test_what_waiting_cannot_mend_is_wrong(tiny_draft, tmp_path, capsys, over_tls, args, words, fallback):
    """No exit code that says to come back, and no draft that goes on alone."""
    if over_tls:
        write_certificates(tmp_path, ("127.0.0.1",))
    asked = ["run", "x", "--draft", str(tiny_draft), "--threads", "1", *args, *fallback]
    with web_server(tmp_path if over_tls else None) as address:
        assert guarded(lambda: app([*asked, "--verifier", address])) == WRONG
    told = capsys.readouterr()
    assert words in told.err
    assert told.out == ""


def test_a_taken_port_is_wrong(options, capsys):
    with web_server() as address:
        port = address.rpartition(":")[2]
        assert guarded(lambda: app(["serve", "--port", port, *options])) == WRONG
    assert f"Cannot listen on {address}" in capsys.readouterr().err


def test_json_tells_a_fault_too(options):
    away = RUNNER.invoke(app, ["run", "hello", "--json", *options, "--verifier", "127.0.0.1:1"])
    error = json.loads(away.stdout)["error"]
    assert isinstance(away.exception, SpecwireError)
    assert error == {
        "kind": "unavailable",
        "text": away.exception.text,
        "remedy": away.exception.remedy,
    }


def interrupted_run(*options: str, begun: str) -> tuple[bytes, bytes]:
    """Both streams of a long answer, when Ctrl-C comes once the stream `begun` has said something."""
    running = subprocess.Popen(
        [*COMMAND, "run", "hello", "--max-tokens", "480", *options, "--k", "1"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    stream = getattr(running, begun)
    assert stream is not None
    assert stream.read(1)
    running.send_signal(signal.SIGINT)
    stdout, stderr = running.communicate(timeout=60)
    assert running.returncode == INTERRUPTED
    return stdout, stderr


def test_json_tells_that_it_was_interrupted(options):
    stdout, _ = interrupted_run("--json", "--explain", *options, begun="stderr")
    assert json.loads(stdout)["error"]["kind"] == "interrupted"


async def test_a_verifier_that_dies_in_the_middle_is_said_without_a_traceback(
    tiny_target, tiny_draft, tmp_path, monkeypatch
):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    async with VerifierProcess(tiny_target, pass_ms=20.0).running() as verifier:
        asked = ["run", "hello", "--insecure", "--draft", str(tiny_draft), "--threads", "1"]
        running = await asyncio.create_subprocess_exec(
            *COMMAND,
            *asked,
            *("--verifier", verifier.address, "--patience", "1", "--max-tokens", "400"),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        assert running.stdout is not None
        assert await running.stdout.read(1)
        verifier.kill()
        _, told = await asyncio.wait_for(running.communicate(), 60)
    said = " ".join(told.decode().split())
    assert running.returncode == TRY_LATER, said
    assert "Trying again for up to 1 s." in said
    assert "Traceback" not in said


def test_serve_takes_its_key_from_the_environment(options):
    """And is for this machine alone, and for no web page."""
    with subprocess.Popen(
        [*COMMAND, "serve", "--port", "0", *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"SPECWIRE_API_KEY": "s3cret"},
    ) as server:
        try:
            assert server.stdout is not None
            url = server.stdout.readline().removeprefix("Serving on ").partition(" ")[0]
            assert url.startswith("http://127.0.0.1:")
            with httpx.Client(base_url=url, headers={"Origin": "https://evil.example"}, timeout=60) as http:
                wish = {"model": "target", "max_tokens": 3}
                for path, asked in (
                    ("/v1/completions", {"prompt": "abc"}),
                    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hello"}]}),
                ):
                    for key, status in (("s3cret", 200), ("guessed", 401), (None, 401)):
                        headers = {"Authorization": f"Bearer {key}"} if key else {}
                        reply = http.post(path, json=wish | asked, headers=headers)
                        assert reply.status_code == status, reply.text
                        assert "access-control-allow-origin" not in reply.headers
            server.send_signal(signal.SIGINT)
            _, stderr = server.communicate(timeout=60)
        finally:
            server.kill()
    assert server.returncode == INTERRUPTED
    assert stderr.strip() == ""


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
    _, stderr = interrupted_run(*options, begun="stdout")
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
