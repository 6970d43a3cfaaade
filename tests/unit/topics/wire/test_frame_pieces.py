"""A record joined from pieces has the bytes that the encoder writes."""

from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollstream.topics.records import TrainingBatch
from rollstream.topics.wire.codec import encode, schemas, values_of
from rollstream.topics.wire.frame_pieces import Piece, frame_pieces, number_bytes
from rollstream.topics.wire.rl_examples import batch_digest, digested, has_digest
from tests.strategies import any_record
from tests.support.batches import random_batch

SCHEMA = schemas()["TrainingBatch"][-1]


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


@given(batch=any_record(TrainingBatch), seed=st.integers(0, 99))
def test_a_batch_of_any_values_is_joined_to_the_bytes_that_the_encoder_writes(batch: TrainingBatch, seed: int) -> None:
    values = in_pieces(values_of(batch), Random(seed))
    assert b"".join(frame_pieces(SCHEMA)(values)) == encode(batch)


def test_the_digest_of_joined_bytes_is_that_of_the_batch() -> None:
    batch = random_batch(3)
    values = in_pieces(values_of(batch), Random(1))
    frame, digest = digested(b"".join(frame_pieces(SCHEMA, without=("digest",))(values)))
    assert (frame, digest) == (encode(batch), batch_digest(batch))
    assert has_digest(frame, digest)


@pytest.mark.parametrize("record", ["Rollout", "JournalRecord"])
def test_a_schema_with_other_types_is_refused(record: str) -> None:
    with pytest.raises(KeyError):
        frame_pieces(schemas()[record][-1])


@pytest.mark.parametrize("number", [0, -1, 1, 63, 64, -64, -65, 2**31, -(2**31), 2**63 - 1, -(2**63)])
def test_numbers_are_written_in_zigzag(number: int) -> None:
    written, value, shift = number_bytes(number), 0, 0
    for byte in written:
        value |= (byte & 127) << shift
        shift += 7
    assert (value >> 1) ^ -(value & 1) == number
    assert [byte > 127 for byte in written] == [True] * (len(written) - 1) + [False]
