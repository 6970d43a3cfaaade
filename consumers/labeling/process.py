"""One labeling process of a consumer group: it reads `unlabelled` and writes `trajectories` and `rollouts`.

Delivery guarantee: exactly once. Labeled records, cancellations of members without a reward, dead letters and the
resulting positions are committed in one transaction. Labeled records keep the partitions and the order of their
sources. To scale out, start more processes. Under the classic group protocol, a restart under the same ordinal within
kafka.session_timeout_s moves no partition.
"""

import asyncio
import logging
import math
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import NamedTuple

from rollstream.consumers.labeling.config import LabelingConfig
from rollstream.consumers.labeling.labeler import (
    LabeledRecord,
    Labeler,
    LabelOutcome,
    UnlabeledRecord,
    finish,
    is_asynchronous,
    label,
    longest_s,
)
from rollstream.consumers.labeling.positions import SOURCE, ensure_positions
from rollstream.consumers.transactions import RETRY_FOR_S, ExactlyOnce, OwnershipLost, Refused
from rollstream.topics.config import KafkaConfig
from rollstream.topics.errors import BrokerUnavailable, Fenced
from rollstream.topics.heartbeats import beat
from rollstream.topics.kafka import clients, topic_admin
from rollstream.topics.kafka.groups import GroupMember, MembershipLost
from rollstream.topics.kafka.labeling_progress import LabelingProgress
from rollstream.topics.kafka.records import UNREADABLE, GroupPosition, KafkaRecord
from rollstream.topics.kafka.sender import Delivery
from rollstream.topics.kafka.transactions import Transaction
from rollstream.topics.logs import event
from rollstream.topics.metrics.writer import MetricsWriter
from rollstream.topics.wire.catalogue import topic_name
from rollstream.topics.wire.signatures import signer_of

logger = logging.getLogger(__name__)
_OVERHEAD_BYTES = 1024
"""Bytes that Kafka and the headers add to a record."""


class LabelingCounts(NamedTuple):
    """Number of records by outcome, as far as the outcomes are committed."""

    labeled: int = 0
    left_out: int = 0
    refused: int = 0


class PartitionOutcomes(NamedTuple):
    """Outcomes of the records of one partition, and the position after these records."""

    partition: int
    position: int
    labeled: Sequence[LabeledRecord]
    refused: Sequence[Refused]
    left_out: int = 0
    cancellations: Sequence[tuple[bytes | None, bytes]] = ()
    """Key and value of each record for `rollouts` that cancels a member without a reward."""

    def after(self, before: LabelingProgress, written: int) -> LabelingProgress:
        """Return the progress to commit with the position, after the progress `before`.

        `written` is the offset after the newest record of these outcomes on `rollouts`, 0 if there is none.
        """
        return replace(
            before,
            labeled=before.labeled + len(self.labeled),
            left_out=before.left_out + self.left_out,
            dead_lettered=before.dead_lettered + len(self.refused),
            written=written or before.written,
        )


def run_labeling(
    labeler: Labeler,
    kafka: KafkaConfig,
    run: str,
    config: LabelingConfig | None = None,
    *,
    ordinal: int = 0,
    stop: threading.Event,
    environment_keys: Mapping[str, Collection[str]] = MappingProxyType({}),
    on_ready: Callable[[], None] = lambda: None,
) -> LabelingCounts:
    """Label until `stop` is set; call `on_ready` at the first assignment.

    A rollout of an environment with keys other than this process's own must be signed by one of `environment_keys`.

    Raises Fenced if another process runs under the same ordinal, StateRefused if positions were lost or the topic was
    created again, TopicError if a topic is missing, and any error of the labeler except RecordError.
    """
    clients.check_broker(kafka)
    process = LabelingProcess(labeler, kafka, run, config or LabelingConfig(), ordinal, on_ready, environment_keys)
    return process.run(stop)


