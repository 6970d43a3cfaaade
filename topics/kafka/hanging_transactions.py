"""Hanging transactions: open in a partition, but complete at their coordinator, so that nobody ends them.

Readers of the partition, and requests for committed offsets, wait for them forever. A transaction hangs if a broker
loses its marker (docs/decisions/0012). `open_on` explains the wait in error messages; `rollstream broker mend` ends
hanging transactions. These requests, and the removal of group members, use kafka-python because librdkafka lacks them.
"""

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from rollstream.topics.config import KafkaConfig
from rollstream.topics.errors import BrokerUnavailable, ConfigurationError, RollstreamError
from rollstream.topics.kafka import clients, topic_admin
from rollstream.topics.secrets import resolve

if TYPE_CHECKING:
    from kafka.admin import KafkaAdminClient

OFFSETS = "__consumer_offsets"
"""The topic of committed group offsets; offsets in an open transaction are pending."""
_DONE = ("Empty", "CompleteCommit", "CompleteAbort", "Dead")
_TRY_FOR_S = 30.0
_CLOCKS_MS = 10_000
"""How far apart the clocks of a producer's host and of a broker may be."""
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
"""librdkafka's connection settings, with kafka-python's names for them."""
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class OpenTransaction:
    """A transaction that is open in a partition."""

    topic: str
    partition: int
    start: int
    """Offset of its first record, which is the last stable offset if no open transaction is older."""
    producer_id: int
    producer_epoch: int
    coordinator_epoch: int
    """Coordinator epoch of the last marker sent for its producer in the partition; -1 if there was none."""
    silent_s: float
    """Seconds since the timestamp of its last record."""
    transactional_id: str | None
    """None if no coordinator knows the producer (any more)."""
    state: str
    """State of the producer's latest transaction at its coordinator; empty if no coordinator knows it."""
    timeout_s: float
    """Timeout after which its coordinator aborts it; kafka.transaction_timeout_s if no coordinator knows it."""
    abandoned: bool
    """Whether its coordinator has completed it, or no coordinator knows it."""
    committed: bool | None
    """Whether it was the coordinator's latest transaction of the producer, and was committed there. None if its times
    are too close to tell it from an earlier one."""

    @property
    def hanging(self) -> bool:
        """Whether it is abandoned and has been silent for longer than its timeout."""
        return self.abandoned and self.silent_s > self.timeout_s

    def __str__(self) -> str:
        who = f"producer {self.producer_id} epoch {self.producer_epoch}"
        if self.transactional_id is not None:
            who += f" ({self.transactional_id}, {self.state})"
        return f"{self.topic}[{self.partition}] from offset {self.start} on, of {who}, silent for {self.silent_s:.0f} s"


def open_transactions(kafka: KafkaConfig, places: Mapping[str, list[int]]) -> list[OpenTransaction]:
    """Open transactions of these partitions, sorted by topic, partition and first offset.

    Raises BrokerUnavailable if the request fails, ConfigurationError if kafka.client has a TLS or SASL key that
    kafka-python does not support.
    """
    with admin_client(kafka) as client:
        return _retrying(lambda: _look(client, kafka, places), "asking for open transactions")


def hanging(kafka: KafkaConfig, run: str) -> list[OpenTransaction]:
    """Hanging transactions in a run's topics or its groups' offsets. Raises as `open_transactions` does."""
    return [each for each in open_transactions(kafka, places_of(kafka, run)) if each.hanging]


def places_of(kafka: KafkaConfig, run: str) -> dict[str, list[int]]:
    """Partitions of a run's topics, and the partitions of the offsets topic that hold the offsets of its groups.

    Raises TopicError if there is no such run, and BrokerUnavailable.
    """
    counts = topic_admin.runs(kafka).get(run, {})
    partitions_by_topic = {f"{run}.{name}": list(range(count)) for name, count in counts.items()}
    if not partitions_by_topic:
        topic_admin.partitions_of(kafka, f"{run}.rollouts")
    groups = [group for group in topic_admin.group_names(kafka) if group.startswith(f"{run}.")]
    if groups:
        count = topic_admin.partitions_of(kafka, OFFSETS)
        partitions_by_topic[OFFSETS] = sorted({offsets_partition(group, count) for group in groups})
    return partitions_by_topic


