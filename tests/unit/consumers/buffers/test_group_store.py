"""Groups and batches by hand: when groups seal, what reaches disk and the batch maker, what survives a kill."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import tracemalloc
import uuid
from collections import Counter
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from consumers.buffers.files import StoreError
from consumers.buffers.forwarding import examples_of
from consumers.buffers.group_config import GroupStoreConfig
from consumers.buffers.group_files import folder_of, group_id_of
from consumers.buffers.group_store import Closed, GroupReplayBuffer
from consumers.grouping.batch_maker import BatchMaker, FifoBatchMaker, MakerContext
from consumers.grouping.reservoir import ReservoirBatchMaker
from consumers.grouping.testing import example_rollout
from tests.strategies import rollouts
from topics.errors import ConfigurationError, RecordError
from topics.examples import Source
from topics.records import InferenceMetadata, Rollout, RolloutMetadata, Turn, same

ROOT = Path(__file__).parents[4]


def attempt(n: int, example: str = "q", version: int = 0, **fields: Any) -> Rollout:
    """Rollout `n` of a group: rewards alternate, so that advantages are not zero."""
    fields.setdefault("reward", float(n % 2))
    return example_rollout(f"{example}-{version}-{n}", example_id=example, policy_version=version, **fields)


def group(example: str = "q", version: int = 0, size: int = 8) -> list[Rollout]:
    return [attempt(n, example, version) for n in range(size)]


def context() -> MakerContext:
    return MakerContext(partition=0, seed=7, batch_bytes=2**30)


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def opened(path: Path, maker: BatchMaker | None = None, clock: Clock | None = None, **config: Any) -> GroupReplayBuffer:
    return GroupReplayBuffer(path, "env", GroupStoreConfig(**config), batch_maker=maker, clock=clock or Clock())


def seen(path: Path) -> GroupReplayBuffer:
    """A store that only reads."""
    return GroupReplayBuffer(path, "env", read_only=True)


# ---------------------------------------------------------------------- sealing


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
def test_what_is_read_back_is_what_was_added_bit_for_bit(
    tmp_path_factory: pytest.TempPathFactory, members: list[Rollout]
) -> None:
    directory = tmp_path_factory.mktemp("store")
    with opened(directory, target_group_size=1, min_group_size=1) as buffer:
        assert buffer.add_rollouts(members) == len(members)
    read = [rollout for stored in opened(directory).groups() for rollout in stored.rollouts]
    assert all(same(ours, theirs) for ours, theirs in zip(read, members, strict=True))


def test_a_group_whose_time_is_over_seals_though_nothing_else_arrives(tmp_path: Path) -> None:
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


def test_rollouts_that_come_after_their_group_sealed_make_another(tmp_path: Path) -> None:
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


def test_the_size_a_group_declares_counts_where_no_target_is_set(tmp_path: Path) -> None:
    buffer = opened(tmp_path, target_group_size=0)
    buffer.add_rollouts(attempt(n, group_size=3, group_id=f"g{n % 2}") for n in range(6))
    assert [[r.group_id for r in stored.rollouts] for stored in buffer.groups()] == [["g0"] * 3, ["g1"] * 3]


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


def test_only_versions_that_are_accepted_are_taken(tmp_path: Path) -> None:
    buffer = opened(tmp_path, accept_policy_versions=(9, 10))
    assert [buffer.add_rollout(attempt(0, version=v)) for v in (8, 9, 10, 11)] == [False, True, True, False]
    assert buffer.stats()["version_not_accepted"] == 2


def test_one_replica_gives_a_group_no_more_than_it_may(tmp_path: Path) -> None:
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


def test_a_rollout_of_another_environment_or_without_sense_is_refused_and_nothing_of_it_is_in(tmp_path: Path) -> None:
    buffer = opened(tmp_path)
    with pytest.raises(RecordError, match="of environment 'other', this store of 'env'"):
        buffer.add_rollout(attempt(0, environment="other"))
    with pytest.raises(RecordError, match="reward is nan"):
        buffer.add_rollout(attempt(0, reward=float("nan")))
    assert buffer.add_rollout(attempt(0))


@pytest.mark.parametrize("name", ["a/b", "..", ".", "ä ö", "x" * 500, "%2E", "con:1"])
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
        ({"estimator": "reinforce_pp"}, "whole batches"),
        ({"estimator": "none"}, "estimators are"),
    ],
)
def test_senseless_settings_are_refused(setting: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigurationError, match=why):
        GroupStoreConfig(**setting)


# ---------------------------------------------------------------------- the batch maker


def test_adding_one_by_one_offers_each_rollout_to_the_maker_once(tmp_path: Path) -> None:
    maker = ReservoirBatchMaker(context())
    buffer = opened(tmp_path, maker)
    for rollout in group():
        buffer.add_rollout(rollout)
    assert maker.held == buffer.stats()["held"] == 8


def test_advantages_are_those_of_the_whole_group() -> None:
    buffer_group = [attempt(n, reward=r) for n, r in enumerate((1.0, 0.0, 0.0, 1.0))]
    from consumers.buffers.group_files import Placed, group_of

    members = [Placed(r, Source(-1, -1, r.uid)) for r in buffer_group]
    sealed, rows = examples_of(group_of(members, 1.0), "rloo")
    assert np.allclose([row.advantage[0] for row in rows], [2 / 3, -2 / 3, -2 / 3, 2 / 3])
    assert sealed.advantages == pytest.approx((2 / 3, -2 / 3, -2 / 3, 2 / 3))


def test_version_ten_is_newer_than_version_nine(tmp_path: Path) -> None:
    maker = ReservoirBatchMaker(context())
    buffer = opened(tmp_path, maker)
    buffer.add_rollouts([*group(version=9), *group(version=10)])
    assert buffer.stats()["superseded_version"] == 8
    batch = buffer.sample(8)
    assert batch is not None
    assert {row.source.uid.split("-")[1] for row in batch} == {"10"}


def test_a_late_rollout_of_an_older_version_is_stored_and_counted_and_not_offered(tmp_path: Path) -> None:
    maker = ReservoirBatchMaker(context())
    buffer = opened(tmp_path, maker)
    buffer.add_rollouts([*group(version=10), *group(version=9)])
    assert maker.held == 8
    assert buffer.stats()["superseded_version"] == 8
    assert buffer.size() == 2


def test_what_is_superseded_does_not_stay_with_the_maker_also_after_a_restart(tmp_path: Path) -> None:
    with opened(tmp_path, ReservoirBatchMaker(context())) as buffer:
        buffer.add_rollouts([*group(version=1), *group("p", version=1), *group(version=2)])
    maker = ReservoirBatchMaker(context())
    opened(tmp_path, maker)
    assert maker.held == 16
    batch = maker.create_batch(16)
    assert batch is not None
    assert Counter(row.source.uid[:3] for row in batch) == {"q-2": 8, "p-1": 8}


def test_a_maker_that_keeps_old_versions_is_offered_them(tmp_path: Path) -> None:
    maker = FifoBatchMaker(context())
    opened(tmp_path, maker).add_rollouts([*group(version=10), *group(version=9)])
    assert maker.held == 16


def test_rollouts_without_an_advantage_leave_the_maker_by_count(tmp_path: Path) -> None:
    buffer = opened(tmp_path, ReservoirBatchMaker(context()))
    buffer.add_rollouts(attempt(n, reward=1.0) for n in range(8))
    assert buffer.stats()["zero_advantage"] == 8
    assert buffer.stats()["held"] == 0
    assert buffer.size() == 1


def test_a_maker_holds_no_more_groups_than_the_capacity(tmp_path: Path) -> None:
    maker = FifoBatchMaker(context())
    buffer = opened(tmp_path, maker, capacity_groups=2)
    for example in "abcd":
        buffer.add_rollouts(group(example))
    assert maker.held == 16
    assert buffer.stats()["capacity"] == 16
    assert buffer.size() == 4


# ---------------------------------------------------------------------- batches


def test_a_batch_is_none_when_short_and_else_a_file_with_the_columns_of_the_layout(tmp_path: Path) -> None:
    buffer = opened(tmp_path, ReservoirBatchMaker(context()))
    buffer.add_rollouts(group())
    assert buffer.create_and_store_batch(9) is None
    batch_id = buffer.create_and_store_batch(5)
    assert batch_id is not None
    [path] = tmp_path.rglob("batch_*.parquet")
    assert path.parent == tmp_path / "env" / "batches"
    assert path.name == f"batch_{batch_id}_1000000.parquet"
    table = pq.read_table(path)
    assert table.column_names == [
        "batch_id",
        "example_idx",
        "tokens",
        "loss_mask",
        "advantage",
        "generator_log_probs",
        "timestamp",
    ]
    assert table["example_idx"].to_pylist() == [0, 1, 2, 3, 4]
    assert set(table["batch_id"].to_pylist()) == {batch_id}
    assert table["tokens"].to_pylist() == [[1, 2, 3, 4]] * 5
    assert table["loss_mask"].to_pylist()[0] == [False, False, True, True]
    assert buffer.create_and_store_batch(4) is None, "three are left"
    stored = buffer.read_batch(batch_id)
    assert stored.metadata["batch_size"] == 5
    assert set(stored.metadata["advantage_stats"]) == {"mean", "std", "max", "min"}


def test_a_batch_comes_back_as_it_was_drawn(tmp_path: Path) -> None:
    buffer = opened(tmp_path, FifoBatchMaker(context()))
    buffer.add_rollouts(group())
    drawn = buffer.sample(8)
    [batch_id] = buffer.batch_ids()
    stored = buffer.read_batch(batch_id)
    assert drawn is not None
    assert all(map(same, stored.examples, drawn))


def test_the_same_groups_and_seed_give_the_same_batches_in_whichever_process(tmp_path: Path) -> None:
    def batches(directory: Path, restart: bool) -> list[list[str]]:
        found = []
        buffer = opened(directory, ReservoirBatchMaker(context()))
        for example in "abcdef":
            buffer.add_rollouts(group(example))
        for _ in range(4):
            if restart:
                buffer.close()
                buffer = opened(directory, ReservoirBatchMaker(context()))
            batch = buffer.sample(10)
            assert batch is not None
            found.append([row.source.uid for row in batch])
        return found

    once = batches(tmp_path / "once", restart=False)
    assert batches(tmp_path / "again", restart=True) == once
    assert len({uid for batch in once for uid in batch}) == 40, "nothing is delivered twice"


def test_a_batch_that_cannot_be_written_is_an_error_and_is_the_next_one_written(tmp_path: Path) -> None:
    buffer = opened(tmp_path, FifoBatchMaker(context()))
    buffer.add_rollouts(group())
    in_the_way = tmp_path / "env" / "batches"
    in_the_way.write_text("")
    with pytest.raises(StoreError, match="cannot be written") as raised:
        buffer.create_and_store_batch(8)
    assert isinstance(raised.value.__cause__, OSError)
    assert buffer.batch_ids() == []
    assert buffer.stats()["batches"] == 0
    in_the_way.unlink()
    batch_id = buffer.create_and_store_batch(8)
    assert buffer.batch_ids() == [batch_id]
    assert len(buffer.read_batch(str(batch_id)).examples) == 8


def test_batches_need_a_maker_and_a_size(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="no batch maker"):
        opened(tmp_path).create_and_store_batch(1)
    with pytest.raises(ConfigurationError, match="at least 1"):
        opened(tmp_path, FifoBatchMaker(context())).create_and_store_batch(0)


# ---------------------------------------------------------------------- keeping


def test_closing_seals_what_is_large_enough_and_keeps_the_rest_for_the_next_time(tmp_path: Path) -> None:
    buffer = opened(tmp_path)
    buffer.add_rollouts([*group("a", size=5), *group("b", size=1)])
    assert buffer.close() == Closed(sealed=1, kept=1)
    again = opened(tmp_path)
    assert [(stored.example_id, len(stored.rollouts)) for stored in again.groups()] == [("a", 5)]
    assert again.stats()["open_rollouts"] == 1
    again.add_rollouts(attempt(n, "b") for n in range(8))
    assert [len(stored.rollouts) for stored in again.groups()] == [5, 8]


def test_leaving_the_block_closes_the_store_also_after_an_error(tmp_path: Path) -> None:
    with pytest.raises(RecordError), opened(tmp_path) as buffer:
        buffer.add_rollouts([*group(size=3), attempt(3, environment="other")])
    assert opened(tmp_path).size() == 1


def test_open_groups_go_on_as_they_were_after_a_flush(tmp_path: Path) -> None:
    clock = Clock()
    buffer = opened(tmp_path, clock=clock)
    buffer.add_rollouts(group("a", size=3))
    buffer.add_rollout(attempt(0, "b"))
    clock.now += 31
    buffer.add_rollouts(group("c", size=4))
    buffer.flush()
    buffer.release()
    again = opened(tmp_path, clock=clock)
    assert buffer.stats() | {"added": 0, "sealed": 0} == again.stats() | {"added": 0, "sealed": 0}
    again.add_rollout(attempt(1, "b"))
    assert [stored.example_id for stored in again.groups()] == ["a", "b"], "b was overdue, and still is"
    clock.now += 30
    assert again.poll() == 1


def test_a_group_that_cannot_be_written_is_an_error_and_stored_by_whatever_comes_next(tmp_path: Path) -> None:
    buffer = opened(tmp_path, FifoBatchMaker(context()))
    buffer.add_rollouts(group(size=7))
    in_the_way = tmp_path / "env"
    in_the_way.rename(tmp_path / "aside")
    in_the_way.write_text("")
    with pytest.raises(StoreError, match="nothing of it is stored") as raised:
        buffer.add_rollout(attempt(7))
    assert isinstance(raised.value.__cause__, OSError)
    assert buffer.size() == 0
    assert buffer.stats()["held"] == 0, "nothing that is not stored is offered"
    with pytest.raises(StoreError):
        buffer.add_rollout(attempt(8))
    in_the_way.unlink()
    (tmp_path / "aside").rename(in_the_way)
    assert buffer.add_rollout(attempt(8)), "it was not in"
    assert [len(stored.rollouts) for stored in buffer.groups()] == [8]
    assert buffer.stats()["held"] == 8


def test_an_index_that_is_torn_or_gone_is_mended_from_the_folder(tmp_path: Path) -> None:
    with opened(tmp_path) as buffer:
        for example in "abc":
            buffer.add_rollouts(group(example))
    index = tmp_path / "env" / "groups.jsonl"
    whole = index.read_bytes()
    for damaged in (whole[:-20], b"", b"{\n" + whole):
        index.write_bytes(damaged)
        with opened(tmp_path) as again:
            assert sorted(stored.example_id for stored in again.groups()) == ["a", "b", "c"]
            assert again.add_rollouts(group("c")) == 0
    index.unlink()
    assert opened(tmp_path).size() == 3
    next((tmp_path / "env").glob("part-*")).unlink()
    assert opened(tmp_path).size() == 2, "an index never names what is not there"


def test_a_file_that_is_no_group_is_named(tmp_path: Path) -> None:
    with opened(tmp_path) as buffer:
        buffer.add_rollouts(group())
    [path] = tmp_path.rglob("part-*")
    path.write_bytes(path.read_bytes()[:-30])
    with pytest.raises(StoreError, match=r"part-.*is damaged.*restore it"):
        list(opened(tmp_path).groups())
    path.write_bytes(b"")
    with pytest.raises(StoreError, match=r"part-.*is (damaged|no file of groups).*restore it"):
        list(opened(tmp_path).groups())


def flips(whole: bytes, count: int) -> Iterator[bytes]:
    """The bytes with one bit flipped: at places drawn by a fixed seed, and at every one of the last 64 bytes."""
    rng = np.random.default_rng(5)
    for bit in {*rng.integers(0, 8 * len(whole), count).tolist(), *range(8 * len(whole) - 512, 8 * len(whole))}:
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << bit % 8
        yield bytes(damaged)


def test_every_flipped_bit_of_a_group_or_a_batch_is_a_store_error_that_names_the_file(tmp_path: Path) -> None:
    with opened(tmp_path, FifoBatchMaker(context())) as buffer:
        buffer.add_rollouts(group())
        batch_id = buffer.create_and_store_batch(8)
        assert batch_id is not None
        [part], [batch] = tmp_path.rglob("part-*"), tmp_path.rglob("batch_*")
        for path, read in (
            (part, lambda: buffer.read_group(buffer.group_ids()[0])),
            (batch, lambda: buffer.read_batch(batch_id)),
        ):
            whole = path.read_bytes()
            for damaged in flips(whole, 400):
                path.write_bytes(damaged)
                with pytest.raises(StoreError, match=f"(?s){path.name} is .*restore it from a copy"):
                    read()
            path.write_bytes(whole)
            read()


def test_pages_carry_the_checksums_of_parquet(tmp_path: Path) -> None:
    opened(tmp_path, compression="none").add_rollouts(group())
    [path] = tmp_path.rglob("part-*")
    whole = bytearray(path.read_bytes())
    whole[whole.index(b"q-0-3")] ^= 1
    path.write_bytes(whole)
    with pytest.raises(OSError, match="CRC"):
        pq.read_table(path, page_checksum_verification=True)


def test_damaged_files_close_no_store_and_are_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with opened(tmp_path, FifoBatchMaker(context())) as buffer:
        for example in "abcd":
            buffer.add_rollouts(group(example))
        assert buffer.create_and_store_batch(8) is not None
    parts = {g.example_id: tmp_path / "env" / f"part-{uuid_of(g.group_id)}.parquet" for g in buffer.groups()}
    for path in (parts["b"], parts["c"], next(tmp_path.rglob("batch_*"))):
        path.write_bytes(path.read_bytes()[:-9])
    again = opened(tmp_path, FifoBatchMaker(context()))
    assert (again.stats()["damaged"], again.stats()["held"]) == (3, 16), "a is offered again, b and c cannot be"
    assert caplog.text.count("stored_file_damaged") == 3
    groups, found = again.groups(), []
    for _ in range(4):
        try:
            found.append(next(groups).example_id)
        except StoreError:
            found.append("damaged")
    assert found == ["a", "damaged", "damaged", "d"]
    again.close()
    (tmp_path / "env" / "groups.jsonl").unlink()
    mended = opened(tmp_path)
    assert sorted(g.example_id for g in mended.groups()) == ["a", "d"]
    assert mended.add_rollouts(group("b")) == 8, "they can be put in again"
    assert mended.size() == 3


def uuid_of(group_id: str) -> uuid.UUID:
    return uuid.UUID(group_id[:32])


def test_many_threads_add_poll_and_draw_and_every_rollout_is_somewhere_once(tmp_path: Path) -> None:
    buffer = opened(tmp_path, FifoBatchMaker(context()), target_group_size=4)
    drawn: list[str] = []
    errors: list[BaseException] = []

    def add(thread: int) -> None:
        try:
            for n in range(15):
                buffer.add_rollouts(attempt(thread, f"{n + i}") for i in range(2))
                buffer.poll()
        except BaseException as error:
            errors.append(error)

    def draw() -> None:
        try:
            while any(thread.is_alive() for thread in adding):
                for row in buffer.sample(4) or ():
                    assert row.tokens.tolist() == [1, 2, 3, 4]
                    drawn.append(row.source.uid)
        except BaseException as error:
            errors.append(error)

    adding = [threading.Thread(target=add, args=(i,)) for i in range(8)]
    drawing = [threading.Thread(target=draw) for _ in range(2)]
    for thread in [*adding, *drawing]:
        thread.start()
    for thread in [*adding, *drawing]:
        thread.join(60)
    assert errors == []
    while rows := buffer.sample(4):
        drawn += [row.source.uid for row in rows]
    stored = [r.uid for g in seen(tmp_path).groups() for r in g.rollouts]
    assert len(stored) == len(set(stored)) == buffer.stats()["added"] == 8 * 16
    assert sorted(drawn) == sorted(stored)


CHILD = """
import sys
from consumers.buffers.group_config import GroupStoreConfig
from consumers.buffers.group_store import GroupReplayBuffer
from consumers.grouping.batch_maker import FifoBatchMaker, MakerContext
from consumers.grouping.testing import example_rollout

