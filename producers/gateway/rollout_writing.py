"""Writes the rollouts of captured sessions, each exactly once even if gateways are killed.

A gateway announces on `calls` that it will write, with the end of the partition of `rollouts`; it writes; then it
records that it has written. A gateway that takes over reads `rollouts` from the announced end on, and writes only the
missing records. Every gateway writes the same bytes under the same uids, so grouping drops the duplicates of a gateway
that was suspended while it wrote.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import replace
from typing import Any, Literal

from rollstream.producers.flow.policy_versions import PolicySource
from rollstream.producers.gateway.capture import SessionLog
from rollstream.producers.gateway.episode_rollouts import RolloutForm, cancellation_of, episode_records
from rollstream.producers.gateway.sessions import CapturedSession
from rollstream.producers.record_sender import RolloutDelivery
from rollstream.producers.rollout_producer import RolloutProducer
from rollstream.topics.config import KafkaConfig
from rollstream.topics.errors import RecordError
from rollstream.topics.kafka import topic_admin
from rollstream.topics.kafka.reader import Reader, read_to_end
from rollstream.topics.logs import event
from rollstream.topics.records import GroupCancelled, Rollout, SessionEvent
from rollstream.topics.wire import codec
from rollstream.topics.wire.catalogue import topic_name
from rollstream.topics.wire.keys import encode_key, partition_of

logger = logging.getLogger(__name__)
_FLUSH_S = 30.0


class RolloutWriter:
    """Writes the rollouts of closed sessions. `finish` may be called for one session any number of times."""

    def __init__(
        self,
        kafka: KafkaConfig,
        run: str,
        log: SessionLog,
        form: RolloutForm,
        policies: PolicySource,
        *,
        author: str,
        takeover_s: float,
        on_written: Callable[[CapturedSession, Sequence[Rollout]], None] = lambda _session, _rollouts: None,
    ) -> None:
        """`author` is the name of the gateway. `on_written` is called in the event loop with the rollouts of each
        session that this gateway wrote. Raises BrokerUnavailable or TopicError without a topic to write to."""
        self._kafka, self._run, self._log, self._form, self._policies = kafka, run, log, form, policies
        self._author, self._on_written = author, on_written
        self._takeover_ms = int(takeover_s * 1000)
        self._partitions = topic_admin.partitions_of(kafka, topic_name(run, "rollouts"))
        self._producer = self._open("rollouts")
        self._unlabelled: RolloutProducer | None = None
        """Producer of rollouts that a labeler gives their rewards, from the first such rollout on."""
        self._ends = Reader(kafka, doing="asking for ends")
        self._lock = asyncio.Lock()
        self._under_way: dict[str, asyncio.Task[None]] = {}
        self._offsets: dict[str, int] = {}
        """By uid, the offsets of rollouts that the present write has delivered or found on the log."""

    def _open(self, topic: Literal["rollouts", "unlabelled"]) -> RolloutProducer:
        # The producer refuses rollouts sampled with top_p, top_k or min_p; its error becomes the cancellation's reason.
        at_once: dict[str, Any] = {"linger.ms": "0"}
        return RolloutProducer(self._kafka, self._run, topic=topic, on_delivery=self._delivered, **at_once)

    def _topic_of(self, session: CapturedSession) -> str:
        return topic_name(self._run, "unlabelled" if session.start.labeled else "rollouts")

    def _delivered(self, delivery: RolloutDelivery) -> None:
        self._offsets[delivery.uid] = delivery.offset

    def partition_of(self, session: CapturedSession) -> int:
        """Return the partition of `rollouts`, or of `unlabelled`, that holds the rollouts of a session."""
        return partition_of(encode_key(session.start.environment, session.start.example_id), self._partitions)

    async def finish(self, session: CapturedSession) -> bool:
        """Write the rollouts of a closed session, or its cancellation; return whether they are written.

        Returns False if the session is open, or while another gateway writes its rollouts. Raises BrokerUnavailable,
        DeliveryError.
        """
        if session.closed is None or session.finished is not None:
            return session.finished is not None
        task = self._under_way.get(session.name)
        if task is None:
            task = self._under_way[session.name] = asyncio.ensure_future(self._finish(session))
            task.add_done_callback(lambda _done: self._under_way.pop(session.name, None))
        await asyncio.shield(task)
        return session.finished is not None

    async def _finish(self, session: CapturedSession) -> None:
        partition, topic = self.partition_of(session), self._topic_of(session)
        before = session.writer(self._takeover_ms)
        if before is None or before.author != self._author:
            if before is not None and time.time() * 1000 < before.append_ms + self._takeover_ms:
                return
            end = (await asyncio.to_thread(self._ends.bounds, topic, [partition]))[partition][1]
            await self._append(SessionEvent(session=session.name, kind="finishing", rollouts_end=end))
            current = session.writer(self._takeover_ms)
            if session.finished is not None or current is None or current.author != self._author:
                return
        policies = await asyncio.to_thread(self._policies.read, 0.0)
        if session.finished is not None:
            return  # Another gateway took over while this one was suspended, and its calls are gone.
        # The calls of the copy stay if another gateway finishes the session meanwhile.
        records, reason = await asyncio.to_thread(episode_records, copy(session), self._form, policies)
        first = session.intents[0]
        present: dict[str, int] = {}
        if before is not None or len(session.intents) > 1:
            wanted = {uid for record in records for uid in _uids(record)}
            present = await asyncio.to_thread(self._present, topic, partition, first.rollouts_end, wanted)
        missing = [record for record in records if not present.keys() >= {*_uids(record)}]
        async with self._lock:
            if session.finished is not None:
                return
            offsets = self._offsets = present
            reason = await asyncio.to_thread(self._write, session, missing, reason)
        rollouts = [record for record in records if isinstance(record, Rollout)] if not reason else []
        uids = tuple(rollout.uid for rollout in rollouts)
        # Brokers may omit the offset of a record that they received twice; all are after the end that was announced.
        last = max([first.rollouts_end + len(uids) - 1, *(offsets.get(uid, -1) for uid in uids)])
        finished = SessionEvent(
            session=session.name, kind="finished", uids=uids, reason=reason, rollouts_end=last + 1 if uids else -1
        )
        self._on_written(session, rollouts)
        await self._append(finished)
        event(logger, "session_finished", session=session.name, rollouts=len(uids), reason=reason)

    async def _append(self, change: SessionEvent) -> None:
        await self._log.append(replace(change, author=self._author, wall_time=time.time()))

    def _write(self, session: CapturedSession, records: list[Rollout | GroupCancelled], reason: str) -> str:
        """Write records and wait for the brokers; return why the episode is cancelled, or "" if it is not."""
        try:
            for record in records:
                if isinstance(record, Rollout) and session.start.labeled:
                    self._unlabelled = self._unlabelled or self._open("unlabelled")
                    self._unlabelled.send(record)
                elif isinstance(record, Rollout):
                    self._producer.send(record)
                else:
                    self._producer.cancel(record)
        except RecordError as error:
            # The cancellation also drops rollouts of the episode that were already sent.
            reason = str(error)
            self._cancel(session, reason)
        for producer in filter(None, (self._producer, self._unlabelled)):
            producer.flush(_FLUSH_S)
        return reason

    def _cancel(self, session: CapturedSession, reason: str) -> None:
        """Queue the cancellation of a session's episode; only log it if it is no valid record, as for a group of size
        0: grouping has no group that could wait for it."""
        try:
            self._producer.cancel(cancellation_of(session, reason))
        except RecordError as error:
            event(logger, "cancellation_refused", level=logging.WARNING, session=session.name, error=str(error))

    def _present(self, topic: str, partition: int, begin: int, uids: set[str]) -> dict[str, int]:
        """Return the uids of rollouts, or of cancelled episodes, that are on a partition from an offset on, with the
        offsets of their first records."""
        present: dict[str, int] = {}
        first = topic_admin.bounds(self._kafka, topic, [partition])[partition][0]
        start = {partition: max(begin, first)}
        # Gateways write without transactions, and other producers' open transactions must not hide their records.
        for message in read_to_end(
            self._kafka, topic, partitions=[partition], start=start, isolation="read_uncommitted"
        ):
            if codec.kind_of(message.value) in ("Rollout", "GroupCancelled"):
                try:
                    for uid in uids.intersection(_uids(codec.decode(message.value))):
                        present.setdefault(uid, message.offset)
                except RecordError:
                    continue  # grouping reports bad records
        return present

    async def close(self) -> None:
        """Wait for writes in progress."""
        await asyncio.gather(*self._under_way.values(), return_exceptions=True)
        for producer in filter(None, (self._producer, self._unlabelled)):
            await asyncio.to_thread(producer.close)
        self._ends.close()


def _uids(record: Rollout | GroupCancelled) -> tuple[str, ...]:
    return (record.uid,) if isinstance(record, Rollout) else record.uids
