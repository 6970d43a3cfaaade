"""The one place Kafka clients are built: safe defaults per role, bounded queues, pass-through of librdkafka keys.

Also the few loops every reader would otherwise write again: read a topic to its end, fetch one offset, check
that a broker answers. Read_committed unless a function says otherwise.
"""

import difflib
import logging
import time
from collections.abc import Callable, Generator, Iterable
from contextlib import closing
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from confluent_kafka import (
    OFFSET_BEGINNING,
    Consumer,
    KafkaError,
    KafkaException,
    Message,
    Producer,
    TopicCollection,
    TopicPartition,
)

from topics.catalogue import run_and_name
from topics.config import KafkaConfig
from topics.errors import BrokerUnavailable, ConfigurationError, TopicError
from topics.logs import event
from topics.secrets import resolve

if TYPE_CHECKING:
    from confluent_kafka.admin import AdminClient

logger = logging.getLogger(__name__)
_MIB = 1024 * 1024
C = TypeVar("C")


def _common(config: KafkaConfig) -> dict[str, Any]:
    if config.client.get("group.id") == "":
        # librdkafka aborts the whole process on it.
        raise ConfigurationError('kafka.client sets "group.id" to nothing; remove the key')
    return {
        "bootstrap.servers": config.bootstrap_servers,
        "client.id": "rollstream",
        "log.connection.close": "false",
        # librdkafka writes to stderr by itself, for each attempt to connect; what matters arrives in error_cb.
        "log_level": 2,
        "error_cb": _on_error,
        **{key: resolve(key, value) for key, value in config.client.items()},
    }


def _built(client: Callable[[dict[str, Any]], C], settings: dict[str, Any]) -> C:
    try:
        return client(settings)
    except KafkaException as error:
        raise ConfigurationError(f"kafka.client: {error.args[0].str()}") from error


_REPEAT_AFTER_S = 10.0
_said: dict[str, float] = {}


def _on_error(error: KafkaError) -> None:
    """Log what a client reports; the same error, which comes with each attempt to connect, every ten seconds."""
    now = time.monotonic()
    if now - _said.get(error.str(), -_REPEAT_AFTER_S) < _REPEAT_AFTER_S:
        return
    _said[error.str()] = now
    hint = {}
    if error.code() == KafkaError._ALL_BROKERS_DOWN:
        hint = {"remedy": "check the address, and security.protocol in kafka.client when the broker wants TLS or SASL"}
    event(logger, "kafka_error", level=logging.WARNING, error=error.str(), code=error.name(), **hint)


def producer(config: KafkaConfig, **overrides: Any) -> Producer:
    """An idempotent producer (acks=all, Java-compatible partitioning), its queue bounded in bytes."""
    return _built(
        Producer,
        {
            "enable.idempotence": "true",
            "acks": "all",
            "partitioner": "murmur2_random",
            "compression.type": config.compression,
            "linger.ms": "5",
            "message.max.bytes": config.max_record_bytes,
            "queue.buffering.max.kbytes": 64 * 1024,
            "delivery.timeout.ms": 120_000,
            **_common(config),
            **overrides,
        },
    )


def transactional_producer(config: KafkaConfig, transactional_id: str, **overrides: Any) -> Producer:
    """A transactional producer; the caller runs init_transactions. The id must be stable across restarts of a role."""
    timeout_ms = int(config.transaction_timeout_s * 1000)
    return producer(
        config,
        **{
            "transactional.id": transactional_id,
            "transaction.timeout.ms": timeout_ms,
            "delivery.timeout.ms": timeout_ms,
            "linger.ms": "0",
            **overrides,
        },
    )


def produce(producer: Producer, topic: str, value: bytes | None, key: bytes | None, **more: Any) -> None:
    """Queue a record, waiting for room where the producer's queue is full; `more` is as in `Producer.produce`.

    The wait ends: what cannot be delivered leaves the queue after delivery.timeout.ms, and its report says so.
    """
    while True:
        try:
            producer.produce(topic, value, key, **more)
            return
        except BufferError:
            producer.poll(0.1)