maker = FifoBatchMaker(MakerContext(partition=0, seed=0, batch_bytes=2**30))
buffer = GroupReplayBuffer(sys.argv[1], "env", GroupStoreConfig(target_group_size=2), batch_maker=maker)
start = buffer.size()
n = start
while True:
    buffer.add_rollouts(example_rollout(f"{n}-{m}", float(m), example_id=str(n)) for m in range(2))
    print("group", buffer.group_ids()[-1], flush=True)
    if n % 3 == 0:
        print("batch", buffer.create_and_store_batch(4), flush=True)
    if n % 5 == 0:
        buffer.add_rollout(example_rollout(f"open-{n}", example_id=f"open-{n}"))
        buffer.flush()
        print("open", f"open-{n}", flush=True)
    n += 1
"""


def test_kill_9_while_writing_leaves_nothing_torn_and_everything_that_was_acknowledged(tmp_path: Path) -> None:
    said: dict[str, list[str]] = {"group": [], "batch": [], "open": []}
    for lines in (5, 30):
        child = subprocess.Popen(
            [sys.executable, "-c", CHILD, str(tmp_path)],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        assert child.stdout is not None
        for _ in range(lines):
            kind, what = child.stdout.readline().split()
            if what != "None":
                said[kind].append(what)
        child.send_signal(signal.SIGKILL)
        # What it said between the last line read and its end was acknowledged, too.
        for line in child.stdout.read().splitlines():
            if len(words := line.split()) == 2 and words[1] != "None":
                said[words[0]].append(words[1])
        child.wait()
        child.stdout.close()
        maker = FifoBatchMaker(context())
        buffer = opened(tmp_path, maker, target_group_size=2)
        assert set(said["group"]) <= set(buffer.group_ids())
        assert set(said["batch"]) <= set(buffer.batch_ids())
        stored = [r.uid for g in buffer.groups() for r in g.rollouts]
        delivered = [row.source.uid for b in buffer.batch_ids() for row in buffer.read_batch(b).examples]
        assert len(stored) == len(set(stored))
        assert len(delivered) == len(set(delivered))
        assert maker.held == len(stored) - len(delivered)
        assert all(not buffer.add_rollout(example_rollout(uid, example_id=uid)) for uid in said["open"])
        assert list(tmp_path.rglob("*.unfinished")) == []
        buffer.release()


def test_the_example_runs_as_documented_and_counts_what_is_on_disk(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-m", "consumers.buffers.example_usage", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "batch 0: 32 examples" in done.stdout
    assert done.stdout.count("group problem-") == 12
    assert len(list((tmp_path / "sums").glob("part-*.parquet"))) == 12
    assert len(list((tmp_path / "sums" / "batches").glob("batch_*.parquet"))) == 2


def test_the_page_names_every_setting_with_its_default() -> None:
    page = (ROOT / "docs" / "group-store.md").read_text()
    rows = dict(re.findall(r"^\| `(\w+)` \| ([^|]+) \|", page.split("## Groups")[1].split("## Files")[0], re.MULTILINE))
    shown = {f.name: f.default for f in fields(GroupStoreConfig)} | {
        "accept_policy_versions": "all",
        "capacity_groups": "50,000",
        "target_group_size": "8 by hand, declared from a log",
        "min_group_size": "2 by hand, declared from a log",
    }
    del shown["seed"]
    assert {name: cell.strip() for name, cell in rows.items()} == {
        name: f"{default:g}" if isinstance(default, float) else str(default) for name, default in shown.items()
    }


def test_the_snippet_of_the_page_keeps_rollouts_and_makes_a_batch(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "group-store.md").read_text()
    snippet = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)[0]
    namespace: dict[str, Any] = {}
    exec(compile(snippet, "docs/group-store.md", "exec"), namespace)
    attempts = [attempt(n, example, environment="math") for example in "abcd" for n in range(8)]
    assert namespace["keep"](attempts, tmp_path) is not None
    assert len(list((tmp_path / "math").glob("part-*.parquet"))) == 4


def test_what_is_known_of_stored_groups_costs_a_kilobyte_each_and_says_of_each_uid_whether_it_is_there(
    tmp_path: Path,
) -> None:
    directory, count = tmp_path / "env", 4_000
    directory.mkdir()
    lines = []
    for n in range(count):
        uids = [f"{n:028x}-{m:03}" for m in range(8)]
        group_id = group_id_of("env", str(n), 0, uids)
        name = f"part-{uuid_of(group_id)}.parquet"
        (directory / name).touch()
        lines.append(json.dumps([name, group_id, str(n), 0, uids]))
    (directory / "groups.jsonl").write_text("".join(f"{line}\n" for line in lines))
    tracemalloc.start()
    buffer = opened(tmp_path)
    held = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert buffer.size() == count
    assert held / count < 1_100, "as objects it was 2,000 bytes"
    for n in range(0, count, 100):
        assert not buffer.add_rollout(example_rollout(f"{n:028x}-{n % 8:03}"))
        assert buffer.add_rollout(example_rollout(f"{n:028x}-009", example_id=str(n)))
        assert not buffer.add_rollout(example_rollout(f"{n:028x}-009", example_id=str(n)))
