"""Readers of partitions outside any group; they convert the client's messages and errors into this project's.

A record that cannot be decompressed within the client's limit is returned as unreadable, with its offset, so that no
reader stops at it. The isolation level is read_committed unless a function says otherwise.
"""

import logging
import time
from collections.abc import Callable, Collection, Generator, Iterable, Mapping
from contextlib import closing
from functools import partial
from typing import Any, NamedTuple, TypeVar

from confluent_kafka import Consumer, KafkaError, KafkaException, Message, TopicPartition

from rollstream.topics.closing import Closing
from rollstream.topics.config import KafkaConfig
from rollstream.topics.errors import BrokerUnavailable, DeadlineExceeded
from rollstream.topics.kafka import clients, connection, hanging_transactions, topic_admin
from rollstream.topics.kafka.client_calls import BoundedCalls, Stalled, is_unanswered, raise_for, retrying
from rollstream.topics.kafka.records import BEGINNING, GroupPosition, KafkaRecord, Place, record_of
from rollstream.topics.logs import event

logger = logging.getLogger(__name__)
T = TypeVar("T")
_AT_ONCE = 500
_CALL_S = 10.0
_FIRST_LOOK_BACK = 16


class Polled(NamedTuple):
    """Records and ends of partitions from one poll."""

    records: list[KafkaRecord]
    """In offset order within each partition."""
    ends: dict[Place, int]
    """End offset of each partition whose end was reached, with transaction markers counted."""


