"""Restored states, refused journals, configurations, and deadlines and finished groups that are forgotten."""

import dataclasses
from dataclasses import replace
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollstream.consumers.grouping.config import GroupingConfig
from rollstream.consumers.grouping.core import task_state
from rollstream.consumers.grouping.core.groups import DeadlineKind, Deadlines, Group, GroupKey
from rollstream.consumers.grouping.testing import GroupingTestDriver, example_rollout
from rollstream.topics.errors import ConfigurationError, StateRefused
from tests.support.pairs import driver, pair


def test_a_journal_with_a_record_missing_is_refused() -> None:
    d = driver()
    for i in range(3):
        pair(d, str(i))
        d.commit()
    journal = d.journal
    with pytest.raises(StateRefused, match="from sequence 1 to 3"):
        task_state.restored_state([*journal[:2], *journal[3:]])


def test_a_journal_without_a_snapshot_is_refused() -> None:
    d = driver()
    pair(d)
    with pytest.raises(StateRefused, match="holds no snapshot"):
        task_state.restored_state(d.journal[1:])
    with pytest.raises(StateRefused, match="holds no snapshot"):
        task_state.restored_state([])


def test_a_state_restored_from_any_snapshot_on_is_the_same() -> None:
    d = GroupingTestDriver(GroupingConfig(batch_rollouts=2, horizon_s=0.001))
    for i in range(20):
        d.now_ms += 10
        pair(d, str(i))
        d.pipe(example_rollout("x", 1.0, example_id=f"open {i}"))
        d.commit(snapshot=i % 3 == 0)
    whole = task_state.restored_state(d.journal)
    for start, record in enumerate(d.journal):
        if record.snapshot:
            assert replace(task_state.restored_state(d.journal[start:]), finished_groups=()) == replace(
                whole, finished_groups=()
            )


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"batch_rollouts": 0}, "grouping.batch_rollouts is 0; it must be at least 1"),
        ({"min_group_size": -1}, "grouping.min_group_size is -1"),
        ({"group_deadline_s": 0.0}, "grouping.group_deadline_s is 0.0; it must be 0.001 to 1e+09 seconds"),
        ({"horizon_s": float("inf")}, "grouping.horizon_s is inf"),
        ({"max_batch_age_s": float("nan")}, "grouping.max_batch_age_s is nan"),
        ({"max_age_s": float("nan")}, "grouping.max_age_s is nan"),
        ({"batch_rollouts": "64"}, "grouping.batch_rollouts is '64'; it must be of type int"),
        ({"batch_rollouts": True}, "grouping.batch_rollouts is True; it must be of type int"),
        ({"estimator": None}, "grouping.estimator is None; it must be of type str"),
        ({"drop_superseded": 1}, "grouping.drop_superseded is 1; it must be of type bool"),
        ({"exclude_workers": "w"}, "grouping.exclude_workers is 'w'; it must be a list of strings"),
        ({"exclude_workers": ("a worker of a long name",) * 6_000}, "at most 131072 are allowed; exclude fewer"),
        (
            {"exclude_offsets": ("0:1-2", "3")},
            "grouping.exclude_offsets: '3' is not a range of offsets; write PARTITION",
        ),
        ({"exclude_offsets": ("0:-1",)}, "grouping.exclude_offsets: '0:-1' is not a range"),
        ({"exclude_offsets": ("0:5-4",)}, "it ends before it begins"),
    ],
)
def test_an_invalid_configuration_is_refused_by_the_name_of_its_key(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        GroupingConfig(**changes)
    assert words in str(caught.value)


def test_a_configuration_is_decoded_as_it_was_encoded() -> None:
    config = GroupingConfig(generation=3, max_age_s=5, exclude_workers=("a", "b"), exclude_offsets=("0:5", "1:10-20"))
    assert GroupingConfig.from_json(config.to_json()) == config
    assert config.max_age_s == 5.0
    assert set(dataclasses.asdict(config)) == {f.name for f in dataclasses.fields(config)}


@given(st.lists(st.tuples(st.integers(0, 1), st.integers(0, 30), st.integers(0, 9)), max_size=8))
def test_ranges_of_offsets_may_overlap(ranges: list[tuple[int, int, int]]) -> None:
    config = GroupingConfig(exclude_offsets=tuple(f"{p}:{first}-{first + more}" for p, first, more in ranges))
    for partition in range(3):
        named = {o for p, first, more in ranges if p == partition for o in range(first, first + more + 1)}
        assert {o for o in range(50) if config.excludes_offset(partition, o)} == named


def group(offset: int) -> Group:
    return Group(GroupKey("env", str(offset), 0, ""), offset, 0, 2)


def test_deadlines_of_finished_groups_are_removed() -> None:
    deadlines, random = Deadlines(), Random(0)
    for offset in range(10_000):
        each = group(offset)
        deadlines.add(random.randint(1, 10**6), DeadlineKind.OPEN, each)
        deadlines.forget(each)
    assert len(deadlines) < 100
