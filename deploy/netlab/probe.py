"""The two ends of a calibration, each run as a process on its host; results are JSON lines on standard output.

`serve` answers echoes and bulk flows; the other roles are the active ends. No package needed, not even this one.
"""

from __future__ import annotations

import json
import socket
import struct
import sys
import threading
import time
from contextlib import suppress

_ECHO = struct.Struct("!IQ")  # number, time sent in ns
_RESET_ON_CLOSE = struct.pack("ii", 1, 0)
_BLOCK = bytes(65_536)


def serve(host: str, port: str) -> None:
    """Echo UDP; on TCP: "E" echo, "U" + seconds receive and report, "D" send until the other end has enough."""
    datagrams = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    datagrams.bind((host, int(port)))

    def echo() -> None:
        while True:
            data, sender = datagrams.recvfrom(2048)
            datagrams.sendto(data, sender)

    threading.Thread(target=echo, daemon=True).start()
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


def rtt(kind: str, host: str, port: str, count: str, interval_ms: str) -> None:
    """Send `count` echoes, one each `interval_ms`, without waiting for answers ("udp") or one by one ("tcp")."""
    total, interval_s = int(count), float(interval_ms) / 1000
    results: list[tuple[int, float]] = []
    if kind == "tcp":
        with socket.create_connection((host, int(port))) as connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.sendall(struct.pack("!cd", b"E", 0.0))
            for number in range(total):
                sent_ns = time.monotonic_ns()
                connection.sendall(_ECHO.pack(number, sent_ns))
                connection.recv(_ECHO.size, socket.MSG_WAITALL)
                results.append((sent_ns, (time.monotonic_ns() - sent_ns) / 1e6))
                time.sleep(interval_s)
    else:
        datagrams = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        datagrams.connect((host, int(port)))

        def send() -> None:
            for number in range(total):
                datagrams.send(_ECHO.pack(number, time.monotonic_ns()))
                time.sleep(interval_s)

        sender = threading.Thread(target=send, daemon=True)
        sender.start()
        datagrams.settimeout(3.0)
        with suppress(TimeoutError):
            while len(results) < total:
                data = datagrams.recv(2048)
                number, sent_ns = _ECHO.unpack(data)
                results.append((sent_ns, (time.monotonic_ns() - sent_ns) / 1e6))
                if number == total - 1:
                    datagrams.settimeout(0.5)
    _say({"num_sent": total, "sent_ns": [sent for sent, _ in results], "rtt_ms": [ms for _, ms in results]})


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
        while (ahead_s := start + number * per_packet_s - time.monotonic()) > 0:
            time.sleep(ahead_s)
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


def _say(answer: dict[str, object]) -> None:
    print(json.dumps(answer), flush=True)


ROLES = {"serve": serve, "rtt": rtt, "train-receive": train_receive, "train-send": train_send, "flow": flow}

if __name__ == "__main__":
    ROLES[sys.argv[1]](*sys.argv[2:])
