"""The conservation proof: every record of `rollouts` is in exactly one place, read from the topics alone.

It reads the steps first, then the position that the group committed for each partition, then the journal up to the
records that these commits name, and then batches and dead letters up to the end of that journal. Later records count as
unread. Each contradiction is reported as a problem with its partition and offset. The journal's cumulative counts
include pruned records.
"""

from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from rollstream.consumers.grouping.config import GrouperConfig
from rollstream.consumers.grouping.selection_bias import selections, with_skipped
from rollstream.consumers.labeling.config import LabelingConfig
from rollstream.consumers.log_view import ViewOutdated
from rollstream.pipeline.audit.configuration_history import configurations
from rollstream.pipeline.audit.ledger.batches import RecordedBatches
from rollstream.pipeline.audit.ledger.book import Ledger
from rollstream.pipeline.audit.ledger.calls import CallRecords
from rollstream.pipeline.audit.ledger.dead_letters import DeadLetters
from rollstream.pipeline.audit.ledger.evaluations import Evaluations
from rollstream.pipeline.audit.ledger.index import BatchIndex
from rollstream.pipeline.audit.ledger.journals import Journals, committed_cut
from rollstream.pipeline.audit.ledger.learners import Learners
from rollstream.pipeline.audit.ledger.rollouts import RolloutRecords
from rollstream.pipeline.audit.ledger.topic_tail import HiddenRecords, TopicTail
from rollstream.pipeline.audit.ledger.trajectories import LabelingRecords
from rollstream.pipeline.audit.partition_journal import IN_FLIGHT, PartitionJournal, environment_counts
from rollstream.topics.config import KafkaConfig
from rollstream.topics.control.named_records import RETIRED, note_named
from rollstream.topics.kafka import clients, topic_admin
from rollstream.topics.kafka.client_calls import OffsetGone
from rollstream.topics.kafka.skipped_records import SkippedRecords
from rollstream.topics.records import RetiredLearner
from rollstream.topics.records.fates import CONTROL, READ
from rollstream.topics.wire.catalogue import PRUNED, topic_name

_NO_ROLLOUTS = (READ, CONTROL)
"""Names of counts other than fates of rollouts."""
_ANEW = "reading again"
_READINGS = 4
"""Most readings in a row, each because records were deleted during the one before it."""
Bounds = dict[int, tuple[int, int]]
"""First offset of each partition of a topic, and the offset after its last."""


def ledger(kafka: KafkaConfig, run: str, group: str | None = None, labeling_group: str | None = None) -> Ledger:
    """Read a run's topics and prove, or disprove, that every record is in one place.

    `group` is the consumer group of the run's grouping processes and `labeling_group` is the consumer group of its
    labeling processes; each is needed only if it differs from the default.
    """
    clients.check_broker(kafka)
    return first_reading(kafka, run, group, labeling_group)[1]


def first_reading(
    kafka: KafkaConfig, run: str, group: str | None = None, labeling_group: str | None = None
) -> tuple["Books", Ledger]:
    """Read everything, as `ledger` does; begin again if records are deleted before they are read."""
    for _ in range(_READINGS - 1):
        books = Books(kafka, run, group, labeling_group)
        with suppress(OffsetGone, ViewOutdated):
            return books, books.read()
    books = Books(kafka, run, group, labeling_group)
    return books, books.read(although_pruned=True)


