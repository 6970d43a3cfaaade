"""Evidence of the auditor: the records of a run's topics, read and decoded without any code of the application.

Schemas come from the files under topics/schemas; frames, fingerprints and arrays are worked out here once more.
"""

import contextlib
import io
import json
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache, lru_cache
from typing import Any

import fastavro
import numpy as np
from confluent_kafka import Consumer, KafkaError, TopicPartition
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from fastavro.schema import to_parsing_canonical_form

from tests.support.paths import ROOT

SCHEMAS = ROOT / "topics" / "schemas"
TOPICS = ("rollouts", "batches", "batch-index", "journal", "dead-letters")
_SIGNED, _SIGNED_BYTES = b"\xc3\x53", 66
"""Behind a signed frame: two bytes, and a signature of 64."""
_POLYNOMIAL = 0xC15D213AA4D7A795


@dataclass(frozen=True)
class Raw:
    """A record as it lies in a topic."""

    partition: int
    offset: int
    timestamp_ms: int
    key: bytes | None
    value: bytes | None
    headers: dict[str, bytes | None] = field(default_factory=dict)


@dataclass
class Evidence:
    """Every committed record of a run that has come to rest, and where its consumers say they are."""

    topics: dict[str, list[Raw]]
    """By short name, in offset order within each partition."""
    committed: dict[int, int]
    """Committed offset of the grouping consumers, by partition of rollouts."""

    def by_partition(self, topic: str) -> dict[int, list[Raw]]:
        actual: dict[int, list[Raw]] = defaultdict(list)
        for raw in self.topics[topic]:
            actual[raw.partition].append(raw)
        return actual


@dataclass(frozen=True)
class Decoded:
    """An Avro record: its name and its fields, arrays as numpy arrays."""

    name: str
    fields: dict[str, Any]

    def __getitem__(self, name: str) -> Any:
        return self.fields[name]


def collect(bootstrap_servers: str, run: str, *, group: str = "grouper", timeout_s: float = 60.0) -> Evidence:
    """Read a run's topics to their ends. Nobody may write to them meanwhile, or the places do not fit together."""
    consumer = Consumer(
        {
            "bootstrap.servers": bootstrap_servers,
            "group.id": f"{run}.{group}",
            "enable.auto.commit": "false",
            "enable.partition.eof": "true",
            "isolation.level": "read_committed",
            "auto.offset.reset": "error",
            # The reader waits only for the ends of quiet topics.
            "fetch.wait.max.ms": 10,
            "fetch.queue.backoff.ms": 10,
            "fetch.max.bytes": 64 * 1024 * 1024,
            # This also bounds decompressed data: this reader can read what the application's must pass over.
            "receive.message.max.bytes": 1024 * 1024 * 1024,
            "max.partition.fetch.bytes": 32 * 1024 * 1024,
        }
    )
    try:
        topics = {name: sorted(_read(consumer, f"{run}.{name}", timeout_s), key=_place) for name in TOPICS}
        count = _partitions(consumer, f"{run}.rollouts")
        wanted = [TopicPartition(f"{run}.rollouts", number) for number in range(count)]
        committed = {tp.partition: tp.offset for tp in consumer.committed(wanted, 30.0)}
    finally:
        consumer.close()
    return Evidence(topics, committed)


def _place(raw: Raw) -> tuple[int, int]:
    return raw.partition, raw.offset


def _partitions(consumer: Consumer, topic: str) -> int:
    return len(consumer.list_topics(topic, timeout=300).topics[topic].partitions)


def _read(consumer: Consumer, topic: str, timeout_s: float) -> Iterator[Raw]:
    pending = set(range(_partitions(consumer, topic)))
    consumer.assign([TopicPartition(topic, number, 0) for number in pending])
    deadline = time.monotonic() + timeout_s
    while pending:
        assert time.monotonic() < deadline, f"{topic} is not at its end within {timeout_s:g} s: {pending}"
        for message in consumer.consume(500, 0.1):
            error = message.error()
            if error is None:
                yield Raw(
                    message.partition() or 0,
                    message.offset() or 0,
                    message.timestamp()[1],
                    message.key(),
                    message.value(),
                    dict(message.headers() or []),
                )
            elif error.code() == KafkaError._PARTITION_EOF:
                pending.discard(message.partition() or 0)
            else:
                assert error.retriable(), f"{topic}: {error}"


