"""Encodes and decodes records: Avro in single-object encoding (0xC3 0x01 and the schema's fingerprint).

Readers resolve older writers' schemas, which the package contains. Given any bytes, `decode` either returns a record or
raises RecordError; decoded arrays are read-only views of the bytes.

The five bytes of a schema registry may precede a frame (`framed_for_registry`); every function here accepts both forms.
The schema id in these bytes is for other programs. Readers of rollstream take the schema from the fingerprint in the
frame, so a record means the same with and without a registry.

A signature may follow a frame (`topics.signatures`); `decode` ignores it.
"""

import dataclasses
import io
import json
import typing
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast

import fastavro
import fastavro.read
import fastavro.write
import numpy as np
from fastavro.read import SchemaResolutionError
from fastavro.schema import fingerprint, to_parsing_canonical_form

from rollstream.topics import records
from rollstream.topics.errors import RecordError, brief
from rollstream.topics.wire.frame_pieces import WRITE_ERRORS, FramePieces, record_pieces

if TYPE_CHECKING:
    from importlib.resources.abc import Traversable

MAGIC = b"\xc3\x01"
HEADER_SIZE = len(MAGIC) + 8
REGISTRY_MAGIC = b"\x00"
REGISTRY_PREFIX_SIZE = len(REGISTRY_MAGIC) + 4
"""Bytes before a frame in the wire format of schema registries: a zero, and the id of the schema in big-endian."""
SIGNATURE_MAGIC = b"\xc3\x53"
SIGNATURE_SIZE = len(SIGNATURE_MAGIC) + 64
"""Bytes after a signed frame: the magic and an Ed25519 signature."""
RECORD_TYPES: tuple[type, ...] = (
    records.Rollout,
    records.GroupCancelled,
    records.Mark,
    records.TrainingBatch,
    records.BatchIndexEntry,
    records.JournalRecord,
    records.LearnerStep,
    records.PolicyManifest,
    records.Metrics,
    records.ExcludedBatch,
    records.SkippedOffset,
    records.PausedPartition,
    records.RetiredLearner,
    records.ForkedLearner,
    records.MixtureState,
    records.DesiredProcesses,
    records.EvaluationRequest,
    records.StopRequest,
    records.DrainRequest,
    records.MixtureWeight,
    records.PausedEnvironment,
    records.RunSupervisor,
    records.RequestAnswer,
    records.RolloutBatch,
    records.TrajectoryRecord,
    records.ModelCall,
    records.SessionEvent,
    records.RescoredRollout,
    records.SampleField,
    records.SamplesCleared,
    records.TokenizerPart,
)
_SHORT_BYTES = 4096
"""Size up to which `bytes.translate` is as fast as numpy."""
PARSE_ERRORS = (EOFError, ValueError, TypeError, LookupError, OverflowError, SchemaResolutionError)
"""What fastavro raises for bytes that do not fit a sound schema. Any other error is a mistake of ours or a lack of
memory, and says nothing about the bytes."""
R = TypeVar("R")


def _read_ndarray(data: bytes, schema: Any, _reader: object = None) -> Any:
    # numpy counts, indexes and hashes a bool array inconsistently if one of its bytes is neither 0 nor 1.
    if schema["dtype"] == "|b1" and not _all_bools(data):
        raise RecordError("an array of bools holds a byte that is neither 0 nor 1")
    return np.frombuffer(data, schema["dtype"])


def _all_bools(data: bytes) -> bool:
    """Whether all bytes are 0 or 1."""
    # numpy releases the interpreter lock for more than 500 elements. In a process with other busy threads, waiting for
    # the lock takes ten times as long as the check of a usual mask.
    if len(data) <= _SHORT_BYTES:
        return not data.translate(None, b"\0\1")
    return bool(np.maximum.reduce(np.frombuffer(data, "|u1")) <= 1)


def _write_ndarray(array: Any, schema: Any, *_: object) -> bytes:
    return array if isinstance(array, bytes) else column_bytes(array, schema["dtype"])


