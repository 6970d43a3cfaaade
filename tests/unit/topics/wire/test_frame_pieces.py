"""A record joined from pieces has the bytes that fastavro writes."""

import dataclasses
import io
from collections.abc import Callable
from functools import cache
from random import Random
from typing import Any, cast

import fastavro
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollstream.consumers.grouping.testing import example_rollout
from rollstream.topics.errors import RecordError
from rollstream.topics.records import NamedArray, Turn
from rollstream.topics.wire.codec import MAGIC, RECORD_TYPES, Schema, encode, schemas, schemas_by_fingerprint, values_of
from rollstream.topics.wire.frame_pieces import (
    WRITE_ERRORS,
    FramePieces,
    Piece,
    frame_pieces,
    number_bytes,
    record_pieces,
)
from rollstream.topics.wire.rl_examples import batch_digest, digested, has_digest
from tests.strategies import any_record
from tests.support.batches import random_batch

EXAMPLES = settings().max_examples // 4


def header(schema: Schema) -> bytes:
    return MAGIC + schema.fingerprint


@cache
def writer_of(schema_fingerprint: bytes, write_pieces: Callable[..., FramePieces]) -> FramePieces:
    return write_pieces(schemas_by_fingerprint()[schema_fingerprint].source, MAGIC + schema_fingerprint)


def by_fastavro(record: Any) -> bytes:
    schema = schemas()[type(record).__name__][-1]
    out = io.BytesIO()
    fastavro.schemaless_writer(out, schema.parsed, values_of(record))
    return header(schema) + out.getvalue()


def in_pieces(value: Any, random: Random) -> Any:
    """The value with each of its arrays cut into slices, some of them empty."""
    if isinstance(value, dict):
        return {name: in_pieces(item, random) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [in_pieces(item, random) for item in value]
    if isinstance(value, np.ndarray):
        value = value.tobytes()
    if not isinstance(value, bytes):
        return value
    cuts = sorted(random.randint(0, len(value)) for _ in range(random.randint(0, 3)))
    spans = zip([0, *cuts], [*cuts, len(value)], strict=True)
    slices: list[Piece] = [memoryview(value)[begin:end] for begin, end in spans]
    return slices


@pytest.mark.parametrize("kind", RECORD_TYPES)
@settings(max_examples=EXAMPLES)
@given(data=st.data(), seed=st.integers(0, 99))
def test_a_record_of_any_values_is_joined_to_the_bytes_that_fastavro_writes(
    kind: type, data: st.DataObject, seed: int
) -> None:
    record, fingerprint = data.draw(any_record(kind)), schemas()[kind.__name__][-1].fingerprint
    expected = by_fastavro(record)
    assert b"".join(writer_of(fingerprint, record_pieces)(record)) == expected
    assert b"".join(writer_of(fingerprint, frame_pieces)(in_pieces(values_of(record), Random(seed)))) == expected


ODD: dict[str, Any] = {
    "a number of numpy": {"group_size": np.int64(3), "policy_version": np.int32(70)},
    "a large number of numpy": {"policy_version": np.uint32(2**31 + 5)},
    "a truth for a number": {"group_size": True},
    "a number for a truth": {"truncated": 2},
    "a whole reward": {"reward": 1},
    "a reward of numpy": {"reward": np.float64(0.5)},
    "a reward as a text": {"reward": "nan"},
    "a text for a number": {"group_size": "3"},
    "a fraction for a number": {"group_size": 2.5},
    "a number of 65 bits": {"policy_version": 2**64, "highest_version": 2**64},
    "half of a character": {"uid": "\ud800"},
    "bytes for a text": {"uid": b"uid"},
    "an unknown symbol": {"logprobs_mode": "cooked"},
    "an array of another type": {"tokens": np.arange(4)},
    "an array of other bytes": {"tokens": np.arange(4).astype(">i4")},
    "every other number of an array": {"tokens": np.arange(8, dtype="<i4")[::2]},
    "an array of two dimensions": {"tokens": np.zeros((2, 2), "<i4")},
    "the bytes of an array": {"tokens": np.arange(4, dtype="<i4").tobytes()},
    "a list for an array": {"tokens": [1, 2, 3, 4]},
    "a list of turns": {"turns": [Turn(role="user", text="hi")]},
    "turns that are none": {"turns": ("user",)},
    "no turns": {"turns": None},
    "numbers for bytes": {"token_arrays": {"x": NamedArray(dtype="<i4", shape=(4,), data=cast(Any, np.arange(4)))}},
    "an array of bytes for bytes": {"token_arrays": {"x": NamedArray(dtype="|u1", shape=(4,), data=bytearray(4))}},
    "a list for a mapping": {"extra": [("a", "b")]},
    "a number as a name": {"extra": {1: "b"}},
}


@pytest.mark.parametrize("fields", ODD.values(), ids=ODD.keys())
def test_a_value_of_another_type_is_written_or_refused_as_fastavro_does(fields: dict[str, Any]) -> None:
    rollout = dataclasses.replace(example_rollout("a"), **fields)
    try:
        expected = by_fastavro(rollout)
    except Exception:
        with pytest.raises(RecordError, match=r"a Rollout does not fit its schema|an array has dtype"):
            encode(rollout)
        schema = schemas()["Rollout"][-1]
        with pytest.raises(WRITE_ERRORS):
            b"".join(record_pieces(schema.source, header(schema))(rollout))
    else:
        assert encode(rollout) == expected


def test_the_digest_of_joined_bytes_is_that_of_the_batch() -> None:
    batch, schema = random_batch(3), schemas()["TrainingBatch"][-1]
    values = in_pieces(values_of(batch), Random(1))
    frame, digest = digested(b"".join(frame_pieces(schema.source, header(schema), without=("digest",))(values)))
    assert (frame, digest) == (encode(batch), batch_digest(batch))
    assert has_digest(frame, digest)


@pytest.mark.parametrize("number", [0, -1, 1, 63, 64, -64, -65, 2**31, -(2**31), 2**63 - 1, -(2**63)])
def test_numbers_are_written_in_zigzag(number: int) -> None:
    written, value, shift = number_bytes(number), 0, 0
    for byte in written:
        value |= (byte & 127) << shift
        shift += 7
    assert (value >> 1) ^ -(value & 1) == number
    assert [byte > 127 for byte in written] == [True] * (len(written) - 1) + [False]
