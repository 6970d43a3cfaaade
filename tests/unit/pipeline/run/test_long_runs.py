"""Observers of a run stay small however long it is, and keep counting correctly."""

import tracemalloc
from collections.abc import Mapping
from statistics import mean

import pytest

from rollstream.consumers.grouping.testing import example_rollout
from rollstream.pipeline.run.observer import RunObserver
from rollstream.pipeline.run.run_statistics import OutcomeCurve, RunStatistics
from rollstream.topics.config import KafkaConfig
from rollstream.topics.kafka.records import KafkaRecord, Place
from rollstream.topics.records import BatchIndexEntry, BatchUse, LearnerStep
from rollstream.topics.wire.codec import encode

LONG = 12_000
"""Batches, steps and seconds after which nothing grows any more."""


def live(statistics: RunStatistics, numbers: range) -> None:
    """A batch, its step and a rollout each second; each step also takes a row of an older batch again."""
    for number in numbers:
        at_ms = 1_700_000_000_000 + 1000 * number
        statistics.rollout(at_ms, 0, number % 2, 1.0)
        statistics.entry(
            BatchIndexEntry(
                batch_id=f"0-{number}", partition=0, offset=number, rollouts=4, tokens=8, trained_tokens=8,
                lowest_version=max(0, number - 3), highest_version=number, size_bytes=1, digest="d" * 64,
            ),
            at_ms,
        )  # fmt: skip
        uses = [BatchUse(batch_id=f"0-{number}", index_offset=0, rows=4, use="trained")]
        if number >= 5:
            uses.append(BatchUse(batch_id=f"0-{number - 5}", index_offset=0, rows=1, use="trained", row_numbers=(0,)))
        statistics.step(
            LearnerStep(
                learner="main", step=number + 1, input_run="r", uses=tuple(uses), position=0, policy_version=number + 1,
                params_digest="d", trained_total=4 * number, skipped_total=0, stream_time_ms=at_ms,
            ),
            at_ms,
        )  # fmt: skip


@pytest.mark.long
def test_statistics_of_a_long_run_take_no_more_memory_than_those_of_a_shorter_one() -> None:
    statistics = RunStatistics("r")
    live(statistics, range(LONG))
    tracemalloc.start()
    try:
        before, _peak = tracemalloc.get_traced_memory()
        live(statistics, range(LONG, 3 * LONG))
        after, _peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    snapshot = statistics.snapshot(1_700_000_000_000 + 3000 * LONG)
    assert (snapshot.rollouts, snapshot.step) == (3 * LONG, 3 * LONG)
    assert sum(snapshot.staleness.values()) == 4 * 3 * LONG + 3 * LONG - 5
    # New records replace older ones, whose memory was not traced: 1.7 MiB; without limits, 14 MiB.
    assert after - before < 5 * 2**20


def test_a_curve_keeps_its_sums_when_its_spans_widen() -> None:
    curve, rewards = OutcomeCurve(), [number % 7 / 7 for number in range(20_000)]
    for number, reward in enumerate(rewards):
        curve.add(1000 * number, reward, 1 - reward)
    assert curve.rollouts == len(rewards)
    means, successes = curve.means(36)
    assert len(means) == len(successes) <= 36
    assert abs(mean(means) - mean(rewards)) < 0.01
    assert all(abs(reward + success - 1) < 1e-9 for reward, success in zip(means, successes, strict=True))


class ManyRollouts:
    """A log of rollouts alone, in memory."""

    run, kind = "r", "topics"

    def __init__(self, rollouts: int) -> None:
        self.records = [
            KafkaRecord("r.rollouts", 0, offset, timestamp_ms=1000 + offset, value=encode(example_rollout("u", offset)))
            for offset in range(rollouts)
        ]

    def ends(self) -> Mapping[Place, int]:
        return {}

    def bounds(self) -> dict[Place, tuple[int, int]]:
        return {("rollouts", 0): (0, len(self.records))}

    def begin(self, starts: Mapping[Place, int]) -> None:
        assert starts == {}

    def poll(self, rollouts: bool, most: int, wait_s: float) -> list[KafkaRecord]:
        if not rollouts:
            return []
        taken, self.records = self.records[:most], self.records[most:]
        return taken

    def close(self) -> None:
        pass


def test_an_observer_keeps_the_newest_rollouts_alone_if_it_is_told_to() -> None:
    observer = RunObserver(KafkaConfig(), "r", keep=100, log=ManyRollouts(5000))
    longest = 0
    while observer.poll():
        longest = max(longest, len(observer.scored))
    assert longest <= 200
    assert observer.last(100).rollouts == 100
    assert observer.last(100).reward == mean(range(4900, 5000))
    assert observer.snapshot(100).rollouts == 5000
    everything = RunObserver(KafkaConfig(), "r", log=ManyRollouts(500))
    everything.poll()
    assert len(everything.scored) == 500
