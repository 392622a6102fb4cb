"""Precedence of settings, and what a wrong configuration file says."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import pytest
import typer
from typer.testing import CliRunner

from shared.config import ConfigError, apply_config, cache_dir

RUNNER = CliRunner()


def make_app() -> typer.Typer:
    app = typer.Typer()

    @app.callback()
    def root(
        ctx: typer.Context, config: Annotated[Path | None, typer.Option(envvar="SPECWIRE_CONFIG")] = None
    ):
        apply_config(ctx, "edge-client", config)

    @app.command()
    def run(k: int = 5, top_p: float = 1.0, verifier: str = "localhost:1", insecure: bool = False):
        typer.echo(f"{k} {top_p} {verifier} {insecure}")

    @app.command()
    def bench(k: int = 7, rounds: int = 3):
        typer.echo(f"{k} {rounds}")

    drafts = typer.Typer()

    @drafts.command()
    def export(bits: int = 4):
        typer.echo(f"{bits}")

    @drafts.command()
    def check(bits: int = 8):
        typer.echo(f"{bits}")

    app.add_typer(drafts, name="draft")
    return app


@pytest.fixture(autouse=True)
def no_user_config(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "xdg"))


def output(*args: str, env: dict[str, str] | None = None) -> str:
    result = RUNNER.invoke(make_app(), list(args), env=env)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.output.strip()


def write(tmp_path: Path, text: str) -> str:
    path = tmp_path / "some.toml"
    path.write_text(text)
    return str(path)


def test_each_source_wins_over_the_next(tmp_path):
    file = write(tmp_path, "[edge-client]\nk = 11\n")
    assert output("run").split()[0] == "5"
    assert output("--config", file, "run").split()[0] == "11"
    assert output("--config", file, "run", env={"SPECWIRE_K": "12"}).split()[0] == "12"
    assert output("--config", file, "run", "--k", "13", env={"SPECWIRE_K": "12"}).split()[0] == "13"


def test_command_table_wins_over_the_program_table(tmp_path):
    file = write(tmp_path, "[edge-client]\nk = 11\nrounds = 9\n[edge-client.run]\nk = 2\ntop_p = 0.5\n")
    assert output("--config", file, "run") == "2 0.5 localhost:1 False"
    assert output("--config", file, "bench") == "11 9"


def test_nested_commands_flags_and_lists(tmp_path):
    file = write(
        tmp_path,
        '[edge-client]\ninsecure = true\nverifier = ["a:1", "b:2"]\nbits = 2\n'
        "[edge-client.draft.export]\nbits = 3\n",
    )
    assert output("--config", file, "run") == "5 1.0 a:1,b:2 True"
    assert output("--config", file, "draft", "export") == "3"
    assert output("--config", file, "draft", "check") == "2"


def test_default_file_is_read_and_may_be_missing(tmp_path):
    folder = tmp_path / "xdg" / "specwire"
    folder.mkdir(parents=True)
    (folder / "specwire.toml").write_text("[edge-client]\nk = 4\n[cloud-verifier]\nwhatever = 1\n")
    assert output("run").split()[0] == "4"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[edge-client]\ntop-q = 0.9\n", ["'top-q'", "[edge-client]", "Did you mean 'top-p'"]),
        ("[edge-client.run]\nrounds = 3\n", ["'rounds'", "[edge-client.run]"]),
        ("[edge-client.draft]\nbits = 3\n", ["[edge-client.draft]", "group of commands"]),
        ("[edge-client]\nk = 'five'\n", ["'k'", "[edge-client]", "five"]),
        ("[edge-client]\nk = 1.5\n", ["'k'", "1.5"]),
        ("[edge-client]\nk = true\n", ["'k'", "True"]),
        ("[edge-client.run]\ninsecure = 'perhaps'\n", ["'insecure'", "[edge-client.run]", "perhaps"]),
        ("[edge-client.walk]\nk = 3\n", ["'walk'"]),
        ("edge-client = 3\n", ["'edge-client'", "table"]),
        ("[edge-client\n", ["not valid TOML"]),
    ],
)
def test_wrong_files_are_named(tmp_path, text, words):
    file = write(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        output("--config", file, "run")
    assert isinstance(caught.value, ValueError)
    for word in [*words, file]:
        assert word in str(caught.value)


def test_a_named_file_must_exist(tmp_path):
    with pytest.raises(ConfigError, match=r"no configuration file .*gone\.toml"):
        output("--config", str(tmp_path / "gone.toml"), "run")


def test_cache_dir(monkeypatch, tmp_path):
    monkeypatch.setenv("SPECWIRE_CACHE", str(tmp_path / "c"))
    assert cache_dir() == tmp_path / "c"
    monkeypatch.delenv("SPECWIRE_CACHE")
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "x"))
    assert cache_dir() == tmp_path / "x" / "specwire"
