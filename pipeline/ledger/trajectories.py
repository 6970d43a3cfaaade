"""The ledger of control tasks: what became of each record of `unlabelled`, how far fillers have read `trajectories`.

The cut: the positions of the labelling processes first, then `trajectories` and dead letters up to those; what lies
beyond is pending. The counts that are committed with the positions say how many there are of each fate: of what was
pruned they are all that is known.
"""

import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from confluent_kafka import KafkaException, Message, TopicPartition

from consumers.buffers.filling import filler_positions
from consumers.labelling.positions import Progress, refused_of, source_of
from pipeline.ledger.book import PATIENCE_S, Ledger
from pipeline.ledger.hidden import Hidden
from pipeline.ledger.letters import REDRIVEN
from pipeline.ledger.tail import Tail
from topics import clients
from topics.catalogue import topic_name
from topics.config import KafkaConfig
from topics.errors import RecordError
from topics.headers import header_pairs
from topics.records import TrajectoryRecord
from topics.skipped import SkippedRecords

_FATES = ("produced", "labelled", "left_out", "dead_lettered", "pending", "undecided", "pruned")


@dataclass
class _Partition:
    """One partition of `unlabelled`."""

    begin: int
    position: int | None
    """Next offset to be labelled; None where nobody has begun."""
    progress: Progress
    records: set[int] = field(default_factory=set)
    labelled: Counter[int] = field(default_factory=Counter)
    letters: Counter[int] = field(default_factory=Counter)

    def left_out(self) -> set[int]:
        """Records below the position that nothing was made of."""
        return {o for o in self.records if o < (self.position or 0)} - self.labelled.keys() - self.letters.keys()

    def fates(self) -> Counter[str]:
        """Records below the position, by fate: those of before counting began by the topics, the others as counted."""
        found = {"labelled": self.labelled.keys(), "dead_lettered": self.letters.keys(), "left_out": self.left_out()}
        if self.position is None:
            return Counter({fate: len(offsets) for fate, offsets in found.items()})
        before = {fate: sum(o < self.progress.since for o in offsets) for fate, offsets in found.items()}
        return Counter({fate: count + getattr(self.progress, fate) for fate, count in before.items()})

    def differences(self) -> list[str]:
        """Where the topics and the counts committed with the position disagree."""
        if self.position is None:
            return []
        pruned = self.begin > self.progress.since
        told = []
        found = {"labelled": self.labelled.keys(), "dead_lettered": self.letters.keys(), "left_out": self.left_out()}
        for fate, offsets in found.items():
            here, counted = sum(o >= self.progress.since for o in offsets), getattr(self.progress, fate)
            if here > counted or (here < counted and not pruned):
                name = fate.replace("_", " ")
                counts = f"{here} records are {name} by the topics, {counted} by what was committed with the position"
                told.append(f": {counts}")
        return told

    def problems(self) -> list[str]:
        """What does not add up, each to be put after the name of the partition."""
        told = self.differences()
        told += [
            f" offset {o} is labelled and dead-lettered" for o in sorted(self.labelled.keys() & self.letters.keys())
        ]
        for word, offsets in (("labelled", self.labelled), ("dead-lettered", self.letters)):
            told += [f" offset {o} is {word} {times} times" for o, times in sorted(offsets.items()) if times > 1]
        if self.position is None and (self.labelled or self.letters):
            told.append(" was labelled, and no position is committed: commit it again with `rollstream label recover`")
        return told


def check_trajectories(kafka: KafkaConfig, run: str, labeller: str, hidden: Hidden, result: Ledger) -> None:
    """Add what became of `unlabelled` and `trajectories` to a ledger, and name what does not add up."""
    # Before positions, as a janitor deletes up to where readers were then.
    begins = {p: begin for p, (begin, _end) in clients.bounds(kafka, topic_name(run, "trajectories")).items()}
    fillers = filler_positions(kafka, run)
    partitions = _partitions(kafka, run, labeller, hidden, result)
    skipped = SkippedRecords(logged=False)
    for message in clients.read_to_end(kafka, topic_name(run, "unlabelled")):
        partitions[message.partition() or 0].records.add(message.offset() or 0)
    trajectories, letters = Tail(kafka, run, "trajectories"), Tail(kafka, run, "dead-letters")
    records: dict[int, list[int]] = {p: [] for p in partitions}
    deadline = time.monotonic() + PATIENCE_S
    while True:
        for message in trajectories.messages():
            records[message.partition() or 0].append(message.offset() or 0)
            skipped.decode(TrajectoryRecord, message)
            with skipped.passing(message):
                _count(source_of(message), partitions, "labelled")
        _note_letters(letters.messages(), partitions, skipped)
        if not any(part.differences() for part in partitions.values()) or time.monotonic() > deadline:
            break
        time.sleep(0.1)
    result.note_skipped(skipped)
    _settle(partitions, hidden, result)
    _tell_fillers(fillers, records, begins, result)


