"""Compares `calls` with `rollouts`: each model call is in a rollout, in an open session, or dropped with a reason.

Sessions are folded as gateways fold them. Their rollouts are looked up by uid.
"""

from collections import Counter
from collections.abc import Iterable

from rollstream.pipeline.audit.ledger.book import Ledger
from rollstream.producers.gateway.sessions import CapturedSession, PartitionSessions
from rollstream.topics import codec
from rollstream.topics.catalogue import topic_name
from rollstream.topics.config import KafkaConfig
from rollstream.topics.errors import RecordError, TopicError
from rollstream.topics.kafka import topic_admin
from rollstream.topics.kafka.reader import read_to_end
from rollstream.topics.kafka.records import KafkaRecord
from rollstream.topics.kafka.skipped_records import SkippedRecords
from rollstream.topics.records import ModelCall, Rollout, SessionEvent

IN_ROLLOUTS = "in_rollouts"
OPEN = "open"
CANCELLED = "cancelled"
RETRIED = "retried"
LATE = "late"
NO_SESSION = "no_session"
FATES = (IN_ROLLOUTS, OPEN, CANCELLED, RETRIED, LATE, NO_SESSION)
"""Fates of calls: the last four are reasons for which a call is dropped."""
_REASONS = 20


class CallBook:
    """Sessions of all partitions, with the number of calls on the log."""

    def __init__(self) -> None:
        self.calls = 0
        self.folds: dict[int, PartitionSessions] = {}

    def add(self, message: KafkaRecord, record: ModelCall | SessionEvent) -> None:
        """Add the next record of a partition."""
        self.calls += isinstance(record, ModelCall)
        fold = self.folds.setdefault(message.partition, PartitionSessions())
        fold.apply(message.offset, message.timestamp_ms, record)

    @property
    def sessions(self) -> Iterable[CapturedSession]:
        """All sessions."""
        return (session for fold in self.folds.values() for session in fold.sessions.values())

    def fates(self) -> Counter[str]:
        """Number of calls by fate."""
        fates: Counter[str] = Counter({NO_SESSION: sum(fold.orphans for fold in self.folds.values())})
        for session in self.sessions:
            fates[RETRIED] += session.retried_calls
            fates[LATE] += session.late_calls
            fates[_fate(session)] += session.counted_calls
        return fates

    def reasons(self) -> dict[str, int]:
        """Sessions that were cancelled, by reason; the twenty most frequent."""
        finished = (session.finished for session in self.sessions)
        reasons = Counter(event.reason for event in finished if event is not None and not event.uids)
        return dict(reasons.most_common(_REASONS))

    def rollouts(self) -> dict[str, str]:
        """Session of each rollout that is said to be written, by its uid."""
        finished = (session.finished for session in self.sessions)
        return {uid: event.session for event in finished if event is not None for uid in event.uids}


def _fate(session: CapturedSession) -> str:
    if session.finished is None:
        return OPEN
    return IN_ROLLOUTS if session.finished.uids else CANCELLED


def check_calls(kafka: KafkaConfig, run: str, result: Ledger) -> None:
    """Add the calls of a run to a ledger. Runs of earlier releases have none."""
    topic = topic_name(run, "calls")
    try:
        topic_admin.partitions_of(kafka, topic)
    except TopicError:
        return
    book, skipped = CallBook(), SkippedRecords("ledger", logged=False)
    for message in read_to_end(kafka, topic):
        with skipped.passing(message):
            record = codec.decode(message.value)
            if not isinstance(record, ModelCall | SessionEvent):
                raise RecordError(f"a {type(record).__name__} stands where a call belongs")
            book.add(message, record)
    result.note_skipped(skipped)
    fates = book.fates()
    sessions = list(book.sessions)
    result.calls = {
        "recorded": book.calls,
        **{fate: fates[fate] for fate in FATES},
        "sessions": len(sessions),
        "open_sessions": sum(session.finished is None for session in sessions),
        "reasons": book.reasons(),
        "pruned_offsets": sum(begin for begin, _end in topic_admin.bounds(kafka, topic).values()),
    }
    # Read after the calls: rollouts are written before their session says so.
    _check_rollouts(kafka, run, book.rollouts(), result)


def _check_rollouts(kafka: KafkaConfig, run: str, wanted: dict[str, str], result: Ledger) -> None:
    topic = topic_name(run, "rollouts")
    if not wanted or any(begin for begin, _end in topic_admin.bounds(kafka, topic).values()):
        return  # of pruned rollouts only counts are left
    for message in read_to_end(kafka, topic, isolation="read_uncommitted"):
        if codec.kind_of(message.value) == "Rollout":
            try:
                wanted.pop(codec.decode_as(Rollout, message.value).uid, None)
            except RecordError:
                continue  # grouping reports it
    for uid, session in sorted(wanted.items()):
        result.problem(f"session {session} says that rollout {uid} is written, and rollouts does not hold it")
