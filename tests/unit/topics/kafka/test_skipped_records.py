"""Records that a reader passes over are counted and named, and never end it."""

import logging

import pytest

from rollstream.topics.errors import RecordError
from rollstream.topics.kafka.records import KafkaRecord
from rollstream.topics.kafka.skipped_records import Skipped, SkippedRecords
from rollstream.topics.records import ExcludedBatch, LearnerStep, Mark
from rollstream.topics.wire.codec import encode

MARK = Mark(kind="drain", wall_time=1.5, author="drain")


def message(value: bytes | None, offset: int = 7, *, readable: bool = True) -> KafkaRecord:
    return KafkaRecord("exp.steps", 2, offset, value=value, readable=readable)


def test_a_sound_record_is_decoded_and_nothing_is_said(caplog: pytest.LogCaptureFixture) -> None:
    skipped = SkippedRecords("top")
    assert skipped.decode(Mark, message(encode(MARK))) == MARK
    assert (skipped.total, skipped.first, caplog.records) == (0, [], [])


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        (message(None), "a tombstone instead of a record"),
        (message(None, readable=False), "cannot be decompressed"),
        (message(b"junk"), "not an Avro single-object frame"),
        (message(encode(MARK)[:-1]), "bytes do not parse as Mark"),
        (
            message(encode(ExcludedBatch(batch_id="1-1", reason="odd", generation=0))),
            "the record is of type ExcludedBatch instead of Mark",
        ),
    ],
)
def test_a_bad_record_is_passed_over_counted_and_named(
    bad: KafkaRecord, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    skipped = SkippedRecords("top")
    with caplog.at_level(logging.WARNING):
        assert skipped.decode(Mark, bad) is None
    assert skipped.counts == {"exp.steps": 1}
    [first] = skipped.first
    assert first[:3] == ("exp.steps", 2, 7)
    assert str(first).startswith("exp.steps[2] offset 7: ")
    assert why in first.error
    [line] = caplog.records
    assert line.message == "record_skipped"
    assert line.__dict__["rollstream_fields"].items() >= {"reader": "top", "topic": "exp.steps", "offset": 7}.items()


def test_records_are_those_that_can_be_read() -> None:
    skipped = SkippedRecords()
    messages = [message(encode(MARK), 0), message(None, 1), message(encode(MARK), 2)]
    assert [m.offset for m, _mark in skipped.records(Mark, messages)] == [0, 2]
    assert skipped.first == [Skipped("exp.steps", 2, 1, "a tombstone instead of a record")]


def test_a_sound_record_that_makes_no_sense_is_passed_over_too() -> None:
    skipped = SkippedRecords()
    with skipped.passing(message(encode(MARK))):
        raise RecordError("a drain of nothing")
    assert [str(s) for s in skipped.first] == ["exp.steps[2] offset 7: a drain of nothing"]


def test_a_flood_of_bad_records_neither_fills_the_log_nor_the_memory(caplog: pytest.LogCaptureFixture) -> None:
    skipped = SkippedRecords()
    with caplog.at_level(logging.WARNING):
        for offset in range(3000):
            assert skipped.decode(LearnerStep, message(b"junk", offset)) is None
    assert (skipped.total, len(skipped.first), len(caplog.records)) == (3000, 1000, 103)


def test_what_several_readers_passed_over_is_told_by_topic_with_the_first(caplog: pytest.LogCaptureFixture) -> None:
    here, there = SkippedRecords(logged=False), SkippedRecords(logged=False)
    here.skip(message(b"", 9), "late")
    there.skip(message(b"", 8), "early")
    there.note(Skipped("exp.control", 0, 3, "odd"))
    here.merge(there)
    assert here.total == 3
    assert here.lines() == [
        "skipped 1 of the records of exp.control, the first: exp.control[0] offset 3: odd",
        "skipped 2 of the records of exp.steps, the first: exp.steps[2] offset 8: early",
    ]
    assert here.as_dict()["exp.steps"] == {
        "records": 2,
        "topic": "exp.steps",
        "partition": 2,
        "offset": 8,
        "error": "early",
    }
    assert not caplog.records
