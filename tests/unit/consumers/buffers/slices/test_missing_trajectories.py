"""Trajectories that are missing or late: no slice joins steps that were not adjacent in their episode."""

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollstream.consumers.buffers.slices.buffer import EpisodeSliceBuffer
from rollstream.consumers.buffers.slices.episode_cuts import EpisodePart
from rollstream.consumers.buffers.slices.human_in_the_loop import HilEpisodeBuffer
from rollstream.consumers.buffers.slices.state import SliceSide
from rollstream.consumers.buffers.trajectories.filler import put
from rollstream.producers.trajectories.collector import ChunkStepResult, TrajectoryCollector
from rollstream.topics.wire.codec import encode
from rollstream.topics.wire.trajectory_arrays import Trajectory, to_record

NAMES = ("curr_obs", "next_obs")
MISSING = [
    pytest.param((0, 1, 2, 3), {(0, 15)}, id="none"),
    pytest.param((0, 2, 3), {(0, 3), (8, 15)}, id="a middle one"),
    pytest.param((0, 3), {(0, 3), (12, 15)}, id="two middle ones"),
    pytest.param((1, 2, 3), {(4, 15)}, id="the first"),
    pytest.param((2, 3), {(8, 15)}, id="the first two"),
    pytest.param((0, 2, 1, 3), {(0, 3), (8, 11), (4, 7), (12, 15)}, id="one is late"),
    pytest.param((0, 1, 3, 2), {(0, 7), (12, 15), (8, 11)}, id="one comes after the end"),
    pytest.param((0, 1, 1, 2, 3), {(0, 7), (4, 15)}, id="one comes twice"),
]
"""Numbers of the trajectories that arrive, in order, and the first and last step of each stored episode."""


def collected(
    steps: int = 16, *, every: int = 4, width: int = 1, mode: int = 0, ends: Iterable[int] = ()
) -> list[Trajectory]:
    """Trajectories of `every` steps; an observation is the number of the step, counted from 1000 on in column 1.

    Episodes end after the steps `ends` and the last one.
    """
    collector = TrajectoryCollector("arm", width, worker_id="w", steps=every, incarnation="i")
    done, parts = {*ends, steps - 1}, []
    for step in range(steps):
        here = step + 1000.0 * np.arange(width)
        result = ChunkStepResult(
            actions=here,
            rewards=np.zeros(width, np.float32),
            terminations=np.full(width, step in done),
            curr_obs=here,
            next_obs=here + 1,
            control_modes=mode,
        )
        parts.append(collector.add(result))
    return [part for part in (*parts, collector.finish()) if part is not None]


def stored(side: EpisodeSliceBuffer) -> set[tuple[int, int]]:
    """First and last step of each stored episode; the observation after each other step is that of the next step."""
    sample = side.draw(400, 100)
    episodes = set()
    for seen, after in zip(*(np.split(sample[name], np.cumsum(sample["lengths"])[:-1]) for name in NAMES), strict=True):
        assert (after[:-1] == seen[1:]).all()
        episodes.add((int(seen[0]), int(seen[-1])))
    assert len(episodes) == side.stats()["num_episodes"]
    return episodes


def whole(directory: Path, capacity: int = 100) -> EpisodeSliceBuffer:
    """A buffer that draws whole episodes."""
    return EpisodeSliceBuffer(directory, capacity, 1, strict_length=False)


@pytest.mark.parametrize(("arriving", "episodes"), MISSING)
def test_an_episode_goes_on_only_where_it_stopped(
    tmp_path: Path, arriving: tuple[int, ...], episodes: set[tuple[int, int]]
) -> None:
    parts = collected()
    with whole(tmp_path) as slices:
        for number in arriving:
            assert slices.add(parts[number])
        assert stored(slices) == episodes


@pytest.mark.parametrize("mode", [0, 1])
@pytest.mark.parametrize(("arriving", "episodes"), MISSING)
def test_so_it_is_on_both_sides_of_a_buffer_with_humans(
    tmp_path: Path, arriving: tuple[int, ...], episodes: set[tuple[int, int]], mode: int
) -> None:
    parts = collected(mode=mode)
    with HilEpisodeBuffer(tmp_path, 100, 1, strict_length=False) as both:
        for number in arriving:
            assert both.add(parts[number])
        assert stored(both.hil if mode else both.auto) == episodes
        assert (both.auto if mode else both.hil).size() == 0


def test_an_episode_that_changes_hands_stays_whole_on_its_side(tmp_path: Path) -> None:
    first, second, third, fourth = collected()
    parts = [first, *(replace(part, episodes=(replace(part.episodes[0], control_mode=1),)) for part in (second, third))]
    with HilEpisodeBuffer(tmp_path, 100, 1, strict_length=False) as both:
        for part in (*parts, fourth):
            both.add(part)
        assert stored(both.auto) == {(0, 15)}
        assert both.hil.size() == 0


