"""Collects chunk steps of environments that run side by side into trajectories.

A trajectory has `steps` chunk steps, fewer if a record cannot hold them. An episode keeps its uid across trajectories.
`add` copies its arrays, because environments reuse them.

A step that cannot become a row of a trajectory is refused as a whole; the error names the arrays.
"""

import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollstream.topics.errors import ConfigurationError, RecordError, RecordTooLarge
from rollstream.topics.records import EpisodeSpan, RolloutMetadata
from rollstream.topics.records.arrays import dtype_name
from rollstream.topics.wire.codec import encode
from rollstream.topics.wire.keys import encode_key
from rollstream.topics.wire.trajectory_arrays import (
    BOOTSTRAPPED,
    CONTROL_MODES,
    Trajectory,
    Tree,
    flatten,
    nest,
    to_record,
)

Leaves = Mapping[str, NDArray[Any]]
"""Arrays [B, ...] by path."""

_ARRAYS = (
    "actions",
    "intervene_flags",
    "rewards",
    "terminations",
    "truncations",
    "dones",
    "prev_logprobs",
    "prev_values",
    "versions",
)
_TREES = ("forward_inputs", "curr_obs", "next_obs")


@dataclass(frozen=True, kw_only=True, eq=False)
class ChunkStepResult:
    """Result of one chunk step of B environments. Arrays are [B, ...]; fields that are None or empty are not recorded.

    A chunk of several actions has them along the second axis. `curr_obs` is the observation before the step and
    `next_obs` the observation after it: at the end of an episode, its last observation, not the first of the next one.
    """

    actions: Any
    terminations: Any = None
    """bool: the task ended."""
    truncations: Any = None
    """bool: a limit cut the episode off."""
    dones: Any = None
    """bool: the episode ended with this step; by default, true if it was terminated or truncated."""
    rewards: Any = None
    """None if a labeler provides them."""
    curr_obs: Any = None
    """A tree of arrays, or one array."""
    next_obs: Any = None
    prev_logprobs: Any = None
    """Log-probabilities of the actions when they were sampled."""
    prev_values: Any = None
    versions: Any = None
    """int: policy versions that acted; negative where no policy acted."""
    intervene_flags: Any = None
    """bool: whether a human acted."""
    forward_inputs: Tree = field(default_factory=dict)
    others: Tree = field(default_factory=dict)
    """Further arrays, by any names that are not fields of this class."""
    control_modes: Any = 0
    """Actor in an episode that begins with this step: 0 the policy, 1 a human; one number, or a list of B."""
    model_weights_id: str = ""
    """Name of the weights that acted."""


def leaves_of(step: ChunkStepResult, width: int) -> dict[str, NDArray[Any]]:
    """Return the arrays of a step by path, dones included, each [B, ...] where B is `width`.

    Raises RecordError, naming the arrays, if some do not fit, or if no array tells whether episodes ended.
    """
    tree = {name: value for name in _ARRAYS if (value := getattr(step, name)) is not None}
    tree |= {name: value for name in _TREES if (value := getattr(step, name)) is not None and not _is_empty(value)}
    if "dones" not in tree:
        ends = [np.asarray(tree[name], bool) for name in ("terminations", "truncations") if name in tree]
        if not ends:
            raise RecordError("a chunk step has none of dones, terminations and truncations; give at least one")
        tree["dones"] = np.logical_or.reduce(ends)
    twice = sorted(tree.keys() & step.others.keys())
    if twice:
        raise RecordError(f"others of a chunk step holds {', '.join(twice)}; set the fields of these names instead")
    arrays = {path: np.asarray(leaf) for path, leaf in flatten({**tree, **step.others}).items()}
    wrong = [problem for path, array in arrays.items() if (problem := _problem(path, array, width))]
    if wrong:
        raise RecordError(f"a chunk step of {width} environments is invalid: {'; '.join(wrong)}")
    return arrays


def control_modes_of(step: ChunkStepResult, width: int) -> list[int]:
    """Return the control mode of each column. Raises RecordError for invalid modes."""
    given = np.asarray(step.control_modes)
    modes = [given.item()] * width if given.ndim == 0 else given.tolist()
    if given.dtype.kind not in "biu" or given.ndim > 1 or len(modes) != width or not set(modes) <= set(CONTROL_MODES):
        raise RecordError(
            f"control_modes is {step.control_modes!r}; give 0 (policy) or 1 (human), or a list of {width} of these"
        )
    return [int(mode) for mode in modes]


def _is_empty(value: Any) -> bool:
    return isinstance(value, Mapping) and not value


def _problem(path: str, array: NDArray[Any], width: int) -> str:
    if array.ndim < 1 or len(array) != width:
        return f"{path} has shape {array.shape}, which must begin with [{width}]"
    try:
        dtype_name(array.dtype)
    except RecordError as error:
        return f"{path}: {error}"
    return ""


