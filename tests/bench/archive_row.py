"""Row `archive`: a run's rollouts from Kafka into an archive, against pyarrow writing the same tables from memory."""

import itertools
import tempfile
from pathlib import Path

import pyarrow.parquet as pq

from rollstream.consumers.archive import manifest as manifests
from rollstream.consumers.archive.archiver import Archiver
from rollstream.consumers.archive.restorer import restore
from rollstream.consumers.archive.writer import read_table
from rollstream.topics.config import TopicsConfig
from rollstream.topics.files.stores import LocalStore
from rollstream.topics.kafka import clients, provisioning
from rollstream.topics.wire.catalogue import topic_name
from tests.bench import material, produce_baseline
from tests.bench.measure import Row, Settings, Stopwatch, Timing, interleaved
from tests.bench.runs import prepared


def measure(settings: Settings) -> Row:
    """Archive the same rollouts repeatedly, each time to an empty directory; then restore them once."""
    records = material.encoded(settings)
    with prepared(settings, "archive") as run, tempfile.TemporaryDirectory(dir=settings.directory) as folder:
        produce_baseline.measure(settings.kafka, topic_name(run, "rollouts"), records)
        numbers = itertools.count()

        def archived() -> LocalStore:
            store = LocalStore(Path(folder) / str(next(numbers)))
            with Archiver(settings.kafka, run, store) as archiver:
                archiver.once()
            return store

        store = archived()
        current = manifests.newest(store, run)
        assert current is not None
        if current.rows("rollouts") != len(records):
            raise RuntimeError(f"{current.rows('rollouts')} of {len(records)} rollouts were archived")
        # Read from the archive's files, dictionaries included, so that the baseline writes the same data.
        tables = [read_table(store, file) for file in current.files]

        def ours() -> Timing:
            watch = Stopwatch()
            archived()
            return watch.timing(len(records))

        def raw() -> Timing:
            watch = Stopwatch()
            for table in tables:
                pq.write_table(table, Path(folder) / f"raw-{next(numbers)}.parquet", compression="zstd")
            return watch.timing(len(records))

        ours_timed, raw_timed = interleaved(settings.repetitions, ours, raw)
        watch = Stopwatch()
        again = f"{run}-again"
        try:
            restore(settings.kafka, TopicsConfig(), store, current, again)
            restored = watch.timing(len(records))
        finally:
            _delete(settings, again)
        size = sum(file.size_bytes for file in current.files)
    return Row(
        name="archive",
        what="read rollouts from Kafka, decode them, write them as Parquet, commit the manifest",
        baseline="pyarrow writes the same tables, which are in memory, and syncs nothing",
        size_bytes=len(records[0][1]),
        tokens=settings.tokens,
        ours=ours_timed,
        raw=raw_timed,
        figures={
            "archived bytes a byte of rollout": size / sum(len(value) for _key, value in records),
            "restore, s per 100k rollouts": 100_000 / restored.rate,
        },
    )


def _delete(settings: Settings, run: str) -> None:
    client = clients.admin(settings.kafka)
    for future in client.delete_topics([d.topic for d in provisioning.describe(settings.kafka, run)]).values():
        future.result(30)
