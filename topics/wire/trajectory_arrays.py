"""Trajectories: [T, B, ...] arrays in nested dicts, their validation, and their conversion to records and back.

A trajectory holds T chunk steps of B environments that run side by side. dones, terminations and truncations may have E
more rows: each of E equal parts of the steps then begins with a row of the flags before its first step. Pure.
"""

import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollstream.topics.errors import RecordError
from rollstream.topics.records import EpisodeSpan, NamedArray, RolloutMetadata, TrajectoryRecord
from rollstream.topics.records.arrays import RANK_LIMIT
from rollstream.topics.wire.validation import NAME_LIMIT

Tree = Mapping[str, Any]
"""Arrays by name, nested to any depth."""

BOOTSTRAPPED = ("dones", "terminations", "truncations")
"""Arrays that may have bootstrap rows."""
SEPARATOR = "/"
DEPTH_LIMIT = 32
"""Largest number of names in a path."""
ARRAYS_LIMIT = 4096
"""Largest number of arrays in a trajectory."""
_PLAIN_FIELDS = ("uid", "environment", "policy_version", "model_weights_id", "max_episode_length")
CONTROL_MODES = (0, 1)
"""0 for the policy, 1 for a human in the loop."""
_MOST_STEPS = 2**53
"""Most steps before a span; sums with numbers of rows stay far below the largest int64."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Trajectory:
    """Steps of environments that run side by side: `arrays` are [T, B, ...].

    Usual names: actions, intervene_flags, rewards, terminations, truncations, dones, prev_logprobs, prev_values,
    versions, and nested forward_inputs, curr_obs, next_obs. Other names are allowed. None stands for an absent array.
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
        """(T, B) of prev_logprobs, else of rewards; None if the trajectory has neither.

        Raises RecordError if that array has fewer than two dimensions.
        """
        for name in ("prev_logprobs", "rewards"):
            array = self.arrays.get(name)
            if array is not None:
                shape = np.shape(array)
                if len(shape) < 2:
                    raise RecordError(f"{name} has shape {shape}, which must be [T, B, ...]")
                return int(shape[0]), int(shape[1])
        return None

    def problems(self) -> list[str]:
        """Return everything wrong with the trajectory; empty if it is valid."""
        return examine(self)[1]


def flatten(tree: Tree) -> dict[str, Any]:
    """Return the leaves by path, in the tree's order. Raises RecordError for names that cannot form a path."""
    return dict(_leaves(tree, ""))