def _consumer_limits(config: KafkaConfig) -> dict[str, Any]:
    size = max(config.max_record_bytes, _MIB)
    return {
        "max.partition.fetch.bytes": size,
        "fetch.max.bytes": max(size, 16 * _MIB),
        # It also bounds what a batch may be decompressed to, and by thrice as much as needed: the client guesses, and
        # triples a guess that was too small. Whatever a producer of ours may send must be readable for sure.
        "receive.message.max.bytes": 4 * max(size, 8 * _MIB),
        "queued.max.messages.kbytes": max(2 * size, 32 * _MIB) // 1024,
        "fetch.queue.backoff.ms": 10,
        # How soon the record after an unreadable one is asked for.
        "fetch.error.backoff.ms": 50,
        "fetch.wait.max.ms": 100,
    }


def reader(
    config: KafkaConfig,
    *,
    isolation: str = "read_committed",
    fetch_wait_ms: int = 100,
    group: str = "rollstream-reader",
    **overrides: Any,
) -> Consumer:
    """A consumer for `assign`, member of no group: follows topics, commits nothing, reports the end of each partition.

    `group` is only whose offsets are asked for. `fetch_wait_ms` is how long the broker waits for a record before it
    answers that there is none.
    """
    return _built(
        Consumer,
        {
            # Even assign() needs a group.id in librdkafka.
            "group.id": group,
            "enable.auto.commit": "false",
            "enable.auto.offset.store": "false",
            "auto.offset.reset": "error",
            "enable.partition.eof": "true",
            "isolation.level": isolation,
            **_consumer_limits(config),
            "fetch.wait.max.ms": fetch_wait_ms,
            **_common(config),
            **overrides,
        },
    )


def group_member(config: KafkaConfig, group: str, instance: str, **overrides: Any) -> Consumer:
    """A member of a consumer group, static where the protocol is classic; offsets travel in transactions only."""
    settings: dict[str, Any] = {
        "group.id": group,
        "enable.auto.commit": "false",
        "enable.auto.offset.store": "false",
        "auto.offset.reset": "error",
        "enable.partition.eof": "true",
        "isolation.level": "read_committed",
        "group.protocol": config.group_protocol,
        **_consumer_limits(config),
        **_common(config),
        **overrides,
    }
    if config.group_protocol == "classic":
        # Under the consumer protocol a restart as the same instance is refused, fatally, until the session ends.
        settings.setdefault("group.instance.id", instance)
        settings.setdefault("session.timeout.ms", int(config.session_timeout_s * 1000))
        settings.setdefault("heartbeat.interval.ms", int(config.session_timeout_s * 1000 / 4))
        settings.setdefault("partition.assignment.strategy", "range")
    return _built(Consumer, settings)


def admin(config: KafkaConfig, **overrides: Any) -> "AdminClient":
    """An admin client. Keep a reference while futures of it are pending."""
    # Imported late: it costs a quarter of what the core may, and most processes need none.
    from confluent_kafka.admin import AdminClient

    return _built(AdminClient, {**_common(config), **overrides})


def check_broker(config: KafkaConfig, timeout_s: float = 10.0) -> None:
    """Raise BrokerUnavailable unless a broker answers within `timeout_s`."""
    client = admin(config, error_cb=lambda _error: None)
    try:
        client.list_topics(timeout=timeout_s)
    except KafkaException as error:
        raise BrokerUnavailable(
            f"no Kafka broker answers at {config.bootstrap_servers} ({error.args[0].name()}); start one with "
            "`rollstream broker start`, or set kafka.bootstrap_servers (or KAFKA_BOOTSTRAP_SERVERS)"
        ) from error


