"""A run that was grouped over a model of Kafka, for readers of its topics; its process has ended."""

import threading
from collections.abc import Iterator

from rollstream.consumers.grouping.config import GrouperConfig, GroupingConfig
from rollstream.consumers.grouping.process.bootstrap import initialise
from rollstream.consumers.grouping.process.grouping_process import GroupingProcess
from rollstream.consumers.grouping.testing import example_rollout
from rollstream.topics.config import KafkaConfig
from rollstream.topics.records import JournalRecord, PolicyManifest
from rollstream.topics.wire.catalogue import CATALOGUE
from rollstream.topics.wire.codec import decode, encode
from rollstream.topics.wire.keys import encode_key
from tests.simulation.installation import World
from tests.simulation.partition_log import PartitionLog
from tests.simulation.scheduler import Process

KAFKA = KafkaConfig(bootstrap_servers="model:1")
RUN = "modelled"
MEMBERS = 2
GROUPS_IN_BATCH = 2
_GROUPING = GroupingConfig(batch_rollouts=GROUPS_IN_BATCH * MEMBERS)
_GROUPER = GrouperConfig(snapshot_every=1, metrics_interval_s=0)


class ModelledRun:
    """A run of one partition, with two groups of two rollouts in each batch."""

    def __init__(self, world: World) -> None:
        self.cluster = world.begin()
        self._world = world
        for topic in CATALOGUE:
            self.cluster.create(f"{RUN}.{topic.name}", 1)
        world.result_of(lambda: initialise(KAFKA, RUN, _GROUPING, _GROUPER))
        version = PolicyManifest(version=0, learner="test", step=0, epoch="e", tensors=(), chunks=(), digest="")
        self.write("policies", encode_key(0), encode(version))
        self._sent = 0

    def log(self, name: str) -> PartitionLog:
        """Return the only partition of a topic."""
        return self.cluster.log((f"{RUN}.{name}", 0))

    def write(self, name: str, key: bytes, value: bytes | None) -> int:
        """Write a record outside transactions, and return its offset."""
        log = self.log(name)
        return log.append(self.cluster.now_ms, key, value, [], (-2, log.end), 0, transactional=False)

    def send(self) -> None:
        """Write the rollouts of a batch."""
        for group in range(GROUPS_IN_BATCH):
            for member in range(MEMBERS):
                example = f"{self._sent}-{group}"
                made = example_rollout(f"{example}-{member}", float(member), example_id=example)
                self.write("rollouts", encode_key("env", example), encode(made))
        self._sent += 1

    def group(self, batches: int | None = None) -> None:
        """Group the rollouts in a process of its own, until all are read and there are so many batches, by default one
        for each `send`."""
        stop = threading.Event()

        def work() -> None:
            GroupingProcess(KAFKA, RUN, _GROUPING, _GROUPER, 0, lambda: None).run(stop)

        actor = self._world.scheduler.spawn(Process("group-0"), "group-0", work)
        self._world.scheduler.run(lambda: self._is_grouped(self._sent if batches is None else batches))
        stop.set()
        self._world.scheduler.run(lambda: actor.done)
        assert actor.error is None
        self._world.scheduler.run(lambda: self.cluster.at_rest)

    def prune(self, batches: int) -> None:
        """Delete the first batches, and what led to them, as a prune does."""
        records = [(offset, decode(value)) for offset, value in self._visible("journal")]
        offset, snapshot = next(
            (offset, record)
            for offset, record in records
            if isinstance(record, JournalRecord) and record.snapshot and record.batch_number == batches
        )
        self.log("journal").begin = offset
        self.log("rollouts").begin = snapshot.position
        for name in ("batches", "batch-index"):
            self.log(name).begin = [offset for offset, _value in self._visible(name)][batches]

    def _is_grouped(self, batches: int) -> bool:
        read = self.cluster.groups[f"{RUN}.grouper"].offsets.get((f"{RUN}.rollouts", 0))
        return read is not None and read.offset == self.log("rollouts").end and self._count("batches") == batches

    def _count(self, name: str) -> int:
        return sum(1 for _ in self._visible(name))

    def _visible(self, name: str) -> Iterator[tuple[int, bytes]]:
        log = self.log(name)
        for entry in log.visible(0, log.end, True)[0]:
            assert entry.value is not None
            yield entry.offset, entry.value
