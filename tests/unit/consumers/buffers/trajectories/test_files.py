"""Files, journal, index and cache of trajectories, compared with plain models."""

import contextlib
import io
import json
import os
import zipfile
from collections import deque
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from rollstream.consumers.buffers.storage import journal as journals
from rollstream.consumers.buffers.storage.segments import ArraySpec
from rollstream.consumers.buffers.trajectories import npz
from rollstream.consumers.buffers.trajectories.buffer import TrajectoryReplayBuffer
from rollstream.consumers.buffers.trajectories.formats import format_named
from rollstream.consumers.buffers.trajectories.index import ROW, Description, TrajectoryIndex, uuid_of
from rollstream.consumers.buffers.trajectories.journal import NAME, JournalContent, read_content, write_content
from rollstream.consumers.buffers.trajectories.rows import check_trajectory
from rollstream.consumers.buffers.trajectories.shelf import TrajectoryCache
from rollstream.topics.errors import RecordError
from rollstream.topics.files.atomic_files import StoreError
from rollstream.topics.wire.trajectory_arrays import Trajectory, nest
from tests.support.paths import ROOT
from tests.support.trajectory_batches import same, trajectory, untorn

DESCRIPTION = Description(4, 2, 80, "w", "env", "npz")
LAYOUT = (ArraySpec("rewards", "<f4", ()),)


# ---------------------------------------------------------------------- files


def write(path: Path, given: Trajectory) -> None:
    part = check_trajectory(given)
    assert part is not None
    format_named("npz").check(part)
    with open(path, "wb") as file:
        format_named("npz").write(file, part)


def test_numpy_loads_a_file_and_its_arrays_have_the_layout_of_memory(tmp_path: Path) -> None:
    path = tmp_path / "x.npz"
    original = trajectory(3)
    write(path, original)
    loaded = np.load(path)
    np.testing.assert_array_equal(loaded["curr_obs/state"], original.arrays["curr_obs"]["state"])
    assert zipfile.ZipFile(path).testzip() is None
    same(format_named("npz").read(path), original)
    _, arrays = npz.read(path)
    for array in arrays.values():
        assert not array.flags.owndata
        assert not array.flags.writeable
        assert array.ctypes.data % 64 == 0


array_types = st.one_of(
    hnp.integer_dtypes(),
    hnp.floating_dtypes(sizes=(16, 32, 64)),
    hnp.boolean_dtypes(),
    hnp.unicode_string_dtypes(max_len=3),
)


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_arrays_of_any_type_and_shape_are_restored_bit_for_bit(tmp_path_factory: Any, data: st.DataObject) -> None:
    shapes = hnp.array_shapes(min_dims=0, max_dims=2, min_side=0, max_side=3)
    names = data.draw(
        st.lists(
            st.text(st.characters(exclude_characters="/", codec="utf-8"), min_size=1, max_size=4),
            max_size=3,
            unique=True,
        )
    )
    arrays: dict[str, Any] = {"rewards": np.arange(6.0).reshape(3, 2)}
    for name in names:
        arrays[f"x{name}"] = {"y": data.draw(hnp.arrays(data.draw(array_types), (3, 2, *data.draw(shapes))))}
    original = Trajectory(arrays=arrays, environment="env")
    path = tmp_path_factory.mktemp("any") / "x.npz"
    write(path, original)
    read_back = format_named("npz").read(path)
    for name, it in arrays.items():
        ours, theirs = (tree["y"] if isinstance(tree, dict) else tree for tree in (read_back.arrays[name], it))
        assert ours.shape == theirs.shape
        assert ours.dtype == theirs.dtype.newbyteorder("<")
        assert ours.tobytes() == theirs.astype(ours.dtype).tobytes()


def test_extension_types_keep_their_names(tmp_path: Path) -> None:
    original = Trajectory(arrays={"rewards": np.arange(8).reshape(4, 2).astype(ml_dtypes.bfloat16)}, environment="env")
    write(tmp_path / "x.npz", original)
    same(format_named("npz").read(tmp_path / "x.npz"), original)


