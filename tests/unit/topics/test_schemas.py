"""Schema files: documented, compatible over every pair of versions, told apart by fingerprint, like the dataclasses."""

import dataclasses
import io
import itertools
import json
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fastavro
import numpy as np
import pytest
from fastavro.schema import to_parsing_canonical_form

from rollstream.topics import records
from rollstream.topics.errors import RecordError
from rollstream.topics.wire import codec
from rollstream.topics.wire.codec import (
    HEADER_SIZE,
    MAGIC,
    RECORD_TYPES,
    Schema,
    decode,
    decode_as,
    encode,
    schemas,
    schemas_in,
)

PAIRS = [
    (older, newer)
    for versions in schemas().values()
    for older, newer in itertools.combinations_with_replacement(versions, 2)
]
ALL = [schema for versions in schemas().values() for schema in versions]


def name(schema: Schema) -> str:
    return f"{schema.record}.v{schema.version}"


def types_in(schema: Any) -> Iterator[Any]:
    """Every type of a schema, itself first, depth first."""
    yield schema
    if isinstance(schema, dict):
        for inner in [schema.get("items"), schema.get("values"), *[f["type"] for f in schema.get("fields", ())]]:
            if inner is not None:
                yield from types_in(inner)


def named_in(schema: Any) -> dict[str, Any]:
    return {t["name"]: t for t in types_in(schema) if isinstance(t, dict) and "name" in t}


def test_every_record_type_has_a_schema_and_every_schema_a_record_type() -> None:
    assert set(schemas()) == {cls.__name__ for cls in RECORD_TYPES}


@pytest.mark.parametrize("versions", schemas().values(), ids=list(schemas()))
def test_versions_count_from_one_without_a_gap(versions: tuple[Schema, ...]) -> None:
    assert [schema.version for schema in versions] == list(range(1, len(versions) + 1))


@pytest.mark.parametrize("schema", ALL, ids=name)
def test_every_record_field_and_enum_is_documented(schema: Schema) -> None:
    for kind in named_in(schema.source).values():
        assert kind["doc"].endswith("."), kind["name"]
        assert kind["namespace"] == "rollstream"
        for field in kind.get("fields", ()):
            assert len(field["doc"]) > 3, f"{kind['name']}.{field['name']}"
            assert field["doc"].endswith("."), f"{kind['name']}.{field['name']}"


def made_up(folder: Path, *versions: dict[str, Any]) -> dict[str, tuple[Schema, ...]]:
    """Schemas of a package in which a record has these versions."""
    for number, source in enumerate(versions, 1):
        (folder / f"made_up.v{number}.avsc").write_text(json.dumps(source), encoding="utf-8")
    return schemas_in(folder)


def test_two_schemas_with_one_fingerprint_are_refused(tmp_path: Path) -> None:
    source = schemas()["Mark"][-1].source
    first, *others = source["fields"]
    with pytest.raises(ValueError, match=r"made_up.v\d.avsc has the fingerprint of another schema"):
        made_up(tmp_path, source, {**source, "doc": "Other.", "fields": [{**first, "doc": "Other."}, *others]})


def crc_64_avro(data: bytes) -> int:
    """The fingerprint of the Avro specification, "Schema Fingerprints", bit by bit."""
    empty = 0xC15D213AA4D7A795
    value = empty
    for byte in data:
        value ^= byte
        for _ in range(8):
            value = (value >> 1) ^ (empty & -(value & 1))
    return value


@pytest.mark.parametrize("schema", ALL, ids=name)
def test_frames_carry_the_fingerprint_of_the_canonical_form_little_endian(schema: Schema) -> None:
    canonical = to_parsing_canonical_form(schema.source)
    assert schema.fingerprint == crc_64_avro(canonical.encode()).to_bytes(8, "little")


def readable(writer: Any, reader: Any, writers: dict[str, Any], readers: dict[str, Any]) -> str | None:
    """Why a reader's schema cannot read what a writer's schema wrote, by the rules of resolution; None if it can.

    Independent of fastavro, which finds out only when it meets the data.
    """
    writer, reader = (
        writers.get(writer, writer) if isinstance(writer, str) else writer,
        (readers.get(reader, reader) if isinstance(reader, str) else reader),
    )
    kind = writer if isinstance(writer, str) else writer["type"]
    wanted = reader if isinstance(reader, str) else reader["type"]
    promotions = {"int": {"long", "float", "double"}, "long": {"float", "double"}, "float": {"double"}}
    if kind != wanted:
        return None if wanted in promotions.get(kind, ()) else f"{kind} is not read as {wanted}"
    if isinstance(writer, str):
        return None
    if writer.get("dtype") != reader.get("dtype"):
        return f"dtype {writer.get('dtype')} became {reader.get('dtype')}"
    if kind in ("array", "map"):
        inner = "items" if kind == "array" else "values"
        return readable(writer[inner], reader[inner], writers, readers)
    if kind == "enum":
        lost = set(writer["symbols"]) - set(reader["symbols"])
        return f"symbols {lost} were removed" if lost and "default" not in reader else None
    if kind == "record":
        written = {f["name"]: f for f in writer["fields"]}
        for field in reader["fields"]:
            if field["name"] in written:
                why = readable(written[field["name"]]["type"], field["type"], writers, readers)
                if why:
                    return f"{field['name']}: {why}"
            elif "default" not in field:
                return f"field {field['name']} was added without a default"
    return None


