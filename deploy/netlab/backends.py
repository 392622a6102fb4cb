"""What can carry the link: kernel netem, the user-space link on TUN devices, or a TCP relay."""

from __future__ import annotations

import json
import math
import secrets
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, Protocol

from netlab import namespaces
from netlab.child import Child
from netlab.emulator import DEVICE
from netlab.errors import LinkError
from netlab.profiles import Direction, Profile

RELAY_CANNOT = (
    "loss: bytes only, there are no packets to lose",
    "queue limits: a full sender is made to wait instead",
    "UDP and the delay of TCP's own handshake: the relay answers at once",
    "congestion control: it sees loopback, not the link",
)


class Backend(Protocol):
    """One way to carry the link. Everything it makes goes on the `ExitStack` given to `start`."""

    name: str
    cannot: tuple[str, ...]  # what the profile asks and this backend does not give
    packets: bool  # whether it carries packets (UDP too) between two hosts

    def start(self, stack: ExitStack) -> None:
        """Build the link."""

    def addresses(self, port: int) -> tuple[str, str]:
        """(where the server listens, where the client connects), each HOST:PORT."""

    def inside(self, side: str, command: Sequence[str]) -> list[str]:
        """The command that runs `command` on the host of `side`, "client" or "server"."""

    def reset(self, *, outages: bool, seed: int | None = None, begun_s: float = 0.0) -> int:
        """Empty the link; see `Link.reset`. Returns when, in ns of the monotonic clock."""

    def stats(self) -> dict[str, Any]:
        """Counts since the last reset."""

    @property
    def child(self) -> Child | None:
        """The process without which the link is dead, where there is one."""


class _NamespaceBackend:
    """What both packet links share: two hosts, each with one device named `DEVICE`."""

    packets = True
    cannot: tuple[str, ...] = ()

    def __init__(self, profile: Profile, seed: int) -> None:
        self._profile = profile
        self._seed = seed
        self._pair = ""

    def _configure_devices(self) -> None:
        for namespace, own, peer in self._hosts():
            device = ("dev", DEVICE)
            # without link-local addresses the kernel sends nothing of its own, which would use up draws
            ip = ("-n", namespace)
            namespaces.ip(*ip, "link", "set", *device, "addrgenmode", "none")
            namespaces.ip(
                *ip, "link", "set", *device, "mtu", str(self._profile.mtu), "txqueuelen", "10000", "up"
            )
            namespaces.ip(*ip, "address", "add", own, "peer", peer, *device)

    def _hosts(self) -> tuple[tuple[str, str, str], tuple[str, str, str]]:
        client, server = namespaces.CLIENT_ADDRESS, namespaces.SERVER_ADDRESS
        return (
            (namespaces.client_namespace(self._pair), client, server),
            (namespaces.server_namespace(self._pair), server, client),
        )

    def addresses(self, port: int) -> tuple[str, str]:
        address = f"{namespaces.SERVER_ADDRESS}:{port}"
        return address, address

    def inside(self, side: str, command: Sequence[str]) -> list[str]:
        name = namespaces.client_namespace if side == "client" else namespaces.server_namespace
        return namespaces.inside(name(self._pair), list(command))

    def _forget_connections(self) -> None:
        # what TCP learnt about the path while calibrating must not shape the first connection of a run
        for namespace, _, _ in self._hosts():
            with suppress(LinkError):
                namespaces.ip("-n", namespace, "tcp_metrics", "flush")


