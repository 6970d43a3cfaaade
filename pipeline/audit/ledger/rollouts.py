"""Compares records of `rollouts` with the journal: below the position each record has a fate, and each fate its record.

Records that the group has not read are unread. Records deleted before they were read, and records that replaced others
already read, are losses that counts do not show.
"""

from collections.abc import Mapping

from rollstream.consumers.grouping.process.skipped_offsets import asked_for
from rollstream.pipeline.audit.ledger.book import Ledger
from rollstream.pipeline.audit.ledger.hidden_records import HiddenRecords
from rollstream.pipeline.audit.ledger.topic_tail import PATIENCE_S
from rollstream.pipeline.audit.partition_journal import IN_FLIGHT, PartitionJournal
from rollstream.topics import codec
from rollstream.topics.catalogue import topic_name
from rollstream.topics.config import KafkaConfig
from rollstream.topics.errors import DeadlineExceeded
from rollstream.topics.fates import DEAD_LETTERED
from rollstream.topics.kafka import topic_admin
from rollstream.topics.kafka.open_transactions import await_decided
from rollstream.topics.kafka.skipping_reader import records_around


class _LeaderEpochs:
    """Compares the leader epochs of one partition's log with those under which its records were read."""

    def __init__(self, journal: PartitionJournal) -> None:
        self._journal = journal
        self._epoch, self._began = -1, 0
        self.written_again: dict[int, tuple[int, int]] = {}
        """By epoch, the first and last offset at which the log holds a record other than the one read."""

    def see(self, offset: int, epoch: int | None) -> None:
        """Process the next record of the log."""
        if epoch is None:
            return
        if epoch != self._epoch:
            self._epoch, self._began = epoch, offset
        if self._journal.leader_epochs.get(offset, epoch) != epoch:
            self.written_again[epoch] = self._began, offset


def check_records(
    kafka: KafkaConfig,
    run: str,
    journals: Mapping[int, PartitionJournal],
    begins: Mapping[int, int],
    hidden: HiddenRecords,
    result: Ledger,
) -> int:
    """Compare rollouts with the journal; `begins` holds the first offset of each partition before the journal was read.

    Returns the number of rollouts among the records in flight.
    """
    topic = topic_name(run, "rollouts")
    # In a topic that was created anew, e.g. restored, epochs count from 0 again.
    topic_id = topic_admin.topic_ids(kafka, [topic])[topic]
    partitions = {
        number: _PartitionRecords(journal, _left_out(kafka, run, journal), journal.topic_id == topic_id, result)
        for number, journal in journals.items()
    }
    left_out = {number: partition.left_out for number, partition in partitions.items()}
    for message in records_around(kafka, topic, left_out):
        rollout = codec.kind_of(message.value) == "Rollout"
        partitions[message.partition].add(message.offset, message.leader_epoch, rollout=rollout)
    bounds = topic_admin.bounds(kafka, topic)
    for number, partition in partitions.items():
        partition.add_hopped()
        partition.check_epochs()
        partition.check_bounds(begins[number], bounds[number][1])
        partition.check_missing(bounds[number][0])
        partition.sum_up(*bounds[number])
    try:
        await_decided(kafka, topic, "the ledger is not whole", PATIENCE_S)
    except DeadlineExceeded:
        result.undecide("records that nobody has read yet", hidden.places("rollouts"))
    return sum(partition.in_flight for partition in partitions.values())


class _PartitionRecords:
    """The records of one partition of `rollouts`, compared with its journal."""

    def __init__(self, journal: PartitionJournal, left_out: set[int], same_topic: bool, result: Ledger) -> None:
        """`same_topic` is whether the journal is about the present topic, so that leader epochs can be compared."""
        self.left_out = left_out
        self.in_flight = 0
        """Rollouts in flight."""
        self._journal, self._result = journal, result
        self._epochs = _LeaderEpochs(journal) if same_topic else None
        self._seen: set[int] = set()
        self._rollouts = 0
        self._unread = 0
        self._unread_rollouts = 0

    def add(self, offset: int, epoch: int | None, *, rollout: bool) -> None:
        """Add the next record of the log."""
        journal = self._journal
        if self._epochs is not None:
            self._epochs.see(offset, epoch)
        if offset >= journal.position:
            self._unread += 1
            self._unread_rollouts += rollout
        elif not journal.settled_before(offset):
            self._seen.add(offset)
            self._rollouts += rollout
            fate = journal.fate(offset)
            if fate is None:
                self._result.problem(f"rollouts[{journal.number}] offset {offset} was read and is nowhere")
            self.in_flight += rollout and fate == IN_FLIGHT

    def add_hopped(self) -> None:
        """Add the offsets that grouping skipped unread: they are not fetched here, either."""
        self._seen.update(offset for offset in self._journal.hopped if not self._journal.settled_before(offset))

    def check_epochs(self) -> None:
        """Report offsets that now hold a record other than the one read."""
        for first, last in self._epochs.written_again.values() if self._epochs is not None else ():
            self._result.problem(
                f"rollouts[{self._journal.number}] offsets {first} to {last} were read as other records: the log was "
                f"cut off and written again (its leader epoch is another), and what is there now was never read"
            )

    def check_bounds(self, begin: int, end: int) -> None:
        """Report records that were deleted unread, and a log that ends below the position."""
        journal = self._journal
        # Hidden journal records may account for them.
        if begin > journal.position and not journal.hidden:
            self._result.problem(
                f"rollouts[{journal.number}] begins at offset {begin}, and the group has read up to "
                f"{journal.position}: {begin - journal.position} offsets were deleted unread"
            )
        if end < journal.position:
            self._result.problem(
                f"rollouts[{journal.number}] ends at offset {end}, and was read up to {journal.position}"
            )

    def check_missing(self, begin: int) -> None:
        """Report offsets with a fate that hold no record, unless they are finished and were deleted."""
        journal = self._journal
        for offset in sorted(self._missing):
            if offset >= begin:
                self._result.problem(
                    f"rollouts[{journal.number}] offset {offset} is {journal.fate(offset)} and holds no record"
                )
            elif journal.fate(offset) == IN_FLIGHT:
                self._result.problem(f"rollouts[{journal.number}] offset {offset} is in flight and was deleted")

    def sum_up(self, begin: int, end: int) -> None:
        """Add the counts of the partition to the ledger."""
        journal, result = self._journal, self._result
        unread = self._unread + sum(journal.position <= offset < end for offset in self.left_out)
        deleted = sum(offset < begin for offset in self._missing)
        settled = sum(journal.before.values())
        result.unread += unread
        result.pruned += settled + deleted
        result.produced += len(self._seen) + deleted + settled + unread
        if settled or deleted:
            read = sum(count.rollouts for count in journal.produced)
            result.rollouts += read - journal.before[DEAD_LETTERED] - len(journal.offsets(DEAD_LETTERED))
        else:
            result.rollouts += self._rollouts
        result.rollouts += self._unread_rollouts

    @property
    def _missing(self) -> set[int]:
        return self._journal.offsets() - self._seen


def _left_out(kafka: KafkaConfig, run: str, journal: PartitionJournal) -> set[int]:
    """Offsets that grouping skipped, or was asked to skip, without fetching them."""
    requested = asked_for(kafka, run, journal.number)
    return {*journal.hopped, *(offset for offset in requested if offset >= journal.position)}
