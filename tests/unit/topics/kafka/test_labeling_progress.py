"""Metadata of the committed offsets of labeling."""

from rollstream.topics.kafka.labeling_progress import LabelingProgress
from rollstream.topics.kafka.records import GroupPosition


def at(metadata: str, offset: int = 9) -> LabelingProgress:
    return LabelingProgress.decode(GroupPosition("main.unlabelled", 1, offset, metadata))


def test_progress_is_read_as_it_was_committed() -> None:
    progress = LabelingProgress(topic_id="t", since=1, labeled=5, left_out=2, dead_lettered=1, written=17)
    assert at(progress.encode()) == progress


def test_metadata_without_counts_begin_to_count_at_their_offset() -> None:
    for metadata in ("t", "t 1 5 2 1", "t 1 2 3 x", "t 1 2 3 4 5 6"):
        assert at(metadata) == LabelingProgress(topic_id="t", since=9)
    assert at("", offset=-1001) == LabelingProgress(topic_id="", since=0)
