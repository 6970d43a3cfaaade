"""The slice buffer: draws and their probabilities, refused items, and the position in the log."""

import inspect
import re
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollstream.consumers.buffers.slices import episode_index
from rollstream.consumers.buffers.slices.buffer import EpisodeSliceBuffer, NothingToDraw
from rollstream.consumers.buffers.slices.episode_cuts import Boundaries
from rollstream.consumers.buffers.slices.episode_index import RankedSet
from rollstream.topics.errors import ConfigurationError, RecordError
from rollstream.topics.records import EpisodeSpan
from rollstream.topics.wire.trajectory_arrays import Trajectory, map_leaves
from tests.support.pages import blocks, page, section


def episode(number: int, steps: int, begin: int = 0) -> dict[str, Any]:
    """Steps of an episode from `begin` on; the values name episode and step."""
    step = np.arange(begin, begin + steps)
    return {"number": np.full(steps, number), "obs": {"step": step, "wide": np.stack([step, step + 0.5], 1)}}


def buffer(directory: Path, capacity: int = 1000, slice_len: int | None = 4, **options: Any) -> EpisodeSliceBuffer:
    return EpisodeSliceBuffer(directory, capacity, slice_len, **options)


def seen(buffer: EpisodeSliceBuffer, count: int = 2000) -> Counter[tuple[int, int]]:
    """Counts of the drawn (episode, start); every slice must be consecutive steps of one episode."""
    sample = buffer.sample(count)
    numbers, steps = sample["number"], sample["obs"]["step"]
    assert (numbers == numbers[:, :1]).all()
    assert (steps == steps[:, :1] + np.arange(steps.shape[1])).all()
    assert (sample["obs"]["wide"] == np.stack([steps, steps + 0.5], 2)).all()
    return Counter(zip(numbers[:, 0].tolist(), steps[:, 0].tolist(), strict=True))


# ------------------------------------------------------------------ what is drawn


def test_slices_of_4_of_episodes_of_10_3_and_4_begin_at_every_step_that_leaves_room(tmp_path: Path) -> None:
    with buffer(tmp_path) as slices:
        for number, steps in enumerate([10, 3, 4]):
            assert slices.add(episode(number, steps))
        assert slices.size() == len(slices) == 17
        assert seen(slices).keys() == {*((0, start) for start in range(7)), (2, 0)}


def test_episodes_are_drawn_uniformly_whatever_their_length_and_so_are_starts_within_one(tmp_path: Path) -> None:
    """Chi-square at 0.001: 10.8 with one degree of freedom, 22.5 with six."""
    rounds = 14_000
    with buffer(tmp_path, seed=11) as slices:
        for number, steps in enumerate([10, 3, 4]):
            slices.add(episode(number, steps))
        actual = seen(slices, rounds)
    of_first = [actual[0, start] for start in range(7)]
    assert (sum(of_first) - rounds / 2) ** 2 / (rounds / 2) * 2 < 10.8
    expected = sum(of_first) / 7
    assert sum((count - expected) ** 2 / expected for count in of_first) < 22.5


def test_a_ring_of_20_keeps_the_last_half_of_the_first_of_three_episodes_of_8(tmp_path: Path) -> None:
    with buffer(tmp_path, capacity=20) as slices:
        for number in range(3):
            slices.add(episode(number, 8))
        assert slices.size() == 20
        every_start = {(number, start) for number in (1, 2) for start in range(5)}
        assert seen(slices).keys() == {(0, 4)} | every_start
        slices.add(episode(3, 1))
        assert seen(slices).keys() == every_start
        assert slices.stats()["num_episodes"] == 4
        assert slices.stats()["num_episodes_to_draw_from"] == 2


def test_a_slice_over_the_end_of_the_ring_is_whole(tmp_path: Path) -> None:
    with buffer(tmp_path, capacity=7) as slices:
        slices.add(episode(0, 5))
        slices.add(episode(1, 5))
        assert seen(slices).keys() == {(1, 0), (1, 1)}


def test_the_last_step_of_a_slice_is_marked_truncated(tmp_path: Path) -> None:
    with buffer(tmp_path / "one") as slices:
        slices.add(episode(0, 9))
        assert slices.sample(3)["truncated"].tolist() == [[False, False, False, True]] * 3
    flags = np.array([False, True, False, False, False])[:, None]
    with buffer(tmp_path / "two", truncated_key="next/truncated") as slices:
        slices.add({"next": {"truncated": flags}, "step": np.arange(5)})
        sample = slices.sample(50)
        for step, marks in zip(sample["step"], sample["next"]["truncated"], strict=True):
            assert marks[:, 0].tolist() == [*(step[:-1] == 1), True]
        assert "truncated" not in sample


