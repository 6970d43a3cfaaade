"""Ends the episodes that killed workers left open on `calls`: each is finished if its rollouts are on the log, else
cancelled, so that no group waits for them and the ledger knows the fate of their calls. A worker that was killed
between two attempts at an episode left a session for each attempt.

When a worker starts, it ends the episodes that its own earlier processes left, and also other workers' episodes that
are older than any running episode can be.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Iterable, Sequence
from contextlib import closing
from typing import NamedTuple

from rollstream.producers.config import WorkerConfig
from rollstream.producers.episodes.branches import branches_of
from rollstream.producers.gateway.call_log import CallWriter
from rollstream.producers.gateway.episode_rollouts import rollout_uids
from rollstream.producers.gateway.rollout_writing import cancel_episode
from rollstream.producers.gateway.session_names import group_of, partition_of_group
from rollstream.producers.gateway.sessions import CapturedSession, PartitionSessions
from rollstream.producers.rollout_producer import RolloutProducer
from rollstream.topics import codec
from rollstream.topics.catalogue import topic_name
from rollstream.topics.config import KafkaConfig
from rollstream.topics.errors import RecordError
from rollstream.topics.kafka import topic_admin
from rollstream.topics.kafka.reader import Reader, read_to_end
from rollstream.topics.keys import decode_key, encode_key, partition_of
from rollstream.topics.logs import event
from rollstream.topics.records import ModelCall, Rollout, SessionEvent

logger = logging.getLogger(__name__)
LEFT = "the worker that played the episode is gone"
"""Reason of the cancellation."""
_SKEW_MS = 60_000
"""Tolerated difference between the clocks of brokers."""
_FLUSH_S = 30.0


class LeftEpisode(NamedTuple):
    """The fate of an episode that a killed worker left open."""

    session: CapturedSession
    uids: tuple[str, ...]
    """uids of its rollouts, all of which are on the log; empty if it is cancelled."""


async def end_left_episodes(
    kafka: KafkaConfig, run: str, config: WorkerConfig, *, author: str, producer: RolloutProducer
) -> list[LeftEpisode]:
    """End the episodes that earlier processes of a worker left open, and other workers' episodes that are too old.

    `author` is the name of this process: the worker's id and the incarnation. `producer` writes the cancellations.
    Raises BrokerUnavailable, TopicError, DeliveryError.
    """
    left = await asyncio.to_thread(_read_left, kafka, run, config, author)
    if not left:
        return []
    writer = CallWriter(kafka, run)
    try:
        finished = {session.episode for session, uids in left if uids}
        cancelled = {session.episode: session for session, uids in left if not uids}
        for name, session in cancelled.items():
            if name not in finished:
                cancel_episode(producer, session, LEFT)
        await asyncio.to_thread(producer.flush, _FLUSH_S)
        for session, uids in left:
            end = SessionEvent(
                session=session.name,
                kind="finished",
                author=author,
                wall_time=time.time(),
                owner="worker",
                uids=uids,
                reason="" if uids else LEFT,
            )
            await writer.append(end)
    finally:
        await writer.close()
    event(logger, "left_episodes_ended", episodes=len(left), cancelled=sum(not episode.uids for episode in left))
    return left


def longest_silence_s(config: WorkerConfig) -> float:
    """Return the time without a record after which the worker that plays an episode must be gone.

    A member that ends first waits for the other members of its group before its rollouts are written.
    """
    return 2 * config.episode_timeout_s + config.drain_timeout_s + _SKEW_MS / 1000


def _read_left(kafka: KafkaConfig, run: str, config: WorkerConfig, author: str) -> list[LeftEpisode]:
    oldest_ms = (time.time() - longest_silence_s(config)) * 1000
    left = [
        session
        for session in _open_sessions(kafka, run)
        if session.start.author != author
        and (session.start.author.rpartition(".")[0] == config.worker_id or session.last_ms < oldest_ms)
    ]
    ended = [session for session in left if session.ended]
    expected = {session.name: _expected_uids(session) for session in _with_calls(kafka, run, ended)}
    present = _present(kafka, run, ended, {uid for uids in expected.values() for uid in uids})
    uids = {session.name: expected.get(session.name, ()) for session in left}
    return [
        LeftEpisode(session, uids[session.name] if present.issuperset(uids[session.name]) else ()) for session in left
    ]


def _open_sessions(kafka: KafkaConfig, run: str) -> list[CapturedSession]:
    """Return the workers' unfinished sessions, without their calls, which are most of the topic."""
    folds: dict[int, PartitionSessions] = {}
    topic = topic_name(run, "calls")
    partitions = topic_admin.partitions_of(kafka, topic)
    for message in read_to_end(kafka, topic):
        fold = folds.setdefault(message.partition, PartitionSessions(keep_finished=0))
        with contextlib.suppress(RecordError):  # gateways and the ledger report bad records
            if codec.kind_of(message.value) == "ModelCall":
                if session := fold.sessions.get(str(*decode_key(message.key)[:1])):
                    session.last_ms = message.timestamp_ms
                continue
            record = codec.decode(message.value)
            # The end of a session that is on another partition than its name says would never reach it.
            if isinstance(record, SessionEvent) and _partition_of(record, partitions) == message.partition:
                fold.apply(message.offset, message.timestamp_ms, record)
    sessions = (session for fold in folds.values() for session in fold.open.values())
    return [session for session in sessions if session.start.owner == "worker"]


