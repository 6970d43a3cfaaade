"""Groups seal, are files of a known layout, and late, repeated and unsound rollouts are kept out of them."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollstream.consumers.buffers.groups.config import GroupStoreConfig
from rollstream.consumers.buffers.groups.group_files import folder_of, group_id_of
from rollstream.consumers.buffers.groups.store import GroupReplayBuffer
from rollstream.consumers.grouping.testing import example_rollout
from rollstream.topics.errors import ConfigurationError, RecordError
from rollstream.topics.records import GroupCancelled, InferenceMetadata, Rollout, RolloutMetadata, Turn, same
from tests.strategies import rollouts
from tests.support.group_stores import Clock, attempt, group, opened, seen


def test_a_group_seals_at_eight_and_is_on_disk_when_the_call_returns(tmp_path: Path) -> None:
    buffer = opened(tmp_path)
    for n in range(7):
        assert buffer.add_rollout(attempt(n))
    assert list(tmp_path.rglob("part-*.parquet")) == []
    buffer.add_rollout(attempt(7))
    [path] = tmp_path.rglob("part-*.parquet")
    assert path.parent == tmp_path / "env"
    assert pq.read_table(path).num_rows == 8
    assert buffer.stats()["open_groups"] == 0


def test_the_file_of_a_group_has_the_columns_of_the_layout_and_a_row_for_each_rollout(tmp_path: Path) -> None:
    turns = (
        Turn(role="user", text="2+2", start=0, stop=2),
        Turn(
            role="assistant",
            text="4",
            start=2,
            stop=4,
            reward=1.0,
            has_logprobs=True,
            timestamp=5.0,
            inference=InferenceMetadata(model_version=3, sampling_params={"temperature": "1"}, inference_time_s=0.5),
        ),
    )
    metadata = RolloutMetadata(worker_id="w", replica_id="r1", timestamp=12.5, weight_step=4)
    members = [attempt(n, turns=turns, metadata=metadata) for n in range(8)]
    opened(tmp_path).add_rollouts(members)
    [path] = tmp_path.rglob("part-*.parquet")
    table = pq.read_table(path)
    assert table.column_names == [
        "group_id",
        "environment",
        "example_id",
        "policy_version",
        "sealed_ts",
        "group_metadata_json",
        "replica_id",
        "rollout_uid",
        "rollout_reward",
        "turns_json",
        "rr_metadata_json",
        "created_ts",
    ]
    row = table.to_pylist()[1]
    uids = [r.uid for r in members]
    assert row["group_id"] == group_id_of("env", "q", 0, reversed(uids)), "the order of uids does not matter"
    assert (row["environment"], row["example_id"], row["policy_version"]) == ("env", "q", 0)
    assert (row["sealed_ts"], row["created_ts"], row["replica_id"]) == (1000.0, 12.5, "r1")
    assert (row["rollout_uid"], row["rollout_reward"]) == ("q-0-1", 1.0)
    assert json.loads(row["group_metadata_json"]) == {"num_rollouts": 8, "uids": uids, "replicas": {"r1": 8}}
    assert json.loads(row["turns_json"])[1] == {
        "message": "4",
        "role": "assistant",
        "tokens": [3, 4],
        "logprobs": [-0.5, -0.5],
        "reward": 1.0,
        "inference_metadata": {"model_version": 3, "sampling_params": {"temperature": "1"}, "inference_time": 0.5},
        "timestamp": 5.0,
    }
    assert json.loads(row["turns_json"])[0]["logprobs"] is None
    assert json.loads(row["rr_metadata_json"])["weight_step"] == 4
    assert pq.ParquetFile(path).metadata.row_group(0).column(0).compression == "ZSTD"


@settings(max_examples=settings().max_examples // 8)
@given(st.lists(rollouts(), min_size=1, max_size=3, unique_by=lambda r: r.uid))
def test_a_group_is_read_back_bit_for_bit(tmp_path_factory: pytest.TempPathFactory, members: list[Rollout]) -> None:
    directory = tmp_path_factory.mktemp("store")
    with opened(directory, target_group_size=1, min_group_size=1) as buffer:
        assert buffer.add_rollouts(members) == len(members)
    read = [rollout for stored in opened(directory).groups() for rollout in stored.rollouts]
    assert all(same(ours, theirs) for ours, theirs in zip(read, members, strict=True))


def test_a_group_whose_time_is_over_seals_without_new_records(tmp_path: Path) -> None:
    clock = Clock()
    buffer = opened(tmp_path, clock=clock)
    buffer.add_rollouts(group(size=3))
    clock.now += 29.9
    assert buffer.poll() == 0
    clock.now += 0.1
    assert buffer.poll() == 1
    [stored] = seen(tmp_path).groups()
    assert (len(stored.rollouts), stored.sealed_ts) == (3, 1030.0)


def test_a_group_of_one_does_not_seal_by_time_and_seals_when_a_second_comes(tmp_path: Path) -> None:
    clock = Clock()
    buffer = opened(tmp_path, clock=clock)
    buffer.add_rollout(attempt(0))
    clock.now += 60
    assert buffer.poll() == 0
    assert buffer.stats()["open_rollouts"] == 1
    buffer.add_rollout(attempt(1))
    assert [len(stored.rollouts) for stored in buffer.groups()] == [2]


def test_rollouts_that_come_after_their_group_sealed_form_another(tmp_path: Path) -> None:
    buffer = opened(tmp_path, target_group_size=2)
    buffer.add_rollouts(group(size=4))
    assert [[r.uid for r in stored.rollouts] for stored in buffer.groups()] == [
        ["q-0-0", "q-0-1"],
        ["q-0-2", "q-0-3"],
    ]


def test_groups_are_of_one_example_and_version(tmp_path: Path) -> None:
    buffer = opened(tmp_path, target_group_size=2)
    buffer.add_rollouts([attempt(0), attempt(0, version=1), attempt(0, "p"), attempt(1), attempt(1, "p")])
    assert [(stored.example_id, stored.policy_version) for stored in buffer.groups()] == [("q", 0), ("p", 0)]
    assert buffer.stats()["open_groups"] == 1


def test_a_reopened_store_still_does_not_wait_for_members_that_were_cancelled(tmp_path: Path) -> None:
    members = [attempt(n, group_size=3, group_id="g") for n in range(3)]
    cancelled = GroupCancelled(
        environment="env", example_id="q", policy_version=0, group_size=3, group_id="g", uids=(members[1].uid,)
    )
    with opened(tmp_path, target_group_size=0, min_group_size=2) as buffer:
        buffer.add_rollout(members[0])
        buffer.cancel(cancelled, -1)
        assert buffer.close(seal=False).kept == 1

    with opened(tmp_path, target_group_size=0, min_group_size=2) as again:
        again.add_rollout(members[2])
        assert (again.stats()["open_groups"], again.stats()["groups"]) == (0, 1)


def test_cancelled_members_of_a_group_that_sealed_before_a_kill_do_not_shorten_the_next_group(tmp_path: Path) -> None:
    members = [attempt(n, group_size=3, group_id="") for n in range(6)]
    cancelled = GroupCancelled(
        environment="env", example_id="q", policy_version=0, group_size=3, group_id="", uids=(members[1].uid,)
    )
    killed = opened(tmp_path, target_group_size=0, min_group_size=2)
    killed.add_rollout(members[0])
    killed.cancel(cancelled, -1)
    killed.flush()
    killed.add_rollout(members[2])
    assert killed.stats()["groups"] == 1
    killed.release()  # without a flush, as a kill leaves it

    with opened(tmp_path, target_group_size=0, min_group_size=2) as again:
        again.add_rollouts(members[3:5])
        assert again.stats()["groups"] == 1, "two of three"
        again.add_rollout(members[5])
        assert again.stats()["groups"] == 2


def branch(episode: str, number: int, **fields: Any) -> Rollout:
    """One of the two branches of an episode of group g, whose declared size is 2."""
    fields = {"group_size": 2, "group_id": "g", "example_id": "q", **fields}
    return example_rollout(f"{episode}.{number}", episode_uid=episode, branch=number, branches=2, **fields)


def cancellation(*uids: str, group_size: int = 2) -> GroupCancelled:
    return GroupCancelled(
        environment="env", example_id="q", policy_version=0, group_size=group_size, group_id="g", uids=uids
    )


def test_the_declared_size_counts_episodes_and_not_their_branches(tmp_path: Path) -> None:
    with opened(tmp_path, target_group_size=0) as buffer:
        buffer.add_rollouts([branch("a", 0, reward=1.0), branch("b", 0, reward=0.0), branch("a", 1, reward=1.0)])
        assert (buffer.size(), buffer.close(seal=False).kept) == (0, 1)
    with opened(tmp_path, target_group_size=0) as again:
        again.add_rollout(branch("b", 1, reward=0.0))
        [stored] = again.groups()
    assert [rollout.uid for rollout in stored.rollouts] == ["a.0", "b.0", "a.1", "b.1"]


def test_an_incomplete_episode_does_not_count_towards_the_minimum_of_a_declared_group(tmp_path: Path) -> None:
    clock = Clock()
    buffer = opened(tmp_path, clock=clock, target_group_size=0, min_group_size=1)
    buffer.add_rollout(branch("a", 0))
    clock.now += 60
    assert buffer.poll() == 0
    buffer.add_rollout(branch("a", 1))
    assert buffer.size() == 1


def test_branches_of_a_cancelled_episode_are_refused_and_the_group_does_not_wait_for_them(tmp_path: Path) -> None:
    buffer = opened(tmp_path, target_group_size=0)
    buffer.cancel(cancellation("a"), -1)
    assert [buffer.add_rollout(branch("a", n)) for n in range(2)] == [False, False]
    assert buffer.stats()["cancelled"] == 2
    assert [buffer.add_rollout(branch("b", n)) for n in range(2)] == [True, True]
    assert [[rollout.uid for rollout in stored.rollouts] for stored in buffer.groups()] == [["b.0", "b.1"]]


def test_an_episode_that_is_cancelled_after_its_first_branch_counts_once(tmp_path: Path) -> None:
    buffer = opened(tmp_path, target_group_size=0)
    sized = partial(branch, group_size=3)
    buffer.add_rollouts([sized("a", 0), sized("b", 0), sized("b", 1)])
    buffer.cancel(cancellation("a", "a.0", "b.0", group_size=3), -1)
    assert not buffer.add_rollout(sized("a", 1))
    assert buffer.add_rollout(sized("c", 0))
    assert buffer.size() == 0, "episode c is not complete"
    assert buffer.add_rollout(sized("c", 1))
    assert buffer.size() == 1


def test_the_declared_size_counts_if_no_target_is_set(tmp_path: Path) -> None:
    buffer = opened(tmp_path, target_group_size=0)
    buffer.add_rollouts(attempt(n, group_size=3, group_id=f"g{n % 2}") for n in range(6))
    assert [[r.group_id for r in stored.rollouts] for stored in buffer.groups()] == [["g0"] * 3, ["g1"] * 3]


def test_no_open_rollout_is_lost_when_a_store_is_reopened_with_another_target(tmp_path: Path) -> None:
    """With a target size, the producer's groups of an example are one group."""
    with opened(tmp_path, target_group_size=0) as buffer:
        buffer.add_rollouts(attempt(n, group_size=4, group_id=f"g{n % 3}") for n in range(6))
        assert buffer.stats()["open_groups"] == 3
    with opened(tmp_path, target_group_size=7) as buffer:
        assert buffer.stats()["open_rollouts"] == 6
        assert buffer.add_rollout(attempt(6))
    [stored] = buffer.groups()
    assert sorted(r.uid for r in stored.rollouts) == [f"q-0-{n}" for n in range(7)]


