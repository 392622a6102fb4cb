"""A verifier in a process of its own on this machine, for the demo, benchmarks and tests."""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from typing import IO

from shared.faults import FaultKind, SpecwireError

_SERVING = re.compile(r"^Serving .* on (\S+) \(")
_STOP_TIMEOUT_S = 15.0


@contextlib.contextmanager
def local_verifier(*options: str, timeout_s: float = 300.0) -> Iterator[str]:
    """Runs `cloud-verifier serve` in plain text on a free loopback port; yields its address.

    It ends with this process, however that ends.

    Raises:
        SpecwireError: UNAVAILABLE with the last lines of its log when it does not come up.
    """
    command = [sys.executable, "-c", "from cloud_verifier.cli import main; main()"]
    command += ["serve", "--insecure", "--listen", "127.0.0.1:0", "--stop-with-stdin", *options]
    with (
        tempfile.TemporaryFile("w+", errors="replace") as log,
        subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True
        ) as process,
    ):
        try:
            yield _wait_for_address(process, log, timeout_s)
        finally:
            process.terminate()
            try:
                process.wait(_STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()


def _wait_for_address(process: subprocess.Popen[str], log: IO[str], timeout_s: float) -> str:
    lines: list[str] = []
    watchdog = threading.Timer(timeout_s, process.kill)
    watchdog.start()
    try:
        for line in process.stdout or ():
            if match := _SERVING.match(line):
                return match[1]
            lines.append(line)
    finally:
        watchdog.cancel()
    log.seek(0)
    tail = ("".join(lines) + log.read()).strip().splitlines()[-5:]
    raise SpecwireError(
        FaultKind.UNAVAILABLE,
        f"The verifier did not come up: {' / '.join(tail) or 'it printed nothing'}",
        "Run `cloud-verifier serve --insecure` by hand to see why.",
    )
