"""Records of the journal, of which a test says only what it is about."""

from rollstream.topics.records import JournalRecord


def journal_record(**changes: object) -> JournalRecord:
    """The first record of a task that has read nothing, with changes."""
    values: dict[str, object] = {
        "partition": 0,
        "sequence": 0,
        "core_version": 1,
        "topic_id": "t",
        "partitions": 2,
        "begin": 0,
        "position": 0,
        "watermark": 0,
        "watermark_stream_time_ms": 0,
        "watermark_policy_version": 0,
        "watermark_generation": 0,
        "watermark_configuration": "{}",
        "stream_time_ms": 0,
        "policy_version": 0,
        "generation": 0,
        "batch_number": 0,
    }
    return JournalRecord(**(values | changes))  # type: ignore[arg-type]