class Poller(Closing):
    """Base of readers and group members: turns messages of a consumer into records, ends and errors."""

    def __init__(self, kafka: KafkaConfig, consumer: Consumer, doing: str) -> None:
        """`doing` begins error messages, as in "reading exp.steps: ..."."""
        self._kafka, self._consumer, self._doing = kafka, consumer, doing
        self._gather_s = 0.0
        """How long a poll waits for further messages after its first message."""
        self._reassigned: set[Place] = set()
        """Partitions that were assigned or revoked since the first message of this poll."""
        self.positions: dict[Place, int] = {}
        """Next offset of each partition, as far as it is known."""
        self._heard, self._check = time.monotonic(), connection.StrandedCheck()
        self._asked: set[str] = set()
        self._is_committing = False

    def close(self) -> None:
        """Close the consumer, unless its commit has not ended."""
        if not self._is_committing:
            self._consumer.close()

    def poll(self, most: int, wait_s: float) -> Polled:
        """Return up to `most` records, and partitions whose end was reached; waits up to `wait_s` for the first.

        Raises TopicError or BrokerUnavailable if no more records can arrive, OffsetGone if an offset is not in the log.
        """
        polled = Polled([], {})
        passed: set[Place] = set()
        positions, records = self.positions, polled.records
        messages = self._consume(most, wait_s)
        self._listen(messages)
        for message in messages:
            error = message.error()
            if error is None:
                record = record_of(message)
                positions[record.topic, record.partition] = record.offset + 1
                records.append(record)
            else:
                self._take_event(error, message, polled, passed)
        return polled

    def _listen(self, messages: list[Message]) -> None:
        """Replace the consumer if it will never get a message again."""
        if messages:
            self._note_broker()
        else:
            self._note_silence(self._any_topic())

    def _note_broker(self) -> None:
        """Note that a broker has answered."""
        self._heard = time.monotonic()
        self._check.clear()

    def _note_silence(self, topic: str) -> None:
        """Examine a consumer that has been silent for long, and replace it if it is stranded."""
        now = time.monotonic()
        if now - self._heard > connection.SILENT_S:
            self._heard = now  # Now and after the examination, so that no other thread examines it meanwhile.
            if topic and self._check.is_stranded(self._kafka, self._consumer, topic):
                self._check.clear()
                event(logger, "client_stranded", level=logging.WARNING, topic=topic)
                self._replace()
            self._heard = time.monotonic()

    def _any_topic(self) -> str:
        """Return a topic that is being read, "" if there is none."""
        raise NotImplementedError

    def _replace(self) -> None:
        """Continue with a new consumer, or raise an error."""
        raise NotImplementedError

    def _consume(self, most: int, wait_s: float) -> list[Message]:
        """Return available messages. The client's `consume` would wait until it has `most` messages, or times out."""
        if wait_s <= 0:
            return self._consume_once(most, wait_s)
        first = self._consume_once(1, wait_s)
        if not first or most <= 1:
            return first
        self._reassigned.clear()
        rest = self._consume_once(most - 1, self._gather_s)
        # The owner has gone back in a partition that was assigned again meanwhile, so its first message comes again.
        return [*(m for m in first if (m.topic(), m.partition()) not in self._reassigned), *rest]

    def _consume_once(self, most: int, wait_s: float) -> list[Message]:
        """Return `most` messages, or those that arrive within `wait_s`."""
        try:
            return list(self._consumer.consume(most, wait_s))
        except KafkaException as exception:
            self._raise_for(exception.args[0], f"{self._doing} {self._topics()}")
            return []

    def _take_event(self, error: KafkaError, message: Message, polled: Polled, passed: set[Place]) -> None:
        """Handle a message that is an event or error, not a record."""
        topic, partition, offset = message.topic(), message.partition(), message.offset()
        if topic is None or partition is None or offset is None:
            self._raise_for(error, f"{self._doing} {topic or self._topics()}")
            return
        place = topic, partition
        if error.code() == KafkaError._PARTITION_EOF:
            polled.ends[place] = offset
            self.positions[place] = max(offset, self.positions.get(place, 0))
        elif error.code() != KafkaError._BAD_COMPRESSION:
            self._raise_for(error, f"{self._doing} {topic}")
        elif place not in passed:
            passed.add(place)
            # The event names the first record of its batch, not the record that was requested.
            unreadable = max(offset, self.positions.get(place, 0))
            self._pass(place, unreadable, error)
            polled.records.append(KafkaRecord(topic, partition, unreadable, readable=False))

    def _pass(self, place: Place, offset: int, error: KafkaError) -> None:
        """Seek past a record that cannot be decompressed; otherwise the client would report the same record forever.

        This skips one record at a time, because the size of the batch is unknown; only a fetch from the next offset
        shows whether the next record is unreadable, too.
        """
        self.positions[place] = offset + 1
        self._consumer.seek(TopicPartition(*place, offset + 1))
        event(
            logger,
            "record_unreadable",
            level=logging.WARNING,
            topic=place[0],
            partition=place[1],
            offset=offset,
            error=error.str(),
        )

    def _raise_for(self, error: KafkaError, doing: str) -> None:
        raise_for(error, doing)

    def _topics(self) -> str:
        return ", ".join(sorted({topic for topic, _partition in self.positions}))

    def partitions_of(self, topic: str) -> int:
        """Number of partitions of a topic. Raises as `topic_admin.partitions_of` does."""
        self._asked.add(topic)
        return topic_admin.partitions_of(self._kafka, topic, self._consumer)

    def passed_ends(
        self, places: Collection[Place], ends: dict[Place, int], records: Iterable[KafkaRecord]
    ) -> list[Place]:
        """Return the partitions, out of `places`, that have been read to the ends that they had at the first records.

        A client reports an end only when a fetch returns nothing, which never happens while records keep arriving.
        `records` are those of the latest poll; `ends` keeps the ends between calls.
        """
        passed = []
        for place in {(record.topic, record.partition) for record in records}.intersection(places):
            if place not in ends:
                end = self._fetched_end(place)
                if end is None:
                    continue
                ends[place] = end
            if self.positions[place] >= ends[place]:
                passed.append(place)
        return passed

    def _fetched_end(self, place: Place) -> int | None:
        """Return the end of a partition at its last fetch, with open transactions; None if nothing was fetched."""
        try:
            _, end = self._consumer.get_watermark_offsets(TopicPartition(*place), cached=True)
        except KafkaException:  # the partition was just revoked
            return None
        return end if end >= 0 else None

    def bounds(
        self, topic: str, partitions: Iterable[int] | None = None, timeout_s: float = 30.0
    ) -> dict[int, tuple[int, int]]:
        """First offset of each partition, and the offset past its last record; by default of all partitions."""

        def ask() -> dict[int, tuple[int, int]]:
            numbers = range(self.partitions_of(topic)) if partitions is None else partitions
            return topic_admin.bounds_through(self._consumer, topic, numbers, timeout_s)

        return self._answer(topic, ask)

    def _answer(self, topic: str, ask: Callable[[], T]) -> T:
        """Return the brokers' answer to a question about a topic."""
        return ask()

    # ------------------------------------------------------------------ the group whose offsets are read

    def committed(
        self, topic: str, partitions: Iterable[int], doing: str, timeout_s: float | None = None
    ) -> list[GroupPosition]:
        """Positions that the group has committed, with their metadata; the offset is negative if none is committed.

        Waits for offsets in an open transaction; if its process died, the offsets are pending until the transaction
        times out. Raises BrokerUnavailable after `timeout_s`, kafka.patience_s by default; `doing` begins the message.
        """
        timeout_s = self._kafka.patience_s if timeout_s is None else timeout_s
        wanted = [TopicPartition(topic, partition) for partition in partitions]
        call_timeout_s = min(_CALL_S, timeout_s)

        def ask() -> list[GroupPosition]:
            answers = self._consumer.committed(wanted, call_timeout_s)
            for place in answers:
                if place.error is not None:
                    raise KafkaException(place.error)
            return [GroupPosition.from_client(place) for place in answers]

        return self._answer(topic, lambda: retrying(ask, doing, timeout_s))

    def commit(self, positions: Iterable[GroupPosition], doing: str) -> None:
        """Commit positions of the group. Raises BrokerUnavailable after kafka.patience_s; only `close` may follow then.

        If a connection is lost during a commit, the client repeats the commit until a broker answers, and neither
        `commit` nor `close` of the client returns before. Such a client is left to its thread, which drops it when the
        commit has ended; positions that were given up may still be committed late. An admin client cannot be used
        instead, because its request could end the process: see COORDINATOR_REQUEST_S.
        """
        offsets = [position.for_client() for position in positions]
        patience_s = self._kafka.patience_s

        def ask() -> None:
            try:
                retrying(lambda: self._consumer.commit(offsets=offsets, asynchronous=False), doing, patience_s)
            finally:
                self._is_committing = False

        calls, self._is_committing = BoundedCalls(), True
        try:
            calls.run(ask, doing, patience_s)
        except Stalled as error:
            raise BrokerUnavailable(f"{error}; is the broker at {self._kafka.bootstrap_servers} down?") from error
        finally:
            calls.close()

    def group_metadata(self) -> object:
        """Group metadata for a transaction that sends the group's offsets."""
        return self._consumer.consumer_group_metadata()


