"""Measure a link before it is used: round-trip time and throughput both ways, against the profile.

Throughput of a packet link is that of an overdriven train of UDP packets, which shows the link and nothing of
TCP; what one TCP flow gets is measured beside it on request. A relay has no packets: there TCP measures both.
"""

from __future__ import annotations

import json
import statistics
import subprocess
from collections.abc import Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import pairwise
from typing import IO, TYPE_CHECKING, Any

from netlab.backends import probe_command
from netlab.errors import LinkError
from netlab.lane import NS_PER_MS, NS_PER_S, Lane

if TYPE_CHECKING:
    from collections.abc import Iterator

    from netlab.link import Link

RELATIVE_TOLERANCE = 0.10
RTT_TOLERANCE_MS = 2.0
_FLOW_PORT = 9
_TRAIN_PORT = 10
_TRAIN_S = 0.6
_TRACE_TRAIN_S = 1.5
_OVERDRIVE = 1.2
_NUM_ECHOES = 41


@dataclass(slots=True)
class Calibration:
    """What was asked, what was measured, and every miss, in words."""

    asked: dict[str, float | None] = field(default_factory=dict)
    measured: dict[str, float | None] = field(default_factory=dict)
    misses: list[str] = field(default_factory=list)

    def compare(self, name: str, asked: float | None, measured: float | None, allowed: float) -> None:
        """Record one figure; `asked` None means that the profile sets none."""
        self.asked[name] = asked if asked is None else round(asked, 3)
        self.measured[name] = measured if measured is None else round(measured, 3)
        if asked is None:
            return
        if measured is None:
            self.misses.append(f"{name}: nothing came through, asked {asked:.3f}")
        elif abs(measured - asked) > allowed:
            self.misses.append(f"{name}: measured {measured:.3f}, asked {asked:.3f} +- {allowed:.3f}")


def rtt_tolerance_ms(rtt_ms: float, own_ms: float | None) -> float:
    """How far the round trip may miss: 10 % or 2 ms, whichever is more, unless the profile is stricter."""
    return own_ms if own_ms is not None else max(RELATIVE_TOLERANCE * rtt_ms, RTT_TOLERANCE_MS)


def calibrate(link: Link, *, tcp: bool = False) -> dict[str, Any]:
    """Measure a started link, outages off meanwhile. Takes about 3 s and 4 round trips; `tcp` adds 2-12 s.

    Raises:
        LinkError: a probe failed. (Missing the profile is reported in "misses", not raised.)
    """
    result = Calibration()
    profile = link.profile
    with _probe_server(link) as reports:
        rtts_ms, expected_ms = _measure_rtt(link)
        allowed_ms = rtt_tolerance_ms(expected_ms, profile.rtt_tolerance_ms)
        result.compare("rtt_ms", expected_ms, statistics.median(rtts_ms) if rtts_ms else None, allowed_ms)
        spread = statistics.quantiles(rtts_ms, n=20) if len(rtts_ms) > 1 else [None] * 19
        result.measured["rtt_ms_p5"], result.measured["rtt_ms_p95"] = (
            value if value is None else round(value, 3) for value in (spread[0], spread[-1])
        )
        for side in ("up", "down"):
            if link.backend.packets:
                _compare_rate(result, f"{side}_mbit", *_best_train(link, side))
                if tcp:
                    result.measured[f"tcp_{side}_mbit"] = round(_measure_flow(link, side, reports), 3)
            elif rate_mbit := link.mean_rate_mbit(side):
                _compare_rate(result, f"{side}_mbit", rate_mbit, _measure_flow(link, side, reports))
        link_cost = link.stats()
    return {
        "profile": profile.name,
        "backend": link.backend.name,
        "seed": link.seed,
        "asked": result.asked,
        "measured": result.measured,
        "passed": not result.misses,
        "misses": result.misses,
        "cannot": list(link.backend.cannot),
        "link_process": link_cost,
    }


def _compare_rate(result: Calibration, name: str, asked: float | None, measured: float | None) -> None:
    result.compare(name, asked, measured, RELATIVE_TOLERANCE * asked if asked else 0.0)


def _measure_rtt(link: Link) -> tuple[list[float], float]:
    """Round trips of small echoes, and the median that the profile promises for them."""
    start_ns = link.backend.reset(outages=False)
    expected_ms = link.profile.rtt_ms
    if link.backend.packets:
        command = probe_command("ping", link.server_host, str(_NUM_ECHOES), "12")
    else:  # one by one: keep long links short
        count = min(_NUM_ECHOES, max(5, int(2000 / max(1.0, expected_ms))))
        command = probe_command("tcp-ping", *link.server_address.split(":"), str(count))
    result = _finish(link.popen_client(command, stdout=subprocess.PIPE, text=True))
    if link.traces and result["sent_ns"]:
        expected_ms = _expected_trace_rtt_ms(link, start_ns, result["sent_ns"])
    return result["rtt_ms"], expected_ms


def _expected_trace_rtt_ms(link: Link, start_ns: int, sent_ns: Sequence[int]) -> float:
    """The median round trip of these very echoes by the trace: its gaps are part of the delay."""
    up, down = (
        Lane(direction, seed=0, name=side, start_ns=start_ns, trace_ms=link.traces.get(side))
        for side, direction in (("up", link.profile.up), ("down", link.profile.down))
    )
    size = 28  # bytes of an echo with its headers
    rtts_ms = []
    for sent in sent_ns:
        middle = up.transmitter.depart(sent, size) + link.profile.up.delay_ms * NS_PER_MS
        end = down.transmitter.depart(int(middle), size) + link.profile.down.delay_ms * NS_PER_MS
        rtts_ms.append((end - sent) / NS_PER_MS)
    return statistics.median(rtts_ms)


