"""The two ends of a calibration, each run as a process on its host; results are JSON lines on stdout.

`serve` answers echoes and bulk flows; the other roles are the active ends. No package needed, not even ours.
"""

from __future__ import annotations

import json
import os
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress

_SO_TIMESTAMPNS = 35
_ECHO_IDENTIFIER = 77
_RESET_ON_CLOSE = struct.pack("ii", 1, 0)
_BLOCK = bytes(65_536)


def serve(host: str, port: str) -> None:
    """Answer TCP: "E" echoes, "U" + seconds receives and reports, "D" sends until the other has enough."""
    listener = socket.create_server((host, int(port)))
    _say({"ready": True})
    while True:
        connection, _ = listener.accept()
        threading.Thread(target=_answer, args=(connection,), daemon=True).start()


def _answer(connection: socket.socket) -> None:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    with connection, suppress(OSError):
        mode, seconds = struct.unpack("!cd", connection.recv(9, socket.MSG_WAITALL))
        if mode == b"U":
            _say(_receive_flow(connection, seconds))
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
        while mode == b"D":
            connection.sendall(_BLOCK)
        while mode == b"E" and (data := connection.recv(2048)):
            connection.sendall(data)


def ping(host: str, count: str, interval_ms: str) -> None:
    """ICMP echoes, one each `interval_ms`, answers not awaited, stamped by the kernel as they come back.

    Answers come from the other host's kernel: nobody's wake-up is counted but the link's.
    """
    total, interval_s = int(count), float(interval_ms) / 1000
    sent_ns: dict[int, tuple[int, int]] = {}  # number -> (monotonic, wall clock)
    results: dict[int, float] = {}
    echoes = socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP)
    echoes.setsockopt(socket.SOL_SOCKET, _SO_TIMESTAMPNS, 1)
    echoes.connect((host, 0))

    def send() -> None:
        for number in range(total):
            sent_ns[number] = time.monotonic_ns(), time.time_ns()
            echoes.send(_echo_request(number))
            time.sleep(interval_s)

    threading.Thread(target=send, daemon=True).start()
    echoes.settimeout(3.0)
    with suppress(TimeoutError):
        while len(results) < total:
            packet, ancillary, _, _ = echoes.recvmsg(2048, 256)
            kind, _, _, identifier, number = struct.unpack_from("!BBHHH", packet, 20)
            if kind != 0 or identifier != _ECHO_IDENTIFIER or number not in sent_ns:
                continue
            seconds, ns = struct.unpack("ll", ancillary[0][2])
            results[number] = (seconds * 10**9 + ns - sent_ns[number][1]) / 1e6
            if number == total - 1:
                echoes.settimeout(0.3)
    _say({"num_sent": total, "sent_ns": [sent_ns[n][0] for n in results], "rtt_ms": list(results.values())})


def _echo_request(number: int) -> bytes:
    """An ICMP echo request; the checksum is as RFC 792 says."""
    total = (8 << 8) + _ECHO_IDENTIFIER + number
    return struct.pack("!BBHHH", 8, 0, ~(total + (total >> 16)) & 0xFFFF, _ECHO_IDENTIFIER, number)


def tcp_ping(host: str, port: str, count: str) -> None:
    """Round trips of small messages over one TCP connection, one by one."""
    results = []
    with socket.create_connection((host, int(port))) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.sendall(struct.pack("!cd", b"E", 0.0))
        for _ in range(int(count)):
            start_ns = time.monotonic_ns()
            connection.sendall(bytes(8))
            connection.recv(8, socket.MSG_WAITALL)
            results.append((time.monotonic_ns() - start_ns) / 1e6)
    _say({"num_sent": int(count), "sent_ns": [], "rtt_ms": results})


def train_receive(host: str, port: str, first_s: str, idle_s: str) -> None:
    """Count datagrams: wait `first_s` for the first, stop after `idle_s` of silence."""
    datagrams = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    with suppress(OSError):
        datagrams.setsockopt(socket.SOL_SOCKET, 33, 1 << 23)  # SO_RCVBUFFORCE, for those who may
    datagrams.bind((host, int(port)))
    datagrams.settimeout(float(first_s))
    _say({"ready": True})
    first_ns = last_ns = num_packets = num_bytes = 0
    numbers = []
    with suppress(TimeoutError):
        while True:
            data = datagrams.recv(65_535)
            last_ns = time.monotonic_ns()
            if not num_packets:
                first_ns = last_ns
                datagrams.settimeout(float(idle_s))
            num_packets += 1
            num_bytes += len(data) + 28
            numbers.append(int.from_bytes(data[:4], "big"))
    size = num_bytes // max(1, num_packets)
    _say(
        {
            "first_ns": first_ns,
            "last_ns": last_ns,
            "num_packets": num_packets,
            "bytes_after_first": num_bytes - size,
            "numbers": numbers,
        }
    )


def train_send(host: str, port: str, mbit: str, packets: str, size: str) -> None:
    """Send numbered datagrams of `size` bytes (headers included) at `mbit` megabits a second."""
    datagrams = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    datagrams.connect((host, int(port)))
    body = bytes(int(size) - 32)
    per_packet_s = int(size) * 8e-6 / float(mbit)
    start = time.monotonic()
    for number in range(int(packets)):
        ahead_s = start + number * per_packet_s - time.monotonic()
        if (
            ahead_s > 1e-3
        ):  # in bursts of a millisecond: a sleep for each packet could not keep up with fast links
            time.sleep(ahead_s)
        with suppress(ConnectionRefusedError):  # the receiver has seen enough
            datagrams.send(number.to_bytes(4, "big") + body)
    _say({"num_sent": int(packets)})


def flow(mode: str, host: str, port: str, seconds: str) -> None:
    """Send ("U": the server reports) or receive ("D") a TCP flow for some seconds after its first byte."""
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(struct.pack("!cd", mode.encode(), float(seconds)))
        if mode == "D":
            _say(_receive_flow(connection, float(seconds)))
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
            return
        with suppress(OSError):
            while True:
                connection.sendall(_BLOCK)


def _receive_flow(connection: socket.socket, seconds: float) -> dict[str, float]:
    """Goodput in Mbit/s over the whole time and over its second half, when slow start is over."""
    connection.recv(1)
    connection.settimeout(1.0)
    start = now = time.monotonic()
    total = tail = 0
    while now < start + seconds:
        try:
            size = len(connection.recv(1 << 18))
        except TimeoutError:
            size = 0
        else:
            if not size:
                break
        now = time.monotonic()
        total += size
        if now > start + seconds / 2:
            tail += size
    return {"mbit": total * 8e-6 / (now - start), "tail_mbit": tail * 8e-6 / (now - start - seconds / 2)}


def _say(answer: Mapping[str, object]) -> None:
    print(json.dumps(answer), flush=True)


ROLES: dict[str, Callable[..., None]] = {
    "serve": serve,
    "ping": ping,
    "tcp-ping": tcp_ping,
    "train-receive": train_receive,
    "train-send": train_send,
    "flow": flow,
}

if __name__ == "__main__":
    # the link is to be measured, not how busy the machine is; the link itself still goes first
    with suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    ROLES[sys.argv[1]](*sys.argv[2:])
