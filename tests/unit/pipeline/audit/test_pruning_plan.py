"""The plan of a prune: it removes nothing that anybody needs, and is consistent whatever the positions are."""

import sys
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollstream.consumers.grouping.config import GroupingConfig
from rollstream.consumers.grouping.core import task_state
from rollstream.pipeline.audit.partition_journal import PartitionJournal
from rollstream.pipeline.audit.pruning_plan import (
    ACCOUNT,
    CALLS,
    CONTROL_TOPICS,
    GIVEN_UP_MS,
    NO_FILLER,
    NO_LABELER,
    NO_QUEUE,
    QUEUE,
    RECOVERY,
    SAMPLES,
    SESSIONS,
    WINDOW,
    CommittedTask,
    Deletion,
    JournalSnapshot,
    Positions,
    PrunableBatch,
    PrunableSessions,
    SessionGroups,
    plan,
)
from rollstream.pipeline.audit.refold import beginnings
from rollstream.pipeline.command_line.cli import main
from rollstream.pipeline.command_line.text_tables import printable
from rollstream.pipeline.tools.prune import plan_text, rows_of
from rollstream.topics.records import JournalRecord, SessionEvent
from rollstream.topics.wire.catalogue import PRUNED

Plan = dict[tuple[str, int], Deletion]


def snapshots(*numbers: int, journal_from: int | None = -1) -> tuple[JournalSnapshot, ...]:
    """Snapshots at journal offsets 10 n, each before batch n, which is made of ten offsets of rollouts from 10 n on."""
    return tuple(
        JournalSnapshot(
            offset=10 * n,
            watermark=10 * n,
            batch_number=n,
            journal_from=max(0, 10 * n - 5) if journal_from == -1 else journal_from,
        )
        for n in numbers
    )


def one_partition(batches: int = 10, **changes: object) -> Positions:
    """One partition; each batch is two offsets after the last, in its topic and the index, as transactions leave it."""
    positions = Positions(
        tasks={0: CommittedTask(watermark=95, journal_from=85, snapshots=snapshots(*range(0, 10, 2)))},
        batches=tuple(
            PrunableBatch(partition=0, number=n, offset=2 * n, index_offset=2 * n, time_ms=1000 * n)
            for n in range(batches)
        ),
        learners={"learner main": 100},
        begins={(topic, 0): 0 for topic in PRUNED[:4]},
    )
    return replace(positions, **changes)  # type: ignore[arg-type]


def planned(positions: Positions, keep_batches: int = 3, keep_from_ms: int | None = None) -> Plan:
    return {(d.topic, d.partition): d for d in plan(positions, keep_batches=keep_batches, keep_from_ms=keep_from_ms)}


def stops(plan: Plan) -> dict[str, tuple[int, str]]:
    return {topic: (d.to, d.why) for (topic, _partition), d in plan.items()}


def test_the_window_and_the_snapshot_before_it_are_kept() -> None:
    # Batches 7, 8 and 9 stay verifiable: from snapshot 6, which needs the journal from 55 on.
    assert stops(planned(one_partition())) == {
        "rollouts": (60, WINDOW),
        "journal": (55, WINDOW),
        "batch-index": (12, ACCOUNT),
        "batches": (12, ACCOUNT),
    }


def test_hours_keep_what_batches_would_not() -> None:
    assert stops(planned(one_partition(), 1, 5000))["rollouts"] == (40, WINDOW)
    assert stops(planned(one_partition(), 9, 5000))["rollouts"] == (0, WINDOW)
    assert stops(planned(one_partition(), 0, 99_000))["rollouts"] == (80, WINDOW)


def test_recovery_keeps_what_a_restore_reads() -> None:
    late = CommittedTask(watermark=13, journal_from=17, snapshots=snapshots(0, 2, 4, 6))
    stopped = stops(planned(one_partition(tasks={0: late}), 0))
    assert (stopped["rollouts"], stopped["journal"]) == ((13, RECOVERY), (17, RECOVERY))
    # The journal that is kept begins before snapshot 2, so it covers every batch from there on.
    assert stopped["batches"] == (4, ACCOUNT)