class Reader(Poller):
    """Reads partitions that it is assigned."""

    def __init__(
        self,
        kafka: KafkaConfig,
        *,
        isolation: str = "read_committed",
        fetch_wait_ms: int = 100,
        group: str = clients.READERS,
        doing: str = "reading",
        **overrides: Any,
    ) -> None:
        """`group` names only the group whose offsets are read and committed; see `clients.reader` for the settings."""
        self._new_consumer = partial(
            clients.reader, kafka, isolation=isolation, fetch_wait_ms=fetch_wait_ms, group=group, **overrides
        )
        super().__init__(kafka, self._new_consumer(), doing)
        self._begins: dict[Place, int] = {}
        """Assigned partitions, with the offsets that they were assigned with."""

    def assign(self, positions: Mapping[Place, int]) -> None:
        """Read these partitions from these offsets on, and no others. Raises as `topic_admin.partitions_of` does."""
        self._ask_leaders(positions)
        self._begins = dict(positions)
        self.positions = {place: offset for place, offset in positions.items() if offset >= 0}
        self._consumer.assign([TopicPartition(*place, offset) for place, offset in positions.items()])

    def add(self, place: Place, offset: int) -> None:
        """Read one more partition."""
        self._ask_leaders([place])
        self._begins[place] = offset
        if offset >= 0:
            self.positions[place] = offset
        self._consumer.incremental_assign([TopicPartition(*place, offset)])

    def seek(self, place: Place, offset: int) -> None:
        """Continue at another offset of a partition, and discard its fetched records."""
        self.positions[place] = offset
        self._consumer.seek(TopicPartition(*place, offset))

    def unassign(self) -> None:
        """Stop reading all partitions."""
        self._begins.clear()
        self.positions.clear()
        self._consumer.unassign()

    def _any_topic(self) -> str:
        return next((topic for topic, _partition in self._begins), "")

    def _answer(self, topic: str, ask: Callable[[], T]) -> T:
        """Return the brokers' answer. A reader that only asks is never polled, so it is examined here."""
        try:
            answer = ask()
        except BrokerUnavailable:
            self._note_silence(topic)
            raise
        self._note_broker()
        return answer

    def _replace(self) -> None:
        # Another thread may be asking through the old consumer, which closes itself once nothing uses it.
        self._consumer = self._new_consumer()
        offsets = self._begins | self.positions
        self._consumer.assign([TopicPartition(*place, offsets[place]) for place in self._begins])

    def _take_event(self, error: KafkaError, message: Message, polled: Polled, passed: set[Place]) -> None:
        if not is_unanswered(error):
            super()._take_event(error, message, polled, passed)
            return
        # The client has stopped reading the partition; assigned again, it asks again.
        for place in self._begins.keys() & {(message.topic(), message.partition())}:
            self._consumer.incremental_unassign([TopicPartition(*place)])
            self._consumer.incremental_assign([TopicPartition(*place, self._begins[place])])

    def offsets_at(self, topic: str, partitions: Iterable[int], at_ms: int) -> dict[int, int | None]:
        """Offset of each partition's first record with this timestamp or a later one; None if there is none."""
        wanted = [TopicPartition(topic, partition, at_ms) for partition in partitions]
        answers = retrying(partial(self._consumer.offsets_for_times, wanted, _CALL_S), f"asking for times in {topic}")
        return {place.partition: place.offset if place.offset >= 0 else None for place in answers}

    def _ask_leaders(self, places: Iterable[Place]) -> None:
        """Fetch the partitions' leaders, so that the first record arrives at once: librdkafka delays a partition by
        half a second if it does not know the leader."""
        for topic in {topic for topic, _partition in places} - self._asked:
            self.partitions_of(topic)


