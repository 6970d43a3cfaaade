"""Targets that give hostile records to replay buffers and stores, and that damage their files."""

import json
import shutil
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path

import numpy as np

from rollstream.consumers.buffers.groups.config import GroupStoreConfig
from rollstream.consumers.buffers.groups.view import GroupStore
from rollstream.consumers.buffers.rollouts.buffer import RolloutReplayBuffer
from rollstream.consumers.buffers.slices.buffer import EpisodeSliceBuffer, NothingToDraw
from rollstream.consumers.buffers.trajectories.buffer import NothingToSample, TrajectoryReplayBuffer
from rollstream.consumers.buffers.trajectories.filler import put
from rollstream.consumers.grouping.makers.batch_maker import FifoBatchMaker
from rollstream.topics.errors import RecordError, RollstreamError
from rollstream.topics.records import Rollout, TrainingBatch
from rollstream.topics.wire.codec import decode, encode
from rollstream.topics.wire.trajectory_arrays import to_record
from rollstream.topics.wire.validation import batch_problems
from tests.hostile.flood_targets import Fates, Target
from tests.support.batches import random_batch
from tests.support.group_stores import context
from tests.support.hostile_input import HostileInput
from tests.support.rollout_buffers import buffer, group
from tests.support.runs import rollout
from tests.support.slice_rings import feed, ring
from tests.support.trajectories import numbered

# ---------------------------------------------------------------------- records


def stored_groups(hostile: HostileInput, count: int, folder: Path) -> Fates:
    """Fill a store of groups from a hostile log, save it now and then, and open it again."""
    config = GroupStoreConfig(capacity_groups=1000)
    topics = {"rollouts": ("Rollout", "GroupCancelled", "Mark"), "batches": ("TrainingBatch",)}
    store = GroupStore(folder / "groups", config)
    for offset in range(count):
        topic = "batches" if hostile.random.random() < 0.05 else "rollouts"
        store.read(0, offset, 1_000 + offset, hostile.value(topics[topic]), topic=topic)
    fates: Fates = Counter(
        {name: number for name, number in store.stats().items() if isinstance(number, int) and number}
    )
    size = store.size()
    store.close()
    with closing(GroupStore(folder / "groups", config, read_only=True)) as again:
        assert again.size() == size
        for groups in again.environments.values():
            assert sum(len(whole.rollouts) for whole in groups.groups()) >= 0
    return fates


def held_rollouts(hostile: HostileInput, count: int, folder: Path) -> Fates:
    """Add hostile rollouts and batches to a rollout buffer; draw, save and load."""
    ageless = {"max_rollout_step_delay": -1, "max_rollout_timestamp_delay": -1.0}
    held = buffer(capacity=500, **ageless)
    fates: Fates = Counter()
    for number in range(count):
        kind = hostile.random.choice(("Rollout", "TrainingBatch"))
        try:
            record = decode(hostile.value((kind,)))
            if isinstance(record, TrainingBatch) and not batch_problems(record):
                added = held.add_training_batch(record)
            elif isinstance(record, Rollout):
                added = held.add([record, rollout("beside", number)])
            else:
                raise RecordError("no record of this buffer")
        except RecordError:
            fates["refused"] += 1
            continue
        fates["held" if added else "left out"] += 1
        if number % 100 == 0:
            held.sample()
    held.save(folder)
    again = buffer(**ageless)
    again.load(folder)
    assert again.size() == held.size()
    return fates


def trajectories(hostile: HostileInput, count: int, folder: Path) -> Fates:
    """Fill a trajectory buffer and a slice buffer from a hostile log, as the role `fill` does."""
    fates: Fates = Counter()
    sound = encode(to_record(numbered(1)))
    with (
        TrajectoryReplayBuffer(auto_save=True, auto_save_path=folder / "trajectories", max_trajectories=50) as whole,
        EpisodeSliceBuffer(folder / "slices", 500, 2) as slices,
    ):
        for offset in range(count):
            value = sound if offset % 50 == 0 else hostile.value(("TrajectoryRecord",))
            refused = put([whole, slices], (0, offset), value)
            fates["refused" if refused else "added"] += 1
            if offset % 200 == 100:
                _draws(partial(whole.sample, 3), partial(slices.sample, 4))
        assert whole.position == slices.position == {0: count}
    return fates


def _draws(*draws: Callable[[], object]) -> None:
    """Draw where there is something to draw."""
    for draw in draws:
        try:
            draw()
        except (NothingToSample, NothingToDraw):
            continue


