"""Restoring tasks in one go, as the grouping process does in steps."""

from collections.abc import Iterable

from rollstream.consumers.grouping.config import GrouperConfig
from rollstream.consumers.grouping.core.fold import Fold
from rollstream.consumers.grouping.core.grouping_task import GroupingTask
from rollstream.consumers.grouping.core.task_journal import JournalPointers
from rollstream.consumers.grouping.process.restoration import Restoration, reader_of_restores
from rollstream.consumers.grouping.process.restorer import Restorer
from rollstream.topics.config import KafkaConfig
from rollstream.topics.kafka.skipped_records import SkippedRecords


def restore_all(restorer: Restorer) -> dict[int, GroupingTask]:
    """The tasks of all waiting partitions, some restored at once. Raises StateRefused as `Restoration` does."""
    tasks: dict[int, GroupingTask] = {}
    while restorer.waiting:
        if not restorer.restoring:
            restorer.begin()
        elif (task := restorer.step(1.0)) is not None:
            tasks[task.partition] = task
            restorer.withdraw([task.partition])
    return tasks


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
