"""The labelling stage: `unlabelled` in, `trajectories` out, one process of a consumer group.

Delivery guarantee: exactly once. Labelled trajectories, dead letters and the positions they lead to commit in one
transaction, and lie on the partition and in the order of their sources. Scaling is starting more processes; a restart
under the same ordinal moves nothing.
"""

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import NamedTuple

from confluent_kafka import Consumer, KafkaError, KafkaException, Message, TopicPartition

from consumers.labelling.config import LabellingConfig
from consumers.labelling.labels import Input, Labeler, Labelled, label
from consumers.labelling.positions import SOURCE, Progress, ensure_positions
from consumers.transactions import ExactlyOnce, OwnershipLost, Refused, fenced
from topics import clients
from topics.catalogue import topic_name
from topics.config import KafkaConfig
from topics.errors import BrokerUnavailable, Fenced
from topics.logs import event
from topics.metrics import MetricsWriter

logger = logging.getLogger(__name__)
_OVERHEAD_BYTES = 1024
"""What Kafka adds to a record, headers of ours included."""


class Counts(NamedTuple):
    """What became of the records read, as far as it is committed."""

    labelled: int = 0
    left_out: int = 0
    refused: int = 0


class Part(NamedTuple):
    """What records of one partition became, and where to go on."""

    partition: int
    position: int
    labelled: Sequence[Labelled]
    refused: Sequence[Refused]
    left_out: int = 0

    def after(self, before: Progress) -> Progress:
        """What is committed with the position, after what was `before`."""
        return replace(
            before,
            labelled=before.labelled + len(self.labelled),
            left_out=before.left_out + self.left_out,
            dead_lettered=before.dead_lettered + len(self.refused),
        )


def run_labelling(
    labeler: Labeler,
    kafka: KafkaConfig,
    run: str,
    config: LabellingConfig | None = None,
    *,
    ordinal: int = 0,
    stop: threading.Event,
    on_ready: Callable[[], None] = lambda: None,
) -> Counts:
    """Label until `stop` is set; `on_ready` is called at the first assignment.

    Raises Fenced when another process runs under the same ordinal, StateRefused when positions were lost or the topic
    was created again, TopicError when one is missing, and what the labeler raises besides RecordError.
    """
    clients.check_broker(kafka)
    return LabellingProcess(labeler, kafka, run, config or LabellingConfig(), ordinal, on_ready).run(stop)