def test_a_rollout_that_comes_twice_is_in_one_group_once_also_after_a_restart(tmp_path: Path) -> None:
    buffer = opened(tmp_path, target_group_size=4)
    assert buffer.add_rollouts([*group(size=6), *group(size=6)]) == 6
    buffer.flush()
    buffer.release()
    before = sorted(tmp_path.rglob("part-*"))
    again = opened(tmp_path, target_group_size=4)
    assert again.add_rollouts(group(size=6)) == 0
    assert again.stats()["duplicate"] == 6
    assert sorted(tmp_path.rglob("part-*")) == before


def test_only_accepted_versions_are_added(tmp_path: Path) -> None:
    buffer = opened(tmp_path, accept_policy_versions=(9, 10))
    assert [buffer.add_rollout(attempt(0, version=v)) for v in (8, 9, 10, 11)] == [False, True, True, False]
    assert buffer.stats()["version_not_accepted"] == 2


def test_one_replica_gives_a_group_at_most_its_limit(tmp_path: Path) -> None:
    buffer = opened(tmp_path, max_per_replica=2, target_group_size=4)
    taken = [
        buffer.add_rollout(attempt(n, metadata=RolloutMetadata(replica_id=replica)))
        for n, replica in enumerate(["a", "a", "a", "b", "b"])
    ]
    assert taken == [True, True, False, True, True]
    [stored] = buffer.groups()
    assert stored.metadata["replicas"] == {"a": 2, "b": 2}
    assert buffer.stats()["replica_full"] == 1


