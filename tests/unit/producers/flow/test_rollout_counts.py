"""A learner's consumption counts by index position, so workers continue with any learner, wherever it began."""

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollstream.producers.flow.rollout_counts import EnvironmentCounts, LearnerConsumption
from rollstream.topics.errors import RecordError
from rollstream.topics.records import BatchIndexEntry, BatchUse, FateCount, LearnerStep
from rollstream.topics.records.journal import JournalCounts

ROWS = 8


def entry(number: int, partition: int = 0) -> BatchIndexEntry:
    return BatchIndexEntry(
        batch_id=f"{partition}-{number}",
        partition=partition,
        offset=number,
        rollouts=ROWS,
        tokens=0,
        trained_tokens=0,
        lowest_version=0,
        highest_version=0,
        size_bytes=0,
        digest="",
    )


def step(
    learner: str, number: int, position: int, total: int, *uses: BatchUse, oldest: int = -1, run: str = "main"
) -> LearnerStep:
    return LearnerStep(
        learner=learner,
        step=number,
        input_run=run,
        uses=uses,
        position=position,
        policy_version=number,
        params_digest="ab",
        trained_total=total,
        skipped_total=0,
        oldest=oldest,
    )


def use(offset: int, rows: int = ROWS, *, again: bool = False) -> BatchUse:
    return BatchUse(batch_id=f"0-{offset}", index_offset=offset, rows=rows, use="trained", again=again)


def index(first: int, end: int, *, pruned: bool) -> LearnerConsumption:
    """An index that holds the entries `first` to `end` - 1, one batch at each offset."""
    consumption = LearnerConsumption("main", pruned=pruned)
    for number in range(first, end):
        consumption.add_entry(number, entry(number))
    return consumption


def test_after_a_prune_a_learner_of_a_new_name_consumes_what_it_reads() -> None:
    """The earlier learner had trained on 80 rollouts, 48 of which the index no longer holds."""
    run = index(6, 12, pruned=True)
    run.add_step(step("old", 5, position=10, total=80))
    assert run.consumed == 80
    run.add_step(step("new", 0, position=0, total=0))
    assert run.consumed == 48
    run.add_step(step("new", 1, 8, 16, use(6), use(7)))
    assert run.consumed == 64
    run.add_step(step("new", 3, 12, 48, use(10), use(11)))
    assert run.consumed == 96, "all that was batched"


def test_the_journal_tells_what_was_deleted_if_no_learner_does() -> None:
    run = LearnerConsumption("main", pruned=True)
    run.add_journal(0, batches=12, rollouts=96)
    run.add_journal(1, batches=3, rollouts=24)
    for number in range(6, 11):
        run.add_entry(number, entry(number))
    run.end_index()
    assert run.consumed == 24, "the journal is ahead of the index on partition 0; on 1 nothing is left"
    run.add_entry(11, entry(11))
    run.add_step(step("new", 0, position=0, total=0))
    assert run.consumed == 24 + 48
    run.add_step(step("new", 1, 12, 48))
    assert run.consumed == 24 + 96


def test_a_learner_that_begins_anew_is_waited_for_where_nothing_was_deleted() -> None:
    run = index(0, 12, pruned=False)
    run.add_step(step("old", 5, position=10, total=80))
    run.add_step(step("new", 1, position=2, total=16))
    assert run.consumed == 16


def test_a_position_ahead_of_what_was_read_of_the_index_counts_what_was_read() -> None:
    run = index(0, 4, pruned=False)
    run.add_step(step("main", 1, position=6, total=48))
    assert run.consumed == 32
    run.add_entry(4, entry(4))
    run.add_entry(4, entry(4))
    assert run.consumed == 40


def test_rollouts_that_a_buffer_drew_or_lost_are_consumed() -> None:
    run = index(0, 6, pruned=False)
    run.add_step(step("main", 1, 4, 12, use(0, 8), use(2, 4), oldest=1))
    assert run.consumed == 8 + 4
    run.add_step(step("main", 2, 6, 20, use(2, 4), use(2, 4, again=True), use(5, 4), oldest=1))
    assert run.consumed == 8 + 4 + 8
    run.add_step(step("main", 2, 6, 20, use(2, 4), use(2, 4, again=True), use(5, 4), oldest=1))
    assert run.consumed == 20, "a step made again counts once"
    run.add_step(step("main", 3, 6, 48, oldest=-1))
    assert run.consumed == 48, "nothing is held any more"


def test_batches_skipped_ahead_of_their_step_count_at_once_and_once() -> None:
    run = index(0, 6, pruned=False)
    run.add_step(step("main", 1, 2, 16, use(0), use(1)))
    run.add_step(step("main", 2, 2, 40, use(2), use(3), use(4)))
    assert run.consumed == 40
    run.add_step(step("main", 2, 6, 48, use(2), use(3), use(4), use(5)))
    assert run.consumed == 48


