"""Where a setting comes from: flag > environment > TOML file > default, for both command lines.

A setting is a command-line option and nothing else, so there is one list of names, types, defaults
and help texts. `--top-p 0.9`, `SPECWIRE_TOP_P=0.9` and

    [edge-client]            # every command that has the option
    top-p = 0.9
    [edge-client.run]        # this command only; wins over the above
    k = 8

in `~/.config/specwire/specwire.toml` mean the same. Typer does the precedence (`envvar`,
`default_map`); this file finds the table, and refuses what no option understands.
"""

from __future__ import annotations

import difflib
import os
import sys
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import typer

from shared.faults import FaultKind, SpecwireError

ENV_PREFIX = "SPECWIRE_"
_OWN_OPTIONS = frozenset({"help", "version", "config", "install-completion", "show-completion"})


class ConfigError(SpecwireError, ValueError):
    """A configuration file that cannot be used; the text names the file and the key."""

    def __init__(self, text: str, remedy: str) -> None:
        super().__init__(FaultKind.BAD_REQUEST, text, remedy)


def cache_dir() -> Path:
    """Where models are kept: $SPECWIRE_CACHE, else `specwire` in the platform's cache of this user."""
    chosen = os.environ.get("SPECWIRE_CACHE")
    if chosen:
        return Path(chosen).expanduser()
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "specwire"
    if sys.platform == "win32":
        return (
            Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local") / "specwire" / "Cache"
        )
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "specwire"


def default_config_file() -> Path:
    """`~/.config/specwire/specwire.toml`, or below $XDG_CONFIG_HOME."""
    base = os.environ.get("XDG_CONFIG_HOME")
    return (Path(base) if base else Path.home() / ".config") / "specwire" / "specwire.toml"


def apply_config(ctx: typer.Context, program: str, file: Path | None) -> None:
    """Gives every option of `ctx.command`'s commands its environment variable and its value in the file.

    Call it first thing in the root callback, before a subcommand reads its options.

    Args:
        ctx: context of the program's root command.
        program: name of the program's table in the file, "edge-client" or "cloud-verifier".
        file: the file that the user named; None means the default one, which may be missing.

    Raises:
        ConfigError: unreadable file, unknown key, or a value that the option does not take.
    """
    for _, command in _leaves(ctx.command, ()):
        for name, option in _options(command).items():
            if option.envvar is None:
                option.envvar = ENV_PREFIX + name.replace("-", "_").upper()
                option.show_envvar = False  # one sentence in the help says it for all
    path = file or default_config_file()
    table = _read(path, required=file is not None).get(program, {})
    if not isinstance(table, dict):
        raise ConfigError(
            f"'{program}' in {path} must be a table.", f"Write [{program}] on a line of its own."
        )
    ctx.default_map = _defaults(ctx, path, program, table)


def _defaults(ctx: typer.Context, path: Path, program: str, table: Mapping[str, Any]) -> dict[str, Any]:
    """The file's table as a nested `default_map`."""
    leaves = dict(_leaves(ctx.command, ()))
    groups = {names[:length] for names in leaves for length in range(1, len(names) + 1)}
    values, tables = _split(table, groups, ())
    result: dict[str, Any] = {}
    known = {name for command in leaves.values() for name in _options(command)}
    for key in values:
        _check_known(path, f"[{program}]", key, known)
    for names, command in leaves.items():
        options = _options(command)
        merged = {key: (f"[{program}]", value) for key, value in values.items() if key in options}
        where = f"[{'.'.join((program, *names))}]"
        for key, value in tables.pop(names, {}).items():
            _check_known(path, where, key, set(options))
            merged[key] = (where, value)
        place = result
        for name in names:
            place = place.setdefault(name, {})
        for key, (origin, value) in merged.items():
            place[options[key].name] = _checked(ctx, options[key], path, f"'{key}' in {origin}", value)
    for names in tables:
        raise ConfigError(
            f"[{'.'.join((program, *names))}] in {path} is a group of commands, not a command.",
            f"Write the options in [{program}], or in the table of one command.",
        )
    return result


def _split(
    table: Mapping[str, Any], groups: set[tuple[str, ...]], prefix: tuple[str, ...]
) -> tuple[dict[str, Any], dict[tuple[str, ...], dict[str, Any]]]:
    """Values of this table, and the tables of commands below it that hold values."""
    values: dict[str, Any] = {}
    tables: dict[tuple[str, ...], dict[str, Any]] = {}
    for raw, value in table.items():
        key = raw.replace("_", "-")
        names = (*prefix, key)
        if isinstance(value, dict) and names in groups:
            inner, deeper = _split(value, groups, names)
            if inner:
                tables[names] = inner
            tables.update(deeper)
        else:
            values[key] = value
    return values, tables


def _checked(ctx: typer.Context, option: Any, path: Path, what: str, value: Any) -> Any:
    """`value` in the form that the option parses, after trying it."""
    if isinstance(value, list) and all(isinstance(item, str) for item in value) and not option.multiple:
        value = ",".join(value)
    elif not isinstance(value, bool | list | dict):
        # As text, so that 1.5 for a whole number is refused and not rounded.
        value = str(value)
    try:
        if isinstance(value, dict) or (isinstance(value, bool) and not option.is_flag):
            raise typer.BadParameter("it is of another type than this option")
        option.process_value(ctx, value)
    except typer.BadParameter as error:
        raise ConfigError(
            f"{what} of {path} cannot be {value!r}: {error.message.rstrip('.')}.",
            "Correct the value or remove the line.",
        ) from error
    return value


def _check_known(path: Path, where: str, key: str, known: set[str]) -> None:
    if key in known:
        return
    close = difflib.get_close_matches(key, known, n=1)
    raise ConfigError(
        f"Unknown key '{key}' in {where} of {path}.",
        f"Did you mean '{close[0]}'?" if close else "Remove it, or see --help for the options there are.",
    )


def _read(path: Path, *, required: bool) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        if not required:
            return {}
        raise ConfigError(
            f"There is no configuration file {path}.", "Check the path after --config."
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"Cannot read {path}: {error}.", "Check the file and its permissions.") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is not valid TOML: {error}.", "Correct that line.") from error


# Typer's own classes are typed as internals that move between its releases, hence Any below.
def _leaves(command: Any, names: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    """(names, command) of everything that can be called below a group."""
    commands: Mapping[str, Any] | None = getattr(command, "commands", None)
    if commands is None:
        yield names, command
        return
    for name, child in commands.items():
        yield from _leaves(child, (*names, name))


def _options(command: Any) -> dict[str, Any]:
    """Options by their long name without dashes."""
    found: dict[str, Any] = {}
    for param in command.params:
        names = [opt.removeprefix("--") for opt in param.opts if opt.startswith("--")]
        if names and names[0] not in _OWN_OPTIONS:
            found[names[0]] = param
    return found
