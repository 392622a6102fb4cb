"""Real packets between real namespaces. Left out where there is no privilege to make them (see conftest.py).

What load could change is bounded from the side that it cannot move: a link is never faster than asked, and
never delivers earlier.
"""

import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from netlab import Link, LinkError, namespaces, parse_profile
from netlab.backends import TunBackend, netem_arguments, probe_command
from netlab.lane import Lane
from netlab.profiles import Direction

PORT = "7000"


@pytest.fixture(autouse=True)
def _short_trains(monkeypatch):
    monkeypatch.setattr("netlab.calibrate._TRAIN_S", 0.3)
    monkeypatch.setattr("netlab.calibrate._TRACE_TRAIN_S", 0.8)


def profile(rtt_ms=4.0, **more):
    """Wide tolerances: the machine may be busy, and how close the link gets is not the matter here."""
    return parse_profile("test", {"rtt_ms": rtt_ms, "rtt_tolerance_ms": 50, **more})


def report(process):
    with process:
        return json.loads(process.stdout.readline())


def train(link, *, mbit, count, size):
    """Send a train up the link; returns what the receiver reports."""
    receive = probe_command("train-receive", link.server_host, PORT, "10", "0.4")
    receiving = link.popen_server(receive, stdout=subprocess.PIPE, text=True)
    receiving.stdout.readline()
    send = probe_command("train-send", link.server_host, PORT, str(mbit), str(count), str(size))
    link.run_client(send, check=True, stdout=subprocess.DEVNULL)
    return report(receiving)


def test_calibration_of_a_limited_link():
    asked = profile(
        20.0, up={"rate_mbit": 3, "queue_packets": 50}, down={"rate_mbit": 8, "queue_packets": 50}
    )
    with Link(asked, measure_tcp=True, seed=5) as link:
        record = json.loads(json.dumps(link.calibration))
    assert record["passed"]
    assert record["seed"] == 5
    measured = record["measured"]
    assert measured["rtt_ms"] > 19.5
    assert 2.7 < measured["up_mbit"] < 3.03
    assert 7.2 < measured["down_mbit"] < 8.08
    assert measured["tcp_up_mbit"] > 0
    assert measured["tcp_down_mbit"] > 0
    assert record["link_process"]["cpu_us_per_packet"] > 0
    assert record["environment"]["kernel"].startswith("Linux")
    assert record["environment"]["congestion_control"]
    assert record["environment"]["offloads"]["mtu"] == "1500"


def test_a_link_that_misses_its_profile_is_refused(monkeypatch):
    asked = parse_profile("asked", {"rtt_ms": 10})
    built = parse_profile("built", {"rtt_ms": 80})
    link = Link(asked)
    monkeypatch.setattr(link, "_choose_backend", lambda files: TunBackend(built, 0, {}))
    with (
        pytest.raises(LinkError, match=r"misses profile 'asked': rtt_ms: measured [\d.]+, asked 10\.0"),
        link,
    ):
        pass


def lost_numbers(seed, count=1500):
    lossy = profile(up={"loss": 0.1, "burst": {"enter": 0.02, "leave": 0.4}})
    with Link(lossy, seed=seed, backend="tun", calibrated=False) as link:
        numbers = set(train(link, mbit=10, count=count, size=200)["numbers"])
    return [number for number in range(count) if number not in numbers]


def test_losses_are_those_of_the_seed():
    lossy = profile(up={"loss": 0.1, "burst": {"enter": 0.02, "leave": 0.4}})

    def predicted(seed):
        lane = Lane(lossy.up, seed=seed, name="up", start_ns=0)
        for number in range(1500):
            lane.offer(0, number.to_bytes(4, "big"))
        kept = {int.from_bytes(data, "big") for data in lane.due(1 << 62)}
        return [number for number in range(1500) if number not in kept]

    assert lost_numbers(seed=1) == predicted(1)
    assert predicted(1) != predicted(2)


def test_a_reset_replays_the_losses():
    with Link(profile(up={"loss": 0.3}), seed=4, backend="tun", calibrated=False) as link:
        runs = []
        for _ in range(2):
            link.reset()
            runs.append(train(link, mbit=10, count=200, size=200)["numbers"])
    assert runs[0] == runs[1]


def test_a_reset_with_another_seed_has_other_losses():
    with Link(profile(up={"loss": 0.3}), seed=4, backend="tun", calibrated=False) as link:
        runs = []
        for seed in (4, 5, None):
            link.reset(seed=seed)
            runs.append(train(link, mbit=10, count=200, size=200)["numbers"])
    assert runs[0] == runs[2] != runs[1]


def test_a_reset_can_begin_shortly_before_an_outage():
    with Link(profile(outages={"every_s": 60, "length_s": 30}), backend="tun", calibrated=False) as link:
        link.reset()
        assert len(train(link, mbit=1, count=50, size=200)["numbers"]) == 50
        link.reset(begun_s=61)
        assert not train(link, mbit=1, count=50, size=200)["numbers"]
        assert link.stats()["up"]["num_cut"] == 50


def test_a_full_queue_drops_the_tail():
    slow = profile(up={"rate_mbit": 0.08, "queue_packets": 8})  # 50 ms a packet of 500 bytes
    with Link(slow, backend="tun", calibrated=False) as link:
        result = train(link, mbit=100, count=60, size=500)
        counts = link.stats()["up"]
    assert 8 <= result["num_packets"] <= 20  # more than 8 only if the burst took longer than 50 ms to send
    assert result["numbers"][:8] == list(range(8))
    assert counts["num_overflowed"] == 60 - result["num_packets"]
    assert result["last_ns"] - result["first_ns"] > 6.5 * 50e6