def follow(consumer: Consumer, config: KafkaConfig, partitions: list[TopicPartition]) -> None:
    """Assign partitions to a reader, so that the first record comes at once. Raises as `partitions_of` does.

    librdkafka puts off a partition whose leader it does not know by half a second; asking for metadata first avoids it.
    """
    for topic in {tp.topic for tp in partitions}:
        partitions_of(config, topic, consumer)
    consumer.assign(partitions)


def partitions_of(config: KafkaConfig, topic: str, client: "AdminClient | Consumer | None" = None) -> int:
    """Partitions of a topic, by a client at hand or one made for it; `client` knows the leaders afterwards.

    Raises TopicError when the topic does not exist, BrokerUnavailable when nobody answers.
    """
    try:
        metadata = (client or admin(config)).list_topics(topic, timeout=10.0).topics[topic]
    except KafkaException as error:
        raise BrokerUnavailable(
            f"no Kafka broker answers at {config.bootstrap_servers}: {error.args[0].str()}"
        ) from error
    if metadata.error is not None:
        raise _missing(config, topic, metadata.error.name())
    return len(metadata.partitions)


def runs(config: KafkaConfig) -> dict[str, dict[str, int]]:
    """Partitions of each topic, by its name, of every run on the brokers. Raises BrokerUnavailable."""
    try:
        topics = admin(config).list_topics(timeout=10.0).topics
    except KafkaException as error:
        raise BrokerUnavailable(
            f"no Kafka broker answers at {config.bootstrap_servers}: {error.args[0].str()}"
        ) from error
    found: dict[str, dict[str, int]] = {}
    for topic, metadata in sorted(topics.items()):
        place = run_and_name(topic)
        if place is not None:
            found.setdefault(place[0], {})[place[1]] = len(metadata.partitions)
    return found


_NAMED = 3
"""Most runs that an error names."""


def _missing(config: KafkaConfig, topic: str, why: str) -> TopicError:
    """The error of a topic that is not there: the run is called otherwise, or its topics are to be made."""
    place, there = run_and_name(topic), runs(config)
    if place is not None and place[0] not in there:
        near = difflib.get_close_matches(place[0], there, 1, 0.8)
        if near:
            return TopicError(
                f"topic {topic} is missing: there is no run {place[0]}; did you mean --run {near[0]}? "
                f"`rollstream runs` lists all"
            )
        if there:
            more = f" and {len(there) - _NAMED} more (`rollstream runs`)" if len(there) > _NAMED else ""
            why += f"; there is no run {place[0]}, but {', '.join([*there][:_NAMED])}{more}"
    return TopicError(f"topic {topic} is missing ({why}); create it with `rollstream topics apply`")


def bounds(
    config: KafkaConfig, topic: str, partitions: Iterable[int] | None = None, client: Consumer | None = None
) -> dict[int, tuple[int, int]]:
    """Where the log of each partition begins and ends: its first offset, and the one past its last.

    Of `partitions`, or of all, by a client at hand or one made for it. Raises as `partitions_of` does.
    """
    consumer = client or reader(config)
    try:
        found = {}
        known = range(partitions_of(config, topic, consumer))
        for partition in known if partitions is None else partitions:
            ask = partial(consumer.get_watermark_offsets, TopicPartition(topic, partition), 10.0)
            found[partition] = retrying(ask, f"asking where {topic} begins")
        return found
    finally:
        if client is None:
            consumer.close()


def topic_ids(kafka: KafkaConfig, names: list[str]) -> dict[str, str]:
    """Kafka's id of each topic, which one created again does not keep. Raises TopicError when missing."""
    client = admin(kafka)
    ids = {}
    for name, future in client.describe_topics(TopicCollection(names)).items():
        try:
            ids[name] = str(future.result(30.0).topic_id)
        except KafkaException as error:
            if error.args[0].code() == KafkaError.UNKNOWN_TOPIC_OR_PART:
                raise _missing(kafka, name, error.args[0].name()) from error
            raise BrokerUnavailable(f"topic {name} cannot be described: {error.args[0].str()}") from error
    return ids


