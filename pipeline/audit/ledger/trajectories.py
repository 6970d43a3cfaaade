"""The ledger of labeling: the fate of each record of `unlabelled`, and how far fillers have read `trajectories`.

It reads the positions of the labeling processes first, then `trajectories` and dead letters; records after these
positions are pending. The counts committed with the positions give the number of records of each fate, including pruned
records.
"""

from collections import Counter
from collections.abc import Iterable, Mapping

from rollstream.consumers.buffers.trajectories.filler import filler_positions
from rollstream.consumers.labeling.positions import refused_of, source_of
from rollstream.pipeline.audit.ledger.book import Ledger
from rollstream.pipeline.audit.ledger.dead_letters import REDRIVEN
from rollstream.pipeline.audit.ledger.topic_tail import PATIENCE_S, HiddenRecords, TopicTail, read_until_complete
from rollstream.pipeline.audit.offset_table import OffsetRuns, OffsetTable
from rollstream.topics.config import KafkaConfig
from rollstream.topics.errors import BrokerUnavailable, RecordError
from rollstream.topics.kafka import topic_admin
from rollstream.topics.kafka.labeling_progress import LabelingProgress
from rollstream.topics.kafka.reader import Reader
from rollstream.topics.kafka.records import GroupPosition
from rollstream.topics.kafka.skipped_records import SkippedRecords
from rollstream.topics.records import TrajectoryRecord
from rollstream.topics.wire.catalogue import topic_name

_SETTLED = ("labeled", "dead_lettered", "left_out")
_FATES = ("produced", "labeled", "left_out", "dead_lettered", "pending", "undecided", "pruned")
_MOST = 1 << 62
RECORD, LABELED, LETTERED = 1, 2, 4
"""Facts about an offset of `unlabelled`: its record was read, a labeled record names it, a dead letter names it."""


class UnlabelledPartition:
    """One partition of `unlabelled`, according to the records read from it and from topics that name its offsets."""

    def __init__(self) -> None:
        self.table = OffsetTable()
        self.times: dict[tuple[int, int], int] = {}
        """By fact (LABELED or LETTERED) and offset, how often other topics name the offset, if more than once."""
        self.begin = 0
        self.position: int | None = None
        """Next offset to be labeled; None if nothing is committed, or if the position is hidden."""
        self.hidden = False
        """Whether an open transaction hides the position."""
        self.progress = LabelingProgress(topic_id="")
        self._judged = self.table

    def place(self, begin: int, position: GroupPosition | None) -> None:
        """Set the first offset of the partition, and the position up to which it is labeled, None if it is hidden."""
        self.begin, self.hidden = begin, position is None
        self.position = position.offset if position is not None and position.offset >= 0 else None
        self.progress = LabelingProgress(topic_id="") if position is None else LabelingProgress.decode(position)

    def count(self, offset: int, fact: int) -> None:
        """Count one record of another topic that names an offset."""
        if self.table.set_bits_at(offset, fact) & fact:
            self.times[fact, offset] = self.times.get((fact, offset), 1) + 1

    def judge(self, assumed: Iterable[tuple[int, int]] = ()) -> None:
        """Determine the fates from the records read so far, and from `assumed` facts, each an offset and a fact, whose
        records no reader sees yet."""
        self._judged = OffsetTable(self.table.runs())
        for offset, fact in assumed:
            self._judged.set_bits_at(offset, fact)

    def of_fate(self, fate: str) -> OffsetRuns:
        """Return the offsets below the position with a fate; `left_out` means neither a label nor a dead letter."""
        runs, limit = self._judged.runs(), _MOST if self.position is None else self.position
        if fate == "left_out":
            return runs.where(runs.values == RECORD).clipped(self.begin, self.position or 0)
        fact = LABELED if fate == "labeled" else LETTERED
        return runs.where(runs.values & fact != 0).clipped(0, limit)

    def records(self, first: int, stop: int) -> OffsetRuns:
        """Return the records that the partition still holds, from `first` to before `stop`."""
        runs = self._judged.runs()
        return runs.where(runs.values & RECORD != 0).clipped(max(first, self.begin), stop)

    def fates(self) -> Counter[str]:
        """Return the number of records below the position by fate: from the topics up to where committed counts begin,
        and then from these counts."""
        if self.position is None:
            return Counter({fate: self.of_fate(fate).total for fate in _SETTLED})
        before = {fate: self.of_fate(fate).clipped(0, self.progress.since).total for fate in _SETTLED}
        return Counter({fate: count + getattr(self.progress, fate) for fate, count in before.items()})

    def differences(self) -> list[str]:
        """Return the differences between the topics and the counts committed with the position."""
        if self.position is None:
            return []
        pruned = self.begin > self.progress.since
        differences = []
        for fate in _SETTLED:
            present, counted = (
                self.of_fate(fate).clipped(self.progress.since, _MOST).total,
                getattr(self.progress, fate),
            )
            if present > counted or (present < counted and not pruned):
                differences.append(
                    f": {present} records are {fate.replace('_', ' ')} according to the topics, but {counted} "
                    f"according to the counts committed with the position"
                )
        return differences

    def problems(self) -> list[str]:
        """Return the contradictions, each as a text to append to the name of the partition."""
        problems = self.differences()
        labeled, lettered = self.of_fate("labeled"), self.of_fate("dead_lettered")
        both = labeled.where(labeled.values & LETTERED != 0)
        problems += [f" offset {o} is labeled and dead-lettered" for o in both.offsets()]
        for word, fact in (("labeled", LABELED), ("dead-lettered", LETTERED)):
            problems += [
                f" offset {o} is {word} {times} times"
                for (kind, o), times in sorted(self.times.items())
                if kind == fact and (self.position is None or o < self.position)
            ]
        if self.position is None and not self.hidden and (labeled.total or lettered.total or self.begin):
            why = "was labeled" if labeled.total or lettered.total else f"begins at offset {self.begin}"
            remedy = "commit it again with `rollstream role label recover`"
            problems.append(f" {why}, but no position is committed: {remedy}")
        return problems