def test_a_trace_sets_the_rate(tmp_path):
    up, down = tmp_path / "steps.up", tmp_path / "steps.down"
    # 100 ms of 12 Mbit/s, 100 ms of nothing
    up.write_text("\n".join(map(str, [*range(1, 101), 200])))
    down.write_text("\n".join(map(str, range(0, 101, 2))))
    traced = profile(up={"trace": "steps.up"}, down={"trace": "steps.down"})
    with Link(traced, traces=tmp_path) as link:
        assert link.calibration is not None
        asked, measured = link.calibration["asked"], link.calibration["measured"]
        assert link.backend.name == "tun"
        assert link.mean_rate_mbit("up") == pytest.approx(6.06)
    assert 5 < asked["up_mbit"] < 7
    assert measured["up_mbit"] == pytest.approx(asked["up_mbit"], rel=0.1)
    assert measured["down_mbit"] == pytest.approx(6, rel=0.1)


def test_outages_cut_packets_but_not_while_calibrating():
    handing_over = profile(outages={"every_s": 0.1, "length_s": 0.05}, up={"rate_mbit": 5})
    with Link(handing_over) as link:
        assert link.calibration is not None
        assert link.calibration["link_process"]["up"]["num_cut"] == 0
        train(link, mbit=2, count=200, size=200)  # 160 ms at the least
        link.run_client(probe_command("ping", link.server_host, "60", "5"), stdout=subprocess.DEVNULL)
        assert link.stats()["up"]["num_cut"] > 0


def test_server_and_client_meet_over_the_link():
    serve = (
        "import socket, sys; s = socket.create_server((sys.argv[1], int(sys.argv[2])))\n"
        "c, a = s.accept(); c.sendall(b'hello'); c.close(); s.accept()"
    )
    fetch = "import socket, sys; print(socket.create_connection(sys.argv[1:]).recv(9).decode())"
    with Link(profile(), server_port=7001, calibrated=False) as link:
        assert link.listen_address == link.server_address
        server = link.popen_server([sys.executable, "-c", serve, *link.listen_address.split(":")])
        link.wait_until_listening(server)
        command = [sys.executable, "-c", fetch, *link.server_address.split(":")]
        done = link.run_client(command, check=True, timeout_s=20, capture_output=True, text=True)
        assert done.stdout == "hello\n"
        assert link.stats()["up"]["num_delivered"] > 0
        assert server.poll() is None
    assert server.returncode == -15
    server.wait()


def test_hosts_see_only_each_other():
    look = "import socket; s = socket.socket(); s.settimeout(1); print(s.connect_ex(('192.0.2.1', 80)))"
    with Link(profile(), calibrated=False) as link:
        done = link.run_client([sys.executable, "-c", look], capture_output=True, text=True, check=True)
        listening = socket.create_server(("127.0.0.1", 0))
        knock = (
            f"import socket; print(socket.socket().connect_ex(('127.0.0.1', {listening.getsockname()[1]})))"
        )
        local = link.run_client([sys.executable, "-c", knock], capture_output=True, text=True, check=True)
        listening.close()
    assert int(done.stdout) != 0
    assert int(local.stdout) != 0


def test_a_server_that_ends_early_is_reported():
    with Link(profile(), calibrated=False) as link:
        server = link.popen_server([sys.executable, "-c", "raise SystemExit(3)"])
        with pytest.raises(LinkError, match="ended with code 3"):
            link.wait_until_listening(server)


def test_netem_options_are_words_that_tc_knows():
    """Where the kernel lacks netem, tc still parses the options before the kernel refuses the kind."""
    table = {"enter": 0.01, "leave": 0.3}
    bursty = parse_profile("b", {"rtt_ms": 2, "up": {"rate_mbit": 3, "jitter_ms": 0.5, "burst": table}}).up
    with namespaces.namespace_pair() as pair:
        for direction in (bursty, Direction(delay_ms=5, loss=0.1)):
            command = ("-n", namespaces.client_namespace(pair), "qdisc", "add", "dev", "lo", "root", "netem")
            said = "accepted"
            try:
                namespaces.tc(*command, *netem_arguments(direction, 1500))
                namespaces.tc("-n", namespaces.client_namespace(pair), "qdisc", "del", "dev", "lo", "root")
            except LinkError as error:
                said = str(error)
            assert said == "accepted" or "kind is unknown" in said


def test_the_command_line_runs_both_sides(tmp_path):
    serve = tmp_path / "serve.py"
    serve.write_text(
        "import socket, sys\nhost, port = sys.argv[1].split(':')\n"
        "s = socket.create_server((host, int(port)))\nwhile True: s.accept()[0].sendall(b'served')\n"
    )
    fetch = tmp_path / "fetch.py"
    fetch.write_text(
        "import os, socket, sys\nassert sys.argv[1] == os.environ['NETLAB_SERVER']\n"
        "host, port = sys.argv[1].split(':')\n"
        "print(socket.create_connection((host, int(port))).recv(9).decode())\nsys.exit(7)"
    )
    netlab = Path(__file__).parents[2] / "deploy" / "netlab" / "netlab.py"
    results = tmp_path / "run.json"
    command = [sys.executable, str(netlab), "run", "wifi", "--uncalibrated", "--json", str(results)]
    command += [
        "--server",
        f"{sys.executable} {serve} {{listen}}",
        "--",
        sys.executable,
        str(fetch),
        "{server}",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stdout) == (7, "served\n"), done.stderr
    assert json.loads(results.read_text())["run"]["up"]["num_delivered"] > 0
