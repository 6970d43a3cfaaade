"""Trajectories as they are used: [T, B, ...] arrays in nested dicts, and how they become records and arrays again.

T chunk steps of B environments side by side; dones, terminations and truncations may have E more rows, one at the head
of each of E parts: the flags before its first step. Pure; what is wrong with one is said in plain words.
"""

import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from topics.arrays import RANK_LIMIT
from topics.errors import RecordError
from topics.records import EpisodeSpan, NamedArray, RolloutMetadata, TrajectoryRecord
from topics.validation import NAME_LIMIT

Tree = Mapping[str, Any]
"""Arrays by name, or mappings of them, to any depth."""

BOOTSTRAPPED = ("dones", "terminations", "truncations")
"""Arrays that may have bootstrap rows."""
SEPARATOR = "/"
DEPTH_LIMIT = 32
"""Most names of a path."""
ARRAYS_LIMIT = 4096
"""Most arrays of a trajectory."""
_PLAIN_FIELDS = ("uid", "environment", "policy_version", "model_weights_id", "max_episode_length")
CONTROL_MODES = (0, 1)
"""The policy; a human in the loop."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Trajectory:
    """What environments that run side by side went through: `arrays` are [T, B, ...].

    Names of the field: actions, intervene_flags, rewards, terminations, truncations, dones, prev_logprobs, prev_values,
    versions, and nested forward_inputs, curr_obs, next_obs; others are as welcome. None stands for an array that it
    does not have.
    """

    arrays: Tree
    environment: str = ""
    uid: str = field(default_factory=lambda: uuid.uuid4().hex)
    policy_version: int = -1
    model_weights_id: str = ""
    max_episode_length: int = 0
    episodes: tuple[EpisodeSpan, ...] = ()
    metadata: RolloutMetadata = field(default_factory=RolloutMetadata)
    extra: Mapping[str, str] = field(default_factory=dict)

    @property
    def shape(self) -> tuple[int, int] | None:
        """(T, B): that of prev_logprobs, else of rewards; None where there is neither.

        Raises RecordError where that has fewer than two dimensions.
        """
        for name in ("prev_logprobs", "rewards"):
            array = self.arrays.get(name)
            if array is not None:
                of = np.shape(array)
                if len(of) < 2:
                    raise RecordError(f"{name} has shape {of}, which must be [T, B, ...]")
                return int(of[0]), int(of[1])
        return None

    def problems(self) -> list[str]:
        """Everything wrong with it; empty where it is sound."""
        return examine(self)[1]


def flatten(tree: Tree) -> dict[str, Any]:
    """Leaves by path, in the tree's order. Raises RecordError for names that make no path."""
    return dict(_leaves(tree, ""))


def nest(leaves: Mapping[str, Any]) -> dict[str, Any]:
    """The tree of leaves by path. Raises RecordError where a path goes through a leaf."""
    tree: dict[str, Any] = {}
    for path, leaf in leaves.items():
        if problem := _path_problem(path):
            raise RecordError(problem)
        *above, name = path.split(SEPARATOR)
        node = tree
        for part in above:
            node = node.setdefault(part, {})
            if not isinstance(node, dict):
                break
        if not isinstance(node, dict) or name in node:
            raise RecordError(f"the array {path!r} lies within another, or another within it; rename one of them")
        node[name] = leaf
    return tree


def map_leaves(function: Callable[[Any], Any], tree: Tree) -> dict[str, Any]:
    """The same tree with `function` of each leaf."""
    return {
        name: map_leaves(function, value) if isinstance(value, Mapping) else function(value)
        for name, value in tree.items()
    }


def examine(trajectory: Trajectory) -> tuple[dict[str, Any], list[str]]:
    """Its leaves by path, none where names make no path, and everything wrong with it."""
    found = [
        f"{name} has {len(value)} characters, which must be 1 to {NAME_LIMIT}"
        for name, value in (("uid", trajectory.uid), ("environment", trajectory.environment))
        if not 0 < len(value) <= NAME_LIMIT
    ]
    try:
        leaves = flatten(trajectory.arrays)
    except RecordError as error:
        return {}, [*found, str(error)]
    if len(leaves) > ARRAYS_LIMIT:
        return {}, [*found, f"it has {len(leaves)} arrays, and may have {ARRAYS_LIMIT}"]
    return leaves, found + _shape_problems(trajectory, leaves)


def as_trajectory(item: Trajectory | Tree) -> Trajectory:
    """A trajectory as it is; of a mapping, one whose fields and arrays are those of the mapping, by name.

    Raises RecordError for fields that are not of their types.
    """
    if isinstance(item, Trajectory):
        return item
    if not isinstance(item, Mapping):
        raise RecordError(f"a {type(item).__name__} is no trajectory; give a Trajectory, or a dict of arrays by name")
    if isinstance(item.get("arrays"), Mapping):
        said = dict(item)
    else:
        said = {name: item[name] for name in _PLAIN_FIELDS if item.get(name) is not None}
        said["arrays"] = {name: value for name, value in item.items() if name not in _PLAIN_FIELDS}
    try:
        return Trajectory(**said)
    except TypeError as error:
        raise RecordError(f"a dict makes no trajectory ({error}); give its fields by their names") from error


def to_record(trajectory: Trajectory) -> TrajectoryRecord:
    """The record of a trajectory. Raises RecordError for one that is unsound, naming all that is wrong."""
    leaves, found = examine(trajectory)
    if found:
        raise RecordError(f"trajectory {trajectory.uid!r} of {trajectory.environment!r}: {'; '.join(found)}")
    return TrajectoryRecord(
        uid=trajectory.uid,
        environment=trajectory.environment,
        arrays={path: NamedArray.of(np.asarray(leaf)) for path, leaf in leaves.items()},
        policy_version=trajectory.policy_version,
        model_weights_id=trajectory.model_weights_id,
        max_episode_length=trajectory.max_episode_length,
        episodes=trajectory.episodes,
        metadata=trajectory.metadata,
        extra=trajectory.extra,
    )


