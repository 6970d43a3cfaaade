"""Random histories of each buffer, against a model in memory: what it holds, gives, saves, and has when reopened."""

import tempfile
from collections import deque
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from rollstream.consumers.buffers.groups.config import GroupStoreConfig
from rollstream.consumers.buffers.groups.store import GroupReplayBuffer
from rollstream.consumers.buffers.slices.buffer import EpisodeSliceBuffer, NothingToDraw
from rollstream.consumers.buffers.trajectories.buffer import NothingToSample, TrajectoryReplayBuffer
from tests.support.rollout_buffers import buffer as rollout_buffer
from tests.support.rollout_buffers import group, rollout
from tests.support.trajectories import numbered


class OnDisk(RuleBasedStateMachine):
    """A machine with a directory."""

    def __init__(self) -> None:
        super().__init__()
        self._temporary = tempfile.TemporaryDirectory(prefix="machine")
        self.directory = Path(self._temporary.name)

    def teardown(self) -> None:
        self._temporary.cleanup()


@dataclass
class Held:
    """A rollout of the model."""

    uid: str
    environment: str
    step: int
    at: float
    draws: int = 0


class RolloutMachine(OnDisk):
    """Freshness by step and by time, capacity by environment, retirement after two draws."""

    CAPACITY, DRAWS, STEPS, SECONDS = 4, 2, 3, 100.0

    def __init__(self) -> None:
        super().__init__()
        self.now, self.step, self.added = 10_000.0, 0, 0
        self.buffer = self.opened()
        self.held: list[Held] = []

    def opened(self) -> Any:
        return rollout_buffer(
            capacity=self.CAPACITY,
            max_samples=self.DRAWS,
            max_rollout_step_delay=self.STEPS,
            max_rollout_timestamp_delay=self.SECONDS,
            clock=lambda: self.now,
        )

    def fresh(self, held: Held) -> bool:
        return held.step >= self.step - self.STEPS and held.at > self.now - self.SECONDS

    def refresh(self) -> None:
        self.held = [held for held in self.held if self.fresh(held)]

    @rule(environment=st.sampled_from("ab"), size=st.integers(1, 4), step=st.integers(0, 9), age=st.integers(0, 120))
    def add(self, environment: str, size: int, step: int, age: int) -> None:
        self.added += 1
        members = group(
            f"{self.added}-", [*map(float, range(size))], environment=environment, step=step, at=self.now - age
        )
        new = [Held(member.uid, environment, step, self.now - age) for member in members]
        kept = [held for held in new if self.fresh(held)]
        assert self.buffer.add(members) == len(kept)
        if kept:
            self.held += kept
            own = [held for held in self.held if held.environment == environment]
            gone = {held.uid for held in own[: -self.CAPACITY]}
            self.held = [held for held in self.held if held.uid not in gone]

    @rule(step=st.integers(0, 9))
    def set_step(self, step: int) -> None:
        before, self.step = len(self.held), step
        self.refresh()
        assert self.buffer.set_current_step(step) == before - len(self.held)

    @rule(seconds=st.integers(1, 60))
    def wait(self, seconds: int) -> None:
        self.now += seconds
        self.refresh()
        self.buffer.set_current_step(self.step)

    @rule(size=st.integers(1, 5))
    def sample(self, size: int) -> None:
        sample = self.buffer.sample(size)
        if len(self.held) < size:
            assert sample is None
            return
        by_uid = {held.uid: held for held in self.held}
        assert len({item.rollout.uid for item in sample}) == size
        for item in sample:
            held = by_uid[item.rollout.uid]
            held.draws += 1
            assert (item.usage_count, item.weight_step) == (held.draws, held.step)
        self.held = [held for held in self.held if held.draws < self.DRAWS]

    @rule()
    def save_and_load(self) -> None:
        self.buffer.save(self.directory / "saved")
        self.buffer = self.opened()
        self.buffer.load(self.directory / "saved")
        self.buffer.set_current_step(self.step)

    @invariant()
    def holds_what_the_model_holds(self) -> None:
        sizes = {name: sum(held.environment == name for held in self.held) for name in "ab"}
        assert self.buffer.size() == len(self.held)
        assert self.buffer.stats()["env_sizes"] == {name: size for name, size in sizes.items() if size}


