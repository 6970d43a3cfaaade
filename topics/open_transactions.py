"""Where transactions stand open: readers see nothing from the first record of one on, until its fate is decided.

Whoever writes what is not there yet asks here first: what is hidden may be there already.
"""

import logging
import time
from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING, NamedTuple

from confluent_kafka import IsolationLevel, TopicPartition

from topics import clients
from topics.config import KafkaConfig
from topics.errors import DeadlineExceeded
from topics.hanging import open_on
from topics.logs import event

if TYPE_CHECKING:
    from confluent_kafka.admin import AdminClient

logger = logging.getLogger(__name__)
_LOOK_EVERY_S = 0.1


class Undecided(NamedTuple):
    """The part of a partition that no reader sees yet."""

    start: int
    """The last stable offset: the first record of the oldest open transaction."""
    end: int
    """One past the last record."""


def undecided(kafka: KafkaConfig, topic: str, among: Collection[int] | None = None) -> dict[int, Undecided]:
    """Partitions, of those named or of all, whose last stable offset is behind their end.

    Raises as `clients.partitions_of` does.
    """
    client = clients.admin(kafka)
    there = range(clients.partitions_of(kafka, topic, client))
    partitions = there if among is None else among
    # In this order: what is written in between is open at most longer than told, never decided sooner.
    stable = _latest(client, topic, partitions, IsolationLevel.READ_COMMITTED)
    ends = _latest(client, topic, partitions, IsolationLevel.READ_UNCOMMITTED)
    return {p: Undecided(stable[p], ends[p]) for p in partitions if stable[p] < ends[p]}


def await_decided(
    kafka: KafkaConfig, topic: str, doing: str, timeout_s: float | None = None, among: Collection[int] | None = None
) -> None:
    """Wait until the fate of every record that is in a topic now is decided, kafka.patience_s by default.

    `among` are the partitions that matter, all by default. Raises DeadlineExceeded, with the remedy, where it is not
    decided in time: `doing` names what is not done then.
    """
    timeout_s = kafka.patience_s if timeout_s is None else timeout_s
    deadline, told = time.monotonic() + timeout_s, False
    ends = {partition: part.end for partition, part in undecided(kafka, topic, among).items()}
    while behind := {p: part for p, part in undecided(kafka, topic, among).items() if part.start < ends.get(p, 0)}:
        if time.monotonic() > deadline:
            raise DeadlineExceeded(
                f"{doing}: a transaction stands open on {_places(topic, behind)} for more than {timeout_s:g} s, and "
                f"may hold what must be seen first; end the process that began it, wait for "
                f"kafka.transaction_timeout_s ({kafka.transaction_timeout_s:g} s), and repeat. Now "
                f"{open_on(kafka, topic, sorted(behind))}"
            )
        if not told:
            event(logger, "transaction_open", level=logging.WARNING, what=_places(topic, behind))
            told = True
        time.sleep(_LOOK_EVERY_S)


def _places(topic: str, parts: dict[int, Undecided]) -> str:
    return ", ".join(f"{topic}[{p}] from offset {part.start} to {part.end}" for p, part in sorted(parts.items()))


def _latest(client: "AdminClient", topic: str, partitions: Iterable[int], isolation: IsolationLevel) -> dict[int, int]:
    # Imported late, as clients.admin does.
    from confluent_kafka.admin._listoffsets import OffsetSpec

    latest = OffsetSpec.latest()  # type: ignore[no-untyped-call]
    places = {TopicPartition(topic, partition): latest for partition in partitions}

    def ask() -> dict[int, int]:
        futures = client.list_offsets(places, isolation_level=isolation, request_timeout=10.0)
        return {place.partition: future.result(11.0).offset for place, future in futures.items()}

    return clients.retrying(ask, f"asking where {topic} ends")