def offsets_partition(group: str, count: int) -> int:
    """Partition of the offsets topic, out of `count`, that holds a group's offsets, by Java's hash of its name."""
    units = group.encode("utf-16-be")
    value = 0
    for high, low in zip(units[::2], units[1::2], strict=True):
        value = (31 * value + 256 * high + low) & 0xFFFFFFFF
    # Kafka takes 0 as the absolute value of the smallest integer.
    absolute = value if value < 2**31 else 2**32 - value
    return absolute % 2**31 % count


def open_on(kafka: KafkaConfig, topic: str, partitions: list[int]) -> str:
    """Describe the open transactions of awaited partitions, for an error message. Never raises."""
    return _told(lambda: open_transactions(kafka, {topic: partitions}))


def open_on_offsets(kafka: KafkaConfig, group: str) -> str:
    """Describe the open transactions that hold back a group's offsets, for an error message. Never raises."""

    def look() -> list[OpenTransaction]:
        place = offsets_partition(group, topic_admin.partitions_of(kafka, OFFSETS))
        return open_transactions(kafka, {OFFSETS: [place]})

    return _told(look)


def _told(look: Callable[[], list[OpenTransaction]]) -> str:
    try:
        transactions = look()
    except RollstreamError as error:
        return f"whether a transaction is open there cannot be determined ({error})"
    hangs = [each for each in transactions if each.hanging]
    if hangs:
        return (
            f"a transaction hangs: {'; '.join(map(str, hangs))}. It does not end by itself: inspect it with "
            f"`rollstream broker mend`, and end it with --yes"
        )
    if transactions:
        return (
            f"a transaction is open: {'; '.join(map(str, transactions))}. Its process ends it; if the process is gone, "
            f"the broker aborts it after its timeout ({max(each.timeout_s for each in transactions):g} s)"
        )
    return "no transaction is open there now"


def end(
    kafka: KafkaConfig, transactions: list[OpenTransaction], *, commit_unclear: bool | None = None
) -> list[OpenTransaction]:
    """End hanging transactions: commit each that its coordinator committed, and abort every other. `commit_unclear`
    decides about those of which nobody can tell; if it is None, they are left.

    Returns the transactions that are still open. Raises as `open_transactions` does, and BrokerUnavailable if access is
    denied.
    """
    places: dict[str, list[int]] = {}
    for each in transactions:
        places.setdefault(each.topic, []).append(each.partition)
    decided = [
        each if each.committed is not None else replace(each, committed=commit_unclear)
        for each in transactions
        if each.committed is not None or commit_unclear is not None
    ]
    with admin_client(kafka) as client:
        for each in decided:
            _retrying(lambda each=each: _write_marker(client, each), f"ending the transaction on {each}")  # type: ignore[misc]
        left = {_identity(each) for each in _retrying(lambda: _look(client, kafka, places), "checking the result")}
    return [each for each in transactions if _identity(each) in left]


def _identity(each: OpenTransaction) -> tuple[str, int, int, int]:
    return each.topic, each.partition, each.start, each.producer_id


@contextmanager
def admin_client(kafka: KafkaConfig) -> Iterator["KafkaAdminClient"]:
    """Open kafka-python's admin client, which has requests that librdkafka lacks.

    Raises BrokerUnavailable if no broker answers, ConfigurationError as `settings_of` does.
    """
    # Imported late: only these requests need it.
    from kafka.admin import KafkaAdminClient

    # kafka-python also logs the errors that are raised here.
    logging.getLogger("kafka").setLevel(logging.CRITICAL)
    settings = settings_of(kafka)
    # kafka-python leaves its sockets open if no broker answers, so it connects only after a broker has answered.
    clients.check_broker(kafka)
    client = _retrying(lambda: KafkaAdminClient(**settings), "connecting", 0.0)
    try:
        yield client
    finally:
        client.close()


