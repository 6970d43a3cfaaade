"""Writing marks onto partitions of `rollouts`: idempotent, outside every transaction (a duplicate mark is harmless)."""

import logging
import time
from collections.abc import Callable

from confluent_kafka import TIMESTAMP_LOG_APPEND_TIME, KafkaError, Message, TopicPartition

from consumers.grouping.config import GrouperConfig
from topics import clients
from topics.catalogue import topic_name
from topics.codec import encode
from topics.config import KafkaConfig
from topics.errors import DeadlineExceeded
from topics.keys import encode_key
from topics.logs import event
from topics.records import Mark

logger = logging.getLogger(__name__)


class MarkWriter:
    """Appends marks to chosen partitions."""

    def __init__(
        self,
        kafka: KafkaConfig,
        run: str,
        on_failure: Callable[[int], None],
        on_append: Callable[[int], None] = lambda append_ms: None,
    ) -> None:
        """`on_append` is told the time the broker gives each mark."""
        self._producer = clients.producer(kafka, **{"linger.ms": "0"})
        self._topic = topic_name(run, "rollouts")
        self._on_failure = on_failure
        self._on_append = on_append

    def write(self, partition: int, mark: Mark) -> None:
        """Append a mark; `on_failure(partition)` is called from `poll` when the broker did not take it."""
        value, key = encode(mark), encode_key("mark", mark.kind)
        clients.produce(self._producer, self._topic, value, key, partition=partition, on_delivery=self._delivered)
        event(logger, "mark", partition=partition, kind=mark.kind, policy_version=mark.policy_version)

    def poll(self) -> None:
        self._producer.poll(0)

    def flush(self, timeout_s: float) -> int:
        """Wait for what was written; returns how many marks are still not acknowledged."""
        return int(self._producer.flush(timeout_s))

    def _delivered(self, error: KafkaError | None, message: Message) -> None:
        if error is not None:
            event(logger, "mark_failed", level=logging.WARNING, partition=message.partition(), error=error.str())
            self._on_failure(message.partition() or 0)
        elif message.timestamp()[0] == TIMESTAMP_LOG_APPEND_TIME:
            self._on_append(message.timestamp()[1])


def drain(kafka: KafkaConfig, run: str, grouper: GrouperConfig, timeout_s: float = 60.0) -> None:
    """Have every partition cut what is sealed: append drain marks and wait until the group has read past them.

    Raises DeadlineExceeded when it does not within `timeout_s` (no grouping process runs, or it is far behind).
    """
    from consumers.grouping.bootstrap import committed_offsets

    topic = topic_name(run, "rollouts")
    partitions = clients.partitions_of(kafka, topic)
    at: dict[int, int] = {}

    def delivered(error: KafkaError | None, message: Message) -> None:
        if error is None:
            at[message.partition() or 0] = message.offset() or 0

    producer = clients.producer(kafka, **{"linger.ms": "0"})
    mark = encode(Mark(kind="drain", wall_time=time.time(), author="drain"))
    for partition in range(partitions):
        clients.produce(producer, topic, mark, encode_key("mark", "drain"), partition=partition, on_delivery=delivered)
    producer.flush(timeout_s)
    deadline = time.monotonic() + timeout_s
    behind: list[TopicPartition] = []
    while time.monotonic() < deadline:
        committed = committed_offsets(kafka, grouper.group_id(run), topic, partitions)
        behind = [tp for tp in committed if tp.offset <= at.get(tp.partition, 2**62)]
        if not behind:
            return
        time.sleep(0.1)
    raise DeadlineExceeded(
        f"partitions {[tp.partition for tp in behind]} of {topic} were not read up to their drain marks within "
        f"{timeout_s:g} s; is `rollstream group` running?"
    )
