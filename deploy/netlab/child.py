"""A helper process of the link that speaks JSON lines: the owner's end."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from netlab.errors import LinkError

_START = "import sys; sys.path.insert(0, sys.argv[1]); from netlab.{module} import main; main()"


class Child:
    """Runs `netlab.MODULE.main()` in a fresh interpreter, hands it a job, and asks it things.

    The child sees its standard input end when this process dies, however it dies.
    """

    def __init__(self, module: str, job: dict[str, Any]) -> None:
        self._lock = threading.Lock()
        command = [
            sys.executable,
            "-I",  # the standard library is all it needs, and a faster start
            "-S",
            "-c",
            _START.format(module=module),
            str(Path(__file__).resolve().parents[1]),
        ]
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # Ctrl-C reaches the owner only, and the owner cleans up
        )
        try:
            self.greeting = self.ask(job)
        except BaseException:
            self.close()
            raise

    def ask(self, order: dict[str, Any]) -> dict[str, Any]:
        """Send one line and return the answer.

        Raises:
            LinkError: the process has ended.
        """
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        with self._lock:
            with suppress(BrokenPipeError):
                self.process.stdin.write(json.dumps(order) + "\n")
                self.process.stdin.flush()
            line = self.process.stdout.readline()
        if not line:
            code = self.process.wait()
            raise LinkError(f"The link process ended with code {code}.", "What it said is on standard error.")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        """Stop the process, by force if it does not answer. Repeating it is harmless."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        with suppress(BrokenPipeError, ValueError):
            self.process.stdin.write('{"do": "stop"}\n')
            self.process.stdin.flush()
        with suppress(BrokenPipeError):
            self.process.stdin.close()
        try:
            self.process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.process.stdout.close()

    def __enter__(self) -> Child:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