def test_steps_made_of_another_runs_batches_consume_nothing() -> None:
    run = index(0, 4, pruned=False)
    run.add_step(step("main", 1, 2, 16))
    run.add_step(step("elsewhere", 9, 4, 90, run="other"))
    assert run.consumed == 16


@given(
    st.lists(st.tuples(st.sampled_from(["a", "b", "c"]), st.integers(1, 4)), min_size=1, max_size=20),
    st.integers(0, 20),
)
def test_everything_before_the_position_is_consumed_for_any_learner_and_any_deletion(
    script: list[tuple[str, int]], deleted: int
) -> None:
    """Learners take turns on whole batches; entries that all of them have passed are deleted."""
    entries = 100
    steps: list[LearnerStep] = []
    position: dict[str, int] = {}
    total: dict[str, int] = {}
    for number, (learner, batches) in enumerate(script):
        at = position.get(learner, 0)
        position[learner], total[learner] = at + batches, total.get(learner, 0) + batches * ROWS
        steps.append(step(learner, number, position[learner], total[learner]))
    low = min(deleted, *position.values())
    run = index(low, entries, pruned=low > 0)
    for record in steps:
        run.add_step(record)
    assert run.consumed == position[script[-1][0]] * ROWS


@pytest.mark.parametrize("rollouts", [-1, 2**31, 2**62])
def test_an_entry_whose_rollouts_no_sum_can_hold_is_refused_and_changes_nothing(rollouts: int) -> None:
    consumption = LearnerConsumption("main", pruned=False)
    consumption.add_entry(0, entry(0))
    for offset in (1, 2, 3):
        with pytest.raises(RecordError, match="rollouts, which is impossible"):
            consumption.add_entry(offset, replace(entry(offset), rollouts=rollouts))
    consumption.add_step(step("main", 1, 4, ROWS))
    assert consumption.consumed == ROWS


class Journal(JournalCounts):
    """Counts of one partition, set directly."""

    def __init__(self, produced: dict[str, int], fates: dict[tuple[str, str], int]) -> None:
        super().__init__()
        self._entries = produced, fates

    @property
    def counts(self) -> tuple[FateCount, ...]:
        return tuple(
            FateCount(environment=environment, fate=fate, rollouts=n, tokens=0)
            for (environment, fate), n in self._entries[1].items()
        )

    @property
    def produced(self) -> tuple[FateCount, ...]:
        return tuple(
            FateCount(environment=environment, fate="read", rollouts=n, tokens=0)
            for environment, n in self._entries[0].items()
        )


def test_what_is_held_and_what_waits_counts_and_what_is_dropped_or_consumed_does_not() -> None:
    counts = EnvironmentCounts()
    counts.add(0, Journal({}, {}))
    counts.add(0, Journal({"a": 20, "b": 10}, {("a", "batched"): 8, ("a", "dropped:stale_version"): 4}))
    counts.add(0, Journal({"a": 20, "b": 10, "": 2}, {("a", "batched"): 8, ("b", "batched"): 8, ("", "control"): 1}))
    assert counts.outstanding(0) == {"": 2, "a": 20, "b": 10}
    assert counts.outstanding(8) == {"": 2, "a": 12, "b": 10}
    assert counts.outstanding(12) == {"": 2, "a": 12, "b": 6}
    assert counts.outstanding(99) == {"": 2, "a": 12, "b": 2}


def test_what_waited_before_the_first_look_is_split_like_all_that_was_batched() -> None:
    counts = EnvironmentCounts()
    counts.add(0, Journal({"a": 300, "b": 100}, {("a", "batched"): 300, ("b", "batched"): 100}))
    assert counts.outstanding(360) == {"a": 30, "b": 10}
    counts.add(0, Journal({"a": 300, "b": 120}, {("a", "batched"): 300, ("b", "batched"): 120}))
    assert counts.outstanding(400) == {"a": 0, "b": 20}, "the newest wait"


batches = st.lists(st.tuples(st.integers(0, 2), st.dictionaries(st.sampled_from("ab"), st.integers(1, 9))), max_size=30)


@given(batches, st.data())
def test_batches_taken_in_order_leave_what_was_batched_last(
    cut: list[tuple[int, dict[str, int]]], data: st.DataObject
) -> None:
    """The counts are exact where a record of the journal cuts one batch of one environment."""
    counts, totals = EnvironmentCounts(), [Counter[str]() for _ in range(3)]
    for partition in range(3):
        counts.add(partition, Journal({}, {}))
    order: list[tuple[str, int]] = []
    for partition, batch in cut:
        for environment, rollouts in batch.items():
            order.append((environment, rollouts))
            totals[partition][environment] += rollouts
            batched = {(name, "batched"): n for name, n in totals[partition].items()}
            counts.add(partition, Journal(dict(totals[partition]), batched))
    taken = data.draw(st.integers(0, len(order)))
    left = Counter[str]()
    for environment, rollouts in order[taken:]:
        left[environment] += rollouts
    seen = counts.outstanding(sum(rollouts for _environment, rollouts in order[:taken]))
    assert +Counter(seen) == left