def _partitions(kafka: KafkaConfig, run: str, labeller: str, hidden: Hidden, result: Ledger) -> dict[int, _Partition]:
    bounds = clients.bounds(kafka, topic_name(run, "unlabelled"))
    consumer = clients.reader(kafka, group=labeller)
    committed: dict[int, TopicPartition] = {}
    try:
        wanted = [TopicPartition(topic_name(run, "unlabelled"), p) for p in bounds]
        committed = {tp.partition: tp for tp in consumer.committed(wanted, PATIENCE_S)}
    except KafkaException:
        places = hidden.places("trajectories") or f"the offsets of group {labeller}"
        result.undecide("how far labelling has read unlabelled", places)
    finally:
        consumer.close()
    partitions = {}
    for number, (begin, _end) in bounds.items():
        place = committed.get(number, TopicPartition("", number))
        position = place.offset if place.offset >= 0 else None
        partitions[number] = _Partition(begin, position, Progress.decode(place))
        if committed and begin > (position or 0):
            result.problem(
                f"unlabelled[{number}] begins at offset {begin}, and group {labeller} has read up to {position or 0}: "
                f"{begin - (position or 0)} offsets were deleted unread"
            )
    return partitions


def _note_letters(messages: Iterable[Message], partitions: dict[int, _Partition], skipped: SkippedRecords) -> None:
    for message in messages:
        with skipped.passing(message):
            if REDRIVEN not in dict(header_pairs(message)):
                _count(refused_of(message), partitions, "letters")


def _count(place: tuple[int, int] | None, partitions: dict[int, _Partition], fate: str) -> None:
    """Note what became of a record below the position of its partition; where nobody began, of any."""
    if place is None:
        return
    number, offset = place
    if number not in partitions:
        raise RecordError(f"it names partition {number}, which unlabelled does not have")
    part = partitions[number]
    if part.position is None or offset < part.position:
        getattr(part, fate)[offset] += 1


def _settle(partitions: dict[int, _Partition], hidden: Hidden, result: Ledger) -> None:
    """Sum up by fate; what lies in an open transaction is undecided."""
    in_doubt: dict[int, set[int]] = {p: set() for p in partitions}
    for message in hidden.messages("trajectories"):
        with SkippedRecords(logged=False).passing(message):
            place = source_of(message)
            if place is not None and place[0] in in_doubt:
                in_doubt[place[0]].add(place[1])
    fates: Counter[str] = Counter(produced=0, labelled=0, left_out=0, dead_lettered=0, pending=0, undecided=0, pruned=0)
    for number, part in partitions.items():
        doubted = in_doubt[number] - part.labelled.keys()
        for offset in sorted(doubted):
            result.undecide(f"label of unlabelled[{number}] offset {offset}", hidden.places("trajectories"))
        # The position was committed with them, so these are known to be labelled though nobody sees them yet.
        part.labelled.update(offset for offset in doubted if offset < (part.position or 0))
        for problem in part.problems():
            result.problem(f"unlabelled[{number}]{problem}")
        pending = {offset for offset in part.records if offset >= (part.position or 0)}
        known = part.fates()
        fates += known
        fates["undecided"] += len(pending & doubted)
        fates["pending"] += len(pending - doubted)
        read = known.total()
        fates["pruned"] += max(0, read - (len(part.records) - len(pending)))
        fates["produced"] += read + len(pending)
    result.unlabelled = {name: fates[name] for name in _FATES}


def _tell_fillers(
    fillers: dict[str, dict[int, int]],
    records: dict[int, list[int]],
    begins: dict[int, int],
    result: Ledger,
) -> None:
    """How far each filler has read."""
    told = {}
    for name, positions in sorted(fillers.items()):
        waiting = sum(offset >= positions.get(p, 0) for p, offsets in records.items() for offset in offsets)
        told[name] = {"positions": dict(sorted(positions.items())), "waiting": waiting}
        for p, position in sorted(positions.items()):
            if position < begins.get(p, 0):
                result.problem(
                    f"trajectories[{p}] begins at offset {begins[p]}, and filler {name} has read up to {position}: "
                    f"{begins[p] - position} offsets were deleted unread"
                )
    result.trajectories = {
        "records": sum(map(len, records.values())),
        "pruned_offsets": sum(begins.values()),
        "fillers": told,
    }