def _best_train(link: Link, side: str) -> tuple[float | None, float | None]:
    """Up to three trains: a busy machine may send one too slowly, which says nothing of the link."""
    for _ in range(3):
        asked, measured = _measure_train(link, side)
        if asked is None or (measured and abs(measured - asked) <= RELATIVE_TOLERANCE * asked):
            break
    return asked, measured


def _measure_train(link: Link, side: str) -> tuple[float | None, float | None]:
    """(asked, measured) rate of a direction in Mbit/s, from a train faster than the link; Nones if unlimited.

    With a trace, "asked" is what the trace allows in the very time that the train took.
    """
    profile = link.profile
    direction = profile.up if side == "up" else profile.down
    transmitter, duration_s = None, _TRAIN_S
    start_ns = link.backend.reset(outages=False)
    if side in link.traces:
        duration_s = _TRACE_TRAIN_S
        lane = Lane(direction, seed=0, name=side, start_ns=start_ns, trace_ms=link.traces[side])
        transmitter = lane.transmitter
        windows = [start_ns + i * NS_PER_S // 10 for i in range(30)]
        peak_bytes = max(transmitter.capacity_bytes(at, at + NS_PER_S // 10) for at in windows)
        rate_mbit = max(1.0, peak_bytes * 80e-6)
    elif direction.rate_mbit:
        rate_mbit = direction.rate_mbit
    else:
        return None, None
    num_packets = max(20, int(rate_mbit * _OVERDRIVE * 1e6 * duration_s / 8 / profile.mtu))
    sender, receiver = (
        (link.popen_client, link.popen_server)
        if side == "up"
        else (
            link.popen_server,
            link.popen_client,
        )
    )
    target = (link.client_host if side == "down" else link.server_host, str(_TRAIN_PORT))
    gap_s = max(late - early for early, late in pairwise(link.traces.get(side, [0, 0]))) / 1000
    idle_s = 0.5 + direction.jitter_ms / 1000 + gap_s
    receive = probe_command(
        "train-receive", *target, str(duration_s + 5 + direction.delay_ms / 1000 + gap_s), str(idle_s)
    )
    receiving = receiver(receive, stdout=subprocess.PIPE, text=True)
    _read_line(receiving.stdout)
    send = probe_command(
        "train-send", *target, str(rate_mbit * _OVERDRIVE), str(num_packets), str(profile.mtu)
    )
    _finish(sender(send, stdout=subprocess.PIPE, text=True))
    train = _finish(receiving)
    took_ns = train["last_ns"] - train["first_ns"]
    if train["num_packets"] < 2 or took_ns <= 0:
        return rate_mbit, None
    if transmitter is not None:
        delay_ns = int(direction.delay_ms * NS_PER_MS)
        window = (train["first_ns"] - delay_ns, train["last_ns"] - delay_ns)
        rate_mbit = transmitter.capacity_bytes(*window) * 8e3 / took_ns
    return rate_mbit, train["bytes_after_first"] * 8e3 / took_ns


def _measure_flow(link: Link, side: str, reports: IO[str]) -> float:
    """Goodput of one TCP flow in Mbit/s, once slow start is over."""
    link.backend.reset(outages=False)
    least_s = 2.0 if link.backend.packets else 1.0  # a relay has no slow start of its own
    seconds = min(6.0, max(least_s, 10 * link.profile.rtt_ms / 1000))
    mode = "U" if side == "up" else "D"
    command = probe_command("flow", mode, *_endpoint(link, _FLOW_PORT), str(seconds))
    client = link.popen_client(command, stdout=subprocess.PIPE, text=True)
    if mode == "D":
        return float(_finish(client)["tail_mbit"])
    report = json.loads(_read_line(reports))
    client.kill()
    _close(client)
    return float(report["tail_mbit"])


@contextmanager
def _probe_server(link: Link) -> Iterator[IO[str]]:
    """The answering end; yields the stream of its reports."""
    host, port = link.listen_address.rsplit(":", 1)
    command = probe_command("serve", host, str(_FLOW_PORT) if link.backend.packets else port)
    server = link.popen_server(command, stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    try:
        _read_line(server.stdout)
        yield server.stdout
    finally:
        server.kill()
        _close(server)


def _endpoint(link: Link, packet_port: int) -> tuple[str, str]:
    host, port = link.server_address.rsplit(":", 1)
    return host, str(packet_port) if link.backend.packets else port


def _read_line(stream: IO[str] | None) -> str:
    line = stream.readline() if stream else ""
    if not line:
        raise LinkError("A measuring process ended before it reported.", "What it said is on standard error.")
    return line


def _finish(process: subprocess.Popen[str]) -> dict[str, Any]:
    """The one report of a probe that ends by itself."""
    with suppress(ValueError):
        report: dict[str, Any] = json.loads(_read_line(process.stdout))
        _close(process)
        return report
    raise LinkError("A measuring process reported nonsense.")


def _close(process: subprocess.Popen[str]) -> None:
    process.wait()
    if process.stdout:
        process.stdout.close()