def column_bytes(array: Any, dtype: str) -> bytes:
    """Return the bytes of an array for a field of this dtype. Raises RecordError if it does not fit."""
    if array.dtype != dtype or array.ndim != 1:
        raise RecordError(
            f"an array has dtype {array.dtype.str} and shape {array.shape} instead of dtype {dtype} and one "
            f"dimension; convert it with numpy.asarray(x, {dtype!r})"
        )
    return cast(bytes, array.tobytes())


fastavro.read.LOGICAL_READERS["bytes-ndarray"] = _read_ndarray
fastavro.write.LOGICAL_WRITERS["bytes-ndarray"] = _write_ndarray


class Schema(NamedTuple):
    """One version of a record's schema."""

    record: str
    version: int
    source: dict[str, Any]
    parsed: Any
    fingerprint: bytes


@cache
def schemas() -> dict[str, tuple[Schema, ...]]:
    """Return every schema in the package, by record name, oldest version first."""
    from importlib import resources  # Imported late: it takes a tenth of the core's import budget.

    return schemas_in(resources.files("rollstream.topics").joinpath("schemas"))


def schemas_in(folder: "Traversable") -> dict[str, tuple[Schema, ...]]:
    """Return the schemas of a folder, by record name, oldest version first.

    Raises ValueError for two schemas with one fingerprint: readers could not tell which one wrote a frame.
    """
    by_name: dict[str, list[Schema]] = {}
    fingerprints: set[bytes] = set()
    for file in folder.iterdir():
        if not file.name.endswith(".avsc"):
            continue
        source = json.loads(file.read_text(encoding="utf-8"))
        version = int(file.name.split(".")[-2].removeprefix("v"))
        digest = bytes.fromhex(fingerprint(to_parsing_canonical_form(source), "CRC-64-AVRO"))
        if digest in fingerprints:
            raise ValueError(f"{file.name} has the fingerprint of another schema; change more than docs and defaults")
        fingerprints.add(digest)
        parsed = fastavro.parse_schema(source)
        by_name.setdefault(source["name"], []).append(Schema(source["name"], version, source, parsed, digest))
    return {name: tuple(sorted(versions, key=lambda s: s.version)) for name, versions in by_name.items()}


@cache
def schemas_by_fingerprint() -> dict[bytes, Schema]:
    return {schema.fingerprint: schema for versions in schemas().values() for schema in versions}


@cache
def record_types() -> dict[str, type]:
    return {cls.__name__: cls for cls in RECORD_TYPES}


def _tuple_of(item: Any) -> Callable[[Any], Any]:
    if not dataclasses.is_dataclass(item):
        return tuple
    build_item = _builder(cast(type, item))
    return lambda values: tuple(map(build_item, values))


def _mapping_of(item: Any) -> Callable[[Any], Any]:
    build_item = _builder(cast(type, item))
    return lambda values: {key: build_item(value) for key, value in values.items()}


@cache
def _builder(cls: type) -> Callable[[dict[str, Any]], Any]:
    """Return a function from fastavro's dict to `cls`; it converts only the fields that need conversion."""
    conversions: list[tuple[str, Callable[[Any], Any]]] = []
    for name, hint in typing.get_type_hints(cls).items():
        origin, args = typing.get_origin(hint), typing.get_args(hint)
        if dataclasses.is_dataclass(hint):
            conversions.append((name, _builder(cast(type, hint))))
        elif origin is tuple:
            conversions.append((name, _tuple_of(args[0])))
        elif origin is not None and dataclasses.is_dataclass(args[-1]):
            conversions.append((name, _mapping_of(args[-1])))

    def build(values: dict[str, Any]) -> Any:
        for name, convert in conversions:
            values[name] = convert(values[name])
        # The schema provides every field. __init__ of a frozen dataclass would set them one by one, which takes five
        # times as long.
        record: Any = object.__new__(cls)
        object.__setattr__(record, "__dict__", values)
        return record

    return build


