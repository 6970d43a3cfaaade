"""The calls of sessions in memory, for tests of the capture without a broker."""

from rollstream.producers.gateway.call_log import AppendedRecord
from rollstream.producers.gateway.sessions import CapturedSession
from rollstream.topics.records import ModelCall, SessionEvent


class MemoryLog:
    """The log of one process, in memory."""

    async def append(self, _record: ModelCall | SessionEvent) -> AppendedRecord:
        return AppendedRecord(0, 1, 1)

    async def current(self, session: CapturedSession) -> None:
        pass

    async def applied(self, session: CapturedSession, record: ModelCall, place: AppendedRecord) -> None:
        session.add_call(record, place.append_ms)