class Books:
    """The records of a run's topics that have been read, folded into the data that the ledger needs.

    A later reading continues from this state.
    """

    def __init__(
        self, kafka: KafkaConfig, run: str, group: str | None = None, labeling_group: str | None = None
    ) -> None:
        """Begin without records; the arguments are as in `ledger`."""
        self._kafka, self._run = kafka, run
        self._groups = group or GrouperConfig().group_id(run), labeling_group or LabelingConfig().group_id(run)
        partitions = topic_admin.partitions_of(kafka, topic_name(run, "rollouts"))
        self._begins: dict[str, dict[int, int]] = {}
        """First offset of each partition of each topic."""
        self._learners = Learners(kafka, run)
        self._journals = Journals(kafka, run, partitions)
        self._evaluations = Evaluations(kafka, run)
        self._batches = RecordedBatches(kafka, run)
        self._index = BatchIndex(kafka, run)
        self._letters = DeadLetters(kafka, run)
        self._rollouts = RolloutRecords(kafka, run, partitions)
        self._labeling = LabelingRecords(kafka, run)
        self._control = ControlRecords(kafka, run)
        self._calls = CallRecords(kafka, run)

    @property
    def subject(self) -> tuple[str, str, str]:
        """Run and groups that the records belong to."""
        return self._run, *self._groups

    @property
    def journals(self) -> Mapping[int, PartitionJournal]:
        """The journals of all partitions, with the fate of each offset."""
        return self._journals.of

    @property
    def positions(self) -> object:
        """How far each topic was read, and where it begins; the state changes only if this value changes."""
        return [dict(tail.position) for tail in (*self._tails.values(), *self._others)], self._begins

    @property
    def _parts(self) -> dict[str, Any]:
        return {
            "steps": self._learners,
            "journal": self._journals,
            "evals": self._evaluations,
            "batches": self._batches,
            "batch-index": self._index,
            "dead-letters": self._letters,
            "rollouts": self._rollouts,
            "unlabelled": self._labeling,
            "control": self._control,
            "calls": self._calls,
        }

    @property
    def _tails(self) -> dict[str, TopicTail]:
        """The reader of each topic, which continues where it stopped."""
        return {**{name: part.tail for name, part in self._parts.items()}, "trajectories": self._labeling.trajectories}

    @property
    def _others(self) -> tuple[TopicTail, ...]:
        """Additional readers of these topics."""
        return self._labeling.letters, self._labeling.rollouts

    def read(self, *, although_pruned: bool = False) -> Ledger:
        """Read the records since the last call; the first call reads all records.

        Raises ViewOutdated if the topics no longer hold what was read before, or if records are deleted meanwhile,
        unless `although_pruned`: topics that were read before may name them. Then, and after any other error, the
        caller must discard this object and create another.
        """
        result = self._read()
        names = {tail.topic: name for name, tail in self._tails.items() if name in PRUNED}
        if not although_pruned:
            self._check_begins(bounds_of(self._kafka, names))
        return result

    def _read(self) -> Ledger:
        kafka, run, (group, labeling_group) = self._kafka, self._run, self._groups
        result, hidden = Ledger(), HiddenRecords(kafka, run)
        bounds = self._look()
        named = self._learners.read()
        index_end = topic_admin.bounds(kafka, topic_name(run, "batch-index"))[0][1]
        # Use bounds from before the cut, because a janitor deletes records up to the position of the group.
        begins = _begins(bounds["rollouts"])
        journals = self._journals.of
        self._journals.read(kafka, self._cut(len(journals)), group, hidden, result)
        for partition in self._journals.added:
            first, end = bounds["rollouts"].get(partition, (0, 0))
            result.problem(
                f"rollouts[{partition}] was added after the run began, so no process ever reads its offsets {first} to "
                f"{end}; `rollstream fork` the run into another with more partitions"
            )
        evals = self._evaluations.read(result)
        read_before = {batch_id for batch_id in named if self._batches.rows(batch_id) is not None}
        undecided = self._batches.read(journals, evals, self._learners.untrained, hidden, result)
        self._batches.measure_again(read_before, self._learners.untrained)
        counts = (count for journal in journals.values() for count in journal.counts)
        result.selection = with_skipped(selections(counts), self._batches.skipped)
        self._index.check(journals, self._batches.table, undecided.places, index_end, hidden, result)
        self._letters.check(journals, hidden, result)
        self._control.read()
        in_flight = self._check_rollouts(begins, hidden, result)
        _sum_up(journals, in_flight, result)
        result.configurations = configurations((n, journal.configurations) for n, journal in journals.items())
        self._learners.check(self._batches.table, undecided.rows, journals, self._index.entries, index_end, result)
        for name in self._control.retired.keys() & result.learners.keys():
            result.learners[name]["retired"] = True
            result.learners[name].pop("waiting", None)
        ends = {p: end for p, (_begin, end) in bounds["rollouts"].items()}
        self._labeling.read(labeling_group, ends, hidden, result)
        self._calls.read(ends)
        self._calls.sum_up(result)
        for name, tail in self._tails.items():
            result.note_skipped(tail.skipped)
            for partition, (begin, _end) in bounds[name].items():
                tail.position.setdefault(partition, begin)
        for tail in self._others:
            result.note_skipped(tail.skipped)
        return result

    def _look(self) -> Mapping[str, Bounds]:
        """Return the bounds of each topic's partitions. Raises ViewOutdated unless the topics hold what was read."""
        names = {tail.topic: name for name, tail in self._tails.items()}
        ids, bounds = topic_admin.topic_ids(self._kafka, [*names]), bounds_of(self._kafka, names)
        for name, tail in self._tails.items():
            if tail.topic_id:
                tail.check_topic(tail.topic, ids[tail.topic], _ANEW)
            tail.topic_id = ids[tail.topic]
            tail.starts(tail.topic, bounds[name], _ANEW)
        self._check_begins(bounds if self._begins else {})
        self._begins = {name: _begins(limits) for name, limits in bounds.items()}
        return bounds

    def _check_begins(self, bounds: Mapping[str, Bounds]) -> None:
        for name, limits in bounds.items():
            if _begins(limits) != self._begins[name]:
                raise ViewOutdated(f"records of {name} were deleted, or partitions were added; {_ANEW}")

    def _cut(self, partitions: int) -> dict[int, int]:
        cut = committed_cut(self._kafka, self._run, self._groups[0], partitions)
        for partition, last in cut.items():
            if last < self._journals.tail.position.get(partition, 0) - 1:
                raise ViewOutdated(f"the group's position in partition {partition} went back")
        return cut

    def _check_rollouts(self, begins: Mapping[int, int], hidden: HiddenRecords, result: Ledger) -> int:
        """Compare rollouts with the journals; return the number of rollouts in flight."""
        kafka, topic, journals = self._kafka, topic_name(self._run, "rollouts"), self._journals.of
        topic_id = self._rollouts.tail.topic_id
        self._rollouts.read(journals, topic_id)
        bounds = topic_admin.bounds(kafka, topic)
        return self._rollouts.judge(journals, begins, bounds, topic_id, hidden, result)