def _field_flattener(hint: Any) -> Callable[[Any], Any] | None:
    """Return a function from a field's value to the form fastavro takes; None if the value is in that form already."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if dataclasses.is_dataclass(hint):
        return _flattener(cast(type, hint))
    if origin is tuple and dataclasses.is_dataclass(args[0]):
        flatten = _flattener(cast(type, args[0]))
        return lambda values: [flatten(value) for value in values]
    if origin is not None and args and dataclasses.is_dataclass(args[-1]):
        flatten = _flattener(cast(type, args[-1]))
        return lambda values: {key: flatten(value) for key, value in values.items()}
    return None


@cache
def _flattener(cls: type) -> Callable[[Any], Any]:
    """Return a function from a `cls` to fastavro's dict; arrays, strings and numbers stay as they are."""
    flatteners = {
        name: flatten_field
        for name, hint in typing.get_type_hints(cls).items()
        if (flatten_field := _field_flattener(hint)) is not None
    }

    def flatten(record: Any) -> dict[str, Any]:
        values = dict(record.__dict__)
        for name, flatten_field in flatteners.items():
            values[name] = flatten_field(values[name])
        return values

    return flatten


def begin_of(value: bytes) -> int:
    """Return where the frame begins: after the prefix of a schema registry, if there is one."""
    prefixed = value.startswith(REGISTRY_MAGIC) and value.startswith(MAGIC, REGISTRY_PREFIX_SIZE)
    return REGISTRY_PREFIX_SIZE if prefixed else 0


def frame_of(value: bytes) -> bytes:
    """Return a value without the prefix of a schema registry, if it has one."""
    return value[begin_of(value) :]


def is_frame(value: bytes | None) -> bool:
    """Whether a value begins like a rollstream record of any release, with or without a registry's prefix."""
    return value is not None and value.startswith(MAGIC, begin_of(value))


def schema_of(value: bytes | None) -> Schema | None:
    """Return the schema that the first bytes of a value name, without decoding the value; None if it is unknown."""
    if value is None or not is_frame(value):
        return None
    begin = begin_of(value)
    return schemas_by_fingerprint().get(value[begin + len(MAGIC) : begin + HEADER_SIZE])


def kind_of(value: bytes | None) -> str | None:
    """Return the name of the record type of a value, as `schema_of` finds it."""
    schema = schema_of(value)
    return None if schema is None else schema.record


def leading_text(value: bytes) -> bytes:
    """Return the UTF-8 bytes of the first field of a frame, a string, without decoding the rest.

    Raises RecordError if the frame ends within the field.
    """
    at = begin_of(value) + HEADER_SIZE
    size = shift = 0
    while at < len(value) and shift < 35:
        byte = value[at]
        size |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            # In Avro's zigzag encoding, even numbers are sizes; odd numbers would be negative.
            if size & 1 or at + (size >> 1) > len(value):
                break
            return value[at : at + (size >> 1)]
    raise RecordError("a frame ends within its first field")


def framed_for_registry(value: bytes, schema_id: int) -> bytes:
    """Return a frame, given with or without a registry's prefix, in a registry's wire format with this schema id."""
    return REGISTRY_MAGIC + schema_id.to_bytes(4, "big") + frame_of(value)


def signed_frame(frame: bytes, signature: bytes) -> bytes:
    """Append a signature of 64 bytes to a frame."""
    return frame + SIGNATURE_MAGIC + signature


def frame_and_signature(value: bytes) -> tuple[bytes, bytes | None]:
    """Return the bytes of a value that its signature covers, and the signature, which is None if there is none.

    The prefix of a schema registry is not covered, because it may be added or removed.
    """
    frame = frame_of(value)
    if frame[-SIGNATURE_SIZE : -SIGNATURE_SIZE + len(SIGNATURE_MAGIC)] != SIGNATURE_MAGIC:
        return frame, None
    return frame[:-SIGNATURE_SIZE], frame[-SIGNATURE_SIZE + len(SIGNATURE_MAGIC) :]