def read_to_end(
    config: KafkaConfig,
    topic: str,
    *,
    partitions: Iterable[int] | None = None,
    start: int | Mapping[int, int] = BEGINNING,
    isolation: str = "read_committed",
    timeout_s: float | None = None,
    reader: Reader | None = None,
    at_once: int = _AT_ONCE,
) -> Generator[KafkaRecord]:
    """Yield every record of a topic up to its present end, in offset order within each partition.

    This ends while producers go on writing, too: the present end is the end at the time of the first records. `start`
    is the first offset, for all partitions or by partition. Raises TopicError if the topic is missing or a start is out
    of range, BrokerUnavailable if no record arrives and the end is not reached within `timeout_s`
    (kafka.patience_s by default). An existing `reader` may be passed; its isolation level applies then. At most
    `at_once` records are in memory in addition to the client's own.
    """
    timeout_s = config.patience_s if timeout_s is None else timeout_s
    # A short wait at the broker, because this waits for the end of idle partitions.
    source = reader or Reader(config, isolation=isolation, fetch_wait_ms=10)
    try:
        numbers = range(source.partitions_of(topic)) if partitions is None else list(partitions)
        begins = start if isinstance(start, Mapping) else dict.fromkeys(numbers, start)
        pending = {(topic, p) for p in numbers}
        source.assign({(topic, p): begins.get(p, BEGINNING) for p in numbers})
        deadline = time.monotonic() + timeout_s
        ends: dict[Place, int] = {}
        while pending:
            polled = source.poll(at_once, 0.05)
            # A partition that has been read goes on getting records, which must not hide the silence of another one.
            records = [record for record in polled.records if (topic, record.partition) in pending]
            heard = bool(records) or not pending.isdisjoint(polled.ends)
            yield from records
            pending.difference_update(polled.ends)
            pending.difference_update(source.passed_ends(pending, ends, records))
            if heard:
                deadline = time.monotonic() + timeout_s
            elif time.monotonic() > deadline:
                raise silence(config, topic, pending, timeout_s)
    finally:
        if reader is None:
            source.close()
        else:
            source.unassign()


