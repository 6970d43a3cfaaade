"""The ledger of control tasks: the fate of each record of `unlabelled`, and how far fillers have read `trajectories`.

The cut: the positions of the labeling processes first, then `trajectories` and dead letters up to those; records beyond
are pending. The counts committed with the positions give the number of records of each fate, pruned ones included.
"""

from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from rollstream.consumers.buffers.trajectories.filler import filler_positions
from rollstream.consumers.labeling.positions import refused_of, source_of
from rollstream.pipeline.audit.ledger.book import Ledger
from rollstream.pipeline.audit.ledger.dead_letters import REDRIVEN
from rollstream.pipeline.audit.ledger.hidden_records import HiddenRecords
from rollstream.pipeline.audit.ledger.topic_tail import PATIENCE_S, TopicTail, read_until_complete
from rollstream.topics.catalogue import topic_name
from rollstream.topics.config import KafkaConfig
from rollstream.topics.errors import BrokerUnavailable, RecordError
from rollstream.topics.kafka import topic_admin
from rollstream.topics.kafka.reader import Reader, read_to_end
from rollstream.topics.kafka.records import GroupPosition, KafkaRecord
from rollstream.topics.kafka.skipped_records import SkippedRecords
from rollstream.topics.labeling_progress import LabelingProgress
from rollstream.topics.records import TrajectoryRecord
from rollstream.topics.run_splits import moved_from

_FATES = ("produced", "labeled", "left_out", "dead_lettered", "pending", "undecided", "pruned")


@dataclass
class _UnlabelledPartition:
    """One partition of `unlabelled`."""

    begin: int
    position: int | None
    """Next offset to be labeled; None if nothing is committed."""
    progress: LabelingProgress
    records: set[int] = field(default_factory=set)
    labeled: Counter[int] = field(default_factory=Counter)
    letters: Counter[int] = field(default_factory=Counter)

    def left_out(self) -> set[int]:
        """Records below the position that were neither labeled nor dead-lettered."""
        return {o for o in self.records if o < (self.position or 0)} - self.labeled.keys() - self.letters.keys()

    def fates(self) -> Counter[str]:
        """Records below the position by fate: those from before counting began by the topics, later ones as counted."""
        offsets_by_fate = self._offsets()
        if self.position is None:
            return Counter({fate: len(offsets) for fate, offsets in offsets_by_fate.items()})
        before = {fate: sum(o < self.progress.since for o in offsets) for fate, offsets in offsets_by_fate.items()}
        return Counter({fate: count + getattr(self.progress, fate) for fate, count in before.items()})

    def differences(self) -> list[str]:
        """Differences between the topics and the counts committed with the position."""
        if self.position is None:
            return []
        pruned = self.begin > self.progress.since
        differences = []
        for fate, offsets in self._offsets().items():
            present, counted = sum(o >= self.progress.since for o in offsets), getattr(self.progress, fate)
            if present > counted or (present < counted and not pruned):
                differences.append(
                    f": {present} records are {fate.replace('_', ' ')} by the topics, {counted} by what was committed "
                    f"with the position"
                )
        return differences

    def _offsets(self) -> dict[str, Collection[int]]:
        return {"labeled": self.labeled.keys(), "dead_lettered": self.letters.keys(), "left_out": self.left_out()}

    def problems(self) -> list[str]:
        """Contradictions, each to be appended to the name of the partition."""
        problems = self.differences()
        problems += [
            f" offset {o} is labeled and dead-lettered" for o in sorted(self.labeled.keys() & self.letters.keys())
        ]
        for word, offsets in (("labeled", self.labeled), ("dead-lettered", self.letters)):
            problems += [f" offset {o} is {word} {times} times" for o, times in sorted(offsets.items()) if times > 1]
        if self.position is None and (self.labeled or self.letters):
            problems.append(
                " was labeled, and no position is committed: commit it again with `rollstream label recover`"
            )
        return problems


def check_trajectories(
    kafka: KafkaConfig, run: str, labeling_group: str, hidden: HiddenRecords, result: Ledger
) -> None:
    """Add the fates of `unlabelled` and the readers of `trajectories` to a ledger, with contradictions."""
    # Read before positions, because a janitor deletes up to the positions of readers.
    begins = {p: begin for p, (begin, _end) in topic_admin.bounds(kafka, topic_name(run, "trajectories")).items()}
    fillers = filler_positions(kafka, run)
    partitions = _partitions(kafka, run, labeling_group, hidden, result)
    skipped = SkippedRecords(logged=False)
    for message in read_to_end(kafka, topic_name(run, "unlabelled")):
        partitions[message.partition].records.add(message.offset)
    trajectories, letters = TopicTail(kafka, run, "trajectories"), TopicTail(kafka, run, "dead-letters")
    records: dict[int, list[int]] = {p: [] for p in partitions}
    # Without records that wait, or that were pruned, no rollout can have been labeled.
    labels = any(part.records or part.begin for part in partitions.values())
    rollouts = TopicTail(kafka, run, "rollouts") if labels else None

    def read() -> list[str]:
        for message in trajectories.messages():
            records[message.partition].append(message.offset)
            skipped.decode(TrajectoryRecord, message)
            with skipped.passing(message):
                _count(source_of(message), partitions, "labeled")
        for message in rollouts.messages() if rollouts else ():
            if moved_from(message) is not None:
                continue  # It was labeled in the run that was split into this one.
            with skipped.passing(message):
                _count(source_of(message), partitions, "labeled")
        _note_letters(letters.messages(), partitions, skipped)
        return [difference for part in partitions.values() for difference in part.differences()]

    read_until_complete(read)
    result.note_skipped(skipped)
    _sum_up(partitions, hidden, result)
    _add_fillers(fillers, records, begins, result)


