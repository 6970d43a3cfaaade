"""Fills buffers of trajectories from the log, each from its own position, by `poll` or in a thread.

An invalid record is skipped, counted, and logged with its offset. A filler refuses a buffer that another log has
filled, and never guesses an offset.
"""

import logging
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, NamedTuple, Protocol, Self

from rollstream.consumers.log_view import LogView
from rollstream.topics.config import KafkaConfig
from rollstream.topics.errors import ConfigurationError, DeadlineExceeded, RecordError
from rollstream.topics.files.atomic_files import read_json, write_json
from rollstream.topics.kafka import clients, topic_admin
from rollstream.topics.kafka.groups import group_positions
from rollstream.topics.kafka.hanging_transactions import open_on
from rollstream.topics.kafka.reader import Reader
from rollstream.topics.kafka.records import UNREADABLE, GroupPosition, KafkaRecord
from rollstream.topics.kafka.skipped_records import SkippedRecords
from rollstream.topics.kafka.topic_admin import group_names
from rollstream.topics.logs import event
from rollstream.topics.records import TrajectoryRecord
from rollstream.topics.wire.catalogue import topic_name
from rollstream.topics.wire.codec import decode_as
from rollstream.topics.wire.trajectory_arrays import Trajectory, from_record

logger = logging.getLogger(__name__)
_RECORDS_A_POLL = 100
_WAIT_S = 0.1
_COMMIT_EVERY_S = 5.0
_TIMEOUT_S = 30.0
FILLER_GROUPS = ".filler-"
"""Infix of a filler's consumer group, between the names of run and filler."""

Place = tuple[int, int]
"""Partition and offset of a record."""


class Fillable(Protocol):
    """A buffer that can be filled from the log. It skips records below its position.

    A buffer that writes to disk after `add` has returned needs a method `flush` that waits for the writes.
    """

    @property
    def position(self) -> Mapping[int, int]:
        """Next offset to read, by partition; partitions without a record so far are left out."""

    def add(self, trajectory: Trajectory, /, *, at: Place) -> Any:
        """Add a trajectory and move the position past it, atomically. Raises RecordError if it is invalid; the caller
        then calls `skip`."""

    def skip(self, at: Place, /) -> Any:
        """Move the position past a record that the buffer does not accept."""


class FillCounts(NamedTuple):
    """Numbers of records since the filler was created."""

    added: int = 0
    """Records that could be read and that no buffer refused."""
    refused: int = 0
    """Records that were unreadable, or that a buffer refused."""


def put(buffers: Sequence[Fillable], at: Place, value: bytes | None) -> list[str]:
    """Add a record to buffers, and return its problems; an invalid record is skipped.

    Any error of a buffer except RecordError is raised, for example if the disk is full. Then pass the record to all
    buffers again; buffers that already have it skip it.
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
    """Committed positions of the fillers of a run's `trajectories`, by filler and partition."""
    topic, prefix = topic_name(run, "trajectories"), f"{run}{FILLER_GROUPS}"
    groups = [group for group in group_names(kafka) if group.startswith(prefix)]
    places = {topic: range(topic_admin.partitions_of(kafka, topic))} if groups else {}
    committed_positions = {}
    for group in groups:
        at = {place.partition: place.offset for place in group_positions(kafka, group, places)}
        if at:
            committed_positions[group.removeprefix(prefix)] = at
    return committed_positions


