"""Pairs of network namespaces: made, found again, and removed with everything that runs in them."""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from netlab.errors import LinkError

PREFIX = "specwire-"
CLIENT_ADDRESS = "10.213.77.1"
SERVER_ADDRESS = "10.213.77.2"


def tool(name: str, package: str) -> str:
    """The path of a system tool, also where /usr/sbin is not on the PATH of an ordinary user.

    Raises:
        LinkError: it is not installed; the text names the Debian package.
    """
    found = shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")
    if found is None:
        raise LinkError(f"The tool `{name}` is not installed.", f"Install it: apt-get install {package}")
    return found


def ip(*arguments: str) -> str:
    """Run `ip ARGUMENTS` and return what it printed.

    Raises:
        LinkError: with what `ip` said.
    """
    return _run(tool("ip", "iproute2"), *arguments)


def tc(*arguments: str) -> str:
    """Run `tc ARGUMENTS` and return what it printed.

    Raises:
        LinkError: with what `tc` said.
    """
    return _run(tool("tc", "iproute2"), *arguments)


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise LinkError(f"`{' '.join(command)}` failed: {done.stderr.strip()}")
    return done.stdout


def client_namespace(pair: str) -> str:
    """Name of the client's namespace of a pair."""
    return f"{pair}-c"


def server_namespace(pair: str) -> str:
    """Name of the server's namespace of a pair."""
    return f"{pair}-s"


def namespace_path(namespace: str) -> str:
    """The file that iproute2 keeps a namespace in."""
    return f"/run/netns/{namespace}"


def inside(namespace: str, command: list[str]) -> list[str]:
    """The command that runs `command` in a namespace, and becomes it: the process id is the same."""
    return [tool("ip", "iproute2"), "netns", "exec", namespace, *command]


def why_not() -> str | None:
    """Why this process cannot make namespaces; None when it can. Finds out by trying."""
    probe = f"{PREFIX}probe-{secrets.token_hex(4)}"
    try:
        ip("netns", "add", probe)
    except LinkError as error:
        return str(error)
    try:
        ip("-n", probe, "link", "set", "lo", "up")
    except LinkError as error:
        return str(error)
    finally:
        with suppress(LinkError):
            ip("netns", "delete", probe)
    return None


@contextmanager
def namespace_pair() -> Iterator[str]:
    """Two empty namespaces with loopback up and no IPv6 chatter; yields the name of the pair.

    Removes first what owners that died have left, and last what it made. A lock that the kernel gives back
    when a process ends tells the living from the dead, whatever process ids they have.
    """
    sweep()
    pair = f"{PREFIX}{secrets.token_hex(4)}"
    lock = _lock_file(pair).open("w")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for namespace in (client_namespace(pair), server_namespace(pair)):
            ip("netns", "add", namespace)
            ip("-n", namespace, "link", "set", "lo", "up")
        yield pair
    finally:
        remove_pair(pair)
        lock.close()


def sweep() -> list[str]:
    """Remove every pair whose owner is dead. Returns their names."""
    with suppress(FileNotFoundError):
        names = [path.name for path in Path("/run/netns").iterdir()]
        pairs = {name[:-2] for name in names if name.startswith(PREFIX) and name.endswith(("-c", "-s"))}
        return [pair for pair in sorted(pairs) if _is_orphan(pair) and remove_pair(pair)]
    return []


def remove_pair(pair: str) -> bool:
    """Kill what runs in the two namespaces and delete them; True when there was one. Safe to repeat."""
    found = False
    for namespace in (client_namespace(pair), server_namespace(pair)):
        if not Path(namespace_path(namespace)).exists():
            continue
        found = True
        with suppress(LinkError):
            for pid in ip("netns", "pids", namespace).split():
                if int(pid) != os.getpid():
                    with suppress(ProcessLookupError):
                        os.kill(int(pid), signal.SIGKILL)
        with suppress(LinkError):
            ip("netns", "delete", namespace)
    _lock_file(pair).unlink(missing_ok=True)
    return found


def _is_orphan(pair: str) -> bool:
    path = _lock_file(pair)
    try:
        with path.open("r+") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except FileNotFoundError:
        # either its owner is about to write the lock, or is removing the pair, or died between the two
        with suppress(FileNotFoundError):
            age_s = time.time() - Path(namespace_path(client_namespace(pair))).stat().st_ctime
            return age_s > 60
        return False
    return True


def _lock_file(pair: str) -> Path:
    folder = Path("/run") if os.access("/run", os.W_OK) else Path(tempfile.gettempdir())
    return folder / f"{pair}.lock"