def _partitions(
    kafka: KafkaConfig, run: str, labeling_group: str, hidden: HiddenRecords, result: Ledger
) -> dict[int, _UnlabelledPartition]:
    bounds = topic_admin.bounds(kafka, topic_name(run, "unlabelled"))
    topic = topic_name(run, "unlabelled")
    committed: dict[int, GroupPosition] = {}
    with Reader(kafka, group=labeling_group) as reader:
        try:
            positions = reader.committed(topic, bounds, f"reading offsets of group {labeling_group}", PATIENCE_S)
            committed = {position.partition: position for position in positions}
        except BrokerUnavailable:
            places = hidden.places("trajectories") or f"the offsets of group {labeling_group}"
            result.undecide("how far labeling has read unlabelled", places)
    partitions = {}
    for number, (begin, _end) in bounds.items():
        place = committed.get(number, GroupPosition(topic, number, -1))
        position = place.offset if place.offset >= 0 else None
        partitions[number] = _UnlabelledPartition(begin, position, LabelingProgress.decode(place))
        if committed and begin > (position or 0):
            result.problem(
                f"unlabelled[{number}] begins at offset {begin}, and group {labeling_group} has read up to "
                f"{position or 0}: {begin - (position or 0)} offsets were deleted unread"
            )
    return partitions


def _note_letters(
    messages: Iterable[KafkaRecord], partitions: dict[int, _UnlabelledPartition], skipped: SkippedRecords
) -> None:
    for message in messages:
        with skipped.passing(message):
            if REDRIVEN not in dict(message.header_pairs()):
                _count(refused_of(message), partitions, "letters")


def _count(place: tuple[int, int] | None, partitions: dict[int, _UnlabelledPartition], fate: str) -> None:
    """Count the fate of a record below the position of its partition; without a position, of any record."""
    if place is None:
        return
    number, offset = place
    if number not in partitions:
        raise RecordError(f"it names partition {number}, which unlabelled does not have")
    part = partitions[number]
    if part.position is None or offset < part.position:
        getattr(part, fate)[offset] += 1


def _sum_up(partitions: dict[int, _UnlabelledPartition], hidden: HiddenRecords, result: Ledger) -> None:
    """Sum up by fate; records of an open transaction are undecided."""
    in_doubt: dict[int, set[int]] = {p: set() for p in partitions}
    for message in (*hidden.messages("trajectories"), *hidden.messages("rollouts")):
        with SkippedRecords(logged=False).passing(message):
            place = source_of(message)
            if place is not None and place[0] in in_doubt:
                in_doubt[place[0]].add(place[1])
    fates: Counter[str] = Counter(produced=0, labeled=0, left_out=0, dead_lettered=0, pending=0, undecided=0, pruned=0)
    for number, part in partitions.items():
        doubted = in_doubt[number] - part.labeled.keys()
        for offset in sorted(doubted):
            result.undecide(
                f"label of unlabelled[{number}] offset {offset}",
                hidden.places("trajectories") or hidden.places("rollouts"),
            )
        # Labels below the position were committed with it, though no reader sees them yet.
        part.labeled.update(offset for offset in doubted if offset < (part.position or 0))
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


def _add_fillers(
    fillers: dict[str, dict[int, int]],
    records: dict[int, list[int]],
    begins: dict[int, int],
    result: Ledger,
) -> None:
    """Add how far each filler has read."""
    readers = {}
    for name, positions in sorted(fillers.items()):
        waiting = sum(offset >= positions.get(p, 0) for p, offsets in records.items() for offset in offsets)
        readers[name] = {"positions": dict(sorted(positions.items())), "waiting": waiting}
        for p, position in sorted(positions.items()):
            if position < begins.get(p, 0):
                result.problem(
                    f"trajectories[{p}] begins at offset {begins[p]}, and filler {name} has read up to {position}: "
                    f"{begins[p] - position} offsets were deleted unread"
                )
    result.trajectories = {
        "records": sum(map(len, records.values())),
        "pruned_offsets": sum(begins.values()),
        "fillers": readers,
    }
