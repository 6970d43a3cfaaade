"""Fills buffers of trajectories from the log, each from its own position: by `poll`, or in a thread of its own.

Whatever is wrong with a record, the buffers pass it: it is counted, and logged with its offset. A log that is not the
one a buffer was filled from is refused, never read on from where it happens to have records.
"""

import logging
import threading
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, NamedTuple, Protocol, Self

from confluent_kafka import OFFSET_BEGINNING, ConsumerGroupTopicPartitions, KafkaError, Message, TopicPartition

from consumers.buffers.files import read_json, write_json
from topics import clients
from topics.catalogue import topic_name
from topics.codec import decode_as
from topics.config import KafkaConfig
from topics.errors import ConfigurationError, DeadlineExceeded, RecordError, TopicError
from topics.hanging import open_on
from topics.logs import event
from topics.records import TrajectoryRecord
from topics.trajectories import Trajectory, from_record

logger = logging.getLogger(__name__)
_RECORDS_A_POLL = 100
_WAIT_S = 0.1
_COMMIT_EVERY_S = 5.0
_TIMEOUT_S = 30.0
FILLER_GROUPS = ".filler-"
"""What the name of a filler's consumer group has between those of run and filler."""

Place = tuple[int, int]
"""Partition and offset of a record."""


class Fillable(Protocol):
    """What can be filled from the log. What lies below its position it leaves out by itself.

    One that writes to disk later than `add` returns has a method `flush`, which waits for that.
    """

    @property
    def position(self) -> Mapping[int, int]:
        """Next offset to be read, by partition; a partition nothing came from is not in it."""

    def add(self, trajectory: Trajectory, /, *, at: Place) -> Any:
        """Put a trajectory in and move the position past it, both or neither. Raises RecordError for one that is
        unsound, whose place is then to be skipped."""

    def skip(self, at: Place, /) -> Any:
        """Move the position past a record that is not for this buffer."""


class Counts(NamedTuple):
    """What came of the records read, since the filler was made."""

    added: int = 0
    """Records that every buffer has that lacked them."""
    refused: int = 0
    """Records that cannot be read, or that a buffer refused."""


def put(buffers: Sequence[Fillable], at: Place, value: bytes | None) -> list[str]:
    """Give a record to buffers, whatever is wrong with it; returns what was.

    Raises what a buffer raises besides RecordError, as where its disk is full: the buffers that had the record by then
    leave it out when it is given to all of them again.
    """
    partition, offset = at
    waiting = [buffer for buffer in buffers if buffer.position.get(partition, 0) <= offset]
    try:
        trajectory = from_record(decode_as(TrajectoryRecord, value))
    except RecordError as error:
        for buffer in waiting:
            buffer.skip(at)
        return [str(error)]
    refused = []
    for buffer in waiting:
        try:
            buffer.add(trajectory, at=at)
        except RecordError as error:
            refused.append(f"{type(buffer).__name__}: {error}")
            buffer.skip(at)
    return refused


def filler_positions(kafka: KafkaConfig, run: str) -> dict[str, dict[int, int]]:
    """By name of each filler of a run's `trajectories`, the position it committed of each partition."""
    client, topic = clients.admin(kafka), topic_name(run, "trajectories")
    listed = clients.retrying(lambda: client.list_consumer_groups().result(_TIMEOUT_S), "listing consumer groups")
    prefix = f"{run}{FILLER_GROUPS}"
    found = {}
    for group in sorted(item.group_id for item in listed.valid if item.group_id.startswith(prefix)):
        asked = client.list_consumer_group_offsets([ConsumerGroupTopicPartitions(group)])[group]
        offsets = clients.retrying(partial(asked.result, _TIMEOUT_S), f"asking for offsets of group {group}")
        at = {tp.partition: tp.offset for tp in offsets.topic_partitions or () if tp.topic == topic and tp.offset >= 0}
        if at:
            found[group.removeprefix(prefix)] = at
    return found


