"""The two-sided buffer: routing by the first control mode, half of a sample from each side, one store for both."""

import itertools
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollstream.consumers.buffers.slices.buffer import EpisodeSliceBuffer, NothingToDraw
from rollstream.consumers.buffers.slices.human_in_the_loop import HilEpisodeBuffer, open_episode_buffer
from rollstream.consumers.buffers.storage import journal as journals
from rollstream.topics.errors import ConfigurationError, RecordError
from rollstream.topics.files.atomic_files import StoreError
from rollstream.topics.records import EpisodeSpan
from rollstream.topics.wire.trajectory_arrays import Trajectory
from tests.support.slice_rings import left_by_kill


def episode(number: int, mode: Any, steps: int = 6) -> dict[str, Any]:
    """The first step decides the control mode; later steps may differ."""
    modes = np.full(steps, mode)
    modes[-1] = 1 - modes[0] if modes[0] in (0, 1) else modes[0]
    return {"number": np.full(steps, number), "control_mode": modes}


def buffer(directory: Path, capacity: int = 100, slice_len: int | None = 4, **options: Any) -> HilEpisodeBuffer:
    return HilEpisodeBuffer(directory, capacity, slice_len, **options)


def span(uid: str, start: int, stop: int, mode: int, **more: Any) -> EpisodeSpan:
    return EpisodeSpan(uid=uid, column=0, start=start, stop=stop, control_mode=mode, **more)


def trajectory(number: int, *spans: EpisodeSpan, steps: int = 6) -> Trajectory:
    arrays = {"rewards": np.zeros((steps, 1), np.float32), "number": np.full((steps, 1), number)}
    return Trajectory(arrays=arrays, environment="arm", episodes=spans)


def numbers(side: EpisodeSliceBuffer) -> set[int]:
    return set(side.sample(50)["number"].ravel().tolist())


def test_the_control_mode_of_the_first_step_decides_the_side_of_an_episode(tmp_path: Path) -> None:
    with buffer(tmp_path) as both:
        for number in range(6):
            assert both.add(episode(number, number % 2))
        assert numbers(both.auto) == {0, 2, 4}
        assert numbers(both.hil) == {1, 3, 5}
        assert both.size() == len(both) == 36
        assert both.auto.size() == both.hil.size() == 18
        assert both.stats()["hil"]["num_episodes"] == 3


def test_a_sample_has_half_of_each_side_the_policys_first(tmp_path: Path) -> None:
    with buffer(tmp_path) as both:
        for number in range(10):
            both.add(episode(number, 0))
        both.add(episode(77, 1))
        for request, each in [(2, 1), (6, 3), (7, 3), (31, 15)]:
            drawn = both.sample(request)["number"]
            assert drawn.shape == (2 * each, 4)
            assert (drawn[:each] < 10).all()
            assert (drawn[each:] == 77).all()
        assert both.sample_steps(28)["number"].shape == (6, 4)
        assert set(both.sample(400)["number"][:200].ravel().tolist()) == set(range(10))
        with pytest.raises(ConfigurationError, match="draw at least 2"):
            both.sample(1)
        with pytest.raises(ConfigurationError, match="30 steps cannot be divided"):
            both.sample_steps(30)


def test_each_side_draws_with_its_own_random_numbers(tmp_path: Path) -> None:
    with buffer(tmp_path, slice_len=1) as both:
        for number in range(8):
            both.add(episode(number, 0))
            both.add(episode(number, 1))
        drawn = both.sample(80)["number"]
        assert (drawn[:40] != drawn[40:]).any()
    with buffer(tmp_path / "same", slice_len=1) as same:
        for number in range(8):
            same.add(episode(number, 0))
            same.add(episode(number, 1))
        assert (same.sample(80)["number"] == drawn).all()


@pytest.mark.parametrize(
    ("mode", "name"), [(0, "hil side \\(control_mode 1\\)"), (1, "auto side \\(control_mode 0\\)")]
)
def test_the_error_of_an_empty_side_names_the_side(tmp_path: Path, mode: int, name: str) -> None:
    with buffer(tmp_path) as both:
        both.add(episode(0, mode))
        with pytest.raises(NothingToDraw, match=f"the {name}: no slice of 4 steps can be drawn: it is empty"):
            both.sample(4)
        both.add(episode(1, 1 - mode, steps=3))
        with pytest.raises(NothingToDraw, match=f"the {name}: .*none of 1 episodes has 4 steps"):
            both.sample(4)
        assert both.auto.stats()["draws"] == both.hil.stats()["draws"] == 0