class LabellingProcess:
    """Consumer and publisher of one process."""

    def __init__(
        self,
        labeler: Labeler,
        kafka: KafkaConfig,
        run: str,
        config: LabellingConfig,
        ordinal: int,
        on_ready: Callable[[], None],
    ) -> None:
        self._labeler, self._kafka, self._config, self._on_ready = labeler, kafka, config, on_ready
        self._limit_bytes = kafka.max_record_bytes - _OVERHEAD_BYTES
        self._topic = topic_name(run, "unlabelled")
        self._name = f"labeller-{run}-{ordinal}"
        group = config.group_id(run)
        self._topic_id = ensure_positions(kafka, run, group)
        clients.partitions_of(kafka, topic_name(run, "trajectories"))
        self._consumer: Consumer = clients.group_member(kafka, group, self._name)
        self._progress: dict[int, Progress] = {}
        """What is committed with the position, by partition."""
        self._publisher = _Publisher(kafka, run, group, ordinal, self._consumer, self._topic, self._progress)
        self._owned: set[int] = set()
        self._position: dict[int, int] = {}
        """Next offset wanted, by partition."""
        self._counts = Counts()
        self._metrics = MetricsWriter(kafka, run, self._name)
        self._written = time.monotonic()

    def run(self, stop: threading.Event) -> Counts:
        """Run until `stop` is set, then leave: nothing is held between two transactions."""
        try:
            self._publisher.start()
            self._consumer.subscribe(
                [self._topic], on_assign=self._on_assign, on_revoke=self._on_revoke, on_lost=self._on_revoke
            )
            while not stop.is_set():
                try:
                    self._label(self._consume())
                except OwnershipLost as lost:
                    event(logger, "ownership_lost", level=logging.WARNING, error=str(lost))
                    self._go_back()
                self._write_figures()
        finally:
            self._metrics.close()
            self._consumer.close()
        event(logger, "closed", **self._counts._asdict())
        return self._counts

    def _consume(self) -> list[Message]:
        """Records of partitions that are ours: none that was taken away while they were fetched."""
        try:
            found = list(self._consumer.consume(self._config.max_poll_records, self._config.commit_interval_s))
        except KafkaException as exception:
            self._raise_for(exception.args[0])
            return []
        except SystemError as lost:
            # The client's way of losing the exception for a fatal error.
            raise BrokerUnavailable(f"reading {self._topic}: {lost}; start this process again") from lost
        records = []
        for message in clients.with_unreadable(self._consumer, found, self._position):
            error = message.error()
            if error is None:
                if message.partition() in self._owned:
                    records.append(message)
            elif error.code() == KafkaError._MAX_POLL_EXCEEDED:
                event(logger, "max_poll_exceeded", level=logging.WARNING, error=error.str())
            elif error.code() != KafkaError._PARTITION_EOF:
                self._raise_for(error)
        return records

    def _label(self, messages: Sequence[Message]) -> None:
        """Label records and commit them, in several transactions where that takes its time."""
        began, waiting = time.monotonic(), _Waiting()
        for message in messages:
            record = self._input(message)
            # A stand-in for a record nobody can decompress has no time.
            readable = message.timestamp()[1] >= 0
            waiting.take(
                record,
                label(self._labeler, record, self._limit_bytes) if readable else Refused(*record, clients.UNREADABLE),
            )
            if time.monotonic() - began > self._config.commit_interval_s:
                self._commit(waiting)
                began, waiting = time.monotonic(), _Waiting()
        self._commit(waiting)

    def _input(self, message: Message) -> Input:
        partition, offset = message.partition(), message.offset()
        assert partition is not None, "as in every message without an error"
        assert offset is not None
        return Input(self._topic, partition, offset, message.key(), message.value())

    def _commit(self, waiting: "_Waiting") -> None:
        parts = waiting.parts()
        if not parts:
            return
        self._publisher.publish(parts)
        self._progress.update({part.partition: part.after(self._progress[part.partition]) for part in parts})
        self._counts = Counts(*(a + b for a, b in zip(self._counts, waiting.counts(), strict=True)))
        for refused in (letter for part in parts for letter in part.refused):
            event(
                logger,
                "dead_letter",
                level=logging.WARNING,
                partition=refused.partition,
                offset=refused.offset,
                error=refused.error,
            )

    def _write_figures(self) -> None:
        """Now and then, what was done and what waits."""
        interval_s = self._config.metrics_interval_s
        if interval_s <= 0 or time.monotonic() - self._written < interval_s:
            return
        self._written = time.monotonic()
        lag = 0
        for partition, position in self._position.items():
            with suppress(KafkaException):  # of a partition just taken away
                _, end = self._consumer.get_watermark_offsets(TopicPartition(self._topic, partition), cached=True)
                lag += max(end - position, 0)
        labelled, left_out, refused = self._counts
        self._metrics.write(
            {"labelled_total": labelled, "left_out_total": left_out, "dead_lettered_total": refused, "lag": lag}
        )

    def _on_assign(self, _consumer: Consumer, partitions: list[TopicPartition]) -> None:
        numbers = [tp.partition for tp in partitions]
        event(logger, "assigned", partitions=numbers)
        self._owned.update(numbers)
        self._committed(partitions)
        self._on_ready()
        self._on_ready = lambda: None

    def _on_revoke(self, _consumer: Consumer, partitions: list[TopicPartition]) -> None:
        numbers = [tp.partition for tp in partitions]
        event(logger, "revoked", partitions=numbers)
        self._owned.difference_update(numbers)
        for number in numbers:
            self._position.pop(number, None)

    def _go_back(self) -> None:
        """Read on from what is committed, of what is still ours."""
        ours = [TopicPartition(self._topic, number) for number in sorted(self._owned)]
        if ours:
            committed = self._committed(ours)
            self._position.clear()
            self._consumer.assign(committed)

    def _committed(self, partitions: list[TopicPartition]) -> list[TopicPartition]:
        """Positions as they are committed; notes what is committed with them."""
        committed = clients.committed(self._kafka, self._consumer, partitions, "reading committed offsets")
        for place in committed:
            self._progress[place.partition] = replace(Progress.decode(place), topic_id=self._topic_id)
        return committed

    def _raise_for(self, error: KafkaError) -> None:
        if fenced(error):
            raise Fenced(f"another process labels under the name {self._name}; only one may run under an ordinal")
        clients.raise_for(error, f"reading {self._topic}")


class _Waiting:
    """Records judged and not committed."""

    def __init__(self) -> None:
        self._positions: dict[int, int] = {}
        self._labelled: dict[int, list[Labelled]] = {}
        self._refused: dict[int, list[Refused]] = {}
        self._left_out: Counter[int] = Counter()

    def take(self, record: Input, outcome: Labelled | Refused | None) -> None:
        """Note what a record became."""
        self._positions[record.partition] = record.offset + 1
        if isinstance(outcome, Labelled):
            self._labelled.setdefault(record.partition, []).append(outcome)
        elif isinstance(outcome, Refused):
            self._refused.setdefault(record.partition, []).append(outcome)
        else:
            self._left_out[record.partition] += 1

    def parts(self) -> list[Part]:
        """By partition, what is to be written and where to go on."""
        return [
            Part(p, position, self._labelled.get(p, ()), self._refused.get(p, ()), self._left_out[p])
            for p, position in self._positions.items()
        ]

    def counts(self) -> Counts:
        """Records, by what they became."""
        return Counts(
            sum(map(len, self._labelled.values())), self._left_out.total(), sum(map(len, self._refused.values()))
        )


class _Publisher(ExactlyOnce[Part]):
    def __init__(
        self,
        kafka: KafkaConfig,
        run: str,
        group: str,
        ordinal: int,
        consumer: Consumer,
        topic: str,
        progress: Mapping[int, Progress],
    ) -> None:
        super().__init__(kafka, run, group, "labeller", ordinal, consumer, topic)
        self._progress = progress

    def _write(self, parts: Sequence[Part]) -> list[TopicPartition]:
        topic = topic_name(self._run, "trajectories")
        for part in parts:
            for made in part.labelled:
                headers: dict[str, str | bytes | None] = {SOURCE: f"{part.partition}:{made.offset}"}
                self._enqueue(topic, made.value, made.key, part.partition, headers)
            for refused in part.refused:
                self._produce_dead_letter(refused)
        self._flush()
        after = {part.partition: part.after(self._progress[part.partition]).encode() for part in parts}
        return [TopicPartition(self._topic, part.partition, part.position, after[part.partition]) for part in parts]
