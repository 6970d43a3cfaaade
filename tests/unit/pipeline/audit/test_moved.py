"""Books across a split: each moved place has one copy, and the runs of a chain add up."""

from collections import Counter

import pytest

from rollstream.pipeline.audit.ledger import moved
from rollstream.pipeline.audit.ledger.book import Ledger
from rollstream.pipeline.audit.ledger.moved import SplitRecords, differences
from rollstream.pipeline.tools.ledger import chain_row, chain_sum
from rollstream.topics.config import KafkaConfig
from rollstream.topics.kafka import topic_admin
from rollstream.topics.kafka.records import KafkaRecord
from rollstream.topics.records import RunSplit
from rollstream.topics.run_splits import MOVED_FROM, Splits

SPLIT = RunSplit(run="main", successor="next", partitions=7, phase="moved")


@pytest.mark.parametrize(
    ("copies", "whole", "expected"),
    [
        ({(0, 1): 1, (2, 5): 1}, True, []),
        ({(0, 1): 1}, True, ["rollouts[2] offset 5 of run main is moved but not copied to run next"]),
        ({(0, 1): 1}, False, []),
        ({(0, 1): 2, (2, 5): 1}, True, ["rollouts[0] offset 1 of run main is copied to run next more than once"]),
        (
            {(0, 1): 1, (2, 5): 1, (3, 0): 1},
            False,
            ["rollouts[3] offset 0 of run main is copied to run next but not moved"],
        ),
    ],
)
def test_each_moved_place_has_one_copy(copies: dict[tuple[int, int], int], whole: bool, expected: list[str]) -> None:
    assert differences(SPLIT, {(0, 1), (2, 5)}, Counter(copies), whole=whole) == expected


def test_differences_beyond_the_first_are_counted() -> None:
    places = {(0, offset) for offset in range(5)}
    named = differences(SPLIT, places, Counter(), whole=True)
    assert named[3] == "2 more offsets are moved but not copied to run next"


def test_two_runs_that_differ_are_compared_again_though_the_ledger_names_no_more_contradictions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    copy = KafkaRecord("next.rollouts", 0, 0, headers=((MOVED_FROM, b"main:0:1"),))
    monkeypatch.setattr(moved, "read_to_end", lambda _kafka, topic: [copy] if topic == copy.topic else [])
    monkeypatch.setattr(topic_admin, "bounds", lambda _kafka, _topic: {0: (0, 1)})
    monkeypatch.setattr(topic_admin, "topic_ids", lambda _kafka, topics: dict.fromkeys(topics, "id"))
    records, full = SplitRecords(KafkaConfig()), Ledger()
    for number in range(20):
        full.problem(f"contradiction {number}")
    for result in (full, Ledger()):
        records.check(Splits(successor=SPLIT), result)
    assert result.problems == ["rollouts[0] offset 1 of run main is copied to run next but not moved"]


def book(produced: int, batched: int, moved: int, in_flight: int = 0) -> dict[str, object]:
    nothing = {"dropped": {}, "dead_lettered": 0, "control": 0, "unread": 0}
    places = {"batched": batched, "moved": moved, "in_flight": in_flight}
    return {"balanced": True, "produced": produced, **nothing, **places}


def test_a_record_that_moved_twice_counts_once_in_the_sum_of_three_runs() -> None:
    rows = [chain_row("c", book(10, 8, 0, in_flight=2)), chain_row("b", book(7, 3, 4)), chain_row("a", book(9, 4, 5))]
    together = chain_sum(rows)
    assert together["balanced"]
    assert (together["produced"], together["batched"], together["in_flight"]) == (17, 15, 2)


def test_a_sum_that_lacks_a_record_does_not_balance() -> None:
    assert not chain_sum([chain_row("b", book(7, 7, 0)), chain_row("a", book(9, 4, 6))])["balanced"]
