"""What a slice buffer knows of its ring: a fold over the records of its journal, and nothing else.

Whoever applies the same records, when it opens them or as they are written, knows the same.
"""

import numpy as np

from consumers.buffers.episode_cuts import EpisodePart
from consumers.buffers.episode_index import EpisodeIndex
from consumers.buffers.slice_journal import Added, Flushed, Record, Reserved, Run, Whole


class SliceState:
    """Episodes, open ones by uid, the counter of the next step, position and draws."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.index = EpisodeIndex()
        self.head = 0
        """Counter of the next step; as many were written so far."""
        self.low = 0
        """Steps below this counter are gone, or may be overwritten at any moment."""
        self.draws = 0
        self.position: dict[int, int] = {}
        self.open: dict[str, int] = {}
        """Episodes that go on, by uid."""
        self._uids: dict[int, str] = {}
        self._following = 0

    def apply(self, record: Record) -> None:
        """Move on by one record."""
        match record:
            case Added():
                for run in record.runs:
                    self._run(run)
                self._move(record.at)
                self.draws = max(self.draws, record.draws)
            case Reserved():
                self.forget(record.stop - self.capacity)
            case Flushed():
                self.draws = max(self.draws, record.draws)
            case Whole():
                self._become(record)
            case _:
                pass

    def added(self, parts: list[EpisodePart], at: tuple[int, int] | None) -> Added:
        """The record of these parts, in order: which episode each belongs to."""
        held: dict[str, int | None] = {}
        following, runs = self._following, []
        for part in parts:
            episode = None if part.first or not part.uid else held.get(part.uid, self.open.get(part.uid))
            if episode is None:
                episode, following = following, following + 1
            known = not part.last or part.uid in self.open or held.get(part.uid) is not None
            held[part.uid] = None if part.last else episode
            runs.append(Run(episode, part.steps, part.uid if known else "", part.last))
        return Added(tuple(runs), at, self.draws)

    def whole(self) -> Whole:
        """Everything, as one record."""
        columns = {name: column.astype("<i8").tobytes() for name, column in self.index.columns().items()}
        return Whole(columns, dict(self.open), dict(self.position), self.head, self.low, self._following, self.draws)

    def forget(self, below: int) -> None:
        """Steps below this counter are gone."""
        if below > self.low:
            self.low = below
            for episode in self.index.evict(below):
                self.open.pop(self._uids.pop(episode, ""), None)

    def _run(self, run: Run) -> None:
        self.index.extend(run.episode, self.head, run.steps)
        self.head += run.steps
        self._following = max(self._following, run.episode + 1)
        if run.uid:
            self._uids.pop(self.open.pop(run.uid, -1), None)
            if not run.last:
                self.open[run.uid], self._uids[run.episode] = run.episode, run.uid

    def _move(self, at: tuple[int, int] | None) -> None:
        if at is not None:
            partition, offset = at
            self.position[partition] = offset + 1

    def _become(self, whole: Whole) -> None:
        """Raises KeyError and ValueError for columns that are none."""
        self.index = EpisodeIndex.of({name: np.frombuffer(data, "<i8") for name, data in whole.columns.items()})
        self.head, self.low, self._following, self.draws = whole.head, whole.low, whole.following, whole.draws
        self.position, self.open = dict(whole.position), dict(whole.open)
        self._uids = {episode: uid for uid, episode in self.open.items()}