@pytest.mark.parametrize(("older", "newer"), PAIRS, ids=lambda s: name(s))
def test_every_version_reads_every_older_one(older: Schema, newer: Schema) -> None:
    assert readable(older.source, newer.source, named_in(older.source), named_in(newer.source)) is None


def dtypes(schema: Schema) -> dict[str, str]:
    return {
        f"{kind['name']}.{field['name']}": field["type"]["dtype"]
        for kind in named_in(schema.source).values()
        for field in kind.get("fields", ())
        if isinstance(field["type"], dict) and field["type"].get("logicalType") == "ndarray"
    }


@pytest.mark.parametrize("schema", ALL, ids=name)
def test_dtypes_are_little_endian_numbers(schema: Schema) -> None:
    for dtype in dtypes(schema).values():
        assert np.dtype(dtype).str == dtype
        assert dtype[0] in "<|"
        assert np.dtype(dtype).kind in "biuf"


@pytest.mark.parametrize("cls", RECORD_TYPES, ids=[cls.__name__ for cls in RECORD_TYPES])
def test_dataclasses_have_the_fields_of_the_newest_schema(cls: type) -> None:
    for kind, schema in named_in(schemas()[cls.__name__][-1].source).items():
        if schema["type"] != "record":
            continue
        ours = {field.name for field in dataclasses.fields(getattr(records, kind))}
        assert ours == {field["name"] for field in schema["fields"]}, kind


PLAIN = {"string": str, "int": int, "long": int, "double": float, "boolean": bool, "bytes": bytes}
ARRAYS = {
    "<i4": records.Int32,
    "<i8": records.Int64,
    "<f4": records.Float32,
    "<f8": records.Float64,
    "|b1": records.Bool,
}


@pytest.mark.parametrize("cls", RECORD_TYPES, ids=[cls.__name__ for cls in RECORD_TYPES])
def test_types_of_dataclass_fields_are_those_of_the_schema(cls: type) -> None:
    named = named_in(schemas()[cls.__name__][-1].source)

    def expected(kind: Any) -> Any:
        kind = named.get(kind, kind) if isinstance(kind, str) else kind
        if isinstance(kind, str):
            return PLAIN[kind]
        if kind.get("logicalType") == "ndarray":
            return ARRAYS[kind["dtype"]]
        if kind["type"] == "array":
            return tuple[expected(kind["items"]), ...]  # type: ignore[misc]
        if kind["type"] == "map":
            return typing.get_type_hints(records.Rollout)["extra"].__origin__[str, expected(kind["values"])]
        if kind["type"] == "enum":
            return typing.Literal[tuple(kind["symbols"])]
        return getattr(records, kind["name"])

    for kind, schema in named.items():
        if schema["type"] == "record":
            hints = typing.get_type_hints(getattr(records, kind))
            assert hints == {field["name"]: expected(field["type"]) for field in schema["fields"]}, kind


@dataclass(frozen=True)
class Reading:
    """A made-up record, whose second version has a further field."""

    sensor: str
    celsius: float = 20.0


def test_a_record_of_an_older_schema_is_read_as_the_newest_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sensor = {"name": "sensor", "type": "string"}
    celsius = {"name": "celsius", "type": "double", "default": 20.0}
    source = {"type": "record", "name": "Reading"}
    versions = made_up(tmp_path, {**source, "fields": [sensor]}, {**source, "fields": [sensor, celsius]})
    older, newer = versions["Reading"]
    assert readable(older.source, newer.source, {}, {}) is None
    out = io.BytesIO()
    out.write(MAGIC + older.fingerprint)
    fastavro.schemaless_writer(out, older.parsed, {"sensor": "roof"})
    written = out.getvalue()
    with pytest.raises(RecordError, match="unknown schema fingerprint"):
        decode(written)
    monkeypatch.setattr(codec, "schemas", lambda: versions)
    monkeypatch.setattr(codec, "schemas_by_fingerprint", codec.schemas_by_fingerprint.__wrapped__)
    monkeypatch.setattr(codec, "record_types", lambda: {"Reading": Reading})
    assert decode(written) == decode_as(Reading, written) == Reading("roof", 20.0)
    assert decode(encode(Reading("roof", 4.5))) == Reading("roof", 4.5)
    assert encode(Reading("roof", 4.5))[len(MAGIC) : HEADER_SIZE] == newer.fingerprint
    with pytest.raises(RecordError, match="bytes do not parse as Reading v1"):
        decode(written[:-1])