def settings_of(kafka: KafkaConfig) -> dict[str, Any]:
    """The settings of kafka-python that correspond to `kafka.client`.

    Raises ConfigurationError for a TLS or SASL key that kafka-python does not support, or a secret that cannot be read.
    """
    settings: dict[str, Any] = {
        "bootstrap_servers": kafka.client.get("bootstrap.servers", kafka.bootstrap_servers).split(","),
        "client_id": "rollstream-mend",
        "request_timeout_ms": _REQUEST_MS,
        "bootstrap_timeout_ms": _REQUEST_MS,
    }
    for key, value in kafka.client.items():
        if key == "ssl.ca.location" and value == "probe":
            continue  # kafka-python uses the authorities of the system by default.
        if key == "ssl.ca.location" and Path(value).is_dir():
            raise ConfigurationError(
                f"kafka.client sets ssl.ca.location to the directory {value}, which kafka-python does not support; "
                "give a file with the certificates of the authorities"
            )
        if key in _NAMES:
            settings[_NAMES[key]] = resolve(key, value)
        elif key == "ssl.endpoint.identification.algorithm":
            settings["ssl_check_hostname"] = value != "none"
        elif key.startswith(("ssl.", "sasl.", "enable.ssl.")):
            raise ConfigurationError(
                f'kafka.client sets "{key}", which kafka-python does not support; use a listener without it, or '
                f"Kafka's own tools, such as kafka-transactions.sh for open transactions"
            )
    if "security_protocol" in settings:
        settings["security_protocol"] = settings["security_protocol"].upper()
    return settings


def _retrying(call: Callable[[], T], doing: str, for_s: float = _TRY_FOR_S) -> T:
    """Return the result of `call`, repeated while leaders and coordinators move. Raises BrokerUnavailable."""
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
    # A coordinator writes all markers before it completes a transaction. If a transaction is complete there and still
    # open here afterwards, its marker was lost.
    after = _open_producers(client, {place.topic: places[place.topic] for place in before})
    now_ms = time.time() * 1000
    hanging_now = []
    for place, producers in after.items():
        for producer in producers:
            if producer not in before.get(place, ()):
                continue
            name, description = known.get(producer.producer_id, (None, None))
            abandoned = (
                description is None or description.state.value in _DONE or place not in description.topic_partitions
            )
            hanging_now.append(
                OpenTransaction(
                    topic=place.topic,
                    partition=place.partition,
                    start=producer.current_transaction_start_offset,
                    producer_id=producer.producer_id,
                    producer_epoch=producer.producer_epoch,
                    coordinator_epoch=producer.coordinator_epoch,
                    silent_s=max(0.0, (now_ms - producer.last_timestamp) / 1000),
                    transactional_id=name,
                    state=description.state.value if description else "",
                    timeout_s=description.transaction_timeout_ms / 1000 if description else kafka.transaction_timeout_s,
                    abandoned=abandoned,
                    committed=_was_committed(producer, description) if abandoned and description else False,
                )
            )
    return sorted(hanging_now, key=_identity)


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
    """Transactional id and its coordinator's description, by producer id, for producers that a coordinator knows."""
    listed = client.list_transactions(producer_id_filters=sorted(producer_ids))
    names = sorted({each.transactional_id for producers in listed.values() for each in producers})
    described = client.describe_transactions(names) if names else {}
    return {description.producer_id: (name, description) for name, description in described.items()}


def _was_committed(producer: Any, description: Any) -> bool | None:
    """Whether a coordinator's latest transaction is committed and is the transaction that is open in a partition.

    It is the open transaction if it began before the partition's last record was written, and has the epoch of the
    partition's producer, or the next epoch if each transaction has its own epoch (KIP-890). The time of a record is of
    the producer's clock when it was queued, and a transaction begins later at the coordinator, by its own clock: times
    less than _CLOCKS_MS apart tell nothing.
    """
    if description.state.value not in ("PrepareCommit", "CompleteCommit"):
        return False
    if description.producer_epoch - producer.producer_epoch not in (0, 1) or description.transaction_start_time_ms < 0:
        return False
    after_ms = producer.last_timestamp - description.transaction_start_time_ms
    return after_ms > 0 if abs(after_ms) > _CLOCKS_MS else None


def _write_marker(client: "KafkaAdminClient", each: OpenTransaction) -> None:
    from kafka import TopicPartition
    from kafka.admin._transactions import AbortTransactionSpec
    from kafka.protocol.producer.transaction import WriteTxnMarkersRequest

    place = TopicPartition(each.topic, each.partition)
    # The epoch is chosen as by Kafka's own tool: the broker refuses an epoch below an earlier marker's.
    spec = AbortTransactionSpec(place, each.producer_id, each.producer_epoch, max(0, each.coordinator_epoch))
    request: WriteTxnMarkersRequest = client._abort_transaction_request(spec)
    request.markers[0].transaction_result = each.committed

    async def send() -> None:
        [leader] = await client._async_get_leader_for_partitions([place])
        response = await client._manager.send(request, node_id=leader)
        client._abort_transaction_process_response(response, spec)

    client._manager.run(send)