@pytest.mark.parametrize("position", [0, 5, 7, 8])
def test_a_learner_keeps_every_offset_it_may_read_again(position: int) -> None:
    stopped = stops(planned(one_partition(learners={"ahead": 100, "behind": position})))
    assert stopped["batch-index"] == (position, "behind")
    assert stopped["batches"] == (position + position % 2, "behind")
    assert stopped["rollouts"] == (60, WINDOW)


def test_another_group_keeps_what_it_has_yet_to_read() -> None:
    groups = {"theirs": {("rollouts", 0): 7, ("batches", 0): 3}}
    stopped = stops(planned(one_partition(groups=groups)))
    assert stopped["rollouts"] == (7, "group theirs")
    assert stopped["batches"] == (3, "group theirs")
    assert stopped["batch-index"][0] <= 4


def test_a_partition_without_a_snapshot_to_fold_from_keeps_everything() -> None:
    lost = CommittedTask(watermark=95, journal_from=85, snapshots=snapshots(0, 2, 4, journal_from=None))
    plans = planned(one_partition(tasks={0: lost}))
    assert [d.offsets for d in plans.values()] == [0, 0, 0, 0]


def test_deleted_offsets_are_not_planned_again() -> None:
    begins = {("rollouts", 0): 70, ("journal", 0): 55, ("batch-index", 0): 12, ("batches", 0): 12}
    plans = planned(one_partition(begins=begins))
    assert {topic: (d.begin, d.to) for (topic, _p), d in plans.items()} == {
        "rollouts": (70, 70),
        "journal": (55, 55),
        "batch-index": (12, 12),
        "batches": (12, 12),
    }


@st.composite
def all_positions(draw: st.DrawFn) -> Positions:
    """Positions of up to three partitions as a run could leave them, their batches interleaved."""
    partitions = draw(st.integers(1, 3))
    order = draw(st.lists(st.integers(0, partitions - 1), max_size=25))
    batches: list[PrunableBatch] = []
    offsets, index, time_ms = [0] * partitions, 0, 0
    for partition in order:
        number = sum(b.partition == partition for b in batches)
        batches.append(
            PrunableBatch(
                partition=partition, number=number, offset=offsets[partition], index_offset=index, time_ms=time_ms
            )
        )
        offsets[partition] += draw(st.integers(1, 3))
        index += draw(st.integers(1, 3))
        time_ms += draw(st.integers(0, 1000))
    tasks = {}
    for partition in range(partitions):
        known = sum(b.partition == partition for b in batches)
        numbers = sorted({0, *draw(st.lists(st.integers(0, known), max_size=5))})
        lag = draw(st.integers(0, 30))
        kept = tuple(replace(s, journal_from=max(0, s.offset - lag)) for s in snapshots(*numbers))
        newest = kept[-1]
        watermark = newest.watermark + draw(st.integers(0, 9))
        tasks[partition] = CommittedTask(
            watermark=watermark, journal_from=draw(st.integers(0, newest.offset)), snapshots=kept
        )
    places = [("batch-index", 0), *((t, p) for t in PRUNED if t != "batch-index" for p in range(partitions))]
    at = st.integers(0, 60)
    return Positions(
        tasks=tasks,
        batches=tuple(batches),
        learners=draw(st.dictionaries(st.sampled_from(["a", "b"]), at, min_size=1)),
        begins=dict.fromkeys(places, 0),
        groups=draw(st.dictionaries(st.just("g"), st.dictionaries(st.sampled_from(places), at))),
    )


