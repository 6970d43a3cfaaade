"""The batch maker of a group store, and the batches it draws: files of a known layout, the same in every process."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from rollstream.consumers.buffers.groups.forwarding import examples_of
from rollstream.consumers.grouping.makers.batch_maker import FifoBatchMaker, SealedGroup
from rollstream.consumers.grouping.makers.reservoir import ReservoirBatchMaker
from rollstream.topics.errors import ConfigurationError
from rollstream.topics.files.atomic_files import StoreError
from rollstream.topics.records import same
from rollstream.topics.wire.rl_examples import RLExample, Source
from tests.support.group_stores import attempt, context, group, opened


def test_adding_one_by_one_offers_each_rollout_to_the_maker_once(tmp_path: Path) -> None:
    maker = ReservoirBatchMaker(context())
    buffer = opened(tmp_path, maker)
    for rollout in group():
        buffer.add_rollout(rollout)
    assert maker.held == buffer.stats()["held"] == 8


def test_advantages_are_those_of_the_whole_group() -> None:
    buffer_group = [attempt(n, reward=r) for n, r in enumerate((1.0, 0.0, 0.0, 1.0))]
    from rollstream.consumers.buffers.groups.group_files import PlacedRollout, group_of

    members = [PlacedRollout(r, Source(-1, -1, r.uid)) for r in buffer_group]
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


def test_superseded_groups_leave_the_maker_also_after_a_restart(tmp_path: Path) -> None:
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


def test_a_batch_is_none_if_short_and_else_a_file_with_the_columns_of_the_layout(tmp_path: Path) -> None:
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


def test_the_same_groups_and_seed_give_the_same_batches_in_every_process(tmp_path: Path) -> None:
    def batches(directory: Path, restart: bool) -> list[list[str]]:
        collected = []
        buffer = opened(directory, ReservoirBatchMaker(context()))
        for example in "abcdef":
            buffer.add_rollouts(group(example))
        for _ in range(4):
            if restart:
                buffer.close()
                buffer = opened(directory, ReservoirBatchMaker(context()))
            batch = buffer.sample(10)
            assert batch is not None
            collected.append([row.source.uid for row in batch])
        return collected

    once = batches(tmp_path / "once", restart=False)
    assert batches(tmp_path / "again", restart=True) == once
    assert len({uid for batch in once for uid in batch}) == 40, "nothing is delivered twice"


def test_a_batch_that_cannot_be_written_is_an_error_and_is_written_by_the_next_call(tmp_path: Path) -> None:
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


class FailingMaker(FifoBatchMaker):
    """Raises an error in one of its methods, once."""

    fails_in = ""

    def add_rollout(self, example: RLExample, group: SealedGroup) -> None:
        if example.source.uid == "b-0-3":
            self._fail("add_rollout")
        super().add_rollout(example, group)

    def create_batch(self, batch_size: int) -> list[RLExample] | None:
        batch = super().create_batch(batch_size)
        self._fail("create_batch")
        return batch

    def get_batch_metadata(self, batch: Sequence[RLExample]) -> dict[str, Any]:
        self._fail("get_batch_metadata")
        return super().get_batch_metadata(batch)

    def _fail(self, method: str) -> None:
        if self.fails_in == method:
            self.fails_in = ""
            raise ZeroDivisionError(f"a defect in {method}")


@pytest.mark.parametrize("method", ["add_rollout", "create_batch", "get_batch_metadata"])
def test_a_maker_that_failed_makes_no_batches_until_the_store_is_opened_again_and_then_gets_every_rollout(
    tmp_path: Path, method: str
) -> None:
    maker = FailingMaker(context())
    maker.fails_in = method
    buffer = opened(tmp_path, maker)

    def fill_and_draw() -> None:
        for example in "ab":
            buffer.add_rollouts(group(example))
        buffer.create_and_store_batch(8)

    with pytest.raises(ZeroDivisionError, match=f"a defect in {method}"):
        fill_and_draw()
    buffer.add_rollouts(group("c"))
    for _ in range(2):
        with pytest.raises(StoreError, match=r"raised an error before.*open it again"):
            buffer.create_and_store_batch(8)
    buffer.close()
    again = opened(tmp_path, FifoBatchMaker(context()))
    drawn = [row.source.uid for _ in range(3) for row in again.sample(8) or ()]
    assert Counter(drawn) == Counter(rollout.uid for example in "abc" for rollout in group(example))


def test_batches_need_a_maker_and_a_size(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="no batch maker"):
        opened(tmp_path).create_and_store_batch(1)
    with pytest.raises(ConfigurationError, match="at least 1"):
        opened(tmp_path, FifoBatchMaker(context())).create_and_store_batch(0)
