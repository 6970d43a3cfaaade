"""Figures of a grouping process: sums over its partitions, counts since its start, latencies since the last time."""

from collections.abc import Mapping

import pytest

from consumers.grouping.figures import GroupingFigures
from consumers.grouping.restore import Progress
from consumers.grouping.testing import example_rollout
from tests.unit.consumers.grouping.pairs import driver, pair
from topics.metrics import MetricsWriter

Written = list[tuple[dict[str, float], dict[str, str]]]


class Kept(MetricsWriter):
    """Keeps what it is given."""

    def __init__(self) -> None:
        self.written: Written = []

    def write(self, values: Mapping[str, float], labels: Mapping[str, str] | None = None, *, step: int = -1) -> None:
        self.written.append((dict(values), dict(labels or {})))


def test_figures_of_partitions_and_of_the_process() -> None:
    writer, now = Kept(), [100.0]
    figures = GroupingFigures(writer, "r.grouper", "r.rollouts", 5.0, lambda: now[0])
    d, other = driver(), driver()
    pair(d)
    d.pipe(b"poison")
    d.pipe(example_rollout("late", 1.0))
    d.pipe(example_rollout("open", 1.0, example_id="9"), at_ms=2_500)
    other.pipe(example_rollout("open", 1.0))
    other.fold.partition = 3
    figures.committed([d.fold.take(), other.fold.take()], 0.02)
    figures.committed([d.fold.take()], 0.04)
    assert figures.due
    figures.write([d.fold, other.fold], {0: 9, 3: 1}, {7: Progress(journal_read=2, records_to_read=4)})
    assert not figures.due
    [first, second, restoring, whole] = writer.written
    assert first == (
        {
            "position": 5,
            "lag": 4,
            "in_flight": 1,
            "open_groups": 1,
            "held_bytes": d.fold.held_bytes,
            "policy_version": 0,
            "stream_time_s": 2.5,
        },
        {"consumergroup": "r.grouper", "topic": "r.rollouts", "partition": "0"},
    )
    assert second[1]["partition"] == "3"
    assert second[0]["lag"] == 0
    assert restoring[1]["partition"] == "7"
    assert (restoring[0]["restore_journal_read"], restoring[0]["restore_records_to_read"]) == (2.0, 4.0)
    assert "partition" not in whole[1]
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
        "commit_seconds_mean": pytest.approx(0.03),
        "commit_seconds_max": 0.04,
    }


def test_counts_go_on_and_latencies_begin_anew() -> None:
    writer, now = Kept(), [0.0]
    figures = GroupingFigures(writer, "g", "t", 5.0, lambda: now[0])
    figures.committed([driver().fold.take()], 1.0)
    figures.write([], {}, {})
    now[0] = 4.9
    assert not figures.due
    now[0] = 5.0
    assert figures.due
    figures.write([], {}, {})
    assert writer.written[1][0]["transactions_total"] == 1
    assert "commit_seconds_mean" in writer.written[0][0]
    assert "commit_seconds_mean" not in writer.written[1][0]


def test_a_lag_that_is_not_known_is_not_told() -> None:
    writer = Kept()
    figures = GroupingFigures(writer, "g", "t", 5.0)
    figures.write([driver().fold], {}, {})
    assert "lag" not in writer.written[0][0]
