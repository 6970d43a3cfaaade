"""Open transactions: each hides all records from its first record on, until it is committed or aborted.

A writer that adds only missing records checks here first, because a record that seems missing may be hidden.
"""

import logging
import time
from collections.abc import Collection, Iterable
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

from confluent_kafka import IsolationLevel, TopicPartition

from rollstream.topics.config import KafkaConfig
from rollstream.topics.errors import DeadlineExceeded
from rollstream.topics.kafka import clients, topic_admin
from rollstream.topics.kafka.client_calls import answer_of, retrying
from rollstream.topics.kafka.hanging_transactions import open_on
from rollstream.topics.logs import event

if TYPE_CHECKING:
    from confluent_kafka.admin import AdminClient

logger = logging.getLogger(__name__)
_LOOK_EVERY_S = 0.1
_MARKS_S = 3.0


class Undecided(NamedTuple):
    """The part of a partition that is not visible to read-committed readers yet."""

    start: int
    """The last stable offset: the first record of the oldest open transaction."""
    end: int
    """Offset past the last record."""


def undecided(kafka: KafkaConfig, topic: str, among: Collection[int] | None = None) -> dict[int, Undecided]:
    """Undecided part of each partition whose last stable offset is below its end; only partitions in `among`, if given.

    Raises as `topic_admin.partitions_of` does.
    """
    client = clients.admin(kafka)
    there = range(topic_admin.partitions_of(kafka, topic, client))
    partitions = there if among is None else among
    # In this order, records written between the two requests may be reported as undecided, but never as decided.
    stable = _latest(client, topic, partitions, IsolationLevel.READ_COMMITTED)
    ends = _latest(client, topic, partitions, IsolationLevel.READ_UNCOMMITTED)
    return {p: Undecided(stable[p], ends[p]) for p in partitions if stable[p] < ends[p]}


def await_decided(
    kafka: KafkaConfig, topic: str, doing: str, timeout_s: float | None = None, among: Collection[int] | None = None
) -> None:
    """Wait until every record that is in a topic now is committed or aborted; at most for kafka.patience_s by default.

    `among` are the partitions to wait for, all by default. Raises DeadlineExceeded, with the remedy, if a transaction
    stays open; the message begins with `doing`, which names the action that is not taken.
    """
    timeout_s = kafka.patience_s if timeout_s is None else timeout_s
    deadline, reported = time.monotonic() + timeout_s, False
    ends = {partition: part.end for partition, part in undecided(kafka, topic, among).items()}
    while behind := {p: part for p, part in undecided(kafka, topic, among).items() if part.start < ends.get(p, 0)}:
        if time.monotonic() > deadline:
            raise DeadlineExceeded(
                f"{doing}: a transaction has been open on {_places(topic, behind)} for more than {timeout_s:g} s, and "
                f"may hold records that must be seen first; end the process that began it, wait for "
                f"kafka.transaction_timeout_s ({kafka.transaction_timeout_s:g} s), and repeat. Now "
                f"{open_on(kafka, topic, sorted(behind))}"
            )
        if not reported:
            event(logger, "transaction_open", level=logging.WARNING, what=_places(topic, behind))
            reported = True
        time.sleep(_LOOK_EVERY_S)


def await_markers(kafka: KafkaConfig, topic: str) -> None:
    """Wait until every record that is in a topic now is committed or aborted, but only for as long as a broker takes to
    write the marks of a transaction that it has committed. One that stays open longer is not committed yet."""
    with suppress(DeadlineExceeded):
        await_decided(kafka, topic, "records are left out", _MARKS_S)


def _places(topic: str, parts: dict[int, Undecided]) -> str:
    return ", ".join(f"{topic}[{p}] from offset {part.start} to {part.end}" for p, part in sorted(parts.items()))


def _latest(client: "AdminClient", topic: str, partitions: Iterable[int], isolation: IsolationLevel) -> dict[int, int]:
    # Imported late, as in clients.admin.
    from confluent_kafka.admin._listoffsets import OffsetSpec

    latest = OffsetSpec.latest()  # type: ignore[no-untyped-call]
    places = {TopicPartition(topic, partition): latest for partition in partitions}

    def ask() -> dict[int, int]:
        futures = client.list_offsets(places, isolation_level=isolation, request_timeout=10.0)
        return {place.partition: answer_of(future, 11.0).offset for place, future in futures.items()}

    return retrying(ask, f"asking where {topic} ends")
