"""Records as plain values for JSON: arrays summarised or in full, bytes by their size and beginning."""

import dataclasses
import json
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

import numpy as np

from topics import codec
from topics.errors import RecordError

_HEAD_BYTES = 16
_SUMMARISED = 8
"""Arrays of more entries than this are summarised."""


def plain(value: Any, *, full: bool = False) -> Any:
    """A record, or a value within one, as dicts, lists and numbers. `full` spells arrays out."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain(getattr(value, f.name), full=full) for f in dataclasses.fields(value)}
    if isinstance(value, np.ndarray):
        return value.tolist() if full or len(value) <= _SUMMARISED else summary(value)
    if isinstance(value, bytes):
        return {"bytes": len(value), "hex": (value if full else value[:_HEAD_BYTES]).hex()}
    if isinstance(value, Mapping):
        return {key: plain(item, full=full) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [plain(item, full=full) for item in value]
    return value


def summary(array: "np.ndarray[Any, Any]") -> dict[str, Any]:
    """What an array holds, in a few numbers: dtype, length, least, greatest and mean."""
    return {
        "dtype": array.dtype.name,
        "length": len(array),
        "min": array.min().item(),
        "max": array.max().item(),
        "mean": round(float(array.mean()), 6),
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
    """JSON on one line."""
    return json.dumps(value, ensure_ascii=False)


def time_text(milliseconds: int) -> str:
    """A point in time, UTC."""
    return datetime.fromtimestamp(milliseconds / 1000, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
