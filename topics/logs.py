"""Structured logs on stderr for every role: one JSON object per line, with an event and its fields.

A command calls `setup` once; libraries only call `event`.
"""

import json
import logging
import sys
from datetime import UTC, datetime
from typing import Any

_FIELDS = "rollstream_fields"


class JsonFormatter(logging.Formatter):
    """Formats a record as one JSON line with time, level, logger, event and the event's fields."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "event": record.getMessage(),
            **getattr(record, _FIELDS, {}),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str, ensure_ascii=False)


def setup(level: str = "info") -> None:
    """Write our logs, and the logs and warnings of libraries, to stderr as JSON lines."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter())
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    logging.captureWarnings(True)
    logging.getLogger("rollstream").setLevel(level.upper())


def event(
    logger: logging.Logger,
    name: str,
    *,
    level: int = logging.INFO,
    exc_info: Any = None,
    **fields: object,
) -> None:
    """Log the event `name` with its fields, and with the traceback of the error `exc_info`."""
    logger.log(level, name, exc_info=exc_info, extra={_FIELDS: fields}, stacklevel=2)
