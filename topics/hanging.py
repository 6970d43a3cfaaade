"""Transactions that hang: open in a partition, while their coordinator is done with them, so that nobody ends them.

Readers, and whoever waits for committed offsets, stop there for ever. A broker that loses a transaction marker leaves
one (docs/decisions/0012). The errors of whoever waits say what it waits for by `open_on`; `rollstream broker mend` ends
what hangs. librdkafka cannot ask for any of it: these requests, and no others, go through kafka-python.
"""

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from topics import clients
from topics.config import KafkaConfig
from topics.errors import BrokerUnavailable, ConfigurationError, RollstreamError
from topics.secrets import resolve

if TYPE_CHECKING:
    from kafka.admin import KafkaAdminClient

OFFSETS = "__consumer_offsets"
"""The topic in which groups' offsets lie; those of an open transaction are pending."""
_DONE = ("Empty", "CompleteCommit", "CompleteAbort", "Dead")
_TRY_FOR_S = 30.0
_REQUEST_MS = 10_000
_NAMES = {
    "security.protocol": "security_protocol",
    "sasl.mechanism": "sasl_mechanism",
    "sasl.mechanisms": "sasl_mechanism",
    "sasl.username": "sasl_plain_username",
    "sasl.password": "sasl_plain_password",
    "ssl.ca.location": "ssl_cafile",
    "ssl.certificate.location": "ssl_certfile",
    "ssl.key.location": "ssl_keyfile",
    "ssl.key.password": "ssl_password",
}
"""What kafka-python calls the keys of librdkafka that say how to reach a broker."""
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class OpenTransaction:
    """A transaction that stands open in a partition."""

    topic: str
    partition: int
    start: int
    """Offset of its first record: the last stable offset, where no other is older."""
    producer_id: int
    producer_epoch: int
    coordinator_epoch: int
    """Of the last marker that its producer was sent in the partition; -1 where there was none."""
    silent_s: float
    """How long nothing was written in it, by the time its last record has."""
    transactional_id: str | None
    """None where no coordinator knows the producer (any more)."""
    state: str
    """What its coordinator says of the producer's latest transaction; empty where none knows it."""
    timeout_s: float
    """When its coordinator aborts it by itself; where none knows it, kafka.transaction_timeout_s."""
    abandoned: bool
    """Whether its coordinator is done with it, or none knows it."""
    committed: bool
    """Whether it was the coordinator's latest, and counts as committed."""

    @property
    def hanging(self) -> bool:
        """Whether nobody ends it, for longer than a transaction may last."""
        return self.abandoned and self.silent_s > self.timeout_s

    def __str__(self) -> str:
        who = f"producer {self.producer_id} epoch {self.producer_epoch}"
        if self.transactional_id is not None:
            who += f" ({self.transactional_id}, {self.state})"
        return f"{self.topic}[{self.partition}] from offset {self.start} on, of {who}, silent for {self.silent_s:.0f} s"


def open_transactions(kafka: KafkaConfig, places: Mapping[str, list[int]]) -> list[OpenTransaction]:
    """What stands open in these partitions, by topic, partition and first offset.

    Raises BrokerUnavailable where it cannot be asked for, ConfigurationError where kafka.client holds a key of TLS or
    SASL that means nothing to kafka-python.
    """
    with _client(kafka) as client:
        return _retrying(lambda: _look(client, kafka, places), "asking for open transactions")


def hanging(kafka: KafkaConfig, run: str) -> list[OpenTransaction]:
    """What hangs in the topics of a run and among the offsets of its groups. Raises as `open_transactions` does."""
    return [each for each in open_transactions(kafka, places_of(kafka, run)) if each.hanging]


def places_of(kafka: KafkaConfig, run: str) -> dict[str, list[int]]:
    """Partitions of a run's topics, and those of the offsets of its groups.

    Raises TopicError where there is no such run, BrokerUnavailable.
    """
    found = {f"{run}.{name}": list(range(count)) for name, count in clients.runs(kafka).get(run, {}).items()}
    if not found:
        clients.partitions_of(kafka, f"{run}.rollouts")
    client = clients.admin(kafka)
    listed = clients.retrying(lambda: client.list_consumer_groups().result(kafka.patience_s).valid, "listing groups")
    groups = [group.group_id for group in listed or [] if group.group_id.startswith(f"{run}.")]
    if groups:
        count = clients.partitions_of(kafka, OFFSETS)
        found[OFFSETS] = sorted({offsets_partition(group, count) for group in groups})
    return found