def test_without_strict_length_short_episodes_give_all_their_steps(tmp_path: Path) -> None:
    with buffer(tmp_path, strict_length=False) as slices:
        for number, steps in enumerate([6, 2]):
            slices.add(episode(number, steps))
        sample = slices.sample(40)
    ends = np.cumsum(sample["lengths"])
    actual = set()
    for start, end in zip(ends - sample["lengths"], ends, strict=True):
        number, steps = sample["number"][start:end], sample["obs"]["step"][start:end]
        assert (number == number[0]).all()
        assert sample["truncated"][start:end].tolist() == [*[False] * (end - start - 1), True]
        actual.add((int(number[0]), tuple(steps.tolist())))
    assert actual == {(0, (0, 1, 2, 3)), (0, (1, 2, 3, 4)), (0, (2, 3, 4, 5)), (1, (0, 1))}
    assert len(sample["obs"]["wide"]) == ends[-1]
    assert "mask" not in sample


def test_padding_is_zero_and_the_mask_marks_it(tmp_path: Path) -> None:
    with buffer(tmp_path, strict_length=False, pad_output=True) as slices:
        slices.add(episode(7, 2))
        sample = slices.sample(3)
    assert sample["mask"].tolist() == [[True, True, False, False]] * 3
    assert sample["lengths"].tolist() == [2, 2, 2]
    assert sample["number"].tolist() == [[7, 7, 0, 0]] * 3
    assert sample["truncated"].tolist() == [[False, True, False, False]] * 3
    assert sample["obs"]["wide"].shape == (3, 4, 2)


def test_numbers_of_steps_must_be_multiples_of_the_setting(tmp_path: Path) -> None:
    with buffer(tmp_path / "length") as slices, buffer(tmp_path / "number", slice_len=None, num_slices=3) as numbered:
        for each in (slices, numbered):
            each.add(episode(0, 9))
        assert slices.sample_steps(12)["number"].shape == (3, 4)
        assert numbered.sample_steps(12)["number"].shape == (3, 4)
        assert numbered.sample_steps(27)["obs"]["step"].tolist() == [list(range(9))] * 3
        with pytest.raises(ConfigurationError, match="10 steps cannot be divided by slice_len 4"):
            slices.sample_steps(10)
        with pytest.raises(ConfigurationError, match="10 steps cannot be divided by num_slices 3"):
            numbered.sample_steps(10)
        with pytest.raises(NothingToDraw, match="none of 1 episodes has 10 steps"):
            numbered.sample_steps(30)
        with pytest.raises(ConfigurationError, match="call sample_steps"):
            numbered.sample(3)


