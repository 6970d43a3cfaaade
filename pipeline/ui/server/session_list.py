"""Sessions of agents for the page: a list with their states, derived as in gateways, and one session with its calls."""

from collections.abc import Iterable
from typing import Any

from rollstream.pipeline.audit.ledger.calls import CallBook
from rollstream.producers.episodes.call_sequences import CallSequences
from rollstream.producers.gateway.sessions import CapturedSession
from rollstream.topics.catalogue import topic_name
from rollstream.topics.codec import decode
from rollstream.topics.config import KafkaConfig
from rollstream.topics.errors import RecordError, TopicError
from rollstream.topics.kafka import topic_admin
from rollstream.topics.kafka.reader import read_to_end
from rollstream.topics.kafka.records import KafkaRecord
from rollstream.topics.kafka.skipped_records import SkippedRecords
from rollstream.topics.records import ModelCall, SessionEvent

STATES = ("open", "waits_for_reward", "closing", "finished", "cancelled")


class SessionList:
    """Sessions of a run at the time they were read, newest first."""

    def __init__(self, messages: Iterable[KafkaRecord]) -> None:
        book, self._ended = CallBook(), dict[str, int]()
        self._messages: dict[str, list[tuple[KafkaRecord, ModelCall | SessionEvent]]] = {}
        skipped = SkippedRecords(logged=False)
        began: dict[str, int] = {}
        for message in messages:
            with skipped.passing(message):
                record = decode(message.value)
                if not isinstance(record, ModelCall | SessionEvent):
                    raise RecordError(f"a {type(record).__name__} instead of a call or an event of a session")
                book.add(message, record)
                self._messages.setdefault(record.session, []).append((message, record))
                began.setdefault(record.session, message.timestamp_ms)
                if isinstance(record, SessionEvent) and record.kind in ("end", "finished"):
                    self._ended.setdefault(record.session, message.timestamp_ms)
        self._began = began
        sessions = {session.name: session for session in book.sessions}
        self.by_name = {name: sessions[name] for name in sorted(sessions, key=lambda name: (-began[name], name))}

    def row(self, session: CapturedSession) -> dict[str, Any]:
        """Return a session as a row."""
        closed = session.closed
        return {
            "session": session.name,
            "environment": session.start.environment,
            "state": state_of(session),
            "calls": session.counted_calls,
            "rollouts": len(session.finished.uids) if session.finished else 0,
            "began_ms": self._began[session.name],
            "ended_ms": self._ended.get(session.name),
            "reason": (closed.reason or None) if closed else None,
        }

    def details(self, name: str) -> dict[str, Any]:
        """Return a session with its events and its calls with all messages. Raises TopicError if it does not exist."""
        if name not in self.by_name:
            raise TopicError("there is no such session; /sessions lists them")
        sequences, events, calls = CallSequences(), [], []
        for message, record in self._messages[name]:
            if isinstance(record, SessionEvent):
                events.append(_event(message, record))
            else:
                calls.append(_call(message, record, sequences))
        return {"session": self.row(self.by_name[name]), "events": events, "calls": calls}


def read_sessions(kafka: KafkaConfig, run: str) -> SessionList:
    """Read the sessions of a run; a run of an early release, which lacks their topic, has none."""
    topic = topic_name(run, "calls")
    try:
        topic_admin.partitions_of(kafka, topic)
    except TopicError:
        return SessionList(())
    return SessionList(read_to_end(kafka, topic))


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
