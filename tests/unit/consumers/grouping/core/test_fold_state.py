"""Configurations from the log, crashes, the journal and the digest; one small log per test."""

import numpy as np
import pytest

from rollstream.consumers.grouping.config import GroupingConfig
from rollstream.consumers.grouping.core import task_state
from rollstream.consumers.grouping.core.effects import InputRecord
from rollstream.consumers.grouping.core.fold import Fold
from rollstream.consumers.grouping.core.plug_ins import BUILT_IN
from rollstream.consumers.grouping.testing import GroupingTestDriver, example_rollout
from rollstream.topics.errors import ConfigurationError, StateRefused
from rollstream.topics.records import Mark
from tests.support.pairs import driver, pair

# ---------------------------------------------------------------------- configuration marks


def test_a_configuration_mark_puts_a_higher_generation_in_force() -> None:
    d = driver()
    d.configure(GroupingConfig(batch_rollouts=4, generation=7))
    pair(d, "0")
    assert d.batches == []
    pair(d, "1")
    assert [batch.generation for batch in d.batches] == [7]


def test_a_generation_not_higher_than_the_current_is_ignored() -> None:
    d = driver(generation=3)
    for generation in (2, 3):
        config = GroupingConfig(batch_rollouts=100, generation=generation)
        d.pipe(Mark(kind="configuration", generation=generation, configuration=config.to_json()))
    pair(d)
    assert len(d.batches) == 1


# ---------------------------------------------------------------------- crashes


def test_reading_an_offset_twice_is_refused() -> None:
    d = driver()
    d.pipe(example_rollout("a", 1.0))
    with pytest.raises(StateRefused, match="was read already"):
        d.fold.apply(d.log[0])


def restore(d: GroupingTestDriver, log: list[InputRecord]) -> Fold:
    """Restore a fold from the journal of a driver and from another log."""
    state = task_state.restored_state(d.journal)
    fold = Fold(state, BUILT_IN)
    for record in log:
        if state.watermark <= record.offset < state.position:
            fold.replay(record)
    fold.resume()
    return fold


def test_a_log_that_lost_an_unfinished_record_is_refused() -> None:
    d = driver()
    d.pipe(example_rollout("a", 1.0))
    d.pipe(example_rollout("x", 1.0, example_id="1"))
    d.commit()
    first, *others = d.log
    with pytest.raises(StateRefused, match=r"was unfinished, but is finished when read again|had an effect"):
        restore(d, [first._replace(value=None), *others])
    with pytest.raises(StateRefused, match="no longer holds unfinished offsets"):
        restore(d, others)


def test_a_log_whose_records_are_of_another_time_is_refused() -> None:
    d = driver()
    d.pipe(example_rollout("a", 1.0))
    d.commit()
    first, *others = d.log
    with pytest.raises(StateRefused, match=r"gave stream time.*set kafka\.max_record_bytes back"):
        restore(d, [first._replace(timestamp_ms=77), *others])


# ---------------------------------------------------------------------- journal and digest


def test_the_journal_counts_rollouts_and_tokens_by_environment_and_fate() -> None:
    d = driver()
    pair(d)
    d.pipe(example_rollout("0a", 1.0))
    d.pipe(example_rollout("x", 1.0, environment="other", tokens=np.arange(7, dtype="<i4")))
    d.pipe(b"poison")
    d.advance(1)
    last = task_state.restored_state(d.journal)
    assert {(c.environment, c.fate, c.rollouts, c.tokens) for c in last.counts} == {
        ("env", "batched", 2, 8),
        ("env", "dropped:late", 1, 4),
        ("", "dead_lettered", 1, 0),
        ("", "control", 1, 0),
    }
    assert {(c.environment, c.rollouts, c.tokens) for c in last.produced} == {
        ("env", 3, 12),
        ("other", 1, 7),
        ("", 1, 0),
    }


def test_the_journal_names_batches_groups_and_positions() -> None:
    d = driver()
    pair(d, at := "0")
    d.pipe(example_rollout("1a", 1.0, example_id="1"), at_ms=9)
    record = d.commit(snapshot=True)
    assert (record.begin, record.position, record.watermark) == (0, 3, 2)
    assert (record.watermark_stream_time_ms, record.stream_time_ms) == (0, 9)
    assert record.batch_ids == ("0-0",)
    assert [(g.example_id, g.sealed_ms, g.finished_ms) for g in record.finished_groups] == [(at, 0, 0)]
    assert record.admitted.tolist() == record.unfinished.tolist() == [2, 1]
    assert {f.fate: f.runs.tolist() for f in record.finished} == {"batched": [0, 2]}


def test_an_unknown_estimator_or_maker_of_the_first_configuration_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="makers are fifo, reservoir"):
        driver(maker="none such")