def offsets_partition(group: str, count: int) -> int:
    """Which of `count` partitions of the offsets topic a group's offsets lie in: Java's hash of its name decides."""
    units = group.encode("utf-16-be")
    value = 0
    for high, low in zip(units[::2], units[1::2], strict=True):
        value = (31 * value + 256 * high + low) & 0xFFFFFFFF
    # Kafka's absolute value takes the smallest of all integers to 0.
    absolute = value if value < 2**31 else 2**32 - value
    return absolute % 2**31 % count


def open_on(kafka: KafkaConfig, topic: str, partitions: list[int]) -> str:
    """What an error says of the transactions that stand open in partitions somebody waited for. Never raises."""
    return _told(lambda: open_transactions(kafka, {topic: partitions}))


def open_on_offsets(kafka: KafkaConfig, group: str) -> str:
    """The same for somebody who waited for the offsets of a group."""

    def look() -> list[OpenTransaction]:
        place = offsets_partition(group, clients.partitions_of(kafka, OFFSETS))
        return open_transactions(kafka, {OFFSETS: [place]})

    return _told(look)


def _told(look: Callable[[], list[OpenTransaction]]) -> str:
    try:
        found = look()
    except RollstreamError as error:
        return f"whether a transaction stands open there cannot be seen ({error})"
    hangs = [each for each in found if each.hanging]
    if hangs:
        return (
            f"a transaction hangs: {'; '.join(map(str, hangs))}. Nobody ends it by itself: look with "
            f"`rollstream broker mend`, and end it with --yes"
        )
    if found:
        return (
            f"a transaction stands open: {'; '.join(map(str, found))}. It ends with its process, or after its timeout "
            f"({max(each.timeout_s for each in found):g} s) at the latest"
        )
    return "no transaction stands open there now"


def end(kafka: KafkaConfig, transactions: list[OpenTransaction]) -> list[OpenTransaction]:
    """End transactions that hang, as their coordinator did: those it counts as committed are, all others are aborted.

    Returns what stands open still. Raises as `open_transactions` does, and BrokerUnavailable where it is not allowed.
    """
    places: dict[str, list[int]] = {}
    for each in transactions:
        places.setdefault(each.topic, []).append(each.partition)
    with _client(kafka) as client:
        for each in transactions:
            _retrying(lambda each=each: _write_marker(client, each), f"ending the transaction on {each}")  # type: ignore[misc]
        left = {_identity(each) for each in _retrying(lambda: _look(client, kafka, places), "asking again")}
    return [each for each in transactions if _identity(each) in left]


def _identity(each: OpenTransaction) -> tuple[str, int, int, int]:
    return each.topic, each.partition, each.start, each.producer_id


@contextmanager
def _client(kafka: KafkaConfig) -> Iterator["KafkaAdminClient"]:
    # Imported late: only who looks for a transaction needs it.
    from kafka.admin import KafkaAdminClient

    # It says by itself what is raised here, and more.
    logging.getLogger("kafka").setLevel(logging.CRITICAL)
    settings = settings_of(kafka)
    # It leaves its sockets open where nobody answers.
    clients.check_broker(kafka)
    client = _retrying(lambda: KafkaAdminClient(**settings), "connecting", 0.0)
    try:
        yield client
    finally:
        client.close()


def settings_of(kafka: KafkaConfig) -> dict[str, Any]:
    """The settings of kafka-python that mean what `kafka.client` means to librdkafka. Raises ConfigurationError."""
    settings: dict[str, Any] = {
        "bootstrap_servers": kafka.bootstrap_servers.split(","),
        "client_id": "rollstream-mend",
        "request_timeout_ms": _REQUEST_MS,
        "bootstrap_timeout_ms": _REQUEST_MS,
    }
    for key, value in kafka.client.items():
        if key in _NAMES:
            settings[_NAMES[key]] = resolve(key, value)
        elif key == "ssl.endpoint.identification.algorithm":
            settings["ssl_check_hostname"] = value != "none"
        elif key.startswith(("ssl.", "sasl.", "enable.ssl.")):
            raise ConfigurationError(
                f'kafka.client sets "{key}", with which transactions cannot be looked at from here; Kafka\'s own '
                f"kafka-transactions.sh can"
            )
    if "security_protocol" in settings:
        settings["security_protocol"] = settings["security_protocol"].upper()
    return settings


