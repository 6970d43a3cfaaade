"""Arrays of integers as short text, for files of plain values: differences, compressed."""

import zlib
from base64 import b64decode, b64encode
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from rollstream.pipeline.audit.offset_table import OffsetRuns, OffsetTable

_LEVEL = 1


def packed(numbers: Sequence[int] | npt.NDArray[Any]) -> str:
    """Text of integers; runs and steady growth cost next to nothing."""
    values = np.asarray(numbers, "<i8")
    return b64encode(zlib.compress(np.diff(values, prepend=0).astype("<i8").tobytes(), _LEVEL)).decode()


def unpacked(text: str) -> npt.NDArray[np.int64]:
    """The integers of a text. Raises ValueError or zlib.error for another text."""
    return np.cumsum(np.frombuffer(zlib.decompress(b64decode(text, validate=True)), "<i8")).astype(np.int64)


def packed_table(table: OffsetTable) -> list[str]:
    """The runs of a table as texts."""
    return [packed(column) for column in table.runs()]


def unpacked_table(texts: Sequence[str]) -> OffsetTable:
    """The table of some texts."""
    starts, stops, values = (unpacked(text) for text in texts)
    return OffsetTable(OffsetRuns(starts, stops, values.astype(np.uint32)))