_LENGTHS_BYTES = 32
"""Largest growth, in bytes, of the numbers in an array's entry as rows are added."""
_SPAN_BYTES = 64
"""Largest size of a span without the incarnation in its uid."""


@dataclass
class _Episode:
    """The unfinished episode of a column."""

    uid: str
    control_mode: int
    start: int
    begin: int = 0
    """Number of steps in earlier trajectories."""
    first: bool = True


@dataclass
class _Rows:
    """Steps of the unfinished trajectory."""

    arrays: dict[str, NDArray[Any]]
    """[capacity, B, ...] by path."""
    before: dict[str, NDArray[Any]]
    """Flags before the first step: [B, ...] by path."""
    model_weights_id: str
    count: int = 0
    spans: list[EpisodeSpan] = field(default_factory=list)

    @property
    def capacity(self) -> int:
        return len(next(iter(self.arrays.values())))


class TrajectoryCollector:
    """Collects the chunk steps of `width` environments. Use it in one thread."""

    def __init__(
        self,
        environment: str,
        width: int,
        *,
        worker_id: str,
        steps: int = 80,
        max_bytes: int | None = None,
        bootstrap_rows: int = 1,
        max_episode_length: int = 0,
        replica_id: str = "unknown",
        incarnation: str | None = None,
        extra: Mapping[str, str] | None = None,
    ) -> None:
        """`max_bytes` (a TrajectoryProducer's `limit_bytes`) bounds the record of a trajectory.

        dones, terminations and truncations get `bootstrap_rows` more rows: the steps are divided into that many equal
        parts, each preceded by the flags before it. A shorter trajectory that cannot be divided equally has one part.
        `incarnation` is the prefix of episodes' uids and must differ at each start of a worker, as the default does.

        Raises ConfigurationError for settings that allow no trajectory.
        """
        if width < 1 or steps < 1 or bootstrap_rows < 0 or (bootstrap_rows and steps % bootstrap_rows):
            raise ConfigurationError(
                f"a collector cannot have {steps} steps of {width} environments and {bootstrap_rows} bootstrap rows; "
                "give at least one step and environment, and a number of steps that the bootstrap rows divide"
            )
        self._environment = environment
        self._width = width
        self._worker_id = worker_id
        self._replica_id = replica_id
        self._steps = steps
        self._max_bytes = max_bytes
        self._bootstrap_rows = bootstrap_rows
        self._max_episode_length = max_episode_length
        self._extra = dict(extra or {})
        self._incarnation = uuid.uuid4().hex[:12] if incarnation is None else incarnation
        self._layout: dict[str, tuple[np.dtype[Any], tuple[int, ...]]] = {}
        self._flags: dict[str, NDArray[Any]] = {}
        """Flags of the newest step."""
        self._episodes_begun = 0
        self._episodes: dict[int, _Episode] = {}
        self._rows: _Rows | None = None

    @property
    def pending(self) -> int:
        """Number of chunk steps that are not in a trajectory yet."""
        return 0 if self._rows is None else self._rows.count

    def add(self, step: ChunkStepResult) -> Trajectory | None:
        """Add one step; return the trajectory it completes, or None.

        Raises RecordError for arrays that are not of `width` environments or differ from earlier steps' arrays, and
        RecordTooLarge if a record has no room for a single step. Such a step is not added.
        """
        leaves, modes = leaves_of(step, self._width), control_modes_of(step, self._width)
        self._check(leaves)
        rows = self._rows or self._start(leaves, step)
        row = rows.count
        for path, array in leaves.items():
            rows.arrays[path][row] = array
        rows.count += 1
        self._rows = rows
        self._flags = {path: rows.arrays[path][row] for path in BOOTSTRAPPED if path in leaves}
        self._follow_episodes(rows, row, modes)
        return self._cut() if rows.count == rows.capacity else None

    def finish(self) -> Trajectory | None:
        """End all episodes, without setting a flag, and return the trajectory of the remaining steps; None if there are
        none.

        Call it at the end of a worker.
        """
        if self._rows is not None:
            for column in list(self._episodes):
                self._end(self._rows, column, last=True)
        self._episodes.clear()
        return self._cut() if self._rows is not None else None

    def _check(self, leaves: Leaves) -> None:
        """Raise RecordError if arrays differ from earlier steps' arrays."""
        layout = {path: (array.dtype, array.shape) for path, array in leaves.items()}
        if not self._layout:
            self._layout = layout
        if layout == self._layout:
            return
        wrong = [f"{path} is missing" for path in self._layout.keys() - layout.keys()]
        wrong += [f"{path} is new" for path in layout.keys() - self._layout.keys()]
        wrong += [
            f"{path} is {layout[path][0]} {list(layout[path][1])} and was {was[0]} {list(was[1])}"
            for path, was in self._layout.items()
            if path in layout and layout[path] != was
        ]
        raise RecordError(
            f"a chunk step differs from the steps before it: {'; '.join(sorted(wrong))}. Every step of a collector "
            "must have the same arrays"
        )

    def _start(self, leaves: Leaves, step: ChunkStepResult) -> _Rows:
        flags = {path: leaves[path] for path in BOOTSTRAPPED if path in leaves}
        before = {path: self._flags.get(path, np.zeros_like(array)).copy() for path, array in flags.items()}
        capacity = self._capacity(leaves, step.model_weights_id)
        arrays = {path: np.empty((capacity, *array.shape), array.dtype) for path, array in leaves.items()}
        return _Rows(arrays, before, step.model_weights_id)

    def _capacity(self, leaves: Leaves, model_weights_id: str) -> int:
        """Return how many steps always fit into a record, even if an episode begins in each column at each step."""
        if self._max_bytes is None:
            return self._steps
        single = self._trajectory({path: array[None] for path, array in leaves.items()}, (), model_weights_id)
        row_bytes = sum(array.nbytes for array in leaves.values())
        key_bytes = len(encode_key(self._environment, self._worker_id))
        fixed_bytes = len(encode(to_record(single))) - row_bytes + key_bytes + _LENGTHS_BYTES * (len(leaves) + 4)
        flags_bytes = sum(leaves[path].nbytes for path in BOOTSTRAPPED if path in leaves)
        fixed_bytes += self._bootstrap_rows * flags_bytes
        row_bytes += self._width * (len(self._incarnation.encode()) + _SPAN_BYTES)
        fit = (self._max_bytes - fixed_bytes) // row_bytes
        if fit < 1:
            raise RecordTooLarge(
                f"one chunk step of {self._width} environments needs {fixed_bytes + row_bytes} bytes, but a record of "
                f"{self._environment} holds {self._max_bytes}; run fewer environments side by side, make observations "
                "smaller, or raise kafka.max_record_bytes and run `rollstream topics apply`"
            )
        fit = min(fit, self._steps)
        parts = max(self._bootstrap_rows, 1)
        return fit - fit % parts if fit >= parts else fit

    def _follow_episodes(self, rows: _Rows, row: int, modes: list[int]) -> None:
        ended = rows.arrays["dones"][row].reshape(self._width, -1).astype(bool).any(axis=1)
        for column in range(self._width):
            if column not in self._episodes:
                self._episodes[column] = _Episode(f"{self._incarnation}-{self._episodes_begun}", modes[column], row)
                self._episodes_begun += 1
            if ended[column]:
                self._end(rows, column, last=True)
                del self._episodes[column]

    def _end(self, rows: _Rows, column: int, *, last: bool) -> None:
        """Add the span of a column's episode in the unfinished trajectory."""
        episode = self._episodes[column]
        rows.spans.append(
            EpisodeSpan(
                uid=episode.uid,
                column=column,
                start=episode.start,
                stop=rows.count,
                control_mode=episode.control_mode,
                first=episode.first,
                last=last,
                begin=episode.begin,
            )
        )

    def _cut(self) -> Trajectory:
        rows = self._rows
        assert rows is not None, "there is a step"
        for column, episode in self._episodes.items():
            self._end(rows, column, last=False)
            episode.begin += rows.count - episode.start
            episode.start, episode.first = 0, False
        # The caller owns the returned trajectory and may write to its arrays.
        self._flags = {path: array.copy() for path, array in self._flags.items()}
        arrays = {path: array[: rows.count] for path, array in rows.arrays.items()}
        for path, before in rows.before.items():
            arrays[path] = self._bootstrapped(arrays[path], before)
        self._rows = None
        spans = tuple(sorted(rows.spans, key=lambda span: (span.column, span.start)))
        return self._trajectory(arrays, spans, rows.model_weights_id)

    def _bootstrapped(self, flags: NDArray[Any], before: NDArray[Any]) -> NDArray[Any]:
        """Return flags [T, B, ...] with one more row at the head of each part: [T + E, B, ...]."""
        if not self._bootstrap_rows:
            return flags
        parts = self._bootstrap_rows if len(flags) % self._bootstrap_rows == 0 else 1
        heads = np.arange(parts) * (len(flags) // parts)
        # The flags before step i are those of step i - 1.
        return np.insert(flags, heads, np.concatenate([before[None], flags])[heads], axis=0)

    def _trajectory(
        self, arrays: Mapping[str, NDArray[Any]], spans: tuple[EpisodeSpan, ...], model_weights_id: str
    ) -> Trajectory:
        versions = arrays.get("versions", np.empty(0))
        acted = versions[versions >= 0]
        return Trajectory(
            arrays=nest(arrays),
            environment=self._environment,
            policy_version=int(acted.min()) if acted.size else -1,
            model_weights_id=model_weights_id,
            max_episode_length=self._max_episode_length,
            episodes=spans,
            metadata=RolloutMetadata(
                worker_id=self._worker_id, replica_id=self._replica_id, timestamp=time.time(), weight_step=-1
            ),
            extra=self._extra,
        )
