"""Figures of a grouping process: sums over its partitions, counts since its start, latencies since the last report."""

import logging
import math
import time
import tracemalloc
from collections.abc import Mapping
from dataclasses import replace

import pytest

from rollstream.consumers.grouping.process.grouping_metrics import GroupingFigures
from rollstream.consumers.grouping.process.restoration import RestoreProgress
from rollstream.consumers.grouping.testing import example_rollout
from rollstream.pipeline.run.component_metrics import NewestMetrics
from rollstream.topics.metrics.catalogue import CATALOGUE_OF_METRICS
from rollstream.topics.metrics.values import VALUES
from rollstream.topics.metrics.writer import MetricsWriter
from rollstream.topics.records import Metrics
from tests.support.pairs import driver, pair

Written = list[tuple[dict[str, float], dict[str, str]]]


class Kept(MetricsWriter):
    """Keeps the metrics written to it."""

    def __init__(self) -> None:
        self.written: Written = []

    def close(self) -> None:
        pass

    def write(self, values: Mapping[str, float], labels: Mapping[str, str] | None = None, *, step: int = -1) -> None:
        self.written.append((dict(values), dict(labels or {})))


class Served(Kept):
    """Serves the metrics written to it, as a writer does for its process."""

    def write(self, values: Mapping[str, float], labels: Mapping[str, str] | None = None, *, step: int = -1) -> None:
        super().write(values, labels)
        VALUES.record("group", values, labels)


def served(name: str) -> dict[tuple[str, ...], float]:
    """Values at /metrics of one metric, by its labels."""
    [spec] = [spec for spec in CATALOGUE_OF_METRICS if spec.name == name]
    return VALUES.values_of(spec)


def test_metrics_are_written_of_partitions_and_of_the_process() -> None:
    writer, now = Kept(), [100.0]
    figures = GroupingFigures(writer, "r.grouper", "r.rollouts", 5.0, lambda: now[0])
    d, other = driver(), driver()
    pair(d)
    d.pipe(b"poison")
    d.pipe(example_rollout("late", 1.0))
    d.pipe(example_rollout("open", 1.0, example_id="9"), at_ms=2_500)
    other.pipe(example_rollout("open", 1.0))
    other.fold.partition = 3
    of_other = other.fold.prepare_commit()
    figures.committed(
        [d.fold.prepare_commit(), replace(of_other, journal=replace(of_other.journal, partition=3))], 0.02
    )
    figures.committed([d.fold.prepare_commit()], 0.04)
    assert figures.due
    figures.write(
        [d.fold, other.fold],
        {0: 4, 3: 0},
        {7: RestoreProgress(journal_read=2, records_to_read=4)},
        {"records_skipped_total": 3},
    )
    assert not figures.due
    [first, second, restoring, of_environment, whole] = writer.written
    assert first == (
        {
            "position": 5,
            "lag": 4,
            "in_flight": 1,
            "open_groups": 1,
            "held_bytes": d.fold.held_bytes,
            "policy_version": 0,
            "stream_time_s": 2.5,
            "paused": 0.0,
        },
        {"consumergroup": "r.grouper", "topic": "r.rollouts", "partition": "0"},
    )
    assert second[1]["partition"] == "3"
    assert second[0]["lag"] == 0
    assert restoring[1]["partition"] == "7"
    assert (restoring[0]["restore_journal_read"], restoring[0]["restore_records_to_read"]) == (2.0, 4.0)
    assert of_environment[1] == {"consumergroup": "r.grouper", "topic": "r.rollouts", "environment": "env"}
    assert (of_environment[0]["batched_rollouts"], of_environment[0]["lost_rollouts"]) == (2, 1)
    assert (of_environment[0]["batched_mean_reward"], of_environment[0]["lost_mean_reward"]) == (0.5, 1.0)
    assert "without_gradient_mean_reward" not in of_environment[0]
    assert whole[1] == {"consumergroup": "r.grouper", "topic": "r.rollouts"}
    assert whole[0] == {
        "partitions": 2,
        "partitions_restoring": 1,
        "lag": 4,
        "in_flight": 2,
        "open_groups": 2,
        "held_bytes": d.fold.held_bytes + other.fold.held_bytes,
        "transactions_total": 2,
        "batches_total": 1,
        "batched_total": 2,
        "dropped_total": 1,
        "dead_lettered_total": 1,
        "finished_groups_total": 1,
        "records_skipped_total": 3,
        "commit_seconds_mean": pytest.approx(0.03),
        "commit_seconds_max": 0.04,
    }


def test_the_progress_of_a_restore_is_served_until_it_is_over() -> None:
    figures = GroupingFigures(Served(), "g", "t", 5.0)
    running, restored = driver(), driver()
    restored.fold.partition = 3
    figures.write([running.fold], {}, {3: RestoreProgress(journal_read=2, seconds=4.0)})
    assert served("rollstream_grouping_restore_journal_read") == {("3",): 2}
    assert set(served("rollstream_grouping_position")) == {("0",)}
    figures.write([running.fold, restored.fold], {}, {})
    assert served("rollstream_grouping_restore_journal_read") == served("rollstream_grouping_restore_seconds") == {}
    assert set(served("rollstream_grouping_position")) == {("0",), ("3",)}
    figures.write([], {}, {0: RestoreProgress(seconds=1.0)})
    assert served("rollstream_grouping_position") == {}, "a partition that is restored again has no position yet"
    assert served("rollstream_grouping_restore_seconds") == {("0",): 1}
    figures.write([], {}, {})


