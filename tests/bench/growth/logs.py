"""Costs of the commands that read a log, as the log grows; each command is started as a user starts it."""

import shutil
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

from rollstream import BatchReader, StepWriter
from rollstream.consumers.batch_reader import ReadBatch
from rollstream.consumers.grouping.config import GroupingConfig
from rollstream.pipeline.config import RunConfig
from rollstream.pipeline.index import sqlite_files
from rollstream.pipeline.index.writer import index_file
from rollstream.topics.config import KafkaConfig, TopicsConfig
from rollstream.topics.kafka import clients, topic_admin
from rollstream.topics.records import Rollout
from rollstream.topics.wire.codec import encode
from rollstream.topics.wire.keys import encode_key
from tests.bench import material
from tests.bench.growth.costs import Costs, wait
from tests.bench.growth.series import Series
from tests.bench.measure import Settings
from tests.support.runs import RealRun

_PARTITIONS = 4
_BATCHES_PER_STEP = 64
_GONE_S = 600.0
_RESTORED = "growth-restored"
_LOG_ROOM = 1.5
"""Bytes of disk for each byte of rollouts: rollouts and their batches, compressed."""
_ARCHIVE_ROOM = 3.0
"""Further bytes for each byte of archived rollouts: an archive of both, and the restored run."""


class _Question(NamedTuple):
    """A command that is measured."""

    name: str
    words: tuple[str, ...]
    bound: float


class LogGrowth:
    """One run that grows from size to size, and the commands that are measured at each size."""

    def __init__(self, kafka: KafkaConfig, folder: Path, tokens: int) -> None:
        self._run = RealRun(kafka, "growth-log", folder, TopicsConfig(partitions=_PARTITIONS))
        self._run.grouping = GroupingConfig(max_batch_age_s=2.0)
        self._settings = Settings(kafka=kafka, directory=folder, tokens=tokens)
        self._costs = Costs(f"GB of rollouts, {tokens:,} tokens")
        self._record_bytes = len(encode(next(material.rollouts(self._settings))))
        self._rollouts = 0
        self._trained = 0
        self._next = 0
        """Offset of the index from which training continues."""
        self._uid = ""

    def measure(self, megabytes: Sequence[int], archived: int) -> list[Series]:
        """Return the costs at these sizes of the log; archives are written and restored up to `archived` megabytes.

        Raises RuntimeError if the disk has no room for the largest size.
        """
        directory = self._run.directory
        largest = max(megabytes)
        needed_mb = _LOG_ROOM * largest + _ARCHIVE_ROOM * min(largest, archived)
        free_mb = shutil.disk_usage(directory).free / 1e6
        if needed_mb > free_mb:
            raise RuntimeError(f"{needed_mb:.0f} MB of disk are needed below {directory}, {free_mb:.0f} are free")
        try:
            self._run.prepare()
            for size in megabytes:
                groups = max(1, round(size * 1e6 / self._record_bytes / self._settings.group_size))
                self._grow(groups * self._settings.group_size)
                gigabytes = self._rollouts * self._record_bytes / 1e9
                for name, words, bound in self._questions(archives=size <= archived):
                    self._costs.measure(name, gigabytes, bound, partial(self._check, *words))
                self._delete_restored()
        finally:
            self._run.stop()
        return self._costs.series()

    def _questions(self, *, archives: bool) -> Iterator[_Question]:
        """Yield the commands in this order; some create files or topics that later commands need."""
        yield _Question("ledger", ("ledger",), 1)
        self._check("ledger", "--incremental")
        yield _Question("ledger, nothing new", ("ledger", "--incremental"), 1)
        yield _Question("verify", ("verify",), 1)
        lineage = ("lineage", "--rollout", self._uid)
        sqlite_files.remove(index_file(RunConfig(run=self._run.name, data_dir=self._run.directory)))
        yield _Question("lineage, first", lineage, 1)
        yield _Question("lineage", lineage, 0)
        yield _Question("cat of one", ("cat", "rollouts", "-p", "0", "-o", "100", "-c", "1"), 0)
        if archives:
            folder = str(self._run.directory / "archive")
            shutil.rmtree(folder, ignore_errors=True)
            yield _Question("archive", ("archive", folder), 1)
            yield _Question("sql", ("sql", "select avg(reward) from rollouts", "--archive", folder), 1)
            yield _Question("restore", ("restore", folder, "--into", _RESTORED), 1)
            shutil.rmtree(folder)

    def _grow(self, rollouts: int) -> None:
        """Add rollouts until the run has this many; a process groups them, and steps are recorded for their batches."""
        group = self._run.start("group")
        kafka, topic = self._run.kafka, self._run.topic("rollouts")
        wait(self._run, lambda: all(end > 0 for _low, end in topic_admin.bounds(kafka, topic).values()), "marks")
        producer = clients.producer(kafka)
        for record in self._new(rollouts - self._rollouts):
            while True:
                try:
                    producer.produce(topic, encode(record), encode_key(record.environment, record.example_id))
                    break
                except BufferError:
                    producer.poll(0.1)
            producer.poll(0)
            self._rollouts += 1
            self._uid = self._uid or record.uid
        assert producer.flush(_GONE_S) == 0
        with (
            StepWriter(kafka, self._run.name, learner="test") as steps,
            BatchReader(kafka, self._run.name, start=self._next) as reader,
        ):
            while self._trained < self._rollouts:
                reads: list[ReadBatch] = []
                while len(reads) < _BATCHES_PER_STEP and self._trained < self._rollouts:
                    read = reader.poll(_GONE_S)
                    assert read is not None, self._run.log_of(group)[-3000:]
                    reads.append(read)
                    self._trained += len(read.batch)
                self._next = reads[-1].index_offset + 1
                steps.record(reads, publish=False, metrics={"loss": 1.0})
        group.terminate()
        assert group.wait(_GONE_S) == 0
        self._run.processes.remove(group)

    def _new(self, count: int) -> Iterator[Rollout]:
        """Yield rollouts in whole groups, with names that no earlier rollout has."""
        before = self._rollouts
        for rollout in material.rollouts(replace(self._settings, rollouts=count), before):
            example = f"{before}-{rollout.example_id}"
            yield replace(rollout, uid=f"{before}-{rollout.uid}", group_id=example, example_id=example)

    def _check(self, *words: str) -> None:
        """Run a command. Raises RuntimeError if its exit code is not 0."""
        done = subprocess.run(
            self._run.command(*words),
            cwd=self._run.directory,
            env=self._run.environment(),
            capture_output=True,
            text=True,
            timeout=3600,
        )
        if done.returncode:
            raise RuntimeError(f"rollstream {' '.join(words)} ended with {done.returncode}: {done.stderr[-2000:]}")

    def _delete_restored(self) -> None:
        kafka = self._run.kafka
        topics = [topic for topic in topic_admin.topic_names(kafka) if topic.startswith(f"{_RESTORED}.")]
        topic_admin.delete_topics(kafka, topics)