def read_to_end(
    config: KafkaConfig,
    topic: str,
    *,
    partitions: Iterable[int] | None = None,
    start: int | dict[int, int] = OFFSET_BEGINNING,
    isolation: str = "read_committed",
    timeout_s: float | None = None,
    client: Consumer | None = None,
) -> Generator[Message]:
    """Every record of a topic up to where it ends now, in offset order within each partition.

    `start` is the first offset, for all partitions or by partition. Raises TopicError when the topic is missing or a
    start is out of range, BrokerUnavailable when no record comes and the end is not reached within `timeout_s`, which
    is kafka.patience_s where it is not given. A reader at hand may be given as `client`: its isolation counts then.
    """
    timeout_s = config.patience_s if timeout_s is None else timeout_s
    # A short wait at the broker: the end of an idle partition is what is waited for.
    consumer = client or reader(config, isolation=isolation, fetch_wait_ms=10)
    try:
        numbers = list(range(partitions_of(config, topic, consumer)) if partitions is None else partitions)
        begins = start if isinstance(start, dict) else dict.fromkeys(numbers, start)
        follow(consumer, config, [TopicPartition(topic, p, begins.get(p, OFFSET_BEGINNING)) for p in numbers])
        pending = set(numbers)
        position = {p: begins.get(p, 0) for p in numbers}
        deadline = time.monotonic() + timeout_s
        while pending:
            messages = with_unreadable(consumer, at_hand(consumer, 500, 0.05), position)
            for message in messages:
                error = message.error()
                if error is None:
                    if message.partition() in pending:
                        yield message
                elif error.code() == KafkaError._PARTITION_EOF:
                    pending.discard(message.partition())
                else:
                    raise_for(error, f"reading {topic}")
            if messages:
                deadline = time.monotonic() + timeout_s
            elif time.monotonic() > deadline:
                raise BrokerUnavailable(
                    f"{topic} partitions {sorted(pending)} gave nothing for {timeout_s:g} s; is the broker at "
                    f"{config.bootstrap_servers} up?"
                )
    finally:
        if client is None:
            consumer.close()
        else:
            consumer.unassign()


def fetch(
    config: KafkaConfig,
    topic: str,
    partition: int,
    offset: int,
    *,
    isolation: str = "read_committed",
    client: Consumer | None = None,
) -> Message | None:
    """The record at an offset; None where none is there to see. Takes a client, and raises, as `read_to_end` does."""
    start = {partition: offset}
    reading = read_to_end(config, topic, partitions=[partition], start=start, isolation=isolation, client=client)
    with closing(reading):
        message = next(reading, None)
    return message if message is not None and message.offset() == offset else None


def last_before(config: KafkaConfig, topic: str, partition: int, offset: int) -> Message | None:
    """The record right before an offset; None where the log begins at the offset or ends before it.

    Raises as `read_to_end` does.
    """
    begin, end = bounds(config, topic, [partition])[partition]
    return fetch(config, topic, partition, offset - 1) if begin < offset <= end else None


def at_hand(consumer: Consumer, most: int, wait_s: float) -> list[Message]:
    """What there is, `most` messages at most; waits up to `wait_s` where there is nothing.

    `consume` by itself waits until it has as many as it may return, or all of its time is over.
    """
    first = consumer.consume(1, wait_s)
    return [*first, *consumer.consume(most - 1, 0)] if first and most > 1 else list(first)


UNREADABLE = "its batch cannot be decompressed within the consumer's limit (receive.message.max.bytes)"
"""What is wrong with a record that a stand-in takes the place of."""


