"""The reader of batches on a real broker, where partitions are far apart."""

from consumers.batch_reader import BatchReader
from tests.batches import random_batch, send_batches
from tests.runs import RealRun


def test_a_batch_that_is_waited_for_has_a_place_however_many_of_other_partitions_come_first(real_run: RealRun) -> None:
    real_run.prepare()
    of_one = [random_batch(number, partition=1) for number in range(120)]
    batches = [of_one[0], random_batch(0, partition=0), *of_one[1:]]
    send_batches(real_run.kafka, real_run.name, batches)
    # The batch of partition 0 is fetched when 119 of partition 1 are at hand, more than are kept for later.
    with BatchReader(real_run.kafka, real_run.name, wait_s=10.0) as reader:
        found = [reader.poll(10.0) for _ in batches]
        assert reader.poll(0.1) is None
    assert [read.batch.batch_id for read in found if read is not None] == [batch.batch_id for batch in batches]
