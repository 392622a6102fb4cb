"""gRPC channels and servers: message sizes, keepalive, TLS. The one place that sets options."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from pathlib import Path

import grpc
import grpc.aio

from shared.faults import FaultKind, SpecwireError

MIB = 1 << 20
MAX_MESSAGE_BYTES = 16 * MIB
"""Default bound of one message on both ends: K=8 rows of V=151,936 in float32 are 4.9 MB."""

_CLIENT_KEEPALIVE_MS = 20_000
"""A mobile NAT forgets an idle TCP flow after 30 s at worst, so a ping every 20 s keeps it."""

_SERVER_MIN_PING_MS = 10_000
"""The server's tolerance must stay below the client's interval, or it answers `too_many_pings`."""


@dataclass(frozen=True, slots=True)
class Tls:
    """Files in PEM. A server needs `cert` and `key`; a client needs `ca` unless the system knows it.

    `ca` on a server asks clients for a certificate (mTLS); `cert` and `key` on a client answer that.
    """

    ca: Path | None = None
    cert: Path | None = None
    key: Path | None = None


def client_options(max_message_bytes: int = MAX_MESSAGE_BYTES) -> list[tuple[str, int]]:
    return [
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.max_send_message_length", max_message_bytes),
        ("grpc.keepalive_time_ms", _CLIENT_KEEPALIVE_MS),
        ("grpc.keepalive_timeout_ms", 10_000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        # Reconnecting is decided by the session, which knows what must be replayed; gRPC's own
        # back-off of up to two minutes would only hide that the verifier is back.
        ("grpc.initial_reconnect_backoff_ms", 100),
        # Despite its name, how long one attempt may take: a satellite link needs more than a second for
        # TCP and TLS. `edge_client.connection` has its own, shorter patience.
        ("grpc.min_reconnect_backoff_ms", 20_000),
        ("grpc.max_reconnect_backoff_ms", 1_000),
        ("grpc.enable_retries", 0),
        # Else all channels of a process share one connection to an address, and with it the back-off of a
        # channel whose verifier went away: a new channel would fail although the verifier is back.
        ("grpc.use_local_subchannel_pool", 1),
    ]


def server_options(max_message_bytes: int = MAX_MESSAGE_BYTES) -> list[tuple[str, int]]:
    return [
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.max_send_message_length", max_message_bytes),
        ("grpc.http2.min_recv_ping_interval_without_data_ms", _SERVER_MIN_PING_MS),
        ("grpc.http2.max_ping_strikes", 0),
        ("grpc.keepalive_time_ms", 30_000),
        ("grpc.keepalive_timeout_ms", 20_000),
        ("grpc.keepalive_permit_without_calls", 1),
        # Two verifiers on one port would share the connections at random; starting the second must fail.
        ("grpc.so_reuseport", 0),
    ]


def open_channel(
    address: str, tls: Tls | None, max_message_bytes: int = MAX_MESSAGE_BYTES
) -> grpc.aio.Channel:
    """A channel to `host:port`; `tls=None` is plain text."""
    options = client_options(max_message_bytes)
    if tls is None:
        return grpc.aio.insecure_channel(address, options=options)
    credentials = grpc.ssl_channel_credentials(
        root_certificates=_read(tls.ca, "certificate authority"),
        private_key=_read(tls.key, "client key"),
        certificate_chain=_read(tls.cert, "client certificate"),
    )
    return grpc.aio.secure_channel(address, credentials, options=options)


def bind_server(server: grpc.aio.Server, address: str, tls: Tls | None) -> int:
    """Binds `host:port` (port 0 picks one) and returns the port.

    Raises:
        SpecwireError: UNAVAILABLE when the port is taken, BAD_REQUEST when a file cannot be read.
    """
    try:
        if tls is None:
            port = server.add_insecure_port(address)
        else:
            key, cert = _read(tls.key, "key"), _read(tls.cert, "certificate")
            if key is None or cert is None:
                raise SpecwireError(
                    FaultKind.BAD_REQUEST,
                    "A server with TLS needs both a certificate and a key.",
                    "Give --tls-cert and --tls-key, or --insecure on a loopback address.",
                )
            ca = _read(tls.ca, "certificate authority")
            port = server.add_secure_port(
                address,
                grpc.ssl_server_credentials(
                    [(key, cert)], root_certificates=ca, require_client_auth=ca is not None
                ),
            )
    except RuntimeError as error:
        raise SpecwireError(
            FaultKind.UNAVAILABLE,
            f"Cannot listen on {address}: the address is taken or not of this machine.",
            "Choose another --listen address, or stop what is using it.",
        ) from error
    return int(port)


def is_loopback(address: str) -> bool:
    """Whether `host:port` can only be reached from this machine."""
    host = address.rpartition(":")[0].strip("[]")
    if address.startswith("unix:") or host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _read(path: Path | None, what: str) -> bytes | None:
    if path is None:
        return None
    try:
        return path.read_bytes()
    except OSError as error:
        raise SpecwireError(
            FaultKind.BAD_REQUEST,
            f"Cannot read the {what} file {path}: {error.strerror}.",
            "Check the path and its permissions.",
        ) from error
