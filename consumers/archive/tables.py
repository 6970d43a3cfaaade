"""The tables of an archive, and the conversion of records to their rows.

`log` holds every record unchanged; the other tables are for queries, with one row for each rollout, turn, member of a
batch, group, drop, step, use or rescored rollout. A record that cannot be decoded has a row in `log` alone.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

import pyarrow as pa

from rollstream.consumers.archive.manifest import LOG
from rollstream.topics import codec
from rollstream.topics.catalogue import spec_of, topic_name
from rollstream.topics.errors import RecordError, StateRefused
from rollstream.topics.kafka.records import KafkaRecord, size_of
from rollstream.topics.records import JournalRecord, LearnerStep, RescoredRollout, Rollout, TrainingBatch
from rollstream.topics.validation import batch_problems

if TYPE_CHECKING:
    import pyarrow.parquet as pq


class ArchivedRecord(NamedTuple):
    """A record of a topic."""

    topic: str
    """Name of the topic in the catalogue."""
    partition: int
    offset: int
    timestamp_ms: int
    key: bytes | None
    value: bytes | None
    headers: tuple[tuple[str, bytes | None], ...] | None = None

    @property
    def size_bytes(self) -> int:
        """Number of bytes of key, value and headers."""
        return size_of(self.key, self.value, self.headers)

    def message(self, run: str) -> KafkaRecord:
        """Return the record as a reader of the run's topic gets it."""
        name, headers = topic_name(run, self.topic), self.headers or ()
        return KafkaRecord(name, self.partition, self.offset, self.timestamp_ms, self.key, self.value, headers)


def _entries(value: pa.DataType) -> pa.DataType:
    """Return the type of a column that maps names to values: a list of entries, because many readers refuse maps."""
    return pa.list_(pa.struct([pa.field("key", pa.string(), nullable=False), ("value", value)]))


_TEXTS = _entries(pa.string())
_FIGURES = _entries(pa.float64())
ENTRIES = (_TEXTS, _FIGURES)
"""Types of columns that map names to values."""
_HEADERS = pa.list_(pa.struct([("name", pa.string()), ("value", pa.binary())]))
_PLACE = [
    ("run", pa.string()),
    ("environment", pa.string()),
    ("date", pa.string()),
    ("topic", pa.string()),
    ("partition", pa.int32()),
    ("offset", pa.int64()),
    ("timestamp_ms", pa.int64()),
]
"""First columns of every row, which identify its record. `date` is the date of the record's timestamp,
UTC; in `log`, of the first record of its file."""
_GROUP = [("example_id", pa.string()), ("policy_version", pa.int64()), ("group_id", pa.string())]
_ROLLOUT = [
    ("uid", pa.string()),
    *_GROUP,
    ("group_size", pa.int32()),
    ("lowest_version", pa.int64()),
    ("highest_version", pa.int64()),
    ("episode_uid", pa.string()),
    ("branch", pa.int32()),
    ("branches", pa.int32()),
    ("reward", pa.float64()),
    ("reward_components", _FIGURES),
    ("truncated", pa.bool_()),
    ("length", pa.int32()),
    ("sampled", pa.int32()),
    ("turns", pa.int32()),
    ("worker_id", pa.string()),
    ("replica_id", pa.string()),
    ("created_s", pa.float64()),
    ("weight_step", pa.int64()),
    ("temperature", pa.float64()),
    ("top_p", pa.float64()),
    ("top_k", pa.int64()),
    ("min_p", pa.float64()),
    ("logprobs_mode", pa.string()),
    ("extra", _TEXTS),
    ("tokens", pa.list_(pa.int32())),
    ("loss_mask", pa.list_(pa.bool_())),
    ("logprobs", pa.list_(pa.float32())),
]
SCHEMAS: Mapping[str, pa.Schema] = {
    name: pa.schema([*_PLACE, *columns])
    for name, columns in {
        LOG: [("kind", pa.string()), ("key", pa.binary()), ("value", pa.binary()), ("headers", _HEADERS)],
        "rollouts": _ROLLOUT,
        "evals": _ROLLOUT,
        "turns": [
            ("uid", pa.string()),
            ("example_id", pa.string()),
            ("policy_version", pa.int64()),
            ("turn", pa.int32()),
            ("role", pa.string()),
            ("text", pa.string()),
            ("start", pa.int32()),
            ("stop", pa.int32()),
            ("reward", pa.float64()),
            ("has_logprobs", pa.bool_()),
            ("created_s", pa.float64()),
            ("model_version", pa.int64()),
            ("sampling_params", _TEXTS),
            ("inference_time_s", pa.float64()),
        ],
        "batches": [
            ("batch_id", pa.string()),
            ("number", pa.int64()),
            ("example_idx", pa.int32()),
            *_GROUP,
            ("source_offset", pa.int64()),
            ("uid", pa.string()),
            ("reward", pa.float64()),
            ("advantage", pa.float64()),
            ("truncated", pa.bool_()),
            ("lowest_version", pa.int64()),
            ("highest_version", pa.int64()),
            ("length", pa.int32()),
            ("sampled", pa.int32()),
            ("temperature", pa.float64()),
            ("cut", pa.string()),
            ("cut_ms", pa.int64()),
            ("generation", pa.int64()),
            ("core_version", pa.int32()),
            ("tokens", pa.list_(pa.int32())),
            ("loss_mask", pa.list_(pa.bool_())),
            ("advantages", pa.list_(pa.float32())),
            ("generator_log_probs", pa.list_(pa.float32())),
        ],
        "groups": [
            *_GROUP,
            ("batch_id", pa.string()),
            ("size", pa.int32()),
            ("opened_ms", pa.int64()),
            ("sealed_ms", pa.int64()),
            ("rollouts", pa.int32()),
            ("reward_mean", pa.float64()),
            ("reward_std", pa.float64()),
            ("uids", pa.list_(pa.string())),
            ("source_offsets", pa.list_(pa.int64())),
        ],
        "finished_groups": [*_GROUP, ("sealed_ms", pa.int64()), ("finished_ms", pa.int64())],
        "drops": [
            ("rollout_offset", pa.int64()),
            ("reason", pa.string()),
            ("detail", pa.string()),
            ("uid", pa.string()),
            ("policy_version", pa.int64()),
            ("lowest_version", pa.int64()),
            ("age_ms", pa.int64()),
            ("tokens", pa.int64()),
        ],
        "steps": [
            ("learner", pa.string()),
            ("step", pa.int64()),
            ("input_run", pa.string()),
            ("position", pa.int64()),
            ("policy_version", pa.int64()),
            ("params_digest", pa.string()),
            ("trained_total", pa.int64()),
            ("skipped_total", pa.int64()),
            ("created_s", pa.float64()),
            ("metrics", _FIGURES),
        ],
        "uses": [
            ("learner", pa.string()),
            ("step", pa.int64()),
            ("input_run", pa.string()),
            ("batch_id", pa.string()),
            ("index_offset", pa.int64()),
            ("rows", pa.int32()),
            ("use", pa.string()),
            ("reason", pa.string()),
        ],
        "rescores": [
            ("rescoring", pa.string()),
            ("verifier", pa.string()),
            ("rollout_offset", pa.int64()),
            ("uid", pa.string()),
            ("reward_before", pa.float64()),
            ("reward", pa.float64()),
            ("components", _FIGURES),
            ("failure", pa.string()),
        ],
    }.items()
}
_OWN_VALUES = ("offset", "timestamp_ms", "key", "value", "uid", "text")
"""Columns whose values repeat too rarely for a dictionary."""