def test_a_trajectory_too_large_for_a_file_is_refused_before_it_is_written() -> None:
    huge = np.broadcast_to(np.zeros((), "<f8"), (2**15, 2**14, 2))
    with pytest.raises(RecordError, match="too large for one file"):
        npz.check({"rewards": huge})


@pytest.mark.parametrize("path", ["/".join("\U0001f916" * 512 for _ in range(32)), "curr_obs/\ud800"])
def test_an_array_whose_path_no_file_can_have_is_refused_before_it_is_written(tmp_path: Path, path: str) -> None:
    rewards = np.zeros((4, 2), "<f4")
    with TrajectoryReplayBuffer(auto_save=True, auto_save_path=tmp_path) as replay:
        with pytest.raises(RecordError, match=r"shorten it|rename it"):
            replay.add(Trajectory(arrays=nest({"rewards": rewards, path: rewards})))
        assert replay.add(Trajectory(arrays=nest({"rewards": rewards, path.split("/")[0]: rewards})))


def test_an_incomplete_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.npz"
    write(path, trajectory(0))
    whole = path.read_bytes()
    np.savez(tmp_path / "other.npz", rewards=np.zeros(3))
    spoiled = [whole[:length] for length in (0, 3, 40, 700, len(whole) // 2)]
    spoiled += [b"x" * 1000, (tmp_path / "other.npz").read_bytes()]
    for content in spoiled:
        path.write_bytes(content)
        with pytest.raises(StoreError, match="not a complete trajectory"):
            format_named("npz").read(path)


# ---------------------------------------------------------------------- the journal


def entries(count: int, descriptions: int = 1) -> np.ndarray:
    actual = np.zeros(count, ROW)
    actual["id"], actual["description"] = np.arange(count), np.arange(count) % descriptions
    actual["size_bytes"] = 8
    return actual


def test_files_of_other_kinds_are_refused(tmp_path: Path) -> None:
    for other in (b"", b"x" * 200):
        (tmp_path / NAME).write_bytes(other)
        with pytest.raises(StoreError, match="was not written by this program"):
            read_content(tmp_path)


def test_a_journal_has_the_content_that_was_written(tmp_path: Path) -> None:
    content = JournalContent(
        entries=entries(10, 3),
        descriptions=[
            DESCRIPTION,
            DESCRIPTION._replace(folder="loaded-ä"),
            DESCRIPTION._replace(environment="\n" * 60),
        ],
        layout=LAYOUT,
        position={0: 4, 7: 2**40},
        seed=2**127 + 3,
        draws=12,
        counter=2**50,
    )
    write_content(tmp_path, content)
    actual = read_content(tmp_path)
    assert [actual[n] for n in range(10)] == [content[n] for n in range(10)]
    assert (actual.layout, actual.position, actual.seed, actual.draws, actual.counter) == (
        content.layout,
        content.position,
        content.seed,
        content.draws,
        content.counter,
    )


def test_a_negative_seed_draws_the_same_after_reopening(tmp_path: Path) -> None:
    with TrajectoryReplayBuffer(-5, auto_save=True, auto_save_path=tmp_path / "b") as buffer:
        buffer.add(trajectory(0))
        first = untorn(buffer.sample(8), 8)
    plain = TrajectoryReplayBuffer(-5)
    plain.add(trajectory(0))
    assert untorn(plain.sample(8), 8) == first
    with TrajectoryReplayBuffer(-5, auto_save=True, auto_save_path=tmp_path / "b") as again:
        assert untorn(again.sample(8), 8) == untorn(plain.sample(8), 8), "the second draw"


def test_a_journal_does_not_grow_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journals, "LEAST_BYTES", 4000)
    path = tmp_path / "b"
    with TrajectoryReplayBuffer(auto_save=True, auto_save_path=path, max_trajectories=3) as buffer:
        for number in range(200):
            buffer.add(trajectory(number, weights=f"version {number}"), at=(0, number))
            buffer.flush()
    assert (path / NAME).stat().st_size < 6000
    with TrajectoryReplayBuffer(auto_save=True, auto_save_path=path) as again:
        assert (again.trajectory_ids, dict(again.position)) == ([197, 198, 199], {0: 200})
    content = read_content(path)
    assert [content[place].description.model_weights_id for place in range(3)] == [
        f"version {n}" for n in (197, 198, 199)
    ]


@pytest.mark.long
def test_a_million_trajectories_open_in_seconds_and_take_tens_of_bytes_each(tmp_path: Path) -> None:
    """The bounds are several times the measured values."""
    import time

    count = 1_000_000
    descriptions = [DESCRIPTION._replace(model_weights_id=f"version {n}") for n in range(1000)]
    write_content(
        tmp_path,
        JournalContent(entries=entries(count, 1000), descriptions=descriptions, layout=LAYOUT, counter=count, seed=1),
    )
    assert (tmp_path / NAME).stat().st_size / count < 60
    began = time.process_time()
    with TrajectoryReplayBuffer(
        auto_save=True, auto_save_path=tmp_path, enable_cache=False, sample_window_size=0
    ) as buffer:
        assert time.process_time() - began < 10
        assert (len(buffer), buffer.total_samples) == (count, 8 * count)
        began = time.process_time()
        for _ in range(1000):
            assert buffer.window_samples == 8 * count
        assert time.process_time() - began < 1
    content, index = read_content(tmp_path), TrajectoryIndex()
    index.extend(content.entries, content.descriptions)
    assert index.nbytes / count < 80


# ---------------------------------------------------------------------- index and cache


changes = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(1, 9)),
        st.tuples(st.just("drop"), st.integers(0, 3)),
        st.tuples(st.just("bound"), st.integers(1, 60)),
    ),
    max_size=60,
)


