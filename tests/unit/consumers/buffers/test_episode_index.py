"""Which steps belong to which episode: compared with lists that are scanned, and by hand for known numbers."""

from collections import defaultdict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from consumers.buffers import episode_index
from consumers.buffers.episode_index import EpisodeIndex
from consumers.buffers.episode_ranks import RankedSet

WRITES = st.lists(st.tuples(st.integers(0, 5), st.booleans(), st.integers(1, 9)), max_size=60)


def starts(index: EpisodeIndex, length: int) -> dict[int, list[list[int]]]:
    """By rank: the counters of every slice of that length."""
    rows = index.with_length(length)
    members = rows.select(np.arange(len(rows)))
    return {
        rank: [
            [at for piece in index.pieces(row, start, length) for at in range(piece.at, piece.at + piece.steps)]
            for start in range(held - length + 1)
        ]
        for rank, (row, held) in enumerate(zip(members.tolist(), index.lengths(members).tolist(), strict=True))
    }


def scanned(owners: list[int], low: int, length: int) -> dict[int, list[list[int]]]:
    """The same by looking at every step."""
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
def test_slices_are_those_a_scan_finds_whoever_writes_and_whatever_the_ring_takes(
    writes: list[tuple[int, bool, int]], capacity: int, length: int
) -> None:
    """Writers take turns, begin new episodes when they like, and the ring is small; so is the room for dead rows."""
    room, episode_index._ROOM = episode_index._ROOM, 2
    try:
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
        assert index._more.keys() <= set(owners[-capacity:])
    finally:
        episode_index._ROOM = room


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
    assert [[s[0] - 8 * rank for s in found] for rank, found in starts(index, 4).items()] == [
        [4],
        [0, 1, 2, 3, 4],
        [0, 1, 2, 3, 4],
    ]


def test_an_episode_written_step_by_step_among_others_stays_one_whose_forgotten_runs_take_no_room() -> None:
    index = EpisodeIndex()
    for at in range(20_000):
        index.evict(at + 1 - 100)
        index.extend(at % 2, at, 1)
    assert index.episodes == 2
    assert [s[0] for s in starts(index, 50)[1]] == [19_901]
    assert len(index._more[0]) < 250
    assert index._runs.rows < 2 * episode_index._ROOM + 400


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
    assert index.pieces(777_777, 2, 8) == [(7_777_772, 8)]
    kept = index.columns()
    assert sum(column.nbytes for column in kept.values()) == 48 * count
    assert all(np.array_equal(kept[name], column) for name, column in columns.items())


def test_columns_that_do_not_belong_together_are_refused() -> None:
    index = EpisodeIndex()
    index.extend(0, 0, 3)
    with pytest.raises(ValueError, match="do not belong together"):
        EpisodeIndex.of(index.columns() | {"run_episode": np.array([1])})


def test_lengths_beyond_those_kept_track_of_are_counted_anew() -> None:
    index = EpisodeIndex()
    for length in range(1, 10):
        assert len(index.with_length(length)) == 0
        index.extend(length, 100 * length, length)
        assert len(index.with_length(length)) == 1
    assert len(index._views) == 4
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