def test_counts_continue_and_latencies_start_again() -> None:
    writer, now = Kept(), [0.0]
    figures = GroupingFigures(writer, "g", "t", 5.0, lambda: now[0])
    figures.committed([driver().fold.prepare_commit()], 1.0)
    figures.write([], {}, {})
    now[0] = 4.9
    assert not figures.due
    now[0] = 5.0
    assert figures.due
    figures.write([], {}, {})
    assert writer.written[1][0]["transactions_total"] == 1
    assert "commit_seconds_mean" in writer.written[0][0]
    assert "commit_seconds_mean" not in writer.written[1][0]


def test_the_latencies_of_a_process_that_reports_nothing_take_no_memory() -> None:
    figures, outputs = GroupingFigures(Kept(), "g", "t", 0.0), [driver().fold.prepare_commit()]

    def commit(count: int) -> int:
        before = tracemalloc.get_traced_memory()[0]
        for number in range(count):
            figures.committed(outputs, number / 1000)
        return tracemalloc.get_traced_memory()[0] - before

    tracemalloc.start()
    try:
        commit(100)
        assert commit(2_000) < 10_000
    finally:
        tracemalloc.stop()


def test_an_unknown_lag_is_not_reported() -> None:
    writer = Kept()
    figures = GroupingFigures(writer, "g", "t", 5.0)
    figures.write([driver().fold], {}, {})
    assert "lag" not in writer.written[0][0]


def test_unread_records_are_near_their_deletion_by_their_age_and_read_ones_never_are() -> None:
    d = driver()
    figures = GroupingFigures(Served(), "g", "t", 5.0)
    d.pipe(example_rollout("open", 1.0), at_ms=int(1000 * time.time()) - 600_000)

    def seconds_left(unread: int, retention_s: float) -> float | None:
        figures.write([d.fold], {0: unread}, {}, retention_s=retention_s)
        return served("rollstream_grouping_seconds_to_retention").get(("0",))

    assert seconds_left(0, 3600.0) is None
    left_s = seconds_left(1, 3600.0)
    assert left_s is not None
    assert 2900 < left_s <= 3000
    assert seconds_left(1, math.inf) is None, "somebody has restored the setting"
    assert seconds_left(1, 300.0) == 0
    assert seconds_left(0, 300.0) is None, "all has been read"


def test_a_shift_that_chance_explains_is_served_and_is_no_bias() -> None:
    d = driver()
    pair(d)
    d.pipe(example_rollout("late", 50.0))
    GroupingFigures(Served(), "g", "t", 5.0).write([d.fold], {}, {})
    assert served("rollstream_grouping_shift_reward")["env",] < -0.5
    assert served("rollstream_grouping_selection_biased") == {("env", "length"): 0, ("env", "reward"): 0}


def test_environments_are_reported_when_they_change_and_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    writer = Served()
    figures = GroupingFigures(writer, "g", "t", 5.0)
    d = driver()
    for example in range(400):
        pair(d, str(example))
        d.pipe(example_rollout("late", 50.0, example_id=str(example)))
    figures.committed([d.fold.prepare_commit()], 0.1)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            figures.write([d.fold], {}, {})
    written = [values for values, labels in writer.written if "environment" in labels]
    assert [values["lost_mean_reward"] for values in written] == [50.0]
    [warned] = [r for r in caplog.records if r.getMessage() == "selection_biased"]
    assert warned.rollstream_fields["figure"] == "reward"  # type: ignore[attr-defined]
    biased = served("rollstream_grouping_selection_biased")
    assert biased == {("env", "length"): 0, ("env", "reward"): 1}
    # The partition leaves this process and comes back, and is then reported again at once.
    for owned, times, now_biased in (([], 1, {}), ([d.fold], 2, biased)):
        figures.write(owned, {}, {})
        assert len([labels for _, labels in writer.written if "environment" in labels]) == times
        assert served("rollstream_grouping_selection_biased") == now_biased
        assert len(served("rollstream_grouping_lost_rollouts")) == times - 1


def test_the_last_record_of_a_process_says_that_it_has_ended() -> None:
    writer = Kept()
    figures = GroupingFigures(writer, "r.grouper", "r.rollouts", 5.0)
    figures.close()
    assert writer.written == [], "nobody has heard of it"
    figures.write([driver().fold], {0: 0}, {})
    figures.close()
    *_, before, last = writer.written
    assert (last[1], last[0]) == (before[1], before[0] | {"running": 0.0})
    shown = NewestMetrics()
    shown.add(Metrics(component="r.grouper-0", timestamp=50.0, values=last[0], labels=last[1]))
    [component] = shown.at(51.0)
    assert not component.running
