"""Record keys: compact UTF-8 JSON arrays, partitioned as every Java client partitions them.

A consumer checks with `partition_of` that a record lies on the partition of its key.
"""

import json
from functools import lru_cache

from rollstream.topics.errors import RecordError


def encode_key(*parts: str | int) -> bytes:
    """Return the key of a record: `encode_key("env", "example")` is `b'["env","example"]'`.

    Raises RecordError for a text that UTF-8 cannot encode.
    """
    try:
        return json.dumps(parts, ensure_ascii=False, separators=(",", ":")).encode()
    except UnicodeEncodeError as error:
        raise RecordError(f"record key {parts} cannot be encoded as UTF-8: {error}") from error


def decode_key(key: bytes | None) -> tuple[str | int, ...]:
    """Return the parts of a key. Raises RecordError if the bytes are not a JSON array of texts and integers."""
    try:
        parts = json.loads(key or b"")
    except (ValueError, RecursionError) as error:
        raise RecordError(f"record key {(key or b'')[:100]!r} is not a JSON array: {error}") from error
    if not isinstance(parts, list) or any(type(part) not in (str, int) for part in parts):
        raise RecordError(f"record key {(key or b'')[:100]!r} is not a JSON array of texts and whole numbers")
    return tuple(parts)


def murmur2(data: bytes) -> int:
    """Return Kafka's 32-bit murmur2 (org.apache.kafka.common.utils.Utils.murmur2), as an unsigned integer."""
    mask = 0xFFFFFFFF
    length = len(data)
    value = 0x9747B28C ^ length
    whole = length & ~3
    for i in range(0, whole, 4):
        k = int.from_bytes(data[i : i + 4], "little") * 0x5BD1E995 & mask
        k = (k ^ (k >> 24)) * 0x5BD1E995 & mask
        value = (value * 0x5BD1E995 & mask) ^ k
    if length & 3:
        value = (value ^ int.from_bytes(data[whole:], "little")) * 0x5BD1E995 & mask
    value = (value ^ (value >> 13)) * 0x5BD1E995 & mask
    return value ^ (value >> 15)


@lru_cache(maxsize=65536)
def partition_of(key: bytes, partitions: int) -> int:
    """Return the partition that the Java default partitioner (librdkafka: murmur2) assigns to a key."""
    return (murmur2(key) & 0x7FFFFFFF) % partitions
