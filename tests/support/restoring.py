"""Restoring tasks in one go, as the grouping process does in steps."""

from collections.abc import Iterable

from rollstream.consumers.grouping.config import GrouperConfig
from rollstream.consumers.grouping.core.fold import Fold
from rollstream.consumers.grouping.core.journal_pointers import JournalPointers
from rollstream.consumers.grouping.process.restoration import Restoration, reader_of_restores
from rollstream.topics.config import KafkaConfig
from rollstream.topics.kafka.skipped_records import SkippedRecords


def restore_tasks(
    kafka: KafkaConfig, run: str, numbers: Iterable[int], partitions: int, topic_id: str, grouper: GrouperConfig
) -> list[tuple[Fold, JournalPointers]]:
    """The fold and journal pointers of each of these partitions. Raises StateRefused as `Restoration` does."""
    restored = []
    with reader_of_restores(kafka, run, grouper) as reader:
        for partition in numbers:
            restoration = Restoration(kafka, run, partition, partitions, topic_id, grouper, SkippedRecords(), reader)
            while not restoration.step(5.0):
                pass
            assert restoration.restored is not None
            restored.append(restoration.restored)
    return restored
