"""What of a run's log nobody needs any more: positions in, deletions out, with what each stops at. Pure.

Kept is what recovery reads, what the verification window is made of, what learners have yet to read, and of batches
and index what the journal that is kept tells of, so that the ledger closes and every index entry has its batch. Of
trajectories and of those that wait for labels what lies below every reader's position may go.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

TOPICS = ("rollouts", "journal", "batch-index", "batches", "unlabelled", "trajectories")
"""What is pruned, in the order it is: a run is consistent after each of them, should the next not be reached."""
CONTROL_TOPICS = ("unlabelled", "trajectories")
"""Those of control tasks."""
RECOVERY, WINDOW, ACCOUNT = "recovery", "verification window", "ledger"
NO_LABELLER, NO_FILLER = "no labeller on record", "no filler on record"
Place = tuple[str, int]
"""Topic and partition."""


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """A whole snapshot in the journal of one partition."""

    offset: int
    """Of its first record in the journal."""
    watermark: int
    """First offset of rollouts that folding on from it reads."""
    batch_number: int
    """Of the first batch cut after it."""
    journal_from: int | None
    """First offset of the journal that folding on from it needs; None where the log no longer holds all it needs."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """One partition as its group committed it."""

    watermark: int
    """First offset of rollouts a restore reads."""
    journal_from: int
    """First offset of the journal a restore reads."""
    snapshots: tuple[Snapshot, ...]
    """Oldest first."""


@dataclass(frozen=True, kw_only=True)
class Batch:
    """One entry of the index."""

    partition: int
    number: int
    offset: int
    """In its partition of batches."""
    index_offset: int
    time_ms: int = 0


@dataclass(frozen=True, kw_only=True)
class LastStep:
    """The newest step of a learner, and who has published since."""

    step: int
    time: float
    run: str
    """Whose steps and weights the learner writes."""
    replaced_by: str = ""
    """Learner that publishes into that run since; "" where it is this one."""


@dataclass(frozen=True, kw_only=True)
class Positions:
    """Where everything and everybody stands."""

    tasks: Mapping[int, Task]
    batches: tuple[Batch, ...]
    """In the order of the index."""
    learners: Mapping[str, int]
    """Offset of the index each learner may have to read again from, by what to call it."""
    begins: Mapping[Place, int]
    """First offset of each partition of each of `TOPICS`."""
    groups: Mapping[str, Mapping[Place, int]] = field(default_factory=dict)
    """What other consumer groups committed."""
    labeller: str = ""
    """Which of them is that of the labelling processes."""
    fillers: frozenset[str] = frozenset()
    """Which of them are those of fillers."""
    last_steps: Mapping[str, LastStep] = field(default_factory=dict)
    """Of the learners, by the same names."""
    skipped: tuple[str, ...] = ()
    """Records that could not be read, as they are reported."""


@dataclass(frozen=True, kw_only=True)
class Deletion:
    """Offsets of one partition from its first on; none where `to` is where it begins."""

    topic: str
    partition: int
    begin: int
    to: int
    """First offset that is kept."""
    why: str
    """What needs it."""

    @property
    def offsets(self) -> int:
        """How many go; some may be those of transactions instead of records."""
        return self.to - self.begin


def plan(positions: Positions, *, keep_batches: int, keep_from_ms: int | None = None) -> list[Deletion]:
    """What may go when the newest `keep_batches` batches, and all cut from a time on, shall stay verifiable.

    One deletion for each partition of each topic, in the order of `TOPICS`, empty ones included.
    """
    window = _window_begin(positions.batches, keep_batches, keep_from_ms)
    rollouts, journal, wanted = {}, {}, [(window, WINDOW)]
    for partition, task in positions.tasks.items():
        places = ("rollouts", partition), ("journal", partition)
        begin_of_rollouts, begin_of_journal = (positions.begins[place] for place in places)
        chosen = _before_window(task, partition, positions.batches, window)
        if chosen is None or chosen.journal_from is None:
            rollouts[partition], journal[partition] = (begin_of_rollouts, WINDOW), (begin_of_journal, WINDOW)
        else:
            rollouts[partition] = _least((task.watermark, RECOVERY), (chosen.watermark, WINDOW))
            journal[partition] = _least((task.journal_from, RECOVERY), (chosen.journal_from, WINDOW))
        rollouts[partition] = _least(rollouts[partition], *_of_groups(positions, *places[0]))
        journal[partition] = _least(journal[partition], *_of_groups(positions, *places[1]))
        account = next((s for s in task.snapshots if s.offset >= max(journal[partition][0], begin_of_journal)), None)
        number = 0 if account is None else account.batch_number
        told = next((b for b in positions.batches if b.partition == partition and b.number >= number), None)
        if told is not None:
            wanted.append((told.index_offset, ACCOUNT))
        for offset, group in _of_groups(positions, "batches", partition)[:-1]:
            unread = (b for b in positions.batches if b.partition == partition and b.offset >= offset)
            wanted += [(b.index_offset, group) for b in list(unread)[:1]]
    learners = ((position, learner) for learner, position in sorted(positions.learners.items()))
    kept, why = _least(*learners, *_of_groups(positions, "batch-index", 0), *wanted)
    stops: dict[Place, tuple[int, str]] = {("batch-index", 0): (_index_stop(positions.batches, kept), why)}
    for partition in positions.tasks:
        stops["rollouts", partition], stops["journal", partition] = rollouts[partition], journal[partition]
        stop = (_batches_stop(positions.batches, partition, kept), why)
        stops["batches", partition] = _least(stop, *_of_groups(positions, "batches", partition))
    stops |= _control_stops(positions)
    return [
        Deletion(topic=topic, partition=p, begin=begin, to=max(begin, stops[topic, p][0]), why=stops[topic, p][1])
        for (topic, p), begin in sorted(
            positions.begins.items(), key=lambda item: (TOPICS.index(item[0][0]), item[0][1])
        )
    ]


_END = 2**63 - 1


def _least(*found: tuple[int, str]) -> tuple[int, str]:
    """The lowest offset with what needs it, the first where several are as low."""
    return min(found, key=lambda item: item[0])


def _control_stops(positions: Positions) -> dict[Place, tuple[int, str]]:
    """Where the topics of control tasks stop: at the lowest position of a reader, and at the first offset where the
    readers they are for are not on record."""
    stops: dict[Place, tuple[int, str]] = {}
    labelled = positions.groups.get(positions.labeller, {})
    for place in positions.begins:
        topic, partition = place
        source = ("unlabelled", partition)
        if topic == "unlabelled":
            stops[place] = _least(*_of_groups(positions, *place)) if place in labelled else (0, NO_LABELLER)
        if topic == "trajectories":
            filled = any(place in positions.groups.get(filler, {}) for filler in positions.fillers)
            stops[place] = _least(*_of_groups(positions, *place)) if filled else (0, NO_FILLER)
            # Where positions of labelling are lost, they are found again by what was made of the records still there.
            if source in positions.begins and source not in labelled:
                stops[place] = (0, NO_LABELLER)
            elif source in stops and stops[source][0] < labelled[source]:
                stops[place] = (0, stops[source][1])
    return stops


def _window_begin(batches: Sequence[Batch], keep_batches: int, keep_from_ms: int | None) -> int:
    """Offset of the index the verification window begins at; beyond every entry where it is empty."""
    after = batches[-1].index_offset + 1 if batches else 0
    newest = batches[-keep_batches].index_offset if 0 < keep_batches <= len(batches) else after
    if keep_batches > len(batches):
        newest = 0
    if keep_from_ms is None:
        return newest
    return min(newest, next((b.index_offset for b in batches if b.time_ms >= keep_from_ms), after))


def _before_window(task: Task, partition: int, batches: Sequence[Batch], window: int) -> Snapshot | None:
    """The newest snapshot from which every batch of the partition within the window can be folded again."""
    first = next((b.number for b in batches if b.partition == partition and b.index_offset >= window), _END)
    usable = [s for s in task.snapshots if s.journal_from is not None and s.batch_number <= first]
    return usable[-1] if usable else None


def _of_groups(positions: Positions, topic: str, partition: int) -> list[tuple[int, str]]:
    """What other groups have yet to read of a partition; the last item stands for nobody, and is never the least."""
    place = (topic, partition)
    found = [(at[place], f"group {group}") for group, at in positions.groups.items() if place in at]
    return [*found, (_END, "")]


def _index_stop(batches: Sequence[Batch], kept: int) -> int:
    """Never beyond `kept`, though what lies between it and the next entry is no record: a reader may begin there."""
    return min(kept, batches[-1].index_offset + 1 if batches else 0)


def _batches_stop(batches: Sequence[Batch], partition: int, kept: int) -> int:
    """The first batch of a partition that the kept part of the index names; past its last where it names none."""
    mine = [b for b in batches if b.partition == partition]
    after = mine[-1].offset + 1 if mine else 0
    return next((b.offset for b in mine if b.index_offset >= kept), after)
