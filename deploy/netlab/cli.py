"""The command line of the link laboratory.

argparse and not the project's Typer: this runs on bare hosts, as root, with the system's own Python.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from netlab.errors import LinkError
from netlab.link import BACKENDS, TRACES_VARIABLE, Link
from netlab.namespaces import sweep
from netlab.profiles import PROFILES_FILE, Direction, load_profiles


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status (2 for what the link refuses)."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    # argparse's own remainder would take our options too
    end = words.index("--") if "--" in words else len(words)
    options = _parser().parse_args(words[:end])
    options.command = words[end + 1 :]
    # a polite kill unwinds the context managers too
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        return int(options.action(options))
    except (LinkError, ValueError) as error:
        print(f"netlab: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="netlab", description="An emulated link between two hosts on this machine."
    )
    actions = parser.add_subparsers(required=True, metavar="COMMAND")
    listing = actions.add_parser("profiles", help="list the profiles")
    listing.add_argument("--profiles", type=Path, default=PROFILES_FILE, metavar="FILE")
    listing.set_defaults(action=_list_profiles)
    clean = actions.add_parser("clean", help="remove what killed runs have left (every start does so too)")
    clean.set_defaults(action=_clean)
    measure = actions.add_parser("calibrate", help="build the link, measure it, print JSON")
    measure.set_defaults(action=_calibrate)
    run = actions.add_parser(
        "run",
        help="run a command on the client's host",
        usage="netlab run PROFILE [options] -- CMD",
        description="{listen} and {server} in the commands stand for the address that the server listens on "
        "and the one that the client connects to.",
    )
    run.set_defaults(action=_run)
    for action in (measure, run):
        action.add_argument("profile", metavar="PROFILE")
        action.add_argument("--profiles", type=Path, default=PROFILES_FILE, metavar="FILE")
        action.add_argument(
            "--traces", type=Path, metavar="DIR", help=f"trace files; default: ${TRACES_VARIABLE}"
        )
        action.add_argument("--seed", type=int, default=0)
        action.add_argument("--backend", choices=BACKENDS, default="auto")
        action.add_argument("--port", type=int, default=50051, help="where the server listens; 0 picks one")
    measure.add_argument("--no-tcp", action="store_true", help="do not measure a TCP flow beside")
    run.add_argument("--server", metavar="COMMAND", help="a command for the server's host, started first")
    run.add_argument("--uncalibrated", action="store_true", help="do not measure, do not refuse")
    run.add_argument("--json", type=Path, metavar="FILE", help="write calibration and packet counts here")
    return parser


def _list_profiles(options: argparse.Namespace) -> int:
    print(f"{'profile':28}{'RTT ms':>8}{'up Mbit/s':>12}{'down':>8}  about")
    for profile in load_profiles(options.profiles).values():
        up, down = _rate(profile.up), _rate(profile.down)
        print(f"{profile.name:28}{profile.rtt_ms:8g}{up:>12}{down:>8}  {profile.about}")
    return 0


def _rate(direction: Direction) -> str:
    return "trace" if direction.trace else f"{direction.rate_mbit:g}" if direction.rate_mbit else "-"


def _clean(options: argparse.Namespace) -> int:
    for pair in sweep():
        print(f"removed {pair}")
    return 0


def _link(options: argparse.Namespace, **more: Any) -> Link:
    profiles = load_profiles(options.profiles)
    if options.profile not in profiles:
        raise ValueError(f"no profile {options.profile!r}; known: {', '.join(profiles)}")
    return Link(
        profiles[options.profile],
        seed=options.seed,
        backend=options.backend,
        traces=options.traces,
        server_port=options.port,
        **more,
    )


def _calibrate(options: argparse.Namespace) -> int:
    link = _link(options, measure_tcp=not options.no_tcp)
    try:
        with link:
            pass
    finally:
        if link.calibration is not None:
            print(json.dumps(link.calibration, indent=2))
    return 0


def _run(options: argparse.Namespace) -> int:
    command = options.command
    if not command:
        raise ValueError("no command given after --")
    with _link(options, calibrated=not options.uncalibrated) as link:
        for lack in link.cannot:
            print(f"netlab: this link ({link.backend.name}) cannot do {lack}", file=sys.stderr)
        if options.server:
            server = link.popen_server(_fill(shlex.split(options.server), link))
            link.wait_until_listening(server)
            link.reset()
        environment = {
            **os.environ,
            "NETLAB_SERVER": link.server_address,
            "NETLAB_PROFILE": link.profile.name,
        }
        status = link.run_client(_fill(command, link), env=environment).returncode
        if options.json:
            record = {"calibration": link.calibration, "run": link.stats()}
            options.json.write_text(json.dumps(record, indent=2) + "\n")
    return status


def _fill(command: Sequence[str], link: Link) -> list[str]:
    return [
        word.replace("{listen}", link.listen_address).replace("{server}", link.server_address)
        for word in command
    ]
