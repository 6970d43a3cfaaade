"""Container files made to harm their reader: each is damage with a reason, in bounded memory, and never the end of the
process.

The files are read in a process of their own whose address space is limited, because some of them overflow the stack of
a reader in C or ask for gigabytes.
"""

import bz2
import io
import json
import lzma
import subprocess
import sys
import tracemalloc
import zlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import fastavro
import pytest

from rollstream.topics.wire import avro_files
from rollstream.topics.wire.avro_files import (
    DEEPEST,
    MOST_VALUES,
    ContainerDamage,
    ContainerRecord,
    check_schema,
    read_container,
)

SYNC = b"0123456789abcdef"
HEADER = {
    "type": "record",
    "name": "Header",
    "fields": [
        {"name": "magic", "type": {"type": "fixed", "name": "Magic", "size": 4}},
        {"name": "meta", "type": {"type": "map", "values": "bytes"}},
        {"name": "sync", "type": {"type": "fixed", "name": "Sync", "size": 16}},
    ],
}
LIMIT_BYTES = 3 * 1024**3
READ = f"""
import pathlib, resource, sys
resource.setrlimit(resource.RLIMIT_AS, ({LIMIT_BYTES}, {LIMIT_BYTES}))
from rollstream.topics.wire.avro_files import ContainerDamage, read_container
for path in sys.argv[1:]:
    for item in read_container(pathlib.Path(path).read_bytes()):
        assert isinstance(item, ContainerDamage)
        print(item.records, item.reason)
"""


def written(schema: Any, value: Any) -> bytes:
    out = io.BytesIO()
    fastavro.schemaless_writer(out, schema, value)
    return out.getvalue()


def container(schema: Any, count: int, data: bytes, codec: str = "null") -> bytes:
    meta = {"avro.schema": json.dumps(schema).encode(), "avro.codec": codec.encode()}
    header = written(HEADER, {"magic": b"Obj\x01", "meta": meta, "sync": SYNC})
    return header + written("long", count) + written("long", len(data)) + data + SYNC


def record(name: str, *types: Any) -> dict[str, Any]:
    return {"type": "record", "name": name, "fields": [{"name": f"f{n}", "type": t} for n, t in enumerate(types)]}


def array(items: Any) -> dict[str, Any]:
    return {"type": "array", "items": items}


def tower(levels: int, leaf: Any) -> Any:
    """Records of ten fields, each field a record of ten fields, and so on: 10**levels values."""
    schema = leaf
    for level in range(levels):
        name = f"Level{level}"
        inner = schema if isinstance(schema, str) else schema["name"]
        schema = record(name, schema, *[inner] * 9)
    return schema


def chain(length: int) -> list[Any]:
    """Records that are defined side by side and nested, `length` deep."""
    return [record("R0", "int"), *(record(f"R{n}", f"R{n - 1}") for n in range(1, length))]


HOSTILE = {
    "a record within itself": (container(record("R", "R"), 1, b"\0"), "within itself"),
    "a list as long as the block": (container(record("R", ["null", "R"]), 1, b"\2" * 10**6), "within itself"),
    "arrays within each other": (container(record("R", array("R")), 1, b"\2" * 10**6), "within itself"),
    "a chain of 10,000 records": (container(chain(10_000), 1, written("long", 9_999) + b"\0"), "levels deep"),
    "an array of 2**60 nulls": (container(array("null"), 1, written("long", 2**60) + b"\0"), "take no bytes"),
    "an array of 2**60 empty records": (container(array(record("E")), 1, written("long", 2**60)), "take no bytes"),
    "2**60 records of no bytes": (container("null", 2**60, b""), "cannot hold 1152921504606846976 records"),
    "2**60 records in a byte": (container("int", 2**60, b"\0"), "cannot hold"),
    "a thousand million nulls in a record": (container(tower(9, "null"), 1, b"\0"), "values that take no bytes"),
    "nothing but a count": (container("long", 2**62, b"\0" * 10), "cannot hold"),
}
PACKERS: dict[str, Callable[[bytes], bytes]] = {
    "deflate": lambda data: zlib.compress(data, 1, -zlib.MAX_WBITS),
    "bzip2": bz2.compress,
    "xz": partial(lzma.compress, preset=0),
}


