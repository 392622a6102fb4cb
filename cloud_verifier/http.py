"""The operator's HTTP port: /metrics for Prometheus, /livez and /readyz for whoever restarts and routes."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from shared.faults import FaultKind, SpecwireError

_TIMEOUT_S = 10.0


@contextlib.contextmanager
def operator_port(
    address: str, registry: CollectorRegistry, *, is_alive: Callable[[], bool], is_ready: Callable[[], bool]
) -> Iterator[int]:
    """Serves on `host:port` (port 0 picks one) while the context lasts; yields the port.

    A thread of its own answers, so that a busy event loop does not look dead.

    Raises:
        SpecwireError: UNAVAILABLE when the address cannot be used, BAD_REQUEST when it is none.
    """

    class Handler(BaseHTTPRequestHandler):
        timeout = _TIMEOUT_S

        def do_GET(self) -> None:
            match self.path.partition("?")[0]:
                case "/metrics":
                    self._answer(200, generate_latest(registry), CONTENT_TYPE_LATEST)
                case "/livez":
                    self._answer_yes_no(is_alive())
                case "/readyz":
                    self._answer_yes_no(is_ready())
                case _:
                    self._answer(404, b"There are /metrics, /livez and /readyz.\n")

        def _answer_yes_no(self, yes: bool) -> None:
            self._answer(200 if yes else 503, b"ok\n" if yes else b"no\n")

        def _answer(self, status: int, body: bytes, content_type: str = "text/plain; charset=utf-8") -> None:
            self.send_response(status)
            self.send_header("Content-Type", content_type)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002
            """Probes every few seconds are no news."""

    server = _bind(address, Handler)
    thread = threading.Thread(target=server.serve_forever, name="specwire-http", daemon=True)
    thread.start()
    try:
        yield int(server.server_address[1])
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _bind(address: str, handler: type[BaseHTTPRequestHandler]) -> ThreadingHTTPServer:
    host, _, port = address.rpartition(":")
    try:
        return ThreadingHTTPServer((host.strip("[]"), int(port)), handler)
    except (ValueError, OverflowError):
        raise SpecwireError(
            FaultKind.BAD_REQUEST, f"{address!r} is not host:port.", "Write it like 127.0.0.1:9090."
        ) from None
    except OSError as error:
        raise SpecwireError(
            FaultKind.UNAVAILABLE,
            f"Cannot serve metrics on {address}: {error.strerror}.",
            "Choose another --metrics-listen address.",
        ) from error
