"""Work per record is constant: a hundred times the open groups must not cost more than noise."""

import gc
import time
from dataclasses import replace

import numpy as np

from consumers.grouping import state
from consumers.grouping.changes import Record
from consumers.grouping.config import GroupingConfig
from consumers.grouping.fold import Fold
from consumers.grouping.testing import example_rollout
from topics.codec import encode
from topics.keys import encode_key

EVENTS = 1_500
TOKENS = np.array([1, 2], "<i4")


def record(offset: int, group: int, member: int) -> Record:
    rollout = example_rollout(str(member), float(member), example_id=str(group), tokens=TOKENS)
    return Record(offset, offset, encode_key("env", str(group)), encode(rollout))


def seconds_with(open_groups: int) -> float:
    """Processor time of EVENTS records, each second one closing the oldest group, the others opening new ones."""
    first = state.initial(0, 1, "test", GroupingConfig(capacity_bytes=10**12))
    fold = Fold(state.restore([replace(first, policy_version=0, watermark_policy_version=0)]))
    for group in range(open_groups):
        fold.apply(record(group, group, 0))
    steps = []
    for i in range(EVENTS // 2):
        offset = open_groups + 2 * i
        steps += [record(offset, i, 1), record(offset + 1, open_groups + i, 0)]
    fold.take()
    gc.collect()
    gc.disable()
    try:
        best = float("inf")
        for start in range(0, EVENTS, EVENTS // 3):
            began = time.process_time()
            for i, step in enumerate(steps[start : start + EVENTS // 3]):
                fold.apply(step)
                if i % 250 == 0:
                    fold.take()
            best = min(best, time.process_time() - began)
    finally:
        gc.enable()
    assert fold.open_groups == open_groups
    return best


def test_a_record_costs_the_same_with_a_hundred_times_the_open_groups() -> None:
    few, many = seconds_with(80), seconds_with(8_000)
    assert many < 3 * few