class TrajectoryFiller:
    """Fills buffers from a run's `trajectories`, by `poll` and `fill` or in the thread that `start` begins.

    Records of one partition are read in order; the order between partitions varies.

    As a context manager it starts the thread, and closes the filler at the end. `identity_file` records which topic
    filled the buffers, so that a later process refuses a topic that was created again under the same name.

    Every five seconds and on closing it commits, as consumer group `{run}.filler-{name}`, the position before which all
    buffers have every record, on disk if they write to disk; `rollstream prune` keeps the records from there on.
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
        """Each filler of a run needs a different `name`.

        Raises TopicError if a buffer's position is before or after the offsets in the log, or another topic filled the
        buffer; BrokerUnavailable if no broker answers.
        """
        if not buffers:
            raise ConfigurationError("the filler has no buffer; give at least one")
        self._kafka = kafka
        self._topic = topic_name(run, topic)
        self._buffers = list(buffers)
        clients.check_broker(kafka)
        self._remember_topic(identity_file)
        starts = self._begin()
        self._ends: dict[int, int] = {}
        """End offset of each partition when it was last read to its end."""
        self._counts = FillCounts()
        self._skipped = SkippedRecords(f"filler-{name}")
        self._group = f"{run}{FILLER_GROUPS}{name}"
        self._reader = Reader(kafka, group=self._group)
        self._committed: dict[int, int] = {}
        self._commit()
        self._stopping = threading.Event()
        self._failure: Exception | None = None
        self._thread: threading.Thread | None = None
        self._reader.assign({(self._topic, p): offset for p, offset in starts.items()})

    @property
    def counts(self) -> FillCounts:
        """Numbers of records added and refused. Thread-safe."""
        return self._counts

    def poll(self, timeout_s: float = 1.0) -> int:
        """Read the available records, waiting up to `timeout_s` for the first, and return their number.

        Raises TopicError, BrokerUnavailable, and errors of buffers other than RecordError. After an error the filler
        cannot be used again; a new filler continues from the positions.
        """
        if self._thread is not None and self._thread is not threading.current_thread():
            raise ConfigurationError("this filler polls in its own thread; do not call poll or fill")
        self.check()
        try:
            return self._poll(timeout_s)
        except Exception as error:
            self._failure = error
            raise

    def fill(self, timeout_s: float | None = None) -> None:
        """Read to the current end of the log. Raises the errors of `poll`, and DeadlineExceeded if no record
        arrives for `timeout_s`, by default kafka.patience_s."""
        timeout_s = self._kafka.patience_s if timeout_s is None else timeout_s
        wanted = {p: end for p, (_begin, end) in topic_admin.bounds(self._kafka, self._topic).items()}
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
        """Start a thread that fills the buffers until `close`."""
        self._thread = threading.Thread(target=self._run, name="trajectory-filler", daemon=True)
        self._thread.start()
        return self

    def check(self) -> None:
        """Raise the error that ended the filling, if any; after it the buffers get no more records."""
        if self._failure is not None:
            raise self._failure

    def close(self) -> None:
        """Stop, and close the consumer; the buffers stay open. Raises the error that ended the thread."""
        self._stopping.set()
        if self._thread is not None:
            self._thread.join()
        try:
            if self._failure is None:
                self._commit()
        finally:
            self._reader.close()
        if self._thread is not None:
            self.check()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        try:
            self.close()
        except Exception:
            # The error of the `with` block is more specific, or the same.
            if error is None:
                raise

    # ------------------------------------------------------------------ within

    def _poll(self, timeout_s: float) -> int:
        records, ends = self._reader.poll(_RECORDS_A_POLL, timeout_s)
        for record in records:
            self._take(record)
        self._ends.update({partition: end for (_topic, partition), end in ends.items()})
        if time.monotonic() - self._committed_at > _COMMIT_EVERY_S:
            self._commit()
        return len(records)

    def _commit(self) -> None:
        """Commit the position before which every buffer has every record on disk. Raises ConfigurationError if another
        filler has committed under the same name, BrokerUnavailable, and errors of buffers."""
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
        committed = self._reader.committed(self._topic, positions, doing)
        # The offset is negative if the brokers forgot it, as they do after offsets.retention.minutes without a commit.
        known = {place.partition: place.offset for place in committed if place.offset >= 0}
        if self._committed and known.items() - self._committed.items():
            raise ConfigurationError(
                f"another filler committed positions as group {self._group}, so records that a buffer lacks may be "
                f"pruned; give each filler of the run a different name"
            )
        self._reader.commit((GroupPosition(self._topic, p, offset) for p, offset in positions.items()), doing)
        self._committed = positions

    def _run(self) -> None:
        try:
            while not self._stopping.is_set():
                self.poll(_WAIT_S)
        except Exception as error:  # `poll` stores the error, and `check` raises it.
            event(logger, "filling_failed", level=logging.ERROR, topic=self._topic, error=repr(error))

    def _take(self, record: KafkaRecord) -> None:
        wrong = put(self._buffers, (record.partition, record.offset), record.value)
        added, refused = self._counts
        self._counts = FillCounts(added + (not wrong), refused + bool(wrong))
        if wrong:
            self._skipped.skip(record, "; ".join(wrong) if record.readable else UNREADABLE)

    def _remember_topic(self, path: Path | None) -> None:
        """Record the topic. Raises TopicError if another topic filled the buffers."""
        if path is None:
            return
        topic_id = topic_admin.topic_ids(self._kafka, [self._topic])[self._topic]
        known = read_json(path) if path.exists() else None
        if known and any(buffer.position for buffer in self._buffers):
            view = LogView(*known)
            view.check_topic(self._topic, topic_id, "use empty buffers, or the run and the brokers that filled them")
        if known != [self._topic, topic_id]:
            write_json(path, [self._topic, topic_id])

    def _begin(self) -> dict[int, int]:
        """Return the first offset to read of each partition: the lowest position of the buffers."""
        bounds = topic_admin.bounds(self._kafka, self._topic)
        self._begins = {partition: begin for partition, (begin, _end) in bounds.items()}
        remedy = "use an empty buffer, which begins with those left"
        views = [LogView(position=dict(buffer.position)) for buffer in self._buffers]
        starts = [view.starts(self._topic, bounds, remedy) for view in views]
        return {partition: min(start[partition] for start in starts) for partition in bounds}