class TrajectoryMachine(OnDisk):
    """A window of three of at most five trajectories, in files that outlive the buffer."""

    WINDOW, MOST = 3, 5

    def __init__(self) -> None:
        super().__init__()
        self.held: list[tuple[int, int]] = []
        self.saved: tuple[list[tuple[int, int]], int] | None = None
        self.added = self.next_offset = 0
        self.buffer = self.opened()

    def opened(self) -> TrajectoryReplayBuffer:
        return TrajectoryReplayBuffer(
            sample_window_size=self.WINDOW,
            cache_size=2,
            auto_save=True,
            auto_save_path=self.directory / "buffer",
            max_trajectories=self.MOST,
        )

    def new(self, steps: int) -> Any:
        trajectory = numbered(self.added, steps=steps)
        arrays = {**trajectory.arrays, "rewards": np.ones((steps, 2), np.float32)}
        return numbered(self.added, steps=steps, arrays=arrays)

    def put(self, steps: int) -> None:
        self.held = [*self.held, (self.added, steps)][-self.MOST :]
        self.added += 1

    @rule(steps=st.integers(1, 4))
    def add(self, steps: int) -> None:
        assert self.buffer.add(self.new(steps))
        self.put(steps)

    @rule(steps=st.integers(1, 4), back=st.integers(0, 2))
    def add_from_the_log(self, steps: int, back: int) -> None:
        offset = max(0, self.next_offset - back)
        is_new = offset == self.next_offset
        assert self.buffer.add(self.new(steps), at=(0, offset)) == is_new
        if is_new:
            self.put(steps)
            self.next_offset += 1

    @rule()
    def skip(self) -> None:
        self.buffer.skip((0, self.next_offset))
        self.next_offset += 1

    @rule(size=st.integers(1, 20))
    def sample(self, size: int) -> None:
        window = self.held[-self.WINDOW :]
        if not window:
            with pytest.raises(NothingToSample):
                self.buffer.sample(size)
            return
        drawn = self.buffer.sample(size)["actions"]
        assert len(drawn) == min(size, sum(2 * steps for _number, steps in window))
        assert {int(number) for number in np.unique(drawn)} <= {number for number, _steps in window}

    @rule()
    def close_and_open(self) -> None:
        self.buffer.close()
        self.buffer = self.opened()

    @rule()
    def clear(self) -> None:
        self.buffer.clear()
        self.held, self.added = [], 0

    @rule()
    def save(self) -> None:
        self.buffer.save(self.directory / "saved")
        self.saved = (self.held.copy(), self.next_offset)

    @precondition(lambda self: self.saved is not None)
    @rule()
    def has_what_was_saved(self) -> None:
        assert self.saved is not None
        other = TrajectoryReplayBuffer(sample_window_size=self.MOST)
        other.load(self.directory / "saved")
        held, position = self.saved
        assert other.total_samples == sum(2 * steps for _number, steps in held)
        assert other.position.get(0, 0) == position
        if held:
            assert {*np.unique(other.sample(200)["actions"]).tolist()} <= {number for number, _steps in held}

    @invariant()
    def holds_what_the_model_holds(self) -> None:
        assert self.buffer.trajectory_ids == [number for number, _steps in self.held]
        assert self.buffer.trajectory_counter == self.added
        assert self.buffer.total_samples == sum(2 * steps for _number, steps in self.held)
        assert self.buffer.window_samples == sum(2 * steps for _number, steps in self.held[-self.WINDOW :])
        assert self.buffer.position.get(0, 0) == self.next_offset

    def teardown(self) -> None:
        self.buffer.close()
        super().teardown()