def from_record(record: TrajectoryRecord) -> Trajectory:
    """The trajectory of a record; its arrays are read-only views. Raises RecordError for one that is unsound."""
    try:
        return _from_record(record)
    except (RecordError, MemoryError):
        raise
    except Exception as error:
        # What nobody foresaw is as wrong, and must not end whoever reads the log.
        raise RecordError(
            f"trajectory {record.uid!r} makes no arrays ({type(error).__name__}: {error})"[:200]
        ) from error


def _from_record(record: TrajectoryRecord) -> Trajectory:
    trajectory = Trajectory(
        arrays=nest({path: named.array() for path, named in record.arrays.items()}),
        environment=record.environment,
        uid=record.uid,
        policy_version=record.policy_version,
        model_weights_id=record.model_weights_id,
        max_episode_length=record.max_episode_length,
        episodes=record.episodes,
        metadata=record.metadata,
        extra=record.extra,
    )
    found = trajectory.problems()
    if found:
        raise RecordError(f"trajectory {record.uid!r} of {record.environment!r}: {'; '.join(found)}")
    return trajectory


def bootstrap_rows(rows: int, steps: int) -> int:
    """How many of `rows` rows of a bootstrapped array are bootstrap rows, where T is `steps`.

    Raises RecordError where there are fewer than T, or T cannot be parted into as many equal parts.
    """
    extra = rows - steps
    if extra < 0 or (extra and steps % extra):
        raise RecordError(
            f"{rows} rows of flags for {steps} steps: one bootstrap row may head each of some equal parts of the steps"
        )
    return extra


def aligned(array: NDArray[Any], steps: int) -> NDArray[Any]:
    """A bootstrapped array [T + E, ...] without the first row of each part: [T, ...]. Raises RecordError."""
    parts = bootstrap_rows(len(array), steps)
    if not parts:
        return array
    return array.reshape(parts, steps // parts + 1, *array.shape[1:])[:, 1:].reshape(steps, *array.shape[1:])


def _path_problem(path: str) -> str:
    """What is wrong with a path; "" for a sound one."""
    names = path.split(SEPARATOR)
    if len(names) > DEPTH_LIMIT or max(map(len, names)) > NAME_LIMIT:
        return (
            f"the array {path[:80]!r} has a path of {len(names)} names, the longest of {max(map(len, names))} "
            f"characters; there may be {DEPTH_LIMIT} names of {NAME_LIMIT} characters each"
        )
    return ""


def _leaves(tree: Tree, above: str) -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        if not isinstance(name, str) or not name or SEPARATOR in name:
            raise RecordError(f"{name!r} is no name of an array; give one that is not empty and has no {SEPARATOR!r}")
        path = f"{above}{name}"
        if problem := _path_problem(path):
            raise RecordError(problem)
        if value is None:
            continue
        # An array first: to ask whether something is a Mapping costs ten times as much.
        if not isinstance(value, np.ndarray) and isinstance(value, Mapping):
            yield from _leaves(value, f"{path}{SEPARATOR}")
        else:
            yield path, value


def _shape_problems(trajectory: Trajectory, leaves: Mapping[str, Any]) -> list[str]:
    try:
        shapes = {path: np.shape(leaf) for path, leaf in leaves.items()}
    except ValueError as error:
        return [str(error)]
    for path in ("prev_logprobs", "rewards"):
        if path in shapes and len(shapes[path]) < 2:
            return [f"{path} has shape {shapes[path]}, which must be [T, B, ...]"]
    shape = trajectory.shape
    if shape is None:
        shape = next((s[:2] for path, s in shapes.items() if len(s) > 1 and path not in BOOTSTRAPPED), None)
        if shape is None:
            return ["no array has a shape [T, B, ...]"]
    steps, width = shape
    deep = [
        f"{path} has {len(of)} dimensions, and may have {RANK_LIMIT}"
        for path, of in shapes.items()
        if len(of) > RANK_LIMIT
    ]
    found = [*deep, f"{steps} steps of {width} environments hold nothing"] if steps < 1 or width < 1 else deep
    for path, of in shapes.items():
        if len(of) < 2 or of[1] != width or (of[0] != steps and path not in BOOTSTRAPPED):
            found.append(f"{path} has shape {of}, which must begin with [{steps}, {width}]")
        elif of[0] != steps:
            try:
                bootstrap_rows(of[0], steps)
            except RecordError as error:
                found.append(f"{path}: {error}")
    return found + _episode_problems(trajectory.episodes, steps, width)


def _episode_problems(episodes: tuple[EpisodeSpan, ...], steps: int, width: int) -> list[str]:
    found = []
    ends: dict[int, int] = {}
    for span in sorted(episodes, key=lambda span: (span.column, span.start)):
        place = f"episode {span.uid!r}, rows {span.start} to {span.stop} of column {span.column}"
        if not span.uid or len(span.uid) > NAME_LIMIT:
            found.append(f"{place}: its uid must have 1 to {NAME_LIMIT} characters")
        if not (0 <= span.column < width and 0 <= span.start < span.stop <= steps):
            found.append(f"{place}, are not among {steps} rows of {width} columns")
        if span.start < ends.get(span.column, 0):
            found.append(f"{place}, overlap with another's")
        if span.control_mode not in CONTROL_MODES:
            found.append(f"{place}, has control mode {span.control_mode}, which must be 0 (policy) or 1 (human)")
        ends[span.column] = max(ends.get(span.column, 0), span.stop)
    return found