@given(all_positions(), st.integers(0, 30), st.none() | st.integers(0, 20_000))
def test_every_reader_keeps_the_records_it_needs(
    positions: Positions, keep_batches: int, keep_from_ms: int | None
) -> None:
    plans = planned(positions, keep_batches, keep_from_ms)
    index = plans["batch-index", 0].to
    newest = positions.batches[len(positions.batches) - min(keep_batches, len(positions.batches)) :]
    window = set(newest) | {b for b in positions.batches if keep_from_ms is not None and b.time_ms >= keep_from_ms}
    assert index <= min(positions.learners.values())
    for at in positions.groups.values():
        for place, offset in at.items():
            assert plans[place].to <= offset
    for batch in positions.batches:
        if batch.index_offset >= index or batch in window:
            assert batch.offset >= plans["batches", batch.partition].to
        if batch in window:
            assert batch.index_offset >= index
    for partition, task in positions.tasks.items():
        rollouts, journal = plans["rollouts", partition].to, plans["journal", partition].to
        assert rollouts <= task.watermark
        assert journal <= task.journal_from
        # Each batch of the window can be folded again from a snapshot that is kept with everything it needs.
        foldable = [s for s in task.snapshots if (s.journal_from or 0) >= journal and s.watermark >= rollouts]
        assert all(
            any(s.batch_number <= batch.number for s in foldable) for batch in window if batch.partition == partition
        )
        # The ledger's account begins at the first whole snapshot kept: every batch since then is kept.
        account = next(s for s in task.snapshots if s.offset >= journal)
        counted = [b for b in positions.batches if b.partition == partition and b.number >= account.batch_number]
        assert all(b.offset >= plans["batches", partition].to and b.index_offset >= index for b in counted)


@given(all_positions(), st.integers(0, 30))
def test_pruning_again_deletes_nothing_more(positions: Positions, keep_batches: int) -> None:
    plans = planned(positions, keep_batches)
    tasks = {
        p: replace(
            task,
            snapshots=tuple(
                replace(
                    s,
                    journal_from=s.journal_from
                    if (s.journal_from or 0) >= plans["journal", p].to and s.watermark >= plans["rollouts", p].to
                    else None,
                )
                for s in task.snapshots
                if s.offset >= plans["journal", p].to
            ),
        )
        for p, task in positions.tasks.items()
    }
    after = replace(
        positions,
        tasks=tasks,
        batches=tuple(b for b in positions.batches if b.index_offset >= plans["batch-index", 0].to),
        begins={place: d.to for place, d in plans.items()},
    )
    again = planned(after, keep_batches)
    assert {place: d.offsets for place, d in again.items()} == dict.fromkeys(again, 0)


def test_the_plan_fits_80_columns_and_says_what_it_stops_at(monkeypatch: pytest.MonkeyPatch) -> None:
    positions = one_partition(learners={"learner of-a-run-with-a-long-name/and-a-long-name-itself": 5})
    rows = rows_of(plan(positions, keep_batches=3))
    assert "…" not in plan_text(rows, dry_run=True), "nothing is cut where no terminal is"
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    text = plan_text(rows, dry_run=True).splitlines()
    assert text[1] == "rollouts             0     0  60       60  verification window"
    assert max(map(len, text[: 1 + len(rows)])) <= 80
    assert "learner of-a-run-with-a-long-name/and-a-long-name-itself: may still have to read these records" in text
    assert text[-1] == f"{60 + 55 + 5 + 6} offsets would be deleted"


def test_no_name_in_the_plan_is_obeyed_by_a_terminal() -> None:
    rows = rows_of(plan(one_partition(learners={"learner a\x1b[2J": 5}), keep_batches=3))
    text = plan_text(rows, dry_run=True, skipped=("a record of b\u202e",))
    assert r"learner a\u001b[2J: may still have to read these records" in text
    assert r"the first: a record of b\u202e" in text
    assert text == printable(text)


@pytest.mark.parametrize("words", [["prune"], ["prune", "--keep-batches", "-1", "--yes"]])
def test_nothing_is_deleted_without_yes(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*words, "-b", "127.0.0.1:1"]) == 2
    assert "no Kafka broker" not in capsys.readouterr().err


# ---------------------------------------------------------------------- a journal whose beginning was deleted


def journal() -> list[JournalRecord]:
    first = task_state.initial_record(0, 1, "topic", GroupingConfig())
    return [
        replace(
            first,
            sequence=n,
            begin=n,
            position=n + 1,
            watermark=n,
            stream_time_ms=100 * n,
            remembered_since_ms=100 * n - 250,
            snapshot=n % 3 == 0,
            batch_number=n,
        )
        for n in range(10)
    ]


