"""A custom view of the log: the returns of episodes, by the policy version that played them.

It is filled like the buffers: a view needs only `position`, `add` and `skip`.
"""

from collections import Counter
from collections.abc import Mapping

import numpy as np

from rollstream import Trajectory


class Returns:
    """Returns of finished episodes. They are kept in memory, so each process reads the log from its beginning."""

    def __init__(self) -> None:
        self._position: dict[int, int] = {}
        self._open: dict[str, tuple[float, list[int]]] = {}
        """Reward so far, and the versions that played, of each unfinished episode."""
        self._finished: dict[int, list[float]] = {}
        self.counts: Counter[str] = Counter()
        """Number of finished episodes, by player: human or policy."""
        self.trajectories: Counter[str] = Counter()
        """Number of trajectories, by worker."""

    @property
    def position(self) -> Mapping[int, int]:
        return self._position

    def skip(self, at: tuple[int, int], /) -> None:
        self._position[at[0]] = at[1] + 1

    def add(self, trajectory: Trajectory, /, *, at: tuple[int, int]) -> None:
        """Add up the rewards of each episode, over all trajectories that it spans."""
        self.trajectories[trajectory.metadata.worker_id] += 1
        for span in trajectory.episodes:
            rows = slice(span.start, span.stop), span.column
            so_far, versions = self._open.pop(span.uid, (0.0, []))
            so_far += float(trajectory.arrays["rewards"][rows].sum())
            versions = [*versions, *np.unique(trajectory.arrays["versions"][rows]).tolist()]
            if not span.last:
                self._open[span.uid] = so_far, versions
            elif span.control_mode == 1:
                self.counts["human"] += 1
            else:
                self.counts["policy"] += 1
                self._finished.setdefault(min(versions), []).append(so_far)
        self.skip(at)

    def episodes(self, version: int) -> int:
        """Return the number of finished episodes whose lowest policy version is `version`."""
        return len(self._finished.get(version, ()))

    def mean(self, version: int) -> float:
        """Return the mean return of the episodes that `episodes` counts; NaN if there are none."""
        return float(np.mean(self._finished.get(version, [np.nan])))
