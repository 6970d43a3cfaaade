"""The journal record of a move: moved records get their fate and are counted, and the others stay unfinished."""

from dataclasses import replace

from rollstream.consumers.grouping.config import GroupingConfig
from rollstream.consumers.grouping.core.task_state import initial_record, restored_state
from rollstream.consumers.grouping.process.moving import CommittedState, moved_records
from rollstream.topics.codec import encode
from rollstream.topics.commit_metadata import CommitMetadata
from rollstream.topics.kafka.records import KafkaRecord
from rollstream.topics.offset_ranges import from_ranges, to_ranges
from rollstream.topics.records import FateCount, GroupCancelled, JournalRecord
from tests.support.runs import rollout


def state_of(unfinished: list[int], position: int) -> CommittedState:
    first = initial_record(1, 4, "topic", GroupingConfig(), first_batch=9)
    later = replace(
        first, sequence=1, position=position, watermark=min(unfinished), unfinished=to_ranges(unfinished), begin=0
    )
    return CommittedState(restored_state([first, later]), CommitMetadata(1, 1, 0), 0)


def record(offset: int, value: object) -> KafkaRecord:
    return KafkaRecord("main.rollouts", 1, offset, 1, b"key", encode(value))


def finished(records: tuple[JournalRecord, ...]) -> dict[str, list[int]]:
    [only] = records
    return {fate.fate: list(from_ranges(fate.runs)) for fate in only.finished}


def test_what_moved_is_finished_and_counted_and_the_rest_stays_unfinished() -> None:
    task = state_of([3, 4, 7], 9)
    cancelled = GroupCancelled(uids=("a",), group_size=4, environment="env", example_id="x", policy_version=0)
    records = moved_records(task, [record(3, rollout("x", 0)), record(4, cancelled)])
    assert finished(records) == {"moved": [3, 4]}
    [only] = records
    assert (only.sequence, only.begin, only.position, only.batch_number) == (2, 9, 9, 9)
    assert only.counts == (
        FateCount(environment="env", fate="moved", rollouts=1, tokens=6),
        FateCount(environment="env", fate="moved:control", rollouts=1, tokens=0),
    )
    assert restored_state(records).unfinished == {7}


def test_after_the_last_move_nothing_is_unfinished_and_the_clocks_are_those_before() -> None:
    task = state_of([3], 9)
    records = moved_records(task, [record(3, rollout("x", 0))])
    after = restored_state(records)
    assert after.unfinished == set()
    assert (after.position, after.watermark, after.stream_time_ms) == (9, 3, task.state.stream_time_ms)
