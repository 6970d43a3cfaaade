"""Costs of real grouping processes with more and more partitions."""

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from functools import partial
from pathlib import Path

from rollstream.consumers.grouping.process.bootstrap import committed_offsets
from rollstream.topics.config import KafkaConfig, TopicsConfig
from rollstream.topics.kafka import groups, topic_admin
from tests.bench.growth.series import Series, collected
from tests.support.runs import RealRun, rollout
from tests.support.waiting import eventually


def measure(kafka: KafkaConfig, folder: Path, sizes: Sequence[int]) -> list[Series]:
    """Wall time at each number of partitions."""
    points: dict[str, list[tuple[float, float]]] = {"made": [], "started": [], "committed": [], "shared": []}
    for size in sizes:
        with _run(kafka, folder, f"growth-partitions-{size}", size) as run:
            points["made"].append((size, _seconds(run.prepare)))
            points["started"].append((size, _seconds(partial(_start, run))))
            points["committed"].append((size, _seconds(partial(_group, run, "a", 8 * size))))
            points["shared"].append((size, _seconds(partial(_share, run, 8 * size))))
    over = "partitions"
    return [
        collected("topics made", over, "s", 1, points["made"]),
        collected("a process starts", over, "s", 1, points["started"]),
        collected("8 groups each grouped", over, "s", 1, points["committed"]),
        collected("a second one joins", over, "s", 1, points["shared"]),
    ]


@contextmanager
def _run(kafka: KafkaConfig, folder: Path, name: str, partitions: int) -> Iterator[RealRun]:
    directory = folder / name
    directory.mkdir()
    run = RealRun(kafka, name, directory, TopicsConfig(partitions=partitions))
    try:
        yield run
    finally:
        with redirect_stdout(sys.stderr):  # It prints the ends of logs, and our output may be JSON.
            run.stop()
        topics = [topic for topic in topic_admin.topic_names(kafka) if topic.startswith(f"{name}.")]
        topic_admin.delete_topics(kafka, topics)


def _seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def _start(run: RealRun, number: int = 0) -> None:
    """Start a process, and wait until there is a mark of the version on every partition."""
    process = run.start("group", "--ordinal", str(number))

    def marked() -> bool:
        assert process.poll() is None, run.log_of(process)[-2000:]
        return all(end > 0 for _low, end in topic_admin.bounds(run.kafka, run.topic("rollouts")).values())

    eventually(marked, 120, "marks of the version on every partition")


def _group(run: RealRun, names: str, count: int) -> None:
    """Send so many groups, and wait until all of them are committed."""
    run.send(rollout(f"{names}{number}", member) for number in range(count) for member in range(4))
    ends = topic_admin.bounds(run.kafka, run.topic("rollouts"))
    group = run.grouper.group_id(run.name)

    def committed() -> bool:
        assert all(process.poll() is None for process in run.processes)
        positions = committed_offsets(run.kafka, group, run.topic("rollouts"), len(ends))
        return all(positions[partition].offset >= end for partition, (_low, end) in ends.items())

    eventually(committed, 120, f"{count} groups committed")


def _share(run: RealRun, count: int) -> None:
    """Start a second process, and wait until both have committed what is sent from then on."""
    run.start("group", "--ordinal", "1")
    eventually(partial(_has_members, run, 2), 120, "two processes in the group")
    _group(run, "b", count)


def _has_members(run: RealRun, count: int) -> bool:
    assert all(process.poll() is None for process in run.processes)
    return groups.members(run.kafka, run.grouper.group_id(run.name)) == count
