"""Batches carry the weight steps and times of rollouts, and the arrays in grouping.token_arrays, to the learner."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollstream.consumers.buffers.rollouts.rows import rollouts_of
from rollstream.consumers.grouping.makers.batch_maker import example_bytes, group_bytes
from rollstream.consumers.grouping.testing import GroupingTestDriver, example_rollout
from rollstream.consumers.learner.input.batch_selection import chosen_rows
from rollstream.topics.files.stored_arrays import StoredArrays
from rollstream.topics.files.stores import LocalStore
from rollstream.topics.records import NamedArray, RolloutMetadata, TrainingBatch
from rollstream.topics.wire.codec import encode
from rollstream.topics.wire.media import is_medium, media_arrays, media_of
from rollstream.topics.wire.rl_examples import ROUTED_EXPERTS as EXPERTS
from rollstream.topics.wire.rl_examples import (
    SAMPLING_MASK,
    SAMPLING_MASK_COUNTS,
    WEIGHT_VERSION,
    examples_of,
    media_of_rows,
    stamp_of,
)
from rollstream.topics.wire.validation import batch_problems
from tests.support.pairs import driver


def stamped(weight_step: int, timestamp: float) -> RolloutMetadata:
    return RolloutMetadata(worker_id="w", replica_id="infer-1", timestamp=timestamp, weight_step=weight_step)


def arrays(*values: int, experts: int = 0) -> dict[str, NamedArray]:
    """Weight versions of four tokens and, if `experts` is not 0, that many experts of each token."""
    named = {WEIGHT_VERSION: NamedArray.of(np.array(values, "<i8"))}
    if experts:
        named[EXPERTS] = NamedArray.of(np.arange(4 * experts, dtype="|u1").reshape(4, experts))
    return named


def mixed() -> tuple[GroupingTestDriver, TrainingBatch]:
    """A batch of four rows: one with versions, two with versions and experts (of two widths), and one with nothing.

    Experts need no entry in token_arrays.
    """
    d = driver(batch_rollouts=4, token_arrays=(WEIGHT_VERSION,))
    unnamed = {"entropy": NamedArray.of(np.zeros(4, "<f4"))}
    rows: list[dict[str, NamedArray]] = [
        {**arrays(-1, -1, 3, 4), **unnamed},
        arrays(-1, -1, 5, 5, experts=2),
        arrays(-1, -1, 6, 6, experts=3),
        {},
    ]
    for row, named in enumerate(rows):
        rollout = example_rollout(
            f"r{row}",
            float(row % 2),
            example_id=str(row // 2),
            token_arrays=named,
            metadata=stamped(row * 10, 1000.0 + row),
        )
        d.pipe(rollout)
    (batch,) = d.batches
    return d, batch


def test_each_row_has_the_arrays_and_stamps_of_its_rollout() -> None:
    _d, batch = mixed()
    assert batch_problems(batch) == []
    assert batch.weight_steps.tolist() == [0, 10, 20, 30]
    assert batch.timestamps.tolist() == [1000.0, 1001.0, 1002.0, 1003.0]
    named = [(entry.name, entry.array.dtype, entry.array.shape, entry.rows.tolist()) for entry in batch.token_arrays]
    assert named == [
        (EXPERTS, "|u1", (4, 2), [1]),
        (EXPERTS, "|u1", (4, 3), [2]),
        (WEIGHT_VERSION, "<i8", (12,), [0, 1, 2]),
    ]
    examples = examples_of(batch)
    assert [(e.weight_step, e.timestamp) for e in examples] == [(0, 1000.0), (10, 1001.0), (20, 1002.0), (30, 1003.0)]
    assert [set(e.token_arrays) for e in examples] == [
        {WEIGHT_VERSION},
        {WEIGHT_VERSION, EXPERTS},
        {WEIGHT_VERSION, EXPERTS},
        set(),
    ]
    assert examples[1].token_arrays[WEIGHT_VERSION].tolist() == [-1, -1, 5, 5]
    assert examples[2].token_arrays[EXPERTS].tolist() == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10, 11]]


def test_chosen_rows_keep_their_arrays_and_stamps_in_the_new_order() -> None:
    _d, batch = mixed()
    chosen = chosen_rows(batch, [3, 1])
    assert batch_problems(chosen) == []
    assert chosen.weight_steps.tolist() == [30, 10]
    nothing, second = examples_of(chosen)
    assert dict(nothing.token_arrays) == {}
    assert second.token_arrays[WEIGHT_VERSION].tolist() == [-1, -1, 5, 5]
    assert second.token_arrays[EXPERTS].shape == (4, 2)


def test_a_buffer_gets_rollouts_with_their_own_stamps() -> None:
    _d, batch = mixed()
    rollouts = [rollout for rollout, _advantage in rollouts_of(batch, lambda version: 77)]
    assert [rollout.metadata.weight_step for rollout in rollouts] == [0, 10, 20, 30]
    assert rollouts[1].token_arrays[WEIGHT_VERSION].array().tolist() == [-1, -1, 5, 5]
    assert rollouts[3].token_arrays == {}


def masked(*counts: int, first: int = 0) -> dict[str, NamedArray]:
    return {
        SAMPLING_MASK_COUNTS: NamedArray.of(np.array(counts, "<i4")),
        SAMPLING_MASK: NamedArray.of(np.arange(first, first + sum(counts), dtype="<i4")),
    }


@pytest.mark.parametrize("stored_rows", [(), (2,), (0, 2, 3)])
def test_ragged_masks_follow_their_rows(stored_rows: tuple[int, ...], tmp_path: Path) -> None:
    d, store = driver(batch_rollouts=4), StoredArrays(LocalStore(tmp_path), "arrays")
    masks: list[dict[str, NamedArray]] = [masked(0, 0, 3, 1), {}, masked(0, 0, 1, 2, first=50), masked(0, 0, 1, 1)]
    for row, named in enumerate(masks):
        large = {SAMPLING_MASK: store.put(named[SAMPLING_MASK])} if row in stored_rows else {}
        d.pipe(example_rollout(f"r{row}", float(row % 2), example_id=str(row // 2), token_arrays=named | large))
    (batch,) = d.batches
    assert batch_problems(batch) == []
    assert [row for row, example in enumerate(examples_of(batch)) if example.stored_arrays] == list(stored_rows)
    if 2 in stored_rows:
        place = next(number for number, entry in enumerate(batch.token_arrays) if entry.rows.tolist() == [2])
        short = replace(batch.token_arrays[place], array=replace(batch.token_arrays[place].array, shape=(4,)))
        wrong = (*batch.token_arrays[:place], short, *batch.token_arrays[place + 1 :])
        assert "sampling_mask has shape (4,)" in batch_problems(replace(batch, token_arrays=wrong))[0]
    # As a reader sees them that has fetched them.
    fetched = tuple(replace(entry, array=store.load(entry.array)) for entry in batch.token_arrays)
    batch = replace(batch, token_arrays=fetched)
    assert batch_problems(batch) == []
    kept = [example.token_arrays.get(SAMPLING_MASK) for example in examples_of(batch)]
    assert [None if each is None else each.tolist() for each in kept] == [[0, 1, 2, 3], None, [50, 51, 52], [0, 1]]
    chosen = chosen_rows(batch, [2, 1, 0])
    assert batch_problems(chosen) == []
    last, nothing, first = examples_of(chosen)
    assert (last.token_arrays[SAMPLING_MASK].tolist(), dict(nothing.token_arrays)) == ([50, 51, 52], {})
    assert first.token_arrays[SAMPLING_MASK_COUNTS].tolist() == [0, 0, 3, 1]
    held = [rollout.token_arrays for rollout, _advantage in rollouts_of(batch, lambda version: 77)]
    assert held == masks
    without = tuple(entry for entry in batch.token_arrays if entry.name == SAMPLING_MASK)
    assert "without sampling_mask_counts" in batch_problems(replace(batch, token_arrays=without))[0]


def test_the_time_of_a_row_is_its_own_until_its_group_sealed() -> None:
    d = driver(batch_rollouts=2)
    d.pipe(example_rollout("a", 1.0, metadata=stamped(-1, 2.0)), at_ms=1000)
    d.pipe(example_rollout("b", 0.0, metadata=stamped(4, 900.0)), at_ms=5000)
    (batch,) = d.batches
    assert [stamp_of(batch, row) for row in (0, 1)] == [(-1, 2.0), (4, 5.0)]


named_arrays = st.dictionaries(
    st.sampled_from(["a", "b", "\u00e9" * 30]),
    st.tuples(st.sampled_from(["<i8", "|u1", "<f2"]), st.lists(st.integers(0, 3), max_size=2)),
    max_size=3,
)


@given(st.lists(named_arrays, min_size=4, max_size=4))
def test_no_batch_takes_more_bytes_than_its_examples_count_for(rows: list[dict[str, tuple[str, list[int]]]]) -> None:
    d = driver(batch_rollouts=4, token_arrays=("a", "b", "\u00e9" * 30))
    for row, named in enumerate(rows):
        fields: dict[str, Any] = {
            name: NamedArray.of(np.zeros((4, *shape), dtype)) for name, (dtype, shape) in named.items()
        }
        d.pipe(example_rollout(f"r{row}", float(row % 2), example_id=str(row // 2), token_arrays=fields))
    (batch,) = d.batches
    assert batch_problems(batch) == []
    counted = sum(map(example_bytes, examples_of(batch))) + 2 * group_bytes("env", "0", "")
    # The rest of a batch is ids, numbers, metadata and digest.
    assert len(encode(batch)) <= counted + 400
    for row, example in zip(rows, examples_of(batch), strict=True):
        assert {name: (a.dtype.str, list(a.shape[1:])) for name, a in example.token_arrays.items()} == row


def test_a_batch_names_the_stored_arrays_of_its_rows_and_the_fold_reads_none() -> None:
    names = {row: f"20261130/{row:064x}" for row in range(3)}
    d = driver(batch_rollouts=4, token_arrays=(WEIGHT_VERSION, EXPERTS))
    for row in range(4):
        named = arrays(1, 1, 1, 1, experts=2 if row == 3 else 0)
        if row in names:
            # Two rows with one object, as equal arrays of a day have.
            named[EXPERTS] = NamedArray(dtype="|u1", shape=(4, 2), stored=names[row // 2])
        d.pipe(example_rollout(f"r{row}", float(row % 2), example_id=str(row // 2), token_arrays=named))
    (batch,) = d.batches
    assert batch_problems(batch) == []
    named_entries = [(e.name, e.array.stored, e.array.shape, e.rows.tolist()) for e in batch.token_arrays]
    assert named_entries == [
        (EXPERTS, "", (4, 2), [3]),
        (EXPERTS, names[0], (4, 2), [0]),
        (EXPERTS, names[0], (4, 2), [1]),
        (EXPERTS, names[1], (4, 2), [2]),
        (WEIGHT_VERSION, "", (16,), [0, 1, 2, 3]),
    ]
    examples = examples_of(batch)
    assert [set(e.stored_arrays) for e in examples] == [{EXPERTS}, {EXPERTS}, {EXPERTS}, set()]
    assert [set(e.token_arrays) for e in examples] == [{WEIGHT_VERSION}] * 3 + [{WEIGHT_VERSION, EXPERTS}]
    assert examples[1].stored_arrays[EXPERTS].stored == names[0]
    chosen = chosen_rows(batch, [2, 0, 2])
    assert batch_problems(chosen) == []
    assert [e.stored_arrays[EXPERTS].stored for e in examples_of(chosen)] == [names[1], names[0], names[1]]
    again = [rollout.token_arrays[EXPERTS].stored for rollout, _advantage in rollouts_of(batch, lambda _version: 0)]
    assert again == [names[0], names[0], names[1], ""]


@pytest.mark.parametrize("stores", [False, True])
def test_batches_carry_the_images_of_their_rows_in_order_and_chosen_rows_keep_them(
    stores: bool, tmp_path: Path
) -> None:
    d, store = driver(batch_rollouts=4), StoredArrays(LocalStore(tmp_path), "arrays")
    for row in range(4):
        images = [("image/png", bytes([row // 2, n])) for n in range(row)]
        named = media_arrays(images, [(n, n + 1) for n in range(row)], 4)
        if stores:
            named = {name: store.put(array) if is_medium(name) else array for name, array in named.items()}
        d.pipe(example_rollout(f"r{row}", float(row % 2), example_id=str(row // 2), token_arrays=named))
    (batch,) = d.batches
    assert batch_problems(batch) == []
    expected = [[(n, n + 1, bytes([row // 2, n])) for n in range(row)] for row in range(4)]
    for rows in (range(4), [3, 1, 3, 0]):
        chosen = chosen_rows(batch, list(rows))
        assert batch_problems(chosen) == []
        assert media_of_rows(chosen) == [example.media for example in examples_of(chosen)]
        media = [[medium._replace(array=store.load(medium.array)) for medium in row] for row in media_of_rows(chosen)]
        assert [[(m.start, m.stop, m.data) for m in row] for row in media] == [expected[row] for row in rows]
    named_objects = {array.stored for row in media_of_rows(batch) for _n, _t, array, *_span in row}
    assert len(named_objects) == (4 if stores else 1), "rows of a group share objects"
    again = [media_of(rollout.token_arrays) for rollout, _advantage in rollouts_of(batch, lambda _version: 0)]
    assert again == media_of_rows(batch)


def test_the_size_of_a_batch_counts_the_names_of_stored_arrays() -> None:
    d = driver(token_arrays=(EXPERTS,))
    stored = NamedArray(dtype="|u1", shape=(4, 10**6), stored=f"20261130/{0:064x}")
    for uid, reward in (("a", 1.0), ("b", 0.0)):
        d.pipe(example_rollout(uid, reward, token_arrays={EXPERTS: stored}))
    (batch,) = d.batches
    room = sum(example_bytes(e) - example_bytes(replace(e, stored_arrays={})) for e in examples_of(batch))
    assert len(encode(batch)) - len(encode(replace(batch, token_arrays=()))) <= room < 1000
