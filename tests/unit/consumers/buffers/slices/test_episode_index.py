"""The episode index, compared with scans of plain lists and with known numbers."""

import tracemalloc
from collections import defaultdict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollstream.consumers.buffers.slices import episode_index
from rollstream.consumers.buffers.slices.episode_index import EpisodeIndex, RankedSet

WRITES = st.lists(st.tuples(st.integers(0, 5), st.booleans(), st.integers(1, 9)), max_size=60)


def starts(index: EpisodeIndex, length: int) -> dict[int, list[list[int]]]:
    """Counters of every slice of that length, by rank."""
    rows = index.with_length(length)
    members = rows.select(np.arange(len(rows)))
    return {
        rank: [
            [at for piece in index.ranges(row, start, length) for at in range(piece.at, piece.at + piece.steps)]
            for start in range(held - length + 1)
        ]
        for rank, (row, held) in enumerate(zip(members.tolist(), index.lengths(members).tolist(), strict=True))
    }


def scanned(owners: list[int], low: int, length: int) -> dict[int, list[list[int]]]:
    """The same slices, found by a scan of every step."""
    steps = defaultdict(list)
    for at, owner in enumerate(owners):
        if at >= low:
            steps[owner].append(at)
    enough = [steps[owner] for owner in sorted(steps) if len(steps[owner]) >= length]
    return {
        rank: [held[start : start + length] for start in range(len(held) - length + 1)]
        for rank, held in enumerate(enough)
    }


@settings(max_examples=150, deadline=None)
@given(WRITES, st.integers(1, 30), st.integers(1, 5))
def test_slices_equal_those_of_a_full_scan_for_any_writers_and_any_overwriting(
    writes: list[tuple[int, bool, int]], capacity: int, length: int
) -> None:
    """Writers alternate and begin episodes at any time; the ring and the room for dead rows are small."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(episode_index, "ROOM", 2)
        index, owners, of_writer, following = EpisodeIndex(), [], {}, 0
        for writer, begins, count in writes:
            ended = index.evict(len(owners) + count - capacity)
            of_writer = {w: episode for w, episode in of_writer.items() if episode not in ended}
            if begins or writer not in of_writer:
                of_writer[writer], following = following, following + 1
            index.extend(of_writer[writer], len(owners), count)
            owners += [of_writer[writer]] * count
        index.evict(len(owners) - capacity)
        expected = scanned(owners, len(owners) - capacity, length)
        assert starts(index, length) == expected
        assert starts(EpisodeIndex.of(index.columns()), length) == expected
        assert index.size == min(len(owners), capacity)
        assert index.episodes == len(set(owners[-capacity:]))


def test_lengths_10_3_and_4_give_the_first_and_the_last_slices_of_4() -> None:
    index = EpisodeIndex()
    for episode, (at, count) in enumerate([(0, 10), (10, 3), (13, 4)]):
        index.extend(episode, at, count)
    assert starts(index, 4) == {0: [list(range(s, s + 4)) for s in range(7)], 1: [[13, 14, 15, 16]]}


def test_a_ring_of_20_with_three_episodes_of_8_has_one_start_of_the_first_and_five_of_the_others() -> None:
    index = EpisodeIndex()
    for episode in range(3):
        index.evict(8 * (episode + 1) - 20)
        index.extend(episode, 8 * episode, 8)
    assert [[s[0] - 8 * rank for s in actual] for rank, actual in starts(index, 4).items()] == [
        [4],
        [0, 1, 2, 3, 4],
        [0, 1, 2, 3, 4],
    ]


def test_an_episode_written_step_by_step_among_others_stays_one() -> None:
    index = EpisodeIndex()
    for at in range(20_000):
        index.evict(at + 1 - 100)
        index.extend(at % 2, at, 1)
    assert index.episodes == 2
    assert [s[0] for s in starts(index, 50)[1]] == [19_901]


@pytest.mark.parametrize("steps", [10**9, 60], ids=["two without end", "pairs of 60 steps"])
def test_forgotten_runs_take_no_memory(steps: int) -> None:
    """Two writers alternate, so every step is a run of its own."""
    index, taken = EpisodeIndex(), []
    tracemalloc.start()
    try:
        for at in range(20_000):
            index.evict(at + 1 - 100)
            index.extend(2 * (at // steps) + at % 2, at, 1)
            if at in (4_999, 19_999):
                taken.append(tracemalloc.get_traced_memory()[0])
    finally:
        tracemalloc.stop()
    # The runs of 15,000 steps would take 450 KB.
    assert taken[1] - taken[0] < 75_000


def test_an_index_of_a_million_episodes_is_restored_and_takes_48_bytes_each_on_disk() -> None:
    count = 1_000_000
    numbers = np.arange(count)
    columns = {
        "episode_number": numbers,
        "episode_begin": np.zeros(count, np.int64),
        "run_at": 10 * numbers,
        "run_count": np.full(count, 10),
        "run_step": np.zeros(count, np.int64),
        "run_episode": numbers,
    }
    index = EpisodeIndex.of(columns)
    assert (index.size, index.episodes, len(index.with_length(10))) == (10 * count, count, count)
    assert index.ranges(777_777, 2, 8) == [(7_777_772, 8)]
    kept = index.columns()
    assert sum(column.nbytes for column in kept.values()) == 48 * count
    assert all(np.array_equal(kept[name], column) for name, column in columns.items())


def test_columns_that_do_not_belong_together_are_refused() -> None:
    index = EpisodeIndex()
    index.extend(0, 0, 3)
    with pytest.raises(ValueError, match="do not belong together"):
        EpisodeIndex.of(index.columns() | {"run_episode": np.array([1])})


def test_lengths_that_are_not_tracked_are_counted_again() -> None:
    index = EpisodeIndex()
    for length in range(1, 10):
        assert len(index.with_length(length)) == 0
        index.extend(length, 100 * length, length)
        assert len(index.with_length(length)) == 1
    assert [len(index.with_length(length)) for length in (1, 5, 9)] == [9, 5, 1]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 3000)), max_size=80), st.sets(st.integers(0, 1500)))
def test_a_ranked_set_orders_what_it_holds(changes: list[tuple[bool, int]], members: set[int]) -> None:
    mask = np.zeros(1501, np.bool_)
    mask[list(members)] = True
    ranked = RankedSet(mask)
    for puts, number in changes:
        (ranked.add if puts else ranked.discard)(number)
        (members.add if puts else members.discard)(number)
    assert ranked.select(np.arange(len(ranked))).tolist() == sorted(members)
    assert len(ranked) == len(members)
    assert all((number in ranked) == (number in members) for _, number in changes)
