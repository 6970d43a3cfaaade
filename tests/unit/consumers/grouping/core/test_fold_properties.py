"""Promises of the fold on drawn logs: cuts and crashes change nothing, every offset is in exactly one place.

The logs hold arrivals, duplicates, cancellations, marks, versions, configurations, poison and pressure; see
tests/strategies.py. A crash throws away what was not committed and restores from journal and log.
"""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import event, given, settings, target

from rollstream.consumers.grouping.core import task_state as state
from rollstream.consumers.grouping.core.plug_ins import MAKERS
from rollstream.consumers.grouping.core.task_state import TaskState
from rollstream.consumers.grouping.makers.batch_maker import group_bytes, row_bytes
from rollstream.consumers.grouping.testing import GroupingTestDriver
from rollstream.topics.errors import RecordError
from rollstream.topics.records import JournalRecord, Rollout
from rollstream.topics.records.fates import DROP_REASONS
from rollstream.topics.records.journal import from_ranges
from rollstream.topics.wire import codec
from tests import strategies as draw
from tests.strategies import Log, Marked, Then

EXAMPLES = settings().max_examples
logs = draw.logs(tuple(MAKERS))


def fold(log: Log, then: Sequence[Then] | None = None) -> GroupingTestDriver:
    """The driver after the log; an action of `then` follows each record (default: the log's own actions)."""
    driver = GroupingTestDriver(log.config, draw.PARTITION, draw.PARTITIONS, policy_version=log.policy_version)
    for record, act in zip(log.records(), log.then if then is None else then, strict=True):
        driver.pipe(record)
        if act == "crash":
            driver.crash_and_restore()
        elif act:
            driver.commit(snapshot=act == "snapshot")
    return driver


def uncut(log: Log) -> GroupingTestDriver:
    return fold(log, [""] * len(log.events))


@dataclass(frozen=True)
class Outcome:
    """Results that must not depend on cuts and crashes."""

    batches: Any
    drops: Any
    dead_letters: Any
    finished_groups: Any
    finished: Any
    state: TaskState
    next_deadline_ms: int | None
    held_bytes: int


def outcome(driver: GroupingTestDriver) -> Outcome:
    journal = driver.journal
    reached = state.restored_state(journal)
    return Outcome(
        batches=[(b.batch_id, b.digest) for b in driver.batches],
        drops=driver.drops,
        dead_letters=driver.dead_letters,
        finished_groups=reached.finished_groups,
        finished={offset: fate for record in journal for fate, offset in finished(record)},
        state=replace(reached, sequence=0, finished_groups=()),
        next_deadline_ms=driver.fold.next_deadline_ms,
        held_bytes=driver.fold.held_bytes,
    )


def finished(record: JournalRecord) -> list[tuple[str, int]]:
    return [(f.fate, offset) for f in record.finished for offset in from_ranges(f.runs)]