def _sum_up(journals: Mapping[int, PartitionJournal], in_flight: int, result: Ledger) -> None:
    """Sum up records by fate: before the journal's first snapshot from its counts, after it from the offsets."""
    fates: Counter[str] = Counter()
    for journal in journals.values():
        fates += journal.before
        fates += journal.since
        result.in_flight += journal.in_flight().total
    result.place(fates)
    if result.dropped.pop("", 0):
        result.problem("records are dropped without a reason")
    open_by_environments = 0
    for environment, read in environment_counts(journals.values()).items():
        totals: dict[str, Any] = {}
        for name, counts in read.items():
            ended = {fate: counts[fate] for fate in sorted(counts) if fate not in _NO_ROLLOUTS and counts[fate]}
            totals[name] = {"produced": counts[READ], **ended, IN_FLIGHT: counts[READ] - sum(ended.values())}
        open_by_environments += totals["records"][IN_FLIGHT]
        if any(totals["records"].values()):
            result.environments[environment] = totals
    if open_by_environments != in_flight:
        result.problem(
            f"by the journal's counts, {open_by_environments} rollouts have no fate, but {in_flight} are in flight"
        )


class ControlRecords:
    """The decisions that have been read. Invalid records are ignored here; roles that read `control` report them."""

    def __init__(self, kafka: KafkaConfig, run: str) -> None:
        self.tail = TopicTail(kafka, run, "control")
        self.retired: dict[str, RetiredLearner] = {}

    def read(self) -> None:
        """Read new records."""
        skipped = SkippedRecords(logged=False)
        for message in self.tail.messages():
            note_named(self.retired, RETIRED, RetiredLearner, message, skipped)


def _begins(bounds: Bounds) -> dict[int, int]:
    return {partition: begin for partition, (begin, _end) in bounds.items()}


def bounds_of(kafka: KafkaConfig, names: Mapping[str, str]) -> dict[str, Bounds]:
    """Return the first offset of each partition and the offset after its last, by the name given for each topic."""
    client = clients.admin(kafka)
    places = [(topic, p) for topic in names for p in range(topic_admin.partitions_of(kafka, topic, client))]
    begins, ends = (topic_admin.offsets(kafka, places, which) for which in ("earliest", "latest"))
    bounds: dict[str, Bounds] = {name: {} for name in names.values()}
    for topic, partition in places:
        place = topic, partition
        bounds[names[topic]][partition] = begins[place].offset, ends[place].offset
    return bounds