def test_an_unreadable_record_ends_the_episodes_that_it_continued(tmp_path: Path) -> None:
    parts = collected(width=2, ends=[9])
    with whole(tmp_path) as slices:
        for offset, part in enumerate(parts):
            put([slices], (0, offset), b"unreadable" if offset == 1 else encode(to_record(part)))
        assert stored(slices) == {(0, 3), (8, 9), (10, 15), (1000, 1003), (1008, 1009), (1010, 1015)}


def test_spans_without_a_begin_continue_the_open_episode(tmp_path: Path) -> None:
    with whole(tmp_path) as slices:
        for part in collected():
            slices.add(replace(part, episodes=tuple(replace(span, begin=-1) for span in part.episodes)))
        assert stored(slices) == {(0, 15)}


def test_the_spans_of_one_record_continue_an_episode_only_if_they_are_adjacent(tmp_path: Path) -> None:
    [part] = collected(every=16)
    [span] = part.episodes
    head, tail = replace(span, stop=6, last=False), replace(span, start=6, first=False, begin=6)
    with whole(tmp_path / "all") as slices:
        slices.add(replace(part, episodes=(head, tail)))
        assert stored(slices) == {(0, 15)}
        assert not slices.is_open(span.uid)
    with whole(tmp_path / "gap") as slices:
        slices.add(replace(part, episodes=(replace(head, stop=4), tail)))
        assert stored(slices) == {(0, 3), (6, 15)}
        assert not slices.is_open(span.uid)


def test_overwritten_steps_of_an_episode_still_count(tmp_path: Path) -> None:
    parts = collected(40)
    with whole(tmp_path, capacity=10) as slices:
        for part in parts[:6]:
            slices.add(part)
        assert stored(slices) == {(14, 23)}
    with whole(tmp_path, capacity=10) as slices:
        slices.add(parts[6])
        assert stored(slices) == {(18, 27)}
        slices.add(parts[8])
        assert stored(slices) == {(22, 27), (32, 35)}


def test_a_copy_knows_where_an_episode_without_its_beginning_goes_on(tmp_path: Path) -> None:
    parts = collected()
    with whole(tmp_path / "first") as slices:
        slices.add(parts[1])
        slices.save(tmp_path / "copy")
    for name in ("first", "copy"):
        with whole(tmp_path / name) as slices:
            slices.add(parts[2])
            assert stored(slices) == {(4, 11)}


ARRIVALS = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 5), st.booleans()), max_size=40)
LENGTHS = [(3, 4, 1, 5, 2, 4), (6,) * 6, (1, 1, 2, 1, 1, 7)]
"""Numbers of steps of the parts of each episode."""


@settings(deadline=None)
@given(ARRIVALS, st.integers(7, 60))
def test_whatever_arrives_stored_episodes_have_consecutive_steps(
    arrivals: list[tuple[int, int, bool]], capacity: int
) -> None:
    """Parts arrive in any order, twice or never, and the state is restored at times from its snapshot."""
    side, steps = SliceSide(capacity), list[tuple[int, int]]()
    for episode, number, restored in arrivals:
        begin, count = sum(LENGTHS[episode][:number]), LENGTHS[episode][number]
        last = number == len(LENGTHS[episode]) - 1
        part = EpisodePart(leaves={}, steps=count, uid=str(episode), first=number == 0, last=last, begin=begin)
        steps += [(episode, begin + step) for step in range(count)]
        side.extend(*side.runs(0, [part]))
        if restored:
            side = SliceSide.of(side.snapshot(), capacity)
    members = side.index.with_length(1)
    rows = members.select(np.arange(len(members)))
    for row, length in zip(rows.tolist(), side.index.lengths(rows).tolist(), strict=True):
        held = [steps[r.at + n] for r in side.index.ranges(row, 0, length) for n in range(r.steps)]
        assert held == [(held[0][0], held[0][1] + n) for n in range(length)]


@given(st.permutations([episode for episode in range(3) for _part in range(6)]))
def test_episodes_whose_parts_arrive_in_order_are_whole_whoever_writes_in_between(order: list[int]) -> None:
    side, numbers = SliceSide(1000), dict.fromkeys(range(3), 0)
    for episode in order:
        number, lengths = numbers[episode], LENGTHS[episode]
        numbers[episode] += 1
        part = EpisodePart(
            leaves={},
            steps=lengths[number],
            uid=str(episode),
            first=number == 0,
            last=number == len(lengths) - 1,
            begin=sum(lengths[:number]),
        )
        side.extend(*side.runs(0, [part]))
    assert side.index.episodes == 3
    assert not side.open
