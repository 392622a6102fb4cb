"""Reading a JSON request field by field; what was never read is an unknown parameter."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from edge_client.api.errors import ApiError, bad_param


class Fields:
    """The body of one request. Every reader raises ApiError(400) naming the parameter.

    JSON's null means "not given", as it does for OpenAI.
    """

    def __init__(self, body: Mapping[str, Any], prefix: str = "") -> None:
        self._body = {key: value for key, value in body.items() if value is not None}
        self._prefix = prefix
        self._unread = set(self._body)

    def take(self, name: str, default: Any = None) -> Any:
        self._unread.discard(name)
        return self._body.get(name, default)

    def number(self, name: str, default: float, low: float, high: float) -> float:
        value = self.take(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise self._bad(name, value, "a number")
        if not low <= value <= high:
            raise self._bad(name, value, f"from {low:g} to {high:g}")
        return float(value)

    def integer(self, name: str, default: int, low: int, high: int) -> int:
        value = self.take(name, default)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self._bad(name, value, "a whole number")
        if not low <= value <= high:
            raise self._bad(name, value, f"from {low} to {high}")
        return value

    def boolean(self, name: str) -> bool:
        value = self.take(name, False)
        if not isinstance(value, bool):
            raise self._bad(name, value, "true or false")
        return value

    def text(self, name: str, default: str | None = None) -> str:
        value = self.take(name, default)
        if not isinstance(value, str):
            if value is None:
                raise bad_param(
                    self._prefix + name, f"'{self._prefix}{name}' is missing.", "missing_parameter"
                )
            raise self._bad(name, value, "a string")
        return value

    def object(self, name: str) -> Fields:
        value = self.take(name, {})
        if not isinstance(value, dict):
            raise self._bad(name, value, "an object")
        return Fields(value, f"{self._prefix}{name}.")

    def ignore(self, names: frozenset[str]) -> None:
        """Fields that change nothing here, whatever they hold."""
        self._unread -= names

    def close(self) -> None:
        """Raises ApiError(400) for the first parameter that nothing has read."""
        if self._unread:
            name = self._prefix + min(self._unread)
            raise ApiError(400, f"Unknown parameter: '{name}'.", param=name, code="unknown_parameter")

    def _bad(self, name: str, value: Any, wanted: str) -> ApiError:
        shown = repr(value)
        shown = shown if len(shown) < 80 else f"{shown[:77]}..."
        return bad_param(self._prefix + name, f"'{self._prefix}{name}' must be {wanted}, not {shown}.")