def test_too_many_open_groups_seal_oldest_first_and_the_small_ones_leave_by_count(tmp_path: Path) -> None:
    buffer = opened(tmp_path, capacity_groups=2)
    buffer.add_rollouts([attempt(0, "a"), attempt(0, "b"), attempt(1, "b"), attempt(0, "c"), attempt(0, "d")])
    assert buffer.stats()["capacity"] == 1
    assert [(stored.example_id, len(stored.rollouts)) for stored in buffer.groups()] == [("b", 2)]
    assert buffer.stats()["open_rollouts"] == 2


def test_a_rollout_of_another_environment_or_an_invalid_one_is_refused_and_not_added(tmp_path: Path) -> None:
    buffer = opened(tmp_path)
    with pytest.raises(RecordError, match="of environment 'other', but this store is of 'env'"):
        buffer.add_rollout(attempt(0, environment="other"))
    with pytest.raises(RecordError, match="reward is nan"):
        buffer.add_rollout(attempt(0, reward=float("nan")))
    assert buffer.add_rollout(attempt(0))


@pytest.mark.parametrize("name", ["a/b", "..", ".", "ä ö", "x" * 500, "%2E", "con:1", "position.journal"])
def test_every_environment_has_a_folder_of_its_own_below_the_root(tmp_path: Path, name: str) -> None:
    with GroupReplayBuffer(tmp_path, name, GroupStoreConfig(target_group_size=2)) as buffer:
        buffer.add_rollouts(attempt(n, environment=name) for n in range(2))
    [path] = tmp_path.rglob("part-*.parquet")
    assert path.parent.parent == tmp_path
    assert path.parent.name == folder_of(name)
    assert next(GroupReplayBuffer(tmp_path, name).groups()).environment == name


@pytest.mark.parametrize(
    ("setting", "why"),
    [
        ({"compression": "rar"}, "compression"),
        ({"min_group_size": 9}, "above target_group_size"),
        ({"capacity_groups": 0}, "capacity_groups"),
        ({"estimator": "reinforce_pp"}, "normalises over the batches"),
        ({"estimator": "none"}, "estimators are"),
    ],
)
def test_invalid_settings_are_refused(setting: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigurationError, match=why):
        GroupStoreConfig(**setting)
