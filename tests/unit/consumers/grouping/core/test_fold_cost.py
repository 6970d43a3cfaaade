"""Work per record is constant: a hundred times the open groups must not cost more than noise does, and a uid must not
cost more in a group of many members than in a group of few.
"""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from rollstream.consumers.grouping.config import GroupingConfig
from rollstream.consumers.grouping.core import task_state
from rollstream.consumers.grouping.core.effects import InputRecord
from rollstream.consumers.grouping.core.fold import Fold
from rollstream.consumers.grouping.testing import example_rollout
from rollstream.topics.records import GroupCancelled, Mark
from rollstream.topics.wire.codec import encode
from rollstream.topics.wire.keys import encode_key
from rollstream.topics.wire.validation import UIDS_LIMIT
from tests.support.processor_time import ProcessorTime

EVENTS = 1_500
TOKENS = np.array([1, 2], "<i4")


def record(offset: int, group: int, member: int) -> InputRecord:
    rollout = example_rollout(str(member), float(member), example_id=str(group), tokens=TOKENS)
    return InputRecord(offset, offset, encode_key("env", str(group)), encode(rollout))


def seconds_with(open_groups: int) -> float:
    """Least processor time of three parts of EVENTS records, which in turn close the oldest group and open another."""
    first = task_state.initial_record(0, 1, "test", GroupingConfig(capacity_bytes=10**12))
    fold = Fold(task_state.restored_state([replace(first, policy_version=0, watermark_policy_version=0)]))
    for group in range(open_groups):
        fold.apply(record(group, group, 0))
    steps = []
    for i in range(EVENTS // 2):
        offset = open_groups + 2 * i
        steps += [record(offset, i, 1), record(offset + 1, open_groups + i, 0)]
    fold.prepare_commit()
    best = float("inf")
    for start in range(0, EVENTS, EVENTS // 3):
        with ProcessorTime() as spent:
            for i, step in enumerate(steps[start : start + EVENTS // 3]):
                fold.apply(step)
                if i % 250 == 0:
                    fold.prepare_commit()
        best = min(best, spent.seconds)
    assert fold.open_groups == open_groups
    return best


@pytest.mark.long
def test_a_record_costs_the_same_with_a_hundred_times_the_open_groups() -> None:
    few, many = seconds_with(40), seconds_with(4_000)
    assert many < 3 * few


# ---------------------------------------------------------------------- large groups


def large_group(members: int) -> Fold:
    """Return a fold with one group in which all members but one arrived."""
    first = task_state.initial_record(0, 1, "test", GroupingConfig(batch_rollouts=10**6, max_policy_lag=0))
    fold = Fold(task_state.restored_state([replace(first, policy_version=0, watermark_policy_version=0)]))
    for member in range(members - 1):
        fold.apply(member_record(member, members))
    fold.prepare_commit()
    return fold


def member_record(member: int, members: int) -> InputRecord:
    rollout = example_rollout(str(member), float(member), group_size=members, tokens=TOKENS)
    return InputRecord(member, member, encode_key("env", "0"), encode(rollout))


def cancel_all(fold: Fold, members: int) -> None:
    uids = [str(member) for member in range(members)]
    for start in range(0, members, UIDS_LIMIT):
        cancelled = GroupCancelled(
            environment="env",
            example_id="0",
            policy_version=0,
            group_size=members,
            uids=tuple(uids[start : start + UIDS_LIMIT]),
        )
        fold.apply(InputRecord(fold.position, 0, encode_key("env", "0"), encode(cancelled)))
    assert fold.open_groups == fold.in_flight == 0


def seal_and_drop(fold: Fold, members: int) -> None:
    fold.apply(member_record(members - 1, members))
    assert fold.open_groups == 0
    fold.apply(InputRecord(members, 0, encode_key("mark"), encode(Mark(kind="policy_version", policy_version=1))))
    assert fold.in_flight == 0


@pytest.mark.parametrize("end", [cancel_all, seal_and_drop])
@pytest.mark.long
def test_a_member_costs_the_same_in_a_group_of_eight_times_the_size(end: Callable[[Fold, int], None]) -> None:
    def seconds(members: int) -> float:
        best = float("inf")
        for _ in range(2):
            fold = large_group(members)
            with ProcessorTime() as spent:
                end(fold, members)
            best = min(best, spent.seconds)
        return best

    # The ratio is 8 if the time is linear, and 64 if it is quadratic.
    assert seconds(4_000) < 20 * seconds(500)
