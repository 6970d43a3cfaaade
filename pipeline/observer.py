"""Watches a run from its topics while it goes on: rewards of what is produced, steps and batches so far, and whether
what grouping loses is of another kind than what it keeps.

For progress lines, stop rules and reports; it reads in no group and changes nothing. Only `rollouts` shows every
rollout produced: the learner sees what grouping kept.
"""

import time
from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from confluent_kafka import OFFSET_BEGINNING, KafkaError, Message, TopicPartition

from consumers.grouping.selection import SelectionWatch, selections
from pipeline.flow import Flow, Snapshot
from topics import clients
from topics.catalogue import topic_name
from topics.codec import decode, decode_as
from topics.config import KafkaConfig
from topics.errors import DeadlineExceeded, RecordError
from topics.records import BatchIndexEntry, FateCount, JournalRecord, LearnerStep, PolicyManifest, Rollout

EXACT = "exact"
_TIMEOUT_S = 60.0
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

    def __init__(self, kafka: KafkaConfig, run: str) -> None:
        self._rollouts, self._index, self._steps, self._policies, self._journal = (
            topic_name(run, topic) for topic in ("rollouts", "batch-index", "steps", "policies", "journal")
        )
        # Whoever watches is in no hurry: few large answers instead of one for each record.
        self._consumer = clients.reader(kafka, **_UNHURRIED)
        partitions = clients.partitions_of(kafka, self._rollouts)
        of_partitions = [(topic, p) for topic in (self._rollouts, self._journal) for p in range(partitions)]
        places = [*of_partitions, (self._index, 0), (self._steps, 0), (self._policies, 0)]
        self._reached = dict.fromkeys(places, 0)
        clients.follow(self._consumer, kafka, [TopicPartition(topic, p, OFFSET_BEGINNING) for topic, p in places])
        self.scored: list[Scored] = []
        """Every rollout so far, in order of append time, partition, offset."""
        self.batches = 0
        self.steps = 0
        self.policy_version = -1
        """Newest policy version a step published."""
        self._counts: dict[int, tuple[FateCount, ...]] = {}
        self._counts_moved = False
        self._watch = SelectionWatch()
        self._flow = Flow(run)

    def poll(self, timeout_s: float = 0.0) -> None:
        """Take in what arrived, waiting at most `timeout_s` for the first record."""
        for message in self._consumer.consume(1000, timeout_s):
            self._take(message)
        if self._counts_moved:
            self._counts_moved = False
            self._watch.look(selections(c for counts in self._counts.values() for c in counts))

    def catch_up(self) -> None:
        """Read on to where every topic ends now. Call once nothing writes any more."""
        ends = {
            place: self._consumer.get_watermark_offsets(TopicPartition(*place), _TIMEOUT_S)[1]
            for place in self._reached
        }
        deadline = time.monotonic() + _TIMEOUT_S
        while behind := [place for place, end in ends.items() if self._reached[place] < end]:
            self.poll(0.2)
            if time.monotonic() > deadline:
                raise DeadlineExceeded(f"{behind[0][0]} was not read to its end within {_TIMEOUT_S:g} s")

    def first(self, count: int) -> Means:
        """Means over the first `count` rollouts."""
        return Means.of(self.scored[:count])

    def last(self, count: int) -> Means:
        """Means over the last `count` rollouts."""
        return Means.of(self.scored[-count:])

    def snapshot(self, newest: int) -> Snapshot:
        """The run as it is now; reward and exact match over the `newest` rollouts."""
        recent = self.last(newest)
        return self._flow.snapshot(int(time.time() * 1000), recent.reward, recent.exact)

    @property
    def rewards(self) -> dict[int, tuple[int, float]]:
        """By policy version: rollouts it sampled, and the sum of their rewards."""
        return self._flow.rewards

    def close(self) -> None:
        self._consumer.close()

    def _take(self, message: Message) -> None:
        topic = message.topic()
        error = message.error()
        if error is not None:
            if error.code() != KafkaError._PARTITION_EOF:
                clients.raise_for(error, f"watching {topic}")
            # Unlike the position, this counts the markers of transactions.
            self._reached[topic or "", message.partition() or 0] = message.offset() or 0
        elif topic == self._rollouts:
            self._score(message)
        elif message.value() is not None:
            self._count(message)

    def _count(self, message: Message) -> None:
        topic, at_ms = message.topic(), message.timestamp()[1]
        if topic == self._index:
            self.batches += 1
            self._flow.entry(decode_as(BatchIndexEntry, message.value()), at_ms)
        elif topic == self._steps:
            step = decode_as(LearnerStep, message.value())
            self._flow.step(step, at_ms)
            if step.step >= self.steps:
                self.steps = step.step
                self.policy_version = max(self.policy_version, step.policy_version)
        elif topic == self._policies:
            self._flow.manifest(decode_as(PolicyManifest, message.value()), at_ms)
        else:
            record = decode_as(JournalRecord, message.value())
            self._counts[record.partition] = record.counts
            self._counts_moved = True
            self._flow.journal(record, at_ms)

    def _score(self, message: Message) -> None:
        place = (message.timestamp()[1], message.partition() or 0, message.offset() or 0)
        self._flow.record(place[1], place[2], place[0])
        try:
            record = decode(message.value())
        except RecordError:
            return  # a dead letter; grouping deals with it
        if isinstance(record, Rollout):
            exact = float(record.reward_components.get(EXACT, 0.0))
            insort(self.scored, Scored(*place, record.reward, exact))
            self._flow.rollout(place[0], record.highest_version, record.reward, exact)
