"""One chunk step of environments that run side by side, as a player yields it, and its arrays by path.

A step that cannot become a row of a trajectory is refused as a whole; the error names the arrays.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollstream.topics.errors import RecordError
from rollstream.topics.records.arrays import dtype_name
from rollstream.topics.wire.trajectory_arrays import CONTROL_MODES, Tree, flatten

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
