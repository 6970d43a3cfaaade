"""Packing loses nothing, repeats nothing, and gives the same arrays for the same rollouts."""

from collections.abc import Sequence
from dataclasses import replace

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollstream.consumers.learner.objective import LossConfig
from rollstream.consumers.learner.training.bin_packing import layout
from rollstream.consumers.learner.training.packing import (
    PackedBatch,
    PackedStep,
    TrainingSequence,
    pack,
    sequences_of,
)
from rollstream.topics.errors import ConfigurationError
from tests.support.batches import random_batch

ROWS, LENGTH, BUCKETS = 3, 16, (4, 8)
lengths = st.lists(st.integers(1, LENGTH), max_size=40)


def sequence(length: int, first_token: int = 1) -> TrainingSequence:
    """A sequence whose tokens tell their place; the mask includes the first token, where `pack` must clear it."""
    tokens = np.arange(first_token, first_token + length, dtype=np.int32)
    return TrainingSequence(
        tokens=tokens,
        loss_mask=np.ones(length, bool),
        advantages=tokens.astype(np.float32) / 8,
        generator_log_probs=-tokens.astype(np.float32),
        temperature=0.5,
        reference_log_probs=-2 * tokens.astype(np.float32),
    )


def sequences(lengths: Sequence[int]) -> list[TrainingSequence]:
    return [sequence(length, 100 * index + 1) for index, length in enumerate(lengths)]


def segments(microbatches: Sequence[PackedBatch]) -> list[dict[str, np.ndarray]]:
    """The arrays of every segment, in the order of their first tokens."""
    collected = []
    for microbatch in microbatches:
        arrays = microbatch.arrays()
        for row, segment_ids in enumerate(arrays["segment_ids"]):
            for segment in range(1, int(segment_ids.max()) + 1):
                where = segment_ids == segment
                collected.append({name: array[row][where] for name, array in arrays.items()})
    return sorted(collected, key=lambda arrays: arrays["tokens"][0])


def first_tokens(microbatches: Sequence[PackedBatch]) -> list[int]:
    return [int(arrays["tokens"][0]) for arrays in segments(microbatches)]


def same(once: PackedStep, again: PackedStep) -> bool:
    return len(once.microbatches) == len(again.microbatches) and all(
        np.array_equal(array, b.arrays()[name])
        for a, b in zip(once.microbatches, again.microbatches, strict=True)
        for name, array in a.arrays().items()
    )


def first_fit_plainly(lengths: Sequence[int], room: Sequence[int]) -> list[int]:
    """The bin of each item as in the textbook: the first bin with room, -1 if there is none."""
    free, collected = list(room), []
    for length in lengths:
        collected.append(next((index for index, left in enumerate(free) if left >= length), -1))
        if collected[-1] >= 0:
            free[collected[-1]] -= length
    return collected


@given(lengths, st.sampled_from([(), (8,), BUCKETS]), st.integers(1, 4))
def test_every_rollout_is_in_exactly_one_segment_with_all_its_arrays(
    lengths: list[int], buckets: tuple[int, ...], minibatches: int
) -> None:
    given_sequences = sequences(lengths)
    step = pack(
        given_sequences,
        rows=ROWS,
        sequence_length=LENGTH,
        length_buckets=buckets,
        minibatches=minibatches,
        carried_reference=True,
    )
    packed = segments(step.microbatches)
    assert len(packed) == len(lengths)
    for arrays, expected in zip(packed, given_sequences, strict=True):
        np.testing.assert_array_equal(arrays["tokens"], expected.tokens)
        np.testing.assert_array_equal(arrays["positions"], np.arange(len(expected.tokens)))
        np.testing.assert_array_equal(arrays["advantages"], expected.advantages)
        np.testing.assert_array_equal(arrays["generator_log_probs"], expected.generator_log_probs)
        np.testing.assert_array_equal(arrays["reference_log_probs"], expected.reference_log_probs)
        np.testing.assert_array_equal(arrays["loss_mask"], np.arange(len(expected.tokens)) > 0)
        np.testing.assert_array_equal(arrays["loss_weights"], arrays["loss_mask"])
        assert set(arrays["temperatures"]) == {0.5}
    assert step.tokens == sum(lengths)
    assert step.trained_tokens == sum(length - 1 for length in lengths)
    assert step.trained_tokens == sum(microbatch.arrays()["loss_mask"].sum() for microbatch in step.microbatches)
    assert step.trained_sequences == sum(length > 1 for length in lengths)
    assert step.too_long == 0