class TrajectoryFiller:
    """Fills buffers from a run's `trajectories`, by `poll` and `fill` or in the thread that `start` begins.

    Records of a partition come in their order; those of several in no order that would be the same another time.

    A context manager that starts the thread, and closes. With `identity_file` it is remembered across processes which
    topic the buffers were filled from, so that one created again under the same name is refused.

    What all buffers have, on disk where they write to disk, is committed every five seconds and on closing, as the
    position of consumer group `{run}.filler-{name}`: `rollstream prune` keeps what lies behind it.
    """

    def __init__(
        self,
        kafka: KafkaConfig,
        run: str,
        buffers: Sequence[Fillable],
        *,
        topic: Literal["trajectories", "unlabelled"] = "trajectories",
        identity_file: Path | None = None,
        name: str = "default",
    ) -> None:
        """Fillers of a run that fill other buffers have other names.

        Raises TopicError where a buffer's position is no longer, or not yet, in the log, or the topic is another than
        the one it was filled from; BrokerUnavailable when nobody answers."""
        if not buffers:
            raise ConfigurationError("a filler of no buffer; give at least one")
        self._kafka = kafka
        self._topic = topic_name(run, topic)
        self._buffers = list(buffers)
        clients.check_broker(kafka)
        self._remember_topic(identity_file)
        self._next = self._begin()
        self._ends: dict[int, int] = {}
        """Where each partition ended when it was last read to its end."""
        self._counts = Counts()
        self._group = f"{run}{FILLER_GROUPS}{name}"
        self._consumer = clients.reader(kafka, group=self._group)
        self._committed: dict[int, int] = {}
        self._commit()
        self._stopping = threading.Event()
        self._failure: Exception | None = None
        self._thread: threading.Thread | None = None
        starts = [TopicPartition(self._topic, p, offset) for p, offset in self._next.items()]
        clients.follow(self._consumer, kafka, starts)

    @property
    def counts(self) -> Counts:
        """What came of the records read; may be asked from another thread."""
        return self._counts

    def poll(self, timeout_s: float = 1.0) -> int:
        """Take in what there is, waiting up to `timeout_s` for the first record; how many records that were.

        Raises TopicError, BrokerUnavailable, and what buffers raise besides RecordError. A filler that failed stays
        so: another one goes on from the positions.
        """
        if self._thread is not None and self._thread is not threading.current_thread():
            raise ConfigurationError("this filler fills in a thread of its own; leave polling to that")
        self.check()
        try:
            return self._poll(timeout_s)
        except Exception as error:
            self._failure = error
            raise

    def fill(self, timeout_s: float | None = None) -> None:
        """Take in everything that is on the log by now. Raises DeadlineExceeded where no record came for `timeout_s`
        before that, kafka.patience_s by default, and as `poll` does."""
        timeout_s = self._kafka.patience_s if timeout_s is None else timeout_s
        wanted = {p: end for p, (_begin, end) in clients.bounds(self._kafka, self._topic).items()}
        deadline = time.monotonic() + timeout_s
        while any(self._ends.get(p, 0) < end for p, end in wanted.items()):
            if self.poll(_WAIT_S):
                deadline = time.monotonic() + timeout_s
            elif time.monotonic() > deadline:
                behind = [p for p, end in wanted.items() if self._ends.get(p, 0) < end]
                raise DeadlineExceeded(
                    f"{self._topic} was not read to its end, {wanted}, within {timeout_s:g} s without a record; "
                    f"{open_on(self._kafka, self._topic, behind)}"
                )
        self._commit()

    def start(self) -> Self:
        """Fill in a thread from now on, until `close`."""
        self._thread = threading.Thread(target=self._run, name="trajectory-filler", daemon=True)
        self._thread.start()
        return self

    def check(self) -> None:
        """Raise what ended the filling, if something did: the buffers get nothing more."""
        if self._failure is not None:
            raise self._failure

    def close(self) -> None:
        """Stop, and close the consumer; the buffers stay as they are. Raises what ended the thread."""
        self._stopping.set()
        if self._thread is not None:
            self._thread.join()
        try:
            if self._failure is None:
                self._commit()
        finally:
            self._consumer.close()
        if self._thread is not None:
            self.check()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        try:
            self.close()
        except Exception:
            # The error under way says more, or is the same.
            if error is None:
                raise

    # ------------------------------------------------------------------ within

    def _poll(self, timeout_s: float) -> int:
        records = 0
        messages = clients.at_hand(self._consumer, _RECORDS_A_POLL, timeout_s)
        for message in clients.with_unreadable(self._consumer, messages, self._next):
            error, partition, offset = message.error(), message.partition(), message.offset()
            if error is None:
                assert partition is not None, "as in every message without an error"
                assert offset is not None
                self._take((partition, offset), message)
                records += 1
            elif error.code() == KafkaError._PARTITION_EOF:
                self._ends[partition or 0] = offset or 0
            else:
                clients.raise_for(error, f"reading {self._topic}")
        if time.monotonic() - self._committed_at > _COMMIT_EVERY_S:
            self._commit()
        return records

    def _commit(self) -> None:
        """Commit what every buffer has, once it is on disk. Raises ConfigurationError where another filler committed
        under the same name since, BrokerUnavailable, and what buffers raise."""
        positions = {
            p: min(buffer.position.get(p, self._begins[p]) for buffer in self._buffers) for p in sorted(self._begins)
        }
        self._committed_at = time.monotonic()
        if positions == self._committed:
            return
        for buffer in self._buffers:
            if (flush := getattr(buffer, "flush", None)) is not None:
                flush()
        doing = f"committing positions of group {self._group}"
        asked = [TopicPartition(self._topic, p) for p in positions]
        found = {tp.partition: tp.offset for tp in clients.committed(self._kafka, self._consumer, asked, doing)}
        if self._committed and found != self._committed:
            raise ConfigurationError(
                f"another filler committed positions as group {self._group}, and what one of them lacks may be pruned; "
                f"give each filler of the run a name of its own"
            )
        offsets = [TopicPartition(self._topic, p, offset) for p, offset in positions.items()]
        clients.retrying(lambda: self._consumer.commit(offsets=offsets, asynchronous=False), doing)
        self._committed = positions

    def _run(self) -> None:
        try:
            while not self._stopping.is_set():
                self.poll(_WAIT_S)
        except Exception as error:  # kept by poll: whoever draws from the buffers hears of it by `check`
            event(logger, "filling_failed", level=logging.ERROR, topic=self._topic, error=repr(error))

    def _take(self, at: Place, message: Message) -> None:
        # A stand-in for a record nobody can decompress has no time.
        unreadable = message.timestamp()[1] < 0
        wrong = put(self._buffers, at, message.value())
        added, refused = self._counts
        self._counts = Counts(added + (not wrong), refused + bool(wrong))
        if wrong:
            event(
                logger,
                "trajectory_refused",
                level=logging.WARNING,
                topic=self._topic,
                partition=at[0],
                offset=at[1],
                why=clients.UNREADABLE if unreadable else "; ".join(wrong),
            )

    def _remember_topic(self, path: Path | None) -> None:
        """Refuse another topic than the one the buffers hold records of."""
        if path is None:
            return
        identity = [self._topic, clients.topic_ids(self._kafka, [self._topic])[self._topic]]
        known = read_json(path) if path.exists() else identity
        if known != identity and any(buffer.position for buffer in self._buffers):
            raise TopicError(
                f"the buffers beside {path} hold records of {' with id '.join(known)}, and are not filled from "
                f"{' with id '.join(identity)}; take empty buffers, or the run and the brokers they were filled from"
            )
        if known != identity or not path.exists():
            write_json(path, identity)

    def _begin(self) -> dict[int, int]:
        """The first offset to be read of each partition: the lowest that a buffer has to have."""
        starts = {}
        bounds = clients.bounds(self._kafka, self._topic)
        self._begins = {partition: begin for partition, (begin, _end) in bounds.items()}
        for partition, (begin, end) in bounds.items():
            for position in (buffer.position.get(partition) for buffer in self._buffers):
                if position is not None and not begin <= position <= end:
                    raise TopicError(
                        f"a buffer is filled to offset {position} of {self._topic}[{partition}], which has {begin} to "
                        f"{end}: "
                        + (
                            "what it lacks was deleted; take an empty buffer, it begins with what is left"
                            if position < begin
                            else "the topic was created again; take an empty buffer, or the brokers it was filled from"
                        )
                    )
            positions = [buffer.position.get(partition) for buffer in self._buffers]
            known = [position for position in positions if position is not None]
            starts[partition] = min(known) if len(known) == len(positions) else OFFSET_BEGINNING
        return starts
