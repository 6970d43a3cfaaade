"""The rollout buffer by hand, from the log, by several processes and threads, on disk and killed: what it promises, and
each defect of buffers of its kind that it must not have."""

import os
import signal
import subprocess
import sys
import threading
from collections import deque
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import consumers
from consumers.batch_reader import Indexed, ReadBatch
from consumers.buffers.files import StoreError
from consumers.buffers.losses import EstimatorLoss
from consumers.buffers.rollout_buffer import ReplayBufferConfig, RolloutReplayBuffer, RolloutWithCount, TrainParams
from consumers.buffers.rollout_files import FILE
from consumers.grouping.testing import example_rollout
from tests.batches import random_batch
from tests.waiting import eventually
from topics.errors import ConfigurationError, DeadlineExceeded, RecordError
from topics.records import (
    BatchIndexEntry,
    OldGroup,
    OldMetadata,
    OldRollout,
    Rollout,
    RolloutBatch,
    RolloutMetadata,
    same,
)

NOW = 10_000.0


def rollout(
    uid: str, reward: float = 0.0, *, environment: str = "env", step: int = 0, at: float = NOW, length: int = 4
) -> Rollout:
    return example_rollout(
        uid,
        reward,
        environment=environment,
        tokens=np.arange(length, dtype="<i4"),
        metadata=RolloutMetadata(worker_id="w", timestamp=at, weight_step=step),
    )


def group(name: str, rewards: list[float], **fields: Any) -> list[Rollout]:
    return [rollout(f"{name}{i}", reward, **fields) for i, reward in enumerate(rewards)]


def buffer(**settings: Any) -> RolloutReplayBuffer:
    of = {"local_batch_size": 4, "max_samples": -1, "now": lambda: NOW, **settings}
    return RolloutReplayBuffer(**of)


def uids(sample: list[RolloutWithCount] | None) -> list[str]:
    assert sample is not None
    return [item.rollout.uid for item in sample]


# ---------------------------------------------------------------------- by hand


def test_names_and_defaults_are_those_it_is_known_by() -> None:
    config = TrainParams(optimizer="adamw").replay_buffer
    assert config == ReplayBufferConfig(
        capacity=4096, alpha=3.0, max_samples=1, max_rollout_step_delay=1, max_rollout_timestamp_delay=3600.0
    )
    of = RolloutReplayBuffer.of(config, local_batch_size=2, now=lambda: NOW)
    assert of.add_batches([[group("a", [1.0, 0.0])]]) == 2
    assert of.stats() == {
        "total_size": 2,
        "env_sizes": {"env": 2},
        "num_environments": 1,
        "total_batches_added": 1,
        "total_batches_sampled": 0,
        "left_out": {},
    }
    assert {item.usage_count for item in of.sample() or ()} == {1}
    assert of.stats()["total_batches_sampled"] == 1
    assert of.size() == 0


def test_leave_one_out_advantages_are_those_of_the_whole_group() -> None:
    of = buffer()
    of.add_batches([[group("a", [1.0, 0.0, 0.0, 1.0])]])
    found = {item.rollout.uid: item.advantage for item in of.sample() or ()}
    assert found == pytest.approx({"a0": 2 / 3, "a1": -2 / 3, "a2": -2 / 3, "a3": 2 / 3})


def test_a_group_of_one_has_no_advantage_and_other_losses_may_be_given() -> None:
    of = buffer(local_batch_size=1)
    of.add(group("a", [5.0]))
    assert [item.advantage for item in of.sample() or ()] == [0.0]
    other = buffer(local_batch_size=2, loss_module=EstimatorLoss("dr_grpo"))
    other.add(group("a", [1.0, 0.0]))
    assert sorted(float(item.advantage) for item in other.sample() or ()) == [-0.5, 0.5]


def test_an_estimator_that_normalises_over_batches_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"'reinforce_pp' normalises over the batches .*; take rloo, "):
        EstimatorLoss("reinforce_pp")


