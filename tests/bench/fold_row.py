"""Rows `fold-1k`, `fold-10k`, `fold-100k`: the fold alone with that many groups open, against decoding the records."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from rollstream.consumers.grouping.config import GroupingConfig
from rollstream.consumers.grouping.core import task_state
from rollstream.consumers.grouping.core.effects import InputRecord
from rollstream.consumers.grouping.core.fold import Fold
from rollstream.consumers.grouping.core.rollout_reader import read_rollouts
from rollstream.consumers.grouping.testing import example_rollout
from rollstream.topics.records import Rollout
from rollstream.topics.wire.codec import decode_as, encode
from rollstream.topics.wire.keys import encode_key
from tests.bench.grouping_process import grouping_collector
from tests.bench.measure import Row, Settings, Stopwatch, Timing, interleaved

_TOKENS = np.arange(64, dtype="<i4")
_TAKE_EVERY = 250


def row(name: str, open_groups: int) -> Callable[[Settings], Row]:
    """Return the row with `open_groups` groups always open: every second record closes one, the others open one."""

    def measure(settings: Settings) -> Row:
        waiting = min(open_groups, settings.rollouts * 100)
        fold = fold_with(waiting)
        last = waiting

        def ours() -> Timing:
            nonlocal last
            taken = steps(last, waiting, settings.rollouts)
            last += settings.rollouts
            watch = Stopwatch()
            for i in range(0, len(taken), _TAKE_EVERY):
                together = taken[i : i + _TAKE_EVERY]
                for step, rollout in zip(together, read_rollouts([step.value for step in together]), strict=True):
                    fold.apply(step._replace(rollout=rollout))
                fold.prepare_commit()
            timing = watch.timing(len(taken))
            if fold.open_groups != waiting:
                raise RuntimeError(f"{fold.open_groups} groups are open instead of {waiting}")
            return timing

        sample = steps(0, waiting, settings.rollouts)

        def raw() -> Timing:
            watch = Stopwatch()
            for step in sample:
                decode_as(Rollout, step.value)
            return watch.timing(len(sample))

        with grouping_collector():
            rates, baseline = interleaved(settings.repetitions, ours, raw)
        return Row(
            name=name,
            what=f"fold rollouts of {len(_TOKENS)} tokens into groups of 2 while {waiting:,} are open, and batch them",
            baseline="decode the same records",
            size_bytes=len(sample[0].value or b""),
            ours=rates,
            raw=baseline,
        )

    return measure


def fold_with(open_groups: int) -> Fold:
    """Return a fold with this many open groups of one member each; a group's number is the offset of its member."""
    # A record's offset is also its time in milliseconds, so a million groups would exceed the default deadline.
    config = GroupingConfig(capacity_bytes=10**12, group_deadline_s=1e6)
    first = task_state.initial_record(0, 1, "bench", config)
    fold = Fold(task_state.restored_state([replace(first, policy_version=0, watermark_policy_version=0)]))
    for group in range(open_groups):
        fold.apply(record_at(group, group, 0))
    fold.prepare_commit()
    return fold


def steps(offset: int, open_groups: int, count: int) -> list[InputRecord]:
    """Return `count` records from `offset` on: in turn, the second member of the oldest group and the first member of
    a new group."""
    oldest = (offset - open_groups) // 2
    pairs = ((record_at(offset + 2 * i, oldest + i, 1), record_at(offset + 2 * i + 1, oldest + open_groups + i, 0))
             for i in range(count // 2))  # fmt: skip
    return [record for pair in pairs for record in pair]


def record_at(offset: int, group: int, member: int) -> InputRecord:
    """Return the record of a group's member at an offset."""
    rollout = example_rollout(str(member), float(member), example_id=str(group), tokens=_TOKENS)
    return InputRecord(offset, offset, encode_key("env", str(group)), encode(rollout))