class LabelingProcess:
    """Consumer and publisher of one process."""

    def __init__(
        self,
        labeler: Labeler,
        kafka: KafkaConfig,
        run: str,
        config: LabelingConfig,
        ordinal: int,
        on_ready: Callable[[], None],
        environment_keys: Mapping[str, Collection[str]] = MappingProxyType({}),
    ) -> None:
        self._labeler, self._kafka, self._config, self._on_ready = labeler, kafka, config, on_ready
        self._limit_bytes = kafka.max_record_bytes - _OVERHEAD_BYTES
        self._signer = signer_of(kafka.signing_key, "kafka.signing_key")
        own = {self._signer.public} if self._signer is not None else set()
        # If only labelers have keys, workers cannot sign.
        self._source_keys = {name: keys for name, keys in environment_keys.items() if set(keys) - own}
        self._topic = topic_name(run, "unlabelled")
        self._name = f"labeller-{run}-{ordinal}"
        group = config.group_id(run)
        self._topic_id = ensure_positions(kafka, run, group)
        topic_admin.partitions_of(kafka, topic_name(run, "trajectories"))
        self._member = GroupMember(
            kafka,
            group,
            self._name,
            self._topic,
            gather_s=config.commit_interval_s,
            # The commit of the labels comes before the next poll, too.
            longest_poll_s=longest_s(labeler, config.max_poll_records) + RETRY_FOR_S,
        )
        self._progress: dict[int, LabelingProgress] = {}
        """Committed progress, by partition."""
        self._publisher = _Publisher(kafka, run, group, ordinal, self._member, self._topic, self._progress)
        self._owned: set[int] = set()
        self._counts = LabelingCounts()
        self._metrics = MetricsWriter(kafka, run, self._name, "label")
        self._written = -math.inf
        self._loop = asyncio.Runner() if is_asynchronous(labeler) else None
        """Event loop of an asynchronous labeler, which keeps its connections from one poll to the next."""

    def run(self, stop: threading.Event) -> LabelingCounts:
        """Run until `stop` is set, then close the consumer. Every poll ends with a commit, so no work is pending
        then."""
        try:
            self._publisher.start()
            self._member.join(self._on_assign, self._on_revoke, self._on_revoke)
            while not stop.is_set():
                self._write_figures()  # This comes first, because the first labels may take arbitrarily long.
                try:
                    self._label(self._consume())
                except OwnershipLost as lost:
                    event(logger, "ownership_lost", level=logging.WARNING, error=str(lost))
                    self._go_back()
            self._write_figures(last=True)
        finally:
            if self._loop is not None:
                close = getattr(self._labeler, "close", None)
                if close is not None:
                    self._loop.run(close())
                self._loop.close()
            self._metrics.close()
            self._member.close()
        event(logger, "closed", **self._counts._asdict())
        return self._counts

    def _consume(self) -> list[KafkaRecord]:
        """Fetch records, without records of partitions that were revoked during the poll."""
        try:
            records = self._member.poll(self._config.max_poll_records, self._config.commit_interval_s).records
        except MembershipLost as lost:
            # A broker that was silent may take this member's repeated request to join for that of another process.
            if lost.fenced and self._publisher.has_rival:
                raise Fenced(
                    f"another process labels under the name {self._name}; only one process may run under an ordinal"
                ) from lost
            raise BrokerUnavailable(f"reading {self._topic}: {lost}; start this process again") from lost
        return [record for record in records if record.partition in self._owned]

    def _label(self, records: Sequence[KafkaRecord]) -> None:
        """Label records and commit them, in several transactions if labeling takes long."""
        began, waiting = time.monotonic(), _UncommittedOutcomes()
        beat("labeling")
        for source, outcome in self._outcomes(records):
            beat("labeling")
            waiting.add(source, outcome)
            if time.monotonic() - began > self._config.commit_interval_s:
                self._commit(waiting)
                began, waiting = time.monotonic(), _UncommittedOutcomes()
            self._write_figures()
        self._commit(waiting)

    def _outcomes(self, records: Sequence[KafkaRecord]) -> Iterator[tuple[UnlabeledRecord, LabelOutcome]]:
        """Label the records: concurrently with an asynchronous labeler, otherwise one after another."""
        sources = [
            (UnlabeledRecord(self._topic, record.partition, record.offset, record.key, record.value), record.readable)
            for record in records
        ]
        if self._loop is None:
            for source, readable in sources:
                yield source, finish(self._outcome(source, readable))
        elif sources:
            outcomes = self._loop.run(self._all(self._outcome(source, readable) for source, readable in sources))
            yield from zip((source for source, _readable in sources), outcomes, strict=True)

    async def _all(self, outcomes: Iterable[Awaitable[LabelOutcome]]) -> list[LabelOutcome]:
        """Return all outcomes. Figures are written meanwhile, because a process that writes none for a minute counts as
        gone."""
        gathered = asyncio.gather(*outcomes)
        try:
            while not gathered.done():
                await asyncio.wait({gathered}, timeout=self._config.metrics_interval_s or None)
                self._write_figures()
            return gathered.result()
        finally:
            # `wait` leaves calls running when Ctrl-C cancels it, and the labeler is closed next.
            gathered.cancel()

    async def _outcome(self, source: UnlabeledRecord, readable: bool) -> LabelOutcome:
        if not readable:
            return LabelOutcome(Refused(*source, UNREADABLE))
        outcome = await label(self._labeler, source, self._limit_bytes, self._signer, self._source_keys)
        beat("labeling")
        return outcome

    def _commit(self, waiting: "_UncommittedOutcomes") -> None:
        parts = waiting.by_partition()
        if not parts:
            return
        self._publisher.publish(parts)
        self._progress.update(self._publisher.written)
        self._counts = LabelingCounts(*(a + b for a, b in zip(self._counts, waiting.counts(), strict=True)))
        for refused in (letter for part in parts for letter in part.refused):
            event(
                logger,
                "dead_letter",
                level=logging.WARNING,
                partition=refused.partition,
                offset=refused.offset,
                error=refused.error,
            )

    def _write_figures(self, *, last: bool = False) -> None:
        """Write counts and lag to the metrics topic, once per interval and at the end."""
        interval_s = self._config.metrics_interval_s
        if interval_s <= 0 or (not last and time.monotonic() - self._written < interval_s):
            return
        self._written = time.monotonic()
        lag = 0
        for (_topic, partition), position in self._member.positions.items():
            lag += max((self._member.known_end(partition) or 0) - position, 0)
        labeled, left_out, refused = self._counts
        self._metrics.write(
            {"labelled_total": labeled, "left_out_total": left_out, "dead_lettered_total": refused, "lag": lag}
        )

    def _on_assign(self, partitions: list[int]) -> dict[int, int]:
        event(logger, "assigned", partitions=partitions)
        self._owned.update(partitions)
        offsets = self._committed(partitions)
        self._on_ready()
        self._on_ready = lambda: None
        return offsets

    def _on_revoke(self, partitions: list[int]) -> None:
        event(logger, "revoked", partitions=partitions)
        self._owned.difference_update(partitions)

    def _go_back(self) -> None:
        """Read again from the committed positions of the partitions still owned."""
        if self._owned:
            self._member.go_back(self._committed(sorted(self._owned)))

    def _committed(self, partitions: list[int]) -> dict[int, int]:
        """Return the committed offsets; also update the progress of these partitions."""
        if not partitions:
            return {}
        committed = self._member.committed(self._topic, partitions, "reading committed offsets")
        for place in committed:
            self._progress[place.partition] = replace(LabelingProgress.decode(place), topic_id=self._topic_id)
        return {place.partition: place.offset for place in committed}