def test_groups_without_variance_are_dropped_when_asked() -> None:
    same_rewards, others = group("a", [0.3, 0.3]), group("b", [0.3, 0.4])
    assert buffer().add_batches([[same_rewards, others]]) == 4
    assert buffer(drop_zero_variance=True).add_batches([[same_rewards, others]]) == 2


def test_a_batch_is_not_judged_by_its_first_rollout() -> None:
    """Each by its own metadata, both ways: by step and by time, when it comes and when time goes on."""
    of = buffer(max_rollout_step_delay=2, max_rollout_timestamp_delay=100.0, local_batch_size=1)
    of.set_current_step(10)
    mixed = [
        rollout("too old a step", step=7),
        rollout("old", step=8, at=NOW - 50),
        rollout("new", step=10),
        rollout("too old", step=10, at=NOW - 100),
        rollout("of a step to come", step=11),
    ]
    assert of.add_batches([[mixed]]) == 2
    assert of.set_current_step(11) == 1
    assert uids(of.sample()) == ["new"]


def test_what_got_old_since_the_step_was_set_is_not_drawn() -> None:
    clock = [NOW]
    of = buffer(now=lambda: clock[0], local_batch_size=1)
    of.add(group("a", [0.0, 1.0]))
    clock[0] += 3600.0
    assert of.sample() is None
    assert of.size() == 0


def test_old_batches_give_their_metadata_to_each_rollout() -> None:
    def old(reward: float, *metadata: OldMetadata) -> OldRollout:
        return OldRollout(
            env_name="env",
            env_example_id="x",
            prompt_tokens=np.array([1], "<i4"),
            response_tokens=np.array([2, 3], "<i4"),
            response_logprobs=np.array([-1, -2], "<f4"),
            token_rewards=np.zeros(2, "<f4"),
            episode_reward=reward,
            metadata=metadata,
        )

    of_batch = OldMetadata(worker_id="w", timestamp=NOW, weight_step=3)
    own = OldMetadata(worker_id="v", timestamp=NOW - 5000, weight_step=3)
    of = buffer(local_batch_size=2)
    of.set_current_step(4)
    batch = RolloutBatch(groups=(OldGroup(rollouts=(old(1.0), old(0.0), old(0.0, own))),), metadata=(of_batch,))
    without = RolloutBatch(groups=(OldGroup(rollouts=(old(1.0), old(0.0))),))
    assert of.add_batches([batch, without]) == 2
    sample = of.sample() or []
    assert {(i.rollout.metadata.worker_id, i.weight_step) for i in sample} == {("w", 3)}
    assert sorted(float(i.advantage) for i in sample) == [-0.5, 1.0]


def test_a_longer_group_may_come_later() -> None:
    of = buffer()
    of.add(group("short", [0.0, 1.0], length=4))
    of.add(group("long", [0.0, 1.0], length=4000))
    assert sorted(len(item.rollout.tokens) for item in of.sample() or ()) == [4, 4, 4000, 4000]


def test_each_of_a_mixed_group_is_filed_under_its_own_environment() -> None:
    of = buffer()
    of.add([rollout("a", 0.0, environment="x"), rollout("b", 1.0, environment="y"), rollout("c", 1.0, environment="y")])
    assert of.stats()["env_sizes"] == {"x": 1, "y": 2}


def test_one_bad_batch_loses_none_of_the_others() -> None:
    of = buffer()
    torn = replace(rollout("torn"), loss_mask=np.ones(3, bool))
    worse = replace(rollout("nan"), reward=float("nan"))
    batches: list[Any] = [
        [group("a", [0.0, 1.0])],
        [group("b", [0.0, 1.0]), [rollout("c", 1.0), torn]],
        "no batch at all",
        [[worse]],
        [group("d", [0.0, 1.0])],
    ]
    with pytest.raises(RecordError) as raised:
        of.add_batches(batches)
    for said in (
        "batch 1: rollout 'torn': loss_mask is |b1 [3]; it must be |b1 [4]",
        "batch 2: ",
        "batch 3: rollout 'nan': its reward is nan",
        "All other batches are in",
    ):
        assert said in str(raised.value)
    assert sorted(uids(of.sample())) == ["a0", "a1", "d0", "d1"]
    assert of.stats()["total_batches_added"] == 2


