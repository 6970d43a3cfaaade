"""Cuts trees of [T, ...] arrays, and the [T, B, ...] arrays of trajectories, into parts of episodes.

Pure functions. Two parts belong to one episode only if both have its uid, never because they are adjacent.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollstream.topics.errors import RecordError
from rollstream.topics.records.arrays import dtype_name
from rollstream.topics.wire.trajectory_arrays import BOOTSTRAPPED, Trajectory, Tree, aligned, flatten

Leaves = Mapping[str, NDArray[Any]]
"""Arrays by path, all of one length."""

CONTROL_MODE = "control_mode"
AUTO, HUMAN = 0, 1


@dataclass(frozen=True, kw_only=True)
class Boundaries:
    """Paths of the arrays that mark the ends of episodes; the first existing array is used."""

    episode: str = "episode"
    """Array of episode ids: a change of the id begins another episode."""
    done: tuple[str, ...] = ("done", "dones", "next/done")
    """Arrays that are True at the last step of an episode, used if there are no ids."""


@dataclass(frozen=True, kw_only=True, eq=False)
class EpisodePart:
    """Consecutive steps of one episode."""

    leaves: Leaves
    steps: int
    uid: str = ""
    """Uid of an episode whose parts arrive at different times; empty if this part is the whole episode."""
    first: bool = True
    """Whether a new episode begins here, even if an episode of this uid is open; if not, the open episode continues."""
    last: bool = True
    """Whether the episode ends here."""
    begin: int = -1
    """Number of steps of the episode before this part; -1 if it is unknown."""
    control_mode: int | None = None
    """Control mode of the first step, AUTO or HUMAN; None if it is unknown."""


def parts_of_episode(
    tree: Tree, boundaries: Boundaries, *, episode: str = "", first: bool = True, last: bool = True
) -> list[EpisodePart]:
    """Cut a tree of [T, ...] arrays, T at least 1, by ids or after each done flag; without them it is one episode.

    If `episode` is the uid of an episode that arrives in parts, the first part belongs to it, and with `last` False the
    last part stays open under that uid, unless its last step is done. Raises RecordError naming the problem.
    """
    leaves = _sound({path: np.asarray(leaf) for path, leaf in flatten(tree).items()})
    return _cut(leaves, boundaries, episode=episode, first=first, last=last)


def parts_of_trajectory(trajectory: Trajectory, boundaries: Boundaries) -> list[EpisodePart]:
    """Cut a trajectory, column by column, by its spans, whose uids tell which episodes continue. Without spans each
    column is cut by ids or after each done flag, and its last episode ends with the trajectory.

    Flags lose their bootstrap rows. Raises RecordError if the trajectory is invalid or does not mark the ends of
    episodes.
    """
    problems = trajectory.problems()
    if problems:
        raise RecordError(f"trajectory {trajectory.uid!r} of {trajectory.environment!r}: {'; '.join(problems)}")
    leaves: Leaves = {path: np.asarray(leaf) for path, leaf in flatten(trajectory.arrays).items()}
    steps, width = trajectory.shape or next(leaf.shape[:2] for path, leaf in leaves.items() if path not in BOOTSTRAPPED)
    leaves = _sound({path: aligned(leaf, steps) if path in BOOTSTRAPPED else leaf for path, leaf in leaves.items()})
    if not trajectory.episodes:
        if not _has_boundaries(leaves, boundaries):
            raise RecordError(
                f"trajectory {trajectory.uid!r} of {trajectory.environment!r} has no episode spans, and none of the "
                f"arrays {[boundaries.episode, *boundaries.done]} by which to cut it; add one of them"
            )
        return [
            part
            for column in range(width)
            for part in _cut({path: leaf[:, column] for path, leaf in leaves.items()}, boundaries)
        ]
    return [
        EpisodePart(
            leaves={path: leaf[span.start : span.stop, span.column] for path, leaf in leaves.items()},
            steps=span.stop - span.start,
            uid=span.uid,
            first=span.first,
            last=span.last,
            begin=span.begin,
            control_mode=span.control_mode,
        )
        for span in sorted(trajectory.episodes, key=lambda span: (span.column, span.start))
    ]


def _cut(
    leaves: Leaves, boundaries: Boundaries, *, episode: str = "", first: bool = True, last: bool = True
) -> list[EpisodePart]:
    ends = _ends(leaves, boundaries)
    steps, parts = len(ends), []
    for start, stop in _spans(ends):
        open_ended = bool(episode) and not last and stop == steps and not (_by_done(leaves, boundaries) and ends[-1])
        parts.append(
            EpisodePart(
                leaves={path: leaf[start:stop] for path, leaf in leaves.items()},
                steps=stop - start,
                uid=episode if start == 0 or open_ended else "",
                first=first or start > 0,
                last=not open_ended,
                control_mode=_mode_of(leaves, start),
            )
        )
    return parts


def _sound(leaves: Leaves) -> Leaves:
    """Return the leaves. Raises RecordError if they differ in length or cannot be stored."""
    if not leaves:
        raise RecordError("an episode has no arrays; add at least one of shape [T, ...]")
    for path, leaf in leaves.items():
        dtype_name(leaf.dtype)
        if not leaf.ndim or not leaf.size:
            raise RecordError(f"array {path!r} has shape {list(leaf.shape)}, which has no steps; it must be [T, ...]")
    lengths = {path: len(leaf) for path, leaf in leaves.items()}
    if len(set(lengths.values())) > 1:
        raise RecordError(f"the arrays of an episode have different numbers of steps: {lengths}")
    return leaves


def _by_done(leaves: Leaves, boundaries: Boundaries) -> bool:
    return boundaries.episode not in leaves


def _has_boundaries(leaves: Leaves, boundaries: Boundaries) -> bool:
    return any(path in leaves for path in (boundaries.episode, *boundaries.done))


def _ends(leaves: Leaves, boundaries: Boundaries) -> NDArray[np.bool_]:
    """Whether an episode ends at each step, by ids or done flags, [T]. Ids do not tell this for the last step."""
    steps = len(next(iter(leaves.values())))
    ends = np.zeros(steps, np.bool_)
    if not _by_done(leaves, boundaries):
        ids = leaves[boundaries.episode].reshape(steps, -1)
        ends[:-1] = (ids[1:] != ids[:-1]).any(1)
        return ends
    for path in boundaries.done:
        if path in leaves:
            flags = leaves[path].reshape(steps, -1).astype(np.bool_, copy=False)
            return flags[:, 0] if flags.shape[1] == 1 else np.asarray(flags.any(1))
    return ends


def _spans(ends: NDArray[np.bool_]) -> Iterator[tuple[int, int]]:
    stops: list[int] = [*(ends[:-1].nonzero()[0] + 1).tolist(), len(ends)]
    return zip([0, *stops[:-1]], stops, strict=True)


def _mode_of(leaves: Leaves, step: int) -> int | None:
    """Control mode of a step. Raises RecordError if it is not a single whole number."""
    leaf = leaves.get(CONTROL_MODE)
    if leaf is None:
        return None
    values = leaf[step].reshape(-1)
    number = values.size == 1 and leaf.dtype.kind in "biuf" and np.isfinite(values[0])
    if not number or values[0] != np.floor(values[0]):
        raise RecordError(f"{CONTROL_MODE} is {values[:8]} at step {step}; give one whole number for each step")
    return int(values[0])
