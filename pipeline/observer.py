"""Watches a run from its topics while it goes on: rewards of what is produced, steps and batches so far, and whether
what grouping loses is of another kind than what it keeps.

For progress lines, stop rules and reports; it reads in no group and changes nothing. Only `rollouts` shows every
rollout produced: the learner sees what grouping kept.
"""

import time
from bisect import insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from confluent_kafka import OFFSET_BEGINNING, Message, TopicPartition

from consumers.grouping.selection import SelectionWatch, selections
from pipeline.flow import Flow, Snapshot
from topics import clients
from topics.catalogue import topic_name
from topics.codec import decode
from topics.config import KafkaConfig
from topics.errors import DeadlineExceeded, RecordError
from topics.following import TopicFollower
from topics.records import BatchIndexEntry, JournalRecord, LearnerStep, PolicyManifest, Rollout
from topics.skipped import SkippedRecords
from topics.validation import REWARD_LIMIT

EXACT = "exact"
_UNHURRIED: dict[str, Any] = {"fetch.min.bytes": 256 * 1024, "fetch.wait.max.ms": 250}


class Scored(NamedTuple):
    """Reward and exact match of one rollout, ordered by append time, partition and offset."""

    append_ms: int
    partition: int
    offset: int
    reward: float
    exact: float


@dataclass(frozen=True)
class Means:
    """Mean reward and exact match over some rollouts; zeros over none."""

    rollouts: int
    reward: float
    exact: float

    @classmethod
    def of(cls, scored: Sequence[Scored]) -> "Means":
        count = max(len(scored), 1)
        return cls(len(scored), sum(s.reward for s in scored) / count, sum(s.exact for s in scored) / count)


