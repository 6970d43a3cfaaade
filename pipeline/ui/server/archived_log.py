"""The log of a run in an archive, as an observer of the run reads it."""

from collections.abc import Iterator, Mapping
from itertools import chain, islice

from rollstream.consumers.files.stores import open_store
from rollstream.pipeline.index.log_source import ArchiveSource
from rollstream.pipeline.run.observed_log import OBSERVED
from rollstream.topics.kafka.records import KafkaRecord, Place
from rollstream.topics.wire.catalogue import name_in_run, topic_name


class ArchivedLog:
    """The records in an archive when it is opened; to observe later records, create a new ArchivedLog."""

    def __init__(self, archive: str, run: str) -> None:
        """Raises ConfigurationError if the archive does not contain the run."""
        self._source, self._run = ArchiveSource(open_store(archive), run), run
        self._first = self.bounds()
        self._records: Iterator[KafkaRecord] = iter(())
        self.ends: Mapping[Place, int] = {}

    @property
    def has_grown(self) -> bool:
        """Whether records were added to the archive since it was opened."""
        return self.bounds() != self._first

    def bounds(self) -> dict[Place, tuple[int, int]]:
        """Return the first and end offset of each partition now."""
        bounds = self._source.bounds().items()
        return {(topic_name(self._run, name), p): held for (name, p), held in bounds if name in OBSERVED}

    def begin(self, starts: Mapping[Place, int]) -> None:
        """Read from the beginning, because an archive is read file by file; records before a start are skipped."""
        places = sorted(self._first, key=lambda place: (OBSERVED.index(name_in_run(place[0])), place[1]))
        self._records = chain.from_iterable(
            self._source.messages(name_in_run(topic), p, starts.get((topic, p), 0)) for topic, p in places
        )

    def poll(self, most: int, wait_s: float) -> list[KafkaRecord]:
        """Return up to `most` records, without waiting."""
        del wait_s
        records = list(islice(self._records, most))
        if not records:
            self.ends = {place: end for place, (_low, end) in self._first.items()}
        return records

    def close(self) -> None:
        """Stop reading."""
        self._records = iter(())
        self._source.close()
