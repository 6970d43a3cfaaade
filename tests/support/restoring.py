"""Restoring a task in one go, as the grouping process does in steps."""

from rollstream.consumers.grouping.config import GrouperConfig
from rollstream.consumers.grouping.core.fold import Fold
from rollstream.consumers.grouping.core.journal_pointers import JournalPointers
from rollstream.consumers.grouping.process.restoration import Restoration
from rollstream.topics.config import KafkaConfig
from rollstream.topics.kafka.skipped_records import SkippedRecords


def restore_task(
    kafka: KafkaConfig, run: str, partition: int, partitions: int, topic_id: str, grouper: GrouperConfig
) -> tuple[Fold, JournalPointers]:
    """The fold and journal pointers of a partition. Raises StateRefused as `Restoration` does."""
    restoration = Restoration(kafka, run, partition, partitions, topic_id, grouper, SkippedRecords())
    while not restoration.step(5.0):
        pass
    assert restoration.restored is not None
    return restoration.restored
