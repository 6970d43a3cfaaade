"""Arrays of integers as short text, for files of plain values: their differences are compressed."""

import zlib
from base64 import b64decode, b64encode
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from rollstream.pipeline.audit.offset_table import OffsetRuns, OffsetTable

_LEVEL = 1


def packed(numbers: Sequence[int] | npt.NDArray[Any]) -> str:
    """Return integers as text, which is very short for equal or evenly growing numbers."""
    values = np.asarray(numbers, "<i8")
    return b64encode(zlib.compress(np.diff(values, prepend=0).astype("<i8").tobytes(), _LEVEL)).decode()


def unpacked(text: str) -> npt.NDArray[np.int64]:
    """Return the integers in a text. Raises ValueError or zlib.error if `packed` did not make the text."""
    return np.cumsum(np.frombuffer(zlib.decompress(b64decode(text, validate=True)), "<i8")).astype(np.int64)


def packed_table(table: OffsetTable) -> list[str]:
    """Return the runs of a table as texts."""
    return [packed(column) for column in table.runs()]


def unpacked_table(texts: Sequence[str]) -> OffsetTable:
    """Return the table in texts that `packed_table` made."""
    starts, stops, values = (unpacked(text) for text in texts)
    return OffsetTable(OffsetRuns(starts, stops, values.astype(np.uint32)))
