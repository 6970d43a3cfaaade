"""A rollout buffer that is filled from the log: rows name their sources, and stream time decides."""

from collections import deque
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollstream.consumers.batch_reader import IndexedBatch, ReadBatch
from rollstream.consumers.buffers.rollouts.buffer import (
    RolloutReplayBuffer,
)
from rollstream.topics.errors import DeadlineExceeded
from rollstream.topics.records import (
    BatchIndexEntry,
)
from tests.support.batches import random_batch
from tests.support.rollout_buffers import uids


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
    indexed = IndexedBatch(entry, 2 * number)
    return ReadBatch(entry, batch, 2 * number, 2 * number + 1, 2 * number, (indexed,))


def from_log(**settings: Any) -> RolloutReplayBuffer:
    chosen = {"local_batch_size": 4, "max_samples": 3, "max_rollout_step_delay": 3, "seed": 9, **settings}
    return RolloutReplayBuffer(**chosen)


def test_rows_of_the_log_keep_their_advantages_and_name_their_source() -> None:
    replay, batch = from_log(local_batch_size=6), read(0).batch
    replay.add_read(read(0))
    actual = {item.rollout.uid: item for item in replay.sample() or ()}
    assert sorted(actual) == sorted(batch.uids)
    for row, uid in enumerate(batch.uids):
        span = slice(int(batch.splits[row]), int(batch.splits[row + 1]))
        item = actual[uid]
        assert np.array_equal(np.broadcast_to(item.advantage, span.stop - span.start), batch.advantages[span])
        assert np.array_equal(item.rollout.tokens, batch.tokens[span])
        assert np.array_equal(item.rollout.logprobs, batch.logprobs[span])
        assert item.rollout.extra["batch"] == f"{batch.batch_id}/{row}"


def test_time_is_stream_time_in_a_buffer_filled_from_the_log() -> None:
    replay = from_log(max_rollout_timestamp_delay=2.5, max_samples=-1)
    replay.set_current_step(1)
    for number in range(6):
        replay.add_read(read(number))
    assert replay.set_current_step(1) == 24
    # The newest batch is cut at 5 s: a group opened at 2.5 s is just too old, one opened at 3.5 s is not.
    assert replay.stats()["env_sizes"] == {"env": 12}
    assert replay.position == {0: 11}


def test_a_batch_that_was_read_already_is_not_added_twice() -> None:
    replay = from_log()
    assert [replay.add_read(read(number)) for number in (0, 1, 0, 1)] == [6, 6, 0, 0]


def test_a_buffer_that_lost_its_disk_is_rebuilt_equal_from_the_log(tmp_path: Path) -> None:
    kept, lost = from_log(), from_log()
    for replay in (kept, lost):
        replay.set_current_step(2)
    kept.fill(Script(range(4)), 3)
    kept.fill(Script(range(2, 9)), 17)
    kept.save(tmp_path)
    loaded = from_log(seed=0)
    loaded.load(tmp_path)
    lost.fill(Script(range(20)), 17)
    assert kept.position == loaded.position == lost.position == {0: 17}
    samples = [[uids(replay.sample()) for _ in range(5)] for replay in (kept, loaded, lost)]
    assert samples[0] == samples[1] == samples[2]
    with pytest.raises(DeadlineExceeded, match="did not reach position 99"):
        lost.fill(Script(range(9, 10)), 99)


def test_policy_versions_become_the_steps_they_were_published_after() -> None:
    replay = from_log(weight_step_of=lambda version: 10 * version, local_batch_size=6)
    replay.set_current_step(10)
    assert [replay.add_read(read(number)) for number in (3, 4)] == [0, 6]
    assert {item.weight_step for item in replay.sample() or ()} == {10}