class _UncommittedOutcomes:
    """Outcomes that are not committed yet."""

    def __init__(self) -> None:
        self._positions: dict[int, int] = {}
        self._labeled: dict[int, list[LabeledRecord]] = {}
        self._refused: dict[int, list[Refused]] = {}
        self._left_out: Counter[int] = Counter()
        self._cancellations: dict[int, list[tuple[bytes | None, bytes]]] = {}

    def add(self, record: UnlabeledRecord, outcome: LabelOutcome) -> None:
        """Add the outcome of a record."""
        self._positions[record.partition] = record.offset + 1
        if isinstance(outcome.result, LabeledRecord):
            self._labeled.setdefault(record.partition, []).append(outcome.result)
        elif isinstance(outcome.result, Refused):
            self._refused.setdefault(record.partition, []).append(outcome.result)
        else:
            self._left_out[record.partition] += 1
        if outcome.cancellation is not None:
            self._cancellations.setdefault(record.partition, []).append((record.key, outcome.cancellation))

    def by_partition(self) -> list[PartitionOutcomes]:
        """Return the outcomes to commit, by partition."""
        return [
            PartitionOutcomes(
                p,
                position,
                self._labeled.get(p, ()),
                self._refused.get(p, ()),
                self._left_out[p],
                self._cancellations.get(p, ()),
            )
            for p, position in self._positions.items()
        ]

    def counts(self) -> LabelingCounts:
        """Return the number of records by outcome."""
        return LabelingCounts(
            sum(map(len, self._labeled.values())), self._left_out.total(), sum(map(len, self._refused.values()))
        )


class _Publisher(ExactlyOnce[PartitionOutcomes]):
    def __init__(
        self,
        kafka: KafkaConfig,
        run: str,
        group: str,
        ordinal: int,
        member: GroupMember,
        topic: str,
        progress: Mapping[int, LabelingProgress],
    ) -> None:
        super().__init__(kafka, run, group, "labeller", ordinal, member, topic)
        self._progress = progress
        self._rollouts = topic_name(run, "rollouts")
        self.written: dict[int, LabelingProgress] = {}
        """Progress that the newest transaction commits, by partition."""

    def _write(self, transaction: Transaction, parts: Sequence[PartitionOutcomes]) -> list[GroupPosition]:
        deliveries: list[Delivery] = []
        for part in parts:
            for labeled in part.labeled:
                headers = {SOURCE: f"{part.partition}:{labeled.offset}"}
                topic = topic_name(self._run, labeled.topic)
                transaction.send(
                    topic,
                    labeled.value,
                    labeled.key,
                    partition=part.partition,
                    headers=headers,
                    on_delivery=deliveries.append,
                )
            for key, value in part.cancellations:
                # A cancellation gets no source header, because records with that header count as labeled.
                transaction.send(self._rollouts, value, key, partition=part.partition, on_delivery=deliveries.append)
            for refused in part.refused:
                self._send_dead_letter(transaction, refused)
        # The progress includes the offsets of the records, which are known after the flush.
        self._flush(transaction)
        ends: dict[int, int] = {}
        for delivery in deliveries:
            if delivery.topic == self._rollouts:
                ends[delivery.partition] = max(ends.get(delivery.partition, 0), transaction.offset_of(delivery) + 1)
        self.written = {p.partition: p.after(self._progress[p.partition], ends.get(p.partition, 0)) for p in parts}
        return [GroupPosition(self._topic, p.partition, p.position, self.written[p.partition].encode()) for p in parts]