@settings(max_examples=60, deadline=None)
@given(changes, st.integers(0, 5))
def test_the_index_is_a_list_of_trajectories(changes: list[tuple[str, int]], window: int) -> None:
    index, model = TrajectoryIndex(), list[tuple[int, int]]()
    for change, number in changes:
        if change == "add":
            index.append(
                uuid_of(str(index.counter)),
                DESCRIPTION._replace(steps=number, model_weights_id=str(number)),
                10 * number,
            )
            model.append((index.counter - 1, number))
        elif change == "drop":
            gone = index.drop(min(number, len(model)))
            assert [entry.trajectory_id for entry in gone] == [n for n, _ in model[:number]]
            del model[:number]
        else:
            index.drop(index.over(4, 10 * number))
            while len(model) > 4 or sum(steps for _, steps in model) > number:
                del model[0]
        assert [
            (entry.trajectory_id, entry.description.steps) for entry in map(index.__getitem__, range(len(index)))
        ] == model
        assert index.size_bytes == sum(10 * steps for _, steps in model)
        seen = model[-window:] if window else model
        ends = np.cumsum([2 * steps for _, steps in seen])
        newest = index.window(window)
        assert [int(end) - newest.base for end in newest.ends] == list(ends)
        assert newest.samples == sum(2 * steps for _, steps in seen)
        assert newest.first == len(model) - len(seen)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.one_of(st.integers(1, 9), st.just(0)), max_size=60), st.integers(0, 4))
