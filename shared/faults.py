"""Typed faults: what can go wrong with one session, in words that a person can act on."""

from __future__ import annotations

from enum import StrEnum


class FaultKind(StrEnum):
    """Every kind of fault; the value travels on the wire."""

    TOKENIZER_MISMATCH = "tokenizer_mismatch"
    PROTOCOL_MISMATCH = "protocol_mismatch"
    UNKNOWN_CODEC = "unknown_codec"
    UNKNOWN_VERIFICATION = "unknown_verification"
    BAD_REQUEST = "bad_request"
    BAD_SAMPLING = "bad_sampling"
    BAD_PAYLOAD = "bad_payload"
    BAD_TOKENS = "bad_tokens"
    OUT_OF_ORDER = "out_of_order"
    CONTEXT_EXCEEDED = "context_exceeded"
    NOT_FINITE = "not_finite"
    SESSION_UNKNOWN = "session_unknown"
    NOT_ALLOWED = "not_allowed"
    UNAUTHENTICATED = "unauthenticated"
    QUOTA_EXCEEDED = "quota_exceeded"
    OVERLOADED = "overloaded"
    DRAINING = "draining"
    TIMED_OUT = "timed_out"
    UNAVAILABLE = "unavailable"
    UNSUPPORTED_MODEL = "unsupported_model"
    INTERNAL = "internal"


class SpecwireError(Exception):
    """A fault of one session.

    Args:
        kind: what went wrong.
        text: one sentence that names what is wrong.
        remedy: one sentence that says what to do about it.
        retry_after_ms: how long to wait before trying again; 0 when trying again cannot help.
        step: the step at fault, 0 when none.
    """

    def __init__(
        self, kind: FaultKind, text: str, remedy: str = "", *, retry_after_ms: int = 0, step: int = 0
    ) -> None:
        super().__init__(text)
        self.kind = kind
        self.text = text
        self.remedy = remedy
        self.retry_after_ms = retry_after_ms
        self.step = step

    def __str__(self) -> str:
        return f"{self.text} {self.remedy}".strip()