def read_in_a_process(*paths: Path) -> list[str]:
    """One line for each file: how many records it lost, and why."""
    ended = subprocess.run(
        [sys.executable, "-c", READ, *map(str, paths)],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    return ended.stdout.splitlines()


def test_files_that_ask_for_endless_memory_or_depth_are_damage_with_a_reason(tmp_path: Path) -> None:
    paths = [tmp_path / f"{name}.avro" for name in HOSTILE]
    for path, (data, _reason) in zip(paths, HOSTILE.values(), strict=True):
        path.write_bytes(data)
    for line, (name, (_data, reason)) in zip(read_in_a_process(*paths), HOSTILE.items(), strict=True):
        assert line.startswith("1 "), name
        assert reason in line, name


@pytest.mark.parametrize("codec", PACKERS)
def test_a_block_that_unpacks_beyond_the_limit_is_damage_and_not_unpacked(
    codec: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(avro_files, "BLOCK_LIMIT_BYTES", 2**20)
    data = container("int", 1, PACKERS[codec](bytes(2**24)), codec)
    tracemalloc.start()
    try:
        [damage] = read_container(data)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert isinstance(damage, ContainerDamage)
    assert "is larger than 1,048,576 bytes unpacked" in damage.reason
    assert peak < 2**23


@pytest.mark.parametrize("codec", ["null", "deflate", "bzip2", "xz"])
def test_every_codec_of_the_standard_library_is_read(codec: str) -> None:
    out = io.BytesIO()
    fastavro.writer(out, "long", range(500), codec=codec, sync_interval=100)
    assert [item.values for item in read_container(out.getvalue()) if isinstance(item, ContainerRecord)] == [
        *range(500)
    ]


def test_another_codec_is_named_with_the_remedy() -> None:
    [damage] = read_container(container("int", 1, b"\0", "snappy"))
    assert isinstance(damage, ContainerDamage)
    assert "compressed with 'snappy'; write it again with one of null, deflate, bzip2, xz" in damage.reason


@pytest.mark.parametrize(
    "schema",
    [
        "int",
        ["null", "string"],
        record("R", "null", array(record("E", "null", "int")), {"type": "map", "values": "null"}),
        record("A.R", record("A.E", "int"), "A.E", array("A.E"), {"type": "enum", "name": "X", "symbols": ["a"]}),
        record("R", *["null"] * (MOST_VALUES - 1)),
        chain(DEEPEST - 2),
        {"type": "bytes", "logicalType": "bytes-ndarray"},
    ],
    ids=repr,
)
def test_schemas_that_people_write_are_taken(schema: Any) -> None:
    check_schema(schema)


@pytest.mark.parametrize("schema", [record("R", "S"), 7, {"type": 7}, {"type": "array"}, None], ids=repr)
def test_what_is_no_schema_is_refused(schema: Any) -> None:
    with pytest.raises(ValueError, match="schema"):
        check_schema(schema)


def test_a_type_of_the_same_name_elsewhere_hides_no_recursion_and_no_emptiness() -> None:
    inner = {**record("R", "int"), "namespace": "b"}
    with pytest.raises(ValueError, match="within itself"):
        check_schema({**record("R", inner, "a.R"), "namespace": "a"})
    with pytest.raises(ValueError, match="take no bytes"):
        check_schema({**record("T", record("E"), inner, array("x.E")), "namespace": "x"})


def test_an_xz_block_that_asks_for_a_dictionary_of_a_gigabyte_is_damage() -> None:
    data = bytearray(lzma.compress(b"\0", preset=0))
    begin, size = 12, (data[12] + 1) * 4
    data[begin + 4] = 36  # LZMA2 encodes 1 GiB so.
    data[begin + size - 4 : begin + size] = zlib.crc32(data[begin : begin + size - 4]).to_bytes(4, "little")

    [damage] = read_container(container("int", 1, bytes(data), "xz"))

    assert isinstance(damage, ContainerDamage)
    assert "emory usage limit" in damage.reason