def test_a_loss_that_gives_no_number_is_named() -> None:
    class Odd:
        def compute_advantages(self, rollouts: Any, /) -> list[float]:
            return [float("nan")] * len(rollouts)

    with pytest.raises(RecordError, match="gives 2 advantages"):
        buffer(loss_module=Odd()).add(group("a", [0.0, 1.0]))


def test_too_few_give_no_sample_and_cost_no_draw() -> None:
    of, other = buffer(), buffer()
    of.add(group("a", [0.0, 1.0, 2.0]))
    assert of.sample() is None
    of.add(group("b", [0.0, 1.0, 2.0]))
    for name in "ab":
        other.add(group(name, [0.0, 1.0, 2.0]))
    assert uids(of.sample()) == uids(other.sample())
    assert of.stats()["total_batches_sampled"] == 1
    with pytest.raises(ConfigurationError, match="a sample of 0"):
        of.sample(0)


def test_processes_get_disjoint_shares_of_one_draw() -> None:
    parts = [buffer(process_id=i, total_processes=3, max_samples=1, local_batch_size=5) for i in range(3)]
    whole = buffer(max_samples=1, local_batch_size=15)
    for of in (*parts, whole):
        of.add(group("a", [float(i) for i in range(40)]))
    for _ in range(2):
        shares = [uids(of.sample()) for of in parts]
        assert len({uid for share in shares for uid in share}) == 15
        assert [uid for share in shares for uid in share] == uids(whole.sample())
    assert [of.sample() for of in parts] == [None] * 3  # 10 are left, for 15
    with pytest.raises(ConfigurationError, match="process 3 of 3"):
        buffer(process_id=3, total_processes=3)


def test_a_sample_does_not_depend_on_those_before_it_but_for_what_they_used_up() -> None:
    one, other = buffer(seed=5), buffer(seed=5)
    for of in (one, other):
        of.add(group("a", [float(i) for i in range(40)]))
    first = [uids(one.sample()) for _ in range(3)]
    other.sample(7)
    assert [uids(other.sample()) for _ in range(2)] == first[1:]
    assert uids(buffer_with(seed=6).sample()) != first[0]


def buffer_with(**settings: Any) -> RolloutReplayBuffer:
    of = buffer(**settings)
    of.add(group("a", [float(i) for i in range(40)]))
    return of


# ---------------------------------------------------------------------- from the log


class Script:
    """A reader of batches at even offsets of the index."""

    def __init__(self, numbers: range) -> None:
        self._reads = deque(numbers)

    def poll(self, timeout_s: float = 1.0) -> ReadBatch | None:
        return read(self._reads.popleft()) if self._reads else None


