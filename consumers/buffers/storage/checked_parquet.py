"""Parquet files in which every bit is checked before use.

Pages have Parquet's own checksums, which other readers verify too. The footer contains a digest of all bytes before it
and a digest of itself, both under one key, so it can be trusted without reading the pages.
"""

import io
import os
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq
from blake3 import blake3

from rollstream.topics.files.atomic_files import StoreError, replacing

_KEY = b"rollstream.digests"
_MARK = b"blake3:"
_HEX = 32
"""Number of hexadecimal digits of a digest. The first digest covers the bytes before the footer, the second the footer
with zeros in place of the second digest."""
_END = 8
"""Number of bytes after the footer: its length and PAR1."""


def write_table(path: Path, table: pa.Table, compression: str) -> None:
    """Write a table atomically. Raises StoreError with its cause."""
    sink = io.BytesIO()
    with pq.ParquetWriter(sink, table.schema, compression=compression, write_page_checksum=True) as writer:
        writer.write_table(table)
        writer.add_key_value_metadata({_KEY.decode(): (_MARK + b"0" * 2 * _HEX).decode()})
    written = sink.getbuffer()
    start = len(written) - _END - int.from_bytes(written[-_END:-4], "little")
    footer = bytearray(written[start:])
    at = footer.rindex(_MARK) + len(_MARK)
    footer[at : at + _HEX] = _digest(written[:start])
    footer[at + _HEX : at + 2 * _HEX] = _digest(footer)
    with replacing(path) as file:
        file.write(written[:start])
        file.write(footer)


def read_table(path: Path, columns: Sequence[str] | None = None) -> pa.Table:
    """Check a file and read its table. Raises FileNotFoundError, StoreError if it is damaged, or pyarrow's errors if
    it is not Parquet."""
    with open(path, "rb") as file:
        start, digest = _checked_footer(path, file)
        file.seek(0)
        data = file.read()
    if _digest(memoryview(data)[:start]) != digest:
        raise _damaged(path)
    with pq.ParquetFile(pa.BufferReader(data), page_checksum_verification=True) as parquet:
        return parquet.read(columns=columns, use_threads=False)


def read_schema(path: Path) -> pa.Schema:
    """Check the footer of a file, not its pages, and read the schema. Raises the errors of `read_table`."""
    with open(path, "rb") as file:
        _checked_footer(path, file)
        return pq.read_schema(file)


def _checked_footer(path: Path, file: BinaryIO) -> tuple[int, bytes]:
    """Return the start of the footer, and the digest of the bytes before it."""
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - _END))
    start = size - _END - int.from_bytes(file.read(4), "little")
    if start < 0:
        raise _damaged(path)
    file.seek(start)
    footer = bytearray(file.read())
    at = footer.rfind(_MARK) + len(_MARK)
    before, own = bytes(footer[at : at + _HEX]), bytes(footer[at + _HEX : at + 2 * _HEX])
    footer[at + _HEX : at + 2 * _HEX] = b"0" * len(own)
    if _digest(footer) != own:
        raise _damaged(path)
    return start, before


def _digest(data: bytes | bytearray | memoryview) -> bytes:
    return blake3(data).hexdigest(length=_HEX // 2).encode()


def _damaged(path: Path) -> StoreError:
    return StoreError(
        f"{path} is damaged: its content differs from what was written; restore it from a copy, or move it away and "
        "fill the store from the log again"
    )
