"""Observes a run from its topics: rewards, steps and batches so far, and whether drops bias the training data.

It serves progress lines, stop rules and reports. It joins no consumer group and changes nothing. It reads `rollouts`,
because only that topic holds every rollout produced; the learner sees only the rollouts that grouping kept.

Every two seconds a LabelingWatch asks for the ends of `unlabelled` and for the positions of the labelers. It reads only
the last few offsets, because these may be transaction markers, which never wait for a label.
"""

import logging
import threading
import time
from bisect import insort
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from rollstream.consumers.archive.log_source import OBSERVED, ROLLOUTS, LogSource, TopicSource
from rollstream.consumers.grouping.selection_bias import SelectionWatch, selections
from rollstream.pipeline.run.component_metrics import NewestMetrics
from rollstream.pipeline.run.diagnoses import STEP_PATIENCE_S, FlatEnvironments, Stall, stalled_stage
from rollstream.pipeline.run.run_statistics import RunSnapshot, RunStatistics
from rollstream.topics.closing import Closing
from rollstream.topics.config import KafkaConfig
from rollstream.topics.control.named_records import PAUSED, note_named
from rollstream.topics.control.steering import DesiredState
from rollstream.topics.errors import BrokerUnavailable, DeadlineExceeded, RecordError, RollstreamError
from rollstream.topics.kafka import topic_admin
from rollstream.topics.kafka.client_calls import OffsetGone
from rollstream.topics.kafka.reader import Reader, ends_of_records
from rollstream.topics.kafka.records import KafkaRecord, Place
from rollstream.topics.kafka.skipped_records import SkippedRecords
from rollstream.topics.logs import event
from rollstream.topics.records import PausedPartition, Rollout
from rollstream.topics.wire.catalogue import name_in_run, topic_name
from rollstream.topics.wire.codec import decode
from rollstream.topics.wire.validation import REWARD_LIMIT

logger = logging.getLogger(__name__)

_INTERVAL_S = 2.0
_FIRST_S = 5.0
"""Longest wait for the first positions."""
_FEW = 4
"""Most offsets after a position that are read. A finished transaction leaves one marker after its records."""


class LabelingState(NamedTuple):
    """How far labeling has got."""

    waiting: int = 0
    """Records that no labeler has read."""
    read: int = 0
    """Records that labelers have read, including records that were deleted later."""