# ---------------------------------------------------------------------- Avro


@lru_cache(512)
def decode(value: bytes | None) -> Decoded | None:
    """The record in an Avro single-object frame, with or without a registry's prefix before and a signature behind it;
    None for anything else."""
    if value is not None and value[:1] == b"\0" and value[5:7] == b"\xc3\x01":
        value = value[5:]
    if value is None or value[:2] != b"\xc3\x01" or value[2:10] not in _schemas():
        return None
    source, parsed = _schemas()[value[2:10]]
    stream = io.BytesIO(value[10:])
    try:
        fields = _with_arrays(source, fastavro.schemaless_reader(stream, parsed, None))
    except Exception:  # bytes of unknown origin can fail anywhere in the parser
        return None
    rest = stream.read()
    if rest and (len(rest), rest[:2]) != (_SIGNED_BYTES, _SIGNED):
        return None
    return Decoded(source["name"], fields)


def signed_by(value: bytes | None, keys: Iterable[str], context: bytes) -> bool:
    """Whether one of these public keys (hexadecimal) signed a record for a use, by Ed25519 over context and frame."""
    if value is None or value[-_SIGNED_BYTES:][:2] != _SIGNED:
        return False
    frame, signature = value[:-_SIGNED_BYTES], value[-64:]
    if frame[:1] == b"\0" and frame[5:7] == b"\xc3\x01":
        frame = frame[5:]
    for key in keys:
        with contextlib.suppress(InvalidSignature):
            Ed25519PublicKey.from_public_bytes(bytes.fromhex(key)).verify(signature, context + frame)
            return True
    return False


@cache
def _schemas() -> dict[bytes, tuple[dict[str, Any], Any]]:
    """Schemas by fingerprint, in the little-endian bytes of a frame."""
    collected = {}
    for file in sorted(SCHEMAS.glob("*.avsc")):
        source = json.loads(file.read_text(encoding="utf-8"))
        collected[fingerprint(source)] = (source, fastavro.parse_schema(_plain(source), named_schemas={}))
    return collected


def fingerprint(schema: dict[str, Any]) -> bytes:
    """CRC-64-AVRO of the parsing canonical form (Avro specification, "Schema Fingerprints"), little-endian."""
    crc = _POLYNOMIAL
    for byte in to_parsing_canonical_form(schema).encode():
        crc = (crc >> 8) ^ _table()[(crc ^ byte) & 0xFF]
    return crc.to_bytes(8, "little")


@cache
def _table() -> list[int]:
    table = []
    for number in range(256):
        crc = number
        for _ in range(8):
            crc = (crc >> 1) ^ (_POLYNOMIAL & -(crc & 1))
        table.append(crc)
    return table


def _plain(schema: Any) -> Any:
    """The schema without logical types, so that readers registered elsewhere change nothing."""
    if isinstance(schema, dict):
        return {key: _plain(value) for key, value in schema.items() if key not in ("logicalType", "dtype")}
    return [_plain(item) for item in schema] if isinstance(schema, list) else schema


def _with_arrays(schema: Any, value: Any) -> Any:
    """Bytes that the schema calls arrays, as arrays."""
    if not isinstance(schema, dict):
        return value
    if schema["type"] == "record":
        return {field["name"]: _with_arrays(field["type"], value[field["name"]]) for field in schema["fields"]}
    if schema["type"] == "array":
        return [_with_arrays(schema["items"], item) for item in value]
    if schema["type"] == "bytes" and "dtype" in schema:
        return np.frombuffer(value, schema["dtype"])
    return value
