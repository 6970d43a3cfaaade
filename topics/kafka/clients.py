"""Builds all Kafka clients: safe defaults per role, bounded queues, and librdkafka settings that are passed through.

Consumers read committed records unless a function says otherwise.
"""

import logging
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar

from confluent_kafka import Consumer, KafkaError, KafkaException, Producer

from rollstream.topics.config import KafkaConfig
from rollstream.topics.errors import ConfigurationError
from rollstream.topics.logs import event
from rollstream.topics.secrets import resolve

if TYPE_CHECKING:
    from confluent_kafka.admin import AdminClient

logger = logging.getLogger(__name__)


class NamedProducer(Producer):
    """A producer with its user, which is empty if the settings name none, as with a certificate or a token."""

    def __init__(self, settings: dict[str, Any]) -> None:
        super().__init__(settings)
        self.user = str(settings.get("sasl.username", ""))


def user_of(producer: Producer) -> str:
    """Return the user of a producer; empty if it is not known."""
    return producer.user if isinstance(producer, NamedProducer) else ""


_MIB = 1024 * 1024
_CONNECT_S = 0.25
"""Longest wait for a producer's connection; after it, the connection is made in the background."""
FIRST_TOPIC = "__transaction_state"
"""Topic whose metadata a producer requests in order to connect: every cluster with transactions has it, and it is
small. Without it, the answer names the brokers all the same."""
READERS = "rollstream-reader"
"""Group id of clients that read outside a group; librdkafka requires one, and nothing is committed under it."""
C = TypeVar("C")


