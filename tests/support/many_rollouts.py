"""A run of very many rollouts, which are made up but go through real grouping and a real trainer."""

import time
from functools import partial
from pathlib import Path

from rollstream import BatchReader, StepWriter
from rollstream.consumers.archive.log_source import ROLLOUTS
from rollstream.consumers.grouping.config import GroupingConfig
from rollstream.topics.config import KafkaConfig, TopicsConfig
from rollstream.topics.kafka import clients, topic_admin
from tests.support.index_logs import GROUP, MadeRun
from tests.support.runs import RealRun
from tests.support.waiting import eventually

PARTITIONS, GROUPS = 4, 8
CHUNK = PARTITIONS * GROUPS * GROUP
"""Rollouts of a chunk; one group in `GROUPS` has no variance. A bad record and a mark go to each partition, too."""
_BATCHES_PER_STEP = 64
_GONE_S = 600.0


class ManyRollouts:
    """A run with at least so many rollouts; `seconds` says how long each part of it took."""

    def __init__(self, kafka: KafkaConfig, name: str, directory: Path, least: int) -> None:
        self.run = RealRun(kafka, name, directory, TopicsConfig(partitions=PARTITIONS))
        self.run.grouping = GroupingConfig(max_batch_age_s=2.0)
        self.chunks = -(-least // CHUNK)
        self.seconds: dict[str, float] = {}

    @property
    def rollouts(self) -> int:
        return self.chunks * CHUNK

    @property
    def batched(self) -> int:
        """Rollouts of groups with variance."""
        return self.rollouts // GROUPS * (GROUPS - 1)

    def write(self) -> None:
        """Create the topics, start grouping and write the rollouts, all of policy version 0."""
        self.run.prepare()
        self._grouping = self.run.start("group")
        # Groups wait until grouping has marked their version, and a million rollouts are more than may wait.
        ends = partial(topic_admin.bounds, self.run.kafka, self.run.topic(ROLLOUTS))
        eventually(lambda: all(end > 0 for _low, end in ends().values()), 60, "marks of the version")
        began = time.monotonic()
        producer = clients.producer(self.run.kafka)
        made = MadeRun(partitions=PARTITIONS, groups=GROUPS, steps_per_version=self.chunks + 1)
        for _ in range(self.chunks):
            for name, record in made.chunk():
                while name == ROLLOUTS:
                    # Records without a key are no rollouts and stay in their partitions, so that each has some.
                    partition = -1 if record.key else record.partition
                    try:
                        producer.produce(self.run.topic(name), record.value, record.key or b"made", partition)
                        break
                    except BufferError:
                        producer.poll(0.1)
            producer.poll(0)
        assert producer.flush(300) == 0
        self.seconds["written"] = time.monotonic() - began

    def train(self) -> int:
        """Train on the batches until none is left; return the number of steps."""
        began, trained = time.monotonic(), 0
        with (
            StepWriter(self.run.kafka, self.run.name, learner="test") as steps,
            BatchReader(self.run.kafka, self.run.name, start=0) as reader,
        ):
            while trained < self.batched:
                reads = []
                while len(reads) < _BATCHES_PER_STEP and trained < self.batched:
                    read = reader.poll(_GONE_S)
                    assert read is not None, self.run.log_of(self._grouping)[-3000:]
                    reads.append(read)
                    trained += len(read.batch)
                steps.record(reads, publish=False, metrics={"loss": 1 / (steps.step + 1)})
            self.seconds["grouped and trained on"] = time.monotonic() - began
            return steps.step
