"""The public test driver, used as in tests of a user's configuration or batch maker."""

import pytest

from rollstream.consumers.grouping.config import GroupingConfig
from rollstream.consumers.grouping.core.effects import InputRecord
from rollstream.consumers.grouping.testing import GroupingTestDriver, example_rollout
from rollstream.topics.records import Mark, Rollout, same
from rollstream.topics.wire.codec import decode, encode
from rollstream.topics.wire.keys import encode_key


def test_rollouts_piped_come_out_as_batches() -> None:
    driver = GroupingTestDriver(GroupingConfig(batch_rollouts=2))
    driver.pipe(example_rollout("a", reward=1.0))
    driver.pipe(example_rollout("b", reward=0.0))
    assert [batch.uids for batch in driver.batches] == [("a", "b")]


def test_the_log_holds_the_records_that_a_broker_would_hold() -> None:
    driver = GroupingTestDriver()
    rollout = example_rollout("a")
    assert driver.pipe(rollout, at_ms=5) == 0
    driver.advance(10)
    assert [(r.offset, r.timestamp_ms) for r in driver.log] == [(0, 5), (1, 15)]
    assert driver.log[0].key == encode_key("env", "0")
    assert same(decode(driver.log[0].value), rollout)
    assert isinstance(decode(driver.log[1].value), Mark)


def test_records_may_leave_gaps_between_offsets() -> None:
    driver = GroupingTestDriver()
    driver.pipe(InputRecord(7, 0, encode_key("env", "0"), encode(example_rollout("a"))))
    assert driver.end == 8
    driver.commit()
    driver.crash_and_restore()
    assert driver.pipe(example_rollout("b")) == 8


def test_effects_read_from_the_driver_survive_a_crash_and_others_are_repeated() -> None:
    driver = GroupingTestDriver(GroupingConfig(batch_rollouts=2))
    driver.pipe(example_rollout("a", 1.0))
    driver.pipe(example_rollout("b", 0.0))
    seen = driver.batches
    journal = len(driver.journal)
    driver.crash_and_restore()
    assert len(driver.journal) == journal
    assert [batch.digest for batch in driver.batches] == [batch.digest for batch in seen]


def test_a_policy_clock_that_starts_unset_makes_groups_wait() -> None:
    driver = GroupingTestDriver(GroupingConfig(batch_rollouts=2), policy_version=-1)
    driver.pipe(example_rollout("a", 1.0))
    driver.pipe(example_rollout("b", 0.0))
    assert driver.batches == []
    driver.publish_policy_version(0)
    assert len(driver.batches) == 1


def test_configure_raises_the_generation_by_itself() -> None:
    driver = GroupingTestDriver()
    driver.configure(GroupingConfig())
    driver.configure(GroupingConfig(generation=9))
    driver.configure(GroupingConfig())
    assert driver.fold.config.generation == 10


def test_example_rollouts_are_valid_and_take_any_field() -> None:
    rollout = example_rollout("a", policy_version=3, lowest_version=1, truncated=True)
    assert isinstance(rollout, Rollout)
    assert (rollout.lowest_version, rollout.highest_version) == (1, 3)
    driver = GroupingTestDriver(policy_version=3)
    driver.pipe(rollout)
    assert driver.drops == []


def test_a_record_below_the_end_is_refused() -> None:
    driver = GroupingTestDriver()
    driver.advance(1)
    with pytest.raises(ValueError, match="the log ends at 1"):
        driver.pipe(InputRecord(0, 0, None, None))
