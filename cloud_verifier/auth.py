"""Who is calling: bearer tokens from a file of hashes, or the common name of a client certificate."""

from __future__ import annotations

import hashlib
import logging
import secrets
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from shared.faults import FaultKind, SpecwireError

log = logging.getLogger(__name__)

ANONYMOUS = "anonymous"
_PREFIX = "Bearer "


@dataclass(frozen=True, slots=True)
class Quota:
    """What one identity may take; 0 is no limit.

    Args:
        sessions: open at once.
        tokens_per_s: prompt, drafted and written tokens.
        bytes_per_s: of messages, up and down.
        max_context: tokens of one session, prompt and answer together.
    """

    sessions: int = 0
    tokens_per_s: float = 0.0
    bytes_per_s: float = 0.0
    max_context: int = 0


@dataclass(frozen=True, slots=True)
class Identity:
    """A caller. Sessions belong to the `name`; `digest` is that of the token that came, if one did."""

    name: str = ANONYMOUS
    quota: Quota = Quota()
    digest: str = field(default="", compare=False, repr=False)


class Authenticator:
    """Names the caller of an RPC.

    Without a file everybody is welcome, under the common name of a client certificate or as `anonymous`.
    With one, a caller needs a token of it or a certificate whose common name is in it:

        [identities.alice]
        sha256 = "<hex SHA-256 of the token>"   # left out: alice comes with a certificate
        sessions = 4                            # quotas; left out: no limit
        tokens-per-s = 200
        bytes-per-s = 100000
        max-context = 4096

    The file is read again when it has changed. Open streams keep their quotas; `is_valid` tells when what
    they came with is no longer there. A file that has become unreadable is reported once and the last good
    one stays in force.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self._by_hash: Mapping[str, Identity] = {}
        self._by_name: Mapping[str, Identity] = {}
        self._stamp: tuple[int, int, int] | None = None  # None: the file is not there
        if path is not None:
            self._stamp = _stamp(path)
            self._by_hash, self._by_name = read_identities(path)

    def identify(
        self, metadata: Mapping[str, str | bytes], auth_context: Mapping[str, Iterable[bytes]]
    ) -> Identity:
        """The caller's identity.

        Raises:
            SpecwireError: UNAUTHENTICATED.
        """
        self.refresh()
        header = metadata.get("authorization")
        names = list(auth_context.get("x509_common_name", ()))
        if header is not None and self._path is not None:
            return self._by_token(header)
        if names:
            name = names[0].decode(errors="replace")
            if self._path is None:
                return Identity(name)
            if name in self._by_name:
                return self._by_name[name]
            raise _unauthenticated(f"The certificate of {name!r} is not allowed here.")
        if self._path is not None:
            raise _unauthenticated("This verifier asks for a token, and none came.")
        return Identity()

    def is_valid(self, identity: Identity) -> bool:
        """Whether the file, as it was last read, lets in the token or certificate that named `identity`."""
        if self._path is None:
            return True
        if not identity.digest:
            return identity.name in self._by_name
        known = self._by_hash.get(identity.digest)
        return known is not None and known.name == identity.name

    def _by_token(self, header: str | bytes) -> Identity:
        text = header.decode(errors="replace") if isinstance(header, bytes) else header
        # The lookup is by hash, so its duration tells nothing about a token.
        digest = hash_token(text.removeprefix(_PREFIX).strip())
        identity = self._by_hash.get(digest)
        if identity is None or not text.startswith(_PREFIX):
            raise _unauthenticated("The token is not known to this verifier.")
        return replace(identity, digest=digest)

    def refresh(self) -> None:
        """Reads the file again if it has changed."""
        if self._path is None:
            return
        before, self._stamp = self._stamp, None
        try:
            self._stamp = _stamp(self._path)
            if self._stamp == before:
                return
            self._by_hash, self._by_name = read_identities(self._path)
            log.info("read %d identities from %s", len(self._by_name), self._path)
        except SpecwireError as error:
            if self._stamp != before:
                log.error("the identities stay as they were: %s", error)


def new_token() -> str:
    """A token of 256 random bits; its prefix lets secret scanners find it where it should not be."""
    return f"specwire_{secrets.token_urlsafe(32)}"


def hash_token(token: str) -> str:
    """Hex SHA-256. A random token needs no slow hash: there is nothing to guess."""
    return hashlib.sha256(token.encode("utf-8", "surrogatepass")).hexdigest()


def read_identities(path: Path) -> tuple[dict[str, Identity], dict[str, Identity]]:
    """Identities by hash of their token, and all by name.

    Raises:
        SpecwireError: BAD_REQUEST that names the file and what is wrong in it.
    """
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise _bad_file(path, str(error)) from error
    unknown = set(table) - {"identities"}
    entries = table.get("identities", {})
    if unknown or not isinstance(entries, dict):
        raise _bad_file(path, f"expected [identities.NAME] tables, found {', '.join(sorted(unknown))}")
    by_hash: dict[str, Identity] = {}
    by_name: dict[str, Identity] = {}
    for name, entry in entries.items():
        digest, identity = _identity(path, name, entry)
        if digest:
            if digest in by_hash:
                raise _bad_file(path, f"{name} and {by_hash[digest].name} have the same token")
            by_hash[digest] = identity
        by_name[name] = identity
    return by_hash, by_name


def _identity(path: Path, name: str, entry: Any) -> tuple[str, Identity]:
    if not isinstance(entry, dict):
        raise _bad_file(path, f"identities.{name} is not a table")
    values = {key.replace("-", "_"): value for key, value in entry.items()}
    digest = values.pop("sha256", "")
    if digest and (not isinstance(digest, str) or len(digest) != 64):
        raise _bad_file(path, f"sha256 of {name} is not 64 hexadecimal digits")
    allowed = {field.name for field in fields(Quota)}
    for key, value in values.items():
        if key not in allowed:
            raise _bad_file(path, f"unknown key {key!r} of {name}; there are sha256, {', '.join(allowed)}")
        if isinstance(value, bool) or not isinstance(value, int | float) or value < 0:
            raise _bad_file(path, f"{key} of {name} is {value!r}, not a number of 0 or more")
    return digest.lower(), Identity(name, Quota(**values))


def _stamp(path: Path) -> tuple[int, int, int]:
    try:
        status = path.stat()
    except OSError as error:
        raise _bad_file(path, str(error)) from error
    return status.st_mtime_ns, status.st_size, status.st_ino


def _bad_file(path: Path, problem: str) -> SpecwireError:
    return SpecwireError(
        FaultKind.BAD_REQUEST,
        f"The token file {path} cannot be used: {problem}.",
        "Correct it; `cloud-verifier token new NAME` prints what an entry looks like.",
    )


def _unauthenticated(text: str) -> SpecwireError:
    return SpecwireError(
        FaultKind.UNAUTHENTICATED, text, "Give a valid token with --token or SPECWIRE_TOKEN."
    )
