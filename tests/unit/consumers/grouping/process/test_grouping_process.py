"""A grouping process over a model of Kafka: the lag in its metrics, and the progress of its start."""

import itertools
import threading

import pytest

from rollstream.consumers.grouping.config import GrouperConfig, GroupingConfig
from rollstream.consumers.grouping.process.bootstrap import initialise
from rollstream.consumers.grouping.process.grouping_process import GroupingProcess, ReadingPace, run_grouping
from rollstream.consumers.grouping.testing import example_rollout
from rollstream.topics.config import KafkaConfig
from rollstream.topics.records import Metrics
from rollstream.topics.wire.codec import decode, encode
from rollstream.topics.wire.keys import encode_key
from tests.simulation.installation import World
from tests.simulation.scheduler import Process

KAFKA = KafkaConfig(bootstrap_servers="model:1")
GROUPING = GroupingConfig()
GROUPER = GrouperConfig(metrics_interval_s=1.0)


TOPICS = ("rollouts", "batches", "batch-index", "journal", "dead-letters", "policies", "control", "metrics")


def test_a_restore_that_takes_long_is_reported_until_the_process_is_ready(world: World) -> None:
    cluster, stop, lines = world.begin(), threading.Event(), list[str]()
    for name in TOPICS:
        cluster.create(f"run.{name}", 1)
    [journal] = cluster.topics["run.journal"]
    # The transaction of another program hides the journal, so the restore waits until it ends.
    journal.append(cluster.now_ms, encode_key(0), b"?", [], (7, 0), 0, transactional=True)
    world.result_of(lambda: initialise(KAFKA, "run", GROUPING, GROUPER))

    def work() -> None:
        run_grouping(
            KAFKA,
            "run",
            GROUPING,
            GROUPER,
            0,
            stop,
            on_ready=lambda: lines.append("ready"),
            on_progress=lambda progress: lines.append(f"{progress} at {world.scheduler.now_s}"),
        )

    process = world.scheduler.spawn(Process("group-0"), "group-0", work)
    try:
        world.scheduler.run(lambda: len(lines) >= 3)
        journal.mark(cluster.now_ms, 7, commit=False)
        world.scheduler.run(lambda: "ready" in lines)
        reports = lines[: lines.index("ready")]
        due_s = world.scheduler.now_s + 20
        world.scheduler.run(lambda: world.scheduler.now_s > due_s)
        assert lines == [*reports, "ready"], "nothing is reported afterwards"
        begin = "restoring partition 0, one of 1 to restore: 0 of 1 records of the journal, 0 of 0 rollouts at "
        assert all(report.startswith(begin) for report in reports[1:])
        times = [float(report.rpartition(" ")[2]) for report in reports]
        assert all(5 <= later - earlier < 7 for earlier, later in itertools.pairwise(times))
        stop.set()
        world.scheduler.run(lambda: process.done)
        assert process.error is None
    finally:
        world.scheduler.end()


def test_the_marker_of_a_transaction_is_no_lag(world: World) -> None:
    cluster, stop = world.begin(), threading.Event()
    for name in TOPICS:
        cluster.create(f"run.{name}", 1)
    world.result_of(lambda: initialise(KAFKA, "run", GROUPING, GROUPER))
    [rollouts], [metrics] = cluster.topics["run.rollouts"], cluster.topics["run.metrics"]

    def write() -> None:
        value = encode(example_rollout(f"open-{rollouts.end}", 1.0, group_size=8))
        rollouts.append(cluster.now_ms, encode_key("env", "0"), value, [], (7, rollouts.end), 0, transactional=True)
        rollouts.mark(cluster.now_ms, 7, commit=True)

    def reports() -> list[tuple[float, float | None]]:
        """Each position with the lag."""
        records = [decode(entry.value) for entry in metrics.visible(0, metrics.end, True)[0]]
        whole = [r for r in records if isinstance(r, Metrics) and r.labels.get("partition") == "0"]
        return [(r.values["position"], r.values.get("lag")) for r in whole if "position" in r.values]

    def await_reports(position: int) -> None:
        world.scheduler.run(lambda: sum(at == position for at, _lag in reports()) >= 3)

    def work() -> None:
        GroupingProcess(KAFKA, "run", GROUPING, GROUPER, 0, lambda: None).run(stop)

    write()
    process = world.scheduler.spawn(Process("group-0"), "group-0", work)
    try:
        await_reports(1)
        assert reports()[-1] == (1, 0)
        write()
        await_reports(3)
        assert reports()[-1] == (3, 0)
        stop.set()
        world.scheduler.run(lambda: process.done)
        assert process.error is None
    finally:
        world.scheduler.end()


class Time:
    """A clock that advances only when `sleep` is called."""

    def __init__(self) -> None:
        self.now = 0.0

    def sleep(self, seconds: float) -> None:
        assert seconds > 0
        self.now += seconds


@pytest.mark.parametrize("rate", [0.5, 7.0, 150.0, 5000.0])
def test_a_process_behind_reads_at_its_rate(rate: float) -> None:
    time = Time()
    pace = ReadingPace(rate, 0.1, lambda: time.now, time.sleep)
    read = 0
    while time.now < 60:
        most = pace.most(500)
        assert 1 <= most <= 500
        pace.passed(most)
        read += most
    assert read == pytest.approx(60 * rate, rel=0.02, abs=2)


def test_no_burst_follows_idle_time() -> None:
    time = Time()
    pace = ReadingPace(100.0, 0.1, lambda: time.now, time.sleep)
    time.now += 3600
    assert pace.most(500) == 10


def test_without_a_rate_nothing_is_held_back() -> None:
    time = Time()
    pace = ReadingPace(0.0, 0.1, lambda: time.now, time.sleep)
    for _ in range(100):
        assert pace.most(500) == 500
        pace.passed(500)
    assert time.now == 0