class RunObserver:
    """What a run's `rollouts`, `batch-index`, `steps`, `policies` and `journal` say so far. `poll` reads on, from the
    beginning at first.
    """

    def __init__(self, kafka: KafkaConfig, run: str, *, keep: int | None = None, logged: bool = True) -> None:
        """`keep` bounds how many of the newest rollouts are remembered, by whoever watches for days. `logged` is
        whether each record that is passed over is logged, as where nobody else says so."""
        self._rollouts, self._index, self._steps, self._policies, self._journal = (
            topic_name(run, topic) for topic in ("rollouts", "batch-index", "steps", "policies", "journal")
        )
        self._kafka = kafka
        self._kinds: dict[str, type] = {
            self._index: BatchIndexEntry,
            self._steps: LearnerStep,
            self._policies: PolicyManifest,
            self._journal: JournalRecord,
        }
        partitions = clients.partitions_of(kafka, self._rollouts)
        of_partitions = [(topic, p) for topic in (self._rollouts, self._journal) for p in range(partitions)]
        places = [*of_partitions, (self._index, 0), (self._steps, 0), (self._policies, 0)]
        self._history = self._bounds()
        self._positions: dict[tuple[str, int], int] = {}
        """Of what is read next, or of where a partition ends, which counts transactions' markers."""
        start = [TopicPartition(topic, p, OFFSET_BEGINNING) for topic, p in places]
        # Whoever watches is in no hurry: few large answers instead of one for each record.
        self._follower = TopicFollower(kafka, start, **_UNHURRIED)
        self.skipped = SkippedRecords("observer", logged=logged)
        """Records that could not be read, or are of no use; those of rollouts are grouping's to judge, too."""
        self.scored: list[Scored] = []
        """Every rollout so far, or the newest, in order of append time, partition, offset."""
        self._keep = keep
        self.batches = 0
        self.steps = 0
        self.policy_version = -1
        """Newest policy version a step published."""
        self._counts_moved = False
        self._watch = SelectionWatch()
        self._flow = Flow(run)

    def poll(self, timeout_s: float = 0.0) -> int:
        """Take in what arrived, waiting at most `timeout_s` for the first record; returns how many there were."""
        messages = self._follower.poll(1000, timeout_s)
        for message in messages:
            self._positions[message.topic() or "", message.partition() or 0] = (message.offset() or 0) + 1
            if message.topic() == self._rollouts:
                self._score(message)
            else:
                self._count(message)
        self._positions.update(self._follower.ends)
        if self._counts_moved:
            self._counts_moved = False
            self._watch.look(selections(self._flow.counts))
        return len(messages)

    @property
    def history_left(self) -> int:
        """Offsets still to be read of those that lay there when this observer began."""
        return sum(max(0, end - max(low, self._positions.get(place, 0))) for place, (low, end) in self._history.items())

    def catch_up(self, tell: Callable[[], None] = lambda: None) -> None:
        """Read on to where every topic ends now.

        `tell` is called before and after each portion. Raises DeadlineExceeded where nothing comes for `patience_s`.
        """
        ends = {place: end for place, (_low, end) in self._bounds().items()}
        timeout_s = self._kafka.patience_s
        deadline = time.monotonic() + timeout_s
        tell()
        while behind := [place for place, end in ends.items() if self._positions.get(place, 0) < end]:
            if self.poll(0.2):
                deadline = time.monotonic() + timeout_s
            elif time.monotonic() > deadline:
                raise DeadlineExceeded(f"{behind[0][0]} was not read to its end: nothing came for {timeout_s:g} s")
            tell()

    def _bounds(self) -> dict[tuple[str, int], tuple[int, int]]:
        """Where each partition that is watched begins and ends now."""
        topics = (self._rollouts, self._journal, self._index, self._steps, self._policies)
        return {(topic, p): of for topic in topics for p, of in clients.bounds(self._kafka, topic).items()}

    def first(self, count: int) -> Means:
        """Means over the first `count` rollouts."""
        return Means.of(self.scored[:count])

    def last(self, count: int) -> Means:
        """Means over the last `count` rollouts."""
        return Means.of(self.scored[-count:])

    def snapshot(self, newest: int) -> Snapshot:
        """The run as it is now; reward and exact match over the `newest` rollouts."""
        recent = self.last(newest)
        now_ms = int(time.time() * 1000)
        flow = self._flow.snapshot(now_ms, recent.reward, recent.exact, records_skipped=self.skipped.total)
        history = sum(end - low for low, end in self._history.values())
        return replace(flow, history=history, history_left=self.history_left)

    @property
    def rewards(self) -> dict[int, tuple[int, float]]:
        """By policy version: rollouts it sampled, and the sum of their rewards."""
        return self._flow.rewards

    def close(self) -> None:
        self._follower.close()

    def _count(self, message: Message) -> None:
        topic, at_ms = message.topic() or "", message.timestamp()[1]
        record = self.skipped.decode(self._kinds[topic], message)
        if isinstance(record, BatchIndexEntry):
            self.batches += 1
            self._flow.entry(record, at_ms)
        elif isinstance(record, LearnerStep):
            self._flow.step(record, at_ms)
            if record.step >= self.steps:
                self.steps = record.step
                self.policy_version = max(self.policy_version, record.policy_version)
        elif isinstance(record, PolicyManifest):
            self._flow.manifest(record, at_ms)
        elif isinstance(record, JournalRecord):
            self._counts_moved = True
            self._flow.journal(record, at_ms)

    def _score(self, message: Message) -> None:
        place = (message.timestamp()[1], message.partition() or 0, message.offset() or 0)
        self._flow.record(place[1], place[2], place[0])
        try:
            record = decode(message.value())
        except RecordError as error:
            self.skipped.skip(message, str(error))  # A dead letter; grouping deals with it.
            return
        if isinstance(record, Rollout):
            exact = float(record.reward_components.get(EXACT, 0.0))
            if not (abs(record.reward) <= REWARD_LIMIT and abs(exact) <= REWARD_LIMIT):
                self.skipped.skip(message, f"reward is {record.reward:g}, exact match {exact:g}")
                return
            insort(self.scored, Scored(*place, record.reward, exact))
            self._flow.rollout(place[0], record.highest_version, record.reward, exact)
