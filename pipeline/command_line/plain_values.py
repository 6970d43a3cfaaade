"""Converts records to plain values for JSON: arrays summarized or in full, bytes by size and first bytes."""

import dataclasses
import json
import math
import sys
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

import numpy as np

from rollstream.pipeline.command_line.text_tables import printable
from rollstream.topics.errors import RecordError
from rollstream.topics.kafka.skipped_records import SkippedRecords
from rollstream.topics.records import NamedArray
from rollstream.topics.wire import codec

_HEAD_BYTES = 16
_SUMMARISED = 8
"""Arrays of more entries are summarized."""
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_FIRST_MS = -62_135_596_800_000
_LAST_MS = 253_402_300_799_999
"""Last millisecond of year 9999; Python has no dates outside the years 1 to 9999."""


def plain(value: Any, *, full: bool = False) -> Any:
    """Convert a record, or a value within one, to dicts, lists and numbers. `full` writes arrays in full.

    A float that JSON cannot express is the string NaN, Infinity or -Infinity, as in the JSON of Protocol Buffers.
    """
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain(getattr(value, f.name), full=full) for f in dataclasses.fields(value)}
    if isinstance(value, np.ndarray):
        return plain(value.tolist()) if full or len(value) <= _SUMMARISED else plain(summary(value))
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, bytes):
        return {"bytes": len(value), "hex": (value if full else value[:_HEAD_BYTES]).hex()}
    if isinstance(value, Mapping):
        return {key: plain(item, full=full) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [plain(item, full=full) for item in value]
    return value


def array_text(array: NamedArray) -> str:
    """Describe a named array of a rollout: dtype, shape and place."""
    place = f"object {array.stored}" if array.stored else f"{len(array.data):,} bytes in the record"
    return f"{array.dtype} {list(array.shape)}, {place}"


def summary(array: "np.ndarray[Any, Any]") -> dict[str, Any]:
    """Summarize an array: dtype, length, minimum, maximum and mean."""
    with np.errstate(invalid="ignore", over="ignore"):
        mean = round(float(array.mean()), 6)
    return {
        "dtype": array.dtype.name,
        "length": len(array),
        "min": array.min().item(),
        "max": array.max().item(),
        "mean": mean,
    }


def decoded(value: bytes | None) -> Any:
    """Decode a record; return the bytes themselves if they are not one of rollstream's records."""
    try:
        return None if value is None else codec.decode(value)
    except RecordError:
        return value


def key_text(key: bytes | None) -> str:
    """Return a record's key as text: its JSON if it is UTF-8, else hexadecimal."""
    if key is None:
        return ""
    try:
        return key.decode()
    except UnicodeDecodeError:
        return key.hex()


def compact(value: Any) -> str:
    """Return JSON on one line, with non-finite floats as `plain` writes them and control characters as \\u001b."""
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    except ValueError:
        text = json.dumps(plain(value), ensure_ascii=False, allow_nan=False)
    return printable(text)


def tell(skipped: SkippedRecords) -> None:
    """Print the records that a tool skipped to standard error."""
    for line in skipped.lines():
        print(printable(line), file=sys.stderr)


def time_text(milliseconds: int) -> str:
    """Format a point in time as ISO 8601 in UTC; outside the years 1 to 9999, as milliseconds since 1970."""
    if not _FIRST_MS <= milliseconds <= _LAST_MS:
        return f"{milliseconds} ms"
    return (_EPOCH + timedelta(milliseconds=milliseconds)).isoformat(timespec="milliseconds").replace("+00:00", "Z")