def test_the_cache_is_a_queue_of_arrays(changes: list[int], bound: int) -> None:
    """A number adds that many rows, 0 drops the oldest."""
    layout = (ArraySpec("a", "<i8", ()), ArraySpec("b", "<i4", (2,)))
    cache, model = TrajectoryCache(bound), deque[np.ndarray](maxlen=bound or None)
    for n, rows in enumerate(changes):
        if rows:
            values = 100 * n + np.arange(rows)
            cache.put(layout, {"a": values, "b": np.stack([values, values], 1)}, rows)
            model.append(values)
        elif model:
            cache.drop(1)
            model.popleft()
        assert len(cache) == len(model)
        places = np.array([p for p, kept in enumerate(model) for _ in kept], np.int64)
        local = np.array([i for kept in model for i in range(len(kept))], np.int64)
        batch = {"a": np.zeros(len(places), "<i8"), "b": np.zeros((len(places), 2), "<i4")}
        if len(model):
            cache.gather(places, local, batch)
            np.testing.assert_array_equal(batch["a"], np.concatenate(list(model)))
            backwards = np.arange(len(places))[::-1]
            cache.gather(places, local, batch, backwards)
            np.testing.assert_array_equal(batch["b"][::-1, 1], np.concatenate(list(model)))
            np.testing.assert_array_equal(cache.rows(0)["a"], model[0])


def test_one_long_trajectory_takes_only_its_own_memory_and_releases_it() -> None:
    cache = TrajectoryCache(50)

    def put(steps: int = 4) -> None:
        rows = 2 * steps
        cache.put((ArraySpec("a", "<i8", ()),), {"a": np.arange(rows)}, rows)

    for _ in range(50):
        put()
    usual = cache.nbytes
    put(4000)
    assert cache.nbytes < 2 * 1000 * usual / 50
    for _ in range(50):
        put()
    assert cache.nbytes < 4 * usual


def test_members_of_the_file_have_their_checksums(tmp_path: Path) -> None:
    path = tmp_path / "x.npz"
    write(path, trajectory(0))
    data = bytearray(path.read_bytes())
    place = data.index(np.float32(7).tobytes())
    data[place] ^= 1
    assert zipfile.ZipFile(io.BytesIO(bytes(data))).testzip() is not None
    assert os.path.getsize(path) == len(data)


def test_a_header_with_evil_values_or_a_flipped_bit_is_a_documented_error(tmp_path: Path) -> None:
    path = tmp_path / "trajectory_0_w.npz"
    with open(path, "wb") as file:
        npz.write(file, {"uid": "x" * 600}, {"rewards": np.ones((2, 3)), "q": np.ones((2, 3, 4), "u1")})
    whole = path.read_bytes()
    begin, end = whole.index(b"{"), whole.index(b"PK\3\4", 10)
    decoded = json.loads(whole[begin:end])
    arrays: list[Any] = [
        *([["r", "<f8", shape, 0]] for shape in ([-1], [-1, -6], [2, -3], [10**12, 10**12], [2**63], ["a"], [2.5], 2)),
        *([["r", "<f8", [2, 3], place]] for place in (-90, 10**30, 10**3, "0", None)),
        *([["r", dtype, [2, 3], 0]] for dtype in (None, "|O", "<U0", "<f8,<f8", 7)),
        *([[name, "<f8", [2], 0]] for name in (3, None, True, 1.5)),
        *({"r": 1}, None, [[1, 2, 3]], [[["r"], "<f8", [2], 0]], "arrays"),
    ]
    evil = [{**decoded, "about": {}, "arrays": value} for value in arrays]
    evil += [{**decoded, "about": {}, "end": end} for end in (-(10**30), None, 10**30)]
    evil += [{name: value for name, value in decoded.items() if name != "about"}, {**decoded, "about": None}, [], 1]
    for value in evil:
        path.write_bytes(whole[:begin] + json.dumps(value).encode().ljust(end - begin) + whole[end:])
        with pytest.raises(RecordError, match=r"is not a complete trajectory .*restore it") as raised:
            npz.read(path)
        assert isinstance(raised.value, StoreError), value
    for bit in np.random.default_rng(5).integers(0, 8 * end, 500).tolist():
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        with contextlib.suppress(StoreError):  # a text that is another text is still whole
            npz.read(path)


# ---------------------------------------------------------------------- what others read

