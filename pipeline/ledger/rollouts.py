"""Records of `rollouts` against the journal: below the position each has a place, and each place its record.

What the group never read is unread, if it is there: records deleted before they were read, and those written where
others had been read, are losses that no count shows.
"""

from collections import Counter
from collections.abc import Mapping

from consumers.grouping.changes import DEAD_LETTERED
from pipeline.journals import IN_FLIGHT, PartitionJournal
from pipeline.ledger.book import PATIENCE_S, Ledger
from pipeline.ledger.hidden import Hidden
from topics import clients, codec
from topics.catalogue import topic_name
from topics.config import KafkaConfig
from topics.errors import DeadlineExceeded
from topics.open_transactions import await_decided


class _Epochs:
    """Leader epochs of one partition's log against those its records were read under."""

    def __init__(self, journal: PartitionJournal) -> None:
        self._journal = journal
        self._epoch, self._began = -1, 0
        self.written_again: dict[int, tuple[int, int]] = {}
        """By epoch, the first and the last offset known to hold another record than was read there."""

    def see(self, offset: int, epoch: int | None) -> None:
        """Take in the next record of the log."""
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
    hidden: Hidden,
    result: Ledger,
) -> int:
    """Rollouts against the journal; `begins` is where each partition began before the journal was read.

    Returns how many of the records in flight are rollouts.
    """
    topic = topic_name(run, "rollouts")
    frames = codec.frames("Rollout")
    seen: dict[int, set[int]] = {p: set() for p in journals}
    rollouts: Counter[int] = Counter()
    unread: Counter[int] = Counter()
    in_flight = 0
    # In a topic that was made anew, as a restored one is, epochs count from 0 again.
    topic_id = clients.topic_ids(kafka, [topic])[topic]
    epochs = {number: _Epochs(journal) for number, journal in journals.items() if journal.topic_id == topic_id}
    for message in clients.read_to_end(kafka, topic):
        number, offset = message.partition() or 0, message.offset() or 0
        journal = journals[number]
        rollout = (message.value() or b"").startswith(frames)
        if number in epochs:
            epochs[number].see(offset, message.leader_epoch())
        if offset >= journal.position:
            result.unread += 1
            unread[number] += rollout
        elif not journal.settled_before(offset):
            seen[number].add(offset)
            rollouts[number] += rollout
            fate = journal.fate(offset)
            if fate is None:
                result.problem(f"rollouts[{number}] offset {offset} was read and is nowhere")
            in_flight += rollout and fate == IN_FLIGHT
    for number, (first, last) in ((n, at) for n in epochs for at in epochs[n].written_again.values()):
        result.problem(
            f"rollouts[{number}] offsets {first} to {last} were read as other records: the log was cut off and "
            f"written again (its leader epoch is another), and what is there now was never read"
        )
    bounds = clients.bounds(kafka, topic)
    lows = {p: low for p, (low, _end) in bounds.items()}
    for number, journal in journals.items():
        position = journal.position
        # What a hidden part of the journal has read is no loss.
        if begins[number] > position and not journal.hidden:
            result.problem(
                f"rollouts[{number}] begins at offset {begins[number]}, and the group has read up to {position}: "
                f"{begins[number] - position} offsets were deleted unread"
            )
        if bounds[number][1] < position:
            result.problem(f"rollouts[{number}] ends at offset {bounds[number][1]}, and was read up to {position}")
        gone = journal.offsets() - seen[number]
        for offset in sorted(gone):
            if offset >= lows[number]:
                result.problem(f"rollouts[{number}] offset {offset} is {journal.fate(offset)} and holds no record")
            elif journal.fate(offset) == IN_FLIGHT:
                result.problem(f"rollouts[{number}] offset {offset} is in flight and was deleted")
        deleted = sum(offset < lows[number] for offset in gone)
        settled = sum(journal.before.values())
        result.pruned += settled + deleted
        result.produced += len(seen[number]) + deleted + settled
        if settled or deleted:
            read = sum(count.rollouts for count in journal.produced)
            result.rollouts += read - journal.before[DEAD_LETTERED] - len(journal.offsets(DEAD_LETTERED))
        else:
            result.rollouts += rollouts[number]
    result.rollouts += sum(unread.values())
    result.produced += result.unread
    try:
        await_decided(kafka, topic, "the ledger is not whole", PATIENCE_S)
    except DeadlineExceeded:
        result.undecide("records that nobody has read yet", hidden.places("rollouts"))
    return in_flight