def _retrying(call: Callable[[], T], doing: str, for_s: float = _TRY_FOR_S) -> T:
    """What `call` returns, tried again while leaders and coordinators move. Raises BrokerUnavailable."""
    from kafka.errors import KafkaError

    deadline = time.monotonic() + for_s
    while True:
        try:
            return call()
        except (KafkaError, OSError, ValueError) as error:
            if not getattr(error, "retriable", False) or time.monotonic() > deadline:
                raise BrokerUnavailable(f"{doing}: {error}") from error
            time.sleep(0.2)


def _look(client: "KafkaAdminClient", kafka: KafkaConfig, places: Mapping[str, list[int]]) -> list[OpenTransaction]:
    before = _open_producers(client, places)
    ids = {producer.producer_id for producers in before.values() for producer in producers}
    known = _coordinators_of(client, ids) if ids else {}
    # Markers are written before a coordinator is done: what it is done with and is open afterwards was left out.
    after = _open_producers(client, {place.topic: places[place.topic] for place in before})
    now_ms = time.time() * 1000
    found = []
    for place, producers in after.items():
        for producer in producers:
            if producer not in before.get(place, ()):
                continue
            name, told = known.get(producer.producer_id, (None, None))
            abandoned = told is None or told.state.value in _DONE or place not in told.topic_partitions
            found.append(
                OpenTransaction(
                    topic=place.topic,
                    partition=place.partition,
                    start=producer.current_transaction_start_offset,
                    producer_id=producer.producer_id,
                    producer_epoch=producer.producer_epoch,
                    coordinator_epoch=producer.coordinator_epoch,
                    silent_s=max(0.0, (now_ms - producer.last_timestamp) / 1000),
                    transactional_id=name,
                    state=told.state.value if told else "",
                    timeout_s=told.transaction_timeout_ms / 1000 if told else kafka.transaction_timeout_s,
                    abandoned=abandoned,
                    committed=abandoned and told is not None and _was_committed(producer, told),
                )
            )
    return sorted(found, key=_identity)


def _open_producers(client: "KafkaAdminClient", places: Mapping[str, list[int]]) -> dict[Any, list[Any]]:
    from kafka import TopicPartition

    wanted = [TopicPartition(topic, partition) for topic, numbers in places.items() for partition in set(numbers)]
    described = client.describe_producers(wanted) if wanted else {}
    still = {
        place: [each for each in states.active_producers if each.current_transaction_start_offset >= 0]
        for place, states in described.items()
    }
    return {place: producers for place, producers in still.items() if producers}


def _coordinators_of(client: "KafkaAdminClient", producer_ids: set[int]) -> dict[int, tuple[str, Any]]:
    """Transactional id of producers, and what its coordinator says of it, of those that one knows."""
    listed = client.list_transactions(producer_id_filters=sorted(producer_ids))
    names = sorted({each.transactional_id for found in listed.values() for each in found})
    described = client.describe_transactions(names) if names else {}
    return {told.producer_id: (name, told) for name, told in described.items()}


def _was_committed(producer: Any, told: Any) -> bool:
    """Whether the coordinator's latest transaction, which is committed, is the one that is open in a partition.

    It is if it began before that was written. Its epoch is the producer's, or the next one where each transaction has
    an epoch of its own (KIP-890).
    """
    return (
        told.state.value in ("PrepareCommit", "CompleteCommit")
        and told.producer_epoch - producer.producer_epoch in (0, 1)
        and 0 <= told.transaction_start_time_ms <= producer.last_timestamp
    )


def _write_marker(client: "KafkaAdminClient", each: OpenTransaction) -> None:
    from kafka import TopicPartition
    from kafka.admin._transactions import AbortTransactionSpec
    from kafka.protocol.producer.transaction import WriteTxnMarkersRequest

    place = TopicPartition(each.topic, each.partition)
    # As Kafka's own tool does: an epoch below that of an earlier marker would be refused.
    spec = AbortTransactionSpec(place, each.producer_id, each.producer_epoch, max(0, each.coordinator_epoch))
    request: WriteTxnMarkersRequest = client._abort_transaction_request(spec)
    request.markers[0].transaction_result = each.committed

    async def send() -> None:
        [leader] = await client._async_get_leader_for_partitions([place])
        response = await client._manager.send(request, node_id=leader)
        client._abort_transaction_process_response(response, spec)

    client._manager.run(send)
