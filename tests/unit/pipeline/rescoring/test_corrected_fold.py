"""Recorded batches are compared one after the other, and are not all in memory at once."""

import weakref
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace

import pytest

from rollstream.consumers.grouping.config import GrouperConfig, GroupingConfig
from rollstream.consumers.grouping.core import task_state
from rollstream.pipeline.rescoring import corrected_fold
from rollstream.pipeline.rescoring.corrected_fold import CorrectionJob, correct_partition
from rollstream.topics.config import KafkaConfig
from rollstream.topics.kafka.skipped_records import Skipped, SkippedRecords
from rollstream.topics.records import TrainingBatch
from tests.support.batches import random_batch

BATCHES = 8
ROWS = 4


@pytest.mark.parametrize("passes", [1, 2])
def test_one_batch_is_in_memory_at_a_time_and_invalid_ones_are_counted_once(
    passes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = task_state.initial_record(0, 1, "t", GroupingConfig())
    last = replace(journal, position=BATCHES * ROWS)
    alive: list[weakref.ref[TrainingBatch]] = []
    most = []

    def read_batches(_kafka: object, _run: str, skipped: SkippedRecords, _partition: int) -> Iterator[TrainingBatch]:
        skipped.note(Skipped("x.batches", 0, 7, "not a batch"))
        for number in range(BATCHES):
            batch = random_batch(number, rows=ROWS)
            alive.append(weakref.ref(batch))
            most.append(sum(each() is not None for each in alive))
            yield batch
            del batch

    output = SimpleNamespace(
        batches=[random_batch(n, rows=ROWS) for n in range(BATCHES)], journal=SimpleNamespace(drops=())
    )
    monkeypatch.setattr(corrected_fold, "read_batches", read_batches)
    monkeypatch.setattr(corrected_fold, "rescored", lambda *_: ())
    monkeypatch.setattr(corrected_fold, "journal_of", lambda *_: [journal, last])
    monkeypatch.setattr(corrected_fold, "beginnings", lambda *_: [0])
    monkeypatch.setattr(corrected_fold, "log_begins", lambda *_: {0: 0})
    monkeypatch.setattr(corrected_fold, "refold", lambda *_, **__: [output])
    taken: dict[str, tuple[int, ...]] = {"0-1": ()} if passes == 2 else {}
    job = CorrectionJob(KafkaConfig(), "x", 0, "r", BATCHES * ROWS, GrouperConfig(), taken=taken)
    result = correct_partition(job)
    assert list(result.batches) == [f"0-{number}" for number in range(BATCHES)]
    assert all(batch.known.all() and not batch.wrong.any() for batch in result.batches.values())
    assert result.skipped.total == 1
    assert (len(alive), max(most)) == (passes * BATCHES, 2), "the last batch, until the next one replaces it"
