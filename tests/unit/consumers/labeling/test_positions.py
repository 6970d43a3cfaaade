"""The source that a labeled record names in `unlabelled`."""

from rollstream.consumers.labeling.positions import SOURCE, source_of
from rollstream.topics.kafka.records import KafkaRecord
from rollstream.topics.run_splits import MOVED_FROM


def test_a_copy_that_split_moved_was_not_labeled_in_this_run() -> None:
    labeled = KafkaRecord("main.rollouts", 0, 0, headers=((SOURCE, b"1:5000"),))
    assert source_of(labeled) == (1, 5000)
    copy = KafkaRecord("next.rollouts", 0, 0, headers=((SOURCE, b"1:5000"), (MOVED_FROM, b"main:0:0")))
    assert source_of(copy) is None
