"""Passes many hostile records through the decoder and the pure fold of grouping, and notes the place of each record."""

from collections import Counter
from dataclasses import dataclass, field

from rollstream.consumers.grouping.config import GroupingConfig
from rollstream.consumers.grouping.core import task_state
from rollstream.consumers.grouping.core.effects import InputRecord
from rollstream.consumers.grouping.core.estimators import ESTIMATORS
from rollstream.consumers.grouping.core.fold import Fold
from rollstream.consumers.grouping.core.plug_ins import MAKERS, PlugIns
from rollstream.topics.errors import RecordError
from rollstream.topics.records import JournalRecord
from rollstream.topics.records.journal import JournalCounts, from_ranges
from rollstream.topics.wire.codec import decode, decode_as, encode
from rollstream.topics.wire.keys import decode_key
from tests.support.flood import Flood

COMMIT_EVERY = 500
CONFIG = GroupingConfig(batch_rollouts=16, mark_keys=("8a" * 32,), capacity_bytes=64 * 1024 * 1024)
_SNAPSHOT_EVERY = 100_000


@dataclass
class FoldedFlood:
    """Fates of the records of one flood."""

    flood: Flood
    records: int = 0
    undecodable: int = 0
    finished: Counter[int] = field(default_factory=Counter)
    """How often each offset got a fate."""
    counts: JournalCounts = field(default_factory=JournalCounts)
    batched: set[str] = field(default_factory=set)
    dropped: list[str] = field(default_factory=list)
    in_flight: int = 0

    def fold(self) -> "FoldedFlood":
        """Decode and fold every record; commit as a task does, and read what it commits as its readers do."""
        first = task_state.initial_record(0, 1, "flood", CONFIG)
        fold = Fold(task_state.restored_state([first]), PlugIns(MAKERS, ESTIMATORS), {})
        for record in self.flood:
            try:
                decode(record.value)
                decode_key(record.key)
            except RecordError:
                self.undecodable += 1
            fold.apply(InputRecord(self.records, 1_000 + self.records, record.key, record.value))
            self.records += 1
            if self.records % COMMIT_EVERY == 0:
                self._commit(fold)
        self._commit(fold)
        self.in_flight = fold.in_flight
        return self

    def _commit(self, fold: Fold) -> None:
        effects = fold.prepare_commit(snapshot=self.records % _SNAPSHOT_EVERY == 0)
        for written in effects.records:
            journal = decode_as(JournalRecord, encode(written))
            self.counts.add(journal)
            for finished in journal.finished:
                self.finished.update(from_ranges(finished.runs))
            self.dropped += [drop.uid for drop in journal.drops]
        for batch in effects.batches:
            self.batched.update(batch.uids)

    def check(self) -> None:
        """Assert that every record has one place, and that no honest group was harmed."""
        assert set(self.finished.values()) == {1}
        assert len(self.finished) + self.in_flight == self.records
        assert sum(count.rollouts for count in self.counts.counts) == len(self.finished)
        honest = set(self.flood.honest)
        assert honest.isdisjoint(self.dropped)
        assert len(honest - self.batched) <= CONFIG.batch_rollouts + self.in_flight