def test_folding_begins_at_any_snapshot_of_a_whole_journal_and_log() -> None:
    assert beginnings(journal(), 0) == [0, 3, 6, 9]
    assert beginnings(journal(), 4) == [6, 9]
    assert beginnings([], 0) == []


def test_folding_begins_where_every_group_remembered_is_in_the_journal() -> None:
    # The journal from sequence 2 on, at 200 ms: snapshot 3 remembers groups since 50 ms, 6 those since 350 ms.
    assert beginnings(journal()[2:], 0) == [4, 7]
    assert beginnings(journal()[9:], 0) == []


def test_a_snapshot_without_its_first_part_is_not_used() -> None:
    records = journal()
    records[5] = replace(records[5], snapshot=True, part=0, parts=2)
    records[6] = replace(records[6], part=1, parts=2)
    assert beginnings(records[2:], 0) == [4, 7]
    assert beginnings(records[6:], 0) == [3]


def test_the_account_of_a_pruned_journal_begins_at_its_first_snapshot() -> None:
    read = PartitionJournal(0)
    for record in journal()[4:]:
        read.read(record)
    assert (read.base, read.base_batches, read.position, read.batches) == (7, 6, 10, 9)
    assert read.problems == []
    read.read(replace(journal()[9], sequence=12))
    assert len(read.problems) == 1


def of_control_tasks(**groups: dict[str, int]) -> Positions:
    return Positions(
        tasks={},
        batches=(),
        learners={},
        begins={(topic, 0): 2 for topic in CONTROL_TOPICS},
        groups={name: {(topic, 0): offset for topic, offset in at.items()} for name, at in groups.items()},
        labeling_group="labeller",
        fillers=frozenset(name for name in groups if name.startswith("filler")),
    )


def test_only_trajectories_that_every_reader_has_read_are_deleted() -> None:
    held = {"unlabelled": (2, NO_LABELER), "trajectories": (2, NO_LABELER)}
    assert stops(planned(of_control_tasks())) == held
    readers = {
        "filler_a": {"trajectories": 30},
        "filler_b": {"trajectories": 20},
        "labeller": {"unlabelled": 40},
    }
    assert stops(planned(of_control_tasks(**readers))) == {
        "unlabelled": (40, "group labeller"),
        "trajectories": (20, "group filler_b"),
    }
    stranger = of_control_tasks(**readers, stranger={"trajectories": 5, "unlabelled": 40})
    assert stops(planned(stranger))["trajectories"] == (5, "group stranger")
    only_a_stranger = of_control_tasks(stranger={"trajectories": 5, "unlabelled": 40})
    assert stops(planned(only_a_stranger)) == held
    unlabelled_alone = of_control_tasks(labeller={"unlabelled": 40})
    assert stops(planned(unlabelled_alone))["trajectories"] == (2, NO_FILLER)
    nothing_to_label = of_control_tasks(filler={"trajectories": 30}, labeller={"unlabelled": 0})
    never_labeled = replace(nothing_to_label, begins={("trajectories", 0): 2})
    assert stops(planned(never_labeled)) == {"trajectories": (30, "group filler")}


def test_trajectories_stay_while_another_reader_keeps_their_sources() -> None:
    readers = {"filler": {"trajectories": 30}, "labeller": {"unlabelled": 40}, "other": {"unlabelled": 39}}
    assert stops(planned(of_control_tasks(**readers))) == {
        "unlabelled": (39, "group other"),
        "trajectories": (2, "group other"),
    }


def labeled_rollouts(**unlabelled: int) -> Positions:
    """One partition whose rollouts were labeled, and the position of each group in `unlabelled`."""
    groups = {name: {("unlabelled", 0): offset} for name, offset in unlabelled.items()}
    positions = one_partition(groups=groups, labeling_group="labeller")
    return replace(positions, begins={**positions.begins, ("rollouts", 0): 2, ("unlabelled", 0): 0})


