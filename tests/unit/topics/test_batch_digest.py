"""The digest of a batch depends on each of its fields."""

from dataclasses import fields, replace
from typing import Any, get_args, get_type_hints

import numpy as np
import pytest

from rollstream.topics.records import BatchTokenArray, NamedArray, TrainingBatch
from rollstream.topics.wire.codec import encode
from rollstream.topics.wire.rl_examples import batch_digest, has_digest
from tests.support.batches import random_batch

BATCH = random_batch(3)
FIELDS = [field.name for field in fields(BATCH) if field.name not in ("digest", "token_arrays")]


def changed(value: Any) -> Any:
    """Another value of the same type."""
    if isinstance(value, np.ndarray):
        return (
            np.append(value, np.ones(1, value.dtype))
            if not len(value)
            else np.where(np.arange(len(value)) == 0, ~value if value.dtype == bool else value + 1, value).astype(
                value.dtype
            )
        )
    if isinstance(value, tuple):
        return value[1:] if value else ("more",)
    if value in get_args(get_type_hints(TrainingBatch)["cut"]):
        return "drain"
    return value + ("x" if isinstance(value, str) else 1)


@pytest.mark.parametrize("name", FIELDS)
def test_a_digest_depends_on_each_field(name: str) -> None:
    other = replace(BATCH, **{name: changed(getattr(BATCH, name))})
    assert batch_digest(other) != batch_digest(BATCH)


def test_a_digest_depends_on_each_part_of_a_token_array() -> None:
    entry = BatchTokenArray(name="x", rows=np.arange(2, dtype="<i4"), array=NamedArray.of(np.zeros(4, "<f4")))
    others = (
        replace(entry, name="y"),
        replace(entry, rows=entry.rows[:1]),
        replace(entry, array=replace(entry.array, dtype="<i4")),
        replace(entry, array=NamedArray.of(np.ones(4, "<f4"))),
        replace(entry, array=replace(entry.array, stored=f"20261130/{'ab' * 32}")),
    )
    carried = [(), (entry,), *((other,) for other in others)]
    assert len({batch_digest(replace(BATCH, token_arrays=entries)) for entries in carried}) == len(carried)


def test_a_digest_does_not_depend_on_the_one_a_batch_carries() -> None:
    assert isinstance(BATCH, TrainingBatch)
    assert batch_digest(replace(BATCH, digest="another")) == batch_digest(BATCH)


def test_the_bytes_of_a_record_show_the_digest_that_its_batch_has_and_carries() -> None:
    frame = encode(replace(BATCH, digest=batch_digest(BATCH)))
    assert has_digest(frame, batch_digest(BATCH))
    assert not has_digest(frame, "0" * 64)
    assert not has_digest(encode(replace(BATCH, digest="0" * 64)), "0" * 64)
    for at in (0, 20, len(frame) // 2, len(frame) - 70):
        assert not has_digest(frame[:at] + bytes([frame[at] ^ 1]) + frame[at + 1 :], batch_digest(BATCH))