def test_an_empty_buffer_raises_nothing_to_draw(tmp_path: Path) -> None:
    with buffer(tmp_path) as slices:
        with pytest.raises(NothingToDraw, match="no slice of 4 steps can be drawn: it is empty"):
            slices.sample(1)
        for number in range(3):
            slices.add(episode(number, 3))
        with pytest.raises(NothingToDraw, match="none of 3 episodes has 4 steps; add longer episodes"):
            slices.sample(1)
        for count in (0, -1):
            with pytest.raises(ConfigurationError, match="draw at least 1"):
                slices.sample(count)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"slice_len": None}, "give exactly one"),
        ({"num_slices": 3}, "give exactly one"),
        ({"slice_len": 0}, "must be at least 1"),
        ({"capacity": 0}, "must be at least 1"),
        ({"capacity": 3}, "is above the capacity 3"),
        ({"pad_output": True}, "set only one"),
    ],
)
def test_invalid_settings_are_refused(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        buffer(tmp_path, **options)


def test_by_default_slices_have_80_steps_of_ten_million(tmp_path: Path) -> None:
    with EpisodeSliceBuffer(tmp_path) as slices:
        slices.add(episode(0, 80))
        assert slices.stats()["capacity"] == 10_000_000
        assert slices.sample(2)["number"].shape == (2, 80)


# ------------------------------------------------------------------ what an episode is


def test_adjacent_steps_of_one_id_are_two_episodes_if_they_were_added_as_two(tmp_path: Path) -> None:
    with buffer(tmp_path) as slices:
        for begin in (0, 100):
            slices.add({"episode": np.zeros(5, int), **episode(0, 5, begin)})
        assert seen(slices).keys() == {(0, 0), (0, 1), (0, 100), (0, 101)}


def test_alternating_writers_do_not_split_episodes(tmp_path: Path) -> None:
    with buffer(tmp_path) as slices:
        for begin in range(0, 8, 2):
            for writer in range(3):
                slices.add(episode(writer, 2, begin), episode=f"w{writer}", last=begin == 6)
        assert not slices.is_open("w0")
        assert seen(slices).keys() == {(writer, start) for writer in range(3) for start in range(5)}
        assert slices.stats()["num_episodes"] == 3
        slices.add(episode(9, 2, 8), episode="w0", last=False)
        assert slices.is_open("w0")
        assert slices.stats()["num_episodes"] == 4


def test_a_tree_is_cut_where_ids_change(tmp_path: Path) -> None:
    ids = np.array([5, 5, 5, 5, 5, 2, 2, 2, 5, 5, 5, 5])
    with buffer(tmp_path) as slices:
        slices.add({**episode(0, 12), "episode": ids[:, None]})
        assert seen(slices).keys() == {(0, 0), (0, 1), (0, 8)}


@pytest.mark.parametrize("key", ["done", "dones", "next/done"])
def test_a_tree_is_cut_after_each_done(tmp_path: Path, key: str) -> None:
    done = np.zeros((13, 1), bool)
    done[[4, 5]] = True
    tree = {**episode(0, 13), **({"next": {"done": done}} if "/" in key else {key: done})}
    with buffer(tmp_path) as slices:
        slices.add(tree)
        assert seen(slices).keys() == {(0, start) for start in (0, 1, 6, 7, 8, 9)}


def test_other_arrays_may_mark_the_ends_of_episodes(tmp_path: Path) -> None:
    tree = {**episode(0, 8), "over": np.arange(8) == 3, "done": np.ones(8, bool)}
    with buffer(tmp_path, boundaries=Boundaries(done=("over",))) as slices:
        slices.add(tree)
        assert seen(slices).keys() == {(0, 0), (0, 4)}


def test_an_episode_that_is_done_does_not_stay_open(tmp_path: Path) -> None:
    with buffer(tmp_path) as slices:
        for begin, done in [(0, [0, 0, 0]), (3, [0, 1, 0]), (6, [0, 0, 1])]:
            slices.add({**episode(0, 3, begin), "done": np.array(done)}, episode="robot", last=False)
        assert not slices.is_open("robot")
        assert seen(slices).keys() == {(0, 0), (0, 1), (0, 5)}


def span(uid: str, column: int, start: int, stop: int, **more: Any) -> EpisodeSpan:
    return EpisodeSpan(uid=uid, column=column, start=start, stop=stop, **more)


def trajectory(begin: int, steps: int, *spans: EpisodeSpan, width: int = 2, **more: Any) -> Trajectory:
    """Steps from `begin` on, in each column; `number` is the column."""
    step = np.repeat(np.arange(begin, begin + steps)[:, None], width, 1)
    arrays = {
        "rewards": np.zeros((steps, width), np.float32),
        "number": np.repeat(np.arange(width)[None], steps, 0),
        "obs": {"step": step, "wide": np.stack([step, step + 0.5], 2)},
    }
    return Trajectory(arrays=arrays | more, environment="arm", episodes=spans)


def test_spans_name_the_episodes_of_a_trajectory_and_those_that_continue(tmp_path: Path) -> None:
    first = trajectory(0, 6, span("a", 0, 0, 3), span("b", 0, 3, 6, last=False), span("c", 1, 1, 6, last=False))
    other = trajectory(0, 4, span("d", 1, 0, 4))
    second = trajectory(6, 6, span("b", 0, 0, 4, first=False), span("c", 1, 0, 6, first=False))
    with buffer(tmp_path, slice_len=5) as slices:
        for each in (first, other, second):
            assert slices.add(each)
        assert slices.size() == 3 + 3 + 5 + 4 + 4 + 6
        assert seen(slices).keys() == {(0, 3), (0, 4), (0, 5), *((1, start) for start in range(1, 8))}
        assert not any(slices.is_open(uid) for uid in "abcd")


def test_spans_of_one_episode_follow_each_other_by_their_rows(tmp_path: Path) -> None:
    with buffer(tmp_path, slice_len=6) as slices:
        slices.add(trajectory(0, 6, span("a", 1, 4, 6, first=False), span("a", 1, 0, 4, last=False)))
        assert seen(slices, 5).keys() == {(1, 0)}


def test_an_episode_that_begins_again_does_not_continue_the_open_one_of_its_uid(tmp_path: Path) -> None:
    with buffer(tmp_path) as slices:
        slices.add(trajectory(0, 4, span("a", 0, 0, 4, last=False)))
        slices.add(trajectory(4, 4, span("a", 0, 0, 4, last=False)))
        slices.add(trajectory(8, 2, span("a", 0, 0, 2, first=False)))
        assert seen(slices).keys() == {(0, 0), (0, 4), (0, 5), (0, 6)}
        slices.add(trajectory(10, 2, span("a", 0, 0, 2, first=False)))
        assert slices.stats()["num_episodes"] == 3


def test_a_trajectory_without_spans_is_cut_by_its_dones_which_lose_their_bootstrap_rows(tmp_path: Path) -> None:
    dones = np.zeros((8, 2), bool)
    dones[[0, 4]] = True  # Bootstrap rows, of two parts of three steps.
    dones[2, 0] = True
    with buffer(tmp_path, slice_len=2) as slices:
        slices.add(trajectory(0, 6, dones=dones))
        assert slices.size() == 12
        assert seen(slices).keys() == {(0, 0), (0, 2), (0, 3), (0, 4), *((1, start) for start in range(5))}
        assert not slices.sample(1)["dones"].all()


def test_a_trajectory_without_spans_is_cut_by_its_episode_ids(tmp_path: Path) -> None:
    with buffer(tmp_path, slice_len=2) as slices:
        slices.add(trajectory(0, 4, episode=np.array([[0, 0], [0, 1], [1, 1], [1, 1]])))
        assert seen(slices).keys() == {(0, 0), (0, 2), (1, 1), (1, 2)}


# ------------------------------------------------------------------ what is refused


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tree: tree.pop("number"), "number is missing"),
        (lambda tree: tree["obs"].pop("step"), "obs/step is missing"),
        (lambda tree: tree.update(extra=np.zeros(5)), "extra is new"),
        (lambda tree: tree.update(number=np.zeros(5, np.float32)), "number has rows <f4 \\[\\] instead of <i8"),
        (lambda tree: tree["obs"].update(wide=np.zeros((5, 3))), "obs/wide has rows <f8 \\[3\\] instead of .* \\[2\\]"),
        (lambda tree: tree.update(number=np.zeros(4, int)), "different numbers of steps"),
        (lambda tree: tree.update(number=np.array([object()] * 5)), "dtype object cannot be written"),
        (lambda tree: tree.update(number=np.zeros((5, 0))), "'number' has shape .*has no steps"),
        (lambda tree: tree.update(number=np.float64(3)), "'number' has shape \\[\\], which"),
        (lambda tree: tree.update(lengths=np.zeros(5)), "have names that samples use"),
        (lambda tree: tree.clear(), "an episode has no arrays"),
    ],
)
def test_arrays_that_differ_from_those_stored_are_refused_by_name(tmp_path: Path, change: Any, message: str) -> None:
    with buffer(tmp_path) as slices:
        slices.add(episode(0, 5), at=(0, 0))
        tree = episode(1, 5)
        change(tree)
        with pytest.raises(RecordError, match=message):
            slices.add(tree, at=(0, 1))
        assert slices.position == {0: 1}
        assert slices.size() == 5
        assert seen(slices, 10).keys() <= {(0, 0), (0, 1)}