def test_labeled_rollouts_stay_while_the_positions_of_labeling_are_lost() -> None:
    assert stops(planned(labeled_rollouts(labeller=40)))["rollouts"] == (60, WINDOW)
    assert stops(planned(labeled_rollouts(labeller=40, other=40)))["rollouts"] == (60, WINDOW)
    # An archiver is always somewhat behind; the labels of what it has yet to read are newer than the window.
    assert stops(planned(labeled_rollouts(labeller=40, other=39)))["rollouts"] == (60, WINDOW)
    lost = stops(planned(labeled_rollouts(other=40)))
    assert (lost["rollouts"], lost["unlabelled"]) == ((2, NO_LABELER), (0, NO_LABELER))
    assert lost["journal"] == (55, WINDOW)
    # A run without labeling has no records in `unlabelled`, and the plan does not name the topic.
    assert stops(planned(one_partition(labeling_group="labeller")))["rollouts"] == (60, WINDOW)


def with_calls(*groups: tuple[int, int, bool], **changes: object) -> Positions:
    """Batches cut every second, and groups of sessions: offset, time of the last record, and whether it has ended."""
    positions = one_partition(**changes)
    sessions = tuple(PrunableSessions(partition=0, offset=o, last_ms=ms, finished=over) for o, ms, over in groups)
    return replace(positions, begins={**positions.begins, (CALLS, 0): 0}, sessions=sessions, calls_read={0: 90})


def test_calls_are_kept_from_the_first_group_that_is_not_over_or_as_new_as_the_window() -> None:
    # The window of three batches begins at 7,000 ms.
    over = [(0, 1000, True), (20, 3000, True)]
    assert stops(planned(with_calls(*over)))[CALLS] == (90, SESSIONS)
    assert stops(planned(with_calls(*over, (40, 2000, False), (60, 2500, True))))[CALLS] == (40, SESSIONS)
    assert stops(planned(with_calls(*over, (40, 6999, True), (60, 7000, True))))[CALLS] == (60, WINDOW)
    assert stops(planned(with_calls(*over, (40, 9999, True)), 0))[CALLS] == (90, SESSIONS)
    assert stops(planned(with_calls(*over), 0, 2500))[CALLS] == (20, WINDOW)
    assert stops(planned(with_calls(*over, batches=0)))[CALLS] == (0, WINDOW)
    archived = {"archive": {(CALLS, 0): 10}}
    assert stops(planned(with_calls(*over, groups=archived)))[CALLS] == (10, "group archive")


def test_samples_are_kept_from_what_the_named_checkpoint_of_the_queue_needs() -> None:
    there = one_partition()
    positions = replace(there, begins={**there.begins, (SAMPLES, 0): 3})
    assert stops(planned(positions))[SAMPLES] == (3, NO_QUEUE)
    named = replace(positions, samples_needed={0: 40})
    assert stops(planned(named))[SAMPLES] == (40, QUEUE)
    archived = replace(named, groups={"archive": {(SAMPLES, 0): 10}})
    assert stops(planned(archived))[SAMPLES] == (10, "group archive")


def session_event(kind: str, member: int, group: str = "g") -> SessionEvent:
    return SessionEvent(session=f"{group}.{member}", kind=kind, group_id=group, group_size=2, member=member)  # type: ignore[arg-type]


def test_a_group_of_sessions_is_over_once_every_member_is_finished_or_was_never_started() -> None:
    groups = SessionGroups()
    groups.add(1, 4, 50, session_event("end", 7, "pruned"))
    for offset, (kind, member) in enumerate([("start", 0), ("start", 1), ("finished", 0), ("reward", 1)], 5):
        groups.add(1, offset, 100 + offset, session_event(kind, member))
    assert groups.prunable(10**12) == (PrunableSessions(partition=1, offset=5, last_ms=108, finished=False),)
    groups.add(1, 9, 200, session_event("finished", 1))
    groups.add(1, 10, 300, session_event("mark", 1))
    assert groups.prunable(0) == (PrunableSessions(partition=1, offset=5, last_ms=300, finished=True),)
    groups = SessionGroups()
    groups.add(0, 0, 100, session_event("start", 0))
    groups.add(0, 1, 100, session_event("finished", 0))
    assert [group.finished for group in groups.prunable(100 + GIVEN_UP_MS)] == [False]
    assert [group.finished for group in groups.prunable(101 + GIVEN_UP_MS)] == [True]
