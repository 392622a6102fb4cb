"""Whoever dies, and however, no namespace, lock or process stays behind."""

import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from netlab import Link, LinkError, namespaces, parse_profile

DEPLOY = Path(__file__).parents[2] / "deploy"
PROFILE = parse_profile("test", {"rtt_ms": 2})

# an owner with a server on its link, who says what it has and then waits
OWNER = """
import os, signal, sys, time
sys.path.insert(0, sys.argv[1])
from netlab import Link, parse_profile
with Link(parse_profile("test", {"rtt_ms": 2}), backend="tun", calibrated=False) as link:
    server = link.popen_server([sys.executable, "-c", "import time; time.sleep(600)"])
    print(link.backend._pair, link.backend.child.process.pid, server.pid, flush=True)
    time.sleep(600)
"""


def leftovers(pair):
    """Names of namespaces and locks of a pair that exist."""
    paths = [namespaces.namespace_path(name) for name in (f"{pair}-c", f"{pair}-s")]
    return [path for path in [*paths, f"/run/{pair}.lock"] if Path(path).exists()]


def wait_for_end(pid):
    """Wait until a process of somebody else has ended; a zombie nobody reaps counts as ended."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    assert select.select([descriptor], [], [], 20)[0], f"process {pid} still runs"
    os.close(descriptor)


def owner():
    process = subprocess.Popen(
        [sys.executable, "-c", OWNER, str(DEPLOY)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    pair, link_pid, server_pid = process.stdout.readline().split()
    assert len(leftovers(pair)) == 3
    return process, pair, int(link_pid), int(server_pid)


def test_leaving_removes_everything():
    with Link(PROFILE, calibrated=False) as link:
        pair = link.backend._pair
        server = link.popen_server([sys.executable, "-c", "import time; time.sleep(600)"])
        assert len(leftovers(pair)) == 3
    assert leftovers(pair) == []
    assert server.returncode is not None


def test_a_server_that_ignores_a_polite_end_is_killed(monkeypatch):
    stubborn = "import signal, time; signal.signal(15, signal.SIG_IGN); print(1, flush=True); time.sleep(600)"
    with Link(PROFILE, calibrated=False) as link:
        monkeypatch.setattr("netlab.link.GRACE_S", 0.2)
        server = link.popen_server([sys.executable, "-c", stubborn], stdout=subprocess.PIPE)
        server.stdout.readline()
    assert server.returncode == -signal.SIGKILL
    server.stdout.close()


def test_an_error_inside_removes_everything():
    link = Link(PROFILE, calibrated=False)
    with pytest.raises(ZeroDivisionError), link:
        _ = 1 / 0
    assert leftovers(link.backend._pair) == []


def test_the_link_process_killed():
    with Link(PROFILE, backend="tun", calibrated=False) as link:
        pair = link.backend._pair
        waiting = link.popen_client([sys.executable, "-c", "import time; time.sleep(600)"])
        os.kill(link.backend.child.process.pid, signal.SIGKILL)
        assert waiting.wait(20) == -signal.SIGTERM  # it would have waited for ever
        with pytest.raises(LinkError, match="link process died"):
            link.run_client(["true"])
        with pytest.raises(LinkError, match="ended with code -9"):
            link.stats()
    assert leftovers(pair) == []


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_the_owner_killed(number):
    process, pair, link_pid, server_pid = owner()
    with process:
        process.send_signal(number)
    wait_for_end(link_pid)
    wait_for_end(server_pid)
    assert leftovers(pair) == []


def test_owner_and_link_killed_the_next_start_sweeps():
    process, pair, link_pid, server_pid = owner()
    with Link(PROFILE, calibrated=False) as alive:
        with process:
            os.kill(process.pid, signal.SIGSTOP)  # so that it cannot clean up when its link goes
            os.kill(link_pid, signal.SIGKILL)
            process.kill()
        assert leftovers(pair)
        with Link(PROFILE, calibrated=False):
            assert leftovers(pair) == []
            assert len(leftovers(alive.backend._pair)) == 3  # the living are left alone
        wait_for_end(server_pid)


def test_the_command_line_interrupted():
    netlab = str(DEPLOY / "netlab" / "netlab.py")
    command = [
        sys.executable,
        netlab,
        "run",
        "wifi",
        "--uncalibrated",
        "--",
        "sh",
        "-c",
        "echo up; exec sleep 600",
    ]
    before = set(Path("/run/netns").iterdir())
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "up\n"
        made = set(Path("/run/netns").iterdir()) - before
        assert len(made) >= 2
        process.terminate()
        assert process.wait(20) == 130
    pairs = {path.name[:-2] for path in made}
    deadline = time.monotonic() + 10
    while any(leftovers(pair) for pair in pairs) and time.monotonic() < deadline:
        time.sleep(0.05)  # another test run on this machine may have made some of them
    assert [left for pair in pairs for left in leftovers(pair)] == []
