"""The link process: two TUN devices in two namespaces, and packets that wait in between.

Started by `backends.py`, which talks to it in JSON lines: it reads orders, `{"do": "reset"}` and the like,
and answers each but "stop" with one line. When its standard input ends without a "stop" its owner has died,
and it removes the namespaces itself.
"""

from __future__ import annotations

import ctypes
import fcntl
import gc
import json
import os
import select
import signal
import struct
import sys
import time
from pathlib import Path
from typing import Any

from netlab.lane import NS_PER_S, Lane, read_trace
from netlab.profiles import Direction, Profile, parse_profile

DEVICE = "link0"
_TUNSETIFF = 0x400454CA
_IFF_TUN_NO_PI = 0x0001 | 0x1000
_CLONE_NEWNET = 0x40000000
_PR_SET_TIMERSLACK = 29
_READS_PER_TURN = (
    32  # packets read before deliveries are looked at again, so that a flood delays nothing much
)


def open_tun(namespace_path: str) -> int:
    """A TUN device named `DEVICE` in the namespace; it lives as long as the descriptor.

    Raises:
        OSError: no privilege, or no TUN in this kernel.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    namespace = os.open(namespace_path, os.O_RDONLY)
    try:
        if libc.setns(namespace, _CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), f"setns {namespace_path}")
    finally:
        os.close(namespace)
    tun = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(tun, _TUNSETIFF, struct.pack("16sH22x", DEVICE.encode(), _IFF_TUN_NO_PI))
    return tun


def raise_priority() -> str:
    """Run ahead of the models that share the CPU, precisely woken. Returns how, for the record."""
    ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0)
    try:
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(2))  # the probes of a calibration have 1
    except OSError:
        try:
            os.nice(-15)
        except OSError:
            return "normal"
        return "nice -15"
    return "real-time (SCHED_RR)"


class Emulator:
    """The loop over both directions. `traces` maps "up" and "down" to opportunities, where there are any."""

    def __init__(
        self, profile: Profile, seed: int, tuns: tuple[int, int], traces: dict[str, list[int]]
    ) -> None:
        self._profile = profile
        self._seed = seed
        self._traces = traces
        self._client, self._server = tuns
        self._unwritten = 0
        self.reset(outages=False, lead_ns=0)

    def reset(
        self, *, outages: bool, lead_ns: int, seed: int | None = None, begun_s: float = 0.0
    ) -> dict[str, Any]:
        """Forget every packet; draws begin anew at the moment that is returned, trace and outages `begun_s`
        before it."""
        self._start_ns = time.monotonic_ns()
        self._cpu_start = time.process_time()
        up, down = (
            Lane(
                direction,
                seed=self._seed if seed is None else seed,
                name=name,
                start_ns=self._start_ns - int(begun_s * NS_PER_S),
                outages=self._profile.outages if outages else None,
                trace_ms=self._traces.get(name),
                lead_ns=lead_ns,
            )
            for name, direction in (("up", self._profile.up), ("down", self._profile.down))
        )
        self._connect(up, down)
        return {"start_ns": self._start_ns}

    def _connect(self, up: Lane, down: Lane) -> None:
        self._ways = {self._client: (up, self._server), self._server: (down, self._client)}
        self._lanes = {"up": up, "down": down}

    def stats(self) -> dict[str, Any]:
        """Counts of both directions, CPU use and lateness since the last reset."""
        cpu_s = time.process_time() - self._cpu_start
        wall_s = (time.monotonic_ns() - self._start_ns) / NS_PER_S
        lanes = {
            name: {
                "num_offered": lane.counts.num_offered,
                "num_delivered": lane.counts.num_delivered,
                "num_lost": lane.counts.num_lost,
                "num_overflowed": lane.counts.num_overflowed,
                "num_cut": lane.counts.num_cut,
                "delivered_bytes": lane.counts.delivered_bytes,
            }
            for name, lane in self._lanes.items()
        }
        num_packets = sum(lane.counts.num_offered for lane in self._lanes.values())
        lateness = [
            sum(bins) for bins in zip(*(lane.counts.lateness for lane in self._lanes.values()), strict=True)
        ]
        return {
            **lanes,
            "num_unwritten": self._unwritten,
            "cpu_s": round(cpu_s, 4),
            "cpu_share": round(cpu_s / wall_s, 4) if wall_s else 0.0,
            "cpu_us_per_packet": round(cpu_s * 1e6 / num_packets, 2) if num_packets else None,
            "late_us_p50": _quantile(lateness, 0.5),
            "late_us_p99": _quantile(lateness, 0.99),
        }

    def serve(self, control: int) -> bool:
        """Carry packets until told to stop (True) or until the owner is gone (False)."""
        waiting = [self._client, self._server, control]
        unread = b""
        while True:
            dues = [due for lane, _ in self._ways.values() if (due := lane.next_due_ns()) is not None]
            timeout = max(0, min(dues) - time.monotonic_ns()) / NS_PER_S if dues else None
            for source in select.select(waiting, [], [], timeout)[0]:
                if source != control:
                    self._read(source)
                    continue
                received = os.read(control, 4096)
                if not received:
                    return False
                *lines, unread = (unread + received).split(b"\n")
                for line in lines:
                    if not self._obey(json.loads(line)):
                        return True
            self._deliver()

    def _read(self, source: int) -> None:
        lane = self._ways[source][0]
        for _ in range(_READS_PER_TURN):
            try:
                packet = os.read(source, 65_535)
            except BlockingIOError:
                return
            lane.offer(time.monotonic_ns(), packet)

    def _deliver(self) -> None:
        for lane, sink in self._ways.values():
            for packet in lane.due(time.monotonic_ns()):
                try:
                    os.write(sink, packet)
                except (
                    OSError
                ):  # the device is down, or its receiver has no room: the packet is lost, as on any host
                    self._unwritten += 1

    def _obey(self, order: dict[str, Any]) -> bool:
        match order["do"]:
            case "reset":
                _say(self.reset(**{key: order[key] for key in ("outages", "lead_ns", "seed", "begun_s")}))
            case "bare":  # no delay and no limit: what remains is the link's own cost
                bare = Direction(delay_ms=0)
                self._connect(*(Lane(bare, seed=0, name=name, start_ns=0) for name in ("up", "down")))
                _say({})
            case "stats":
                _say(self.stats())
            case "stop":
                return False
        return True


def _quantile(histogram: list[int], share: float) -> int | None:
    """Upper edge, in microseconds, of the bin that holds the quantile."""
    total, seen = sum(histogram), 0
    for bits, count in enumerate(histogram):
        seen += count
        if count and seen >= share * total:
            return (1 << bits) - 1
    return None


def _say(answer: dict[str, Any]) -> None:
    print(json.dumps(answer), flush=True)


def main() -> None:
    """Entry of the process; the first line on standard input is the job."""
    # Ctrl-C reaches the whole terminal group; only the owner decides when the link goes
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # unbuffered, so that orders which arrive together with the job stay in the pipe for `serve`
    with open(0, "rb", buffering=0, closefd=False) as stdin:
        job = json.loads(stdin.readline())
    profile = parse_profile(job["name"], job["profile"])
    traces = {name: read_trace(Path(path)) for name, path in job["traces"].items()}
    tuns = (open_tun(job["client_namespace"]), open_tun(job["server_namespace"]))
    emulator = Emulator(profile, job["seed"], tuns, traces)
    gc.freeze()
    gc.disable()  # nothing here makes cycles, and a collection would be a delay that nobody asked for
    _say({"ready": True, "priority": raise_priority()})
    if not emulator.serve(0):
        from netlab.namespaces import remove_pair

        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
        sys.stdout.close()
        remove_pair(job["pair"])