@settings(max_examples=EXAMPLES // 2)
@given(log=logs)
def test_transactions_and_crashes_change_nothing_and_every_record_has_one_fate(log: Log) -> None:
    expected = outcome(uncut(log))
    reasons = {drop.reason for drop in expected.drops}
    for reason in reasons:
        event(reason)
    event("batches" if expected.batches else "no batches")
    target(float(len(reasons) + len(expected.batches)), label="drop reasons and batches")
    driver = fold(log)
    assert outcome(driver) == expected
    check_fates(driver)
    check_counts(driver)
    check_batches(driver)
    check_configurations(driver, log)


@settings(max_examples=EXAMPLES // 2)
@given(log=logs)
def test_the_prefix_of_a_registry_changes_nothing(log: Log) -> None:
    plain, mixed = (
        GroupingTestDriver(log.config, draw.PARTITION, draw.PARTITIONS, policy_version=log.policy_version)
        for _ in range(2)
    )
    random = Random(len(log.events))
    for record in log.records():
        plain.pipe(record)
        framed = record.value is not None and codec.is_frame(record.value) and random.random() < 0.5
        # The fold ignores the id: two registries may give the same schema different ids.
        value = codec.framed_for_registry(record.value or b"", random.randrange(2**32)) if framed else record.value
        mixed.pipe(record._replace(value=value))
    reached, expected = outcome(mixed), outcome(plain)
    letters = [(letter.record.offset, letter.error) for letter in reached.dead_letters]
    assert letters == [(letter.record.offset, letter.error) for letter in expected.dead_letters]
    assert replace(reached, dead_letters=()) == replace(expected, dead_letters=())


def test_logs_of_these_tables_meet_every_fate() -> None:
    random = Random(0)
    missing = {*DROP_REASONS, "batched", "dead_lettered", "control", "delivered in parts"}
    for _ in range(400):
        steps = random.choices(draw.step_table(tuple(MAKERS)), k=50)
        log = Log.of(random.choice(draw.config_table(tuple(MAKERS))), [(events, "") for events in steps])
        reached = outcome(uncut(log))
        missing -= {drop.reason for drop in reached.drops}
        missing -= set(reached.finished.values())
        missing -= {"delivered in parts"} if reached.state.delivered else set()
        if not missing:
            return
    pytest.fail(f"no log met {missing}")


def check_fates(driver: GroupingTestDriver) -> None:
    """Every offset read is in exactly one place after every transaction."""
    journal = driver.journal
    offsets = [record.offset for record in driver.log]
    fates: Counter[int] = Counter()
    unfinished: set[int] = set()
    read_before = 0
    for record in journal:
        assert record.begin == read_before
        read_before = record.position
        left = [offset for _fate, offset in finished(record)]
        fates.update(left)
        unfinished = (unfinished | set(from_ranges(record.admitted))) - set(left)
        read = {offset for offset in offsets if offset < record.position}
        assert set(fates) | unfinished == read
        assert set(fates).isdisjoint(unfinished)
        assert not fates or max(fates.values()) == 1
        assert record.watermark == min(unfinished, default=record.position)
        if record.snapshot:
            assert set(from_ranges(record.unfinished)) == unfinished


def check_counts(driver: GroupingTestDriver) -> None:
    """The counts of the journal add up to the records of the log."""
    by_offset = {record.offset: decoded(record.value) for record in driver.log}
    counts: Counter[tuple[str, str]] = Counter()
    dropped: dict[int, str] = {}
    for record in driver.journal:
        for drop in record.drops:
            assert drop.reason in DROP_REASONS
            assert drop.offset not in dropped
            dropped[drop.offset] = drop.reason
        for fate, offset in finished(record):
            counts[environment(by_offset[offset]), fate] += 1
        assert {o for f, o in finished(record) if f == "dropped"} == {d.offset for d in record.drops}
    last = state.restored_state(driver.journal)
    counted: Counter[tuple[str, str]] = Counter()
    for count in last.counts:
        counted[count.environment, count.fate.split(":")[0]] += count.rollouts
    assert counted == counts
    by_reason = Counter(
        count.fate.split(":")[1] for count in last.counts for _ in range(count.rollouts) if ":" in count.fate
    )
    assert by_reason == Counter(dropped.values())
    in_flight = Counter(
        environment(by_offset[offset])
        for offset in state.restored_state(driver.journal).unfinished
        if isinstance(by_offset[offset], Rollout)
    )
    produced = Counter({count.environment: count.rollouts for count in last.produced})
    left = Counter[str]()
    for (env, fate), n in counts.items():
        left[env] += n if fate != "control" else 0
    assert produced == left + in_flight


def decoded(value: bytes | None) -> Any:
    try:
        return codec.decode(value)
    except RecordError:
        return None


def environment(record: Any) -> str:
    return getattr(record, "environment", "")


def check_batches(driver: GroupingTestDriver) -> None:
    """Batches hold each rollout once, with its own tokens, within the sizes that are counted."""
    by_offset = {record.offset: decoded(record.value) for record in driver.log}
    seen: set[int] = set()
    for number, batch in enumerate(driver.batches):
        assert batch.number == number
        for row, offset in enumerate(batch.source_offsets.tolist()):
            rollout = by_offset[offset]
            group = batch.groups[batch.group_index[row]]
            span = slice(batch.splits[row], batch.splits[row + 1])
            assert offset not in seen
            seen.add(offset)
            assert batch.uids[row] == rollout.uid
            assert batch.rewards[row] == rollout.reward
            assert batch.tokens[span].tolist() == rollout.tokens.tolist()
            key = (rollout.environment, rollout.example_id, rollout.policy_version, rollout.group_id)
            assert key == (group.environment, group.example_id, group.policy_version, group.group_id)
        rows = zip(batch.uids, np.diff(batch.splits).tolist(), strict=True)
        most = sum(group_bytes(g.environment, g.example_id, g.group_id) for g in batch.groups)
        most += sum(row_bytes(tokens, uid, reference=False) for uid, tokens in rows)
        assert len(codec.encode(batch)) <= most + 512


def check_configurations(driver: GroupingTestDriver, log: Log) -> None:
    """A batch is cut by the configuration that the log put in force."""
    configurations = {log.config.generation: [log.config]}
    for step in log.events:
        if isinstance(step.what, Marked) and step.what.config is not None:
            configurations.setdefault(step.what.config.generation, []).append(step.what.config)
    generation = log.config.generation
    for batch in driver.batches:
        assert batch.generation >= generation
        generation = batch.generation
        makers = {(c.core_version, c.maker) for c in configurations[generation]}
        assert (batch.core_version, json.loads(batch.metadata)["maker"]) in makers


@settings(max_examples=EXAMPLES // 2)
@given(log=draw.logs(("fifo",)))
def test_the_default_maker_keeps_groups_whole_in_the_order_they_sealed(log: Log) -> None:
    sealed_ms = -1
    for batch in fold(log).batches:
        sizes = Counter(batch.group_index.tolist())
        assert [sizes[i] for i in range(len(batch.groups))] == [g.size for g in batch.groups]
        assert batch.group_index.tolist() == sorted(batch.group_index.tolist())
        assert sealed_ms <= batch.groups[0].sealed_ms or any(g.policy_version for g in batch.groups)
        sealed_ms = batch.groups[-1].sealed_ms