RLINF = ROOT / "tests" / "fixtures" / "rlinf"
"""Files that RLinf's buffer writes for the two trajectories of `as_rlinf` (format pt), with auto_save."""


def as_rlinf(number: int) -> Trajectory:
    rows = (number * 1000 + np.arange(6, dtype="<f4")).reshape(3, 2, 1)
    arrays = {"rewards": rows, "curr_obs": {"states": np.repeat(rows, 4, axis=2)}, "dones": np.zeros((4, 2, 1), bool)}
    return Trajectory(arrays=arrays, environment="", max_episode_length=80, model_weights_id=str(7 + number))


def documents(directory: Path) -> tuple[Any, Any]:
    """The index, without the fields that only this program writes, and the metadata."""
    index = json.loads((directory / "trajectory_index.json").read_bytes())
    for entry in index["trajectory_index"].values():
        entry.pop("uuid", None)
    return index, json.loads((directory / "metadata.json").read_bytes())


def test_an_auto_save_directory_has_after_flush_and_close_what_rlinf_writes(tmp_path: Path) -> None:
    theirs, metadata = documents(RLINF)
    metadata["trajectory_format"] = "npz"
    directory = tmp_path / "b"
    with TrajectoryReplayBuffer(auto_save=True, auto_save_path=directory, max_trajectories=2) as buffer:
        buffer.add_trajectories([as_rlinf(0), as_rlinf(1)])
        buffer.flush()
        assert documents(directory) == (theirs, metadata)
        buffer.add(as_rlinf(2))
    index, metadata = documents(directory)
    assert index["trajectory_id_list"] == [1, 2]
    assert (metadata["size"], metadata["total_samples"], metadata["trajectory_counter"]) == (2, 12, 3)
    for number in index["trajectory_id_list"]:
        weights = index["trajectory_index"][str(number)]["model_weights_id"]
        assert (directory / f"trajectory_{number}_{weights}.npz").is_file()


def test_a_checkpoint_and_a_directory_that_loaded_it_say_the_same(tmp_path: Path) -> None:
    theirs, _ = documents(RLINF)
    buffer = TrajectoryReplayBuffer()
    buffer.add_trajectories([as_rlinf(0), as_rlinf(1)])
    buffer.save(tmp_path / "saved")
    with TrajectoryReplayBuffer(auto_save=True, auto_save_path=tmp_path / "b") as into:
        into.load(tmp_path / "saved")
    assert documents(tmp_path / "saved")[0] == documents(tmp_path / "b")[0] == theirs
    assert {path.name for path in (tmp_path / "b").glob("*.npz")} == {"trajectory_0_7.npz", "trajectory_1_8.npz"}
    with TrajectoryReplayBuffer(auto_save=True, auto_save_path=tmp_path / "b") as again:
        assert len(again) == 2


@pytest.mark.long
@pytest.mark.skipif("ROLLSTREAM_RLINF" not in os.environ, reason="ROLLSTREAM_RLINF names no checkout of RLinf")
def test_rlinf_loads_a_directory_and_draws_from_it(tmp_path: Path) -> None:
    from tests.bench.trajectory_row import rlinf_of

    Theirs, _ = rlinf_of(Path(os.environ["ROLLSTREAM_RLINF"]))
    with TrajectoryReplayBuffer(auto_save=True, auto_save_path=tmp_path / "b", trajectory_format="pt") as buffer:
        buffer.add_trajectories([as_rlinf(0), as_rlinf(1)])
        buffer.flush()
        theirs = Theirs(sample_window_size=10)
        theirs.load_checkpoint(str(tmp_path / "b"))
    assert (theirs.size, theirs._total_samples, theirs._trajectory_counter) == (2, 12, 2)
    batch = theirs.sample(12)
    assert batch["rewards"].shape == (12, 1)
    assert {int(reward) // 1000 for reward in batch["rewards"]} == {0, 1}
    np.testing.assert_array_equal(batch["curr_obs"]["states"][:, 3:], batch["rewards"])