_OF_FILE = 3
"""Number of columns whose values are the same in the whole file: run, environment and date."""
_SMALL = {
    name: [(at, field.name) for at, field in enumerate(list(schema)[_OF_FILE:]) if field.type == pa.int32()]
    for name, schema in SCHEMAS.items()
}
"""Indices and names of the columns with 32 bits; integers in records have 64 bits."""
_LAST_DAY = 2_932_896
"""9999-12-31, the last valid date."""
_ROW_GROUP_BYTES = 64 * 1024 * 1024
PIECE_BYTES = 4 * 1024 * 1024
"""Bytes of a file that are decoded at once."""
_MOST_RECORDS = 500
"""Maximum number of records of the log that are decoded at once."""

Row = tuple[Any, ...]
"""Values in the order of a table's schema, from `topic` on; run, environment and date come from the file."""
Rows = Iterator[tuple[str, str, Row]]
"""Table, environment and row."""


@cache
def date_of(day: int) -> str:
    """Return the ISO 8601 date of a day, counted from 1970-01-01."""
    return datetime.fromtimestamp(day * 86400, UTC).date().isoformat()


def date_at(timestamp_ms: int) -> str:
    """Return the date of a record, UTC; for times out of range, it is 1970-01-01 or the last valid date."""
    return date_of(min(max(timestamp_ms, 0) // 86_400_000, _LAST_DAY))


def log_row(entry: ArchivedRecord) -> Row:
    """Return the row of a record in `log`."""
    headers = None if entry.headers is None else [{"name": name, "value": value} for name, value in entry.headers]
    return (*entry[:4], codec.kind_of(entry.value), entry.key, entry.value, headers)


def rows_of(entry: ArchivedRecord, *, arrays: bool) -> Rows:
    """Yield the rows of a record in the decoded tables, if any.

    Raises RecordError if it cannot be decoded, or has a number that is too large for a column.
    """
    kind, bytes_belong = codec.kind_of(entry.value), not spec_of(entry.topic).values
    if kind is None and entry.value is not None and not bytes_belong:
        raise RecordError("its kind of record is unknown")
    make = _MAKERS.get(kind or "")
    if make is None:
        return
    try:
        record = codec.decode(entry.value)
    except RecordError:
        if bytes_belong:
            return
        raise
    if isinstance(record, TrainingBatch) and (problems := batch_problems(record)):
        raise RecordError(problems[0])
    for table, environment, row in make(entry, record, arrays):
        for at, column in _SMALL[table]:
            if not -(2**31) <= row[at] < 2**31:
                raise RecordError(f"{column} {row[at]} does not fit into the 32 bits of its column")
        yield table, environment, row


def _rollout(entry: ArchivedRecord, r: Rollout, arrays: bool) -> Rows:
    if entry.topic not in ("rollouts", "evals"):
        return  # Other topics have rollouts that wait for their reward or were refused.
    place, environment, about, table = entry[:4], r.environment, r.metadata, entry.topic
    row = (
        *place,
        r.uid,
        r.example_id,
        r.policy_version,
        r.group_id,
        r.group_size,
        r.lowest_version,
        r.highest_version,
        r.episode_uid,
        r.branch,
        r.branches,
        r.reward,
        list(r.reward_components.items()),
        r.truncated,
        len(r.tokens),
        # Avoid numpy, which would release the interpreter lock here and wait for it again.
        len(r.tokens) - r.loss_mask.tobytes().count(0),
        len(r.turns),
        about.worker_id,
        about.replica_id,
        about.timestamp,
        about.weight_step,
        r.sampling.temperature,
        r.sampling.top_p,
        r.sampling.top_k,
        r.sampling.min_p,
        r.logprobs_mode,
        list(r.extra.items()),
        *((r.tokens, r.loss_mask, r.logprobs) if arrays else (None, None, None)),
    )
    yield table, environment, row
    for number, turn in enumerate(r.turns):
        inference = turn.inference
        yield (
            "turns",
            environment,
            (
                *place,
                r.uid,
                r.example_id,
                r.policy_version,
                number,
                turn.role,
                turn.text,
                turn.start,
                turn.stop,
                turn.reward,
                turn.has_logprobs,
                turn.timestamp,
                inference.model_version,
                list(inference.sampling_params.items()),
                inference.inference_time_s,
            ),
        )


def _batch(entry: ArchivedRecord, b: TrainingBatch, arrays: bool) -> Rows:
    place, splits = entry[:4], b.splits.tolist()
    members: dict[int, list[int]] = {}
    for row, index in enumerate(b.group_index.tolist()):
        group, begin, end = b.groups[index], splits[row], splits[row + 1]
        members.setdefault(index, []).append(row)
        span = slice(begin, end)
        mask = b.loss_mask[span]
        sampled = b.advantages[span][mask]
        whole = (b.tokens[span], mask, b.advantages[span], b.logprobs[span]) if arrays else (None,) * 4
        yield (
            "batches",
            group.environment,
            (
                *place,
                b.batch_id,
                b.number,
                row,
                group.example_id,
                group.policy_version,
                group.group_id,
                int(b.source_offsets[row]),
                b.uids[row],
                float(b.rewards[row]),
                # The advantage of the first sampled token; many estimators give all tokens the same.
                float(sampled[0]) if len(sampled) else None,
                bool(b.truncated[row]),
                int(b.lowest_versions[row]),
                int(b.highest_versions[row]),
                end - begin,
                len(sampled),
                float(b.temperatures[row]),
                b.cut,
                b.cut_ms,
                b.generation,
                b.core_version,
                *whole,
            ),
        )
    for index, rows in members.items():
        group, rewards = b.groups[index], b.rewards[rows]
        about = (group.example_id, group.policy_version, group.group_id, b.batch_id)
        when = (group.size, group.opened_ms, group.sealed_ms)
        figures = (len(rows), float(rewards.mean()), float(rewards.std()))
        which = ([b.uids[row] for row in rows], b.source_offsets[rows])
        yield "groups", group.environment, (*place, *about, *when, *figures, *which)


def _journal(entry: ArchivedRecord, j: JournalRecord, _arrays: bool) -> Rows:
    place = entry[:4]
    for drop in j.drops:
        cause = (drop.offset, drop.reason, drop.detail, drop.uid)
        figures = (drop.policy_version, drop.lowest_version, drop.age_ms, drop.tokens)
        yield "drops", drop.environment, (*place, *cause, *figures)
    for group in j.finished_groups:
        about = (group.example_id, group.policy_version, group.group_id)
        yield "finished_groups", group.environment, (*place, *about, group.sealed_ms, group.finished_ms)


def _step(entry: ArchivedRecord, s: LearnerStep, _arrays: bool) -> Rows:
    place = entry[:4]
    totals = (s.policy_version, s.params_digest, s.trained_total, s.skipped_total, s.timestamp)
    yield "steps", "", (*place, s.learner, s.step, s.input_run, s.position, *totals, list(s.metrics.items()))
    for use in s.uses:
        usage = (use.batch_id, use.index_offset, use.rows, use.use, use.reason)
        yield "uses", "", (*place, s.learner, s.step, s.input_run, *usage)


def _rescored(entry: ArchivedRecord, r: RescoredRollout, _arrays: bool) -> Rows:
    judged = (r.reward_before, None if r.failure else r.reward, list(r.components.items()), r.failure or None)
    yield "rescores", r.environment, (*entry[:4], r.rescoring, r.verifier, r.offset, r.uid, *judged)


_MAKERS: dict[str, Callable[[ArchivedRecord, Any, bool], Rows]] = {
    "Rollout": _rollout,
    "TrainingBatch": _batch,
    "JournalRecord": _journal,
    "LearnerStep": _step,
    "RescoredRollout": _rescored,
}


def table_of(name: str, run: str, environment: str, date: str, rows: Sequence[Row]) -> pa.Table:
    """Build the Arrow table of one file."""
    schema = SCHEMAS[name]
    same = [pa.repeat(pa.scalar(value, pa.string()), len(rows)) for value in (run, environment, date)]
    columns = [
        _array(column, field.type)
        for column, field in zip(zip(*rows, strict=True), list(schema)[_OF_FILE:], strict=True)
    ]
    return pa.Table.from_arrays([*same, *columns], schema=schema)


def _array(column: Sequence[Any], kind: pa.DataType) -> pa.Array:
    if kind not in ENTRIES:
        return pa.array(column, kind)
    # Pairs convert to a map, which has the same memory layout as a list of entries.
    return pa.array(column, pa.map_(pa.string(), kind.value_type.field("value").type)).cast(kind)


def parquet(tables: Iterable[pa.Table], schema: pa.Schema) -> tuple[bytes, int]:
    """Return the bytes of a Parquet file with tables of one schema, and its number of rows.

    Small tables share a row group; at most one row group is held at once.
    """
    import pyarrow.parquet as pq

    sink, count = pa.BufferOutputStream(), 0
    names = [f.name for f in schema if f.name not in _OWN_VALUES and not _nested(f)]
    # Omit Arrow's copy of the schema, which would double the size of small files.
    with pq.ParquetWriter(sink, schema, compression="zstd", use_dictionary=names, store_schema=False) as writer:
        held: list[pa.Table] = []
        for table in tables:
            held.append(table)
            count += len(table)
            if sum(t.nbytes for t in held) >= _ROW_GROUP_BYTES:
                writer.write_table(pa.concat_tables(held))
                held = []
        if held:
            writer.write_table(pa.concat_tables(held))
    return sink.getvalue().to_pybytes(), count


def _nested(field: pa.Field) -> bool:
    return bool(pa.types.is_nested(field.type))


def rows_of_piece(file: "pq.FileMetaData") -> int:
    """Return the number of rows of a Parquet file that have about PIECE_BYTES; at least 1."""
    size_bytes = sum(file.row_group(group).total_byte_size for group in range(file.num_row_groups))
    rows: int = file.num_rows * PIECE_BYTES // max(1, size_bytes)
    return max(1, rows)


def archived_records(data: bytes, topic: str, partition: int) -> Iterator[ArchivedRecord]:
    """Yield the records of a file of `log`, in order. Raises StateRefused if it is not a file of `log`."""
    import pyarrow.parquet as pq

    names = ["offset", "timestamp_ms", "key", "value", "headers"]
    with refusing(f"a file of the log of {topic}[{partition}]"):
        file = pq.ParquetFile(pa.BufferReader(data))
        rows = min(_MOST_RECORDS, rows_of_piece(file.metadata))
        # Threads of Arrow may abort the process at its exit (apache/arrow issue 39862).
        for batch in file.iter_batches(rows, columns=names, use_threads=False):
            columns = [batch.column(name).to_pylist() for name in names]
            for offset, timestamp_ms, key, value, headers in zip(*columns, strict=True):
                named = None if headers is None else tuple((h["name"], h["value"]) for h in headers)
                yield ArchivedRecord(topic, partition, offset, timestamp_ms, key, value, named)


@contextmanager
def refusing(file: str) -> Iterator[None]:
    """Raise StateRefused if the block cannot read a file although the file's digest matches the manifest."""
    try:
        yield
    except (pa.ArrowException, OSError, ValueError, KeyError, TypeError) as error:
        why = " ".join(str(error).split())
        raise StateRefused(
            f"{file} was not written by `rollstream archive` ({why}); somebody changed the archive: archive to "
            "another place"
        ) from error
