"""The reader of batches on a real broker: partitions that are far apart, several processes that share."""

from rollstream.consumers.batch_reader import BatchFetcher, BatchReader, IndexReader
from rollstream.topics.wire.codec import encode
from tests.support.batches import random_batch, send_batches
from tests.support.runs import RealRun


def test_a_batch_that_is_waited_for_has_a_place_however_many_of_other_partitions_come_first(real_run: RealRun) -> None:
    real_run.prepare()
    of_one = [random_batch(number, partition=1) for number in range(120)]
    batches = [of_one[0], random_batch(0, partition=0), *of_one[1:]]
    send_batches(real_run.kafka, real_run.name, batches)
    # The batch of partition 0 is fetched when 119 of partition 1 have arrived, more than are kept for later.
    with (
        IndexReader(real_run.kafka, real_run.name) as index,
        BatchFetcher(real_run.kafka, real_run.name, wait_s=60.0, ahead_bytes=50_000) as fetcher,
    ):
        entries = [index.poll(60.0) for _ in batches]
        assert index.poll(0.1) is None
        actual = [fetcher.fetch(indexed.entry) for indexed in entries if indexed is not None]
    assert [batch.batch_id for batch in actual] == [batch.batch_id for batch in batches]
    assert sum(len(encode(batch)) for batch in batches) > 2 * 50_000


def test_processes_share_the_batches_and_any_number_can_go_on(real_run: RealRun) -> None:
    real_run.prepare()
    batches = [random_batch(number, partition=number % 2) for number in range(11)]
    send_batches(real_run.kafka, real_run.name, batches)
    names = [batch.batch_id for batch in batches]

    def read(start: int, process: int, processes: int, share: int) -> tuple[list[str], int]:
        with BatchReader(real_run.kafka, real_run.name, start, process=process, processes=processes) as reader:
            name = []
            # The first may take long; that there is no other one shows only by waiting.
            while (batch := reader.poll(1.0 if len(name) == share else 60.0)) is not None:
                name.append(batch.batch.batch_id)
                assert batch.position == reader.position
            return name, reader.position

    shares = [read(0, process, 3, 3) for process in range(3)]
    assert [name for name, _position in shares] == [names[process:9:3] for process in range(3)]
    (position,) = {position for _found, position in shares}
    # Two are left, too few for a round of three; any number of processes can go on from this position.
    rest = [read(position, process, 2, 1) for process in range(2)]
    assert [name for name, _position in rest] == [[names[9]], [names[10]]]