@given(lengths, st.sampled_from([(), (8,), BUCKETS]))
def test_microbatches_have_one_shape_a_bucket_and_segments_are_contiguous(
    lengths: list[int], buckets: tuple[int, ...]
) -> None:
    step = pack(sequences(lengths), rows=ROWS, sequence_length=LENGTH, length_buckets=buckets)
    shapes = {(ROWS * LENGTH // length, length) for length in (*buckets, LENGTH)}
    for microbatch in step.microbatches:
        (shape,) = {array.shape for array in microbatch.arrays().values()}
        assert shape in shapes
        for row in microbatch.arrays()["segment_ids"]:
            used = row[row > 0]
            assert (np.diff(used) >= 0).all()
            assert (row[len(used) :] == 0).all()
    assert 0 <= step.padding_fraction <= 1
    row_lengths = [microbatch.tokens.shape[1] for microbatch in step.microbatches]
    assert row_lengths == sorted(row_lengths, reverse=True)


@given(lengths)
def test_a_layout_puts_every_item_where_first_fit_puts_it(lengths: list[int]) -> None:
    ((items, bins),) = layout(np.array(lengths, np.int64), {LENGTH: ROWS})
    descending = sorted(lengths, reverse=True)
    assert [lengths[item] for item in items] == descending
    assert bins.tolist() == first_fit_plainly(descending, [LENGTH] * len(lengths))


@given(lengths)
def test_rows_are_within_the_known_bound_of_first_fit_decreasing(lengths: list[int]) -> None:
    ((items, bins),) = layout(np.array(lengths, np.int64), {LENGTH: ROWS})
    assert sorted(items.tolist()) == list(range(len(lengths)))
    assert all(sum(np.array(lengths)[items[bins == row]]) <= LENGTH for row in set(bins.tolist()))
    # At most 11/9 of the optimum plus 6/9 rows (Dosa 2007). The optimum is at least the total divided by the capacity,
    # and at least the number of large items.
    optimum = max(-(-sum(lengths) // LENGTH), sum(length > LENGTH // 2 for length in lengths))
    rows = int(bins.max(initial=-1)) + 1
    assert rows <= 11 / 9 * max(optimum, 1) + 6 / 9 or optimum < rows <= optimum + 2


def test_rollouts_go_to_the_shortest_rows_that_hold_them_once_longer_microbatches_are_full() -> None:
    # Three rows of 16 hold 16, 12 + 4 and 9 + 7. The last microbatch of 16 is full, so six rows of 8 begin another.
    step = pack(sequences([16, 12, 9, 4, 7, *[8] * 5, 3]), rows=3, sequence_length=16, length_buckets=(8,))
    assert [microbatch.tokens.shape for microbatch in step.microbatches] == [(3, 16), (6, 8)]
    assert first_tokens(step.microbatches[:1]) == [1, 101, 201, 301, 401]


@pytest.mark.parametrize("too_long", ["skip", "truncate"])
def test_a_rollout_longer_than_a_row_is_left_out_or_cut_and_counted(too_long: str) -> None:
    step = pack(sequences([3, 17, 16, 40]), rows=ROWS, sequence_length=LENGTH, too_long=too_long)
    packed = segments(step.microbatches)
    assert [len(arrays["tokens"]) for arrays in packed] == ([3, 16] if too_long == "skip" else [3, 16, 16, 16])
    assert step.too_long == 2
    assert step.tokens == sum(len(arrays["tokens"]) for arrays in packed)


def test_a_rollout_longer_than_a_row_is_an_error_that_names_the_settings() -> None:
    with pytest.raises(ConfigurationError, match=r"17 tokens.*learner.sequence_length to at least 17.*too_long"):
        pack(sequences([3, 17]), rows=ROWS, sequence_length=LENGTH)


def test_rollouts_without_tokens_and_fully_masked_ones_train_nothing() -> None:
    masked = sequence(5)._replace(loss_mask=np.zeros(5, bool))
    step = pack([sequence(0), masked, sequence(1)], rows=ROWS, sequence_length=LENGTH)
    assert (step.tokens, step.trained_tokens, step.trained_sequences) == (6, 0, 0)
    assert not step.microbatches[0].arrays()["loss_weights"].any()


def test_minibatches_are_contiguous_ranges_of_about_equally_many_rollouts() -> None:
    step = pack(sequences([2] * 10), rows=ROWS, sequence_length=LENGTH, minibatches=3)
    assert [first_tokens(update.microbatches) for update in step.updates] == [
        [1, 101, 201, 301],
        [401, 501, 601],
        [701, 801, 901],
    ]
    assert [update.trained_tokens for update in step.updates] == [4, 3, 3]


@given(lengths, st.integers(1, 4), st.data())
def test_rollouts_without_a_sequence_move_no_other_rollout_to_another_update(
    lengths: list[int], minibatches: int, data: st.DataObject
) -> None:
    everything = sequences(lengths)
    owners = data.draw(st.lists(st.integers(0, 1), min_size=len(lengths), max_size=len(lengths)))
    shares = []
    for process in range(2):
        numbers = [number for number, owner in enumerate(owners) if owner == process]
        shares.append(
            pack(
                [everything[number] for number in numbers],
                rows=ROWS,
                sequence_length=LENGTH,
                minibatches=minibatches,
                numbers=numbers,
                rollouts=len(lengths),
            )
        )
    whole = pack(everything, rows=ROWS, sequence_length=LENGTH, minibatches=minibatches)
    for update, first, second in zip(whole.updates, shares[0].updates, shares[1].updates, strict=True):
        together = [*first.microbatches, *second.microbatches]
        assert first_tokens(update.microbatches) == first_tokens(together)


@pytest.mark.parametrize("length", [16, 48, 80])
def test_a_device_of_the_cpu_takes_packed_rows_without_a_copy(length: int) -> None:
    packed = pack([sequence(length - 1)] * 5, rows=2, sequence_length=length)
    assert len(packed.microbatches) == 3
    for microbatch in packed.microbatches:
        assert jax.device_put(microbatch.words).unsafe_buffer_pointer() == microbatch.words.ctypes.data


def test_rows_of_a_batch_become_sequences_with_the_temperature_their_logprobs_hold_at() -> None:
    batch = random_batch(0, rows=4)
    batch = replace(
        batch,
        temperatures=np.array([0.5, 0.7, 0.0, 1.0]),
        logprobs_processed=np.array([True, False, True, True]),
        truncated=np.array([False, True, False, False]),
    )
    actual = sequences_of(batch)
    assert [item.temperature for item in actual] == [0.5, 1.0, 1.0, 1.0]
    assert [item.truncated for item in actual] == [False, True, False, False]
    assert np.concatenate([item.tokens for item in actual]).tolist() == batch.tokens.tolist()
    assert np.concatenate([item.loss_mask for item in actual]).tolist() == batch.loss_mask.tolist()


def test_reference_log_probs_of_a_batch_go_with_their_rollouts() -> None:
    batch = random_batch(0, rows=3)
    carried = np.arange(len(batch.tokens), dtype=np.float32)
    assert {item.reference_log_probs for item in sequences_of(batch)} == {None}
    actual = [item.reference_log_probs for item in sequences_of(replace(batch, reference_logprobs=carried))]
    np.testing.assert_array_equal(np.concatenate(actual), carried)


def test_advantages_are_one_a_row_only_if_every_row_has_the_same_bits_at_all_its_positions() -> None:
    batch = random_batch(0, rows=3)
    lengths = np.diff(batch.splits)
    equal = np.repeat(np.array([0.5, 0.5, -2.0], np.float32), lengths)
    assert [len(item.advantages) for item in sequences_of(replace(batch, advantages=equal))] == [1, 1, 1]
    for place in range(len(equal)):
        # Equal as numbers, but not in their bits.
        nothing = np.zeros_like(equal)
        nothing[place] = -0.0
        actual = sequences_of(replace(batch, advantages=nothing))
        assert [len(item.advantages) for item in actual] == lengths.tolist()
        assert np.signbit(np.concatenate([item.advantages for item in actual])).tolist() == np.signbit(nothing).tolist()


@given(halves=st.lists(st.tuples(st.integers(1, LENGTH // 2), st.integers(1, LENGTH // 2)), max_size=20))
def test_the_two_of_a_pair_lie_in_one_row_one_after_the_other_and_in_one_minibatch(
    halves: list[tuple[int, int]],
) -> None:
    lengths = [length for pair in halves for length in pair]
    pairs = [
        each._replace(advantages=np.float32([(-1.0) ** (index % 2 + index // 2)]))
        for index, each in enumerate(sequences(lengths))
    ]
    losses = {"": LossConfig(name="dpo")}
    step = pack(pairs, rows=ROWS, sequence_length=LENGTH, length_buckets=BUCKETS, minibatches=3, losses=losses)
    firsts = [100 * index + 1 for index in range(len(pairs))]
    collected: list[int] = []
    for update in step.updates:
        for microbatch in update.microbatches:
            arrays = microbatch.arrays()
            for row, ids in enumerate(arrays["segment_ids"]):
                begins = [int(arrays["tokens"][row][ids == number][0]) for number in range(1, int(ids.max()) + 1)]
                assert begins[1::2] == [begin + 100 for begin in begins[::2]]
                collected += begins
    assert sorted(collected) == firsts


def test_half_a_pair_and_a_pair_longer_than_a_row_are_refused() -> None:
    one, two = (
        each._replace(advantages=np.float32([sign])) for each, sign in zip(sequences([5, 5]), (1, -1), strict=True)
    )
    settings = {"rows": ROWS, "sequence_length": LENGTH, "losses": {"": LossConfig(name="dpo")}}
    with pytest.raises(ConfigurationError, match="lacks one of its two"):
        pack([one], numbers=[2], rollouts=4, **settings)
    with pytest.raises(ConfigurationError, match="lacks one of its two"):
        pack([two, one], numbers=[1, 2], rollouts=4, **settings)
    with pytest.raises(ConfigurationError, match=r"5 \+ 5 tokens"):
        pack([one, two], **{**settings, "sequence_length": 9})
