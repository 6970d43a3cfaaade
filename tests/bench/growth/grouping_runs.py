"""Costs of real grouping processes: with more partitions, and with more processes."""

import io
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from functools import partial
from pathlib import Path

from rollstream.consumers.grouping.process.bootstrap import committed_offsets
from rollstream.topics.config import KafkaConfig, TopicsConfig
from rollstream.topics.kafka import groups, topic_admin
from tests.bench.growth.costs import Costs, wait
from tests.bench.growth.series import Series
from tests.support.runs import RealRun, rollout

_PARTITIONS = 16
"""Partitions of each run that measures processes."""
_GROUPS = 2500
"""Groups of four rollouts that these processes share."""
_LAG = 1000
"""Policy lag with which hundreds of partitions have room for their batches."""


def measure_partitions(kafka: KafkaConfig, folder: Path, sizes: Sequence[int]) -> list[Series]:
    """Return the costs of making topics, of a process's start, of grouping, and of a second process that joins, at each
    number of partitions."""
    costs = Costs("partitions")
    for size in sizes:
        with _run(kafka, folder, f"growth-partitions-{size}", size) as run:
            costs.measure("topics made", size, 1, run.prepare)
            costs.measure("a process starts", size, 1, partial(_start, run))
            costs.measure("8 groups each", size, 1, partial(_group, run, "a", 8 * size))
            costs.measure("a second one joins", size, 1, partial(_share, run, 8 * size))
    return costs.series()


def measure_processes(kafka: KafkaConfig, folder: Path, sizes: Sequence[int]) -> list[Series]:
    """Return the costs of grouping the same rollouts at each number of processes; the processes share the work, so the
    costs may not grow."""
    costs = Costs("processes")
    for size in sizes:
        with _run(kafka, folder, f"growth-processes-{size}", _PARTITIONS) as run:
            run.prepare()
            for number in range(size):
                _start(run, number)
            _wait_for_members(run, size)
            _group(run, "before", 4 * _PARTITIONS)
            costs.measure(f"{4 * _GROUPS:,} grouped", size, 0, partial(_group, run, "counted", _GROUPS))
    return costs.series()


@contextmanager
def _run(kafka: KafkaConfig, folder: Path, name: str, partitions: int) -> Iterator[RealRun]:
    directory = folder / name
    directory.mkdir()
    run = RealRun(kafka, name, directory, TopicsConfig(partitions=partitions))
    try:
        yield run
    finally:
        with redirect_stdout(io.StringIO()):  # `stop` prints the ends of logs, but our output may be JSON.
            run.stop()
        topics = [topic for topic in topic_admin.topic_names(kafka) if topic.startswith(f"{name}.")]
        topic_admin.delete_topics(kafka, topics)


def _start(run: RealRun, number: int = 0) -> None:
    """Start a process, and wait until every partition has a mark of the version."""
    _start_process(run, number)

    def marked() -> bool:
        return all(end > 0 for _low, end in topic_admin.bounds(run.kafka, run.topic("rollouts")).values())

    wait(run, marked, "marks of the version on every partition")


def _start_process(run: RealRun, number: int) -> None:
    run.start("group", "--ordinal", str(number), learner__max_policy_lag=_LAG)


def _group(run: RealRun, names: str, count: int) -> None:
    """Send this many groups, and wait until all of them are committed."""
    run.send(rollout(f"{names}{number}", member) for number in range(count) for member in range(4))
    ends = topic_admin.bounds(run.kafka, run.topic("rollouts"))
    group = run.grouper.group_id(run.name)

    def committed() -> bool:
        positions = committed_offsets(run.kafka, group, run.topic("rollouts"), len(ends))
        return all(positions[partition].offset >= end for partition, (_low, end) in ends.items())

    wait(run, committed, f"{count} groups committed")


def _share(run: RealRun, count: int) -> None:
    """Start a second process; once it has joined, send groups, and wait until both processes have committed them."""
    _start_process(run, 1)
    _wait_for_members(run, 2)
    _group(run, "b", count)


def _wait_for_members(run: RealRun, count: int) -> None:
    group = run.grouper.group_id(run.name)
    wait(run, lambda: groups.members(run.kafka, group) == count, f"{count} processes in the group")