def nest(leaves: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tree of leaves by path. Raises RecordError if a path goes through a leaf."""
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
            raise RecordError(f"the array {path!r} is nested in another array, or contains another; rename one of them")
        node[name] = leaf
    return tree


def map_leaves(function: Callable[[Any], Any], tree: Tree) -> dict[str, Any]:
    """Return the same tree with `function` applied to each leaf."""
    return {
        name: map_leaves(function, value) if isinstance(value, Mapping) else function(value)
        for name, value in tree.items()
    }


def examine(trajectory: Trajectory) -> tuple[dict[str, Any], list[str]]:
    """Return the leaves of a trajectory by path, and everything wrong with it.

    There are no leaves if the names cannot form paths, or if there are too many arrays.
    """
    issues = [
        f"{name} has {len(value)} characters; it must have 1 to {NAME_LIMIT}"
        for name, value in (("uid", trajectory.uid), ("environment", trajectory.environment))
        if not 0 < len(value) <= NAME_LIMIT
    ]
    try:
        leaves = flatten(trajectory.arrays)
    except RecordError as error:
        return {}, [*issues, str(error)]
    if len(leaves) > ARRAYS_LIMIT:
        return {}, [*issues, f"it has {len(leaves)} arrays; it may have at most {ARRAYS_LIMIT}"]
    return leaves, issues + _shape_problems(trajectory, leaves)


def as_trajectory(item: Trajectory | Tree) -> Trajectory:
    """Return a trajectory unchanged, or make one from a mapping of its fields; the arrays may be items of the mapping.

    Raises RecordError if the item is neither, or has unknown fields.
    """
    if isinstance(item, Trajectory):
        return item
    if not isinstance(item, Mapping):
        raise RecordError(f"a {type(item).__name__} is not a trajectory; give a Trajectory or a dict of arrays by name")
    if isinstance(item.get("arrays"), Mapping):
        fields = dict(item)
    else:
        fields = {name: item[name] for name in _PLAIN_FIELDS if item.get(name) is not None}
        fields["arrays"] = {name: value for name, value in item.items() if name not in _PLAIN_FIELDS}
    try:
        return Trajectory(**fields)
    except TypeError as error:
        raise RecordError(f"the dict is not a trajectory ({error}); give the fields by their names") from error


def to_record(trajectory: Trajectory) -> TrajectoryRecord:
    """Return the record of a trajectory. Raises RecordError if it is invalid, naming everything wrong."""
    leaves, issues = examine(trajectory)
    if issues:
        raise RecordError(f"trajectory {trajectory.uid!r} of {trajectory.environment!r}: {'; '.join(issues)}")
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
    """Return the trajectory of a record; its arrays are read-only views. Raises RecordError if it is invalid."""
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
    issues = trajectory.problems()
    if issues:
        raise RecordError(f"trajectory {record.uid!r} of {record.environment!r}: {'; '.join(issues)}")
    return trajectory


def bootstrap_rows(rows: int, steps: int) -> int:
    """Return the number of bootstrap rows among `rows` rows of an array, where T is `steps`.

    Raises RecordError if there are fewer rows than T, or if T is not a multiple of the number of bootstrap rows.
    """
    extra = rows - steps
    if extra < 0 or (extra and steps % extra):
        raise RecordError(
            f"{rows} rows of flags for {steps} steps: each bootstrap row must begin one of several equal parts"
        )
    return extra


def aligned(array: NDArray[Any], steps: int) -> NDArray[Any]:
    """Return a bootstrapped array [T + E, ...] without the first row of each part: [T, ...].

    Raises RecordError as `bootstrap_rows` does.
    """
    parts = bootstrap_rows(len(array), steps)
    if not parts:
        return array
    return array.reshape(parts, steps // parts + 1, *array.shape[1:])[:, 1:].reshape(steps, *array.shape[1:])


def _path_problem(path: str) -> str:
    """Return what is wrong with a path; "" if it is valid."""
    names = path.split(SEPARATOR)
    if len(names) > DEPTH_LIMIT or max(map(len, names)) > NAME_LIMIT:
        return (
            f"the array {path[:80]!r} has a path of {len(names)} names, the longest of {max(map(len, names))} "
            f"characters; at most {DEPTH_LIMIT} names of {NAME_LIMIT} characters each are allowed"
        )
    return ""


def _leaves(tree: Tree, above: str) -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        if not isinstance(name, str) or not name or SEPARATOR in name:
            raise RecordError(f"{name!r} is not an array's name; give one that is not empty and has no {SEPARATOR!r}")
        path = f"{above}{name}"
        if problem := _path_problem(path):
            raise RecordError(problem)
        if value is None:
            continue
        # Test for an array first: the test for a Mapping costs ten times as much.
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
    issues = [
        f"{path} has {len(extent)} dimensions; it may have at most {RANK_LIMIT}"
        for path, extent in shapes.items()
        if len(extent) > RANK_LIMIT
    ]
    if steps < 1 or width < 1:
        issues.append(f"{steps} steps of {width} environments hold nothing")
    for path, extent in shapes.items():
        if len(extent) < 2 or extent[1] != width or (extent[0] != steps and path not in BOOTSTRAPPED):
            issues.append(f"{path} has shape {extent}, which must begin with [{steps}, {width}]")
        elif extent[0] != steps:
            try:
                bootstrap_rows(extent[0], steps)
            except RecordError as error:
                issues.append(f"{path}: {error}")
    return issues + _episode_problems(trajectory.episodes, steps, width)


def _episode_problems(episodes: tuple[EpisodeSpan, ...], steps: int, width: int) -> list[str]:
    issues = []
    ends: dict[int, int] = {}
    for span in sorted(episodes, key=lambda span: (span.column, span.start)):
        place = f"episode {span.uid!r}, rows {span.start} to {span.stop} of column {span.column}"
        if not span.uid or len(span.uid) > NAME_LIMIT:
            issues.append(f"{place}: its uid must have 1 to {NAME_LIMIT} characters")
        if not (0 <= span.column < width and 0 <= span.start < span.stop <= steps):
            issues.append(f"{place}: these rows are not within {steps} rows of {width} columns")
        if span.start < ends.get(span.column, 0):
            issues.append(f"{place}: these rows overlap with another episode")
        if span.control_mode not in CONTROL_MODES:
            issues.append(f"{place}: its control mode is {span.control_mode}, which must be 0 (policy) or 1 (human)")
        if not -1 <= span.begin <= _MOST_STEPS:
            issues.append(
                f"{place}: its episode has {span.begin} steps before them, which must be 0 to {_MOST_STEPS}, or -1 if "
                "it is unknown"
            )
        ends[span.column] = max(ends.get(span.column, 0), span.stop)
    return issues