class TunBackend(_NamespaceBackend):
    """The user-space link. Everything a profile can ask, seeded."""

    name = "tun"

    def __init__(self, profile: Profile, seed: int, traces: dict[str, Path]) -> None:
        super().__init__(profile, seed)
        self._traces = traces
        self._child: Child | None = None
        self._lead_ns = 0

    def start(self, stack: ExitStack) -> None:
        self._pair = stack.enter_context(namespaces.namespace_pair())
        (client, _, _), (server, _, _) = self._hosts()
        job = {
            "name": self._profile.name,
            "profile": self._profile.to_table(),
            "seed": self._seed,
            "traces": {side: str(path.resolve()) for side, path in self._traces.items()},
            "pair": self._pair,
            "client_namespace": namespaces.namespace_path(client),
            "server_namespace": namespaces.namespace_path(server),
        }
        self._child = stack.enter_context(Child("emulator", job))
        self._configure_devices()
        self._measure_own_cost()
        self.reset(outages=True)

    def _measure_own_cost(self) -> None:
        """Time a link without delay, and take half of that off each direction from now on."""
        assert self._child is not None
        self._child.ask({"do": "bare"})
        command = self.inside("client", probe_command("ping", namespaces.SERVER_ADDRESS, "21", "2"))
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise LinkError(f"Nothing crosses the new link: {done.stderr.strip()}")
        rtts_ms = json.loads(done.stdout)["rtt_ms"]
        if not rtts_ms:
            raise LinkError("Nothing crosses the new link.", "Look for firewall rules that drop ICMP.")
        self._lead_ns = int(statistics.median(rtts_ms) * 1e6 / 2)

    @property
    def child(self) -> Child | None:
        return self._child

    def reset(self, *, outages: bool, seed: int | None = None, begun_s: float = 0.0) -> int:
        assert self._child is not None
        self._forget_connections()
        order = {"outages": outages, "lead_ns": self._lead_ns, "seed": seed, "begun_s": begun_s}
        return int(self._child.ask({"do": "reset", **order})["start_ns"])

    def stats(self) -> dict[str, Any]:
        assert self._child is not None
        own = {"priority": self._child.greeting["priority"], "own_delay_ms": round(self._lead_ns / 1e6, 3)}
        return {**own, **self._child.ask({"do": "stats"})}


def netem_lacks(profile: Profile) -> list[str]:
    """What of the profile kernel netem cannot do."""
    directions = (profile.up, profile.down)
    lacks = []
    if any(direction.trace for direction in directions):
        lacks.append("traces")
    if profile.outages:
        lacks.append("outages")
    if any(direction.queue_bytes for direction in directions):
        lacks.append("a queue in bytes")
    if any(direction.reorder for direction in directions):
        lacks.append("reordering together with a rate")
    if any(direction.loss and direction.burst for direction in directions):
        lacks.append("random and bursty loss at once")
    return lacks


def netem_arguments(direction: Direction, mtu: int) -> list[str]:
    """The `tc ... netem` options of a direction.

    `rate` is always given, since only then does netem's jitter keep packets in order. The limit counts
    packets in flight too, so what the delay holds is added to the queue (the default of 1,000 silently drops
    on long fat links).
    """
    rate_mbit = direction.rate_mbit or 10_000.0
    in_flight = math.ceil(rate_mbit * 1e3 * (direction.delay_ms + direction.jitter_ms) / 8 / mtu)
    arguments = ["limit", str((direction.queue_packets or 1000) + in_flight)]
    arguments += ["delay", f"{direction.delay_ms:g}ms"]
    if direction.jitter_ms:
        arguments.append(f"{direction.jitter_ms:g}ms")
    if direction.loss:
        arguments += ["loss", "random", f"{direction.loss * 100:.6g}%"]
    if burst := direction.burst:
        shares = (burst.enter, burst.leave, burst.loss_bad, burst.loss_good)
        arguments += ["loss", "gemodel", *(f"{share * 100:.6g}%" for share in shares)]
    return [*arguments, "rate", f"{round(rate_mbit * 1e6)}bit"]


def has_netem() -> bool:
    """Whether this kernel has netem, found out by trying in a namespace of its own."""
    probe = f"{namespaces.PREFIX}probe-{secrets.token_hex(4)}"
    try:
        namespaces.ip("netns", "add", probe)
        namespaces.ip("-n", probe, "link", "set", "lo", "up")
        namespaces.tc("-n", probe, "qdisc", "add", "dev", "lo", "root", "netem", "delay", "1ms")
    except LinkError:
        return False
    finally:
        with suppress(LinkError):
            namespaces.ip("netns", "delete", probe)
    return True