class LabelingWatch(Closing):
    """Keeps `state` up to date until it is closed."""

    def __init__(self, kafka: KafkaConfig, run: str, group: str) -> None:
        """`group` is the full name of the consumer group of the labelers. Reads the state once."""
        self._kafka, self._group = kafka, group
        self._topic = topic_name(run, "unlabelled")
        self._stop = threading.Event()
        self.state = LabelingState()
        """The newest state; zeros as long as nothing was sent to labelers."""
        self._update(_FIRST_S)
        self._thread = threading.Thread(target=self._run, name="labeling-watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop the thread, without waiting for a request in progress."""
        self._stop.set()

    def _run(self) -> None:
        while not self._stop.wait(_INTERVAL_S):
            try:
                self._update(self._kafka.patience_s)
            except RollstreamError as error:
                event(logger, "labeling_not_watched", level=logging.WARNING, error=str(error))
                return

    def _update(self, timeout_s: float) -> None:
        """Read the state; keep the last one if the broker does not answer."""
        try:
            bounds = topic_admin.bounds(self._kafka, self._topic)
            if any(end for _begin, end in bounds.values()):
                self.state = self._read(bounds, timeout_s)
        except BrokerUnavailable as error:
            event(logger, "labeling_positions_not_read", level=logging.WARNING, error=str(error))

    def _read(self, bounds: dict[int, tuple[int, int]], timeout_s: float) -> LabelingState:
        with closing(Reader(self._kafka, group=self._group)) as reader:
            places = reader.committed(self._topic, bounds, f"reading offsets of group {self._group}", timeout_s)
            read = {place.partition: max(bounds[place.partition][0], place.offset) for place in places}
            ends = {partition: end for partition, (_begin, end) in bounds.items()}
            few = {partition: offset for partition, offset in read.items() if 0 < ends[partition] - offset <= _FEW}
            if few:
                with suppress(OffsetGone):  # labeled and deleted in the meantime
                    ends |= ends_of_records(self._kafka, self._topic, few, reader)
        return LabelingState(waiting=max(0, sum(ends.values()) - sum(read.values())), read=sum(read.values()))


_UNHURRIED: dict[str, Any] = {"fetch.min.bytes": 256 * 1024, "fetch.wait.max.ms": 250}
_NEWEST_METRICS = 5000
"""Number of older records to read from each partition of `metrics`; components write one every few seconds."""


class ScoredRollout(NamedTuple):
    """Reward and success of one rollout, ordered by append time, partition and offset."""

    append_ms: int
    partition: int
    offset: int
    reward: float
    success: float


@dataclass(frozen=True)
class MeanScores:
    """Mean reward and success over some rollouts; zeros if there are none."""

    rollouts: int
    reward: float
    success: float

    @classmethod
    def of(cls, scored: Sequence[ScoredRollout]) -> "MeanScores":
        count = max(len(scored), 1)
        return cls(len(scored), sum(s.reward for s in scored) / count, sum(s.success for s in scored) / count)


class RunObserver:
    """Follows `rollouts`, `batch-index`, `steps`, `policies`, `journal` and `control` of a run from the beginning, and
    the newest records of `metrics`."""

    def __init__(
        self,
        kafka: KafkaConfig,
        run: str,
        *,
        keep: int | None = None,
        logged: bool = True,
        labeling_group: str = "",
        log: LogSource | None = None,
        step_patience_s: float = STEP_PATIENCE_S,
    ) -> None:
        """The observer remembers at least `keep` and at most twice `keep` of the newest rollouts, or all if `keep` is
        None. `logged` tells whether each skipped record is logged. `labeling_group` is the full name of the labelers'
        consumer group; with it, records that wait for labels are counted. `log` is read instead of the run's topics.
        `step_patience_s` is the time without a step after which the run may count as stalled."""
        self._kafka, self._step_patience_s = kafka, step_patience_s
        self._paused: dict[str, PausedPartition] = {}
        self._wanted, self._flat = DesiredState(), FlatEnvironments()
        self._foreign = SkippedRecords(logged=False)
        """Invalid records of `control`; the roles that read this topic count them, so `skipped` does not."""
        # Latency does not matter here: prefer a few large fetches to one for each record.
        self._log: LogSource = log or TopicSource(kafka, run, OBSERVED, **_UNHURRIED)
        self._history = self._log.bounds()
        for place, (low, end) in self._history.items():
            if place[0] == "metrics":
                self._history[place] = max(low, end - _NEWEST_METRICS), end
        self._positions: dict[Place, int] = {}
        """Offset of the next record to read, or the end of the partition, which counts transaction markers."""
        self._log.begin({place: low for place, (low, _end) in self._history.items() if place[0] == "metrics"})
        self.skipped = SkippedRecords("observer", logged=logged)
        """Records that could not be read or used; grouping makes its own decision about those of `rollouts`."""
        self.scored: list[ScoredRollout] = []
        """Every rollout so far, or the newest ones, in order of append time, partition, offset."""
        self._keep = keep
        self._counts_moved = False
        self._watch = SelectionWatch()
        self._statistics = RunStatistics(run)
        self._components = NewestMetrics()
        self._counting: dict[str, Callable[[Any, int], None]] = {
            "batch-index": self._statistics.entry,
            "steps": self._statistics.step,
            "policies": self._statistics.manifest,
            "journal": self._statistics.journal,
            "metrics": lambda record, _at_ms: self._components.add(record),
        }
        self._labeling = LabelingWatch(kafka, run, labeling_group) if labeling_group else None

    def poll(self, timeout_s: float = 0.0) -> int:
        """Process the records that arrived, waiting at most `timeout_s` for the first; return how many there were."""
        messages = self._log.poll(True, 1000, 0.0)
        messages += self._log.poll(False, 1000, 0.0 if messages else timeout_s)
        for message in messages:
            name = name_in_run(message.topic)
            self._positions[name, message.partition] = message.offset + 1
            if name == ROLLOUTS:
                self._score(message)
            elif name == "control":
                note_named(self._paused, PAUSED, PausedPartition, message, self._foreign)
                self._wanted.note(message, self._foreign)
            else:
                self._count(message)
        self._positions.update(self._log.ends())
        if self._counts_moved:
            self._counts_moved = False
            self._watch.check(selections(self._statistics.counts))
        return len(messages)

    @property
    def history_left(self) -> int:
        """Number of offsets still to be read, out of those that existed when this observer began."""
        return sum(max(0, end - max(low, self._positions.get(place, 0))) for place, (low, end) in self._history.items())

    def catch_up(self, tell: Callable[[], None] = lambda: None) -> None:
        """Read to the current end of every topic.

        `tell` is called before and after each portion. Raises DeadlineExceeded if nothing arrives for `patience_s`.
        """
        ends = {place: end for place, (_low, end) in self._log.bounds().items()}
        timeout_s = self._kafka.patience_s
        deadline = time.monotonic() + timeout_s
        tell()
        while behind := [place for place, end in ends.items() if self._positions.get(place, 0) < end]:
            if self.poll(0.2):
                deadline = time.monotonic() + timeout_s
            elif time.monotonic() > deadline:
                raise DeadlineExceeded(f"{behind[0][0]} was not read to its end: nothing arrived for {timeout_s:g} s")
            tell()

    def first(self, count: int) -> MeanScores:
        """MeanScores over the first `count` rollouts."""
        return MeanScores.of(self.scored[:count])

    def last(self, count: int) -> MeanScores:
        """MeanScores over the last `count` rollouts."""
        return MeanScores.of(self.scored[-count:])

    def snapshot(self, newest: int) -> RunSnapshot:
        """Return the state of the run now, with the mean reward and success of the `newest` rollouts."""
        recent = self.last(newest)
        now_ms = int(time.time() * 1000)
        snapshot = self._statistics.snapshot(now_ms, recent.reward, recent.success, records_skipped=self.skipped.total)
        history = sum(end - low for low, end in self._history.values())
        labeling = self._labeling.state if self._labeling else LabelingState()
        flat = () if self.history_left else self._flat.look(self._statistics.counts, snapshot.policy_version)
        snapshot = replace(
            snapshot,
            history=history,
            history_left=self.history_left,
            paused=tuple(sorted(each.partition for each in self._paused.values())),
            paused_environments=tuple(sorted(self._wanted.paused)),
            flat_environments=flat,
            wanted=self._wanted.numbers,
            components=self._components.at(now_ms / 1000),
            waiting_for_labels=labeling.waiting,
            read_by_labelers=labeling.read,
        )
        stall = None if snapshot.history_left else self._stall(snapshot, now_ms)
        return replace(snapshot, stalled_stage=stall.stage, stalled=stall.why) if stall else snapshot

    def _stall(self, snapshot: RunSnapshot, now_ms: int) -> Stall | None:
        last = self._wanted.last_step
        facts = replace(
            self._statistics.flow(snapshot, now_ms),
            unlabeled=snapshot.waiting_for_labels,
            components=snapshot.components,
            ends=self._wanted.draining or (last is not None and snapshot.step >= last),
        )
        return stalled_stage(facts, self._step_patience_s)

    @property
    def batches(self) -> int:
        """Batches in the index so far."""
        return self._statistics.batches

    @property
    def steps(self) -> int:
        """Newest step of the run's learners."""
        return self._statistics.newest_step

    @property
    def policy_version(self) -> int:
        """Newest policy version published by a step; -1 before the first."""
        return self._statistics.newest_version

    def close(self) -> None:
        self._log.close()
        if self._labeling:
            self._labeling.close()

    def _count(self, message: KafkaRecord) -> None:
        record, name = self.skipped.record(message), name_in_run(message.topic)
        if record is not None:
            self._counts_moved |= name == "journal"
            self._counting[name](record, message.timestamp_ms)

    def _score(self, message: KafkaRecord) -> None:
        place = (message.timestamp_ms, message.partition, message.offset)
        self._statistics.record(place[1], place[2], place[0])
        try:
            record = decode(message.value)
        except RecordError as error:
            self.skipped.skip(message, str(error))  # Grouping makes it a dead letter.
            return
        if isinstance(record, Rollout):
            if not abs(record.reward) <= REWARD_LIMIT:
                self.skipped.skip(message, f"reward is {record.reward:g}")
                return
            insort(self.scored, ScoredRollout(*place, record.reward, float(record.success)))
            if self._keep is not None and len(self.scored) > 2 * self._keep:
                del self.scored[: -self._keep]
            self._statistics.rollout(place[0], record.highest_version, record.reward, float(record.success))