def records_between(
    kafka: KafkaConfig,
    topic: str,
    partition: int,
    start: int,
    stop: int,
    *,
    wait: bool = True,
    reader: Reader | None = None,
) -> Generator[KafkaRecord | None]:
    """Yield the records at offsets start to stop - 1, and None between polls.

    A transaction becomes visible on its partitions at different times, so this waits if the partition ends before
    `stop`. It raises DeadlineExceeded if nothing arrives for kafka.patience_s, within which an open transaction ends.
    Without `wait`, it stops at the end. An existing `reader` may be passed.
    """
    if start >= stop:
        return
    place = topic, partition
    source = reader or Reader(kafka, fetch_wait_ms=10)
    try:
        source.assign({place: start})
        deadline = time.monotonic() + kafka.patience_s
        while True:
            records, ends = source.poll(_AT_ONCE, 0.05)
            at_end = place in ends and (not wait or ends[place] >= stop)
            ended = at_end or (bool(records) and records[-1].offset >= stop - 1)
            if ended:
                source.unassign()
            for record in records:
                if record.offset < stop:
                    yield record
                    deadline = time.monotonic() + kafka.patience_s
            if ended:
                return
            yield None
            if time.monotonic() > deadline:
                raise DeadlineExceeded(
                    f"{topic}[{partition}] did not reach offset {stop - 1} within {kafka.patience_s:g} s; "
                    f"{hanging_transactions.open_on(kafka, topic, [partition])}"
                )
    finally:
        if reader is None:
            source.close()
        else:
            source.unassign()


def silence(config: KafkaConfig, topic: str, places: Collection[Place], timeout_s: float) -> BrokerUnavailable:
    """Return the error for partitions of a topic that returned neither a record nor their end for `timeout_s`."""
    return BrokerUnavailable(
        f"{topic} partitions {sorted(p for _topic, p in places)} returned nothing for {timeout_s:g} s; "
        f"check that the broker at {config.bootstrap_servers} is up"
    )


def ends_of_records(
    config: KafkaConfig, topic: str, positions: Mapping[int, int], reader: Reader | None = None
) -> dict[int, int]:
    """Return, by partition, the offset after the last record at or after a position; the position if there is none.

    The end of a partition cannot tell, because it counts transaction markers, too. The search goes back from the end
    over growing distances, so it reads few records. Accepts a reader and raises errors as `read_to_end` does.
    """
    bounds = topic_admin.bounds(config, topic, positions)
    begins = {partition: max(begin, positions[partition]) for partition, (begin, _end) in bounds.items()}
    stops = {partition: end for partition, (_begin, end) in bounds.items() if end > begins[partition]}
    ends, distance = dict(positions), _FIRST_LOOK_BACK
    while stops:
        starts = {partition: max(begins[partition], stop - distance) for partition, stop in stops.items()}
        last: dict[int, int] = {}
        with closing(read_to_end(config, topic, partitions=starts, start=starts, reader=reader)) as records:
            for record in records:
                if record.offset < bounds[record.partition][1]:
                    last[record.partition] = record.offset + 1
        ends |= last
        stops = {p: start for p, start in starts.items() if p not in last and start > begins[p]}
        distance *= _FIRST_LOOK_BACK
    return ends


def record_at(
    config: KafkaConfig,
    topic: str,
    partition: int,
    offset: int,
    *,
    isolation: str = "read_committed",
    reader: Reader | None = None,
) -> KafkaRecord | None:
    """Return the visible record at an offset, or None. Accepts a reader and raises errors as `read_to_end` does."""
    start = {partition: offset}
    reading = read_to_end(config, topic, partitions=[partition], start=start, isolation=isolation, reader=reader)
    with closing(reading):
        record = next(reading, None)
    return record if record is not None and record.offset == offset else None


def record_before(config: KafkaConfig, topic: str, partition: int, offset: int) -> KafkaRecord | None:
    """Return the record right before an offset; None if there is no visible record.

    That is the case if the log begins at the offset, ends before it, or has a transaction marker there.

    Raises as `read_to_end` does.
    """
    begin, end = topic_admin.bounds(config, topic, [partition])[partition]
    return record_at(config, topic, partition, offset - 1) if begin < offset <= end else None