def read(number: int) -> ReadBatch:
    batch = replace(random_batch(number, rows=6, version=number // 4), cut_ms=1000 * number)
    batch = replace(batch, groups=(replace(batch.groups[0], opened_ms=1000 * number - 500),))
    entry = BatchIndexEntry(
        batch_id=batch.batch_id,
        partition=0,
        offset=number,
        rollouts=6,
        tokens=1,
        trained_tokens=1,
        lowest_version=0,
        highest_version=0,
        size_bytes=1,
        digest="",
    )
    indexed = Indexed(entry, 2 * number)
    return ReadBatch(entry, batch, 2 * number, 2 * number + 1, 2 * number, (indexed,))


def from_log(**settings: Any) -> RolloutReplayBuffer:
    of = {"local_batch_size": 4, "max_samples": 3, "max_rollout_step_delay": 3, "seed": 9, **settings}
    return RolloutReplayBuffer(**of)


def test_rows_of_the_log_keep_their_advantages_and_say_where_they_came_from() -> None:
    of, batch = from_log(local_batch_size=6), read(0).batch
    of.add_read(read(0))
    found = {item.rollout.uid: item for item in of.sample() or ()}
    assert sorted(found) == sorted(batch.uids)
    for row, uid in enumerate(batch.uids):
        span = slice(int(batch.splits[row]), int(batch.splits[row + 1]))
        item = found[uid]
        assert np.array_equal(np.broadcast_to(item.advantage, span.stop - span.start), batch.advantages[span])
        assert np.array_equal(item.rollout.tokens, batch.tokens[span])
        assert np.array_equal(item.rollout.logprobs, batch.logprobs[span])
        assert item.rollout.extra["batch"] == f"{batch.batch_id}/{row}"


def test_time_is_stream_time_where_the_log_fills_it() -> None:
    of = from_log(max_rollout_timestamp_delay=2.5, max_samples=-1)
    of.set_current_step(1)
    for number in range(6):
        of.add_read(read(number))
    assert of.set_current_step(1) == 24
    # The newest cut is at 5 s; a group opened at 2.5 s is just too old, one opened at 3.5 s is not.
    assert of.stats()["env_sizes"] == {"env": 12}
    assert of.position == {0: 11}


def test_what_was_read_already_is_not_taken_twice() -> None:
    of = from_log()
    assert [of.add_read(read(number)) for number in (0, 1, 0, 1)] == [6, 6, 0, 0]


def test_a_buffer_that_lost_its_disk_is_rebuilt_from_the_log_and_equal(tmp_path: Path) -> None:
    kept, lost = from_log(), from_log()
    for of in (kept, lost):
        of.set_current_step(2)
    kept.fill(Script(range(4)), 3)
    kept.fill(Script(range(2, 9)), 17)
    kept.save(tmp_path)
    loaded = from_log(seed=0)
    loaded.load(tmp_path)
    lost.fill(Script(range(20)), 17)
    assert kept.position == loaded.position == lost.position == {0: 17}
    samples = [[uids(of.sample()) for _ in range(5)] for of in (kept, loaded, lost)]
    assert samples[0] == samples[1] == samples[2]
    with pytest.raises(DeadlineExceeded, match="did not reach position 99"):
        lost.fill(Script(range(9, 10)), 99)


def test_policy_versions_become_the_steps_they_were_published_after() -> None:
    of = from_log(weight_step_of=lambda version: 10 * version, local_batch_size=6)
    of.set_current_step(10)
    assert [of.add_read(read(number)) for number in (3, 4)] == [0, 6]
    assert {item.weight_step for item in of.sample() or ()} == {10}


# ---------------------------------------------------------------------- on disk


def filled(seed: int = 3) -> RolloutReplayBuffer:
    of = buffer(seed=seed, max_samples=3)
    of.set_current_step(5)
    for number, environment in enumerate("xyx"):
        of.add(group(f"g{number}-", [float(i) for i in range(6)], environment=environment, step=5))
    of.add_training_batch(random_batch(0))  # advantages by position
    return of


def test_a_restored_buffer_gives_the_samples_the_saved_one_gives(tmp_path: Path) -> None:
    of = filled()
    of.sample()
    of.save(tmp_path / "deep" / "er")
    restored = buffer(seed=99, max_samples=3)
    restored.load(tmp_path / "deep" / "er")
    assert restored.stats() == of.stats()
    for _ in range(6):
        one, other = of.sample(), restored.sample()
        assert uids(one) == uids(other)
        for a, b in zip(one or (), other or (), strict=True):
            assert (a.usage_count, a.weight_step) == (b.usage_count, b.weight_step)
            assert np.array_equal(a.advantage, b.advantage)
            assert same(a.rollout, b.rollout)


def test_where_nothing_whole_is_saved_the_buffer_stays_as_it_was(tmp_path: Path) -> None:
    of = filled()
    with pytest.raises(StoreError, match="nothing was saved there"):
        of.load(tmp_path)
    of.save(tmp_path)
    whole = (tmp_path / FILE).read_bytes()
    for spoilt in (whole[: len(whole) // 2], b"", b"not arrow" * 100):
        (tmp_path / FILE).write_bytes(spoilt)
        with pytest.raises(StoreError, match="is no rollout buffer"):
            of.load(tmp_path)
    assert of.size() == filled().size()


def test_a_flipped_bit_is_a_store_error_that_names_the_file_and_the_remedy(tmp_path: Path) -> None:
    of = buffer(seed=4)
    of.add(group("a", [1.0, 0.0, 0.5]))
    of.save(tmp_path)
    whole = (tmp_path / FILE).read_bytes()
    drawn = np.random.default_rng(5).integers(0, 8 * len(whole), 600).tolist()
    for bit in {*drawn, *range(8 * len(whole) - 8 * 56, 8 * len(whole), 3)}:
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << bit % 8
        (tmp_path / FILE).write_bytes(damaged)
        with pytest.raises(StoreError, match=rf"{FILE} is no rollout buffer .*restore it .*or fill the buffer"):
            of.load(tmp_path)


def test_a_file_of_an_earlier_version_which_had_no_digest_is_read(tmp_path: Path) -> None:
    of = filled()
    of.save(tmp_path)
    whole = (tmp_path / FILE).read_bytes()
    (tmp_path / FILE).write_bytes(whole[: whole.rindex(b"ARROW1") + 6])
    restored = buffer()
    restored.load(tmp_path)
    assert restored.stats() == of.stats()


# ---------------------------------------------------------------------- what is counted


def test_a_rollout_used_more_often_than_it_may_be_is_retired(tmp_path: Path) -> None:
    of = buffer(local_batch_size=2, max_samples=-1)
    of.add(group("a", [1.0, 0.0]))
    for _ in range(5):
        of.sample()
    of.add(group("b", [1.0, 0.0]))
    of.save(tmp_path)
    stricter = buffer(local_batch_size=1, max_samples=2)
    stricter.load(tmp_path)
    assert stricter.stats()["left_out"] == {"used_up": 2}
    drawn = [uid for _ in range(4) for uid in uids(stricter.sample())]
    assert sorted(drawn) == ["b0", "b0", "b1", "b1"]
    assert stricter.sample() is None


def test_every_batch_counts_as_added_of_which_a_rollout_is_not_stale() -> None:
    of = buffer(capacity=2, drop_zero_variance=True, max_rollout_step_delay=1)
    of.set_current_step(5)
    of.add_batches([[group("without variance", [1.0, 1.0], step=5)]])
    of.add_batches([[group("a", [1.0, 0.0], step=5)], [group("stale", [1.0, 0.0], step=3)]])
    of.add_batches([[group("half", [1.0], step=3) + group("of it", [0.0], step=4)], []])
    assert of.stats()["total_batches_added"] == 3


def test_rollouts_that_are_refused_or_leave_are_counted_by_reason_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    of = buffer(capacity=2, drop_zero_variance=True, max_rollout_timestamp_delay=100.0)
    of.set_current_step(5)
    of.add(group("kept", [1.0, 0.0], step=5))
    of.add(group("ahead", [1.0, 0.0, 0.5], step=6))
    of.add_batches([[group("old step", [1.0, 0.0], step=3), group("too old", [1.0, 0.0], step=5, at=NOW - 100)]])
    of.add(group("no variance", [1.0, 1.0], step=5))
    of.add(group("fills", [1.0, 0.0], step=5))
    with pytest.raises(RecordError):
        of.add(group("unsound", [float("nan")]))
    with pytest.raises(RecordError):
        of.add_batches([[group("unsound", [float("inf"), 0.0, 1.0])]])
    of.set_current_step(7)
    left_out = of.stats()["left_out"]
    assert left_out == {"ahead": 3, "old_step": 4, "too_old": 2, "zero_variance": 2, "capacity": 2, "unsound": 4}
    logged = [record for record in caplog.records if record.message == "rollouts_left_out"]
    assert len(logged) == 7
    assert of.size() == 0


def test_a_save_that_fails_says_why_and_leaves_the_one_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    of = filled()
    of.save(tmp_path)
    before = (tmp_path / FILE).read_bytes()
    of.sample()
    monkeypatch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(StoreError, match="No space left on device"):
        of.save(tmp_path)
    assert (tmp_path / FILE).read_bytes() == before
    assert os.listdir(tmp_path) == [FILE]


SAVER = """
import sys
from pathlib import Path
from consumers.buffers.rollout_buffer import RolloutReplayBuffer
from consumers.grouping.testing import example_rollout
of = RolloutReplayBuffer(local_batch_size=4, max_samples=-1, max_rollout_timestamp_delay=-1.0)
for number in range(10**9):
    of.add([example_rollout(f"{number}-{i}", float(i)) for i in range(4)])
    of.sample()
    of.save(Path(sys.argv[1]))
"""


def test_killed_while_it_saves_it_is_opened_again_whole(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(Path(consumers.__file__).parents[1])}
    process = subprocess.Popen([sys.executable, "-P", "-c", SAVER, str(tmp_path)], env=environment)
    for _ in range(4):
        seen = (tmp_path / FILE).stat().st_mtime_ns if (tmp_path / FILE).exists() else 0
        eventually(lambda s=seen: (tmp_path / FILE).exists() and (tmp_path / FILE).stat().st_mtime_ns > s, 30, "a save")
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    of = RolloutReplayBuffer(local_batch_size=4, max_samples=-1, max_rollout_timestamp_delay=-1.0)
    of.load(tmp_path)
    saves = of.stats()["total_batches_sampled"]
    assert saves >= 4
    assert of.size() == 4 * saves
    again = RolloutReplayBuffer(local_batch_size=4, max_samples=-1, max_rollout_timestamp_delay=-1.0)
    for number in range(saves):
        again.add([example_rollout(f"{number}-{i}", float(i)) for i in range(4)])
        again.sample()
    assert uids(again.sample()) == uids(of.sample())


# ---------------------------------------------------------------------- several threads


def test_adding_drawing_and_saving_at_once_tears_nothing(tmp_path: Path) -> None:
    """Every group comes whole, nothing is drawn more often than it may be, and every file saved is a whole buffer."""
    of = buffer(local_batch_size=8, max_samples=2, capacity=100_000)
    adders, groups, failed = 3, 60, []
    drawn: list[list[RolloutWithCount]] = []
    adding = threading.Barrier(adders + 3)
    done = threading.Event()

    def add(worker: int) -> None:
        adding.wait()
        for number in range(groups):
            name = f"{worker}-{number}-"
            of.add_batches([[group(name, [float(i) for i in range(5)], environment=f"e{number % 3}")]])

    def draw() -> None:
        adding.wait()
        while not done.is_set():
            if sample := of.sample():
                drawn.append(sample)

    def save() -> None:
        adding.wait()
        while not done.is_set():
            of.save(tmp_path)
            other = buffer(capacity=100_000, max_samples=2)
            other.load(tmp_path)
            assert other.stats()["total_size"] == other.size()

    def watched(work: Any, *args: Any) -> None:
        try:
            work(*args)
        except BaseException as error:
            failed.append(error)
            done.set()

    threads = [threading.Thread(target=watched, args=(add, i)) for i in range(adders)]
    others = [threading.Thread(target=watched, args=(work,)) for work in (draw, draw, save)]
    for thread in (*threads, *others):
        thread.start()
    for thread in threads:
        thread.join(60)
    done.set()
    for thread in others:
        thread.join(60)
    assert not failed
    while sample := of.sample():
        drawn.append(sample)
    while sample := of.sample(1):
        drawn.append(sample)
    for sample in drawn:
        assert len({item.rollout.uid for item in sample}) == len(sample)
    counts: dict[str, list[int]] = {}
    for item in (item for sample in drawn for item in sample):
        counts.setdefault(item.rollout.uid, []).append(item.usage_count)
        assert float(item.advantage) == pytest.approx(item.rollout.reward - (10 - item.rollout.reward) / 4)
    assert len(counts) == adders * groups * 5
    assert {tuple(sorted(found)) for found in counts.values()} == {(1, 2)}
    assert of.stats()["total_batches_added"] == adders * groups
