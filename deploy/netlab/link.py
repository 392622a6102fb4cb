"""The link as a context manager: two hosts, commands on either, and nothing left behind."""

from __future__ import annotations

import os
import select
import subprocess
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

from netlab import namespaces
from netlab.backends import (
    Backend,
    NetemBackend,
    RelayBackend,
    TunBackend,
    environment,
    free_port,
    has_netem,
    netem_lacks,
)
from netlab.calibrate import calibrate
from netlab.errors import LinkError
from netlab.lane import read_trace
from netlab.profiles import Profile, load_profiles

BACKENDS = ("auto", "netem", "tun", "relay")
TRACES_VARIABLE = "SPECWIRE_TRACES"
GRACE_S = 5.0  # between asking a command to end and making it


class Link:
    """A client host and a server host, joined as a profile says.

        with Link("leo", seed=7) as link:
            server = link.popen_server(["my-server", "--listen", link.listen_address])
            link.wait_until_listening(server)
            link.run_client(["my-client", "--connect", link.server_address], check=True)

    Args:
        profile: a profile, or the name of one in `profiles.toml`.
        seed: same seed, same fate for packet n of each direction.
        backend: "auto" takes netem where the kernel has it and the profile fits, else the user-space link,
            else (no privilege for namespaces) the relay; `cannot` then says what is missing.
        traces: folder of trace files; default: the environment variable SPECWIRE_TRACES.
        server_port: where the server will listen; 0 picks one.
        calibrated: measure on entry and refuse a link that misses its profile.
        measure_tcp: also measure what one TCP flow gets (2-12 s more).

    Raises (on entry):
        LinkError: the link cannot be built, or misses its profile by more than 10 % or 2 ms.
        ValueError: no such profile or backend.
    """

    def __init__(
        self,
        profile: Profile | str,
        *,
        seed: int = 0,
        backend: str = "auto",
        traces: Path | None = None,
        server_port: int = 50051,
        calibrated: bool = True,
        measure_tcp: bool = False,
    ) -> None:
        self.profile = find_profile(profile) if isinstance(profile, str) else profile
        if backend not in BACKENDS:
            raise ValueError(f"backend {backend!r} is not one of {', '.join(BACKENDS)}")
        self.seed = seed
        self._wanted_backend = backend
        self._trace_folder = traces
        self._port = server_port or free_port()
        self._calibrated = calibrated
        self._measure_tcp = measure_tcp
        self._stack = ExitStack()
        self._running: set[subprocess.Popen[Any]] = set()
        self._failure: str | None = None
        self._closing = False
        self.calibration: dict[str, Any] | None = None
        self.traces: dict[str, list[int]] = {}
        self.backend: Backend

    def __enter__(self) -> Link:
        with ExitStack() as stack:
            files = self._trace_files()
            self.traces = {side: read_trace(path) for side, path in files.items()}
            self.backend = self._choose_backend(files)
            self.backend.start(stack)
            self._watch(stack)
            stack.callback(self._stop_commands)
            if self._calibrated:
                self.calibration = calibrate(self, tcp=self._measure_tcp)
                self.calibration["environment"] = environment(self.backend)
                if self.calibration["misses"]:
                    misses = "; ".join(self.calibration["misses"])
                    raise LinkError(
                        f"The link misses profile {self.profile.name!r}: {misses}.",
                        "Free the machine of other work, or choose a slower profile.",
                    )
            self.backend.reset(outages=True)
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    @property
    def listen_address(self) -> str:
        """HOST:PORT for the server to listen on."""
        return self.backend.addresses(self._port)[0]

    @property
    def server_address(self) -> str:
        """HOST:PORT for the client to connect to."""
        return self.backend.addresses(self._port)[1]

    @property
    def server_host(self) -> str:
        """The server's address as its own host sees it."""
        return self.listen_address.rsplit(":", 1)[0]

    @property
    def client_host(self) -> str:
        """The client's address."""
        return namespaces.CLIENT_ADDRESS if self.backend.packets else "127.0.0.1"

    @property
    def cannot(self) -> tuple[str, ...]:
        """What this link cannot do, in words; empty for the packet links."""
        return self.backend.cannot

    def mean_rate_mbit(self, side: str) -> float | None:
        """The rate of a direction, or the mean of its trace; None when unlimited."""
        if trace := self.traces.get(side):
            return len(trace) * 1500 * 8e-3 / trace[-1]
        return (self.profile.up if side == "up" else self.profile.down).rate_mbit

    def stats(self) -> dict[str, Any]:
        """Counts of both directions and the link's own cost since the last reset."""
        return self.backend.stats()

    def reset(self, *, seed: int | None = None, begun_s: float = 0.0) -> None:
        """Empty the link; draws, trace and outages begin anew: each arm of an experiment gets one link.

        Args:
            seed: of the draws from now on; None: the link's own.
            begun_s: how far into the trace, and into the time between outages, to begin.
        """
        self.backend.reset(outages=True, seed=seed, begun_s=begun_s)

    def popen_client(self, command: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
        """Start a command on the client's host; options as of `subprocess.Popen`. It ends with the link."""
        return self._popen("client", command, options)

    def popen_server(self, command: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
        """Start a command on the server's host; options as of `subprocess.Popen`. It ends with the link."""
        return self._popen("server", command, options)

    def run_client(
        self, command: Sequence[str], *, timeout_s: float | None = None, check: bool = False, **options: Any
    ) -> subprocess.CompletedProcess[Any]:
        """Run a command on the client's host to its end; options as of `subprocess.run`.

        Raises:
            LinkError: the link died meanwhile.
            subprocess.TimeoutExpired: it took longer than `timeout_s`, and was killed.
            subprocess.CalledProcessError: with `check`, it failed.
        """
        if options.pop("capture_output", False):
            options |= {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        process = self.popen_client(command, **options)
        with process:
            try:
                output, errors = process.communicate(timeout=timeout_s)
            except BaseException:
                process.kill()
                raise
        if self._failure is not None:
            raise LinkError(self._failure)
        done = subprocess.CompletedProcess(command, process.returncode, output, errors)
        if check:
            done.check_returncode()
        return done

    def wait_until_listening(self, server: subprocess.Popen[Any], timeout_s: float = 60.0) -> None:
        """Wait until something on the server's host listens on the port; sends nothing over the link.

        Raises:
            LinkError: the server ended, or took longer than `timeout_s`.
        """
        deadline = time.monotonic() + timeout_s
        while not _listens(server.pid, self._port):
            if server.poll() is not None:
                raise LinkError(f"The server ended with code {server.returncode} before it listened.")
            if time.monotonic() > deadline:
                raise LinkError(f"The server did not listen on port {self._port} within {timeout_s:g} s.")
            time.sleep(0.02)

    def _popen(self, side: str, command: Sequence[str], options: dict[str, Any]) -> subprocess.Popen[Any]:
        if self._failure is not None:
            raise LinkError(self._failure)
        process = subprocess.Popen(self.backend.inside(side, command), **options)
        self._running = {other for other in self._running if other.poll() is None} | {process}
        return process

    def _stop_commands(self) -> None:
        """End what still runs: asked first, then by force."""
        alive = [process for process in self._running if process.poll() is None]
        for process in alive:
            process.terminate()
        for process in alive:
            try:
                process.wait(timeout=GRACE_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _watch(self, stack: ExitStack) -> None:
        """End every command when the link process dies: they would wait for ever, and measure nothing."""
        child = self.backend.child
        if child is None:
            return
        pidfd = os.pidfd_open(child.process.pid)
        stopped_read, stopped_write = os.pipe()

        def watch() -> None:
            if stopped_read not in select.select([pidfd, stopped_read], [], [])[0]:
                self._failure = "The link process died."
                for process in list(self._running):
                    process.terminate()

        thread = threading.Thread(target=watch, name="netlab-watch", daemon=True)
        thread.start()

        def stop() -> None:
            os.write(stopped_write, b".")
            thread.join()
            for descriptor in (pidfd, stopped_read, stopped_write):
                os.close(descriptor)

        stack.callback(stop)

    def _choose_backend(self, files: dict[str, Path]) -> Backend:
        wanted = self._wanted_backend
        if wanted != "relay":
            reason = namespaces.why_not()
            if reason is not None and wanted != "auto":
                raise LinkError(
                    f"No namespaces can be made here: {reason}", "Run as root, or choose the relay."
                )
            if reason is not None:
                wanted = "relay"
        if wanted == "netem" and (lacks := netem_lacks(self.profile)):
            raise LinkError(f"netem cannot do: {', '.join(lacks)}.", "Choose the tun backend.")
        if wanted == "netem" and not has_netem():
            raise LinkError("This kernel has no netem.", "Load sch_netem, or choose the tun backend.")
        if wanted == "auto":
            wanted = "netem" if not netem_lacks(self.profile) and has_netem() else "tun"
        if wanted == "netem":
            return NetemBackend(self.profile, self.seed)
        if wanted == "tun":
            return TunBackend(self.profile, self.seed, files)
        return RelayBackend(
            self.profile, (self.mean_rate_mbit("up"), self.mean_rate_mbit("down")), self._port
        )

    def _trace_files(self) -> dict[str, Path]:
        sides = (("up", self.profile.up), ("down", self.profile.down))
        names = {side: direction.trace for side, direction in sides if direction.trace}
        if not names:
            return {}
        folder = self._trace_folder or os.environ.get(TRACES_VARIABLE)
        if not folder:
            raise LinkError(
                f"Profile {self.profile.name!r} needs trace files.",
                f"Give their folder with --traces or {TRACES_VARIABLE}.",
            )
        files = {side: Path(folder) / name for side, name in names.items()}
        for path in files.values():
            if not path.is_file():
                raise LinkError(f"There is no trace {path}.", "mahimahi's repository has them in traces/.")
        return files


def find_profile(name: str) -> Profile:
    """A profile of `profiles.toml`.

    Raises:
        ValueError: there is none of that name; the text lists those there are.
    """
    profiles = load_profiles()
    if name not in profiles:
        raise ValueError(f"no profile {name!r}; known: {', '.join(profiles)}")
    return profiles[name]


def _listens(pid: int, port: int) -> bool:
    """Whether anything listens on the port in the network namespace of a process."""
    for table in ("tcp", "tcp6"):
        try:
            lines = Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            fields = line.split()
            if fields[3] == "0A" and int(fields[1].rpartition(":")[2], 16) == port:
                return True
    return False