@pytest.mark.parametrize(
    ("mode", "message"),
    [
        (2, "its control_mode is 2; it must be 0"),
        (-1, "its control_mode is -1"),
        (0.5, "control_mode is .*0.5.* at step 0; give one whole number"),
        (np.nan, "give one whole number"),
        (np.inf, "give one whole number"),
        (-np.inf, "give one whole number"),
    ],
)
def test_another_control_mode_is_refused(tmp_path: Path, mode: float, message: str) -> None:
    with buffer(tmp_path) as both:
        with pytest.raises(RecordError, match=message):
            both.add(episode(0, mode))
        assert both.size() == 0


def test_an_episode_that_does_not_say_who_acted_is_refused(tmp_path: Path) -> None:
    with buffer(tmp_path) as both:
        with pytest.raises(RecordError, match="it has no control_mode"):
            both.add({"number": np.zeros(6, int)})
        with pytest.raises(RecordError, match=r"control_mode is .* at step 0; give one whole number for each step"):
            both.add({"control_mode": np.array(["auto"] * 6)})


def test_both_sides_store_the_same_arrays(tmp_path: Path) -> None:
    with buffer(tmp_path) as both:
        both.add(episode(0, 0))
        with pytest.raises(RecordError, match="extra is new"):
            both.add({**episode(1, 1), "extra": np.zeros(6)})
        assert both.size() == 6


def test_spans_of_one_trajectory_go_to_their_sides_and_a_continued_episode_stays_on_its_side(tmp_path: Path) -> None:
    with buffer(tmp_path) as both:
        both.add(trajectory(1, span("a", 0, 2, 1), span("b", 2, 6, 0, last=False)))
        assert (both.auto.size(), both.hil.size()) == (4, 2)
        both.add(trajectory(2, span("b", 0, 3, 1, first=False), span("c", 3, 6, 1, last=False)))
        assert (both.auto.size(), both.hil.size()) == (7, 5)
        both.add(trajectory(3, span("c", 0, 2, 0, first=False, last=False), span("c", 2, 6, 0, first=False)))
        assert (both.auto.size(), both.hil.size()) == (7, 11)
        assert numbers(both.auto) == {1, 2}
        assert numbers(both.hil) == {2, 3}
        both.add(trajectory(4, span("d", 0, 2, 1, last=False), span("d", 2, 6, 0, first=False)))
        assert (both.auto.size(), both.hil.size()) == (7, 17)


def test_an_episode_that_begins_after_a_done_is_routed_by_its_own_first_step(tmp_path: Path) -> None:
    tree = {"number": np.zeros(8, int), "control_mode": np.array([0] * 5 + [1] * 3), "done": np.arange(8) == 4}
    with buffer(tmp_path) as both:
        both.add(tree, episode="robot", last=False)
        assert (both.auto.size(), both.hil.size()) == (5, 3)
        assert both.hil.is_open("robot")
        assert not both.auto.is_open("robot")


def test_a_continued_episode_without_its_beginning_is_routed_by_its_own_first_step(tmp_path: Path) -> None:
    with buffer(tmp_path) as both:
        both.add(trajectory(1, span("lost", 0, 6, 1, first=False)))
        assert both.hil.size() == 6


PARTS: list[tuple[Any, dict[str, Any]]] = [
    (episode(0, 0), {"episode": "a", "last": False}),
    (episode(1, 1), {"episode": "a"}),  # The human acts first in the end of the policy's episode.
    (episode(2, 1), {"episode": "b"}),  # An episode of one part.
    (episode(3, 1), {"episode": "c", "last": False}),
    (episode(4, 0), {"episode": "c", "last": False}),
    (episode(5, 0), {"episode": "c"}),
]
SPANS: list[tuple[Any, dict[str, Any]]] = [
    (trajectory(0, span("a", 0, 3, 0, last=False), span("b", 3, 6, 1, last=False)), {}),
    (trajectory(1, span("a", 0, 3, 1, first=False), span("b", 3, 6, 0, first=False, last=False)), {}),
    (trajectory(2, span("b", 0, 2, 0, first=False), span("lost", 2, 6, 1, first=False)), {}),
    (trajectory(3, span("c", 0, 3, 1, last=False), span("d", 3, 6, 0)), {}),
    (trajectory(4, span("c", 0, 3, 0, first=False, last=False), span("c", 3, 6, 0, first=False)), {}),
]