class NetemBackend(_NamespaceBackend):
    """A veth pair with kernel netem at both ends."""

    name = "netem"
    child = None

    def start(self, stack: ExitStack) -> None:
        self._pair = stack.enter_context(namespaces.namespace_pair())
        (client, _, _), (server, _, _) = self._hosts()
        peer = ("peer", "name", DEVICE, "netns", server)
        namespaces.ip("-n", client, "link", "add", DEVICE, "type", "veth", *peer)
        for namespace in (client, server):
            # netem counts a 64 KB offloaded segment as one packet: let there be none
            namespaces.ip("-n", namespace, "link", "set", "dev", DEVICE, "gso_max_segs", "1")
        self._configure_devices()
        self.reset(outages=True)

    def reset(self, *, outages: bool, seed: int | None = None, begun_s: float = 0.0) -> int:
        self._forget_connections()
        seed = self._seed if seed is None else seed
        directions = (self._profile.up, self._profile.down)
        for (namespace, _, _), direction in zip(self._hosts(), directions, strict=True):
            command = ("-n", namespace, "qdisc", "replace", "dev", DEVICE, "root", "netem")
            arguments = netem_arguments(direction, self._profile.mtu)
            try:
                namespaces.tc(*command, *arguments, "seed", str(seed))
            except LinkError:  # `seed` is younger than netem
                namespaces.tc(*command, *arguments)
                self.cannot = ("seeded draws: this netem has no `seed`",)
        return time.monotonic_ns()

    def stats(self) -> dict[str, Any]:
        return {
            side: namespaces.tc("-n", namespace, "-s", "qdisc", "show", "dev", DEVICE).strip()
            for side, (namespace, _, _) in zip(("up", "down"), self._hosts(), strict=True)
        }


class RelayBackend:
    """A TCP relay on loopback, for those without the privilege to make namespaces."""

    name = "relay"
    packets = False

    def __init__(self, profile: Profile, rates_mbit: tuple[float | None, float | None], port: int) -> None:
        self._profile = profile
        self._rates = rates_mbit
        self._port = port
        self._child: Child | None = None
        self._relay_port = 0
        extras = []
        if profile.up.trace or profile.down.trace:
            extras.append("traces: the rate is held at the mean of the trace")
        if profile.outages:
            extras.append("outages")
        if profile.up.jitter_ms or profile.down.jitter_ms:
            extras.append("jitter")
        self.cannot = (*RELAY_CANNOT, *extras)

    def start(self, stack: ExitStack) -> None:
        job = {
            "delays_ms": [self._profile.up.delay_ms, self._profile.down.delay_ms],
            "rates_mbit": list(self._rates),
            "server_port": self._port,
        }
        self._child = stack.enter_context(Child("relay", job))
        self._relay_port = self._child.greeting["port"]

    @property
    def child(self) -> Child | None:
        return self._child

    def addresses(self, port: int) -> tuple[str, str]:
        return f"127.0.0.1:{port}", f"127.0.0.1:{self._relay_port}"

    def inside(self, side: str, command: Sequence[str]) -> list[str]:
        return list(command)

    def reset(self, *, outages: bool, seed: int | None = None, begun_s: float = 0.0) -> int:
        assert self._child is not None
        return int(self._child.ask({"do": "reset"})["start_ns"])

    def stats(self) -> dict[str, Any]:
        assert self._child is not None
        return self._child.ask({"do": "stats"})


def probe_command(*arguments: str) -> list[str]:
    """The command of a measuring end; see `probe.py` for the roles."""
    return [sys.executable, "-I", "-S", str(Path(__file__).parent / "probe.py"), *arguments]


def free_port() -> int:
    """A loopback port that nobody listens on at this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def environment(backend: Backend) -> dict[str, Any]:
    """What the machine adds to a result: kernel, congestion control, offloads, as the client has them."""

    def output(*command: str) -> str:
        done = subprocess.run(backend.inside("client", command), capture_output=True, text=True, check=False)
        return done.stdout.strip()

    record: dict[str, Any] = {
        "kernel": output("uname", "-sr"),
        "congestion_control": output("cat", "/proc/sys/net/ipv4/tcp_congestion_control"),
    }
    if backend.packets:
        wanted = ("gso_max_segs", "gso_max_size", "tso_max_segs", "gro_max_size", "mtu", "qdisc")
        details = output(namespaces.tool("ip", "iproute2"), "-d", "link", "show", "dev", DEVICE).split()
        record["offloads"] = {key: details[details.index(key) + 1] for key in wanted if key in details}
    return record