def test_a_refused_first_item_does_not_decide_the_arrays(tmp_path: Path) -> None:
    with buffer(tmp_path, capacity=8) as slices:
        with pytest.raises(RecordError, match="9 steps at once do not fit into a ring of 8; raise its capacity"):
            slices.add({"other": np.zeros(9)})
        slices.add(episode(0, 5))
        assert seen(slices, 10)


def test_trajectories_that_are_invalid_or_without_episodes_are_refused(tmp_path: Path) -> None:
    with buffer(tmp_path) as slices:
        with pytest.raises(RecordError, match="has no episode spans, and none of the arrays"):
            slices.add(trajectory(0, 4))
        with pytest.raises(RecordError, match="are not within 4 rows"):
            slices.add(trajectory(0, 4, span("a", 0, 0, 5)))
        with pytest.raises(RecordError, match="its spans tell which episodes continue"):
            slices.add(trajectory(0, 4, span("a", 0, 0, 4)), episode="a")
        assert slices.size() == 0


# ------------------------------------------------------------------ the log


def test_a_record_below_the_position_is_not_added_again(tmp_path: Path) -> None:
    with buffer(tmp_path) as slices:
        assert slices.position == {}
        assert slices.add(episode(0, 5), at=(0, 3))
        assert slices.add(episode(1, 5), at=(1, 0))
        assert not slices.add(episode(2, 5), at=(0, 3))
        assert not slices.add(episode(2, 5), at=(0, 1))
        assert slices.skip((0, 4))
        assert not slices.skip((0, 4))
        assert not slices.add(episode(2, 5), at=(0, 4))
        assert slices.position == {0: 5, 1: 1}
        assert slices.size() == 10