class LabelingRecords:
    """The records of `unlabelled` and `trajectories`, and the records that name them, that have been read."""

    def __init__(self, kafka: KafkaConfig, run: str) -> None:
        self._kafka, self._run = kafka, run
        self.tail = TopicTail(kafka, run, "unlabelled")
        self.trajectories = TopicTail(kafka, run, "trajectories")
        self.letters = TopicTail(kafka, run, "dead-letters")
        self.rollouts = TopicTail(kafka, run, "rollouts")
        self._partitions: dict[int, UnlabelledPartition] = {}
        self._written: dict[int, OffsetTable] = {}
        """By partition of `trajectories`, the offsets of its records."""

    @property
    def labels(self) -> bool:
        """Whether rollouts may have been labeled, because `unlabelled` has or had records."""
        return any(part.begin or len(part.table.runs().starts) for part in self._partitions.values())

    def read(self, labeling_group: str, rollouts_end: Mapping[int, int], hidden: HiddenRecords, result: Ledger) -> None:
        """Read new records, and add the fates of `unlabelled`, the readers of `trajectories` and contradictions to a
        ledger. `rollouts_end` are the ends of the partitions of `rollouts` from before the call."""
        # Read the bounds before the positions, because a janitor deletes records up to the positions of readers.
        bounds = topic_admin.bounds(self._kafka, self.trajectories.topic)
        begins = {p: begin for p, (begin, _end) in bounds.items()}
        fillers = filler_positions(self._kafka, self._run)
        parts = self._partitions
        for number, (begin, position) in _positions(self._kafka, self._run, labeling_group, hidden, result).items():
            parts.setdefault(number, UnlabelledPartition()).place(begin, position)
        for message in self.tail.messages():
            parts[message.partition].table.set_bits_at(message.offset, RECORD)
        if not self.labels:
            self.rollouts.position = dict(rollouts_end)

        def read() -> list[str]:
            self._read_labels()
            for part in parts.values():
                part.judge()
            return [difference for part in parts.values() for difference in part.differences()]

        read_until_complete(read)
        _sum_up(parts, hidden, result)
        _add_fillers(fillers, self._written, begins, result)

    def _read_labels(self) -> None:
        for message in self.trajectories.messages():
            self._written.setdefault(message.partition, OffsetTable()).set_bits_at(message.offset, RECORD)
            self.trajectories.skipped.decode(TrajectoryRecord, message)
            with self.trajectories.skipped.passing(message):
                self._count(source_of(message), LABELED)
        for message in self.rollouts.messages() if self.labels else ():
            with self.rollouts.skipped.passing(message):
                self._count(source_of(message), LABELED)
        for message in self.letters.messages():
            with self.letters.skipped.passing(message):
                if REDRIVEN not in dict(message.header_pairs()):
                    self._count(refused_of(message), LETTERED)

    def _count(self, place: tuple[int, int] | None, fact: int) -> None:
        if place is None:
            return
        number, offset = place
        if number not in self._partitions or not 0 <= offset < _MOST:
            raise RecordError(f"it names partition {number} and offset {offset}, which unlabelled does not have")
        self._partitions[number].count(offset, fact)


