"""The digest of a batch depends on each of its fields."""

from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest

from rollstream.topics.records import TrainingBatch
from rollstream.topics.rl_examples import batch_digest
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
    return value + ("x" if isinstance(value, str) else 1)


@pytest.mark.parametrize("name", FIELDS)
def test_a_digest_depends_on_each_field(name: str) -> None:
    other = replace(BATCH, **{name: changed(getattr(BATCH, name))})
    assert batch_digest(other) != batch_digest(BATCH)


def test_a_digest_does_not_depend_on_the_one_a_batch_carries() -> None:
    assert isinstance(BATCH, TrainingBatch)
    assert batch_digest(replace(BATCH, digest="another")) == batch_digest(BATCH)