@pytest.mark.parametrize("journal_bytes", [2**20, 0], ids=["additions", "snapshots"])
@pytest.mark.parametrize(
    ("records", "others"),
    [
        (PARTS, [episode(9, 0), episode(9, 1)]),
        (SPANS, [trajectory(9, span("e", 0, 6, 0)), trajectory(9, span("f", 0, 6, 1))]),
    ],
    ids=["parts", "spans"],
)
def test_after_a_kill_at_any_write_every_episode_is_whole_on_its_side(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    records: list[tuple[Any, dict[str, Any]]],
    others: list[Any],
    journal_bytes: int,
) -> None:
    """Before the record is added again, records of another partition are, and may replace the journals."""
    monkeypatch.setattr(journals, "LEAST_BYTES", journal_bytes)
    monkeypatch.setattr(os, "fsync", lambda _descriptor: None)  # A kill loses no write.
    written, writes = os.pwrite, 0

    def filled(directory: Path) -> list[dict[str, Any]]:
        with buffer(directory) as both:
            for offset, item in enumerate(others):
                both.add(item, at=(1, offset))
        with buffer(directory) as both:
            for offset in range(both.position.get(0, 0), len(records)):
                item, options = records[offset]
                assert both.add(item, at=(0, offset), **options)
            return [side.stats() | {"draws": 0, "numbers": numbers(side)} for side in (both.auto, both.hil)]

    def counted(descriptor: int, data: Any, offset: int) -> int:
        nonlocal writes
        writes -= 1
        if writes < 0:
            raise KeyboardInterrupt
        return written(descriptor, data, offset)

    expected = filled(tmp_path / "whole")
    for kill_at in itertools.count():
        directory, killed = tmp_path / str(kill_at), False
        with monkeypatch.context() as kill, buffer(directory) as both:
            writes = kill_at
            kill.setattr(os, "pwrite", counted)
            try:
                for offset, (item, options) in enumerate(records):
                    both.add(item, at=(0, offset), **options)
            except KeyboardInterrupt:
                killed = True
            kill.undo()
            left = left_by_kill(directory)
        assert filled(left) == expected, kill_at
        if not killed:
            assert kill_at > len(records)
            break


def test_both_sides_are_saved_and_replaced_together_and_a_reader_follows(tmp_path: Path) -> None:
    with buffer(tmp_path / "live") as both, buffer(tmp_path / "live", read_only=True) as reader:
        both.add(episode(0, 0), at=(0, 0))
        both.add(episode(1, 1), at=(0, 1))
        both.save(tmp_path / "saved")
        both.add(episode(2, 1), at=(0, 2))
        assert (reader.size(), reader.position) == (18, {0: 3})
        both.load(tmp_path / "saved")
        for each in (both, reader):
            assert (each.size(), each.position) == (12, {0: 2})
            assert each.sample(4)["number"][:, 0].tolist() == [0, 0, 1, 1]
        for act in (lambda: reader.load(tmp_path / "saved"), lambda: reader.add(episode(3, 0))):
            with pytest.raises(StoreError, match="was opened read-only"):
                act()
        with pytest.raises(StoreError, match="nothing was stored there"):
            both.load(tmp_path / "nowhere")
    with buffer(tmp_path / "saved") as saved:
        assert (saved.size(), saved.position) == (12, {0: 2})


def test_a_reader_that_opened_an_empty_buffer_draws_what_the_writer_adds(tmp_path: Path) -> None:
    with buffer(tmp_path) as both, buffer(tmp_path, read_only=True) as reader:
        both.add(episode(0, 0), at=(0, 0))
        both.add(episode(1, 1), at=(0, 1))
        assert reader.sample(4)["number"][:, 0].tolist() == [0, 0, 1, 1]
        both.add(episode(2, 1), at=(0, 2))
        assert reader.position == {0: 3}


def test_without_the_option_one_buffer_holds_everything(tmp_path: Path) -> None:
    with open_episode_buffer(tmp_path / "one", capacity=100, slice_len=4) as one:
        assert isinstance(one, EpisodeSliceBuffer)
        one.add({"number": np.zeros(6, int)})
    with open_episode_buffer(tmp_path / "two", use_hil_buffer=True, capacity=100, slice_len=4) as two:
        assert isinstance(two, HilEpisodeBuffer)