# ---------------------------------------------------------------------- files


def _make_groups(folder: Path) -> None:
    store = GroupStore(folder, GroupStoreConfig(seal_timeout_s=1.0))
    rollouts = [rollout(name, member) for name in ("x", "y", "z") for member in range(4)]
    for offset, record in enumerate([*rollouts, rollout("open", 0)]):
        store.read(0, offset, 1_000, encode(record))
    store.read(0, 0, 0, encode(random_batch(0, rows=4)), topic="batches")
    store.close()


def _open_groups(folder: Path) -> None:
    with closing(GroupStore(folder, maker_of=lambda _environment: FifoBatchMaker(context()))) as store:
        for groups in store.environments.values():
            for group_id in groups.group_ids():
                groups.read_group(group_id)
            for batch_id in groups.batch_ids():
                groups.read_batch(batch_id)
        store.read(0, 100, 2_000, encode(rollout("later", 0)))


def _make_rollouts(folder: Path) -> None:
    held = buffer(seed=3, max_samples=3)
    held.add(group("g", [0.0, 1.0, 2.0]))
    held.add_training_batch(random_batch(0, rows=4))
    held.save(folder)


def _open_rollouts(folder: Path) -> None:
    held: RolloutReplayBuffer = buffer()
    held.load(folder)
    held.sample(2)


def _make_trajectories(folder: Path) -> None:
    with TrajectoryReplayBuffer(auto_save=True, auto_save_path=folder) as whole:
        for number in range(6):
            rewards = np.full((4, 2), number, np.float32)
            sound = numbered(number)
            whole.add({"arrays": {**sound.arrays, "rewards": rewards}}, at=(0, number))


def _open_trajectories(folder: Path) -> None:
    with TrajectoryReplayBuffer(auto_save=True, auto_save_path=folder, cache_size=2) as whole:
        _draws(lambda: whole.sample(20))
        whole.add(numbered(9), at=(0, 99))


def _make_slices(folder: Path) -> None:
    with ring(folder) as slices:
        for offset in range(12):
            feed(slices, offset)


def _open_slices(folder: Path) -> None:
    with ring(folder) as slices:
        _draws(lambda: slices.sample(20))
        feed(slices, 99)


def damaged(make: Callable[[Path], None], use: Callable[[Path], None]) -> Callable[[HostileInput, int, Path], Fates]:
    """Damage one file of a store in each turn; opening it raises one of our errors or gives what is not damaged."""

    def run(hostile: HostileInput, count: int, folder: Path) -> Fates:
        fates: Fates = Counter()
        sound, copy = folder / "sound", folder / "copy"
        make(sound)
        files = sorted(path.relative_to(sound) for path in sound.rglob("*") if path.is_file())
        for _ in range(count):
            shutil.copytree(sound, copy)
            path = copy / hostile.random.choice(files)
            path.write_bytes(damage(hostile, path))
            try:
                use(copy)
            except RollstreamError:
                fates["refused"] += 1
            else:
                fates["opened"] += 1
            shutil.rmtree(copy)
        return fates

    return run


def damage(hostile: HostileInput, path: Path, names: Sequence[str] = ("version", "files", "path")) -> bytes:
    """The bytes of a file with damage: some bytes, its end, all of it, or values of its JSON."""
    data = path.read_bytes()
    kind = hostile.random.random()
    if path.suffix == ".json" and kind < 0.4:
        return json.dumps(hostile.changed(json.loads(data), names)).encode("utf-8", "surrogatepass")
    if kind < 0.8:
        return hostile.damaged(data)
    return data[: hostile.random.randrange(len(data) + 1)] if kind < 0.95 else hostile.junk()


TARGETS = (
    Target("group store", stored_groups, 500, 60, piece=10_000),
    Target("rollout buffer", held_rollouts, 2_000, 300, piece=20_000),
    Target("trajectory and slice buffers", trajectories, 1_500, 200, piece=20_000),
    Target("files of a group store", damaged(_make_groups, _open_groups), 20, 3, piece=5_000),
    Target("files of a rollout buffer", damaged(_make_rollouts, _open_rollouts), 100, 5, piece=5_000),
    Target("files of a trajectory buffer", damaged(_make_trajectories, _open_trajectories), 20, 3, piece=5_000),
    Target("files of a slice buffer", damaged(_make_slices, _open_slices), 30, 10, piece=5_000),
)
