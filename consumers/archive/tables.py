"""The tables of an archive, and the conversion of records to their rows.

`log` holds every record unchanged; the other tables are for queries, with one row for each rollout, turn, member of a
batch, group, drop, step, use, rescored rollout or token of the vocabulary. A record that cannot be decoded has a row in
`log` alone.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyarrow as pa

from rollstream.consumers.archive.manifest import LOG
from rollstream.topics.errors import RecordError, StateRefused
from rollstream.topics.kafka.records import KafkaRecord, size_of
from rollstream.topics.records import JournalRecord, LearnerStep, RescoredRollout, TokenizerPart, TrainingBatch
from rollstream.topics.wire import codec
from rollstream.topics.wire.catalogue import spec_of, topic_name
from rollstream.topics.wire.frame_scanner import frame_scanner
from rollstream.topics.wire.validation import batch_problems

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
        "vocabulary": [("tokenizer", pa.string()), ("token", pa.int32()), ("text", pa.string())],
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

_OF_FILE = ("run", "date")
"""Columns whose values are the same in the whole file."""
INT32_COLUMNS = {
    name: [field.name for field in schema if field.type == pa.int32() and field.name != "partition"]
    for name, schema in SCHEMAS.items()
}
"""Columns with 32 bits; integers in records have 64 bits."""
_ARRAYS = ("tokens", "loss_mask", "logprobs", "token_rewards")
_TURN = {
    **{name: name for name in ("role", "text", "start", "stop", "reward", "has_logprobs")},
    "timestamp": "created_s",
    **{f"inference.{name}": name for name in ("model_version", "sampling_params", "inference_time_s")},
}
"""Columns of a turn by its fields, in the order of the schema."""
_SCANNED = {
    **{name: name for name in ("uid", "group_id", "group_size", "environment", "example_id", "policy_version")},
    **{name: name for name in ("lowest_version", "highest_version", "episode_uid", "branch", "branches", "turns")},
    **{name: name for name in ("tokens", "loss_mask", "logprobs", "logprobs_mode")},
    **{f"sampling.{name}": name for name in ("temperature", "top_p", "top_k", "min_p")},
    **{name: name for name in ("token_rewards", "reward", "reward_components", "truncated")},
    **{f"metadata.{name}": name for name in ("worker_id", "replica_id")},
    "metadata.timestamp": "created_s",
    "metadata.weight_step": "weight_step",
    "extra": "extra",
}
"""Columns of a rollout by its fields, in the order of the schema."""
_COLUMNS = [c for name in _SCANNED.values() for c in ((name, f"{name}_end") if name in _ARRAYS else (name,))]
_scanner = cache(lambda: frame_scanner("Rollout", {*_SCANNED, *(f"turns.{name}" for name in _TURN)}))
_LAST_DAY = 2_932_896
"""9999-12-31, the last valid date."""
LARGE_VALUE_BYTES = 4096
"""Mean size from which copying values costs more than a chunk for each of them."""
_ROW_GROUP_BYTES = 64 * 1024 * 1024
PIECE_BYTES = 4 * 1024 * 1024
"""Bytes of a file that are decoded at once."""
_MOST_RECORDS = 500
"""Maximum number of records of the log that are decoded at once."""

Row = dict[str, Any]
"""Values by column, and possibly others; run and date come from the file."""
Rows = Iterator[tuple[str, Row]]
"""Table and row."""


@cache
def date_of(day: int) -> str:
    """Return the ISO 8601 date of a day, counted from 1970-01-01."""
    return datetime.fromtimestamp(day * 86400, UTC).date().isoformat()


def date_at(timestamp_ms: int) -> str:
    """Return the date of a record, UTC; for times out of range, it is 1970-01-01 or the last valid date."""
    return date_of(min(max(timestamp_ms, 0) // 86_400_000, _LAST_DAY))


def log_table(run: str, entries: Sequence[ArchivedRecord]) -> pa.Table:
    """Build the table `log` of consecutive records of a partition."""
    topics, partitions, offsets, times, keys, values, headers = zip(*entries, strict=True)
    columns = {
        "run": pa.repeat(run, len(entries)),
        "environment": pa.repeat("", len(entries)),
        "date": pa.repeat(date_at(times[0]), len(entries)),
        "topic": topics,
        "partition": partitions,
        "offset": offsets,
        "timestamp_ms": times,
        "kind": [codec.kind_of(value) for value in values],
        "key": keys,
        "value": _uncopied(values),
        "headers": headers,
    }
    return pa.table(columns, SCHEMAS[LOG])


def _uncopied(values: Sequence[bytes | None]) -> pa.Array | pa.ChunkedArray:
    """Return a binary column; if its values are large, each is a chunk that refers to the bytes object."""
    sizes = [-1 if value is None else len(value) for value in values]
    if sum(sizes) < LARGE_VALUE_BYTES * len(sizes):
        return pa.array(values, pa.binary())
    offsets = pa.py_buffer(np.array([(0, size) for size in sizes], "<i4"))
    return pa.chunked_array(
        pa.nulls(1, pa.binary())
        if value is None
        else pa.Array.from_buffers(pa.binary(), 1, [None, offsets, pa.py_buffer(value)], offset=2 * at)
        for at, value in enumerate(values)
    )


def rows_of(entry: ArchivedRecord, *, arrays: bool) -> Rows:
    """Yield the rows of a record in the decoded tables, if any.

    Raises RecordError if it cannot be decoded, or has a number that is too large for a column.
    """
    kind, bytes_belong = codec.kind_of(entry.value), not spec_of(entry.topic).values
    if kind is None and entry.value is not None and not bytes_belong:
        raise RecordError("its kind of record is unknown")
    make = _MAKERS.get(kind or "")
    if make is None or entry.value is None:
        return
    try:
        record = _rollout_fields(entry.value) if kind == "Rollout" else codec.decode(entry.value)
    except RecordError:
        if bytes_belong:
            return
        raise
    if isinstance(record, TrainingBatch) and (problems := batch_problems(record)):
        raise RecordError(problems[0])
    place = {
        "topic": entry.topic,
        "partition": entry.partition,
        "offset": entry.offset,
        "timestamp_ms": entry.timestamp_ms,
    }
    for table, row in make(place, record, arrays):
        for column in INT32_COLUMNS[table]:
            if not -(2**31) <= row[column] < 2**31:
                raise RecordError(f"{column} {row[column]} does not fit into the 32 bits of its column")
        yield table, row


def _rollout_fields(value: bytes) -> Row:
    """Return the fields of a rollout by name, its arrays as bytes. Raises RecordError as `codec.decode` does."""
    fields = _scanner()(value)
    if fields is None:
        # The encoder writes what the scanner reads.
        return _rollout_fields(codec.encode(codec.decode(value)))
    row = dict(zip(_COLUMNS, fields, strict=True))
    for name in _ARRAYS:
        row[name] = value[row[name] : row[f"{name}_end"]]
    if row["loss_mask"].translate(None, b"\0\1") or any(len(row[name]) % 4 for name in _ARRAYS if name != "loss_mask"):
        codec.decode(value)  # raises the error of the array
    return row


def _rollout(place: Row, r: Row, arrays: bool) -> Rows:
    if place["topic"] not in ("rollouts", "evals"):
        return  # Other topics have rollouts that wait for their reward or were refused.
    turns, length = r["turns"], len(r["tokens"]) // 4
    r |= place
    r |= {
        "reward_components": _pairs(r["reward_components"]),
        "length": length,
        # Avoid numpy, which would release the interpreter lock here and wait for it again.
        "sampled": length - r["loss_mask"].count(0),
        "turns": len(turns),
        "extra": _pairs(r["extra"]),
    }
    for name, dtype in (("tokens", "<i4"), ("loss_mask", "|b1"), ("logprobs", "<f4")):
        r[name] = np.frombuffer(r[name], dtype) if arrays else None
    yield place["topic"], r
    for number, turn in enumerate(turns):
        turn = dict(zip(_TURN.values(), turn, strict=True)) | place
        turn |= {
            "environment": r["environment"],
            "uid": r["uid"],
            "example_id": r["example_id"],
            "policy_version": r["policy_version"],
            "turn": number,
            "sampling_params": _pairs(turn["sampling_params"]),
        }
        yield "turns", turn


def _pairs(entries: Mapping[str, Any]) -> list[tuple[str, Any]]:
    return list(entries.items())


def _batch(place: Row, b: TrainingBatch, arrays: bool) -> Rows:
    splits = b.splits.tolist()
    same = {name: getattr(b, name) for name in ("batch_id", "number", "cut", "cut_ms", "generation", "core_version")}
    members: dict[int, list[int]] = {}
    for row, index in enumerate(b.group_index.tolist()):
        span = slice(splits[row], splits[row + 1])
        members.setdefault(index, []).append(row)
        advantages, mask = b.advantages[span], b.loss_mask[span]
        sampled = np.flatnonzero(mask)
        subject = {
            "example_idx": row,
            "source_offset": int(b.source_offsets[row]),
            "uid": b.uids[row],
            "reward": float(b.rewards[row]),
            # The advantage of the first sampled token; many estimators give all tokens the same.
            "advantage": float(advantages[sampled[0]]) if len(sampled) else None,
            "truncated": bool(b.truncated[row]),
            "lowest_version": int(b.lowest_versions[row]),
            "highest_version": int(b.highest_versions[row]),
            "length": len(mask),
            "sampled": len(sampled),
            "temperature": float(b.temperatures[row]),
        }
        if arrays:
            subject |= {"tokens": b.tokens[span], "loss_mask": mask, "advantages": advantages}
            subject["generator_log_probs"] = b.logprobs[span]
        yield "batches", vars(b.groups[index]) | same | subject | place
    for index, rows in members.items():
        rewards = b.rewards[rows]
        about = {
            "batch_id": b.batch_id,
            "rollouts": len(rows),
            "reward_mean": float(rewards.mean()),
            "reward_std": float(rewards.std()),
            "uids": [b.uids[row] for row in rows],
            "source_offsets": b.source_offsets[rows],
        }
        yield "groups", vars(b.groups[index]) | about | place


def _journal(place: Row, j: JournalRecord, _arrays: bool) -> Rows:
    for drop in j.drops:
        yield "drops", vars(drop) | {"rollout_offset": drop.offset} | place
    for group in j.finished_groups:
        yield "finished_groups", vars(group) | place


def _step(place: Row, s: LearnerStep, _arrays: bool) -> Rows:
    step = vars(s) | {"environment": "", "created_s": s.timestamp, "metrics": _pairs(s.metrics)} | place
    yield "steps", step
    for use in s.uses:
        yield "uses", step | vars(use)


def _rescored(place: Row, r: RescoredRollout, _arrays: bool) -> Rows:
    judged = {"reward": None if r.failure else r.reward, "failure": r.failure or None}
    yield "rescores", vars(r) | judged | {"components": _pairs(r.components), "rollout_offset": r.offset} | place


def _tokenizer(place: Row, t: TokenizerPart, _arrays: bool) -> Rows:
    for token, text in enumerate(t.texts, t.first_id):
        yield "vocabulary", {"environment": "", "tokenizer": t.digest, "token": token, "text": text} | place


_MAKERS: dict[str, Callable[[Row, Any, bool], Rows]] = {
    "Rollout": _rollout,
    "TrainingBatch": _batch,
    "JournalRecord": _journal,
    "LearnerStep": _step,
    "RescoredRollout": _rescored,
    "TokenizerPart": _tokenizer,
}


def table_of(name: str, run: str, date: str, rows: Sequence[Row]) -> pa.Table:
    """Build the Arrow table of rows with one date."""
    schema = SCHEMAS[name]
    columns = pa.array(rows, pa.struct([field for field in schema if field.name not in _OF_FILE]))
    named = {field.name: column for field, column in zip(columns.type, columns.flatten(), strict=True)}
    named |= {column: pa.repeat(value, len(rows)) for column, value in zip(_OF_FILE, (run, date), strict=True)}
    return pa.table(named, schema)


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
