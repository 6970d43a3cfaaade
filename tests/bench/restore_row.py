"""Row `restore`: restoring the tasks of a run with all its rollouts in flight, against reading the same range raw."""

import time

from rollstream.consumers.grouping.config import GrouperConfig, GroupingConfig
from rollstream.consumers.grouping.core.fold import Fold
from rollstream.consumers.grouping.process.restoration import records_of
from rollstream.consumers.grouping.process.restorer import Restorer
from rollstream.topics.kafka.reader import Reader
from rollstream.topics.kafka.skipped_records import SkippedRecords
from rollstream.topics.wire.catalogue import topic_name
from tests.bench import material, produce_baseline
from tests.bench.grouping_process import grouping_collector
from tests.bench.measure import Row, Settings, Stopwatch, Timing, in_child, interleaved
from tests.bench.runs import prepared
from tests.support.restoring import restore_all

_SPARE_S = 60.0


def measure(settings: Settings) -> Row:
    """Have a grouping process commit members of groups that never become complete, then restore its tasks here."""
    records = material.encoded(settings, incomplete=True)
    grouping = GroupingConfig(capacity_bytes=1 << 40)
    with prepared(settings, "restore", grouping) as run:
        topic = topic_name(run, "rollouts")
        produce_baseline.measure(settings.kafka, topic, records)
        in_child("grouping_process", settings, run)
        restorer = Restorer(settings.kafka, run, GrouperConfig(), "bench", SkippedRecords())

        def ours() -> Timing:
            watch = Stopwatch()
            restorer.add(range(settings.partitions))
            tasks = restore_all(restorer)
            timing = watch.timing(len(records))
            _check([task.fold for task in tasks.values()], len(records))
            return timing

        def raw() -> Timing:
            watch = Stopwatch()
            read = sum(_read(settings, topic, partition) for partition in range(settings.partitions))
            if read < len(records):
                raise RuntimeError(f"{read} of {len(records)} records were read")
            return watch.timing(len(records))

        with grouping_collector():
            ours_timings, raw_timings = interleaved(settings.repetitions, ours, raw)
    return Row(
        name="restore",
        what="restore tasks with all of these rollouts in flight: offsets, journal, log",
        baseline="read the same range of the log, partition after partition, and decode nothing",
        size_bytes=len(records[0][1]),
        tokens=settings.tokens,
        ours=ours_timings,
        raw=raw_timings,
    )


def _check(folds: list[Fold], rollouts: int) -> None:
    in_flight = sum(fold.in_flight for fold in folds)
    if in_flight != rollouts:
        raise RuntimeError(f"{in_flight} rollouts are in flight after restoring, {rollouts} were before")


def _read(settings: Settings, topic: str, partition: int) -> int:
    """Read a partition from its beginning to its end as restoring does, but decode no record."""
    with Reader(settings.kafka, fetch_wait_ms=10) as reader:
        reader.assign({(topic, partition): 0})
        deadline = time.monotonic() + _SPARE_S
        read = 0
        while time.monotonic() < deadline:
            records, ends = reader.poll(500, 0.05)
            for record in records:
                records_of(record)
                read += 1
            if ends:
                return read
        raise RuntimeError(f"{topic}[{partition}] did not end within {_SPARE_S:g} s")
