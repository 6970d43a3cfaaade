"""The journal: sums keep their bits, counts and records stay small, and commits point to the records they need."""

import math
import threading
from dataclasses import replace
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollstream.consumers.grouping.config import GrouperConfig, GroupingConfig
from rollstream.consumers.grouping.core import offset_tracker, task_journal, task_state
from rollstream.consumers.grouping.core.task_journal import FateCounts, JournalPointers, split_record
from rollstream.consumers.grouping.process.grouping_process import run_grouping
from rollstream.consumers.grouping.selection_bias import selections
from rollstream.consumers.grouping.testing import GroupingTestDriver, example_rollout
from rollstream.pipeline.audit.partition_journal import PartitionJournal
from rollstream.pipeline.run.run_statistics import RunStatistics
from rollstream.producers.flow.flow_control import PartitionProgress
from rollstream.topics.config import KafkaConfig
from rollstream.topics.errors import ConfigurationError, StateRefused
from rollstream.topics.records import Drop, FateCount, FinishedGroup, FinishedOffsets, JournalRecord, same
from rollstream.topics.records.fates import OTHER_ENVIRONMENTS
from rollstream.topics.records.journal import JournalCounts, from_ranges, to_ranges
from rollstream.topics.wire.codec import encode
from rollstream.topics.wire.commit_metadata import CommitMetadata
from rollstream.topics.wire.rl_examples import batch_digest
from tests.support.pairs import driver, pair

# ---------------------------------------------------------------------- sums


def sums(d: GroupingTestDriver) -> dict[tuple[str, str], FateCount]:
    return {(count.environment, count.fate): count for count in task_state.restored_state(d.journal).counts}


def scored(d: GroupingTestDriver, example_id: str, *rewards: float) -> None:
    for member, reward in enumerate(rewards):
        d.pipe(example_rollout(f"{example_id}-{member}", reward, example_id=example_id))


def test_lengths_and_rewards_are_summed_by_environment_and_fate() -> None:
    d = driver()
    d.pipe(example_rollout("a", 0.25, tokens=np.arange(10, dtype="<i4"), loss_mask=np.arange(10) > 3))
    d.pipe(example_rollout("b", -1.5))
    d.pipe(example_rollout("a", 1.0))
    d.pipe(example_rollout("c", 4.0, example_id="1", environment="other"))
    d.pipe(example_rollout("d", 4.0, example_id="1", environment="other"))
    counts = sums(d)
    assert counts["env", "batched"] == FateCount(
        environment="env",
        fate="batched",
        rollouts=2,
        tokens=14,
        measured=2,
        sampled_tokens=8,
        sampled_tokens_squared=40.0,
        reward=-1.25,
        reward_squared=2.3125,
    )
    assert (counts["env", "dropped:late"].measured, counts["env", "dropped:late"].reward) == (1, 1.0)
    assert counts["other", "dropped:zero_variance"].reward_squared == 32.0


def test_a_record_that_is_no_valid_rollout_is_counted_and_not_measured() -> None:
    d = driver()
    d.pipe(b"poison")
    d.pipe(example_rollout("a", math.nan))
    d.pipe(example_rollout("b", math.inf))
    d.advance(1)
    counts = sums(d)
    assert counts["env", "dropped:invalid"].rollouts == 2
    assert all(count.measured == count.reward == count.sampled_tokens_squared == 0 for count in counts.values())
    assert all(count.measured == 0 for count in task_state.restored_state(d.journal).produced)


def test_sums_are_the_same_bits_however_often_the_task_is_restored() -> None:
    random = Random(5)

    def run(crashes: bool) -> tuple[FateCount, ...]:
        rewards = Random(7)
        d = driver()
        for example in range(60):
            scored(d, str(example), rewards.random() / 3, -rewards.random() * 1e9)
            if random.random() < 0.4:
                d.commit()
            if crashes and random.random() < 0.4:
                d.crash_and_restore()
        return task_state.restored_state(d.journal).counts

    first = run(crashes=False)
    assert first == run(crashes=True)
    assert first[0].measured == 120


