"""Records as plain values for JSON: arrays summarised or in full, bytes by their size and beginning."""

import dataclasses
import json
import math
import sys
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

import numpy as np

from pipeline.tables import printable
from topics import codec
from topics.errors import RecordError
from topics.skipped import SkippedRecords

_HEAD_BYTES = 16
_SUMMARISED = 8
"""Arrays of more entries than this are summarised."""
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_FIRST_MS = -62_135_596_800_000
_LAST_MS = 253_402_300_799_999
"""The years 1 to 9999, which are all that dates have."""


def plain(value: Any, *, full: bool = False) -> Any:
    """A record, or a value within one, as dicts, lists and numbers. `full` spells arrays out.

    A float that is no number in JSON is the text NaN, Infinity or -Infinity, as in the JSON of Protocol Buffers.
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


def summary(array: "np.ndarray[Any, Any]") -> dict[str, Any]:
    """What an array holds, in a few numbers: dtype, length, least, greatest and mean."""
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
    """The record in some bytes; the bytes themselves where they are none of ours."""
    try:
        return None if value is None else codec.decode(value)
    except RecordError:
        return value


def key_text(key: bytes | None) -> str:
    """A record's key: its JSON where it is ours, hexadecimal otherwise."""
    if key is None:
        return ""
    try:
        return key.decode()
    except UnicodeDecodeError:
        return key.hex()


def compact(value: Any) -> str:
    """JSON on one line; what JSON has no number for is spelt as `plain` does, what a terminal would obey as \\u001b."""
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    except ValueError:
        text = json.dumps(plain(value), ensure_ascii=False, allow_nan=False)
    return printable(text)


def tell(skipped: SkippedRecords) -> None:
    """Say on stderr what a tool passed over."""
    for line in skipped.lines():
        print(printable(line), file=sys.stderr)


def time_text(milliseconds: int) -> str:
    """A point in time, UTC; one that no calendar has, as its number of milliseconds since 1970."""
    if not _FIRST_MS <= milliseconds <= _LAST_MS:
        return f"{milliseconds} ms"
    return (_EPOCH + timedelta(milliseconds=milliseconds)).isoformat(timespec="milliseconds").replace("+00:00", "Z")
