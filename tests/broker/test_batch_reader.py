"""The reader of batches on a real broker: partitions that are far apart, several processes that share."""

from collections import Counter

import pytest

from rollstream.consumers.batch_reader import BatchFetcher, IndexReader
from rollstream.topics.kafka.reader import Reader
from rollstream.topics.kafka.records import Place
from rollstream.topics.wire.codec import encode
from tests.support.batches import random_batch, send_batches
from tests.support.runs import RealRun


def test_no_batch_is_fetched_twice_while_the_index_takes_partitions_in_turn(
    real_run: RealRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client reads each partition in pieces. If these were large, the batches of one partition would leave no room
    for those of the other."""
    real_run.prepare()
    batches = [random_batch(number, rows=64, partition=number % 2, answers=(2000, 2500)) for number in range(40)]
    send_batches(real_run.kafka, real_run.name, batches)
    seek, seeks = Reader.seek, Counter[Place]()

    def counted(reader: Reader, place: Place, offset: int) -> None:
        seeks[place] += 1
        seek(reader, place, offset)

    monkeypatch.setattr(Reader, "seek", counted)
    with (
        IndexReader(real_run.kafka, real_run.name) as index,
        BatchFetcher(real_run.kafka, real_run.name, ahead_bytes=16 * 2**20) as fetcher,
    ):
        entries = [index.poll(60.0) for _ in batches]
        actual = [fetcher.fetch(indexed.entry) for indexed in entries if indexed is not None]
    assert [batch.batch_id for batch in actual] == [batch.batch_id for batch in batches]
    assert sum(len(encode(batch)) for batch in batches) > 4 * 16 * 2**20
    assert not seeks