def test_counts_of_more_environments_than_the_journal_holds_are_added_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(task_journal, "COUNTED_BYTES", 1_000)
    counts = FateCounts()
    for number in range(500):
        counts.add(f"environment {number}", "batched", 2)
        counts.add("é" * 400, f"dropped:reason {number}", 2)
    records = counts.records()
    assert sum(count.rollouts for count in records) == 1_000
    assert sum(count.tokens for count in records) == 2_000
    assert [(c.fate, c.rollouts) for c in records if c.environment == OTHER_ENVIRONMENTS] == [
        ("batched", 491),
        ("dropped:other", 500),
    ]
    assert FateCounts(records).records() == records
    bare = journal()
    assert len(encode(replace(bare, counts=records))) - len(encode(bare)) < 1_000 + 2 * 100


def test_counts_that_were_restored_go_on_like_those_that_were_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether a name has an entry of its own depends on the sizes of the others, and not on a crash."""
    monkeypatch.setattr(task_journal, "COUNTED_BYTES", 1_000)
    counts = FateCounts()
    while not any(count.environment == OTHER_ENVIRONMENTS for count in counts.records()):
        counts.add(f"environment {len(counts.records()):03d} of many", "batched", 2)
    restored = FateCounts(counts.records())
    for name in ("e", "f", "g", "h"):
        counts.add(name, "batched", 2)
        restored.add(name, "batched", 2)
    assert restored.records() == counts.records()


def of_many_names(names: int) -> GroupingTestDriver:
    """Return a driver with `names` environments, each with two rollouts in its own transaction, restored after a
    crash."""
    d = driver()
    for number in range(names):
        name = f"environment {number:04}"
        for uid, reward in (("a", 0.5), ("b", 1.0)):
            d.pipe(example_rollout(f"{number}{uid}", reward, environment=name))
        d.commit(snapshot=number == names // 2)
    d.crash_and_restore()
    return d


@pytest.mark.long
def test_a_transaction_writes_the_counts_that_it_changed_however_many_environments_there_are() -> None:
    sizes = {}
    for names in (3, 3_000):
        d = of_many_names(names)
        d.pipe(example_rollout("late", 2.0, environment="environment 0001", example_id="e"))
        sizes[names] = len(encode(d.commit()))
        state, first = (
            task_state.restored_state(d.journal),
            task_state.restored_state([*d.journal[-1:], d.commit(snapshot=True)]),
        )
        # The snapshot is written from the counts of the fold, and readers add up the same bits.
        assert (state.counts, state.produced) == (d.fold.counts, first.produced)
        assert (first.counts, sum(count.rollouts for count in state.produced)) == (state.counts, 2 * names + 1)
    assert sizes[3_000] < sizes[3] + 20


def test_a_reader_of_the_journal_from_a_snapshot_on_has_the_same_counts() -> None:
    d = of_many_names(60)
    d.pipe(b"poison")
    d.pipe(example_rollout("open", 2.0, environment="environment 0001", example_id="open"))
    d.commit()
    whole = next(i for i, record in enumerate(d.journal) if i and record.snapshot)
    for begin in (0, whole - 3, whole):
        records = d.journal[begin:]
        flow, ledger, worker = RunStatistics("exp"), PartitionJournal(0), JournalCounts()
        for record in records:
            flow.journal(record, 1_000)
            ledger.read(record)
            worker.add(record)
        ledger.check_counts(ledger.problem)
        assert ledger.problems == []
        assert selections(ledger.counts) == selections(flow.counts) == selections(d.fold.counts)
        assert flow.snapshot(1_000).batched == 120
        assert PartitionProgress.of(d.end, worker) == PartitionProgress(
            position=d.end, produced=122, finished_untrained=1, batched=120
        )


# ---------------------------------------------------------------------- parts


def journal(**fields: object) -> JournalRecord:
    return replace(task_state.initial_record(0, 1, "id", GroupingConfig()), **fields)


TEXT = st.text(max_size=30)
RUNS = st.sets(st.integers(0, 300), max_size=60).map(to_ranges)
FULL = st.builds(
    journal,
    sequence=st.integers(0, 10),
    begin=st.just(7),
    position=st.just(1_000),
    admitted=RUNS,
    unfinished=RUNS,
    delivered=RUNS,
    snapshot=st.booleans(),
    finished=st.dictionaries(st.sampled_from(["batched", "dropped", "control"]), RUNS.filter(len)).map(
        lambda runs: tuple(FinishedOffsets(fate=fate, runs=offsets) for fate, offsets in sorted(runs.items()))
    ),
    drops=st.lists(st.builds(Drop, offset=st.integers(0, 2**60), reason=TEXT, uid=TEXT, detail=TEXT)).map(tuple),
    finished_groups=st.lists(
        st.builds(
            FinishedGroup,
            environment=TEXT,
            example_id=TEXT,
            group_id=TEXT,
            policy_version=st.just(3),
            sealed_ms=st.just(4),
            finished_ms=st.just(5),
        )
    ).map(tuple),
    batch_ids=st.lists(TEXT).map(tuple),
)


@given(record=FULL, limit=st.integers(1, 2_000))
@pytest.mark.long
def test_the_parts_of_a_record_hold_its_lists_within_their_limit(record: JournalRecord, limit: int) -> None:
    parts = split_record(record, limit)
    assert [part.sequence for part in parts] == list(range(record.sequence, record.sequence + len(parts)))
    assert [part.begin for part in parts] == [record.begin, *[record.position] * (len(parts) - 1)]
    assert [(part.part, part.parts) for part in parts] == [(number, len(parts)) for number in range(len(parts))]
    for name in ("drops", "finished_groups", "batch_ids"):
        assert tuple(item for part in parts for item in getattr(part, name)) == getattr(record, name)
    for name in ("admitted", "unfinished", "delivered"):
        assert same(np.concatenate([getattr(part, name) for part in parts]), getattr(record, name))
    finished: dict[str, list[int]] = {}
    for part in parts:
        for entry in part.finished:
            finished.setdefault(entry.fate, []).extend(from_ranges(entry.runs))
    assert finished == {entry.fate: list(from_ranges(entry.runs)) for entry in record.finished}
    empty = len(encode(journal(sequence=10, begin=7, position=1_000, snapshot=True)))
    for part in parts:
        items = len(part.drops) + len(part.finished_groups) + len(part.batch_ids) + len(part.finished)
        alone = items + sum(len(getattr(part, name)) > 0 for name in ("admitted", "unfinished", "delivered")) == 1
        # The 30 bytes are for the counts of entries, which grow from one byte to three.
        assert alone or len(encode(part)) <= empty + limit + 30


def test_a_state_is_restored_from_the_parts_of_its_transactions(monkeypatch: pytest.MonkeyPatch) -> None:
    config = GroupingConfig(batch_rollouts=2, exclude_environments=("gone",), horizon_s=1_000.0)

    def run() -> GroupingTestDriver:
        d = GroupingTestDriver(config)
        for example in range(40):
            pair(d, f"e{example}", environment="gone" if example % 3 == 0 else "env")
            d.pipe(example_rollout("x", 1.0, example_id=f"open {example}"))
            d.pipe(example_rollout("late", 1.0, example_id=f"e{example}", environment="env"))
            if example % 10 == 9:
                d.commit(snapshot=example == 29)
                d.crash_and_restore()
        return d

    whole = run()
    monkeypatch.setattr(offset_tracker, "split_record", lambda record: split_record(record, 300))
    parted = run()
    assert max(record.parts for record in parted.journal) > 5
    assert any(record.snapshot and record.part for record in parted.journal)
    assert [record.sequence for record in parted.journal] == list(range(len(parted.journal)))
    assert parted.drops == whole.drops
    assert [batch_digest(batch) for batch in parted.batches] == [batch_digest(batch) for batch in whole.batches]
    assert replace(task_state.restored_state(parted.journal), sequence=0) == replace(
        task_state.restored_state(whole.journal), sequence=0
    )
    snapshot = max(n for n, record in enumerate(parted.journal) if record.snapshot and not record.part)
    since = task_state.restored_state(parted.journal[snapshot:])
    assert since.unfinished == task_state.restored_state(whole.journal).unfinished
    # The oldest record still needed may be a part of an older snapshot.
    assert task_state.restored_state(parted.journal[1:]).unfinished == since.unfinished
    with pytest.raises(StateRefused, match=r"part \d+ of \d+ of its transaction; the other parts were deleted"):
        task_state.restored_state(parted.journal[: snapshot + 1])


@pytest.mark.long
def test_a_hundred_thousand_drops_of_one_transaction_fit_the_smallest_topic() -> None:
    drops = tuple(
        Drop(
            offset=offset,
            reason="excluded",
            detail="environment env is excluded",
            uid=f"a rollout of some worker, of some length {offset}",
            environment="env",
            policy_version=3,
            lowest_version=3,
        )
        for offset in range(100_000)
    )
    record = journal(position=100_000, drops=drops)
    assert len(encode(record)) > 8 * 1024 * 1024
    sizes = [len(encode(part)) for part in split_record(record)]
    assert max(sizes) < 600 * 1024
    assert len(sizes) < 40


def test_a_snapshot_of_every_second_offset_is_written_in_parts() -> None:
    offsets = np.arange(0, 200_000, 2)
    record = journal(position=200_000, snapshot=True, unfinished=to_ranges(offsets), delivered=to_ranges(offsets[::2]))
    parts = split_record(record)
    assert max(len(encode(part)) for part in parts) < 600 * 1024
    assert task_state.restored_state(parts).unfinished == frozenset(offsets.tolist())
    assert task_state.restored_state(parts).delivered == frozenset(offsets[::2].tolist())


# ---------------------------------------------------------------------- commit metadata


def finished(sequence: int, *times_ms: int, since_ms: int = -1, **fields: object) -> JournalRecord:
    groups = tuple(
        FinishedGroup(environment="e", example_id="", policy_version=0, group_id="", sealed_ms=at, finished_ms=at)
        for at in times_ms
    )
    fields.setdefault("snapshot", False)
    return journal(sequence=sequence, finished_groups=groups, remembered_since_ms=since_ms, **fields)


def test_a_commit_points_at_the_oldest_record_of_a_group_still_remembered() -> None:
    pointers = JournalPointers(newest=0, snapshot=0)
    assert pointers.add_written(10, finished(1, 1_000, snapshot=True)) == CommitMetadata(10, 10, 10)
    assert pointers.add_written(11, finished(2, 2_500)) == CommitMetadata(11, 10, 10)
    # The time in the record counts, whatever the horizon is now.
    assert pointers.add_written(12, finished(3, since_ms=1_001, snapshot=True)) == CommitMetadata(12, 12, 11)
    assert pointers.add_written(13, finished(4, since_ms=2_501)) == CommitMetadata(13, 12, 12)


def test_a_snapshot_in_parts_is_pointed_at_where_it_begins() -> None:
    pointers = JournalPointers(newest=0, snapshot=0)
    pointers.add_written(20, finished(1, 5, snapshot=True, part=0, parts=2))
    assert pointers.add_written(21, finished(2, 5, snapshot=True, part=1, parts=2)) == CommitMetadata(21, 20, 20)


@given(spans=st.lists(st.tuples(st.integers(0, 1_500), st.integers(0, 3_000)), max_size=80), horizon=st.just(5_000))
def test_the_remembered_journal_offsets_are_few_and_never_too_new(spans: list[tuple[int, int]], horizon: int) -> None:
    pointers = JournalPointers(newest=0, snapshot=0)
    now, written = 0, []
    for offset, (wait, length) in enumerate(spans):
        first = now + wait
        now = first + length
        written.append((now, offset))
        metadata = pointers.add_written(offset, finished(offset, first, now, since_ms=now - horizon, snapshot=True))
        remembered = [at for last, at in written if last >= now - horizon]
        assert metadata.oldest <= remembered[0]
        # At most one second more than necessary is read again.
        assert all(last >= now - horizon - 1_000 for last, at in written if at >= metadata.oldest)
        assert len(pointers.horizon) <= horizon // 1_000 + 2


def test_a_record_limit_below_the_needs_of_the_journal_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="max_record_bytes 1000000 leaves no room for the journal"):
        run_grouping(
            KafkaConfig(max_record_bytes=1_000_000),
            "run",
            GroupingConfig(batch_bytes=1_000),
            GrouperConfig(),
            ordinal=0,
            stop=threading.Event(),
        )