def _positions(
    kafka: KafkaConfig, run: str, labeling_group: str, hidden: HiddenRecords, result: Ledger
) -> dict[int, tuple[int, GroupPosition | None]]:
    """Return the first offset of each partition of `unlabelled`, and the position that labeling has committed, None if
    an open transaction hides it."""
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
    for number, (begin, _end) in bounds.items():
        read = committed[number].offset if number in committed else -1
        if 0 <= read < begin:
            result.problem(
                f"unlabelled[{number}] begins at offset {begin}, and group {labeling_group} has read up to "
                f"{read}: {begin - read} offsets were deleted unread"
            )
    return {number: (begin, committed.get(number)) for number, (begin, _end) in bounds.items()}


def _sum_up(partitions: Mapping[int, UnlabelledPartition], hidden: HiddenRecords, result: Ledger) -> None:
    """Sum up records by fate; records whose label or dead letter is in an open transaction are undecided."""
    in_doubt: dict[int, set[tuple[int, int, str]]] = {p: set() for p in partitions}
    for topic, place_of, fact in (
        ("trajectories", source_of, LABELED),
        ("rollouts", source_of, LABELED),
        ("dead-letters", refused_of, LETTERED),
    ):
        for message in hidden.messages(topic):
            with SkippedRecords(logged=False).passing(message):
                redriven = fact == LETTERED and REDRIVEN in dict(message.header_pairs())
                place = None if redriven else place_of(message)
                if place is not None and place[0] in in_doubt and place[1] < _MOST:
                    in_doubt[place[0]].add((place[1], fact, topic))
    fates: Counter[str] = Counter(dict.fromkeys(_FATES, 0))
    for number, part in partitions.items():
        doubted = {(offset, fact) for offset, fact, _ in in_doubt[number] if not part.table[offset] & fact}
        for offset, fact, topic in sorted(in_doubt[number]):
            if (offset, fact) in doubted:
                what = "label" if fact == LABELED else "dead letter"
                result.undecide(f"{what} of unlabelled[{number}] offset {offset}", hidden.places(topic))
        position = part.position or 0
        # Records below the position were judged with it, even if no reader sees the judgement yet.
        part.judge((offset, fact) for offset, fact in doubted if offset < position)
        for problem in part.problems():
            result.problem(f"unlabelled[{number}]{problem}")
        pending = part.records(position, _MOST)
        doubted_offsets = {offset for offset, _fact in doubted if offset >= max(position, part.begin)}
        undecided = sum(bool(part.table[offset] & RECORD) for offset in doubted_offsets)
        known = part.fates()
        fates += known
        fates["undecided"] += undecided
        fates["pending"] += pending.total - undecided
        read = known.total()
        fates["pruned"] += max(0, read - part.records(0, position).total)
        fates["produced"] += read + pending.total
    result.unlabelled = {name: fates[name] for name in _FATES}


def _add_fillers(
    fillers: Mapping[str, Mapping[int, int]],
    written: Mapping[int, OffsetTable],
    begins: Mapping[int, int],
    result: Ledger,
) -> None:
    """Add to the ledger how far each filler has read."""
    readers = {}
    runs = {p: table.runs() for p, table in written.items()}
    for name, positions in sorted(fillers.items()):
        waiting = sum(offsets.clipped(positions.get(p, 0), _MOST).total for p, offsets in runs.items())
        readers[name] = {"positions": dict(sorted(positions.items())), "waiting": waiting}
        for p, position in sorted(positions.items()):
            if position < begins.get(p, 0):
                result.problem(
                    f"trajectories[{p}] begins at offset {begins[p]}, and filler {name} has read up to {position}: "
                    f"{begins[p] - position} offsets were deleted unread"
                )
    result.trajectories = {
        "records": sum(offsets.total for offsets in runs.values()),
        "pruned_offsets": sum(begins.values()),
        "fillers": readers,
    }