def with_unreadable(consumer: Consumer, messages: list[Message], position: dict[int, int]) -> list[Message]:
    """What one `consume` call returned, with a stand-in for each record that cannot be decompressed within the client's
    limit (a few hundred bytes of zstd may be gigabytes): same partition and offset, no key, no value, timestamp -1.

    `position` holds the next offset wanted of each partition, and is advanced. Without this the client would report
    the same batch for ever. One record is passed at a time, as nothing says how many a batch has that cannot be read;
    that the next is one too is known only from a fetch that began there.
    """
    passed: set[int] = set()
    found = []
    for message in messages:
        error, partition, offset = message.error(), message.partition(), message.offset()
        if partition is None or offset is None:
            found.append(message)
        elif error is None:
            position[partition] = offset + 1
            found.append(message)
        elif error.code() != KafkaError._BAD_COMPRESSION:
            found.append(message)
        elif partition not in passed:
            passed.add(partition)
            # The event names the first record of its batch, whichever of them was asked for.
            unreadable = max(offset, position.get(partition, 0))
            position[partition] = unreadable + 1
            consumer.seek(TopicPartition(message.topic() or "", partition, unreadable + 1))
            event(
                logger,
                "record_unreadable",
                level=logging.WARNING,
                topic=message.topic(),
                partition=partition,
                offset=unreadable,
                error=error.str(),
            )
            # Its constructor is meant for tests: nothing of this goes back into the client.
            found.append(Message(topic=message.topic(), partition=partition, offset=unreadable, timestamp=(0, -1)))
    return found


_MOVING = (
    KafkaError.NOT_COORDINATOR,
    KafkaError.COORDINATOR_LOAD_IN_PROGRESS,
    KafkaError.COORDINATOR_NOT_AVAILABLE,
    KafkaError.UNSTABLE_OFFSET_COMMIT,
    KafkaError._WAIT_COORD,
    KafkaError._TIMED_OUT,
    # A broker that has not heard of a new topic's leader yet, though another has.
    KafkaError.NOT_LEADER_FOR_PARTITION,
    KafkaError.LEADER_NOT_AVAILABLE,
)


def retrying(call: Callable[[], C], doing: str, timeout_s: float = 30.0) -> C:
    """What `call` returns, tried again while a coordinator or leader is starting or moving.

    Raises BrokerUnavailable for any other error, and when `timeout_s` is over.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            return call()
        except KafkaException as exception:
            error: KafkaError = exception.args[0]
            if error.code() not in _MOVING or time.monotonic() > deadline:
                raise BrokerUnavailable(f"{doing}: {error.str()} ({error.name()})") from exception
            time.sleep(0.05)


def committed(
    config: KafkaConfig, consumer: Consumer, wanted: list[TopicPartition], doing: str
) -> list[TopicPartition]:
    """Offsets that the consumer's group has committed, with their metadata; negative where there is none.

    Those of an open transaction are waited for: a process that died in it holds them back until it runs out. Raises
    BrokerUnavailable after kafka.patience_s.
    """
    call_timeout_s = min(10.0, config.patience_s)
    return retrying(lambda: list(consumer.committed(wanted, call_timeout_s)), doing, config.patience_s)


def raise_for(error: KafkaError, doing: str) -> None:
    """Raise our error for one of a consumer's, unless it is one the client recovers from by itself."""
    code = error.code()
    if code in (KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError._UNKNOWN_TOPIC, KafkaError._UNKNOWN_PARTITION):
        raise TopicError(f"{doing}: the topic or partition is missing; create it with `rollstream topics apply`")
    if code in (KafkaError._AUTO_OFFSET_RESET, KafkaError.OFFSET_OUT_OF_RANGE):
        raise TopicError(
            f"{doing}: the position is no longer in the log ({error.str()}); records were deleted or it was recreated"
        )
    if error.fatal() or not (error.retriable() or code in (KafkaError._TRANSPORT, KafkaError._ALL_BROKERS_DOWN)):
        raise BrokerUnavailable(f"{doing}: {error.str()} ({error.name()})")
