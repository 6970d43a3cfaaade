"""Writer of marks to partitions of `rollouts`, outside any transaction because a duplicate mark is harmless."""

import logging
import time
from collections.abc import Callable

from rollstream.consumers.grouping.config import GrouperConfig
from rollstream.topics.config import KafkaConfig
from rollstream.topics.errors import DeadlineExceeded
from rollstream.topics.kafka import clients, topic_admin
from rollstream.topics.kafka.records import GroupPosition
from rollstream.topics.kafka.recovering_sender import RecoveringSender
from rollstream.topics.kafka.sender import Delivery, Failure, Sender
from rollstream.topics.logs import event
from rollstream.topics.records import Mark
from rollstream.topics.wire.catalogue import topic_name
from rollstream.topics.wire.keys import encode_key
from rollstream.topics.wire.signatures import MarkSigner

logger = logging.getLogger(__name__)


class MarkWriter:
    """Appends marks to chosen partitions."""

    def __init__(
        self,
        kafka: KafkaConfig,
        run: str,
        signer: MarkSigner,
        on_failure: Callable[[int], None],
        on_append: Callable[[int], None] = lambda append_ms: None,
    ) -> None:
        """`on_append` is called with the append time of each mark."""
        self._sender = RecoveringSender(kafka, on_failure=self._failed, **{"linger.ms": "0"})
        self._topic = topic_name(run, "rollouts")
        self._signer = signer
        self._on_failure = on_failure
        self._on_append = on_append

    def write(self, partition: int, mark: Mark) -> None:
        """Append a mark; `poll` calls `on_failure(partition)` if it was not delivered."""
        value, key = self._signer.encoded(mark, partition), encode_key("mark", mark.kind)
        self._sender.send(self._topic, value, key, partition=partition, name="a mark", on_delivery=self._delivered)
        event(logger, "mark", partition=partition, kind=mark.kind, policy_version=mark.policy_version)

    def poll(self) -> None:
        self._sender.poll()

    def flush(self, timeout_s: float) -> int:
        """Wait until the written marks are acknowledged; return the number of marks that are not."""
        return self._sender.waiting(timeout_s)

    def _delivered(self, delivery: Delivery) -> None:
        if delivery.stamped:
            self._on_append(delivery.timestamp_ms)

    def _failed(self, failure: Failure) -> None:
        event(logger, "mark_failed", level=logging.WARNING, partition=failure.partition, error=failure.reason)
        self._on_failure(failure.partition)


def drain(kafka: KafkaConfig, run: str, grouper: GrouperConfig, timeout_s: float = 60.0) -> None:
    """Append a drain mark to each partition, and wait until grouping has read past it: it batches all rollouts that
    batch makers hold, and drops the members of incomplete groups as cancelled.

    Raises DeadlineExceeded if that takes longer than `timeout_s` (no grouping process runs, or it is far behind).
    """
    from rollstream.consumers.grouping.process.bootstrap import committed_offsets

    topic = topic_name(run, "rollouts")
    partitions = topic_admin.partitions_of(kafka, topic)
    at: dict[int, int] = {}

    def delivered(delivery: Delivery) -> None:
        at[delivery.partition] = delivery.offset

    sender = Sender(clients.producer(kafka, **{"linger.ms": "0"}), remedy="drain again")
    mark, signer = Mark(kind="drain", wall_time=time.time(), author="drain"), MarkSigner(grouper.signing_key)
    for partition in range(partitions):
        value = signer.encoded(mark, partition)
        sender.send(topic, value, encode_key("mark", "drain"), partition=partition, on_delivery=delivered)
    sender.flush(timeout_s)
    deadline = time.monotonic() + timeout_s
    behind: list[GroupPosition] = []
    while time.monotonic() < deadline:
        committed = committed_offsets(kafka, grouper.group_id(run), topic, partitions)
        behind = [tp for tp in committed if tp.offset <= at.get(tp.partition, 2**62)]
        if not behind:
            return
        time.sleep(0.1)
    raise DeadlineExceeded(
        f"partitions {[tp.partition for tp in behind]} of {topic} were not read up to their drain marks within "
        f"{timeout_s:g} s; is `rollstream role group` running?"
    )
