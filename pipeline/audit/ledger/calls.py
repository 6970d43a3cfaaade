"""Compares `calls` with `rollouts`: each model call is in a rollout, in an open session, or dropped with a reason.

Sessions are folded as gateways fold them, and their rollouts are looked up by uid.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import suppress
from types import MappingProxyType
from typing import Any

from rollstream.pipeline.audit.ledger.book import Ledger
from rollstream.pipeline.audit.ledger.topic_tail import TopicTail
from rollstream.producers.gateway.sessions import CapturedSession, PartitionSessions
from rollstream.topics.config import KafkaConfig
from rollstream.topics.errors import RecordError
from rollstream.topics.kafka import topic_admin
from rollstream.topics.kafka.reader import read_to_end
from rollstream.topics.kafka.records import KafkaRecord
from rollstream.topics.records import ModelCall, Rollout, SessionEvent
from rollstream.topics.wire import codec
from rollstream.topics.wire.catalogue import topic_name

IN_ROLLOUTS = "in_rollouts"
OPEN = "open"
CANCELLED = "cancelled"
RETRIED = "retried"
LATE = "late"
NO_SESSION = "no_session"
PRUNED = "pruned"
FATES = (IN_ROLLOUTS, OPEN, CANCELLED, RETRIED, LATE, NO_SESSION, PRUNED)
"""Fates of calls. From CANCELLED to NO_SESSION they are the reasons for dropping a call; the start of a PRUNED call's
session is no longer on the log."""
_REASONS = 20


class CallBook:
    """Sessions of all partitions, with the number of calls on the log."""

    def __init__(self) -> None:
        self.calls = 0
        self.folds: dict[int, PartitionSessions] = {}

    def add(self, message: KafkaRecord, record: ModelCall | SessionEvent) -> CapturedSession | None:
        """Add the next record of a partition; return its session, or None if it has none."""
        self.calls += isinstance(record, ModelCall)
        fold = self.folds.setdefault(message.partition, PartitionSessions())
        return fold.apply(message.offset, message.timestamp_ms, record)

    @property
    def sessions(self) -> Iterable[CapturedSession]:
        """All sessions."""
        return (session for fold in self.folds.values() for session in fold.sessions.values())

    def fates(self, begins: Mapping[int, int] = MappingProxyType({})) -> Counter[str]:
        """Return the number of calls by fate; `begins` are the first offsets of partitions, 0 by default."""
        fates: Counter[str] = Counter()
        for partition, fold in self.folds.items():
            fates[PRUNED if begins.get(partition) else NO_SESSION] += fold.orphans
        for session in self.sessions:
            fates[RETRIED] += session.retried_calls
            fates[LATE] += session.late_calls
            fates[_fate(session)] += session.counted_calls
        return fates

    def reasons(self) -> dict[str, int]:
        """Return the number of cancelled sessions for each of the twenty most frequent reasons."""
        finished = (session.finished for session in self.sessions)
        reasons = Counter(event.reason for event in finished if event is not None and not event.uids)
        return dict(reasons.most_common(_REASONS))


def _fate(session: CapturedSession) -> str:
    if session.finished is None:
        return OPEN
    return IN_ROLLOUTS if session.finished.uids else CANCELLED


class CallRecords:
    """The calls and sessions of a run that have been read, and the rollouts that finished sessions name.

    For a finished session, only the number of calls is kept. For an open session, the saved state keeps only the name,
    so a process that continues from it reads the session's records again.
    """

    def __init__(self, kafka: KafkaConfig, run: str) -> None:
        self.tail = TopicTail(kafka, run, "calls")
        self._kafka, self._rollouts = kafka, topic_name(run, "rollouts")
        self._book = CallBook()
        self._follows: dict[int, int] = {}
        """By partition of `rollouts`, the offset after the last record checked."""
        self._unseen: dict[str, str] = {}
        """By uid, the session of each rollout that a finished session names and that has not been found yet."""
        self._named: set[str] = set()
        """Uids of all rollouts that finished sessions name."""
        self._early: dict[str, str] = {}
        """By uid, the episode of each rollout that was found before a finished session named it."""
        self._open: dict[int, tuple[int, set[str]]] = {}
        """By partition, the lowest offset and the names of the sessions that were open when the state was saved."""

    def __getstate__(self) -> dict[str, Any]:
        finished = []
        opened = []
        for partition, fold in self._book.folds.items():
            sessions = fold.sessions.values()
            finished.append([partition, fold.orphans, [_row(session) for session in sessions if session.finished]])
            begun = [session for session in sessions if not session.finished]
            if begun:
                first = min(session.start_offset for session in begun)
                opened.append([partition, first, [session.name for session in begun]])
        return {**vars(self), "_book": self._book.calls, "_named": finished, "_open": opened}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._book, self._named = CallBook(), set()
        self._book.calls = state["_book"]
        for partition, orphans, rows in state["_named"]:
            fold = self._book.folds[partition] = PartitionSessions(orphans=orphans)
            fold.sessions = {row[0]: _session(*row) for row in rows}
            self._named.update(uid for row in rows for uid in row[-1])
        self._open = {partition: (first, set(names)) for partition, first, names in state["_open"]}

    def read(self, ends: Mapping[int, int]) -> None:
        """Read new records. `ends` are the ends of the partitions of `rollouts` from before the call.

        Calls are read first, because rollouts are written before the end of their session.
        """
        self._read_open()
        for message in self.tail.messages():
            with self.tail.skipped.passing(message):
                self._add(message, _record(message))
        begins = {p: begin for p, (begin, _end) in topic_admin.bounds(self._kafka, self._rollouts).items()}
        if any(begins.values()):
            self._unseen, self._early = {}, {}  # Pruned rollouts cannot be looked up by uid.
        if any(begins.values()) or not (self._unseen or self._open_episodes()):
            self._follows = {p: max(end, self._follows.get(p, 0)) for p, end in ends.items()}
        else:
            self._look_up(ends)

    def sum_up(self, result: Ledger) -> None:
        """Add the calls, and contradictions about them, to a ledger."""
        book = self._book
        begins = {p: begin for p, (begin, _end) in topic_admin.bounds(self._kafka, self.tail.topic).items()}
        fates = book.fates(begins)
        sessions = list(book.sessions)
        result.calls = {
            "recorded": book.calls,
            **{fate: fates[fate] for fate in FATES},
            "sessions": len(sessions),
            "open_sessions": sum(session.finished is None for session in sessions),
            "reasons": book.reasons(),
            "pruned_offsets": sum(begins.values()),
        }
        for uid, session in sorted(self._unseen.items()):
            result.problem(f"session {session} names rollout {uid}, which is not in rollouts")

    def _read_open(self) -> None:
        """Read again the records of the sessions that were open when the state was saved."""
        if not self._open:
            return
        opened, self._open = self._open, {}
        start = {partition: first for partition, (first, _names) in opened.items()}
        calls = self._book.calls
        for message in read_to_end(self._kafka, self.tail.topic, partitions=[*opened], start=start):
            if message.offset >= self.tail.position[message.partition]:
                continue
            with suppress(RecordError):
                record = _record(message)
                if record.session in opened[message.partition][1]:
                    self._book.add(message, record)
        self._book.calls = calls  # These calls were counted before.

    def _add(self, message: KafkaRecord, record: ModelCall | SessionEvent) -> None:
        session = self._book.add(message, record)
        if session is None or session.finished is not record:
            return
        for uid in session.finished.uids:
            # If several attempts at an episode name a rollout, it counts for the first of these attempts.
            if uid not in self._named and self._early.pop(uid, None) is None:
                self._unseen[uid] = session.name
            self._named.add(uid)
        episodes = self._open_episodes()
        self._early = {uid: episode for uid, episode in self._early.items() if episode in episodes}

    def _open_episodes(self) -> set[str]:
        return {session.episode for fold in self._book.folds.values() for session in fold.open.values()}

    def _look_up(self, ends: Mapping[int, int]) -> None:
        """Look for the rollouts that sessions name; remember rollouts of open episodes that no session names yet.

        Rollouts from `ends` on are looked at again by the next call, which knows the sessions that began meanwhile.
        """
        episodes = self._open_episodes()
        messages = read_to_end(self._kafka, self._rollouts, start=dict(self._follows), isolation="read_uncommitted")
        for message in messages:
            if message.offset < self._follows.get(message.partition, 0):
                continue
            if message.offset < ends[message.partition]:
                self._follows[message.partition] = message.offset + 1
            if codec.kind_of(message.value) != "Rollout":
                continue
            with suppress(RecordError):  # Grouping reports invalid records.
                rollout = codec.decode_as(Rollout, message.value)
                if self._unseen.pop(rollout.uid, None) is None and rollout.episode_uid in episodes:
                    self._early[rollout.uid] = rollout.episode_uid


def _record(message: KafkaRecord) -> ModelCall | SessionEvent:
    record = codec.decode(message.value)
    if not isinstance(record, ModelCall | SessionEvent):
        raise RecordError(f"a {type(record).__name__} is not a call or a session event")
    return record


Row = tuple[str, int, int, int, int, str, list[str]]
"""Name and start offset of a finished session, its numbers of counted, retried and late calls, its reason, its uids."""


def _row(session: CapturedSession) -> Row:
    counts = session.counted_calls, session.retried_calls, session.late_calls
    reason, uids = (session.finished.reason, session.finished.uids) if session.finished else ("", ())
    return session.name, session.start_offset, *counts, reason, list(uids)


def _session(
    name: str, offset: int, counted: int, retried: int, late: int, reason: str, uids: list[str]
) -> CapturedSession:
    """Return a finished session with the data that the ledger needs."""
    return CapturedSession(
        SessionEvent(session=name, kind="start"),
        offset,
        policy_version=-1,
        last_ms=0,
        finished=SessionEvent(session=name, kind="finished", reason=reason, uids=tuple(uids)),
        counted_calls=counted,
        retried_calls=retried,
        late_calls=late,
    )
