"""Logs of made runs for tests of the index: encoded records of every topic, in any number, read in any portions."""

import itertools
import random
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from functools import cache
from pathlib import Path

import numpy as np

from rollstream.consumers.archive.log_source import ROLLOUTS, LogSource, Positions
from rollstream.pipeline.index import schema, sqlite_files
from rollstream.pipeline.index.indexed_run import IndexedRun
from rollstream.pipeline.index.writer import IndexWriter
from rollstream.topics.errors import TopicError
from rollstream.topics.kafka.records import KafkaRecord, Place
from rollstream.topics.records import (
    BatchGroup,
    BatchIndexEntry,
    BatchUse,
    Drop,
    FinishedOffsets,
    JournalRecord,
    LearnerStep,
    Mark,
    PolicyManifest,
    Rollout,
    RolloutMetadata,
    TrainingBatch,
    Turn,
)
from rollstream.topics.records.journal import to_ranges
from rollstream.topics.wire.catalogue import topic_name
from rollstream.topics.wire.codec import encode
from rollstream.topics.wire.keys import encode_key
from rollstream.topics.wire.rl_examples import batch_digest
from tests.support.journal_records import journal_record

RUN = "made"
BEGAN_MS = 1_790_000_000_000
GROUP = 8
_SENTENCE = (
    "the answer follows from adding both numbers and carrying one over then we divide by three which leaves a "
    "remainder of two so we try again with another guess while checking every digit against the hint before finishing"
)
WORDS = _SENTENCE.split()
_TEXT_BYTES = 180
Chunk = list[tuple[str, KafkaRecord]]


