"""Batches of RL examples as Parquet files: one file for each batch, one row for each example.

The metadata of a file holds the sources of its examples, so a reopened store knows which rollouts were delivered.
"""

import json
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from rollstream.consumers.buffers.storage.checked_parquet import read_schema, read_table, write_table
from rollstream.topics.files.atomic_files import StoreError
from rollstream.topics.records import TrainingBatch
from rollstream.topics.wire.rl_examples import REFERENCE, RLExample, Source, examples_of

FOLDER = "batches"
_TYPES = {
    "tokens": pa.list_(pa.int32()),
    "loss_mask": pa.list_(pa.bool_()),
    "advantage": pa.list_(pa.float32()),
    "generator_log_probs": pa.list_(pa.float32()),
}
COLUMNS = pa.schema(
    [
        ("batch_id", pa.string()),
        ("example_idx", pa.int32()),
        *_TYPES.items(),
        ("timestamp", pa.float64()),
    ]
)
"""Columns of a batch's file; `timestamp` is the time of the batch, seconds since the Unix epoch. A column
`reference_log_probs` follows if every example has them."""
_DESCRIPTION = b"rollstream"


@dataclass(frozen=True, kw_only=True)
class StoredBatch:
    """A batch as it is on disk."""

    batch_id: str
    number: int
    """Number of earlier batches in the store; for a batch of the log, its number on its partition."""
    timestamp: float
    examples: tuple[RLExample, ...]
    metadata: Mapping[str, Any]
    """Metadata from the batch maker."""


def batch_name(batch: StoredBatch) -> str:
    """Name of a batch's file: `batch_{uuid}_{timestamp}.parquet`, the time in milliseconds."""
    return f"batch_{batch.batch_id}_{round(batch.timestamp * 1000)}.parquet"


def write_batch(directory: Path, batch: StoredBatch, compression: str) -> Path:
    """Write a batch below `directory`, atomically. Raises StoreError with its cause."""
    examples = batch.examples
    columns: dict[str, pa.Array] = {
        "batch_id": pa.array([batch.batch_id] * len(examples), pa.string()),
        "example_idx": pa.array(range(len(examples)), pa.int32()),
        **{name: _ragged([getattr(e, name) for e in examples], kind) for name, kind in _TYPES.items()},
        "timestamp": pa.array([batch.timestamp] * len(examples), pa.float64()),
    }
    references = [e.reference_log_probs for e in examples if e.reference_log_probs is not None]
    if references and len(references) == len(examples):
        columns[REFERENCE] = _ragged(references, pa.list_(pa.float32()))
    description = {"number": batch.number, "metadata": batch.metadata, "sources": [list(e.source) for e in examples]}
    table = pa.table(columns).replace_schema_metadata({_DESCRIPTION: json.dumps(description, ensure_ascii=False)})
    path = directory / batch_name(batch)
    write_table(path, table, compression)
    return path


def store_training_batch(directory: Path, batch: TrainingBatch, compression: str) -> Path:
    """Write a batch of the log, unless its file exists; its file name depends only on the batch. Raises StoreError."""
    stored = StoredBatch(
        batch_id=str(uuid.uuid5(uuid.NAMESPACE_OID, f"{batch.batch_id}/{batch.digest}")),
        number=batch.number,
        timestamp=batch.cut_ms / 1000,
        examples=tuple(examples_of(batch)),
        metadata={"batch_id": batch.batch_id, "digest": batch.digest, "maker": batch.metadata},
    )
    path = directory / batch_name(stored)
    return path if path.exists() else write_batch(directory, stored, compression)


def read_batch(path: Path) -> StoredBatch:
    """Read a batch from its file. Raises FileNotFoundError, or StoreError if it is not a valid batch file."""
    try:
        table = read_table(path)
        description = _description(table.schema)
        names = [*_TYPES, *([REFERENCE] if REFERENCE in table.column_names else [])]
        arrays = {name: _rows(table[name]) for name in names}
        return StoredBatch(
            batch_id=table["batch_id"][0].as_py(),
            number=description["number"],
            timestamp=table["timestamp"][0].as_py(),
            examples=tuple(
                RLExample(
                    **{name: arrays[name][row] for name in names},
                    segment_ids=np.ones(len(arrays["tokens"][row]), "<i4"),
                    source=Source(*source),
                )
                for row, source in enumerate(description["sources"])
            ),
            metadata=description["metadata"],
        )
    except (FileNotFoundError, StoreError):
        raise
    except (pa.ArrowException, OSError, ValueError, KeyError, IndexError, TypeError) as error:
        raise _invalid_batch(path, error) from error


def read_sources(path: Path) -> tuple[int, list[Source]]:
    """Read only the number of a batch and the sources of its examples. Raises the errors of `read_batch`."""
    try:
        description = _description(read_schema(path))
        return description["number"], [Source(*source) for source in description["sources"]]
    except (FileNotFoundError, StoreError):
        raise
    except (pa.ArrowException, OSError, ValueError, KeyError, TypeError) as error:
        raise _invalid_batch(path, error) from error


def _invalid_batch(path: Path, error: Exception) -> StoreError:
    return StoreError(
        f"{path} is not a valid batch file ({error}); restore it from a copy, or move it away if it does not "
        "belong to this store"
    )


def _description(schema: pa.Schema) -> Any:
    return json.loads((schema.metadata or {})[_DESCRIPTION])


def _ragged(rows: Sequence[Any], kind: pa.DataType) -> pa.Array:
    splits = np.concatenate([[0], np.cumsum([len(row) for row in rows])]).astype("<i4")
    return pa.ListArray.from_arrays(pa.array(splits), pa.array(np.concatenate(rows), kind.value_type))


def _rows(column: pa.ChunkedArray) -> list[Any]:
    dtype = column.type.value_type.to_pandas_dtype()
    return [np.asarray(row.values.to_numpy(zero_copy_only=False), dtype) for row in column]
