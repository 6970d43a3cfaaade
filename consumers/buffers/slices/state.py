"""The state of a slice buffer's ring, which follows from the records of its journal alone.

Processes that apply the same records have the same state, whether they read or write the records.
"""

import numpy as np

from rollstream.consumers.buffers.slices.episode_cuts import EpisodePart
from rollstream.consumers.buffers.slices.episode_index import EpisodeIndex
from rollstream.consumers.buffers.slices.journal import (
    AddRecord,
    EpisodeSteps,
    FlushRecord,
    Record,
    ReserveRecord,
    SnapshotRecord,
)


class SliceState:
    """Episodes, open episodes by uid, the counter of the next step, position and number of draws."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.index = EpisodeIndex()
        self.head = 0
        """Counter of the next step: the number of steps written so far."""
        self.low = 0
        """Steps below this counter are overwritten, or may be at any moment."""
        self.draws = 0
        self.position: dict[int, int] = {}
        self.open: dict[str, int] = {}
        """Numbers of open episodes by uid."""
        self.taken: dict[int, tuple[str, ...]] = {}
        """Uids of the episodes that the newest record of each partition continued, ended or left open."""
        self._uids: dict[int, str] = {}
        self._following = 0

    def apply(self, record: Record) -> None:
        """Apply one record."""
        match record:
            case AddRecord():
                for run in record.runs:
                    self._extend(run)
                self._move(record.at, tuple(run.uid for run in record.runs if run.uid))
                self.draws = max(self.draws, record.draws)
            case ReserveRecord():
                self.forget(record.stop - self.capacity)
            case FlushRecord():
                self.draws = max(self.draws, record.draws)
            case SnapshotRecord():
                self._restore(record)
            case _:
                pass

    def add_record(self, parts: list[EpisodePart], at: tuple[int, int] | None) -> AddRecord:
        """Return the record that assigns these parts, in order, to episodes."""
        held: dict[str, tuple[int, int] | None] = {}
        """Number and next step of the episodes that the parts so far left open, by uid; None if they ended it."""
        following, runs = self._following, []
        for part in parts:
            before = held[part.uid] if part.uid in held else self._open_episode(part.uid)
            if before is not None and _continues(part, before[1]):
                episode, begin = before
            else:
                episode, begin, following = following, max(part.begin, 0), following + 1
            known = not part.last or not part.first or part.uid in self.open or held.get(part.uid) is not None
            held[part.uid] = None if part.last else (episode, begin + part.steps)
            runs.append(EpisodeSteps(episode, part.steps, part.uid if known else "", part.last, begin))
        return AddRecord(tuple(runs), at, self.draws)

    def snapshot(self) -> SnapshotRecord:
        """Return the whole state as one record."""
        columns = {name: column.astype("<i8").tobytes() for name, column in self.index.columns().items()}
        return SnapshotRecord(
            columns,
            dict(self.open),
            dict(self.position),
            self.head,
            self.low,
            self._following,
            self.draws,
            dict(self.taken),
        )

    def forget(self, below: int) -> None:
        """Forget the steps below this counter."""
        if below > self.low:
            self.low = below
            for episode in self.index.evict(below):
                self.open.pop(self._uids.pop(episode, ""), None)

    def _open_episode(self, uid: str) -> tuple[int, int] | None:
        """Number and next step of the open episode of a uid."""
        episode = self.open.get(uid)
        return None if episode is None else (episode, self.index.end_of(episode))

    def _extend(self, run: EpisodeSteps) -> None:
        self.index.extend(run.episode, self.head, run.steps, run.begin)
        self.head += run.steps
        self._following = max(self._following, run.episode + 1)
        if run.uid:
            self._uids.pop(self.open.pop(run.uid, -1), None)
            if not run.last:
                self.open[run.uid], self._uids[run.episode] = run.episode, run.uid

    def _move(self, at: tuple[int, int] | None, uids: tuple[str, ...]) -> None:
        if at is not None:
            partition, offset = at
            self.position[partition] = offset + 1
            self.taken[partition] = uids

    def _restore(self, snapshot: SnapshotRecord) -> None:
        """Restore a state. Raises KeyError or ValueError if the columns are not a valid episode index."""
        self.index = EpisodeIndex.of({name: np.frombuffer(data, "<i8") for name, data in snapshot.columns.items()})
        self.head, self.low, self._following, self.draws = (
            snapshot.head,
            snapshot.low,
            snapshot.following,
            snapshot.draws,
        )
        self.position, self.open, self.taken = dict(snapshot.position), dict(snapshot.open), dict(snapshot.taken)
        self._uids = {episode: uid for uid, episode in self.open.items()}


def _continues(part: EpisodePart, step: int) -> bool:
    """Whether a part continues an open episode whose next step is `step`: no trajectory between them is missing."""
    return bool(part.uid) and not part.first and part.begin in (-1, step)
