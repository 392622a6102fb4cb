"""The relay: its arithmetic, and real bytes through a real process."""

import json
import os
import socket
import socketserver
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest
from netlab import Link, LinkError, parse_profile
from netlab.relay import Pipe

NETLAB = Path(__file__).parents[2] / "deploy" / "netlab" / "netlab.py"


class Echo(socketserver.BaseRequestHandler):
    """Sends back what it gets, then half-closes."""

    def handle(self):
        while data := self.request.recv(65_536):
            self.request.sendall(data)
        self.request.shutdown(socket.SHUT_WR)


@pytest.fixture
def echo_port():
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Echo) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        yield server.server_address[1]
        server.shutdown()
        thread.join()


def profile(**more):
    return parse_profile("relayed", {"rtt_ms": 80, "rtt_tolerance_ms": 60, **more})


def connect(link):
    host, port = link.server_address.split(":")
    return socket.create_connection((host, int(port)))


def test_pipe_sends_at_its_rate_and_earns_no_credit():
    pipe = Pipe(delay_ms=100, rate_mbit=8)
    assert pipe.send(0.0, 1000) == pytest.approx((0.001, 0.101))
    assert pipe.send(0.0, 1000) == pytest.approx((0.002, 0.102))
    assert pipe.send(5.0, 500) == pytest.approx((5.0005, 5.1005))
    assert Pipe(delay_ms=7, rate_mbit=None).send(1.0, 10**6) == pytest.approx((1.0, 1.007))


def test_bytes_come_through_whole_late_and_in_order(echo_port):
    payload = bytes(range(256)) * 200
    with Link(profile(), backend="relay", server_port=echo_port, calibrated=False) as link:
        with connect(link) as connection:
            start = time.monotonic()
            connection.sendall(payload)
            connection.shutdown(socket.SHUT_WR)
            received = b""
            while data := connection.recv(65_536):
                if not received:
                    assert time.monotonic() - start >= 0.080
                received += data
        assert received == payload
        assert link.stats()["up_bytes"] == link.stats()["down_bytes"] == len(payload)


def test_rate_is_a_ceiling(echo_port):
    slow = profile(up={"rate_mbit": 2}, down={"rate_mbit": 50})
    with (
        Link(slow, backend="relay", server_port=echo_port, calibrated=False) as link,
        connect(link) as connection,
    ):
        start = time.monotonic()
        connection.sendall(bytes(100_000))
        connection.shutdown(socket.SHUT_WR)
        while connection.recv(65_536):
            pass
        assert time.monotonic() - start >= 0.080 + 0.4  # 100,000 bytes at 2 Mbit/s


def test_a_server_that_is_not_there_ends_the_connection(echo_port):
    with (
        Link(profile(), backend="relay", server_port=0, calibrated=False) as link,
        connect(link) as connection,
    ):
        connection.settimeout(10)
        with suppress(ConnectionResetError):
            assert connection.recv(1) == b""


def test_calibration_passes_and_names_what_is_missing():
    relayed = profile(up={"rate_mbit": 4, "loss": 0.1}, down={"rate_mbit": 6})
    with Link(relayed, backend="relay", server_port=0) as link:
        record = json.loads(json.dumps(link.calibration))
        done = link.run_client([sys.executable, "-c", "print(3)"], capture_output=True, text=True, check=True)
    assert done.stdout == "3\n"
    assert record["passed"]
    assert record["backend"] == "relay"
    assert record["measured"]["rtt_ms"] >= 80
    assert any(lack.startswith("loss") for lack in record["cannot"])


def test_a_relay_that_misses_its_profile_is_refused():
    link = Link(parse_profile("x", {"rtt_ms": 50, "rtt_tolerance_ms": 0}), backend="relay", server_port=0)
    with pytest.raises(LinkError, match=r"misses profile 'x': rtt_ms: measured"), link:
        pass
    assert link.calibration is not None
    assert not link.calibration["passed"]


def test_without_the_privilege_for_namespaces_the_link_is_a_relay_and_says_so(echo_port):
    """As an ordinary user; root without its capabilities is one here."""
    unprivileged = ["setpriv", "--bounding-set", "-all", "--inh-caps", "-all"] if os.geteuid() == 0 else []
    netlab = [sys.executable, str(NETLAB), "run", "wifi", "--uncalibrated"]
    ask = "import os, socket; host, port = os.environ['NETLAB_SERVER'].split(':'); "
    ask += "line = socket.create_connection((host, int(port))); line.sendall(b'hello'); print(line.recv(5))"
    done = subprocess.run(
        [*unprivileged, *netlab, "--port", str(echo_port), "--", sys.executable, "-c", ask],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == "b'hello'\n"
    assert "this link (relay) cannot do" in done.stderr
    assert done.returncode == 0
