"""Errors in OpenAI's shape."""

from __future__ import annotations

import math
from typing import Any

from shared.faults import FaultKind, SpecwireError

_RETRY_AFTER_S = 2
_INVALID = "invalid_request_error"
_SERVER = "server_error"

# status, type, code
_BY_KIND: dict[FaultKind, tuple[int, str, str]] = {
    FaultKind.BAD_REQUEST: (400, _INVALID, "invalid_request"),
    FaultKind.BAD_SAMPLING: (400, _INVALID, "invalid_value"),
    FaultKind.BAD_TOKENS: (400, _INVALID, "invalid_value"),
    FaultKind.CONTEXT_EXCEEDED: (400, _INVALID, "context_length_exceeded"),
    FaultKind.UNSUPPORTED_MODEL: (400, _INVALID, "unsupported_model"),
    FaultKind.QUOTA_EXCEEDED: (429, "rate_limit_error", "quota_exceeded"),
    FaultKind.OVERLOADED: (503, _SERVER, "overloaded"),
    FaultKind.DRAINING: (503, _SERVER, "draining"),
    FaultKind.UNAVAILABLE: (503, _SERVER, "verifier_unavailable"),
    FaultKind.TIMED_OUT: (503, _SERVER, "verifier_timed_out"),
    # The caller can do nothing about these: this endpoint and its verifier do not fit.
    FaultKind.UNAUTHENTICATED: (502, _SERVER, "verifier_refused"),
    FaultKind.NOT_ALLOWED: (502, _SERVER, "verifier_refused"),
    FaultKind.TOKENIZER_MISMATCH: (502, _SERVER, "tokenizer_mismatch"),
    FaultKind.PROTOCOL_MISMATCH: (502, _SERVER, "protocol_mismatch"),
    FaultKind.UNKNOWN_CODEC: (502, _SERVER, "unknown_codec"),
    FaultKind.UNKNOWN_VERIFICATION: (502, _SERVER, "unknown_verification"),
}


class ApiError(Exception):
    """A request that ends with an error.

    Args:
        status: of HTTP.
        message: what is wrong and what to do, for people.
        kind: OpenAI's `type`.
        param: the parameter at fault.
        code: short name for programs.
        retry_after_s: when trying again makes sense; 0 when it does not.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = _INVALID,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: int = 0,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.kind = kind
        self.param = param
        self.code = code
        self.retry_after_s = retry_after_s

    def body(self) -> dict[str, Any]:
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}

    def headers(self) -> dict[str, str]:
        headers = {"Retry-After": str(self.retry_after_s)} if self.retry_after_s else {}
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        return headers


def bad_param(param: str, message: str, code: str = "invalid_value") -> ApiError:
    return ApiError(400, message, param=param, code=code)


def unsupported(param: str, why: str) -> ApiError:
    return bad_param(param, f"'{param}' is not supported: {why}", "unsupported_parameter")


def from_fault(fault: SpecwireError) -> ApiError:
    """A fault of a session as its HTTP error."""
    status, kind, code = _BY_KIND.get(fault.kind, (500, _SERVER, fault.kind.value))
    retry_after_s = 0
    if status in (429, 503):
        retry_after_s = max(math.ceil(fault.retry_after_ms / 1e3), _RETRY_AFTER_S)
    return ApiError(status, str(fault), kind=kind, code=code, retry_after_s=retry_after_s)