class MadeRun:
    """Makes a run in chunks: on each partition some groups, their journal, a batch and its entry; then a step."""

    def __init__(
        self,
        *,
        partitions: int = 2,
        seed: int = 0,
        groups: int = 8,
        environments: int = 3,
        steps_per_version: int = 64,
    ) -> None:
        """The last group of each partition in a chunk has no variance; all others have some."""
        self._steps_per_version = steps_per_version
        self._partitions, self._groups, self._environments = partitions, groups, environments
        self._random = random.Random(seed)
        self._texts = [_text(self._random) for _ in range(2000)]
        self._ends: dict[Place, int] = {}
        self._examples = itertools.count()
        self._sequence = dict.fromkeys(range(partitions), 0)
        self._step = 0
        self._version = 0

    def chunk(self) -> Chunk:
        """The records of the next chunk, those of `rollouts` first."""
        chunk: Chunk = []
        others: Chunk = []
        uses: list[BatchUse] = []
        for partition in range(self._partitions):
            more, use = self._partition(partition, chunk)
            others += more
            uses.append(use)
        others.append(self._stepped(uses))
        return chunk + others

    def _partition(self, partition: int, rollouts: Chunk) -> tuple[Chunk, BatchUse]:
        begin = self._ends.get((ROLLOUTS, partition), 0)
        groups = []
        for group in range(self._groups):
            example, environment = next(self._examples), f"env{self._random.randrange(self._environments)}"
            first = self._ends.get((ROLLOUTS, partition), 0)
            for member in range(GROUP):
                reward = self._reward(member) if group < self._groups - 1 else 0.5
                rollouts.append(self._rollout(partition, example, member, environment, reward))
            groups.append((example, environment, range(first, first + GROUP)))
        rollouts.append(self.record(ROLLOUTS, partition, encode(Mark(kind="deadline"))))
        rollouts.append(self.record(ROLLOUTS, partition, b"\xc3\x01poison"))
        mark = self._ends[ROLLOUTS, partition] - 2
        kept, gone = groups[:-1], groups[-1][2]
        batch = self._batch(partition, kept)
        entry = BatchIndexEntry.of(batch, self._ends.get(("batches", partition), 0))
        drops = tuple(Drop(offset=offset, reason="zero_variance", environment="env0") for offset in gone)
        settled = [o for _example, _environment, offsets in kept for o in offsets]
        finished = (
            FinishedOffsets(fate="batched", runs=to_ranges(settled)),
            FinishedOffsets(fate="dropped", runs=to_ranges(list(gone))),
            FinishedOffsets(fate="control", runs=to_ranges([mark])),
            FinishedOffsets(fate="dead_lettered", runs=to_ranges([mark + 1])),
        )
        journal = self._journal(partition, begin, batch, finished, drops)
        records = [
            self.record("batches", partition, encode(batch)),
            self.record("journal", partition, encode(journal)),
            self.record("batch-index", 0, encode(entry)),
        ]
        kind = "skipped" if self._random.random() < 0.1 else "trained"
        use = BatchUse(
            batch_id=batch.batch_id,
            index_offset=self._ends["batch-index", 0] - 1,
            rows=len(batch),
            use=kind,  # type: ignore[arg-type]
            reason="too old" if kind == "skipped" else "",
            code="stale_version" if kind == "skipped" else "",
        )
        return records, use

    def _reward(self, member: int) -> float:
        return float(member) if member < 2 else self._random.randrange(5) / 4

    def _journal(
        self,
        partition: int,
        begin: int,
        batch: TrainingBatch,
        finished: tuple[FinishedOffsets, ...],
        drops: tuple[Drop, ...],
    ) -> JournalRecord:
        sequence = self._sequence[partition]
        self._sequence[partition] += 1
        end = self._ends[ROLLOUTS, partition]
        return journal_record(
            partition=partition,
            sequence=sequence,
            partitions=self._partitions,
            begin=begin,
            position=end,
            watermark=end,
            watermark_policy_version=self._version,
            policy_version=self._version,
            batch_number=batch.number + 1,
            finished=finished,
            drops=drops,
            batch_ids=(batch.batch_id,),
        )

    def _rollout(
        self, partition: int, example: int, member: int, environment: str, reward: float
    ) -> tuple[str, KafkaRecord]:
        worker = f"worker-{self._random.randrange(4)}"
        template = _template(environment, worker, self._version, reward, 24 + 8 * self._random.randrange(4))
        value = (
            template.replace(b"U" * 12, f"u{example:09d}-{member}".encode())
            .replace(b"E" * 10, f"x{example:09d}".encode())
            .replace(b"T" * _TEXT_BYTES, self._texts[self._random.randrange(2000)])
            .replace(b"N" * 16, f"case {example * GROUP + member:011d}".encode())
        )
        return self.record(ROLLOUTS, partition, value, encode_key(environment, f"x{example:09d}"))

    def _batch(self, partition: int, groups: Sequence[tuple[int, str, range]]) -> TrainingBatch:
        number, rows = self._sequence[partition], GROUP * len(groups)
        batch = TrainingBatch(
            batch_id=f"{partition}-{number}",
            partition=partition,
            number=number,
            core_version=1,
            generation=0,
            cut="size",
            cut_ms=BEGAN_MS,
            groups=tuple(
                BatchGroup(
                    environment=environment,
                    example_id=f"x{example:09d}",
                    policy_version=self._version,
                    group_id="",
                    size=GROUP,
                    opened_ms=0,
                    sealed_ms=0,
                )
                for example, environment, _offsets in groups
            ),
            group_index=np.repeat(np.arange(len(groups)), GROUP).astype("<i4"),
            source_offsets=np.array([o for _e, _n, offsets in groups for o in offsets], "<i8"),
            uids=tuple(f"u{example:09d}-{member}" for example, _e, _o in groups for member in range(GROUP)),
            splits=np.arange(0, 2 * rows + 1, 2, dtype="<i8"),
            tokens=np.ones(2 * rows, "<i4"),
            loss_mask=np.tile([False, True], rows),
            logprobs=np.tile(np.array([0, -1], "<f4"), rows),
            advantages=np.repeat(np.linspace(-1, 1, rows), 2).astype("<f4"),
            rewards=np.zeros(rows),
            truncated=np.zeros(rows, bool),
            lowest_versions=np.full(rows, self._version, "<i8"),
            highest_versions=np.full(rows, self._version, "<i8"),
            temperatures=np.ones(rows),
            logprobs_processed=np.ones(rows, bool),
            weight_steps=np.full(rows, -1, "<i8"),
            timestamps=np.zeros(rows),
            digest="",
        )
        object.__setattr__(batch, "digest", batch_digest(batch))
        return batch

    def _stepped(self, uses: Sequence[BatchUse]) -> tuple[str, KafkaRecord]:
        self._step += 1
        step = LearnerStep(
            learner="main",
            step=self._step,
            input_run=RUN,
            uses=tuple(uses),
            position=self._ends["batch-index", 0],
            policy_version=self._step,
            params_digest="",
            trained_total=0,
            skipped_total=0,
            metrics={"loss": 1 / self._step, "time/step": 0.5, "trained/reward": 0.5},
            timestamp=BEGAN_MS / 1000 + self._step,
        )
        self._version = self._step // self._steps_per_version
        return self.record("steps", 0, encode(step))

    def policy(self, version: int, step: int = -1, digest: str = "") -> tuple[str, KafkaRecord]:
        """The manifest of a version, by default of step 64 * version and with a digest of its own."""
        manifest = PolicyManifest(
            version=version,
            learner="main",
            step=64 * version if step < 0 else step,
            epoch="e",
            tensors=(),
            chunks=(),
            digest=digest or str(version),
        )
        return self.record("policies", 0, encode(manifest))

    def record(
        self, name: str, partition: int, value: bytes | None, key: bytes | None = None
    ) -> tuple[str, KafkaRecord]:
        """The next record of a partition."""
        offset = self._ends.get((name, partition), 0)
        self._ends[name, partition] = offset + 1
        time_ms = BEGAN_MS + offset * 3
        return name, KafkaRecord(topic_name(RUN, name), partition, offset, time_ms, key, value)


