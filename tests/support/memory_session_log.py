"""A session on a log in memory, for tests of the capture without a broker."""

from rollstream.producers.gateway.memory_log import MemoryLog
from rollstream.producers.gateway.sessions import CapturedSession
from rollstream.topics.records import SessionEvent


def log_of(start: SessionEvent, log: MemoryLog | None = None) -> tuple[MemoryLog, CapturedSession]:
    """Return a log, a new one by default, with a session that has started."""
    log = log or MemoryLog()
    session = log.folds[0].apply(0, 0, start)
    assert session is not None
    return log, session
