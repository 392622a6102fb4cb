"""Certificates for development: an authority of our own, one certificate for the verifier, one for a client.

    python deploy/certs.py [FOLDER] [HOST ...]

Writes ca.pem, server.pem, server-key.pem, client.pem and client-key.pem. Every run makes new ones.
"""

from __future__ import annotations

import argparse
import ipaddress
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

_DAYS = 365
_Key = ec.EllipticCurvePrivateKey


def write_certificates(folder: Path, hosts: tuple[str, ...], client: str = "developer") -> None:
    """Fills `folder`; `hosts` are the names and addresses that the verifier is reached by."""
    folder.mkdir(parents=True, exist_ok=True)
    ca_key = ec.generate_private_key(ec.SECP256R1())
    ca = _sign("Specwire development", ca_key, ca_key, None, authority=True)
    _write(folder / "ca.pem", ca)
    names = [_general_name(host) for host in hosts]
    for name, common_name, usage, alternatives in (
        ("server", hosts[0], ExtendedKeyUsageOID.SERVER_AUTH, names),
        ("client", client, ExtendedKeyUsageOID.CLIENT_AUTH, []),
    ):
        key = ec.generate_private_key(ec.SECP256R1())
        certificate = _sign(common_name, key, ca_key, ca, usage=usage, alternatives=alternatives)
        _write(folder / f"{name}.pem", certificate)
        _write_key(folder / f"{name}-key.pem", key)


def _sign(
    common_name: str,
    key: _Key,
    issuer_key: _Key,
    issuer: x509.Certificate | None,
    *,
    authority: bool = False,
    usage: x509.ObjectIdentifier | None = None,
    alternatives: list[x509.GeneralName] | None = None,
) -> x509.Certificate:
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])
    now = datetime.now(UTC)
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject if issuer is None else issuer.subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(minutes=5))
        .not_valid_after(now + timedelta(days=_DAYS))
        .add_extension(
            x509.BasicConstraints(ca=authority, path_length=0 if authority else None), critical=True
        )
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer_key.public_key()), critical=False
        )
    )
    if usage is not None:
        builder = builder.add_extension(x509.ExtendedKeyUsage([usage]), critical=False)
    if alternatives:
        builder = builder.add_extension(x509.SubjectAlternativeName(alternatives), critical=False)
    return builder.sign(issuer_key, hashes.SHA256())


def _general_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _write(path: Path, certificate: x509.Certificate) -> None:
    path.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))


def _write_key(path: Path, key: _Key) -> None:
    path.touch(mode=0o600)
    path.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", nargs="?", type=Path, default=Path("deploy/certs"))
    parser.add_argument("hosts", nargs="*", default=["localhost", "127.0.0.1", "::1"])
    arguments = parser.parse_args()
    write_certificates(arguments.folder, tuple(arguments.hosts))
    print(f"Wrote an authority and certificates for {', '.join(arguments.hosts)} to {arguments.folder}.")


if __name__ == "__main__":
    main()