def _text(draw: random.Random) -> bytes:
    words: list[str] = []
    while sum(len(word) + 1 for word in words) < _TEXT_BYTES + 20:
        words.append(draw.choice(WORDS))
    return " ".join(words)[:_TEXT_BYTES].encode()


@cache
def _template(environment: str, worker: str, version: int, reward: float, length: int) -> bytes:
    """An encoded rollout with placeholders for uid, example, text and number; values of equal length replace them."""
    half = length // 2
    return encode(
        Rollout(
            uid="U" * 12,
            group_size=GROUP,
            environment=environment,
            example_id="E" * 10,
            policy_version=version,
            lowest_version=version,
            highest_version=version,
            tokens=np.arange(length, dtype="<i4"),
            loss_mask=np.arange(length) >= half,
            logprobs=np.where(np.arange(length) >= half, -0.5, 0.0).astype("<f4"),
            reward=reward,
            turns=(
                Turn(role="user", text="N" * 16, start=0, stop=half),
                Turn(role="assistant", text="T" * _TEXT_BYTES, start=half, stop=length, has_logprobs=True),
            ),
            metadata=RolloutMetadata(worker_id=worker, timestamp=1.0),
        )
    )


class ListedLog:
    """A log in memory, read in portions whose sizes the test gives."""

    kind = "topics"

    def __init__(
        self, records: Sequence[tuple[str, KafkaRecord]], portion: Callable[[], int] = lambda: 1000, run: str = RUN
    ) -> None:
        self.run = run
        self._portion = portion
        self._records: dict[Place, list[KafkaRecord]] = {}
        self._at: dict[Place, int] = {}
        for name, record in records:
            self._records.setdefault((name, record.partition), []).append(record)

    def identity(self) -> dict[str, str]:
        return {"run": self.run}

    def bounds(self) -> dict[Place, tuple[int, int]]:
        return {place: (0, records[-1].offset + 1) for place, records in self._records.items()}

    def begin(self, positions: Positions) -> None:
        self._at = {place: positions.get(place, 0) for place in self._records}

    def poll(self, rollouts: bool, most: int, wait_s: float) -> list[KafkaRecord]:
        del wait_s
        polled: list[KafkaRecord] = []
        for place, records in self._records.items():
            if (place[0] == ROLLOUTS) is rollouts:
                first = bisect_left(records, self._at[place], key=lambda record: record.offset)
                portion = records[first:][: min(self._portion(), most - len(polled))]
                self._at[place] = portion[-1].offset + 1 if portion else self._at[place]
                polled += portion
        return polled

    def ends(self) -> Positions:
        return {place: at for place, at in self._at.items() if at > self._records[place][-1].offset}

    def record(self, name: str, partition: int, offset: int) -> KafkaRecord:
        for record in self._records.get((name, partition), ()):
            if record.offset == offset:
                return record
        raise TopicError(f"{name}[{partition}] holds no record at offset {offset}")

    def messages(self, name: str, partition: int, start: int) -> Iterator[KafkaRecord]:
        return (record for record in self._records.get((name, partition), ()) if record.offset >= start)

    def close(self) -> None:
        self._at = {}


@contextmanager
def indexed(directory: Path, source: LogSource, commit_records: int = 0) -> Iterator[IndexedRun]:
    """Add the new places of a log to its index, and yield its run."""
    path = directory / "index.sqlite"
    with IndexWriter(path, source, schema.PLACES, commit_records=commit_records) as writer:
        writer.catch_up()
    with closing(sqlite_files.reader(path)) as db:
        yield IndexedRun(db, source)


class EndlessLog(ListedLog):
    """A log that is made while it is read, for measurements with more records than memory should hold."""

    def __init__(self, chunks: Iterator[Chunk]) -> None:
        super().__init__(())
        self._chunks = chunks
        self._rollouts: list[KafkaRecord] = []
        self._others: list[KafkaRecord] = []

    def poll(self, rollouts: bool, most: int, wait_s: float) -> list[KafkaRecord]:
        del wait_s
        if rollouts and not self._rollouts:
            while len(self._rollouts) < most and (chunk := next(self._chunks, None)) is not None:
                self._rollouts += [record for name, record in chunk if name == ROLLOUTS]
                self._others += [record for name, record in chunk if name != ROLLOUTS]
        held = self._rollouts if rollouts else self._others
        polled, held[:] = held[:most], held[most:]
        return polled

    def close(self) -> None:
        self._rollouts, self._others = [], []