def _common(config: KafkaConfig) -> dict[str, Any]:
    return {
        "bootstrap.servers": config.bootstrap_servers,
        "client.id": "rollstream",
        "log.connection.close": "false",
        # Brokers create topics by default, and librdkafka's producers and admin clients let them. A topic of a misspelt
        # run would then exist after the first look at it, and with too few partitions.
        "allow.auto.create.topics": "false",
        # Half of this is also the pause between a client's connections to the bootstrap address and to the broker.
        # librdkafka's default of 100 costs every new client 50 ms. Each failed attempt doubles it, up to ten seconds.
        "reconnect.backoff.ms": "20",
        # librdkafka writes each connection attempt to stderr; error_cb receives the errors that matter.
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
_logged_s: dict[tuple[int, str], float] = {}
"""Times at which errors were logged, by code and text, as far as they still matter."""


def _on_error(error: KafkaError) -> None:
    """Log an error that a client reports, at most every ten seconds if it repeats, as with each connection attempt."""
    # The rest of the text has times and counts, which differ between errors with the same cause.
    now, same = time.monotonic(), (error.code(), error.str().partition(" (after ")[0])
    # Other threads may log errors of their clients meanwhile.
    for logged, at_s in list(_logged_s.items()):
        if now - at_s >= _REPEAT_AFTER_S:
            _logged_s.pop(logged, None)
    if same in _logged_s:
        return
    _logged_s[same] = now
    hint = {}
    if error.code() == KafkaError._ALL_BROKERS_DOWN:
        hint = {"remedy": "check the address, and security.protocol in kafka.client if the broker needs TLS or SASL"}
    event(logger, "kafka_error", level=logging.WARNING, error=error.str(), code=error.name(), **hint)


def producer(config: KafkaConfig, **overrides: Any) -> Producer:
    """An idempotent producer (acks=all, Java-compatible partitioning) whose queue is bounded in bytes."""
    client: Callable[[dict[str, Any]], Producer] = NamedProducer
    if config.registry.url:
        # Imported late, because it imports the registry's client.
        from rollstream.topics.kafka.registry.writers import registry_producer

        client = registry_producer(config.registry)
    built = _built(
        client,
        {
            "enable.idempotence": "true",
            "acks": "all",
            "partitioner": "murmur2_random",
            "compression.type": config.compression,
            "compression.level": config.compression_level,
            "linger.ms": "5",
            "message.max.bytes": config.max_record_bytes,
            # A record that does not fit into the empty queue would be refused forever.
            "queue.buffering.max.kbytes": max(64 * 1024, 2 * config.max_record_bytes // 1024),
            "delivery.timeout.ms": 120_000,
            **_common(config),
            **overrides,
        },
    )
    _connect(built)
    return built


def _connect(producer: Producer) -> None:
    """Connect a producer to a broker. An unconnected producer requests its producer id, or its transaction coordinator,
    only half a second after its first record or init_transactions (librdkafka's timer)."""
    with suppress(KafkaException):  # No broker answers yet, or access is denied: writing raises the error.
        producer.list_topics(FIRST_TOPIC, timeout=_CONNECT_S)  # the bootstrap address gives the brokers' addresses
        producer.list_topics(FIRST_TOPIC, timeout=_CONNECT_S)


def transactional_producer(config: KafkaConfig, transactional_id: str, **overrides: Any) -> Producer:
    """A transactional producer; the caller runs init_transactions. The id must stay the same across restarts."""
    timeout_ms = int(config.transaction_timeout_s * 1000)
    return producer(
        config,
        **{
            "transactional.id": transactional_id,
            "transaction.timeout.ms": timeout_ms,
            "delivery.timeout.ms": timeout_ms,
            # A flush ends each transaction, so waiting for more records would only delay it.
            "linger.ms": config.client.get("linger.ms", "0"),
            **overrides,
        },
    )


_POLL_S, _LONGEST_POLL_S = 300.0, 86_400.0
"""Default and maximum of librdkafka's max.poll.interval.ms."""
_MEMBER_PREFETCH: dict[str, Any] = {"max.partition.fetch.bytes": 256 * 1024, "queued.min.messages": 10_000}
"""Limits on how far a group member reads ahead in each partition; a record above these limits still arrives.

The client limits fetches by compressed size and queues by record size; neither limit counts the buffers that it
decompresses into. Small records that compress well took half a KiB each: a process that was 150,000 such records behind
used 357 MiB. With these limits it uses 176 MiB, however far behind it is."""


def _consumer_limits(config: KafkaConfig) -> dict[str, Any]:
    size = max(config.max_record_bytes, _MIB)
    return {
        "max.partition.fetch.bytes": size,
        "fetch.max.bytes": max(size, 16 * _MIB),
        # This also limits the decompressed size of a batch. The client guesses that size and triples the guess if it is
        # too small, so the limit must be several times the need: every record of our producers must be readable.
        "receive.message.max.bytes": 4 * max(size, 8 * _MIB),
        "queued.max.messages.kbytes": max(2 * size, 32 * _MIB) // 1024,
        "fetch.queue.backoff.ms": 10,
        # Delay before the record after an unreadable one is fetched.
        "fetch.error.backoff.ms": 50,
        "fetch.wait.max.ms": 100,
    }


def reader(
    config: KafkaConfig,
    *,
    isolation: str = "read_committed",
    fetch_wait_ms: int = 100,
    group: str = READERS,
    partition_bytes: int = 0,
    **overrides: Any,
) -> Consumer:
    """A consumer for `assign` that is not a group member, commits nothing by itself, and reports partitions' ends.

    `group` only names the group whose offsets are read and committed. `fetch_wait_ms` is how long the broker waits for
    a record before it answers that there is none, and `partition_bytes`, unless it is 0, how much of each partition one
    answer has at most; a larger record still arrives.
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
            **({"max.partition.fetch.bytes": partition_bytes} if partition_bytes else {}),
            "fetch.wait.max.ms": fetch_wait_ms,
            **_common(config),
            **overrides,
        },
    )


def group_member(
    config: KafkaConfig, group: str, instance: str, *, longest_poll_s: float = 0.0, **overrides: Any
) -> Consumer:
    """A consumer group member, static under the classic protocol; its offsets are committed in transactions only.

    `longest_poll_s` is the longest time between two polls; its group expels a member that takes longer.
    """
    settings: dict[str, Any] = {
        "group.id": group,
        "enable.auto.commit": "false",
        "enable.auto.offset.store": "false",
        "auto.offset.reset": "error",
        "enable.partition.eof": "true",
        "isolation.level": "read_committed",
        "group.protocol": config.group_protocol,
        **_consumer_limits(config),
        **_MEMBER_PREFETCH,
        **_common(config),
        **overrides,
    }
    if longest_poll_s > _POLL_S:
        settings.setdefault("max.poll.interval.ms", int(min(longest_poll_s, _LONGEST_POLL_S) * 1000))
    if config.group_protocol == "classic":
        # Under the consumer protocol, a restarted instance gets a fatal error until its earlier session ends.
        settings.setdefault("group.instance.id", instance)
        settings.setdefault("session.timeout.ms", int(config.session_timeout_s * 1000))
        settings.setdefault("heartbeat.interval.ms", int(config.session_timeout_s * 1000 / 4))
        settings.setdefault("partition.assignment.strategy", "range")
    return _built(Consumer, settings)


def admin(config: KafkaConfig, **overrides: Any) -> "AdminClient":
    """An admin client. Keep a reference to it while its futures are pending."""
    # Imported late: it costs a quarter of the core's import budget, and most processes need no admin client.
    from confluent_kafka.admin import AdminClient

    return _built(AdminClient, {**_common(config), **overrides})


def bare(config: KafkaConfig, **overrides: Any) -> Producer:
    """A client for metadata requests alone: a producer without producer settings, which connects only when needed."""
    return _built(Producer, {**_common(config), **overrides})


def check_broker(config: KafkaConfig, timeout_s: float = 10.0) -> None:
    """Raise BrokerUnavailable unless a broker answers within `timeout_s`, and AccessDenied if the brokers refuse this
    client's protocol, certificate or credentials."""
    from rollstream.topics.kafka import connection

    connection.check_broker(config, timeout_s)
