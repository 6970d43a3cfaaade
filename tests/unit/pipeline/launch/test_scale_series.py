"""The journal says how it was read: offsets read once, twice or never, and partitions that changed hands."""

from hypothesis import given
from hypothesis import strategies as st

from rollstream.pipeline.launch.scale_series import Coverage, Reading, coverage, handovers

FIRST, SECOND = "r/grouper/0", "r/grouper/1"


@given(st.lists(st.integers(0, 50), max_size=20), st.integers(0, 3))
def test_transactions_that_follow_each_other_read_each_offset_once(sizes: list[int], partition: int) -> None:
    collected, at = [], 0
    for size in sizes:
        collected.append(Reading(partition, at, at + size, FIRST, 0))
        at += size
    assert coverage(reversed(collected)) == Coverage(at, 0, 0)


def test_offsets_read_again_and_passed_over_are_counted_by_partition() -> None:
    collected = [
        Reading(0, 0, 10, FIRST, 0),
        Reading(0, 7, 12, SECOND, 1),  # three again
        Reading(0, 15, 20, SECOND, 2),  # three passed over
        Reading(1, 0, 5, FIRST, 0),
        Reading(1, 0, 5, SECOND, 0),  # all of it again
    ]
    assert coverage(collected) == Coverage(22, 8, 3)


def test_a_handover_waits_since_the_last_transaction_or_since_there_was_something_to_read() -> None:
    collected = [
        Reading(0, 0, 0, "r/grouper/bootstrap", 0),
        Reading(0, 0, 10, FIRST, 1_000),
        Reading(0, 10, 10, FIRST, 2_000),  # its last transaction
        Reading(0, 10, 10, SECOND, 2_500),  # a snapshot, and nothing read
        Reading(0, 10, 20, SECOND, 3_500),
        Reading(1, 0, 5, SECOND, 1_000),
        Reading(1, 5, 9, FIRST, 9_000),
    ]
    appended = {(0, 10): 1_500, (1, 5): 8_800}
    changes = handovers(collected, appended)
    assert [(change.partition, change.giver, change.taker, change.seconds) for change in changes] == [
        (0, FIRST, SECOND, 1.5),
        (1, SECOND, FIRST, 0.2),
    ]