def encode(record: object) -> bytes:
    """Encode a record with its newest schema.

    Raises RecordError if a value does not fit the schema (wrong dtype, missing field).
    """
    cls: Any = type(record)
    name = cls.__name__
    versions = schemas().get(name)
    if versions is None:
        raise RecordError(f"{name} is not a record of rollstream; records are {', '.join(sorted(schemas()))}")
    schema = versions[-1]
    with suppress(*WRITE_ERRORS):
        return b"".join(_writer(schema.fingerprint)(record))
    # fastavro writes or refuses the values of which the writer is not sure.
    out = io.BytesIO()
    out.write(MAGIC + schema.fingerprint)
    try:
        fastavro.schemaless_writer(out, schema.parsed, _flattener(cls)(record))
    except (ValueError, TypeError, AttributeError, KeyError, OverflowError) as error:
        raise RecordError(f"a {name} does not fit its schema: {error}") from error
    return out.getvalue()


@cache
def _writer(schema_fingerprint: bytes) -> FramePieces:
    return record_pieces(schemas_by_fingerprint()[schema_fingerprint].source, MAGIC + schema_fingerprint)


def decode(data: bytes | None) -> Any:
    """Decode a frame, with or without a registry's prefix, into the newest dataclass of its record.

    Raises RecordError for a value that is not a frame, an unknown fingerprint, bytes that do not parse, or extra bytes.
    """
    schema = schema_of(data)
    body = 0 if data is None else begin_of(data) + HEADER_SIZE
    if data is None or schema is None:
        if data is None or not is_frame(data) or len(data) < body:
            raise RecordError(_not_a_frame(data))
        fingerprint_text = data[body - HEADER_SIZE + len(MAGIC) : body].hex()
        raise RecordError(
            f"unknown schema fingerprint {fingerprint_text}; upgrade the reader, or find the foreign writer"
        )
    newest = schemas()[schema.record][-1]
    stream = io.BytesIO(data)
    stream.seek(body)
    # The two-argument form skips resolution, which costs time when the writer is current.
    resolve = None if newest is schema else newest.parsed
    try:
        values = fastavro.schemaless_reader(stream, schema.parsed, resolve)
    except PARSE_ERRORS as error:
        raise RecordError(f"bytes do not parse as {schema.record} v{schema.version} ({brief(error)})") from error
    if stream.tell() != len(data) and not is_signature(data[stream.tell() :]):
        raise RecordError(f"{len(data) - stream.tell()} bytes follow the {schema.record}")
    return _builder(record_types()[schema.record])(cast(dict[str, Any], values))


def is_signature(rest: bytes) -> bool:
    """Whether the bytes after a record have the form of a signature."""
    return len(rest) == SIGNATURE_SIZE and rest.startswith(SIGNATURE_MAGIC)


def _not_a_frame(data: bytes | None) -> str:
    if data is not None and len(data) > REGISTRY_PREFIX_SIZE and data[:1] == REGISTRY_MAGIC:
        number = int.from_bytes(data[1:REGISTRY_PREFIX_SIZE], "big")
        return (
            f"it begins like a record of a registry (schema {number}) but lacks the header of rollstream's schemas; "
            "write it with the schema that `rollstream topics apply` registered, with its first field at the default"
        )
    start = data[:HEADER_SIZE].hex(" ") if data else repr(data)
    return f"not an Avro single-object frame (starts with {start}); encode records with rollstream.encode"


def values_of(record: object) -> dict[str, Any]:
    """Return a record in the form that fastavro's writers accept, for example to write container files."""
    cls: Any = type(record)
    return cast(dict[str, Any], _flattener(cls)(record))


def record_of(cls: type[R], values: Any) -> R:
    """Build a record from values that fastavro read with the newest schema. Raises RecordError if they do not fit."""
    try:
        fields = {field: values[field] for field in typing.get_type_hints(cls)}
        return cast(R, _builder(cast(Any, cls))(fields))
    except (KeyError, TypeError, AttributeError) as error:
        raise RecordError(f"not a {cls.__name__}: {brief(error)}") from error


def decode_as(cls: type[R], data: bytes | None) -> R:
    """Decode a frame that must hold a `cls`. Raises RecordError if it does not."""
    schema = schema_of(data)
    if schema is not None and not issubclass(record_types()[schema.record], cls):
        # Not decoded first: records of other types may take much more memory than these.
        raise RecordError(f"the record is of type {schema.record} instead of {cls.__name__}")
    return cast(R, decode(data))
