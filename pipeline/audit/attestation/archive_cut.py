"""The part of an archive that a statement covers: the records of each partition of a run's topics up to an end offset.

Records beyond the ends are not read, so a statement is also valid for every later archive of the run.
"""

from collections.abc import Iterator, Mapping
from typing import TypeVar

from rollstream.consumers.archive import manifest as manifests
from rollstream.consumers.archive.writer import records as archived_records
from rollstream.topics.errors import StateRefused
from rollstream.topics.files.stores import Store
from rollstream.topics.kafka.records import KafkaRecord
from rollstream.topics.kafka.skipped_records import SkippedRecords

TOPICS = ("rollouts", "journal", "batches", "batch-index", "steps", "policies")
"""Topics that a statement covers."""
Ends = Mapping[str, Mapping[int, int]]
"""By topic and partition, the offset after the last record that a statement covers."""
R = TypeVar("R")


class ArchiveCut:
    """The records of an archive up to given ends."""

    def __init__(self, store: Store, run: str, ends: Ends | None = None) -> None:
        """Open an archive up to `ends`, by default up to its own end.

        Raises ConfigurationError if the archive does not hold the run, and StateRefused if the archive begins later
        than the run or ends before `ends`.
        """
        manifest = manifests.existing(store, run)
        self.run = run
        self._store, self._manifest = store, manifest
        for name in TOPICS:
            if name not in manifest.topics:
                raise StateRefused(f"{store.url} holds no topic {name} of run {run}; `rollstream archive` adds it")
        self.ends: Ends = ends or {name: dict(manifest.topics[name].position) for name in TOPICS}
        for name in TOPICS:
            archived, wanted = manifest.topics[name], self.ends.get(name, {})
            pruned = [p for p, begin in archived.begin.items() if begin]
            if pruned:
                raise StateRefused(
                    f"{store.url} has {name}[{pruned[0]}] of run {run} from offset {archived.begin[pruned[0]]} on: the "
                    f"first records were pruned before they were archived, so no statement can cover them"
                )
            if wanted.keys() != archived.position.keys():
                raise StateRefused(f"{store.url} has {len(archived.position)} partitions of {name}, not {len(wanted)}")
            short = [p for p, end in wanted.items() if end > archived.position[p]]
            if short:
                raise StateRefused(
                    f"{store.url} has {name}[{short[0]}] up to offset {archived.position[short[0]]}, but the statement "
                    f"covers the records up to {wanted[short[0]]}; use an archive that was made later"
                )
        self.skipped = SkippedRecords("attest", logged=False)
        """Records of a kind that does not belong in their topic; no other record refers to them."""

    @property
    def topic_ids(self) -> dict[str, str]:
        """The id of each topic that was archived."""
        return {name: self._manifest.topics[name].topic_id for name in TOPICS}

    @property
    def partitions(self) -> list[int]:
        """Partitions of `rollouts`."""
        return sorted(self.ends["rollouts"])

    def messages(self, topic: str, partition: int) -> Iterator[KafkaRecord]:
        """Yield the records of a partition. Raises StateRefused if a file of the archive was changed after writing."""
        end = self.ends[topic][partition]
        for entry in archived_records(self._store, self._manifest, topic, partition):
            if entry.offset < end:
                yield entry.message(self.run)

    def records(self, topic: str, kind: type[R]) -> Iterator[tuple[KafkaRecord, R]]:
        """Yield a topic's records of one kind, by partition and offset, each with its message."""
        for partition in sorted(self.ends[topic]):
            yield from self.skipped.records(kind, self.messages(topic, partition))