def _partition_of(record: SessionEvent, partitions: int) -> int:
    """Return the partition on which a session's records belong. Raises RecordError if its name is invalid."""
    return partition_of_group(group_of(record.session), partitions)


def _with_calls(kafka: KafkaConfig, run: str, sessions: Sequence[CapturedSession]) -> list[CapturedSession]:
    """Return these sessions with their calls."""
    topic, names = topic_name(run, "calls"), {encode_key(session.name) for session in sessions}
    starts: dict[int, int] = {}
    if sessions:
        partitions = topic_admin.partitions_of(kafka, topic)
        for session in sessions:
            partition = partition_of_group(session.start.group_id, partitions)
            starts[partition] = min(starts.get(partition, session.start_offset), session.start_offset)
    folds = {partition: PartitionSessions() for partition in starts}
    for message in read_to_end(kafka, topic, partitions=starts, start=starts) if starts else ():
        if message.key in names:
            with contextlib.suppress(RecordError):
                record = codec.decode(message.value)
                if isinstance(record, ModelCall | SessionEvent):
                    folds[message.partition].apply(message.offset, message.timestamp_ms, record)
    return [session for fold in folds.values() for session in fold.open.values()]


def _expected_uids(session: CapturedSession) -> tuple[str, ...]:
    """Return the uids that a session's rollouts have if they were written; none if it cannot have rollouts."""
    try:
        return tuple(rollout_uids(session.episode, len(branches_of(session.calls))))
    except RecordError:
        return ()


def _present(kafka: KafkaConfig, run: str, sessions: Iterable[CapturedSession], wanted: set[str]) -> set[str]:
    """Return the wanted uids that are on `rollouts`, reading from the time when the first of these sessions ended."""
    topic, present = topic_name(run, "rollouts"), set[str]()
    with closing(Reader(kafka, doing="looking for rollouts", isolation="read_uncommitted")) as reader:
        since_ms: dict[int, int] = {}
        partitions = reader.partitions_of(topic)
        for session in sessions:
            key = encode_key(session.start.environment, session.start.example_id)
            partition = partition_of(key, partitions)
            since_ms[partition] = min(since_ms.get(partition, session.last_ms), session.last_ms)
        for partition, at_ms in since_ms.items():
            begin = reader.offsets_at(topic, [partition], at_ms - _SKEW_MS)[partition]
            if begin is None:
                continue
            for message in read_to_end(kafka, topic, partitions=[partition], start={partition: begin}, reader=reader):
                if codec.kind_of(message.value) == "Rollout":
                    with contextlib.suppress(RecordError):  # grouping reports bad records
                        present |= wanted & {codec.decode_as(Rollout, message.value).uid}
    return present