class SliceMachine(OnDisk):
    """Slices of three steps from a ring of twelve, of episodes that may stay open."""

    CAPACITY, LENGTH = 12, 3

    def __init__(self) -> None:
        super().__init__()
        self.ring: deque[tuple[int, int]] = deque(maxlen=self.CAPACITY)
        self.episodes = self.next_offset = 0
        self.open: dict[int, int] = {}
        self.buffer = self.opened()

    def opened(self) -> EpisodeSliceBuffer:
        return EpisodeSliceBuffer(self.directory / "ring", self.CAPACITY, self.LENGTH)

    def steps(self, number: int, begin: int, count: int) -> dict[str, Any]:
        self.ring.extend((number, step) for step in range(begin, begin + count))
        return {"number": np.full(count, number), "step": np.arange(begin, begin + count)}

    @rule(count=st.integers(1, 7))
    def add(self, count: int) -> None:
        assert self.buffer.add(self.steps(self.episodes, 0, count))
        self.episodes += 1

    @rule(count=st.integers(1, 7), back=st.integers(0, 1))
    def add_from_the_log(self, count: int, back: int) -> None:
        offset = max(0, self.next_offset - back)
        if offset < self.next_offset:
            old = {"number": np.full(count, -1), "step": np.arange(count)}
            assert not self.buffer.add(old, at=(0, offset))
            return
        assert self.buffer.add(self.steps(self.episodes, 0, count), at=(0, offset))
        self.episodes += 1
        self.next_offset += 1

    @rule()
    def close_and_open(self) -> None:
        self.buffer.close()
        self.buffer = self.opened()

    @rule()
    def save_and_load(self) -> None:
        self.buffer.save(self.directory / "saved")
        self.buffer.load(self.directory / "saved")

    @rule()
    def sample(self) -> None:
        there = set(self.ring)
        starts = {
            (number, step) for number, step in there if all((number, step + n) in there for n in range(self.LENGTH))
        }
        if not starts:
            with pytest.raises(NothingToDraw):
                self.buffer.sample(1)
            return
        drawn = self.buffer.sample(30)
        assert (drawn["number"] == drawn["number"][:, :1]).all()
        assert (drawn["step"] == drawn["step"][:, :1] + np.arange(self.LENGTH)).all()
        assert {*zip(drawn["number"][:, 0].tolist(), drawn["step"][:, 0].tolist(), strict=True)} <= starts

    @invariant()
    def holds_what_the_model_holds(self) -> None:
        stats = self.buffer.stats()
        assert self.buffer.size() == len(self.ring)
        assert stats["num_episodes"] == len({number for number, _step in self.ring})
        assert self.buffer.position.get(0, 0) == self.next_offset

    def teardown(self) -> None:
        self.buffer.close()
        super().teardown()


@dataclass
class OpenGroup:
    """A group of the model, and when it began."""

    began: float
    uids: list[str] = field(default_factory=list)


class GroupMachine(OnDisk):
    """Groups of three that seal when complete, or with two from a minute on."""

    CONFIG = GroupStoreConfig(target_group_size=3, min_group_size=2, seal_timeout_s=60.0)

    def __init__(self) -> None:
        super().__init__()
        self.now = 1000.0
        self.open: dict[tuple[str, int], OpenGroup] = {}
        self.sealed: list[list[str]] = []
        self.known: set[str] = set()
        self.store = self.opened()

    def opened(self) -> GroupReplayBuffer:
        return GroupReplayBuffer(self.directory, "env", self.CONFIG, clock=lambda: self.now)

    @rule(example=st.sampled_from("xy"), version=st.integers(0, 1), member=st.integers(0, 9))
    def add(self, example: str, version: int, member: int) -> None:
        uid = f"{example}-{version}-{member}"
        made = replace(rollout(uid, float(member % 2)), example_id=example, policy_version=version)
        assert self.store.add_rollout(made) == (uid not in self.known)
        self.pass_deadlines()
        if uid in self.known:
            return
        self.known.add(uid)
        mine = self.open.setdefault((example, version), OpenGroup(self.now))
        mine.uids.append(uid)
        if len(mine.uids) == 3:
            self.sealed.append(self.open.pop((example, version)).uids)
        self.pass_deadlines()

    @rule(seconds=st.integers(1, 50))
    def wait(self, seconds: int) -> None:
        self.now += seconds
        self.store.poll()
        self.pass_deadlines()

    def pass_deadlines(self) -> None:
        for key, mine in list(self.open.items()):
            if self.now - mine.began >= 60.0 and len(mine.uids) >= 2:
                self.sealed.append(self.open.pop(key).uids)

    @rule()
    def close_and_open(self) -> None:
        self.store.close()
        self.store = self.opened()
        for key, mine in list(self.open.items()):
            if len(mine.uids) >= 2:
                self.sealed.append(self.open.pop(key).uids)

    @invariant()
    def has_sealed_what_the_model_has(self) -> None:
        assert sorted([r.uid for r in one.rollouts] for one in self.store.groups()) == sorted(self.sealed)


# Many more with `make test ARGS="--hypothesis-profile=long -k machines"`. Those in memory are fast.
for _machine, _least in ((GroupMachine, 12), (RolloutMachine, 60), (SliceMachine, 12), (TrajectoryMachine, 12)):
    _most = max(_least, settings().max_examples // 100)
    _machine.TestCase.settings = settings(max_examples=_most, stateful_step_count=20)
TestGroups, TestRollouts = GroupMachine.TestCase, RolloutMachine.TestCase
TestSlices, TestTrajectories = SliceMachine.TestCase, TrajectoryMachine.TestCase