def test_two_buffers_of_a_seed_draw_the_same_and_another_seed_does_not(tmp_path: Path) -> None:
    samples = []
    for name, seed in [("a", 5), ("b", 5), ("c", 6)]:
        with buffer(tmp_path / name, capacity=50, seed=seed) as slices:
            collected = []
            for number in range(30):
                slices.add(episode(number, 4 + number % 5))
                collected.append(slices.sample(3)["obs"]["step"].tolist())
            samples.append(collected + [slices.sample(20)["obs"]["step"].tolist() for _draw in range(9)])
    assert samples[0] == samples[1] != samples[2]
    assert len({str(drawn) for drawn in samples[0][-9:]}) == 9


def test_a_length_is_counted_once_and_tracked_from_then_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with buffer(tmp_path, capacity=500) as slices:
        counted = []

        class Counted(RankedSet):
            def __init__(self, mask: np.ndarray) -> None:
                counted.append(mask)
                super().__init__(mask)

        monkeypatch.setattr(episode_index, "RankedSet", Counted)
        for number in range(300):
            slices.add(episode(number, 5))
            slices.sample(2)
        assert len(counted) == 1


def test_threads_that_add_draw_and_save_see_no_torn_slice(tmp_path: Path) -> None:
    """Every value of a step names its episode, and the ring is overwritten many times."""
    failures: list[BaseException] = []
    adding = threading.Barrier(3)
    with buffer(tmp_path / "ring", capacity=120, slice_len=6) as slices:
        slices.add(map_leaves(lambda leaf: leaf * 0, episode(0, 20)))

        def guarded(work: Any) -> threading.Thread:
            def run() -> None:
                try:
                    work()
                except BaseException as error:
                    failures.append(error)

            return threading.Thread(target=run)

        def write(writer: int) -> None:
            adding.wait()
            for turn in range(80):
                number = 1000 * writer + turn // 2
                tree = map_leaves(lambda leaf: np.full_like(leaf, number), episode(0, 5 + turn % 7))  # noqa: B023
                slices.add(tree, episode=str(number), last=turn % 2 == 1)

        def draw() -> None:
            while any(thread.is_alive() for thread in writers):
                sample = slices.sample(5)
                for leaf in (sample["obs"]["step"], *np.moveaxis(sample["obs"]["wide"], 2, 0)):
                    assert (leaf == sample["number"][:, :1]).all()

        def save() -> None:
            while any(thread.is_alive() for thread in writers):
                slices.save(tmp_path / "copy")

        writers = [guarded(lambda w=w: write(w)) for w in (1, 2)]
        others = [guarded(draw), guarded(save)]
        for thread in writers:
            thread.start()
        adding.wait()
        for thread in others:
            thread.start()
        for thread in (*writers, *others):
            thread.join()
        assert failures == []
        with buffer(tmp_path / "copy", capacity=120, slice_len=6) as copy:
            sample = copy.sample(20)
            assert (sample["obs"]["step"] == sample["number"][:, :1]).all()


def test_the_snippets_of_the_page_draw_the_shapes_it_names(tmp_path: Path) -> None:
    namespace: dict[str, Any] = {}
    for snippet in blocks(section(page("control"), "Episode slices"), "python")[:2]:
        exec(compile(snippet, "docs/control.md", "exec"), namespace)
    drawn = namespace["draw"](tmp_path / "one")
    assert drawn["obs"]["state"].shape == (8, 80, 32)
    assert drawn["reward"].shape == drawn["truncated"].shape == (8, 80)
    with namespace["mixed"](tmp_path / "two") as both:
        assert (both.auto.stats()["capacity"], both.hil.stats()["capacity"]) == (100_000, 100_000)
        assert both.auto.slice_len == 80


def test_the_page_names_every_setting_with_its_default() -> None:
    settings = section(page("control"), "Settings of slices")
    rows = dict(re.findall(r"^\| `(\w+)` \| ([^|]+) \|", settings, re.MULTILINE))
    parameters = inspect.signature(EpisodeSliceBuffer).parameters
    assert rows.keys() == parameters.keys() - {"directory"}
    for name, shown in rows.items():
        default = parameters[name].default
        if name != "boundaries":
            assert shown.replace(",", "").strip("`") == str(default), name
    assert rows["boundaries"] == "`episode`; `done`, `dones`, `next/done`"
    assert (Boundaries().episode, *Boundaries().done) == ("episode", "done", "dones", "next/done")
