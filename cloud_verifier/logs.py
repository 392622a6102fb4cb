"""Log lines with the session and step that they are about, as text or as JSON."""

from __future__ import annotations

import json
import logging
from datetime import UTC, datetime

# What a LogRecord has by itself; everything else came in through `extra`.
_OWN = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}
_SHORT_ID = 8


def set_up_logging(level: str, *, as_json: bool) -> None:
    """Sends all log lines to stderr.

    Args:
        level: debug, info, warning or error.
        as_json: one JSON object a line instead of text.
    """
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter() if as_json else TextFormatter())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)


def _fields(record: logging.LogRecord) -> dict[str, object]:
    """The extra fields. A session's id is a key to it, so only its beginning is told."""
    fields = {name: value for name, value in vars(record).items() if name not in _OWN}
    if isinstance(session := fields.get("session"), str):
        fields["session"] = session[:_SHORT_ID]
    return fields


class TextFormatter(logging.Formatter):
    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)-7s %(name)s: %(message)s")

    def format(self, record: logging.LogRecord) -> str:
        head, *rest = super().format(record).split("\n", 1)
        fields = " ".join(f"{name}={value}" for name, value in _fields(record).items())
        return "\n".join((f"{head} {fields}".rstrip(), *rest))


class JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **_fields(record),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str, ensure_ascii=False)
