"""Sessions of agents for the page: a list with their states, derived as in gateways, and one session with its calls.

A run may have millions of calls, so the list keeps none; the records of one session are read again when it is shown.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from typing import Any

from rollstream.pipeline.audit.ledger.calls import CallBook
from rollstream.producers.episodes.call_sequences import CallSequences
from rollstream.producers.gateway.sessions import CapturedSession
from rollstream.topics.config import KafkaConfig
from rollstream.topics.errors import RecordError, TopicError
from rollstream.topics.kafka.reader import read_to_end
from rollstream.topics.kafka.records import KafkaRecord
from rollstream.topics.kafka.skipped_records import SkippedRecords
from rollstream.topics.records import ModelCall, SessionEvent
from rollstream.topics.wire.catalogue import topic_name
from rollstream.topics.wire.codec import decode

Reading = Callable[[int, range], Iterable[KafkaRecord]]
"""Reads offsets of a partition of `calls`."""
STATES = ("open", "waits_for_reward", "closing", "finished", "cancelled")


class SessionList:
    """Sessions of a run at the time they were read, newest first; it keeps the places of their records."""

    def __init__(self, messages: Iterable[KafkaRecord]) -> None:
        book, ended, began = CallBook(), dict[str, int](), dict[str, int]()
        self._offsets: dict[str, dict[int, range]] = {}
        """By session and partition, offsets that include all its records."""
        skipped = SkippedRecords(logged=False)
        for message in messages:
            with skipped.passing(message):
                record = _record(message)
                book.add(message, record)
                within = self._offsets.setdefault(record.session, {})
                first = within.get(message.partition, range(message.offset, 0)).start
                within[message.partition] = range(first, message.offset + 1)
                began.setdefault(record.session, message.timestamp_ms)
                if isinstance(record, SessionEvent) and record.kind in ("end", "finished"):
                    ended.setdefault(record.session, message.timestamp_ms)
        sessions = {session.name: session for session in book.sessions}
        self._began = {name: began[name] for name in sessions}
        newest = sorted(sessions, key=self.place)
        self.rows = {name: _row(sessions[name], began[name], ended.get(name)) for name in newest}
        """Row of each session, by name."""

    def place(self, name: str) -> tuple[int, str]:
        """Return a value that orders sessions, newest first. Raises KeyError if the session does not exist."""
        return -self._began[name], name

    def details(self, name: str, read: Reading) -> dict[str, Any]:
        """Return a session with its events and its calls with all messages; `read` reads records of `calls` again.

        Raises TopicError if the session does not exist.
        """
        if name not in self.rows:
            raise TopicError("there is no such session; /sessions lists them")
        sequences, events, calls = CallSequences(), [], []
        skipped = SkippedRecords(logged=False)
        for partition, offsets in self._offsets[name].items():
            for message in read(partition, offsets):
                # A value without the bytes of the name belongs to another session, and need not be decoded.
                if name.encode() not in (message.value or b""):
                    continue
                with skipped.passing(message):
                    record = _record(message)
                    if record.session != name:
                        continue
                    if isinstance(record, SessionEvent):
                        events.append(_event(message, record))
                    else:
                        calls.append(_call(message, record, sequences))
        return {"session": self.rows[name], "events": events, "calls": calls}


def read_sessions(kafka: KafkaConfig, run: str) -> SessionList:
    """Read the sessions of a run. Raises TopicError or BrokerUnavailable."""
    return SessionList(read_to_end(kafka, topic_name(run, "calls")))


def reading_of(kafka: KafkaConfig, run: str) -> Reading:
    """Return a function that reads some offsets of a partition of `calls`."""
    topic = topic_name(run, "calls")

    def read(partition: int, offsets: range) -> Iterator[KafkaRecord]:
        messages = read_to_end(kafka, topic, partitions=[partition], start={partition: offsets.start})
        with closing(messages):
            for message in messages:
                if message.offset >= offsets.stop:
                    return
                yield message
                if message.offset == offsets.stop - 1:
                    return

    return read


def _record(message: KafkaRecord) -> ModelCall | SessionEvent:
    record = decode(message.value)
    if not isinstance(record, ModelCall | SessionEvent):
        raise RecordError(f"a {type(record).__name__} instead of a call or an event of a session")
    return record


def _row(session: CapturedSession, began_ms: int, ended_ms: int | None) -> dict[str, Any]:
    closed = session.closed
    return {
        "session": session.name,
        "environment": session.start.environment,
        "state": state_of(session),
        "calls": session.counted_calls,
        "rollouts": len(session.finished.uids) if session.finished else 0,
        "began_ms": began_ms,
        "ended_ms": ended_ms,
        "reason": (closed.reason or None) if closed else None,
    }


def state_of(session: CapturedSession) -> str:
    """Return the state of a session, as the gateway names it."""
    closed = session.closed
    if closed is None:
        return "waits_for_reward" if session.ended else "open"
    if session.finished is None:
        return "closing"
    return "finished" if session.finished.uids else "cancelled"


def _event(message: KafkaRecord, event: SessionEvent) -> dict[str, Any]:
    event_fields: dict[str, Any] = {"kind": event.kind, "time_ms": message.timestamp_ms, "author": event.author}
    if event.kind == "start":
        event_fields |= {"environment": event.environment, "example": event.example_id, "group": event.group_id}
        event_fields |= {"member": event.member, "group_size": event.group_size, "version": event.policy_version}
    if event.scored:
        event_fields["reward"] = event.reward
    for name in ("components", "turn_rewards"):
        if values := getattr(event, name):
            event_fields[name] = dict(values)
    if event.reason:
        event_fields["reason"] = event.reason
    if event.uids:
        event_fields["uids"] = list(event.uids)
    return event_fields


def _call(message: KafkaRecord, call: ModelCall, sequences: CallSequences) -> dict[str, Any]:
    try:
        messages, problem = list(sequences.add(call).messages), None
    except RecordError as error:
        messages, problem = [], str(error)
    versions = [span.version for answer in call.answers for span in answer.spans]
    return {
        "place": f"{message.partition}:{message.offset}",
        "messages": messages,
        "answer": "\n".join(answer.text for answer in call.answers),
        "tokens": sum(len(answer.tokens) for answer in call.answers),
        "version": max(versions, default=None),
        "began_ms": int(call.began * 1000) or None,
        "answered_ms": int(call.answered * 1000) or None,
        "finish_reasons": [answer.finish_reason for answer in call.answers],
        "problem": problem,
    }
