"""Readers of the log continue, whatever text a record has in place of a number."""

import pytest

from rollstream.consumers.labeling.positions import SOURCE, source_of
from rollstream.consumers.weights.rollback import note_of
from rollstream.topics.control.named_records import PAUSED, note_named
from rollstream.topics.control.steering import DesiredState
from rollstream.topics.decimal_numbers import decimal_number
from rollstream.topics.errors import RecordError
from rollstream.topics.kafka.labeling_progress import LabelingProgress
from rollstream.topics.kafka.records import GroupPosition, KafkaRecord
from rollstream.topics.kafka.skipped_records import SkippedRecords
from rollstream.topics.records import PausedPartition, batch_numbers

LONG = "9" * 5_000
"""A number that `int` refuses with a ValueError."""


@pytest.mark.parametrize(("text", "number"), [("0", 0), ("17", 17), ("9" * 18, 10**18 - 1)])
def test_a_text_of_up_to_eighteen_digits_is_its_number(text: str, number: int) -> None:
    assert decimal_number(text) == number


@pytest.mark.parametrize("text", ["", "-1", "1.0", "1_0", " 1", "x", "\N{ARABIC-INDIC DIGIT ONE}", "9" * 19, LONG])
def test_any_other_text_is_no_number(text: str) -> None:
    assert decimal_number(text) is None


def test_a_reader_of_control_skips_or_ignores_keys_that_no_command_writes() -> None:
    paused, state, skipped = {}, DesiredState(), SkippedRecords(logged=False)  # type: ignore[var-annotated]
    for key in (f'["paused","{LONG}"]', '[[],"x"]', '[{"a":1},"x"]'):
        message = KafkaRecord("r.control", 0, 0, key=key.encode())
        note_named(paused, PAUSED, PausedPartition, message, skipped)
        state.note(message, skipped)

    assert (paused, state) == ({}, DesiredState())
    assert skipped.total == 4


def test_headers_ids_and_positions_with_endless_numbers_are_none_or_a_record_error() -> None:
    def with_header(name: str, value: str) -> KafkaRecord:
        return KafkaRecord("r.rollouts", 0, 0, headers=((name, value.encode()),))

    assert note_of(with_header("rollstream.rollback.of", LONG)) is None
    assert LabelingProgress.decode(GroupPosition("t", 0, 7, f"id {LONG} 0 0 0")).since == 7
    for read in (lambda: batch_numbers(f"0-{LONG}"), lambda: source_of(with_header(SOURCE, f"0:{LONG}"))):
        with pytest.raises(RecordError):
            read()
