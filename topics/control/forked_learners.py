"""The learners that were forked into a run, as recorded on its topic `control`.

A forked learner is on record here before its first step is on `steps`, so that `rollstream prune` keeps the batches
that it has yet to read.
"""

from rollstream.topics.config import KafkaConfig
from rollstream.topics.control.named_records import read_named, write_named
from rollstream.topics.records import ForkedLearner

FORKED = "forked"
"""First part of the key of a record of a forked learner; the second is its name."""


def forked_learners(kafka: KafkaConfig, run: str) -> dict[str, ForkedLearner]:
    """Return the learners forked into a run by name; none if the run has no topic `control`."""
    return read_named(kafka, run, FORKED, ForkedLearner)


def write_fork(kafka: KafkaConfig, run: str, learner: str, record: ForkedLearner | None) -> None:
    """Put a learner forked into `run` on record, or withdraw its record."""
    write_named(kafka, run, FORKED, learner, record)
