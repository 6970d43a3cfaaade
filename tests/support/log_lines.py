"""Lines that a process would have written to its log."""

import pytest

from rollstream.topics.logs import JsonFormatter


def log_lines(caplog: pytest.LogCaptureFixture) -> str:
    """All lines so far, with the fields of events."""
    return "\n".join(map(JsonFormatter().format, list(caplog.records)))
